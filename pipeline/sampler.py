"""The `sampler` that trainers look for: it tells the loader's order, and forwards set_epoch."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import torch.utils.data

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pipeline.loader import DataLoader


class PlanSampler(torch.utils.data.Sampler[int]):
    """Sample ids of this rank in the loader's current epoch, in order.

    For those who ask: the loader itself doesn't draw from it. Holds its loader weakly, so that a
    dropped loader stops its threads at once.
    """

    def __init__(self, loader: DataLoader) -> None:
        self._loader = weakref.ref(loader)

    def __iter__(self) -> Iterator[int]:
        loader = self._loader()
        if loader is not None:
            yield from loader.epoch_ids()

    def __len__(self) -> int:
        loader = self._loader()
        return 0 if loader is None else loader.epoch_samples()

    def set_epoch(self, epoch: int) -> None:
        """Forwards to the loader; trainers whose only epoch hook is `.sampler.set_epoch` use it."""
        loader = self._loader()
        if loader is not None:
            loader.set_epoch(epoch)
