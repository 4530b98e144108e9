"""Locate the extents of a shard of chunks: in its files, and in its blob of the cache.

`ShardFiles` are the files of a shard, end to end; remote ones are a blob. `ChunkedShard` is a shard
of chunks as the metadata of its files describe it: no sample is looked at. `BlobExtents` places the
extents of the selected fields in the blob, end to end.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import numpy as np
from crc32c import crc32c

from penstock.cache.base import LEAST_ABSENT_BYTES
from penstock.readers.formats.shard_summary import FieldSummary, ShardSummary, Sums
from penstock.readers.origin import Entry, segment

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from penstock.cache.base import Segment
    from penstock.readers.fields import Schema
    from penstock.readers.formats.open_shard import SampleLayout

    Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ShardFiles:
    """The files of one shard, in order. sizes: bytes, mtimes_ns: 0 of remote ones, both int64,
    shape (files,); versions: etags or the like, "" of local ones."""

    names: Sequence[bytes]
    sizes: NDArray[np.int64]
    mtimes_ns: NDArray[np.int64]
    versions: Sequence[str]

    @classmethod
    def of(cls, entries: Sequence[Entry]) -> ShardFiles:
        """What a listing says of some files."""
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
        """The bytes of all."""
        return int(self.sizes.sum())

    @property
    def starts(self) -> NDArray[np.int64]:
        """Where each begins if they lie end to end, and the end, int64, shape (files + 1,)."""
        return np.concatenate(([0], np.cumsum(self.sizes))).astype(np.int64)

    def entries(self) -> Iterator[Entry]:
        """What a listing said of each."""
        rows = zip(
            self.names, self.sizes.tolist(), self.mtimes_ns.tolist(), self.versions, strict=True
        )
        for name, size_bytes, mtime_ns, version in rows:
            yield Entry(name=name, size_bytes=size_bytes, mtime_ns=mtime_ns, version=version)

    def segments(self) -> Sequence[Segment]:
        """The objects of a blob."""
        rows = zip(self.names, self.sizes.tolist(), self.versions, strict=True)
        return tuple(segment(*row) for row in rows)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Extents:
    """Where the bytes of a shard's samples lie in its files, part by part; a part has a number.

    An extent is what is fetched together: an encoded chunk, or all the rows of a field whose
    samples can be had alone. All int64, shape (extents,). files: numbers among the shard's files;
    starts, sizes: bytes in that file; fields: number in the schema of the field that they are of.
    """

    files: NDArray[np.int64]
    starts: NDArray[np.int64]
    sizes: NDArray[np.int64]
    fields: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.sizes)

    @property
    def size_bytes(self) -> int:
        """The bytes of all."""
        return int(self.sizes.sum())

    def field_bytes(self, fields: int) -> tuple[int, ...]:
        """The bytes of each field of a schema that has so many."""
        found: list[int] = [0] * fields
        for field_number in np.unique(self.fields).tolist():
            found[field_number] = int(self.sizes[self.fields == field_number].sum())
        return tuple(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkedShard:
    """What metadata say of one shard.

    A shard is a file, a contiguous part of a large one, or several small ones. samples: at least
    one. files: that its bytes lie in; extents: which of their bytes. units: rows of each decode
    unit, in order; empty where a sample can be had alone. checksum: CRC-32C of what the metadata
    say; it changes with the content as far as they tell. fields: what is known of some, such as how
    many samples lack it. notes: what the format itself wants to know again when the shard is
    opened.
    """

    samples: int
    files: Sequence[Entry]
    extents: Extents
    checksum: int
    units: Sequence[int] = ()
    fields: Mapping[str, FieldSummary] = field(default_factory=dict)
    notes: bytes = b""

    def summary(self, schema: Schema) -> ShardSummary:
        """Its contribution to the manifest."""
        units = np.array(self.units, "<u4")
        return ShardSummary(
            samples=self.samples,
            size_bytes=self.extents.size_bytes,
            sums=Sums(samples=self.checksum, columns=crc32c(units)),
            labels=None,
            fields={name: self.fields.get(name, FieldSummary(storage="chunks")) for name in schema},
            files=len(self.files),
            units=tuple(self.units),
            field_bytes=self.extents.field_bytes(len(schema)),
        )


NOT_IN_BLOB = -1
_TOGETHER_BYTES = 4096


class ExtentNotes(Protocol):
    """What an index notes of a shard of chunks."""

    @property
    def layout(self) -> SampleLayout: ...

    @property
    def files(self) -> ShardFiles: ...

    @property
    def extents(self) -> Extents | None: ...


class BlobExtents:
    """The extents of some fields in a blob, in the order of their files, so that what lies side by
    side there does so here.

    begins: of each extent of the shard its first byte in the blob, NOT_IN_BLOB where it isn't in
    it, int64, shape (extents,).
    """

    def __init__(self, told: ExtentNotes, fields: Iterable[str]) -> None:
        assert told.extents is not None
        wanted = set(fields)
        numbers = [i for i, name in enumerate(told.layout.schema) if name in wanted]
        chosen = np.flatnonzero(np.isin(told.extents.fields, numbers))
        self._place(told, chosen)

    @classmethod
    def of(cls, told: ExtentNotes, extents: Sequence[int]) -> BlobExtents:
        """Of some extents by number."""
        made = cls.__new__(cls)
        made._place(told, np.unique(np.array(extents, np.int64)))
        return made

    def _place(self, told: ExtentNotes, chosen: Ints) -> None:
        assert told.extents is not None
        self._files, self._extents = told.files, told.extents
        order = np.lexsort((told.extents.starts[chosen], told.extents.files[chosen]))
        self._chosen = chosen = chosen[order]
        sizes = told.extents.sizes[chosen]
        self.size_bytes = int(sizes.sum())
        self.begins: Ints = np.full(len(told.extents), NOT_IN_BLOB, np.int64)
        self.begins[chosen] = np.cumsum(sizes) - sizes

    def segments(self, *, may_lack: bool = False) -> tuple[Segment, ...]:
        """The ranges of objects that the blob is made of. Small ones in a row are one. may_lack: an
        object that isn't there is no error."""
        extents, files = self._extents, self._files
        versions = files.versions
        # Too few bytes of one can't tell that it isn't there: then it is an error after all.
        small = extents.sizes[self._chosen] < LEAST_ABSENT_BYTES
        surely = set(extents.files[self._chosen][small].tolist())
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
                # Parts of a segment can be fetched alone, at multiples of so many bytes.
                if (before, end) == (file, start) and start + size - begin <= _TOGETHER_BYTES:
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
                may_lack=may_lack and file not in surely,
            )
            for file, start, end in found
        )
