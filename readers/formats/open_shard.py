"""Define an open shard of any format: its table of samples, and how the samples are read.

Samples are read in two ways, which one shard may mix, field by field (`SampleLayout.storage`). What
is stored as a *span* is a range of bytes with a checksum in the shard's flat data, so that a sample
can be read by itself. What is stored by *rows* only the shard can read: values that the index
notes, or chunks that have to be decoded as a whole (a row group, a chunk of an array).

An open shard has one int64 table, a row per sample, because a batch gathers rows from many shards:
one gather of 4 rows takes 0.7 us, six from separate columns 4.2.

Whatever the container, a blob's samples are loaded alike, so one `BlobShard` serves files and, with
columns of its own, packs. The bytes come through `Remote.load`, for one shard here, for all shards
of a batch in `readers.dataset`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, get_args

from penstock.cache.base import BlobSpans
from penstock.readers.fields import array_form, has_sides
from penstock.readers.files import advise_willneed

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from penstock.cache.base import Blob, ReadMode
    from penstock.cache.blobs import Remote
    from penstock.readers.fields import Column, Schema
    from penstock.readers.types import Encoded

    Ints = NDArray[np.int64]
    Places = Ints | slice

Storage = Literal["span", "value", "rows", "chunks"]
"""A field is stored as bytes that lie somewhere and have a checksum ("span"), as a number that the
table has ("value"), or as what an open shard is asked for by rows: what was noted of samples
("rows"), and what lies in chunks that are decoded as a whole ("chunks")."""

STORAGES: tuple[Storage, ...] = get_args(Storage)

NO_SPAN = -1
"""Start and end of a span that a sample lacks."""


@dataclass(frozen=True, kw_only=True)
class SampleLayout:
    """How the samples of a dataset are stored, the same in all its shards.

    storage: of each field. lacking: fields that some samples lack.
    """

    schema: Schema
    storage: Mapping[str, Storage]
    lacking: frozenset[str] = field(default_factory=frozenset)

    def stored(self, storage: Storage) -> tuple[str, ...]:
        """The fields that are stored so, in order."""
        return tuple(name for name in self.schema if self.storage[name] == storage)

    def is_by_rows(self, name: str) -> bool:
        """Whether an open shard is asked for a field by rows."""
        return self.storage[name] in ("rows", "chunks")

    @cached_property
    def table(self) -> TableColumns:
        """What the columns of a shard's table are."""
        return TableColumns(self)


class SpanPlace(NamedTuple):
    """The columns of a table that tell of a span.

    start, end: of its bytes in the shard's flat data, end exclusive, both `NO_SPAN` where a sample
    lacks it; crc: their CRC-32C. height: of an image or a mask, whose width stands behind it.
    codec: of an array, a number in `ARRAY_CODECS`; lengths: where its shape differs between
    samples, the first length of it.
    """

    start: int
    end: int
    crc: int
    height: int | None = None
    codec: int | None = None
    lengths: int | None = None


class TableColumns:
    """The columns of an open shard's table, by number.

    spans, values: of each such field; present: of those that are noted and that some samples
    lack. count: of all. An image and a label have start, end, height, width, label, CRC.
    """

    def __init__(self, layout: SampleLayout) -> None:
        self.count = 0
        spans = {name: self._span(layout, name) for name in layout.stored("span")}
        self.values = {name: self._next() for name in layout.stored("value")}
        noted = (n for n in layout.schema if layout.storage[n] in ("value", "rows"))
        self.present = {name: self._next() for name in noted if name in layout.lacking}
        self.spans = {name: place._replace(crc=self._next()) for name, place in spans.items()}

    def _span(self, layout: SampleLayout, name: str) -> SpanPlace:
        place = SpanPlace(self._next(), self._next(), NO_SPAN)
        if has_sides(layout.schema[name]):
            return place._replace(height=self._next(2))
        form = array_form(layout.schema[name])
        if form is None:
            return place
        place = place._replace(codec=self._next())
        return place._replace(lengths=self._next(len(form.shape))) if form.is_ragged else place

    def _next(self, count: int = 1) -> int:
        self.count += count
        return self.count - count


