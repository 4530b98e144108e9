"""A look at some values when a dataset is opened, where nothing else says what they are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.readers.fields.arrays import array_form
from penstock.readers.fields.field_types import Bytes
from penstock.readers.files.names import printable
from penstock.readers.formats.arrow.choice import refusal_of
from penstock.readers.formats.arrow.rows import EncodedRows, values_of
from penstock.readers.formats.arrow.types import PATHS_ALONE
from penstock.readers.formats.file_parts import read_parts
from penstock.readers.formats.parquet.chunk import ChunkForm, decode_chunk
from penstock.readers.formats.parquet.footer import CODEC, DECODED, NULLS, SIZE, START, VALUES

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from penstock.readers.fields.field_types import FieldType
    from penstock.readers.formats.arrow.types import ArrowColumn
    from penstock.readers.formats.parquet.footer import Footer
    from penstock.readers.origin.origin import Entry, Origin

_ROWS = 16
_MOST_BYTES = 2**28

Stored = tuple["Entry", "Footer", int]
"""A file, what its footer says, and the number of the leaf that a field is there."""


def first_values(origin: Origin, entry: Entry, footer: Footer, leaf: int) -> list[bytes]:
    """Some values of the first row group that has rows; none where it is very large. Raises
    ValueError for damage, and what reading raises."""
    group = int(np.flatnonzero(footer.rows)[0])
    if footer.chunks[group, leaf, SIZE] > _MOST_BYTES:
        return []
    ((_, table),) = _tables(origin, [(entry, footer, leaf, group)], Bytes(), None, workers=1)
    if isinstance(table, ValueError):
        raise table
    count = min(int(footer.rows[group]), _ROWS)
    values = EncodedRows(count)
    values.add(table, np.arange(count), range(count))
    return [sample.tobytes() for sample in values.samples]


def refused_by_values(
    origin: Origin,
    column: ArrowColumn,
    type: FieldType,
    files: Sequence[Stored],
    *,
    workers: int,
) -> str | None:
    """Why a column can't be a field although its type could, None where it can: lists with nulls
    inside, or that are no arrays; structs that hold paths alone.

    Reads what no statistics tell, up to 256 MiB of a column: nulls, which are noted in the footers
    then, and lists that may have nulls inside. Of lists in lists, and of lists afar, the first row
    group.
    """
    form = array_form(type)
    is_nested = form is not None and form.shape.count(None) > 1
    wanted: list[tuple[Entry, Footer, int, int]] = []
    total = 0
    for entry, footer, leaf in files:
        if footer.leaves[leaf].is_required:
            continue
        chunks = footer.chunks[:, leaf]
        is_flat = footer.leaves[leaf].is_flat
        # pyarrow's writer doesn't count the nulls of the structs around a dictionary.
        is_miscounted = column.in_dictionary and len(column.path) > 1
        untold = (chunks[:, NULLS] < 0) | is_miscounted
        unsure = untold if is_flat else (chunks[:, NULLS] != 0) | is_nested
        for group in np.flatnonzero(unsure & (footer.rows > 0)).tolist():
            total += int(chunks[group, SIZE])
            # Of lists afar one look: each further one is a request.
            is_enough = not is_flat and (not origin.is_local or not chunks[group, NULLS])
            if total <= _MOST_BYTES and not (wanted and is_enough):
                wanted.append((entry, footer, leaf, group))
    for (entry, footer, leaf, group), table in _tables(
        origin, wanted, type, column, workers=workers
    ):
        if isinstance(table, ValueError):  # its samples are bad ones, as are those of others
            continue
        if footer.leaves[leaf].is_flat or footer.chunks[group, leaf, NULLS] < 0:
            footer.chunks[group, leaf, NULLS] = values_of(table).null_count
        first = int(footer.rows[:group].sum())
        why = refusal_of(table, file=printable(entry.name), first=first)
        if why is not None:
            return why
    if column.is_media and files:
        nulls = sum(int(footer.chunks[:, leaf, NULLS].sum()) for _, footer, leaf in files)
        if nulls == sum(int(footer.rows.sum()) for _, footer, _ in files):
            return PATHS_ALONE
    return None


def _tables(
    origin: Origin,
    places: Sequence[tuple[Entry, Footer, int, int]],
    type: FieldType,
    column: ArrowColumn | None,
    *,
    workers: int,
) -> Iterator[tuple[tuple[Entry, Footer, int, int], Any]]:
    """The tables of some chunks: a leaf of a file in a row group; a ValueError for one that is
    damaged."""
    ranges = []
    for entry, footer, leaf, group in places:
        start = int(footer.chunks[group, leaf, START])
        ranges.append((entry, start, start + int(footer.chunks[group, leaf, SIZE])))
    read = read_parts(origin, ranges, workers=workers) if ranges else []
    for place, data in zip(places, read, strict=True):
        _, footer, leaf, group = place
        told, own = footer.chunks[group, leaf], footer.leaves[leaf]
        form = ChunkForm(
            path=own.path,
            elements=own.elements,
            physical=own.physical,
            parts=len(own.path if column is None else column.path),
            writer=footer.writer,
            codec=int(told[CODEC]),
            is_flat=own.is_flat,
            has_levels=not own.is_required,
            tensor=None if column is None else column.tensor,
        )
        try:
            yield (
                place,
                decode_chunk(
                    np.frombuffer(data, np.uint8),
                    form,
                    type,
                    rows=int(footer.rows[group]),
                    values=int(told[VALUES]),
                    decoded=int(told[DECODED]),
                    nulls=int(told[NULLS]),
                ),
            )
        except ValueError as error:
            yield place, error
