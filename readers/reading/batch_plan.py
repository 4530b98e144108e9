"""Sort what one batch reads: fields by how they are stored, samples and spans by shard."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from penstock.cache import ConfigError
from penstock.readers.fields import ArrayForm, DenseColumn, array_form, from_bits, number_dtype

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from penstock.readers.formats import OpenShard, SampleLayout, SpanPlace

    Ints = NDArray[np.int64]


class BatchFields:
    """The fields that a batch gets.

    fields: all, in order. names, places, forms: of those that are spans. dense: those by rows whose
    samples have one shape; rows: the others by rows, with their forms where they are arrays.
    has_arrays: some spans are arrays. has_chunks: some lie in chunks. told: those of them that some
    samples lack, which are among rows. are_never_empty: each span has bytes. needs_table: something
    is in the shards' tables.
    """

    def __init__(self, layout: SampleLayout, fields: Sequence[str]) -> None:
        """Raises ConfigError for fields that aren't there."""
        for name in fields:
            if name not in layout.schema:
                raise ConfigError(f"fields: got {name!r}, wanted some of {list(layout.schema)}.")
        self.fields, self._layout = tuple(fields), layout
        spans = [name for name in fields if layout.storage[name] == "span"]
        self.names = tuple(spans)
        self.places: tuple[SpanPlace, ...] = tuple(layout.table.spans[name] for name in spans)
        self.forms: tuple[ArrayForm | None, ...] = tuple(
            array_form(layout.schema[name]) for name in spans
        )
        self.has_arrays = any(form is not None for form in self.forms)
        by_rows = [name for name in fields if layout.is_by_rows(name)]
        forms = {name: _dense_form(layout, name) for name in by_rows}
        self.has_chunks = any(layout.storage[name] == "chunks" for name in by_rows)
        # Who has a field that lies in chunks is told where these are read by rows.
        self.told = tuple(
            name for name in by_rows if name in layout.lacking and layout.storage[name] == "chunks"
        )
        self.dense = {
            name: form for name, form in forms.items() if form is not None and name not in self.told
        }
        self.rows = {
            name: array_form(layout.schema[name]) if form is None else form
            for name, form in forms.items()
            if name not in self.dense
        }
        self._values = {
            name: (at, number_dtype(layout.schema[name]))
            for name in fields
            if (at := layout.table.values.get(name)) is not None
        }
        self.are_never_empty = all(place.height is not None for place in self.places) and not (
            layout.lacking.intersection(spans)
        )
        self._lacking = tuple(
            name for name in fields if name in layout.lacking and name not in self.told
        )
        self.needs_table = bool(self.places or self._values or self._lacking)
        self._columns = tuple(
            [getattr(place, what) for place in self.places] for what in ("start", "end", "crc")
        )

    def dimensions(self, span: int) -> int:
        """How many an array of a span field has."""
        form = self.forms[span]
        return 0 if form is None else len(form.shape)

    def spans(self, table: Ints) -> tuple[Ints, Ints, Ints]:
        """Start, end and CRC of the samples' spans, those of one sample side by side. table: of the
        samples, shape (n, columns); each int64, shape (n * spans,)."""
        if len(self.places) == 1:
            (place,) = self.places
            return table[:, place.start], table[:, place.end], table[:, place.crc]
        starts, ends, crcs = (table[:, columns].reshape(-1) for columns in self._columns)
        return starts, ends, crcs

    def values(self, table: Ints) -> dict[str, DenseColumn]:
        """The columns of numbers."""
        return {
            name: DenseColumn(from_bits(table[:, at], dtype))
            for name, (at, dtype) in self._values.items()
            if dtype is not None
        }

    def present(self, table: Ints) -> dict[str, NDArray[np.bool_]]:
        """Which samples have a field, of those that some lack and that the table tells of."""
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
    """The form of a field whose samples have one shape."""
    type = layout.schema[name]
    dtype = number_dtype(type)
    if dtype is not None:
        return ArrayForm(dtype, ())
    form = array_form(type)
    return None if form is None or form.is_ragged else form


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRows:
    """The samples of one batch, shard by shard.

    numbers: of the shards; bounds: where each shard's samples start, and the end; rows: int64,
    shape (n,); table: int64, shape (n, columns), as `Layout.table` says. order: where each sample
    stands in the batch, int64, shape (n,); None where the batch is in that order.
    """

    numbers: list[int]
    shards: list[OpenShard]
    bounds: list[int]
    rows: Ints
    table: Ints
    order: Ints | None

    @classmethod
    def of(
        cls,
        numbers: list[int],
        shards: list[OpenShard],
        bounds: list[int],
        rows: Ints,
        *,
        order: Ints | None,
        columns: int,
    ) -> BatchRows:
        """Gather the samples' rows of their shards' tables. columns: of these tables; 0: they
        aren't needed."""
        pieces = []
        if columns:
            pieces = [
                shard.table.take(rows[a:b], axis=0)
                for shard, a, b in zip(shards, bounds, bounds[1:], strict=False)
            ]
        if len(pieces) == 1:
            (table,) = pieces
        else:
            table = np.concatenate(pieces) if pieces else np.empty((len(rows), columns), np.int64)
        return cls(
            numbers=numbers, shards=shards, bounds=bounds, rows=rows, table=table, order=order
        )

    def back(self) -> Ints | None:
        """Where each sample of the batch stands here, int64, shape (n,); None: just there."""
        if self.order is None:
            return None
        back = np.empty(len(self.order), np.int64)
        back[self.order] = np.arange(len(self.order))
        return back

    def places(self, a: int, b: int) -> Ints | slice:
        """Where the samples [a, b) stand in the batch."""
        return slice(a, b) if self.order is None else self.order[a:b]

    def pieces(self) -> Iterator[tuple[OpenShard, int, int]]:
        """Each shard and its samples [a, b)."""
        return zip(self.shards, self.bounds, self.bounds[1:], strict=False)


