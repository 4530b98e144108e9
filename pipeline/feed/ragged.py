"""Represent samples of different shapes as one batch: `Ragged`, or padded to a dense column.

`Ragged` stores the values end to end, with the offset at which each sample begins. Where a recipe
has `Pad`, ragged columns are padded instead; `Unpack` splits packed sequences into their documents.
Both run on the reading threads, in numpy.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, overload

import numpy as np
import torch

from penstock.augment import Unpack
from penstock.cache import ConfigError, RecipeError
from penstock.readers.fields import DenseColumn, RaggedColumn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from penstock.augment import Pad
    from penstock.pipeline.feed.batch import Batch
    from penstock.readers.fields import Column


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Ragged:
    """A batch of n samples of different shapes: a sequence of tensors, stored end to end.

    values: shape (total, *rest) where only the first length differs between samples, and flat,
    (total,), where others do too. offsets: int64, shape (n + 1,): sample i is values[offsets[i] :
    offsets[i + 1]]. shapes: int64, shape (n, dimensions), of each sample, where values are flat;
    else None. longest: length of the longest sample in values, where that is known. All lie on one
    device. `torch.nested.nested_tensor_from_jagged(values, offsets)`
    takes the first two as they are.

    len(), iterating and indexing give a tensor a sample, each a view of values. On CUDA that waits
    for the device, once for a loop and once for each index.
    """

    values: torch.Tensor
    offsets: torch.Tensor
    shapes: torch.Tensor | None = None
    longest: int | None = None

    def __post_init__(self) -> None:
        """Raises ConfigError for tensors that don't fit one another; it looks at shapes alone."""
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
        """Of each sample in values, int64, shape (n,)."""
        return self.offsets.diff()

    @property
    def cu_seqlens(self) -> torch.Tensor:
        """Cumulative lengths as kernels of attention over variable lengths take them: offsets as
        int32, shape (n + 1,)."""
        return self.offsets.to(torch.int32)

    @property
    def max_length(self) -> int:
        """Length of the longest sample in values, as those kernels take it. Of what a loader handed
        out it was found before anything went to a device; else this waits for the device."""
        if self.longest is not None:
            return self.longest
        return int(self.lengths.max()) if len(self) else 0

    @property
    def dtype(self) -> torch.dtype:
        """The type of the values."""
        return self.values.dtype

    @property
    def device(self) -> torch.device:
        """The device on which everything lies."""
        return self.values.device

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(self.to_list())

    def to_list(self) -> list[torch.Tensor]:
        """A tensor a sample, each a view of values."""
        bounds = self.offsets.tolist()
        parts = [self.values[begin:end] for begin, end in itertools.pairwise(bounds)]
        if self.shapes is None:
            return parts
        shapes = self.shapes.tolist()
        return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]

    @overload
    def __getitem__(self, index: int) -> torch.Tensor: ...
    @overload
    def __getitem__(self, index: slice) -> Ragged: ...
    def __getitem__(self, index: int | slice) -> torch.Tensor | Ragged:
        """One sample, or with a slice of step 1 some of them, as views."""
        if isinstance(index, slice):
            return self._slice(index)
        place = range(len(self))[index]  # raises IndexError, and counts from the end
        begin, end = self.offsets[place : place + 2].tolist()
        part = self.values[begin:end]
        return part if self.shapes is None else part.view(self.shapes[place].tolist())

    def _slice(self, some: slice) -> Ragged:
        begin, end, step = some.indices(len(self))
        if step != 1:
            raise ConfigError(f"Ragged: got a slice of step {step}, wanted 1.")
        end = max(begin, end)
        offsets = self.offsets[begin : end + 1]
        first, last = offsets[[0, -1]].tolist()
        shapes = None if self.shapes is None else self.shapes[begin:end]
        return Ragged(self.values[first:last], offsets - first, shapes)

    def to(self, device: torch.device | str | int, *, non_blocking: bool = False) -> Ragged:
        """The same on a device, as `torch.Tensor.to`."""
        shapes = self.shapes
        return Ragged(
            self.values.to(device, non_blocking=non_blocking),
            self.offsets.to(device, non_blocking=non_blocking),
            None if shapes is None else shapes.to(device, non_blocking=non_blocking),
            self.longest,
        )

    def pin_memory(self) -> Ragged:
        """The same in page-locked memory, as `torch.Tensor.pin_memory`."""
        shapes = None if self.shapes is None else self.shapes.pin_memory()
        values, offsets = self.values.pin_memory(), self.offsets.pin_memory()
        return Ragged(values, offsets, shapes, self.longest)

    def __repr__(self) -> str:
        many = "" if self.shapes is None else f", shapes {tuple(self.shapes.shape)}"
        return (
            f"Ragged({len(self)} samples, values {tuple(self.values.shape)} {self.dtype}{many}, "
            f"{self.device})"
        )


