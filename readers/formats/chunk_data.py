"""The bytes of a shard of chunks, by extent: of local files, or of a blob of the cache.

A blob holds the extents of the fields that a dataset selects, so what nobody wants is neither
fetched nor kept. Other fields can still be asked for: their bytes come by exact ranges each time.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from penstock.cache.base.blob import BlobSource, BlobSpans
from penstock.cache.errors import CorruptShardError
from penstock.readers.files.names import below
from penstock.readers.formats.blob_extents import NOWHERE, BlobExtents
from penstock.readers.formats.file_maps import FileMaps
from penstock.readers.formats.local_files import REINDEX, read_file_into

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

    from penstock.cache.base.blob import Blob
    from penstock.cache.blobs.remote import Remote
    from penstock.readers.formats.decoded_chunks import ShardChunks
    from penstock.readers.formats.sidecar import Sidecar
    from penstock.readers.types import Encoded

Chunk = TypeVar("Chunk")


class ChunkData:
    """What is common to a shard's data, wherever its bytes are."""

    def __init__(self, sidecar: Sidecar, chunks: ShardChunks | None) -> None:
        assert sidecar.extents is not None
        self._sidecar, self._chunks = sidecar, chunks
        self._extents, self._files = sidecar.extents, sidecar.files

    @property
    def sizes(self) -> NDArray[np.int64]:
        """Bytes of each extent, int64, shape (extents,)."""
        return self._extents.sizes

    def read(self, extents: Sequence[int]) -> list[Encoded]:
        """The bytes of some extents."""
        sizes = self._extents.sizes
        return self.read_parts(extents, [0] * len(extents), [int(sizes[n]) for n in extents])

    def read_parts(
        self, extents: Sequence[int], starts: Sequence[int], ends: Sequence[int]
    ) -> list[Encoded]:
        """Parts of extents."""
        raise NotImplementedError

    def view(self, extent: int) -> Encoded | None:
        """A view of an extent."""
        del extent
        return None

    def decoded(
        self,
        chunk: int,
        decode: Callable[[], Chunk],
        *,
        uses: int,
        taken: int = 1,
        size_bytes: int = 0,
    ) -> Chunk:
        """A chunk that is kept, or decoded now."""
        if self._chunks is None:
            return decode()
        found: Chunk = self._chunks.take(
            chunk, decode, uses=uses, taken=taken, size_bytes=size_bytes
        )
        return found

    def in_order(self, chunks: Sequence[int]) -> Iterator[int]:
        """The chunks, those that another thread decodes last."""
        return iter(chunks) if self._chunks is None else self._chunks.in_order(chunks)


class LocalChunkData(ChunkData):
    """The bytes of a shard's files in a local folder."""

    def __init__(self, root: bytes, sidecar: Sidecar, chunks: ShardChunks | None) -> None:
        super().__init__(sidecar, chunks)
        self._root = root
        self._maps = FileMaps(root, sidecar.files)
        # Whether a link leads out of root is looked at once a file: it costs as much as a read.
        self._is_below = np.zeros(len(sidecar.files), np.bool_)

    def view(self, extent: int) -> Encoded | None:
        """A view of an extent, in a map of its file."""
        told = self._extents
        file, start, size = (int(c[extent]) for c in (told.files, told.starts, told.sizes))
        return self._maps.view(file, start, size)

    def read_parts(
        self, extents: Sequence[int], starts: Sequence[int], ends: Sequence[int]
    ) -> list[Encoded]:
        """Parts of extents, each read from its file."""
        found: list[Encoded] = []
        for extent, start, end in zip(extents, starts, ends, strict=True):
            data = np.empty(end - start, np.uint8)
            file = int(self._extents.files[extent])
            name = self._files.names[file]
            begin = int(self._extents.starts[extent]) + start
            path = self._path(file, name)
            read_file_into(path, data, name=name, start=begin, is_rest=False)
            data.flags.writeable = False
            found.append(data)
        return found

    def _path(self, file: int, name: bytes) -> bytes:
        if self._is_below[file]:
            return os.path.join(self._root, name)
        path = below(self._root, name)
        self._is_below[file] = True
        return path


class BlobChunkData(ChunkData):
    """The bytes of a blob of the cache. fields: that it holds."""

    def __init__(
        self,
        remote: Remote,
        blob: Blob,
        sidecar: Sidecar,
        *,
        fields: Sequence[str],
        chunks: ShardChunks | None,
    ) -> None:
        """Raises CorruptShardError."""
        super().__init__(sidecar, chunks)
        self._remote, self._blob = remote, blob
        extents = BlobExtents(sidecar, fields)
        if extents.size_bytes != blob.source.size_bytes:
            raise CorruptShardError(
                f"{blob.source.uri}: this part of the index tells {extents.size_bytes:,} bytes of "
                f"{list(fields)}, the manifest {blob.source.size_bytes:,}. {REINDEX}"
            )
        self._begins = extents.begins

    def read_parts(
        self, extents: Sequence[int], starts: Sequence[int], ends: Sequence[int]
    ) -> list[Encoded]:
        """Parts of extents, by one load."""
        numbers = np.array(extents, np.int64)
        begins = self._begins[numbers]
        elsewhere = begins == NOWHERE
        if not elsewhere.any():
            (data,) = self._remote.load([_spans(self._blob, begins, starts, ends)])
            return data
        others = BlobExtents.of(self._sidecar, numbers[elsewhere].tolist())
        aside = self._remote.pass_by(self._aside(others))
        first, last = np.array(starts, np.int64), np.array(ends, np.int64)
        both = [
            _spans(blob, place[numbers[mine]], first[mine], last[mine])
            for blob, place, mine in (
                (self._blob, self._begins, ~elsewhere),
                (aside, others.begins, elsewhere),
            )
        ]
        found: list[Encoded] = [np.empty(0, np.uint8)] * len(extents)
        loaded = self._remote.load(both)
        for mine, some in zip((~elsewhere, elsewhere), loaded, strict=True):
            for place, one in zip(np.flatnonzero(mine).tolist(), some, strict=True):
                found[place] = one
        return found

    def _aside(self, others: BlobExtents) -> BlobSource:
        """What the blob doesn't hold, which is kept nowhere."""
        source = self._blob.source
        return BlobSource(
            key=source.key,
            uri=source.uri,
            segments=others.segments(),
            size_bytes=others.size_bytes,
        )


def _spans(blob: Blob, begins: np.ndarray, starts: Sequence[int], ends: Sequence[int]) -> BlobSpans:
    return BlobSpans(blob=blob, starts=(begins + starts).tolist(), ends=(begins + ends).tolist())
