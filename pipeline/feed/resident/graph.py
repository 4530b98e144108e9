"""A graph that is fed from memory, in a Graph's place: what isn't resident goes by another way.

Two graphs, as DALI pipelines know one kind of input: pixels that are kept, and encoded bytes. A
batch is nearly always of one kind and passes through as it is; the graph for bytes is built when
a sample first needs it, which most jobs never see.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from penstock.augment.batches import DecodedBatch
from penstock.cache.errors import PenstockError
from penstock.pipeline.feed.resident.columns import NO_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import torch

    from penstock.augment.draws import Draws
    from penstock.augment.graph import Graph
    from penstock.pipeline.feed.resident.images import ResidentImages
    from penstock.pipeline.report.facts import ResidentFacts
    from penstock.readers.types import EncodedBatch


@dataclass(frozen=True, slots=True)
class _BatchRows:
    """A batch that was fed: how many samples, and which rows went to which graph."""

    samples: int
    shares: list[tuple[Graph, list[int]]]


class ResidentGraph:
    """Stands in a Graph's place for batches whose images may be in memory. One thread calls."""

    def __init__(
        self, images: ResidentImages, *, from_memory: Graph, make_from_bytes: Callable[[], Graph]
    ) -> None:
        """from_memory: takes resident samples; make_from_bytes: builds the graph for encoded
        ones."""
        self._images, self._from_memory = images, from_memory
        self._make_from_bytes = make_from_bytes
        self._from_bytes: Graph | None = None
        self._batches: deque[_BatchRows] = deque()
        self._hits = self._hit_bytes = 0

    @property
    def in_flight(self) -> int:
        """Batches that were fed and not yet taken."""
        return len(self._batches)

    def feed(
        self, batch: EncodedBatch, draws: Draws, *, bad: Mapping[int, str] | None = None
    ) -> None:
        """Feed a batch, as `Graph.feed` does."""
        marks = dict(bad or {})
        shares = self._by_graph(batch, marks)
        for graph, rows, share in shares:
            few = {place: marks[row] for place, row in enumerate(rows) if row in marks}
            graph.feed(share, _draws_of(draws, rows, batch), bad=few)
        self._batches.append(
            _BatchRows(len(batch.ids), [(graph, rows) for graph, rows, _ in shares])
        )

    def _by_graph(
        self, batch: EncodedBatch, marks: Mapping[int, str]
    ) -> list[tuple[Graph, list[int], EncodedBatch]]:
        """The batch by graphs. Bad rows, which neither decodes, go with the resident ones."""
        images = self._images.images(batch.ids)
        missing = [row for row, image in enumerate(images) if image is None and row not in marks]
        others = set(missing)
        here = [row for row in range(len(images)) if row not in others]
        self._count(batch, [row for row in here if row not in marks])
        shares = []
        if here or not missing:
            encoded = [NO_BYTES if images[row] is None else images[row] for row in here]
            shares.append((self._from_memory, here, _subset(batch, here, encoded)))
        if missing:
            self._from_bytes = self._from_bytes or self._make_from_bytes()
            encoded = [batch.encoded[row] for row in missing]
            shares.append((self._from_bytes, missing, _subset(batch, missing, encoded)))
        return shares

    def _count(self, batch: EncodedBatch, rows: list[int]) -> None:
        hits = [row for row in rows if not len(batch.encoded[row])]
        self._hits += len(hits)
        self._hit_bytes += int(self._images.decoded_bytes(batch.dims[hits]).sum())

    def outputs_marked(self) -> DecodedBatch:
        """Take the oldest batch, as `Graph.outputs_marked` does."""
        if not self._batches:
            return self._from_memory.outputs_marked()  # which knows what to say
        split = self._batches.popleft()
        shares: list[tuple[list[int], DecodedBatch]] = []
        failure: PenstockError | None = None
        for graph, rows in split.shares:  # all of them, so that graphs and batches stay in step
            try:
                shares.append((rows, graph.outputs_marked()))
            except PenstockError as error:
                failure = failure or error
        if failure is not None:
            raise failure
        return _joined(split.samples, shares)

    def decode(self, batch: EncodedBatch, draws: Draws) -> DecodedBatch:
        """Decode samples at once, as `Graph.decode` does."""
        shares = [
            (rows, graph.decode(share, _draws_of(draws, rows, batch)))
            for graph, rows, share in self._by_graph(batch, {})
        ]
        return _joined(len(batch.ids), shares)

    def facts(self) -> ResidentFacts:
        """What is kept, and what was fed from there so far."""
        return self._images.facts(hits=self._hits, bytes_memory=self._hit_bytes)

    def drain(self) -> None:
        """Drop what is in flight."""
        self._batches.clear()
        for graph in (self._from_memory, self._from_bytes):
            if graph is not None:
                graph.drain()

    def close(self) -> None:
        """Release the graphs, then the memory that they were fed from."""
        self._batches.clear()
        try:
            for graph in (self._from_memory, self._from_bytes):
                if graph is not None:
                    graph.close()
        finally:
            self._images.close()


def _subset(batch: EncodedBatch, rows: list[int], encoded: list[Any]) -> EncodedBatch:
    if len(rows) == len(batch.ids):
        return replace(batch, encoded=encoded)
    return replace(batch, ids=batch.ids[rows], encoded=encoded, dims=batch.dims[rows])


def _draws_of(draws: Draws, rows: list[int], batch: EncodedBatch) -> Draws:
    if len(rows) == len(batch.ids):
        return draws
    return {name: values[rows] for name, values in draws.items()}


def _joined(samples: int, shares: list[tuple[list[int], DecodedBatch]]) -> DecodedBatch:
    """One batch of its shares."""
    if len(shares) == 1:
        return shares[0][1]
    first: torch.Tensor = shares[0][1].images
    images = first.new_empty((samples, *first.shape[1:]))
    bad: dict[int, str] = {}
    for rows, decoded in shares:
        images[rows] = decoded.images
        bad |= {rows[place]: why for place, why in decoded.bad.items()}
    if images.is_cuda:
        import torch

        # The copies read what the graphs may free as soon as this returns.
        torch.cuda.current_stream(images.device).synchronize()
    return DecodedBatch(images, bad)