@dataclass(slots=True, kw_only=True)  # frozen costs 2 us a batch
class BatchSpans:
    """The spans that are read of a batch, shard by shard: those of a sample side by side.

    numbers, shards, bounds: as in BatchRows, but that bounds count spans; rows: of each span's
    sample; starts, ends, crcs: of each; int64, shape (spans,). places: of each among all the spans
    of the batch, sample by sample; None where none of those is empty. count: of all, empty ones
    too.
    """

    numbers: list[int]
    shards: list[OpenShard]
    bounds: list[int]
    rows: Ints
    starts: Ints
    ends: Ints
    crcs: Ints
    count: int
    places: Ints | None = None

    @classmethod
    def of(cls, visit: BatchRows, choice: BatchFields) -> BatchSpans:
        """The spans of some samples that have bytes."""
        fields = len(choice.places)
        starts, ends, crcs = choice.spans(visit.table)
        rows, bounds = visit.rows, visit.bounds
        if fields != 1:
            rows, bounds = np.repeat(rows, fields), [bound * fields for bound in bounds]
        there = None if choice.are_never_empty else ends > starts
        if there is None or there.all():
            return cls(
                numbers=visit.numbers,
                shards=visit.shards,
                bounds=bounds,
                rows=rows,
                starts=starts,
                ends=ends,
                crcs=crcs,
                count=len(starts),
            )
        places = np.flatnonzero(there)
        return cls(
            numbers=visit.numbers,
            shards=visit.shards,
            bounds=np.searchsorted(places, bounds).tolist(),
            rows=rows[places],
            starts=starts[places],
            ends=ends[places],
            crcs=crcs[places],
            count=len(starts),
            places=places,
        )

    def __len__(self) -> int:
        return len(self.rows)

    def pieces(self) -> Iterator[tuple[OpenShard, int, int]]:
        """Each shard and its spans [a, b)."""
        return zip(self.shards, self.bounds, self.bounds[1:], strict=False)

    def place(self, span: int) -> int:
        """The place of a span among all those of the batch."""
        return span if self.places is None else int(self.places[span])

    def some(self, spans: Ints) -> BatchSpans:
        """Some of these spans, in order; they can't be read again."""
        return BatchSpans(
            numbers=self.numbers,
            shards=self.shards,
            bounds=np.searchsorted(spans, self.bounds).tolist(),
            rows=self.rows[spans],
            starts=self.starts[spans],
            ends=self.ends[spans],
            crcs=self.crcs[spans],
            count=len(spans),
        )

    def again(
        self, number: int, shard: OpenShard, spans: Sequence[int], choice: BatchFields
    ) -> BatchSpans:
        """Some spans of one shard that was opened anew."""
        rows = self.rows[list(spans)]
        table = shard.table.take(rows, axis=0)
        fields = [self.place(span) % len(choice.places) for span in spans]
        places = [choice.places[field] for field in fields]
        here = np.arange(len(rows))
        return BatchSpans(
            numbers=[number],
            shards=[shard],
            bounds=[0, len(rows)],
            rows=rows,
            starts=table[here, [place.start for place in places]],
            ends=table[here, [place.end for place in places]],
            crcs=table[here, [place.crc for place in places]],
            count=len(rows),
        )

    def advise(self) -> None:
        """Let the kernel read ahead what is on the local disk."""
        for shard, a, b in self.pieces():
            shard.advise(self.starts[a:b], self.ends[a:b])
