"""Convert decoded columns to the user's output: mixed, as tensors on their device, page-locked.

Samples of different shapes become a `Ragged`: their values end to end, with the offset at which
each sample begins.

It runs on the thread that decodes. On the CPU that is a thread of its own, because page-locking a
batch takes tens of milliseconds, for which the training loop would otherwise wait in every step.

Large arrays for a GPU are read into page-locked memory and copied from there. torch allocates and
pools that memory. Its pool reuses a block only when no tensor uses it any more and the copies from
it have ended on all streams, for which it waits for an event of each stream. It identifies a block
by the storage of a tensor. Therefore delivered tensors share that storage (`tensor_of`) and never
wrap numpy's view of it.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, overload

import numpy as np
import torch

from penstock.cache import ConfigError
from penstock.readers.fieldtypes import PRESENT, DenseColumn, ListColumn, RaggedColumn, is_number

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

    from penstock.augment import Images
    from penstock.pipeline.feed.batch import Batch, Output
    from penstock.readers.fieldtypes import Column, SampleBatch


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Ragged:
    """A batch of n samples of different shapes: a sequence of tensors, stored end to end.

    values: shape (total, *rest) if the samples differ in their first length only, and flat,
    (total,), if they differ in others, too. offsets: int64, shape (n + 1,); sample i is
    values[offsets[i] : offsets[i + 1]]. shapes: int64, shape (n, dimensions), of each sample, if
    values are flat; otherwise None. longest: length of the longest sample in values, if it is
    known. All tensors are on one device. `torch.nested.nested_tensor_from_jagged(values, offsets)`
    accepts the first two unchanged.

    Iterating and indexing return one tensor per sample, each a view of values. On CUDA this waits
    for the device: once for a loop, and once for each index. Raises ConfigError for tensors that
    don't fit one another.
    """

    values: torch.Tensor
    offsets: torch.Tensor
    shapes: torch.Tensor | None = None
    longest: int | None = None

    def __post_init__(self) -> None:
        """Check the shapes and the dtype of the offsets, which needs no wait for the device."""
        if self.offsets.ndim != 1 or not len(self.offsets) or self.offsets.dtype != torch.int64:
            raise ConfigError(
                f"Ragged: got offsets of {self.offsets.dtype} and shape "
                f"{tuple(self.offsets.shape)}, wanted int64 of shape (samples + 1,)."
            )
        if self.shapes is not None and (
            self.shapes.ndim != 2 or len(self.shapes) != len(self) or self.values.ndim != 1
        ):
            raise ConfigError(
                f"Ragged: got shapes of shape {tuple(self.shapes.shape)} and values of shape "
                f"{tuple(self.values.shape)}, wanted ({len(self)}, dimensions) and flat values."
            )

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> torch.Tensor:
        """The length of each sample in values, int64, shape (n,)."""
        return self.offsets.diff()

    @property
    def cu_seqlens(self) -> torch.Tensor:
        """The offsets as int32, shape (n + 1,), for variable-length attention kernels."""
        return self.offsets.to(torch.int32)

    @property
    def max_length(self) -> int:
        """The length of the longest sample in values, for variable-length attention kernels.

        A loader computes it before it moves a batch to a device; otherwise this waits for the
        device.
        """
        if self.longest is not None:
            return self.longest
        return int(self.lengths.max()) if len(self) else 0

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the values."""
        return self.values.dtype

    @property
    def device(self) -> torch.device:
        """The device of all tensors."""
        return self.values.device

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(self.to_list())

    def to_list(self) -> list[torch.Tensor]:
        """Return one tensor per sample, each a view of values."""
        bounds = self.offsets.tolist()
        parts = [self.values[begin:end] for begin, end in pairwise(bounds)]
        if self.shapes is None:
            return parts
        shapes = self.shapes.tolist()
        return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]

    @overload
    def __getitem__(self, index: int) -> torch.Tensor: ...
    @overload
    def __getitem__(self, index: slice) -> Ragged: ...
    def __getitem__(self, index: int | slice) -> torch.Tensor | Ragged:
        """Return one sample, or several for a slice of step 1, as views."""
        if isinstance(index, slice):
            begin, end, step = index.indices(len(self))
            if step != 1:
                raise ConfigError(f"Ragged: got a slice of step {step}, wanted 1.")
            offsets = self.offsets[begin : max(begin, end) + 1]
            first, last = offsets[[0, -1]].tolist()
            shapes = None if self.shapes is None else self.shapes[begin : max(begin, end)]
            return Ragged(self.values[first:last], offsets - first, shapes)
        place = range(len(self))[index]  # raises IndexError, and counts from the end
        begin, end = self.offsets[place : place + 2].tolist()
        part = self.values[begin:end]
        return part if self.shapes is None else part.view(self.shapes[place].tolist())

    def to(self, device: torch.device | str | int, *, non_blocking: bool = False) -> Ragged:
        """Move all tensors to a device, as `torch.Tensor.to` does."""
        return self._mapped(lambda each: each.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Ragged:
        """Copy all tensors to page-locked memory, as `torch.Tensor.pin_memory` does."""
        return self._mapped(torch.Tensor.pin_memory)

    def _mapped(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Ragged:
        shapes = None if self.shapes is None else change(self.shapes)
        return Ragged(change(self.values), change(self.offsets), shapes, self.longest)

    def __repr__(self) -> str:
        many = "" if self.shapes is None else f", shapes {tuple(self.shapes.shape)}"
        return (
            f"Ragged({len(self)} samples, values {tuple(self.values.shape)} {self.dtype}{many}, "
            f"{self.device})"
        )


def tensor_of(values: NDArray[Any]) -> torch.Tensor:
    """Return numbers as a tensor that the user may change: without a copy if they are writable."""
    if not values.flags.writeable:
        return torch.from_numpy(values.copy())
    inside = None if values.base is None else in_storage(values)
    return torch.from_numpy(values) if inside is None else inside


def output_of(column: Column) -> Any:
    """Convert a decoded column to a tensor, a `Ragged` or a list."""
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
    """Apply a function to a field's output if it is a tensor, a `Ragged` or a list of tensors."""
    if isinstance(value, list) and value and isinstance(value[0], torch.Tensor):
        return [change(each) for each in value]
    return change(value) if isinstance(value, torch.Tensor | Ragged) else value


def to_device(value: Any, device: torch.device) -> Any:
    """Return a batch with every tensor on the device, in containers of the same kind."""
    if isinstance(value, torch.Tensor | Ragged):
        return value.to(device, non_blocking=True)
    if isinstance(value, Mapping):
        return type(value)({key: to_device(each, device) for key, each in value.items()})  # type: ignore[call-arg]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(to_device(each, device) for each in value))
    if isinstance(value, list | tuple):
        return type(value)(to_device(each, device) for each in value)
    return value


def in_storage(values: NDArray[Any]) -> torch.Tensor | None:
    """Return numbers as a tensor of the storage that contains them.

    None if that isn't the storage of a tensor, or if the numbers aren't contiguous.
    """
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
    """Allocates page-locked memory, on any thread.

    The memory belongs to the current GPU of the thread that begins a pass. A new thread would use
    the first GPU, and create a context there.
    """

    def __init__(self, device: torch.device) -> None:
        """device: of the batches; the CPU if the user moves them to a GPU."""
        self._device = device
        self._gpu: int | None = None
        self._failed = False

    @classmethod
    def of(cls, device: torch.device, *, pins: bool) -> PageLocked | None:
        """Return the allocator for a loader's batches; None if none are copied to a GPU.

        pins: the user wants batches on the CPU to be page-locked.
        """
        wanted = device.type == "cuda" or (pins and device.type == "cpu")
        return cls(device) if wanted and torch.cuda.is_available() else None

    def begin(self) -> None:
        """Record the current GPU of this thread."""
        own = self._device.index if self._device.type == "cuda" else None
        self._gpu = torch.cuda.current_device() if own is None else own

    @contextlib.contextmanager
    def on_gpu(self) -> Iterator[None]:
        """Make the recorded GPU the current one of this thread."""
        if self._gpu is None:
            yield
            return
        with torch.cuda.device(self._gpu):
            yield

    def __call__(self, size_bytes: int) -> NDArray[np.uint8] | None:
        """Allocate bytes; None if the machine has no more page-locked memory."""
        if self._failed:
            return None
        try:
            with self.on_gpu():
                memory: Any = torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)
        except RuntimeError as error:
            self._failed = True
            _log.warning(
                "No page-locked memory for %s bytes (%s): batches are read into pageable memory "
                "and copied to the GPU from there. A larger `ulimit -l` or a smaller batch helps.",
                f"{size_bytes:,}",
                error,
            )
            return None
        array: NDArray[np.uint8] = memory.numpy()
        return array


VALID = "valid"
"""The name of the mask that a padded batch has in addition to its fields."""


@dataclass(eq=False, repr=False)
class Finisher:
    """Converts a decoded batch to its output. is_anywhere: any thread may do so.

    fields: of a batch, in order. mixed: mixes the samples of a batch; None if the recipe
    doesn't. memory: the allocator of page-locked memory if batches are copied to a GPU; batches
    that stay on the CPU are then page-locked. as_dict: the output is a dict by field, else a
    tuple.
    """

    fields: tuple[str, ...]
    _: KW_ONLY
    mixed: Callable[[Batch], tuple[dict[str, Images], SampleBatch]] | None
    device: torch.device
    memory: PageLocked | None
    as_dict: bool = False

    def __post_init__(self) -> None:
        self._pins = self.memory is not None and self.device.type == "cpu"
        # Tensors on a GPU belong to the current stream of the thread that makes them.
        self.is_anywhere = self.mixed is None and self.memory is None and self.device.type == "cpu"

    def begin(self) -> None:
        """Record the current GPU of the thread that begins a pass."""
        if self.memory is not None:
            self.memory.begin()

    def __call__(self, batch: Batch) -> Output:
        """Convert a decoded batch to its output."""
        images, content = batch.images, batch.content
        if batch.mix is not None and self.mixed is not None:
            images, content = self.mixed(batch)
        names, values = self.fields, list[Any]()
        for field in names:
            if (own := images.get(field)) is None:
                values.append(self._placed(_value(field, batch, content)))
            else:
                values.append(own if isinstance(own, torch.Tensor) else [*own])
        if batch.valid is not None:
            values.append(self._placed(tensor_of(batch.valid)))
            names = (*names, VALID)
        if self._pins:
            assert self.memory is not None
            with self.memory.on_gpu():
                # A tensor that is pinned already is returned as it is.
                values = [map_tensors(value, lambda each: each.pin_memory()) for value in values]
        return dict(zip(names, values, strict=True)) if self.as_dict else tuple(values)

    def together(self, content: SampleBatch, bounds: Sequence[int]) -> list[Output] | None:
        """Convert the samples between bounds to outputs on the CPU; None if some fields aren't
        arrays of one shape. Each tensor has storage of its own, as in-place operations of torch
        require."""
        arrays = []
        for field in self.fields:
            column = content.columns.get(field)
            if is_number(field, content.columns):
                column = DenseColumn(content.ids)
            if not isinstance(column, DenseColumn):
                return None
            values = column.values
            arrays.append(values if values.flags.writeable else values.copy())
        outputs = [
            tuple([torch.from_numpy(values[a:b]) for values in arrays]) for a, b in pairwise(bounds)
        ]
        if not self.as_dict:
            return [*outputs]
        return [dict(zip(self.fields, values, strict=True)) for values in outputs]

    def _placed(self, value: Any) -> Any:
        return value if self.device.type == "cpu" else to_device(value, self.device)


def _value(field: str, batch: Batch, content: SampleBatch) -> Any:
    """Return the output of one field other than an image, on the CPU."""
    if is_number(field, content.columns):
        return tensor_of(content.ids)
    if field.endswith(PRESENT):
        return tensor_of(content.has(field.removesuffix(PRESENT)))
    filled = batch.filled.get(field)
    if filled is None:
        return output_of(content.columns[field])
    if isinstance(filled, RaggedColumn):
        return output_of(filled)
    return tensor_of(filled.values[: len(content)])
