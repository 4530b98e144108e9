"""What a pack is made from: an image folder, tar files, or another pack."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
from crc32c import crc32c

from penstock.cache.errors import CorruptSampleError
from penstock.cache.threads import ordered
from penstock.readers.fields.columns import DenseColumn
from penstock.readers.fields.verify import SampleFacts, examine
from penstock.readers.formats.pack.format import pack_shard
from penstock.readers.index.intake import cut, read_chunks
from penstock.readers.packing.plan import PackPlan, plan_candidates, plan_samples
from penstock.readers.reading.open_shards import OPENERS
from penstock.readers.types import ImageFacts, Rejection

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from penstock.readers.formats.format import Indexing
    from penstock.readers.formats.pack.blob import PackBlob
    from penstock.readers.formats.pack.shard import PackShard
    from penstock.readers.index.index import Index
    from penstock.readers.origin.origin import Origin
    from penstock.readers.origin.quarantine import QuarantineEntry
    from penstock.readers.types import Encoded, Verify


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleGroup:
    """Some samples of one shard to be, read and examined. positions: int64, shape (n,); names: in
    the source."""

    positions: NDArray[np.int64]
    samples: list[Encoded | Rejection]
    results: list[SampleFacts | Rejection]
    names: list[bytes]


class PackSource(Protocol):
    """A source is what a pack is made from.

    sizes: bytes of each sample, int64, shape (n,). labels: int64, shape (n,), or None.
    fingerprint: changes when anything about the source does. has_ids: the ids are known, no sample
    can drop out.
    """

    url: str
    fingerprint: str
    sizes: NDArray[np.int64]
    labels: NDArray[np.int64] | None
    classes: tuple[str, ...]
    quarantined: list[QuarantineEntry]
    has_ids: bool

    def plan(self, *, shuffle: bool, seed: int, shard_bytes: int) -> PackPlan:
        """Which sample goes into which shard."""

    def groups(
        self,
        shards: Iterator[tuple[int, NDArray[np.int64]]],
        *,
        verify: Verify | None,
        workers: int,
    ) -> Iterator[SampleGroup]:
        """The samples of (shard, positions), in that order, in pieces of one shard each."""

    def name(self, position: int) -> bytes:
        """A sample's name for the quarantine."""


class CandidateSource:
    """Data without an index of its own: each sample is read where it lies and decoded once, on its
    way into the pack. Of remote objects that hold many samples as many stay in the cache as it has
    room for: a shuffled shard takes from all."""

    has_ids = False

    def __init__(self, origin: Origin, indexing: Indexing, *, workers: int) -> None:
        listing = indexing.list(origin)
        self._candidates = found = listing.candidates(workers=workers)
        self.url, self.fingerprint = origin.url, listing.snapshot().fingerprint
        self.sizes, self.quarantined = found.sizes, found.quarantined
        self._origin, self.classes = origin, found.schema.class_names()
        labels = found.values.get("label")
        self.labels = labels.values if isinstance(labels, DenseColumn) else None

    def plan(self, *, shuffle: bool, seed: int, shard_bytes: int) -> PackPlan:
        return plan_candidates(
            self._candidates, shuffle=shuffle, seed=seed, shard_bytes=shard_bytes
        )

    def groups(
        self,
        shards: Iterator[tuple[int, NDArray[np.int64]]],
        *,
        verify: Verify | None,
        workers: int,
    ) -> Iterator[SampleGroup]:
        if verify is None:
            raise TypeError("samples without facts are verified")
        for chunk in read_chunks(self._origin, self._candidates, shards, workers=workers):
            images = [
                Rejection("no image") if each is None else each for each in chunk.contents["image"]
            ]
            results = examine(images, verify)
            yield SampleGroup(
                positions=chunk.positions,
                samples=images,
                results=results,
                names=[self.name(position) for position in chunk.positions.tolist()],
            )

    def name(self, position: int) -> bytes:
        return self._candidates.names[position]


