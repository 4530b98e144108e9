"""Read the bytes of a shard from a blob of the cache, or past the cache."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.cache import CorruptShardError, PenstockError, log
from penstock.cache.base import Blob, BlobSpans, ReadMode, refuse_shortage
from penstock.cache.blobs import CachedBlob
from penstock.readers.byte_source import REINDEX, ByteSource, SourceSpans
from penstock.readers.files import advise_willneed, only_the_tail

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.cache.blobs import BlockSums, Remote
    from penstock.readers.byte_source import Room, Unread
    from penstock.readers.formats import BlobExtents, Parts, ShardFiles, Sidecar
    from penstock.readers.types import Encoded, Ints


class BlobPlace:
    """A blob with the bytes of a shard; a `ShardPlace`."""

    def __init__(self, remote: Remote, blob: Blob) -> None:
        self._remote, self._blob = remote, blob
        self._source = BlobBytes(remote, blob)

    def file(self, name: bytes, size_bytes: int, *, is_below: bool, remedy: str = "") -> ByteSource:
        """Return the blob."""
        return self._source

    def files(self, files: ShardFiles) -> ByteSource:
        """Return the blob, which has the files end to end."""
        return self._source

    def parts(self, sidecar: Sidecar, fields: Sequence[str]) -> Parts:
        """Return the blob, and where the extents of some fields lie in it."""
        parts, source = sidecar.blob_extents(fields), self._source
        if parts.size_bytes != source.size_bytes:
            raise CorruptShardError(
                f"{source.shown}: this part of the index records {parts.size_bytes:,} bytes of the "
                f"chosen fields, the manifest {source.size_bytes:,}. {REINDEX}"
            )

        def beyond(others: BlobExtents) -> ByteSource:
            segments, size_bytes = others.segments(), others.size_bytes
            blob = replace(self._blob.source, segments=segments, size_bytes=size_bytes)
            return BlobBytes(self._remote, self._remote.pass_by(blob))

        return source, parts.begins, beyond


class BlobBytes(ByteSource):
    """The bytes of a shard in a blob of the cache, or read past the cache."""

    is_fetched = True
    remedy = "Upload the data again."

    def __init__(self, remote: Remote, blob: Blob) -> None:
        self._remote, self._blob = remote, blob
        self.shown, self.size_bytes = blob.source.uri, blob.source.size_bytes
        self.is_mapped = self.is_kept = blob.is_cached
        self.inode = getattr(blob, "inode", None)
        self._sums: BlockSums | None = None
        self._has_sums = False

    @property
    def is_whole(self) -> bool:
        """Return True if all bytes are in the cache."""
        return self._blob.is_whole

    @property
    def is_outdated(self) -> bool:
        """Return True if the blob is read past the cache, and the cache has it by now."""
        return not self._blob.is_cached and self._remote.is_whole(self._blob.source)

    @property
    def is_spare(self) -> bool:
        """Return True if the cache needn't keep the blob for a job of this process, or has removed
        it."""
        return isinstance(self._blob, CachedBlob) and not (
            self._remote.keeps(self._blob.source.key) and self._blob.has_name
        )

    def load(self, wanted: Sequence[SourceSpans], mode: ReadMode) -> list[list[Unread]]:
        """Load spans of blobs. Without a cache they are in fresh memory."""
        return [[*found] for found in self._remote.load(_blob_spans(wanted), mode=mode)]

    def fill(self, starts: Sequence[int], slots: Sequence[Encoded], mode: ReadMode) -> None:
        """Read bytes, check their blocks, and copy them into their slots."""
        first = np.array(starts, np.int64)
        ends = first + np.array([len(slot) for slot in slots], np.int64)
        for slot, data in zip(slots, self.read_parts(first, ends, np.empty, mode), strict=True):
            slot[:] = data

    def read_parts(self, starts: Ints, ends: Ints, room: Room, mode: ReadMode) -> list[Encoded]:
        """Read parts of the blob, and check their blocks."""
        spans = BlobSpans(blob=self._blob, starts=starts.tolist(), ends=ends.tolist())
        (found,) = self._remote.load([spans], mode=mode)
        self.check(starts, ends, mode)
        return found

    def view(self, start: int, end: int, *, touched_bytes: int) -> Encoded | None:
        """Return a view of the blob's map, if the blob is complete, and check its blocks."""
        if not self._blob.is_whole:
            return None
        spans = BlobSpans(blob=self._blob, starts=[start], ends=[end], touched_bytes=touched_bytes)
        ((data,),) = self._remote.load([spans], mode="mmap")
        self.check(np.array([start]), np.array([end]), "mmap")
        return data

    def check(self, starts: Ints, ends: Ints, mode: ReadMode) -> None:
        """Check each block of a complete blob at its first use."""
        if not self._has_sums and self._blob.is_whole:
            self._sums, self._has_sums = self._remote.block_sums(self._blob), True
        if self._sums is not None and not self._sums.are_right(starts, ends, mode):
            raise CorruptShardError(
                f"{self.shown}: its copy in the cache has a block whose checksum "
                "(CRC-32C) is wrong: the disk is failing, or another program wrote to it."
            )

    def buffer(self, spans: Sequence[tuple[int, int]]) -> Any:
        """Return a buffer of the blob in which these spans are filled."""
        return self._blob.buffer(spans)

    def parsing(self) -> AbstractContextManager[None]:
        """Let the kernel read the end of the map ahead, if there is one."""
        address = self._blob.address()
        return nullcontext() if address is None else only_the_tail(address, self.size_bytes)

    def advise(self, starts: Ints, ends: Ints) -> None:
        """Ask the kernel to read the cached bytes ahead."""
        address = self._blob.address()
        if address is not None:
            advise_willneed(address + starts, address + ends)

    def bring(self, wanted: Sequence[SourceSpans], *, here: int) -> None:
        """Fetch spans into the cache, and count those that it has as hits."""
        self._remote.bring(_blob_spans(wanted), here=here)

    def refuse(self, error: Exception, attempt: int) -> None:
        """Raise errors of the network, and those that fetching again doesn't help against."""
        if isinstance(error, CorruptShardError):
            if attempt:
                raise error
            return
        refuse_shortage(error, self._remote.label)
        cache = self._remote.cache
        if isinstance(error, PenstockError) or cache is None or attempt == 2:
            raise error
        if attempt:
            # Bytes that were just written can't be read: stop using that disk for a while.
            cache.give_up(error, reads=True)
        else:
            log.warning("%s: the cache can't be read (%s)", self._remote.label, error)


def _blob_spans(wanted: Sequence[SourceSpans]) -> list[BlobSpans]:
    found = []
    for each in wanted:
        assert isinstance(each.source, BlobBytes)
        found.append(BlobSpans(blob=each.source._blob, starts=each.starts, ends=each.ends))
    return found
