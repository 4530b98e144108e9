"""Fields whose values are noted where their samples are listed: no file is read for them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from crc32c import crc32c

from penstock.readers.fields.columns import DenseColumn, EncodedColumn, ListColumn, RaggedColumn
from penstock.readers.formats.summary import FieldNotes

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from penstock.readers.fields.columns import Column
    from penstock.readers.formats.layout import Storage


def notes_of(column: Column, storage: Storage, present: NDArray[np.bool_] | None) -> FieldNotes:
    """What goes into a manifest. present: which samples have the field, None for all."""
    if storage == "value":
        assert isinstance(column, DenseColumn)
        return FieldNotes(storage=storage, values=column.values, present=present)
    if isinstance(column, EncodedColumn):
        crcs = [crc32c(each) for each in column.samples]
        return FieldNotes(storage=storage, crcs=np.array(crcs, np.uint32), present=present)
    assert isinstance(column, DenseColumn | RaggedColumn)
    samples = [
        column.values[row] if isinstance(column, DenseColumn) else column.sample(row)
        for row in range(len(column))
    ]
    little = column.values.dtype.newbyteorder("<")
    flat = [np.ascontiguousarray(each, little).reshape(-1).view(np.uint8) for each in samples]
    lengths = np.array([each.shape for each in samples], np.int64)
    return FieldNotes(
        storage=storage,
        crcs=np.array([crc32c(each) for each in flat], np.uint32),
        shapes=lengths.reshape(len(samples), -1) if lengths.size else None,
        present=present,
    )


def as_noted(column: Column) -> Column:
    """A column as a sidecar that is read has it: texts are bytes."""
    if not isinstance(column, ListColumn):
        return column
    texts = [each.encode() if isinstance(each, str) else each for each in column.samples]
    return EncodedColumn([np.frombuffer(each, np.uint8) for each in texts])
