"""The number of the epoch that a torch dataset with set_epoch() was told."""

from __future__ import annotations

from typing import Any


class DatasetEpoch:
    """The epoch that a dataset stands at: by its attribute `epoch`, or as it was told here."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self._latest: int | None = None

    def now(self) -> int | None:
        """The epoch's number; None where the dataset knows no epochs, or none was told."""
        if not callable(getattr(self._dataset, "set_epoch", None)):
            return None
        epoch = getattr(self._dataset, "epoch", self._latest)
        return epoch if isinstance(epoch, int) else self._latest

    def tell(self, epoch: int, *others: Any) -> None:
        """Tell the dataset, and others that may know epochs, which one it is."""
        for target in (self._dataset, *others):
            tell = getattr(target, "set_epoch", None)
            if callable(tell):
                tell(epoch)
        self._latest = int(epoch)

    def tell_next(self, epoch: int) -> None:
        """Tell the epoch behind this one, if the loop has told the dataset this one's number.

        For a pass that goes on by itself with the next epoch.
        """
        is_told = epoch > 0 or self._latest == epoch
        if is_told and self.now() == epoch:
            self._dataset.set_epoch(epoch + 1)
            self._latest = epoch + 1

    def restore(self, epoch: int | None) -> None:
        """Tell what a state holds; None: it holds nothing."""
        tell = getattr(self._dataset, "set_epoch", None)
        if epoch is None or not callable(tell):
            return
        tell(epoch)
        if not hasattr(self._dataset, "epoch"):
            self._latest = epoch