class PackedSource:
    """Another pack: its images were decoded when it was written, so their CRC is checked here and
    their facts are taken over."""

    has_ids = True

    def __init__(self, index: Index) -> None:
        self._index = index
        self.url, self.fingerprint, self.classes = index.url, index.fingerprint, index.classes
        self.quarantined: list[QuarantineEntry] = []
        tables = ordered(
            lambda number: self._shard(number).table,
            range(len(index.sizes)),
            workers=1 if index.remote is None else OPENERS,
            ahead=OPENERS,
            name="tables",
        )
        table, columns = np.concatenate(list(tables)), index.layout.table
        self._place = place = columns.spans["image"]
        self.sizes = table[:, place.end] - table[:, place.start]
        self.labels = table[:, columns.values["label"]].copy() if "label" in index.fields else None

    def _shard(self, number: int) -> PackShard | PackBlob:
        return pack_shard(self._index.shards.open(number))

    def plan(self, *, shuffle: bool, seed: int, shard_bytes: int) -> PackPlan:
        return plan_samples(self.sizes, shuffle=shuffle, seed=seed, shard_bytes=shard_bytes)

    def groups(
        self,
        shards: Iterator[tuple[int, NDArray[np.int64]]],
        *,
        verify: Verify | None,
        workers: int,
    ) -> Iterator[SampleGroup]:
        del verify
        pieces = (positions[part] for _, positions in shards for part in cut(self.sizes[positions]))
        yield from ordered(self._read, pieces, workers=workers, ahead=workers + 2, name="intake")

    def _read(self, ids: NDArray[np.int64]) -> SampleGroup:
        place = self._place
        shards = np.searchsorted(self._index.starts, ids, side="right") - 1
        samples: list[Encoded | Rejection] = [Rejection("")] * len(ids)
        results: list[SampleFacts | Rejection] = [Rejection("")] * len(ids)
        names = [b""] * len(ids)
        for number in np.unique(shards).tolist():
            places = np.flatnonzero(shards == number)
            rows = ids[places] - self._index.starts[number]
            shard, spans, images = self._images(number, rows)
            codecs, channels = shard.columns.codecs(), shard.columns.channels()
            known = shard.source_names()
            for at, row, span, image in zip(
                places.tolist(), rows.tolist(), spans.tolist(), images, strict=True
            ):
                assert place.height is not None
                if crc32c(image) != span[place.crc]:
                    raise self._corrupt(int(ids[at]), shard.name(row))
                facts = ImageFacts(
                    height=span[place.height],
                    width=span[place.height + 1],
                    channels=int(channels[row]),
                    codec=codecs[row],
                )
                names[at] = known[row] if known is not None else shard.name(row).encode()
                samples[at], results[at] = image, SampleFacts(crc32c=span[place.crc], image=facts)
        return SampleGroup(positions=ids, samples=samples, results=results, names=names)

    def _images(
        self, number: int, rows: NDArray[np.int64]
    ) -> tuple[PackShard | PackBlob, NDArray[np.int64], list[Encoded]]:
        """A shard, the rows of its table and their images; what the cache has wrong is fetched
        again."""
        place = self._place
        for attempt in range(2):
            shard = self._shard(number)
            spans = shard.table[rows]
            images = shard.views(spans[:, place.start].tolist(), spans[:, place.end].tolist())
            crcs = [crc32c(image) for image in images]
            if attempt or self._index.remote is None or crcs == spans[:, place.crc].tolist():
                break
            self._index.shards.drop(number, opened=shard)
        return shard, spans, images

    def _corrupt(self, sample_id: int, name: str) -> CorruptSampleError:
        return CorruptSampleError(
            f"Sample {sample_id} of {self.url} ({name}): its checksum (CRC-32C) is wrong. Pack "
            "from an intact copy of the source.",
            sample_id=sample_id,
        )

    def name(self, position: int) -> bytes:
        return b"%d" % position
