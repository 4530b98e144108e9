"""Convert decoded columns to what the user gets: mixed, as tensors on their device, page-locked.

It runs where batches are made: on the CPU that is a thread of its own, because page-locking a batch
takes tens of milliseconds, for which the training loop would otherwise wait in every step.

Large arrays for a GPU are read into page-locked memory and copied from there. torch allocates and
keeps that memory. Its pool reuses a block only when no tensor has it any more and the copies that
were begun from it, on any stream, are done: it waits for an event of each stream. It knows a block
by the storage of a tensor. So what is delivered are tensors of that storage (`tensor_of`), never
tensors around numpy's view of it.
"""

from __future__ import annotations

import contextlib
import logging
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from penstock.pipeline.feed.ragged import Ragged
from penstock.readers.fields import PRESENT, DenseColumn, ListColumn, RaggedColumn, is_number

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

    from penstock.pipeline.feed.batch import Batch, Output
    from penstock.readers.fields import Column, SampleBatch


def tensor_of(values: NDArray[Any]) -> torch.Tensor:
    """Numbers as a tensor that is the user's: in their own memory where that may be written to,
    else in a copy."""
    if not values.flags.writeable:
        return torch.from_numpy(values.copy())
    inside = None if values.base is None else in_storage(values)
    return torch.from_numpy(values) if inside is None else inside


def output_of(column: Column) -> Any:
    """A decoded column as a tensor, a `Ragged` or a list."""
    if isinstance(column, DenseColumn):
        return tensor_of(column.values)
    if isinstance(column, RaggedColumn):
        shapes = None if column.shapes is None else tensor_of(column.shapes)
        values, offsets = tensor_of(column.values), tensor_of(column.offsets)
        longest = int(np.diff(column.offsets).max(initial=0)) if shapes is None else None
        return Ragged(values, offsets, shapes, longest)
    assert isinstance(column, ListColumn), type(column)
    return column.samples


def map_tensors(value: Any, change: Callable[[Any], Any]) -> Any:
    """What is handed out for a field, changed where it consists of tensors."""
    return change(value) if isinstance(value, torch.Tensor | Ragged) else value


def in_storage(values: NDArray[Any]) -> torch.Tensor | None:
    """The same numbers as a tensor of the storage that they lie in; None where that is no
    tensor's, or where they don't lie end to end."""
    base = values.base
    while base is not None and not isinstance(base, torch.Tensor):
        base = getattr(base, "base", None)
    if base is None or base.dtype != torch.uint8 or base.ndim != 1 or not values.flags.c_contiguous:
        return None
    begin = values.ctypes.data - base.data_ptr()
    dtype = torch.from_numpy(values.reshape(-1)[:0]).dtype
    return base[begin : begin + values.nbytes].view(dtype).view(values.shape)


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


VALID = "valid"
"""What a padded batch has beside its fields."""


class Finisher:
    """Makes of a decoded batch what is handed out."""

    def __init__(
        self,
        fields: Sequence[str],
        *,
        mixed: Callable[[Batch], tuple[dict[str, torch.Tensor], SampleBatch]] | None,
        device: torch.device,
        memory: PageLocked | None,
        as_dict: bool = False,
    ) -> None:
        """fields: in the order in which batches have them. mixed: mixes the samples of a batch with
        one another; None where the recipe doesn't. memory: what large arrays were read into where
        there is a GPU to copy them to; what stays on the CPU is page-locked then. as_dict: hand out
        a dict by field, else a tuple."""
        self._fields, self._mixed, self._device = tuple(fields), mixed, device
        self._memory = memory
        self._pins = memory is not None and device.type == "cpu"
        self._as_dict = as_dict

    def begin(self) -> None:
        """Note the GPU of the thread that begins a pass."""
        if self._memory is not None:
            self._memory.begin()

    def __call__(self, batch: Batch) -> Output:
        """What is handed out of a decoded batch."""
        images, content = batch.images, batch.content
        if batch.mix is not None and self._mixed is not None:
            images, content = self._mixed(batch)
        values = [
            images[field] if field in images else self._placed(_value(field, batch, content))
            for field in self._fields
        ]
        names = self._fields
        if batch.valid is not None:
            values.append(self._placed(tensor_of(batch.valid)))
            names = (*names, VALID)
        if self._pins:
            assert self._memory is not None
            with self._memory.on_gpu():
                values = [map_tensors(value, _pinned) for value in values]
        return dict(zip(names, values, strict=True)) if self._as_dict else tuple(values)

    def _placed(self, value: Any) -> Any:
        if self._device.type == "cpu":
            return value
        return map_tensors(value, lambda each: each.to(self._device, non_blocking=True))


def _value(field: str, batch: Batch, content: SampleBatch) -> Any:
    """What is handed out for one field, other than images, on the CPU."""
    if is_number(field, content.columns):
        return tensor_of(content.ids)
    if field.endswith(PRESENT):
        present = content.present.get(field.removesuffix(PRESENT))
        return torch.ones(len(content), dtype=torch.bool) if present is None else tensor_of(present)
    filled = batch.filled.get(field)
    if filled is None:
        return output_of(content.columns[field])
    if isinstance(filled, RaggedColumn):
        return output_of(filled)
    return tensor_of(filled.values[: len(content)])


def _pinned(value: Any) -> Any:
    return value.pin_memory()  # itself where it is already
