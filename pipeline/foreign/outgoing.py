"""What a batch of a torch dataset gets on its way out: its device, the mask of its padding."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch


def to_device(batch: Any, device: torch.device) -> Any:
    """The batch with every tensor on the device, in containers of the same kind."""
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, Mapping):
        return type(batch)({key: to_device(value, device) for key, value in batch.items()})  # type: ignore[call-arg]
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(to_device(value, device) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(to_device(value, device) for value in batch)
    return batch


def with_valid(batch: Any, valid: torch.Tensor) -> Any:
    """The batch with the mask of its padded slots.

    That is last in a list or tuple, "valid" in a dict, else the second of a pair.
    """
    if isinstance(batch, Mapping):
        return {**batch, "valid": valid}
    if isinstance(batch, list):
        return [*batch, valid]
    if isinstance(batch, tuple):
        return (*batch, valid)
    return batch, valid
