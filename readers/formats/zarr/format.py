"""Zarr hierarchies as a format: arrays as fields, read chunk by chunk where they lie."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar

from penstock.cache.errors import MissingDependencyError
from penstock.readers.fields.schema import Schema
from penstock.readers.formats.candidates import Candidates
from penstock.readers.formats.chunked import ChunkFormat
from penstock.readers.formats.format import Snapshot
from penstock.readers.formats.parts import PART_BYTES
from penstock.readers.formats.zarr.fields import choose_fields
from penstock.readers.formats.zarr.hierarchy import ROOTS, in_parallel
from penstock.readers.formats.zarr.shards import cut_shards
from penstock.readers.formats.zarr.store import store_of
from penstock.readers.formats.zarr.stored import list_files, stored_chunks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from penstock.readers.formats.chunked import ChunkReader, ShardFacts
    from penstock.readers.formats.format import Format, Indexing, Listing
    from penstock.readers.formats.zarr.fields import ChosenFields
    from penstock.readers.formats.zarr.stored import ArrayFiles, StoredChunks
    from penstock.readers.origin.origin import Origin


class ZarrListing:
    """A hierarchy: what its documents say, and the files of the arrays that are fields."""

    def __init__(self, origin: Origin) -> None:
        self._url, self._store = origin.url, store_of(origin)
        self._chosen = choose_fields(origin, self._store)

    @cached_property
    def _files(self) -> list[ArrayFiles]:
        fields = self._chosen.fields
        return in_parallel(lambda field: list_files(self._store, field.array), fields)

    def snapshot(self) -> Snapshot:
        """What an index notes of the files."""
        documents = self._chosen.hierarchy.documents
        files = (entry for some in self._files for entry in some.files)
        return Snapshot.of((*documents, *files), {})

    def candidates(self, *, workers: int) -> Candidates:
        """The shards, as the metadata and the indexes of shards tell them."""
        del workers
        chosen = self._chosen
        _check_codecs(chosen)
        schema = Schema({field.name: field.type for field in chosen.fields})
        stored = self._stored(chosen)
        shards = cut_shards(chosen, stored, part_bytes=PART_BYTES, url=self._url)
        return Candidates.of_chunks(schema, list(shards), left_out=chosen.left_out)

    def counterparts(
        self, number: int, name: bytes, *, total: int, workers: int
    ) -> Iterator[tuple[Candidates, int]]:
        """The shard of the same number, if there are as many."""
        del name
        candidates = self.candidates(workers=workers)
        if len(candidates.chunked) == total:
            yield candidates, number

    def _stored(self, chosen: ChosenFields) -> list[StoredChunks]:
        pairs = zip(chosen.fields, self._files, strict=True)
        return in_parallel(lambda pair: stored_chunks(self._store, pair[0].array, pair[1]), pairs)


def _check_codecs(chosen: ChosenFields) -> None:
    """Raise DatasetError for codecs that can't be; those that aren't installed are missed by
    whoever reads their field."""
    from penstock.readers.formats.zarr.codecs import decoder_of

    for field in chosen.fields:
        try:
            decoder_of(field.array)
        except MissingDependencyError:
            continue


@dataclass(frozen=True, slots=True)
class ZarrIndexing:
    """How a hierarchy gets an index: it is listed each time it is opened locally, and where
    anything differs it is indexed anew, which reads metadata only."""

    keeps_facts: ClassVar[bool] = False

    def list(self, origin: Origin) -> ZarrListing:
        """Read the documents. Raises DatasetNotFoundError, ConfigError, DatasetError,
        FetchError."""
        return ZarrListing(origin)

    def is_current(
        self, origin: Origin, snapshot: Snapshot, listing: Callable[[], Listing]
    ) -> bool:
        """Whether these are the very files that were indexed."""
        del origin
        return listing().snapshot().fingerprint == snapshot.fingerprint


@dataclass(frozen=True, slots=True)
class ZarrFormat(ChunkFormat):
    """A folder with a Zarr hierarchy, of version 2 or 3."""

    name: ClassVar[str] = "zarr"
    least_sample_bytes: ClassVar[int] = 0
    indexing: ClassVar[Indexing | None] = ZarrIndexing()
    may_lack_objects: ClassVar[bool] = True
    is_encoded: ClassVar[bool] = True
    takes_corners: ClassVar[bool] = True

    def recognises(self, origin: Origin) -> bool:
        """Whether a hierarchy begins at the root."""
        return origin.selection is None and not ROOTS.isdisjoint(origin.names().files)

    def open_chunks(self, shard: ShardFacts) -> ChunkReader:
        """Open a shard."""
        from penstock.readers.formats.zarr.reader import ZarrReader

        return ZarrReader(shard)


FORMAT: Format = ZarrFormat()
