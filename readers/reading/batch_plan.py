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
    from penstock.readers.reading.open_shards import Shards
    from penstock.readers.types import Ints


class BatchFields:
    """The fields that a batch gets, by how they are stored.

    fields: all, in order. spans: those that are spans, with their columns of the shards' tables.
    arrays: the forms of spans that are arrays. dense: fields that are read by rows and whose
    samples have one shape. rows: the other fields that are read by rows, with their forms if they
    are arrays. has_chunks: some fields lie in chunks. masked: fields in chunks that some samples
    lack; they are among rows. values_of: the column of the tables, and the dtype, of fields that
    are numbers in them. may_be_plain: all fields are dense or numbers, and no sample lacks one.
    are_never_empty: each span has bytes. lacks_some: some samples lack a field. columns: of the
    tables; 0 if no value comes from them. layout: equal for datasets that are read together.
    """

    def __init__(self, layout: SampleLayout, fields: Sequence[str]) -> None:
        """Raises ConfigError for fields that aren't in the schema."""
        schema, table = layout.schema, layout.table
        for name in fields:
            if name not in schema:
                raise ConfigError(f"fields: got {name!r}, wanted one of {list(schema)}.")
        self.fields = tuple(fields)
        self.spans: dict[str, SpanPlace] = {
            name: table.spans[name] for name in fields if layout.storage[name] == "span"
        }
        forms = {name: schema[name].stored for name in fields}
        self.arrays = {n: form for n in self.spans if (form := forms[n]) is not None}
        by_rows = [name for name in fields if layout.is_by_rows(name)]
        in_chunks = [name for name in by_rows if layout.storage[name] == "chunks"]
        self.has_chunks = bool(in_chunks)
        # Which samples have a field in chunks is known when its rows are read.
        self.masked = tuple(name for name in in_chunks if name in layout.lacking)
        self.dense: dict[str, ArrayForm] = {}
        self.rows: dict[str, ArrayForm | None] = {}
        for name in by_rows:
            form = forms[name]
            if form is None or form.is_ragged or name in self.masked:
                self.rows[name] = form
            else:
                self.dense[name] = form
        self.values_of = {
            name: (table.values[name], form.dtype)
            for name, form in forms.items()
            if name in table.values and form is not None
        }
        lacking = [n for n in fields if n in layout.lacking and n not in self.masked]
        self.are_never_empty = all(
            place.height is not None and name not in lacking for name, place in self.spans.items()
        )
        self.lacks_some = bool(lacking)
        # The least number in the column of the samples that have the field.
        self._present = {
            name: (self.spans[name].start, 0) if name in self.spans else (table.present[name], 1)
            for name in lacking
        }
        self.may_be_plain = bool(self.dense) and not (self.spans or self.rows or lacking)
        needs_table = self.spans or self.values_of or lacking
        self.columns = table.count if needs_table else 0
        self.layout = (
            self.fields,
            self.spans,
            self.dense,
            self.values_of,
            self.columns,
            self.are_never_empty,
        )
        places = [(place.start, place.end, place.crc) for place in self.spans.values()]
        self._columns = tuple(map(list, zip(*places, strict=True)))

    def span_facts(self, table: Ints) -> tuple[Ints, Ints, Ints]:
        """Return start, end and CRC of the samples' spans, sample by sample. table: of the samples,
        shape (n, columns). Each int64, shape (n * spans,)."""
        if len(self.spans) == 1:
            (place,) = self.spans.values()
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
        return {name: table[:, at] >= least for name, (at, least) in self._present.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRows:
    """The samples of one batch, shard by shard.

    numbers: of the shards. bounds: the position at which each shard's samples start, and the end.
    rows: in their shards, int64, shape (n,). table: int64, shape (n, columns), as in
    `SampleLayout.table`; sorted_table: the same in the batch's order. order: the position of each
    sample in the batch, and back: the position here of each sample of the batch, both int64, shape
    (n,); None if the orders are the same.
    """

    numbers: list[int]
    shards: list[OpenShard]
    bounds: list[int]
    rows: Ints
    table: Ints
    sorted_table: Ints
    order: Ints | None = None
    back: Ints | None = None

    @classmethod
    def of(cls, rows: Ints, opened: Shards, *, columns: int) -> BatchRows:
        """Open the shards of (shard, row) pairs, and gather the rows of their tables. Samples are
        sorted by shard unless they are sorted, so that each shard is read once. columns: of the
        tables; 0 if they aren't needed."""
        shards, order, back = rows[:, 0], None, None
        borders = np.flatnonzero(shards[1:] != shards[:-1])
        if len(borders) and (shards[1:] < shards[:-1]).any():
            order = np.argsort(shards, kind="stable")
            back = np.empty(len(order), np.int64)
            back[order] = np.arange(len(order))
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
            numbers=numbers,
            shards=found,
            bounds=bounds,
            rows=rows,
            table=table,
            sorted_table=table if back is None else table[back],
            order=order,
            back=back,
        )

    @property
    def positions(self) -> Ints:
        """Return the position of each sample in the batch, int64, shape (n,)."""
        return np.arange(len(self.rows)) if self.order is None else self.order

    def places(self, a: int, b: int) -> Ints | slice:
        """Return the positions in the batch of the samples [a, b)."""
        if self.order is None:
            return slice(a, b)
        first = int(self.order[a])
        return slice(first, first + 1) if b == a + 1 else self.order[a:b]

    def pieces(self) -> Iterator[tuple[OpenShard, int, int]]:
        """Yield each shard and its samples [a, b)."""
        return zip(self.shards, self.bounds, self.bounds[1:], strict=False)
