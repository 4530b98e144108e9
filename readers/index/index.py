"""Describe an open dataset shard by shard, and open its shards: local files, or blobs of the cache.

A sample's id is its position in the index; it never changes while the index is valid. Every process
and node derives the same blob keys from the manifest without any I/O. The segments of a blob are
read from its sidecar when the blob is opened or filled. Remote sidecars are small objects of the
cache.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, cast

import numpy as np

from penstock.cache import CorruptShardError, PenstockError
from penstock.cache.base import BlobSource, refuse_shortage
from penstock.readers.fieldtypes import image_fields
from penstock.readers.files import OWN_FOLDER, printable
from penstock.readers.local_place import LocalPlace
from penstock.readers.types import ANY_SIZE

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import NDArray

    from penstock.cache.base import Traffic
    from penstock.cache.blobs import Remote
    from penstock.readers.byte_source import ShardPlace
    from penstock.readers.fieldtypes import ColumnCrop, Schema
    from penstock.readers.formats import (
        DecodedChunks,
        FieldSummary,
        Format,
        OpenShard,
        SampleLayout,
        Sidecar,
    )
    from penstock.readers.index.blob_names import BlobNames
    from penstock.readers.index.manifest import Manifest, ManifestHeader
    from penstock.readers.index.repair import IndexRepair
    from penstock.readers.index.sidecars import Sidecars
    from penstock.readers.origin import LeftOut, Origin, RemoteFolder, Scratch
    from penstock.readers.types import ImageRange

    Ints = NDArray[np.int64]


_log = logging.getLogger("penstock")


class IndexShards:
    """Open the shards of one index by number. Thread-safe. sidecars: None for a pack. fields: for
    data in chunks, the fields of remote shards whose bytes are cached; None means all."""

    def __init__(
        self,
        origin: Origin,
        manifest: Manifest,
        sidecars: Sidecars | None,
        *,
        fields: tuple[str, ...] | None = None,
    ) -> None:
        self._origin, self._manifest, self._sidecars = origin, manifest, sidecars
        self._fields = tuple(manifest.about.schema) if fields is None else fields
        self._chunks: DecodedChunks | None = None

    @cached_property
    def _blobs(self) -> BlobNames:
        """The names of a remote dataset's shards in a cache."""
        from penstock.readers.index.blob_names import BlobNames

        origin = cast("RemoteFolder", self._origin)
        return BlobNames(origin, self._manifest, self._sidecar, self._fields)

    def keeping(self, fields: tuple[str, ...]) -> IndexShards:
        """Return the same shards, of which only the bytes of these fields are cached."""
        return IndexShards(self._origin, self._manifest, self._sidecars, fields=fields)

    @property
    def remote(self) -> Remote | None:
        """Return the reader of a remote dataset, None for a local one."""
        return self._origin.remote

    def traffic(self) -> list[Traffic]:
        """Return the traffic of a remote dataset; nothing for a local one."""
        return [] if self.remote is None else [self.remote.traffic()]

    @property
    def chunks(self) -> DecodedChunks | None:
        """Return the cache of decoded chunks, None for a dataset without chunks."""
        if self._chunks is None and self._manifest.about.layout.stored("chunks"):
            from penstock.readers.formats import DecodedChunks

            self._chunks = DecodedChunks(url=self._origin.url)
        return self._chunks

    def keep_chunks(self, chunks: DecodedChunks) -> None:
        """Use this cache of decoded chunks. Call it before the first shard is opened."""
        self._chunks = chunks

    def open(self, shard: int) -> OpenShard:
        """Open a shard. For a remote one, fetch the parts that are needed to find its samples, and
        fetch them again if they are damaged. Raises CorruptShardError, IndexChangedError,
        FetchError."""
        remote = self.remote
        if remote is None:
            assert self._origin.folder is not None
            return self._open(shard, LocalPlace(self._origin.folder))
        try:
            return self._open_remote(shard, remote)
        except CorruptShardError as error:
            _log.warning("%s It is removed from the cache and fetched again.", error)
        except PenstockError:  # of the network; some of these are OSErrors too
            raise
        except OSError as error:
            url = self._origin.url
            refuse_shortage(error, url)
            _log.warning("%s: can't be read (%s); it is fetched again", url, error)
        self.drop(shard)
        return self._open_remote(shard, remote)

    def _open_remote(self, shard: int, remote: Remote) -> OpenShard:
        from penstock.readers.blob_source import BlobPlace  # local data needs none of it

        return self._open(shard, BlobPlace(remote, remote.open(self.source(shard))))

    def _open(self, shard: int, place: ShardPlace) -> OpenShard:
        manifest, chunks = self._manifest, self.chunks
        entry = manifest.entry(shard, self._fields)
        if chunks is not None:
            entry = replace(entry, chunks=chunks.of(shard))
        return manifest.format.open(entry, lambda: self._sidecar(shard), place)

    def wanted_share(
        self, shard: int, fields: Sequence[str], draw: Callable[[Ints], Mapping[str, ColumnCrop]]
    ) -> float:
        """Return the share of the bytes of a shard's fields that is needed for parts of all its
        samples; see `Format.wanted_share`. Raises CorruptShardError, FetchError."""
        entry, manifest = self._manifest.entry(shard, self._fields), self._manifest
        return manifest.format.wanted_share(entry, lambda: self._sidecar(shard), fields, draw)

    def _sidecar(self, shard: int) -> Sidecar:
        if self._sidecars is None:
            raise TypeError("a pack has no sidecars")
        return self._sidecars.read(shard)

    def drop(self, shard: int, *, opened: OpenShard | None = None) -> None:
        """Delete the cached bytes of a remote shard because they are wrong; the next opening
        fetches them again. opened: the shard with the wrong bytes; bytes that were fetched after it
        are kept."""
        if self._chunks is not None:
            self._chunks.forget(shard)
        if self.remote is not None:
            inode = None if opened is None else opened.source.inode
            self.remote.drop(self.source(shard), inode=inode)

    def is_near(self, shard: int) -> bool:
        """Return True if the shard can be opened without a request to the remote."""
        if self.remote is None:
            return True
        if self._manifest.format.has_own_index:
            return self.remote.is_whole(self.source(shard))
        return self._sidecars is not None and self._sidecars.are_local

    def source(self, shard: int) -> BlobSource:
        """Describe a shard of a remote dataset as a blob, without I/O. Reading its segments may
        fetch its sidecar and raise FetchError or CorruptShardError."""
        return self._blobs.source(shard)

    def keys(self) -> tuple[str, ...]:
        """Return the keys of all shards of a remote dataset, without I/O: 40 hex digits each."""
        return self._blobs.keys()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Index:
    """The content of a dataset, by shard. The sample in a shard's row has the id starts[shard] +
    row.

    sizes: samples per shard. starts: id of each shard's first sample. shard_bytes: bytes to read
    each shard; of chunks, only those of the cached fields. All are int64, shape (shards,), and no
    shard is empty. quarantined: the number of files that are left out. place: the manifest's
    folder, for messages. shards: opens them. scratch: kept alive as long as the index.
    """

    url: str
    place: str
    sizes: NDArray[np.int64]
    starts: NDArray[np.int64]
    shard_bytes: NDArray[np.int64]
    manifest: Manifest
    shards: IndexShards
    origin: Origin
    scratch: Scratch

    @property
    def about(self) -> ManifestHeader:
        """Return the facts that hold for all shards."""
        return self.manifest.about

    @property
    def format(self) -> Format:
        """Return the dataset's format."""
        return self.manifest.format

    @property
    def kind(self) -> str:
        """Return the name of the format."""
        return self.about.kind

    @property
    def is_self_contained(self) -> bool:
        """Return True if the dataset carries this index, as a pack does."""
        return self.format.has_own_index

    @property
    def samples(self) -> int:
        """Return the number of samples."""
        return self.about.samples

    @property
    def files(self) -> int:
        """Return the number of files or objects that hold the samples."""
        return int(self.manifest.files.sum())

    @property
    def schema(self) -> Schema:
        """Return the fields of a sample, by name and in order, without its number."""
        return self.about.schema

    @property
    def layout(self) -> SampleLayout:
        """Return the storage of the samples' fields."""
        return self.about.layout

    @property
    def images(self) -> dict[str, ImageRange]:
        """Return the bounds of the oriented heights and widths of each image field. For images in
        chunks, which aren't decoded for the index, the bounds allow any size."""
        found = {}
        for name in image_fields(self.schema, self.schema):
            summary = self.summary(name)
            range = summary.images or (ANY_SIZE if summary.storage == "chunks" else None)
            if range is not None:
                found[name] = range
        return found

    def summary(self, field: str) -> FieldSummary:
        """Return the facts about one field over all samples."""
        return self.about.fields[field]

    @property
    def units(self) -> list[NDArray[np.int64]] | None:
        """Return the rows of each decode unit, by shard; None if every sample can be read alone."""
        if not any(self.manifest.units):
            return None
        return [self.manifest.units_of(shard) for shard in range(len(self.sizes))]

    @property
    def lacking(self) -> dict[str, int]:
        """Return the number of samples without a field, for each field that some samples lack."""
        return {name: each.missing for name, each in self.about.fields.items() if each.missing}

    @property
    def fingerprint(self) -> str:
        """Return the fingerprint of the content. It doesn't depend on the place of the data."""
        return self.about.fingerprint

    @property
    def left_out(self) -> Mapping[str, LeftOut]:
        """Return the left-out samples by reason."""
        return self.about.samples_left_out

    @property
    def remote(self) -> Remote | None:
        """Return the reader of a remote dataset, None for a local one."""
        return self.shards.remote

    def keeping(self, fields: tuple[str, ...]) -> Index:
        """Return the same index; of remote shards of chunks, only these fields' bytes are
        prefetched and cached."""
        if not self.manifest.is_of_chunks:
            return self
        kept = self.format.stored_fields(self.schema, fields)
        return replace(
            self, shard_bytes=self.manifest.bytes_of(kept), shards=self.shards.keeping(kept)
        )

    def shard_name(self, shard: int) -> str:
        """Return the name of a shard's file, or of its part of the index, for messages."""
        return printable(self.manifest.names[shard])


def index_of(
    manifest: Manifest,
    *,
    origin: Origin,
    place: bytes | Origin | None,
    scratch: Scratch,
    repair: IndexRepair | None = None,
) -> Index:
    """Build an index from its manifest. place: the folder of the manifest and the sidecars, local
    or remote; None for a pack's own. scratch: kept alive as long as the index. repair: see
    `Sidecars`."""
    ends = np.cumsum(manifest.samples, dtype=np.int64)
    sidecars: Sidecars | None = None
    if place is None:
        shown = f"{origin.url}/{OWN_FOLDER.decode()}"
    else:
        from penstock.readers.index.sidecars import Sidecars  # packs have none

        sidecars = Sidecars(manifest, place, repair)
        shown = printable(place) if isinstance(place, bytes) else place.url
    return Index(
        url=origin.url,
        place=shown,
        sizes=manifest.samples,
        starts=ends - manifest.samples,
        shard_bytes=manifest.shard_bytes,
        manifest=manifest,
        shards=IndexShards(origin, manifest, sidecars),
        origin=origin,
        scratch=scratch,
    )
