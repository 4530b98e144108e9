"""Pad ragged columns to dense ones, and split packed sequences into their documents.

A recipe requests this by `Pad` and `Unpack`. Both run on the reading threads, in numpy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.augment import Unpack
from penstock.cache import ConfigError, RecipeError
from penstock.readers.fieldtypes import DenseColumn, RaggedColumn

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.augment import Pad
    from penstock.pipeline.feed.batch import Batch
    from penstock.readers.fieldtypes import Column


@dataclass(frozen=True, slots=True)
class TooLongSample:
    """A sample that is longer than its `Pad` allows. row: in the batch. shape: of the sample."""

    row: int
    shape: tuple[int, ...]


def padded(column: RaggedColumn, pad: Pad) -> DenseColumn | TooLongSample:
    """Pad each sample of a column at its end; return the first sample that is too long instead."""
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
    """Return the documents of packed sequences.

    documents: the number of each token's document, -1 for padding. The tokens of a document are
    contiguous.
    """
    assert isinstance(column, DenseColumn)
    assert isinstance(documents, DenseColumn)
    numbers = documents.values
    begins = np.ones(numbers.shape, np.bool_)
    np.not_equal(numbers[:, 1:], numbers[:, :-1], out=begins[:, 1:])
    is_token = numbers >= 0
    firsts = np.flatnonzero(begins[is_token])
    return RaggedColumn(column.values[is_token], np.append(firsts, int(is_token.sum())))


def fill_value(pad: Pad, dtype: np.dtype[Any]) -> Any:
    """Return the padding value in a column's dtype. Raises RecipeError if it can't hold it."""
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
    """Return the error for a sample that is too long."""
    return ConfigError(
        f"{pad}: sample {sample} is longer: its shape is {found.shape}. Nothing is cut off: pass a "
        "larger to=, or to=None for the longest of each batch."
    )


@dataclass(frozen=True, slots=True)
class Pads:
    """Pads and unpacks the fields that a recipe names, on any thread.

    names: returns the names of samples by id, for errors.
    """

    pads: tuple[Pad | Unpack, ...] = ()
    names: Callable[[list[int]], list[str]] | None = None

    def __call__(self, batch: Batch) -> dict[str, DenseColumn | RaggedColumn]:
        """Return the changed columns of a batch. Raises ConfigError for a too long sample."""
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
