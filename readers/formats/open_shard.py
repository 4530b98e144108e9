"""Define an open shard of any format: its table of samples, and how the samples are read.

Samples are read in two ways, and one shard may use both for different fields
(`SampleLayout.storage`). A field stored as a *span* is a range of bytes with a checksum in the
shard's flat data, so each sample can be read by itself. A field stored by *rows* is read through
the shard: values that the index records, or chunks that must be decoded as a whole (a row group, a
chunk of an array).

An open shard has one int64 table with one row per sample, because a batch gathers rows from many
shards: one gather of 4 rows takes 0.7 us, six gathers from separate columns take 4.2 us.

The samples of a blob are loaded in the same way in every format, so one `BlobShard` serves files
and, with columns of its own, packs. The bytes come through `Remote.load`: for one shard in this
module, for all shards of a batch in `readers.reading`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, get_args

from penstock.cache.base import BlobSpans
from penstock.readers.fieldtypes import array_form, has_sides
from penstock.readers.files import advise_willneed

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from penstock.cache.base import Blob, ReadMode
    from penstock.cache.blobs import Remote
    from penstock.readers.fieldtypes import Column, Schema
    from penstock.readers.types import Encoded

    Ints = NDArray[np.int64]
    Places = Ints | slice

Storage = Literal["span", "value", "rows", "chunks"]
"""The storage of a field: bytes with a place and a checksum ("span"), a number in the table
("value"), or data that is read by rows from the open shard: values that the index records ("rows"),
or chunks that are decoded as a whole ("chunks")."""

STORAGES: tuple[Storage, ...] = get_args(Storage)

NO_SPAN = -1
"""The start and end of a span that a sample lacks."""


@dataclass(frozen=True, kw_only=True)
class SampleLayout:
    """The storage of a dataset's samples, the same in all its shards.

    storage: of each field. lacking: fields that some samples lack.
    """

    schema: Schema
    storage: Mapping[str, Storage]
    lacking: frozenset[str] = field(default_factory=frozenset)

    def stored(self, storage: Storage) -> tuple[str, ...]:
        """Return the fields with this storage, in order."""
        return tuple(name for name in self.schema if self.storage[name] == storage)

    def is_by_rows(self, name: str) -> bool:
        """Return True if a field is read by rows from an open shard."""
        return self.storage[name] in ("rows", "chunks")

    @cached_property
    def table(self) -> TableColumns:
        """Return the columns of a shard's table."""
        return TableColumns(self)


class SpanPlace(NamedTuple):
    """The columns of a table that describe a span.

    start, end: of its bytes in the shard's flat data, end exclusive; both are `NO_SPAN` if a sample
    lacks it. crc: CRC-32C of the bytes. height: of an image or a mask; the next column is its
    width. codec: of an array, a number in `ARRAY_CODECS`. lengths: first column of an array's
    shape, if shapes differ between samples.
    """

    start: int
    end: int
    crc: int
    height: int | None = None
    codec: int | None = None
    lengths: int | None = None


class TableColumns:
    """The columns of an open shard's table, by number.

    spans, values: of each field that is stored so. present: of recorded fields that some samples
    lack. count: of all columns. An image and a label have start, end, height, width, label, CRC.
    """

    def __init__(self, layout: SampleLayout) -> None:
        self.count = 0
        spans = {name: self._span(layout, name) for name in layout.stored("span")}
        self.values = {name: self._next() for name in layout.stored("value")}
        recorded = (n for n in layout.schema if layout.storage[n] in ("value", "rows"))
        self.present = {name: self._next() for name in recorded if name in layout.lacking}
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

    table: the facts about each sample, int64, shape (samples, columns); `SampleLayout.table`
    defines its columns. is_mapped: True if spans can be viewed in a map. is_file_per_sample: True
    if one sample can be missing or changed while the others are intact.
    """

    table: NDArray[np.int64]
    is_mapped: bool
    is_file_per_sample: bool

    def views(self, starts: list[int], ends: list[int]) -> list[Encoded]:
        """Return views of the flat data. Requires is_mapped."""

    def read_into(self, rows: list[int], starts: list[int], slots: list[Encoded]) -> None:
        """Read spans of samples, each into its slot, which is one byte longer than the span.

        rows: of the samples. Raises CorruptShardError, IndexChangedError, DatasetError or
        FetchError.
        """

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
        rows.

        A sample that lacks the field gives 0. places: numbers, or a slice if they are consecutive.
        wrong: receives the reason for each bad sample, by place in rows. corners: of the part of
        each sample that is needed, which has the shape of out, int64, shape (n, dimensions); None
        reads whole samples. Raises as read_into does.
        """

    def read_rows(
        self, rows: Ints, fields: Sequence[str], wrong: dict[int, str]
    ) -> Mapping[str, Column]:
        """Read other fields that are stored by rows, for samples in any order. wrong: as for
        gather. Raises as read_into does."""

    def advise(self, starts: NDArray[np.int64], ends: NDArray[np.int64]) -> None:
        """Ask the kernel to read these bytes of the flat data ahead. Returns at once."""

    def name(self, row: int) -> str:
        """Return the sample's name for messages."""

    def source_names(self) -> list[bytes] | None:
        """Return the samples' names in the data from which the shard was made; None if it isn't a
        copy or doesn't record them."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StridedRows:
    """The places of one field's rows in a map, for code that copies rows of many shards in one
    call.

    data: a view of the shard's bytes that keeps their map alive, beginning with the first row.
    stride_bytes: from one row to the next. row_bytes: of one row. dtype: of its numbers. below:
    rows with a number outside of [0, below) are bad; None if no row is bad.
    """

    data: Encoded
    stride_bytes: int
    row_bytes: int
    dtype: np.dtype[Any]
    below: int | None = None

    def fits(self, rows: NDArray[Any]) -> bool:
        """Return True if no row is bad."""
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
        """Return views of a cached blob, or fresh memory if it isn't cached. Raises FetchError."""
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
        """Ask the kernel to read the cached bytes ahead."""
        address = self.blob.address()
        if address is not None:
            advise_willneed(address + starts, address + ends)