class OpenShard(Protocol):
    """A shard whose samples can be read.

    table: what is known of each sample, int64, shape (samples, columns); `SampleLayout.table` says
    what its columns are. is_mapped: spans can be had as views of a map. is_file_per_sample: one
    sample can be gone or changed while the others are well.
    """

    table: NDArray[np.int64]
    is_mapped: bool
    is_file_per_sample: bool

    def views(self, starts: list[int], ends: list[int]) -> list[Encoded]:
        """Views of the flat data, if is_mapped."""

    def read_into(self, rows: list[int], starts: list[int], slots: list[Encoded]) -> None:
        """Read spans of samples, each into its slot, which is one byte longer than the span. rows:
        the samples'. Raises CorruptShardError, IndexChangedError, DatasetError, FetchError."""

    def gather(
        self,
        field: str,
        rows: Ints,
        out: NDArray[Any],
        places: Places,
        wrong: dict[int, str],
        *,
        corners: Ints | None = None,
    ) -> None:
        """Read a field that is stored by rows and whose samples have one shape: out[places] = the
        rows, 0 where a sample lacks it. places: numbers, or a slice where they lie side by side and
        in order. wrong: where bad samples are noted, by place in rows, with the reason. corners: of
        the part of each that is wanted, which has the shape of out, int64, shape (n, dimensions);
        None: all of it. Raises as read_into does."""

    def read_rows(
        self, rows: Ints, fields: Sequence[str], wrong: dict[int, str]
    ) -> Mapping[str, Column]:
        """Read other fields that are stored by rows, of samples in any order. wrong: as for
        gather. Raises as read_into does."""

    def advise(self, starts: NDArray[np.int64], ends: NDArray[np.int64]) -> None:
        """Ask the kernel to read these bytes of the flat data ahead; returns at once."""

    def name(self, row: int) -> str:
        """The sample's name for people."""

    def source_names(self) -> list[bytes] | None:
        """The samples' names in what the shard was made from; None where it wasn't made of
        anything else, or doesn't tell."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StridedRows:
    """Where one field's rows lie, for those who read rows of many shards at once.

    data: a view of the shard's bytes, which keeps their map alive; the first row begins where it
    does. stride_bytes: from one row to the next; row_bytes: of one; dtype: of its numbers. below:
    rows whose numbers aren't all from 0 to this are bad; None: any may be.
    """

    data: Encoded
    stride_bytes: int
    row_bytes: int
    dtype: np.dtype[Any]
    below: int | None = None

    def fits(self, rows: NDArray[Any]) -> bool:
        """Whether no row is bad."""
        if self.below is None:
            return True
        is_small = int(rows.max()) < self.below
        return is_small and (self.dtype.kind == "u" or int(rows.min()) >= 0)


class BlobShard:
    """Samples in a blob of the cache. table: START and END count from the blob's first byte."""

    is_mapped = True
    is_file_per_sample = False

    def __init__(self, remote: Remote, blob: Blob, table: NDArray[np.int64]) -> None:
        self.blob, self.table = blob, table
        self._remote = remote

    def views(self, starts: list[int], ends: list[int]) -> list[Encoded]:
        """Views of a cached blob, else fresh memory. Raises FetchError."""
        return self._load(starts, ends, "mmap")

    def read_into(self, rows: list[int], starts: list[int], slots: list[Encoded]) -> None:
        """Read the samples and copy them into their slots."""
        del rows
        ends = [start + len(slot) - 1 for start, slot in zip(starts, slots, strict=True)]
        for slot, sample in zip(slots, self._load(starts, ends, "pread"), strict=True):
            slot[:-1] = sample

    def _load(self, starts: list[int], ends: list[int], mode: ReadMode) -> list[Encoded]:
        (samples,) = self._remote.load(
            [BlobSpans(blob=self.blob, starts=starts, ends=ends)], mode=mode
        )
        return samples

    def advise(self, starts: NDArray[np.int64], ends: NDArray[np.int64]) -> None:
        """Ask the kernel to read ahead what is on the local disk."""
        address = self.blob.address()
        if address is not None:
            advise_willneed(address + starts, address + ends)
