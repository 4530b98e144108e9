"""Plan the spans that a batch reads, by shard."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from penstock.readers.formats import OpenShard
    from penstock.readers.reading.batch_plan import BatchFields, BatchRows

    Ints = NDArray[np.int64]


@dataclass(slots=True, kw_only=True)  # frozen would cost 2 us per batch
class BatchSpans:
    """The spans that a batch reads, shard by shard and sample by sample.

    numbers, shards, bounds: as in BatchRows, but bounds count spans. rows: of each span's sample.
    starts, ends, crcs: of each span, int64, shape (spans,). places: the position of each among all
    spans of the batch; None if none of those is empty. count: of all spans, including empty ones.
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
        """Return the spans of some samples that have bytes."""
        fields = len(choice.places)
        starts, ends, crcs = choice.spans(visit.table)
        rows, bounds = visit.rows, visit.bounds
        if fields != 1:
            rows, bounds = np.repeat(rows, fields), [bound * fields for bound in bounds]
        found = cls(
            numbers=visit.numbers,
            shards=visit.shards,
            bounds=bounds,
            rows=rows,
            starts=starts,
            ends=ends,
            crcs=crcs,
            count=len(starts),
        )
        if choice.are_never_empty or (ends > starts).all():
            return found
        places = np.flatnonzero(ends > starts)
        return replace(found.some(places), count=len(starts), places=places)

    def __len__(self) -> int:
        return len(self.rows)

    def pieces(self) -> Iterator[tuple[OpenShard, int, int]]:
        """Yield each shard and its spans [a, b)."""
        return zip(self.shards, self.bounds, self.bounds[1:], strict=False)

    def place(self, span: int) -> int:
        """Return the position of a span among all spans of the batch."""
        return span if self.places is None else int(self.places[span])

    def some(self, spans: Ints) -> BatchSpans:
        """Return some of these spans, in order; `again` doesn't work on the result."""
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
        """Return some spans of one shard that was reopened."""
        rows = self.rows[list(spans)]
        table = shard.table.take(rows, axis=0)
        fields = [self.place(span) % len(choice.places) for span in spans]
        places = [choice.places[field] for field in fields]
        every = np.arange(len(rows))
        return BatchSpans(
            numbers=[number],
            shards=[shard],
            bounds=[0, len(rows)],
            rows=rows,
            starts=table[every, [place.start for place in places]],
            ends=table[every, [place.end for place in places]],
            crcs=table[every, [place.crc for place in places]],
            count=len(rows),
        )

    def advise(self) -> None:
        """Let the kernel read ahead the spans that are on the local disk."""
        for shard, a, b in self.pieces():
            shard.source.advise(self.starts[a:b], self.ends[a:b])
