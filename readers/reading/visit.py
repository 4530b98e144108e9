"""The samples of one batch, sorted by the shards that they lie in, and the spans that are read of
them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from penstock.readers.formats.shard import OpenShard
    from penstock.readers.reading.choice import Choice

    Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Visit:
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
    ) -> Visit:
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
class SpanVisit:
    """The spans that are read of a batch, shard by shard: those of a sample side by side.

    numbers, shards, bounds: as in Visit, but that bounds count spans; rows: of each span's sample;
    starts, ends, crcs: of each; int64, shape (spans,). places: of each among all the spans of the
    batch, sample by sample; None where none of those is empty. count: of all, empty ones too.
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
    def of(cls, visit: Visit, choice: Choice) -> SpanVisit:
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

    def some(self, spans: Ints) -> SpanVisit:
        """Some of these spans, in order; they can't be read again."""
        return SpanVisit(
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
        self, number: int, shard: OpenShard, spans: Sequence[int], choice: Choice
    ) -> SpanVisit:
        """Some spans of one shard that was opened anew."""
        rows = self.rows[list(spans)]
        table = shard.table.take(rows, axis=0)
        fields = [self.place(span) % len(choice.places) for span in spans]
        places = [choice.places[field] for field in fields]
        here = np.arange(len(rows))
        return SpanVisit(
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
