"""Locate the extents of a shard of chunks: in its files, and in its blob of the cache.

`ShardFiles` lists the files of a shard in order; a blob holds remote files end to end.
`ChunkedShard` is a shard of chunks as the metadata of its files describe it, without examining a
sample. `BlobExtents` places the extents of the selected fields in the blob, end to end.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from crc32c import crc32c

from penstock.cache.base import LEAST_ABSENT_BYTES
from penstock.readers.formats.shard_summary import FieldSummary, ShardSummary, Sums
from penstock.readers.origin import Entry, segment

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from numpy.typing import ArrayLike, NDArray

    from penstock.cache.base import Segment
    from penstock.readers.fieldtypes import Schema

    Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ShardFiles:
    """The files of one shard, in order.

    sizes: in bytes; mtimes_ns: 0 for remote files; both int64, shape (files,). versions: etags or
    similar, "" for local files.
    """

    names: Sequence[bytes]
    sizes: NDArray[np.int64]
    mtimes_ns: NDArray[np.int64]
    versions: Sequence[str]

    @classmethod
    def of(cls, entries: Sequence[Entry]) -> ShardFiles:
        """Return files as a listing describes them."""
        return cls(
            names=[entry.name for entry in entries],
            sizes=np.array([entry.size_bytes for entry in entries], np.int64),
            mtimes_ns=np.array([entry.mtime_ns for entry in entries], np.int64),
            versions=[entry.version for entry in entries],
        )

    def __len__(self) -> int:
        return len(self.names)

    @property
    def size_bytes(self) -> int:
        """Return the bytes of all files."""
        return int(self.sizes.sum())

    @property
    def starts(self) -> NDArray[np.int64]:
        """Return the start of each file if they lie end to end, and the end, int64, shape (files +
        1,)."""
        return np.concatenate(([0], np.cumsum(self.sizes))).astype(np.int64)

    def entries(self) -> Iterator[Entry]:
        """Yield the listing entry of each file."""
        rows = zip(
            self.names, self.sizes.tolist(), self.mtimes_ns.tolist(), self.versions, strict=True
        )
        for name, size_bytes, mtime_ns, version in rows:
            yield Entry(name=name, size_bytes=size_bytes, mtime_ns=mtime_ns, version=version)

    def segments(self) -> Sequence[Segment]:
        """Return the files as objects of a blob."""
        rows = zip(self.names, self.sizes.tolist(), self.versions, strict=True)
        return tuple(segment(*row) for row in rows)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Extents:
    """The byte ranges of a shard's samples in its files, numbered.

    An extent is fetched as a unit: an encoded chunk, or all the rows of a field whose samples can
    be read singly. All arrays are int64, shape (extents,). files: numbers among the shard's files.
    starts, sizes: bytes in that file. fields: number of the field in the schema.
    """

    files: NDArray[np.int64]
    starts: NDArray[np.int64]
    sizes: NDArray[np.int64]
    fields: NDArray[np.int64]

    @classmethod
    def of(cls, rows: ArrayLike) -> Extents:
        """Return extents from rows of file, start, size and field."""
        table = np.array(rows, np.int64).reshape(-1, 4)
        return cls(files=table[:, 0], starts=table[:, 1], sizes=table[:, 2], fields=table[:, 3])

    def __len__(self) -> int:
        return len(self.sizes)

    @property
    def size_bytes(self) -> int:
        """Return the bytes of all extents."""
        return int(self.sizes.sum())

    def field_bytes(self, fields: int) -> tuple[int, ...]:
        """Return the bytes of each field of a schema with this number of fields."""
        found: list[int] = [0] * fields
        for field_number in np.unique(self.fields).tolist():
            found[field_number] = int(self.sizes[self.fields == field_number].sum())
        return tuple(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkedShard:
    """A shard as the metadata of its files describe it.

    A shard is a file, a contiguous part of a large file, or several small files. samples: at least
    one. files: that its bytes lie in. extents: its bytes in those files. units: rows of each decode
    unit, in order; empty if samples can be read singly. fields: facts about some fields, such as
    how many samples lack one. note: a JSON value of the format itself, which the shard's reader
    gets back; formats with many numbers may give bytes instead. checksum: CRC-32C of the metadata,
    which changes with the content as far as the metadata do; None computes it from the files, the
    extents and the note.
    """

    samples: int
    files: Sequence[Entry]
    extents: Extents
    units: Sequence[int] = ()
    fields: Mapping[str, FieldSummary] = field(default_factory=dict)
    note: Any = None
    checksum: int | None = None

    @property
    def notes(self) -> bytes:
        """Return the note as a sidecar records it."""
        if isinstance(self.note, bytes):
            return self.note
        return json.dumps(self.note, separators=(",", ":")).encode()

    def summary(self, schema: Schema) -> ShardSummary:
        """Return the shard's contribution to the manifest."""
        units = np.array(self.units, "<u4")
        return ShardSummary(
            samples=self.samples,
            size_bytes=self.extents.size_bytes,
            sums=Sums(samples=self._sum(), columns=crc32c(units)),
            labels=None,
            fields={name: self.fields.get(name, FieldSummary(storage="chunks")) for name in schema},
            files=len(self.files),
            units=tuple(self.units),
            field_bytes=self.extents.field_bytes(len(schema)),
        )

    def _sum(self) -> int:
        if self.checksum is not None:
            return self.checksum
        identity = [[os.fsdecode(e.name), e.size_bytes, e.version] for e in self.files]
        sum = crc32c(json.dumps(identity).encode(), crc32c(self.notes))
        extents = self.extents
        table = np.stack((extents.files, extents.starts, extents.sizes, extents.fields))
        return int(crc32c(np.ascontiguousarray(table, "<i8"), sum))


