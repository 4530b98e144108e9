"""Page-locked memory for large arrays that go to a GPU: they are read into it, and copied from it.

torch makes and keeps it. Its pool gives a block out again only when no tensor has it any more and
the copies that were begun from it, on whatever stream, are done: an event of each stream tells.
It knows a block by the storage of a tensor, so what is handed out are tensors of that storage
(`tensors.tensor_of`), never ones around numpy's view of it.
"""

from __future__ import annotations

import contextlib
import logging
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy as np
    from numpy.typing import NDArray

_log = logging.getLogger("penstock")


class PageLocked:
    """Makes page-locked memory, on any thread. It belongs to the GPU of the thread that begins a
    pass: a new thread would take the first one's, and a context there."""

    def __init__(self, device: torch.device) -> None:
        """device: where batches go; the CPU where their user moves them."""
        self._device = device
        self._gpu: int | None = None
        self._failed = False

    @classmethod
    def of(cls, device: torch.device, *, pins: bool) -> PageLocked | None:
        """For batches of a loader; None where nothing is copied to a GPU. pins: its user wants
        batches on the CPU to be page-locked."""
        wanted = device.type == "cuda" or (pins and device.type == "cpu")
        return cls(device) if wanted and torch.cuda.is_available() else None

    def begin(self) -> None:
        """Note the GPU of this thread."""
        own = self._device.index if self._device.type == "cuda" else None
        self._gpu = torch.cuda.current_device() if own is None else own

    @contextlib.contextmanager
    def on_gpu(self) -> Iterator[None]:
        """Inside, this thread works for that GPU."""
        if self._gpu is None:
            yield
            return
        with torch.cuda.device(self._gpu):
            yield

    def __call__(self, size_bytes: int) -> NDArray[np.uint8] | None:
        """So many bytes; None where the machine gives no more."""
        if self._failed:
            return None
        try:
            with self.on_gpu():
                memory: Any = torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)
        except RuntimeError as error:
            self._failed = True
            _log.warning(
                "No page-locked memory for %s bytes (%s): batches are read into other memory, and "
                "copied to the GPU from there. A larger `ulimit -l` or a smaller batch helps.",
                f"{size_bytes:,}",
                error,
            )
            return None
        array: NDArray[np.uint8] = memory.numpy()
        return array
