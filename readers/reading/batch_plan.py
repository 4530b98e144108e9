"""Plan the reads of one batch: fields by how they are stored, samples by shard."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from penstock.cache import ConfigError
from penstock.readers.fieldtypes import ArrayForm, DenseColumn, from_bits

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from penstock.readers.formats import OpenShard, SampleLayout, SpanPlace
    from penstock.readers.reading.open_shards import OpenShards

    Ints = NDArray[np.int64]


class BatchFields:
    """The fields that a batch gets, by how they are stored.

    fields: all, in order. names, places, forms: of the fields that are spans. dense: fields that
    are read by rows and whose samples have one shape. rows: the other fields that are read by rows,
    with their forms if they are arrays. has_arrays: some spans are arrays. has_chunks: some fields
    lie in chunks. masked: fields in chunks that some samples lack; they are among rows.
    values_of: the column of the shards' tables, and the dtype, of fields that are numbers in them.
    may_be_plain: all fields are dense or numbers, and no sample lacks one. are_never_empty: each
    span has bytes. needs_table: some values come from the shards' tables.
    """

    def __init__(self, layout: SampleLayout, fields: Sequence[str]) -> None:
        """Raises ConfigError for fields that aren't in the schema."""
        for name in fields:
            if name not in layout.schema:
                raise ConfigError(f"fields: got {name!r}, wanted one of {list(layout.schema)}.")
        self.fields, self._layout = tuple(fields), layout
        spans = [name for name in fields if layout.storage[name] == "span"]
        self.names = tuple(spans)
        self.places: tuple[SpanPlace, ...] = tuple(layout.table.spans[name] for name in spans)
        self.forms: tuple[ArrayForm | None, ...] = tuple(layout.schema[name].form for name in spans)
        self.has_arrays = any(form is not None for form in self.forms)
        by_rows = [name for name in fields if layout.is_by_rows(name)]
        forms = {name: _dense_form(layout, name) for name in by_rows}
        self.has_chunks = any(layout.storage[name] == "chunks" for name in by_rows)
        # Which samples have a field in chunks is known when its rows are read.
        self.masked = tuple(
            name for name in by_rows if name in layout.lacking and layout.storage[name] == "chunks"
        )
        self.dense = {
            name: form
            for name, form in forms.items()
            if form is not None and name not in self.masked
        }
        self.rows = {
            name: layout.schema[name].form if form is None else form
            for name, form in forms.items()
            if name not in self.dense
        }
        numbers = {name: layout.schema[name].number for name in fields}
        self.values_of = {
            name: (at, dtype)
            for name, dtype in numbers.items()
            if (at := layout.table.values.get(name)) is not None and dtype is not None
        }
        self.are_never_empty = all(place.height is not None for place in self.places) and not (
            layout.lacking.intersection(spans)
        )
        self._lacking = tuple(
            name for name in fields if name in layout.lacking and name not in self.masked
        )
        self.may_be_plain = bool(self.dense) and not (self.places or self.rows or self._lacking)
        self.needs_table = bool(self.places or self.values_of or self._lacking)
        self._columns = tuple(
            [getattr(place, what) for place in self.places] for what in ("start", "end", "crc")
        )

    def spans(self, table: Ints) -> tuple[Ints, Ints, Ints]:
        """Return start, end and CRC of the samples' spans, sample by sample. table: of the samples,
        shape (n, columns). Each int64, shape (n * spans,)."""
        if len(self.places) == 1:
            (place,) = self.places
            return table[:, place.start], table[:, place.end], table[:, place.crc]
        starts, ends, crcs = (table[:, columns].reshape(-1) for columns in self._columns)
        return starts, ends, crcs

    def values(self, table: Ints) -> dict[str, DenseColumn]:
        """Return the columns of numbers."""
        return {
            name: DenseColumn(from_bits(table[:, at], dtype))
            for name, (at, dtype) in self.values_of.items()
        }

    def present(self, table: Ints) -> dict[str, NDArray[np.bool_]]:
        """Return which samples have a field, for fields that some lack and that the table
        covers."""
        found = {}
        for name in self._lacking:
            span = self._layout.table.spans.get(name)
            found[name] = (
                table[:, self._layout.table.present[name]] != 0
                if span is None
                else table[:, span.start] >= 0
            )
        return found


def _dense_form(layout: SampleLayout, name: str) -> ArrayForm | None:
    """Return the form of a field whose samples have one shape; None for others."""
    type = layout.schema[name]
    dtype = type.number
    if dtype is not None:
        return ArrayForm(dtype, ())
    form = type.form
    return None if form is None or form.is_ragged else form


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRows:
    """The samples of one batch, shard by shard.

    numbers: of the shards. bounds: the position at which each shard's samples start, and the end.
    rows: in their shards, int64, shape (n,). table: int64, shape (n, columns), as in
    `Layout.table`. order: the position of each sample in the batch, int64, shape (n,); None if they
    are in the batch's order.
    """

    numbers: list[int]
    shards: list[OpenShard]
    bounds: list[int]
    rows: Ints
    table: Ints
    order: Ints | None

    @classmethod
    def of(cls, rows: Ints, opened: OpenShards, *, columns: int) -> BatchRows:
        """Open the shards of (shard, row) pairs, and gather the rows of their tables. Samples are
        sorted by shard unless they are sorted, so that each shard is read once. columns: of the
        tables; 0 if they aren't needed."""
        shards, order = rows[:, 0], None
        borders = np.flatnonzero(shards[1:] != shards[:-1])
        if len(borders) and (shards[1:] < shards[:-1]).any():
            order = np.argsort(shards, kind="stable")
            rows = rows[order]
            shards = rows[:, 0]
            borders = np.flatnonzero(shards[1:] != shards[:-1])
        bounds = [*(borders + 1).tolist(), len(rows)]
        if len(rows):
            bounds.insert(0, 0)
        numbers = shards[bounds[:-1]].tolist()
        found, rows = opened.get(numbers), rows[:, 1]
        pieces = []
        if columns:
            pieces = [
                shard.table.take(rows[a:b], axis=0)
                for shard, a, b in zip(found, bounds, bounds[1:], strict=False)
            ]
        if len(pieces) == 1:
            (table,) = pieces
        else:
            table = np.concatenate(pieces) if pieces else np.empty((len(rows), columns), np.int64)
        return cls(
            numbers=numbers, shards=found, bounds=bounds, rows=rows, table=table, order=order
        )

    def back(self) -> Ints | None:
        """Return the position in this order of each sample of the batch, int64, shape (n,); None if
        the orders are the same."""
        if self.order is None:
            return None
        back = np.empty(len(self.order), np.int64)
        back[self.order] = np.arange(len(self.order))
        return back

    def places(self, a: int, b: int) -> Ints | slice:
        """Return the positions in the batch of the samples [a, b)."""
        return slice(a, b) if self.order is None else self.order[a:b]

    def pieces(self) -> Iterator[tuple[OpenShard, int, int]]:
        """Yield each shard and its samples [a, b)."""
        return zip(self.shards, self.bounds, self.bounds[1:], strict=False)
