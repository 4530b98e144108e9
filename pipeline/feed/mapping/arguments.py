"""What a user's function gets: the samples of a column as Python and numpy have them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.readers.fields.columns import DenseColumn, EncodedColumn, ListColumn, RaggedColumn
from penstock.readers.fields.decode import decode_mask, decode_text
from penstock.readers.fields.field_types import Mask, Text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from penstock.readers.fields.columns import Column
    from penstock.readers.fields.field_types import FieldType


def plain(column: Column, type: FieldType) -> Column:
    """A column without views on files: of what the reading threads haven't decoded bytes."""
    if not isinstance(column, EncodedColumn):
        return column
    if isinstance(type, Text):
        return ListColumn([decode_text(sample) for sample in column.samples])
    if isinstance(type, Mask):
        masks: list[Any] = [decode_mask(sample, type.dtype) for sample in column.samples]
        return ListColumn(masks)
    return ListColumn([sample.tobytes() for sample in column.samples])


def samples_of(column: Column) -> Sequence[Any]:
    """Each sample: str or bytes, a read-only array, or a numpy scalar."""
    if isinstance(column, DenseColumn):
        values = _private(column.values)
        return [values[row] for row in range(len(values))]
    if isinstance(column, RaggedColumn):
        own = replace(column, values=_private(column.values))
        return [own.sample(row) for row in range(len(own))]
    return [each if isinstance(each, str | bytes) else _private(each) for each in column.samples]


def stack_of(column: Column) -> Any:
    """All samples at once: a list, or where they share a shape a read-only array of them."""
    return _private(column.values) if isinstance(column, DenseColumn) else samples_of(column)


def _private(values: NDArray[Any]) -> NDArray[Any]:
    """A copy that can't be written to. Both: a tensor over it may be, and what is behind the
    original is the dataset's: a mapped file, or what stays in memory for the next epoch."""
    copy = values.copy()
    copy.flags.writeable = False
    return copy


def generators(keys: NDArray[np.uint64]) -> list[np.random.Generator]:
    """The samples' own random numbers, by their keys. keys: shape (n,)."""
    return [np.random.Generator(np.random.Philox(key=int(key))) for key in keys]
