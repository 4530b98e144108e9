"""Describe an open dataset shard by shard, and open its shards: local files, or blobs of the cache.

A sample's id is its position in the index; it never changes while the index is valid. Every process
and node derives the same blob keys from the manifest without any I/O. The segments of a blob are
read from its sidecar when the blob is opened or filled. Remote sidecars are small objects of the
cache.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from penstock.cache import CorruptShardError, PenstockError, log
from penstock.cache.base import BlobSource, Segment, refuse_shortage
from penstock.readers.fieldtypes import ColumnCrop, image_fields
from penstock.readers.files import OWN_FOLDER, printable
from penstock.readers.local_place import LocalPlace
from penstock.readers.types import ANY_SIZE, ImageRange, Ints

if TYPE_CHECKING:
    from penstock.cache.base import Traffic
    from penstock.cache.blobs import Remote
    from penstock.readers.formats import DecodedChunks, FieldSummary, OpenShard, ShardPlace, Sidecar
    from penstock.readers.index.index_folders import Sidecars
    from penstock.readers.index.manifest import Manifest
    from penstock.readers.origin import Origin, RemoteFolder, Scratch


class Index:
    """The content of a dataset, by shard. It opens the shards. Thread-safe.

    The sample in a shard's row has the id starts[shard] + row. url: of the data. place: the
    manifest's folder, for messages. about: the facts that hold for all shards; kind, schema,
    layout, samples, fingerprint and left_out are some of them. sizes: samples per shard. starts: id
    of each shard's first sample. shard_bytes: bytes to read each shard; of chunks, only those of
    the cached fields. All are int64, shape (shards,), and no shard is empty. remote: the reader of
    a remote dataset, None for a local one.
    """

    def __init__(
        self,
        manifest: Manifest,
        *,
        origin: Origin,
        scratch: Scratch,
        sidecars: Sidecars | None = None,
        fields: tuple[str, ...] | None = None,
    ) -> None:
        """scratch: kept alive as long as the index. sidecars: None for a pack. fields: for data in
        chunks, the fields of remote shards whose bytes are cached; None means all."""
        self.manifest, self.about, self.format = manifest, manifest.about, manifest.format
        self.kind, self.schema, self.layout = self.about.kind, self.about.schema, self.about.layout
        self.samples, self.fingerprint = self.about.samples, self.about.fingerprint
        self.left_out = self.about.samples_left_out
        self.origin, self.url, self.remote = origin, origin.url, origin.remote
        self.place = f"{origin.url}/{OWN_FOLDER.decode()}" if sidecars is None else sidecars.shown
        self.sizes = manifest.samples
        self.starts: Ints = np.cumsum(self.sizes, dtype=np.int64) - self.sizes
        self.shard_bytes = manifest.shard_bytes if fields is None else manifest.bytes_of(fields)
        self._fields = tuple(self.schema) if fields is None else fields
        self._sidecars, self._scratch = sidecars, scratch
        self._chunks: DecodedChunks | None = None

    @property
    def is_self_contained(self) -> bool:
        """Return True if the dataset carries this index, as a pack does."""
        return self.format.has_own_index

    @property
    def files(self) -> int:
        """Return the number of files or objects that hold the samples."""
        return int(self.manifest.files.sum())

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
    def units(self) -> list[Ints] | None:
        """Return the rows of each decode unit, by shard; None if every sample can be read alone."""
        if not any(self.manifest.units):
            return None
        return [self.manifest.units_of(shard) for shard in range(len(self.sizes))]

    @property
    def lacking(self) -> dict[str, int]:
        """Return the number of samples without a field, for each field that some samples lack."""
        return {name: each.missing for name, each in self.about.fields.items() if each.missing}

    def keeping(self, fields: tuple[str, ...]) -> Index:
        """Return the same index; of remote shards of chunks, only these fields' bytes are
        prefetched and cached."""
        if not self.manifest.is_of_chunks:
            return self
        return Index(
            self.manifest,
            origin=self.origin,
            scratch=self._scratch,
            sidecars=self._sidecars,
            fields=self.format.stored_fields(self.schema, fields),
        )

    def shard_name(self, shard: int) -> str:
        """Return the name of a shard's file, or of its part of the index, for messages."""
        return printable(self.manifest.names[shard])

    # -- shards

    def traffic(self) -> list[Traffic]:
        """Return the traffic of a remote dataset; nothing for a local one."""
        return [] if self.remote is None else [self.remote.traffic()]

    @property
    def chunks(self) -> DecodedChunks | None:
        """Return the cache of decoded chunks, None for a dataset without chunks."""
        if self._chunks is None and self.layout.stored("chunks"):
            from penstock.readers.formats import DecodedChunks

            self._chunks = DecodedChunks(url=self.url)
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
            assert self.origin.folder is not None
            return self._open(shard, LocalPlace(self.origin.folder))
        try:
            return self._open_remote(shard, remote)
        except CorruptShardError as error:
            log.warning("%s It is removed from the cache and fetched again.", error)
        except PenstockError:  # of the network; some of these are OSErrors too
            raise
        except OSError as error:
            refuse_shortage(error, self.url)
            log.warning("%s: can't be read (%s); it is fetched again", self.url, error)
        self.drop(shard)
        return self._open_remote(shard, remote)

    def _open_remote(self, shard: int, remote: Remote) -> OpenShard:
        from penstock.readers.blob_source import BlobPlace  # local data needs none of it

        return self._open(shard, BlobPlace(remote, remote.open(self.source(shard))))

    def _open(self, shard: int, place: ShardPlace) -> OpenShard:
        entry, chunks = self.manifest.entry(shard, self._fields), self.chunks
        if chunks is not None:
            entry = replace(entry, chunks=(chunks, shard))
        return self.format.open(entry, lambda: self._sidecar(shard), place)

    def wanted_share(
        self, shard: int, fields: Sequence[str], draw: Callable[[Ints], Mapping[str, ColumnCrop]]
    ) -> float:
        """Return the share of the bytes of a shard's fields that is needed for parts of all its
        samples; see `Format.wanted_share`. Raises CorruptShardError, FetchError."""
        entry = self.manifest.entry(shard, self._fields)
        return self.format.wanted_share(entry, lambda: self._sidecar(shard), fields, draw)

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
        if self._sidecars is None:
            return self.remote.is_whole(self.source(shard))
        return isinstance(self._sidecars.place, bytes)

    def source(self, shard: int) -> BlobSource:
        """Describe a shard of a remote dataset as a blob, without I/O. Reading its segments may
        fetch its sidecar and raise FetchError or CorruptShardError."""
        manifest, origin = self.manifest, cast("RemoteFolder", self.origin)
        name, size_bytes = manifest.names[shard], int(self.shard_bytes[shard])
        segments: Sequence[Segment]
        if self.is_self_contained:
            # No version: the fill records the etag of the first answer, and the sums are checked.
            uri, path = origin.uri(name), os.fsdecode(name)
            segments = (Segment(path=path, size_bytes=size_bytes, version=None),)
        else:
            segments = _LazySegments(
                lambda: self._sidecar(shard).segments(self._fields),
                None if manifest.is_of_chunks else int(manifest.files[shard]),
            )
            uri = f"{origin.url}#{printable(name.rpartition(b'/')[2])}"
        return BlobSource(key=self.keys[shard], uri=uri, segments=segments, size_bytes=size_bytes)

    @cached_property
    def keys(self) -> tuple[str, ...]:
        """The keys of all shards of a remote dataset, made without I/O: 40 hex digits each."""
        manifest, origin = self.manifest, cast("RemoteFolder", self.origin)
        sums = manifest.crc32c.tolist(), manifest.columns_crc32c.tolist()
        rows = zip(manifest.names, manifest.etags, *sums, strict=True)
        if not manifest.is_of_chunks:
            return tuple(
                self.format.blob_key(origin, name=name, etag=etag, crc32c=crc, columns_crc32c=other)
                for name, etag, crc, other in rows
            )
        import json  # parts of a file have no names: the facts in the index identify them

        fields = json.dumps([name for name in self.schema if name in self._fields])
        versions = (f"{etag}\0{crc:08x}{other:08x}\0{fields}" for _, etag, crc, other in rows)
        return tuple(origin.blob_key(b"", version) for version in versions)


class _LazySegments(Sequence[Any]):
    """Segments that are loaded on first access. count: their number, if it is known."""

    def __init__(self, load: Callable[[], Sequence[Segment]], count: int | None) -> None:
        self._load, self._count = cache(load), count

    def __len__(self) -> int:
        return len(self._load()) if self._count is None else self._count

    def __getitem__(self, i: Any) -> Any:
        return self._load()[i]
