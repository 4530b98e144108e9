"""Recognise Zarr hierarchies and list their shards. Arrays are fields (`zarr_fields`), and samples
are windows of them (`array_reader`)."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, ClassVar

from penstock.cache import MissingDependencyError
from penstock.readers.formats.array_reader import ArrayReader
from penstock.readers.formats.candidates import PART_BYTES
from penstock.readers.formats.chunked import ChunkedDataset, ChunkFormat
from penstock.readers.formats.format import DatasetFiles
from penstock.readers.formats.zarr.zarr_codecs import decoder_of
from penstock.readers.formats.zarr.zarr_fields import choose_fields
from penstock.readers.formats.zarr.zarr_hierarchy import ROOTS, Hierarchy, in_parallel
from penstock.readers.formats.zarr.zarr_shards import (
    cut_shards,
    list_files,
    read_notes,
    stored_chunks,
)

if TYPE_CHECKING:
    from penstock.readers.formats.chunked import ChunkedShardFacts, ChunkReader
    from penstock.readers.origin import Origin


class ZarrFormat(ChunkFormat):
    """The format of a folder with a Zarr hierarchy of version 2 or 3."""

    name: ClassVar[str] = "zarr"
    sampling: ClassVar[tuple[str, ...]] = ("sample", "stride")
    may_lack_objects: ClassVar[bool] = True
    is_encoded: ClassVar[bool] = True

    def recognises(self, origin: Origin) -> bool:
        """Return True if the folder has the metadata of a hierarchy's root."""
        return origin.selection is None and not ROOTS.isdisjoint(origin.names().files)

    def files(self, origin: Origin) -> DatasetFiles:
        """Read the documents, and list the files of the arrays that are fields."""
        hierarchy = Hierarchy(origin)
        chosen = choose_fields(origin, hierarchy)
        files = in_parallel(lambda field: list_files(hierarchy, field.array), chosen.fields)
        entries = [entry for some in files for entry in some.values()]
        documents = sorted(hierarchy.documents, key=lambda entry: entry.name)
        return DatasetFiles(entries=[*documents, *entries], found=(hierarchy, chosen, files))

    def index(self, origin: Origin, files: DatasetFiles, *, workers: int) -> ChunkedDataset:
        """Return the shards, from the metadata and the indexes of Zarr shards."""
        del workers
        hierarchy, chosen, listed = files.found
        for field in chosen.fields:  # invalid codecs raise DatasetError
            with suppress(MissingDependencyError):  # reading a field raises if its codec is missing
                decoder_of(field.array)
        pairs = zip(chosen.fields, listed, strict=True)
        stored = in_parallel(lambda pair: stored_chunks(hierarchy, pair[0].array, pair[1]), pairs)
        return ChunkedDataset(
            schema=chosen.schema,
            shards=list(
                cut_shards(
                    chosen.fields, stored, files.entries[0], part_bytes=PART_BYTES, url=origin.url
                )
            ),
            left_out=chosen.left_out,
        )

    def reader(self, shard: ChunkedShardFacts) -> ChunkReader:
        """Open a shard."""
        return ArrayReader(shard, [read_notes(shard)])


FORMAT = ZarrFormat()