def decode_note(notes: bytes) -> Any:
    """Return the note that `ChunkedShard.notes` encoded from JSON. Raises ValueError."""
    return json.loads(notes)


NOT_IN_BLOB = -1
_JOINED_BYTES = 4096


class BlobExtents:
    """Extents placed in a blob, in the order of their files, so that neighbours in a file stay
    neighbours.

    begins: first byte in the blob of each extent of the shard, NOT_IN_BLOB for an extent outside of
    it, int64, shape (extents,).
    """

    def __init__(self, files: ShardFiles, extents: Extents, chosen: Ints) -> None:
        """Place the chosen extents of a shard. chosen: their numbers, each once."""
        self._files, self._extents = files, extents
        order = np.lexsort((extents.starts[chosen], extents.files[chosen]))
        self._chosen = chosen = chosen[order]
        sizes = extents.sizes[chosen]
        self.size_bytes = int(sizes.sum())
        self.begins: Ints = np.full(len(extents), NOT_IN_BLOB, np.int64)
        self.begins[chosen] = np.cumsum(sizes) - sizes

    def segments(self, *, may_lack: bool = False) -> tuple[Segment, ...]:
        """Return the ranges of objects that make up the blob, with small neighbours joined.

        may_lack: True if a missing object is no error.
        """
        extents, files = self._extents, self._files
        versions = files.versions
        # Very few bytes can't show that an object is missing; then it is an error in any case.
        small = extents.sizes[self._chosen] < LEAST_ABSENT_BYTES
        required = set(extents.files[self._chosen][small].tolist())
        found: list[tuple[int, int, int]] = []
        rows = zip(
            extents.files[self._chosen].tolist(),
            extents.starts[self._chosen].tolist(),
            extents.sizes[self._chosen].tolist(),
            strict=True,
        )
        for file, start, size in rows:
            if found:
                before, begin, end = found[-1]
                # Parts of a segment can be fetched singly, at multiples of this many bytes.
                if (before, end) == (file, start) and start + size - begin <= _JOINED_BYTES:
                    found[-1] = before, begin, start + size
                    continue
            if size:
                found.append((file, start, start + size))
        return tuple(
            segment(
                files.names[file],
                end - start,
                versions[file],
                start=start,
                object_bytes=int(files.sizes[file]),
                may_lack=may_lack and file not in required,
            )
            for file, start, end in found
        )
