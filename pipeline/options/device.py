"""The torch device that a user names, if it exists here."""

from __future__ import annotations

import logging
import warnings
from typing import TYPE_CHECKING

from penstock.cache.errors import ConfigError, PenstockWarning

if TYPE_CHECKING:
    import torch

_LOG = logging.getLogger("penstock")


def parse_device(device: object, *, local_rank: int = 0) -> torch.device:
    """A torch device of type cpu or cuda that exists here. Raises ConfigError.

    local_rank: this process's place on its node; "cuda" without a number is its own device.
    """
    import torch

    try:
        parsed = torch.device(device)  # type: ignore[call-overload]
    except (RuntimeError, TypeError) as error:
        raise ConfigError(
            f'device={device!r} is not a torch device. Pass "cpu", "cuda" or "cuda:1".'
        ) from error
    if parsed.type == "cpu":
        return torch.device("cpu")
    if parsed.type != "cuda":
        raise ConfigError(f'device={device!r}: DALI decodes on "cpu" or "cuda" only.')
    if not torch.cuda.is_available():
        raise ConfigError(
            f'device={device!r}, but torch sees no CUDA device here. Pass device="cpu", or install '
            "a CUDA build of torch and check `nvidia-smi`."
        )
    index = _own_device(local_rank) if parsed.index is None else parsed.index
    if index >= torch.cuda.device_count():
        raise ConfigError(
            f"device={device!r}, but this machine has {torch.cuda.device_count()} CUDA device(s). "
            'Pass "cuda" for the current one.'
        )
    return torch.device("cuda", index)


def _own_device(local_rank: int) -> int:
    """torch's current device; that of the local rank where nobody has chosen one yet: else every
    rank of a node would fill the first GPU."""
    import torch

    current, count = torch.cuda.current_device(), torch.cuda.device_count()
    if current or not local_rank or count == 1:  # one is visible: the launcher gave each its own
        return current
    if local_rank < count:
        _LOG.info("device='cuda' is cuda:%d, as this is local rank %d.", local_rank, local_rank)
        return local_rank
    warnings.warn(
        f"device='cuda' is cuda:{current}, torch's current device: this is local rank "
        f"{local_rank}, and {count} devices are visible, so others may use the same. Call "
        "torch.cuda.set_device first, or pass device='cuda:N'.",
        PenstockWarning,
        stacklevel=4,
    )
    return current
