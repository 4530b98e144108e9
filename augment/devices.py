"""Which device a graph runs on: what a caller asked for, checked against what torch sees."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypedDict

from penstock.cache.errors import ConfigError

if TYPE_CHECKING:
    from penstock.augment.nodes import Device


class DeviceChoice(TypedDict):
    """The two arguments of a `GraphPlan` that say where it runs. device_id: None on the CPU."""

    device: Device
    device_id: int | None


def checked_device(device: str, device_id: int | None) -> DeviceChoice:
    """The device to run on. device_id: CUDA ordinal, None: torch's current one.

    Raises ConfigError for a device that isn't there.
    """
    if device == "cpu":
        return {"device": "cpu", "device_id": None}
    if device != "cuda":
        raise ConfigError(f'device: got {device!r}, wanted "cpu" or "cuda".')
    import torch

    if not torch.cuda.is_available():
        raise ConfigError(
            'device="cuda": torch sees no GPU here. Pass device="cpu", or check the driver and '
            "CUDA_VISIBLE_DEVICES, and that torch is a CUDA build."
        )
    count = torch.cuda.device_count()
    number = torch.cuda.current_device() if device_id is None else device_id
    if not 0 <= number < count:
        raise ConfigError(f'device="cuda:{number}": this process sees {count} GPU(s), from 0.')
    return {"device": "cuda", "device_id": number}
