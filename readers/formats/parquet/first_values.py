"""A look at the first values of a binary column, where nothing says what they are."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from penstock.readers.fields.field_types import Bytes
from penstock.readers.formats.arrow.rows import EncodedRows
from penstock.readers.formats.file_parts import read_parts
from penstock.readers.formats.parquet.chunk import ChunkForm, decode_chunk
from penstock.readers.formats.parquet.footer import CODEC, DECODED, NULLS, SIZE, START, VALUES

if TYPE_CHECKING:
    from penstock.readers.formats.parquet.footer import Footer
    from penstock.readers.origin.origin import Entry, Origin

_ROWS = 16
_MOST_BYTES = 2**28


def first_values(origin: Origin, entry: Entry, footer: Footer, leaf: int) -> list[bytes]:
    """Some values of the first row group that has rows; none where it is very large. Raises
    ValueError for damage, and what reading raises."""
    group = int(np.flatnonzero(footer.rows)[0])
    told, column = footer.chunks[group, leaf], footer.leaves[leaf]
    if told[SIZE] > _MOST_BYTES:
        return []
    start = int(told[START])
    (data,) = read_parts(origin, [(entry, start, start + int(told[SIZE]))], workers=1)
    form = ChunkForm(
        path=column.path,
        elements=column.elements,
        physical=column.physical,
        parts=len(column.path),
        writer=footer.writer,
        codec=int(told[CODEC]),
        is_flat=column.is_flat,
        has_levels=not column.is_required,
    )
    rows = int(footer.rows[group])
    table = decode_chunk(
        np.frombuffer(data, np.uint8),
        form,
        Bytes(),
        rows=rows,
        values=int(told[VALUES]),
        decoded=int(told[DECODED]),
        nulls=int(told[NULLS]),
    )
    count = min(rows, _ROWS)
    values = EncodedRows(count)
    values.add(table, np.arange(count), range(count))
    return [sample.tobytes() for sample in values.samples]
