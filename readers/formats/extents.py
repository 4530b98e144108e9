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

from penstock.cache import DatasetError
from penstock.cache.base import Segment
from penstock.readers.files import printable
from penstock.readers.formats.shard_summary import MAX_SHARD_BYTES, FieldSummary, ShardSummary, Sums
from penstock.readers.origin import Entry
from penstock.readers.types import Ints, offsets_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from numpy.typing import ArrayLike

    from penstock.readers.fieldtypes import Schema


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ShardFiles:
    """The files of one shard, in order.

    sizes: in bytes; mtimes_ns: 0 for remote files; both int64, shape (files,). versions: etags or
    similar, "" for local files.
    """

    names: Sequence[bytes]
    sizes: Ints
    mtimes_ns: Ints
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
    def starts(self) -> Ints:
        """Return the start of each file if they lie end to end, and the end, int64, shape (files +
        1,)."""
        return offsets_of(self.sizes)

    def entries(self) -> Iterator[Entry]:
        """Yield the listing entry of each file."""
        columns = self.names, self.sizes.tolist(), self.mtimes_ns.tolist(), self.versions
        for name, size_bytes, mtime_ns, version in zip(*columns, strict=True):
            yield Entry(name=name, size_bytes=size_bytes, mtime_ns=mtime_ns, version=version)

    def segments(self) -> Sequence[Segment]:
        """Return the files as objects of a blob."""
        return tuple(entry.segment for entry in self.entries())


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Extents:
    """The byte ranges of a shard's samples in its files, numbered.

    An extent is fetched as a unit: an encoded chunk, or all the rows of a field whose samples can
    be read singly. All arrays are int64, shape (extents,). files: numbers among the shard's files.
    starts, sizes: bytes in that file. fields: number of the field in the schema.
    """

    files: Ints
    starts: Ints
    sizes: Ints
    fields: Ints

    @classmethod
    def of(cls, rows: ArrayLike) -> Extents:
        """Return extents from rows of file, start, size and field."""
        table = np.array(rows, np.int64).reshape(-1, 4)
        return cls(files=table[:, 0], starts=table[:, 1], sizes=table[:, 2], fields=table[:, 3])

    def check(self, file_sizes: Ints, *, fields: int) -> None:
        """Check that all extents lie in their files. Raises ValueError. fields: of the schema."""
        columns = (self.files, self.starts, self.sizes, self.fields)
        if not len(self):
            return
        if min(int(column.min()) for column in columns) < 0:
            raise ValueError("its extents have numbers below 0")
        if self.files.max() >= len(file_sizes) or self.fields.max() >= fields:
            raise ValueError("its extents refer to files or fields that don't exist")
        if float(self.sizes.sum(dtype=np.float64)) > MAX_SHARD_BYTES:
            raise ValueError("its extents have more bytes than a shard may have")
        if (self.sizes > file_sizes[self.files] - self.starts).any():
            raise ValueError("its extents lie outside of their files")

    def __len__(self) -> int:
        return len(self.sizes)

    @property
    def size_bytes(self) -> int:
        """Return the bytes of all extents."""
        return int(self.sizes.sum())

    def field_bytes(self, fields: int) -> tuple[int, ...]:
        """Return the bytes of each field of a schema with this number of fields."""
        found = np.zeros(fields, np.int64)
        np.add.at(found, self.fields, self.sizes)
        return tuple(found.tolist())


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

    @classmethod
    def of(cls, extents: Iterable[tuple[Entry, int, int, int]], **facts: Any) -> ChunkedShard:
        """Return a shard with these extents, each as its file, start, size and field. facts: as
        above."""
        files: dict[Entry, int] = {}
        rows = [(files.setdefault(file, len(files)), *place) for file, *place in extents]
        return cls(files=list(files), extents=Extents.of(rows), **facts)

    @property
    def notes(self) -> bytes:
        """Return the note as a sidecar records it."""
        if isinstance(self.note, bytes):
            return self.note
        return json.dumps(self.note, separators=(",", ":")).encode()

    def summary(self, schema: Schema) -> ShardSummary:
        """Return the shard's contribution to the manifest. Raises DatasetError if its format
        described it wrongly."""
        self._check(fields=len(schema))
        return ShardSummary(
            samples=self.samples,
            size_bytes=self.extents.size_bytes,
            sums=Sums(samples=self._sum(), columns=crc32c(np.array(self.units, "<u4"))),
            labels=None,
            fields={name: self.fields.get(name, FieldSummary(storage="chunks")) for name in schema},
            files=len(self.files),
            units=tuple(self.units),
            field_bytes=self.extents.field_bytes(len(schema)),
        )

    def _check(self, *, fields: int) -> None:
        try:
            sizes = np.array([entry.size_bytes for entry in self.files], np.int64)
            self.extents.check(sizes, fields=fields)
            if self.samples < 1 or (len(self.units) and sum(self.units) != self.samples):
                raise ValueError(f"its units {list(self.units[:5])} don't have {self.samples} rows")
        except ValueError as error:
            shown = printable(self.files[0].name) if self.files else "without a file"
            raise DatasetError(
                f"{shown}: the shard that begins in this file can't be indexed: {error}. The file "
                "is damaged, or its format's code is wrong."
            ) from error

    def _sum(self) -> int:
        if self.checksum is not None:
            return self.checksum
        identity = [[os.fsdecode(e.name), e.size_bytes, e.version] for e in self.files]
        sum = crc32c(json.dumps(identity).encode(), crc32c(self.notes))
        extents = self.extents
        table = np.stack((extents.files, extents.starts, extents.sizes, extents.fields))
        return int(crc32c(np.ascontiguousarray(table, "<i8"), sum))


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

    def segments(self) -> tuple[Segment, ...]:
        """Return the ranges of objects that make up the blob, with small neighbours joined."""
        extents, files = self._extents, self._files
        versions = files.versions
        found: list[tuple[int, int, int]] = []
        columns = (extents.files, extents.starts, extents.sizes)
        for file, start, size in zip(*(c[self._chosen].tolist() for c in columns), strict=True):
            before, begin, end = found[-1] if found else (NOT_IN_BLOB, 0, 0)
            # Parts of a segment can be fetched singly, at multiples of this many bytes.
            if (before, end) == (file, start) and start + size - begin <= _JOINED_BYTES:
                found[-1] = file, begin, start + size
            elif size:
                found.append((file, start, start + size))
        return tuple(
            Segment(
                path=os.fsdecode(files.names[file]),
                size_bytes=end - start,
                version=versions[file] or None,
                start=start,
                object_bytes=int(files.sizes[file]),
            )
            for file, start, end in found
        )