@dataclass(frozen=True, slots=True)
class TooLongSample:
    """A sample of a column that doesn't fit. row: in the batch. shape: of the sample."""

    row: int
    shape: tuple[int, ...]


def padded(column: RaggedColumn, pad: Pad) -> DenseColumn | TooLongSample:
    """The samples of a column, each filled up at its end; or the first that is too long."""
    several = column.shapes
    shapes = np.diff(column.offsets)[:, None] if several is None else several
    longest = shapes.max(axis=0, initial=0).tolist()
    wanted = pad.shape(shapes.shape[1])
    to = [long if each is None else each for each, long in zip(wanted, longest, strict=True)]
    longer = np.flatnonzero((shapes > to).any(axis=1))
    if len(longer):
        row = int(longer[0])
        return TooLongSample(row, column.sample(row).shape)
    rest = column.values.shape[1:]
    dtype = column.values.dtype
    out = np.full((len(column), *to, *rest), fill_value(pad, dtype), dtype)
    if several is not None:
        for row, shape in enumerate(shapes.tolist()):
            out[row][tuple(map(slice, shape))] = column.sample(row)
        return DenseColumn(out)
    lengths = shapes[:, 0]
    rows = np.repeat(np.arange(len(column)), lengths)
    out[rows, np.arange(len(rows)) - np.repeat(column.offsets[:-1], lengths)] = column.values
    return DenseColumn(out)


def unpacked(column: Column, documents: Column) -> RaggedColumn:
    """The documents of packed sequences. documents: number of each token's, -1 for what a sequence
    is filled up with; one document's tokens lie side by side."""
    assert isinstance(column, DenseColumn)
    assert isinstance(documents, DenseColumn)
    numbers = documents.values
    begins = np.ones(numbers.shape, np.bool_)
    np.not_equal(numbers[:, 1:], numbers[:, :-1], out=begins[:, 1:])
    there = numbers >= 0
    firsts = np.flatnonzero(begins[there])
    return RaggedColumn(column.values[there], np.append(firsts, int(there.sum())))


def fill_value(pad: Pad, dtype: np.dtype[Any]) -> Any:
    """What Pad fills with, in a column's dtype. Raises RecipeError where that can't hold it."""
    with np.errstate(all="ignore"):
        try:
            value = np.array(pad.value).astype(dtype)
        except OverflowError:
            value = None
    if value is None or (dtype.kind in "biu" and value != pad.value):
        raise RecipeError(
            f"{pad}: {dtype} can't hold value={pad.value!r}. Choose another value, or store "
            f"{pad.field!r} in a wider type."
        )
    return value


def too_long_error(pad: Pad, found: TooLongSample, *, sample: str) -> ConfigError:
    """The error for a sample that doesn't fit."""
    return ConfigError(
        f"{pad}: sample {sample} is longer: its shape is {found.shape}. Nothing is cut off: pass a "
        "larger to=, or to=None for the longest of each batch."
    )


@dataclass(frozen=True, slots=True)
class Pads:
    """Fills up the ragged fields of batches that a recipe names, and unpacks packed ones; on any
    thread.

    names: of samples by id, for errors.
    """

    pads: tuple[Pad | Unpack, ...] = ()
    names: Callable[[list[int]], list[str]] | None = None

    def __call__(self, batch: Batch) -> dict[str, DenseColumn | RaggedColumn]:
        """Other columns of a batch. Raises ConfigError for a sample that is too long."""
        filled: dict[str, DenseColumn | RaggedColumn] = {}
        for pad in self.pads:
            column = batch.content.columns[pad.field]
            if isinstance(pad, Unpack):
                filled[pad.field] = unpacked(column, batch.content.columns[pad.by])
                continue
            assert isinstance(column, RaggedColumn), pad.field
            found = padded(column, pad)
            if isinstance(found, TooLongSample):
                sample_id = int(batch.content.ids[found.row])
                name = f" ({self.names([sample_id])[0]})" if self.names is not None else ""
                raise too_long_error(pad, found, sample=f"{sample_id}{name}")
            filled[pad.field] = found
        return filled
