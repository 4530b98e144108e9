"""Define an open shard of any format: its table of samples, and how the samples are read.

Samples are read in two ways, and one shard may use both for different fields
(`SampleLayout.storage`). A field stored as a *span* is a range of bytes with a checksum in the
shard's flat data, so each sample can be read by itself. A field stored by *rows* is read through
the shard: values that the index records, or chunks that must be decoded as a whole (a row group, a
chunk of an array).

An open shard has one int64 table with one row per sample, because a batch gathers rows from many
shards: one gather of 4 rows takes 0.7 us, six gathers from separate columns take 4.2 us.

The bytes of a shard come from its `ByteSource`. Spans of all shards of a batch are loaded by one
call. Rows are read by a request for each shard (`OpenShard.request`), the bytes of all requests of
a batch are fetched by one call (`fetch`), and each shard reads its own (`read`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self, get_args

from penstock.cache.base import READ_MODE, ReadMode

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy as np

    from penstock.readers.byte_source import ByteSource, SourceSpans
    from penstock.readers.fieldtypes import Column, ColumnCrop, Schema
    from penstock.readers.types import Encoded, Ints, Numbers

    Places = Ints | slice

Storage = Literal["span", "value", "rows", "chunks"]
"""The storage of a field: bytes with a place and a checksum ("span"), a number in the table
("value"), or data that is read by rows from the open shard: values that the index records ("rows"),
or chunks that are decoded as a whole ("chunks")."""

STORAGES: tuple[Storage, ...] = get_args(Storage)

MISSING = -1
"""The file number of a field that a sample lacks."""

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

    @property
    def is_of_chunks(self) -> bool:
        """Return True if samples lie in chunks, which their metadata describe."""
        return "chunks" in self.storage.values()

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
        if layout.schema[name].has_sides:
            return place._replace(height=self._next(2))
        form = layout.schema[name].form
        if form is None:
            return place
        place = place._replace(codec=self._next())
        return place._replace(lengths=self._next(len(form.shape))) if form.is_ragged else place

    def _next(self, count: int = 1) -> int:
        self.count += count
        return self.count - count


@dataclass(slots=True, kw_only=True, eq=False)  # frozen would cost 1 us per shard and batch
class RowRequest:
    """The rows of one shard that a batch reads, of the fields that are stored by rows.

    rows: in any order. dense: fields whose samples have one shape. others: other fields. crops: the
    parts of samples that are needed, by dense field, one for each row; other fields are read
    whole. mode: as in `Dataset.read`. spans: what must be fetched before it is read.
    """

    rows: Ints
    dense: Sequence[str] = ()
    others: Sequence[str] = ()
    crops: Mapping[str, ColumnCrop] = field(default_factory=dict)
    mode: ReadMode = READ_MODE
    spans: Sequence[SourceSpans] = ()

    def release(self) -> None:
        """End the waits of other batches for what this request would have fetched."""


@dataclass(slots=True, kw_only=True, eq=False)
class RowsOut:
    """The memory into which the rows of one shard are read.

    arrays: of the batch, by dense field. places: of the rows in them: numbers, or a slice if they
    are consecutive. wrong: receives the reason for each bad sample, by place in the request's rows.
    columns: receives the other fields.
    """

    arrays: Mapping[str, Numbers]
    places: Places
    wrong: dict[int, str] = field(default_factory=dict)
    columns: dict[str, Column] = field(default_factory=dict)


class OpenShard(ABC):
    """A shard whose samples can be read.

    table: the facts about each sample, int64, shape (samples, columns); `SampleLayout.table`
    defines its columns. source: the bytes of its samples, in which spans count from the first byte.
    can_divide: True if several threads may read the rows of one request, some each.
    """

    table: Ints
    source: ByteSource
    can_divide: bool = True

    def request(self, request: RowRequest) -> RowRequest:
        """Return the request with what must be fetched for it. Nothing is read."""
        return request

    @classmethod
    def fetch(cls, requests: Sequence[tuple[Self, RowRequest]]) -> None:
        """Fetch what the requests of shards of one dataset need, by one call. Raises as
        `ByteSource` does."""
        del requests

    @abstractmethod
    def read(self, request: RowRequest, out: RowsOut) -> None:
        """Read the rows of a request. A sample that lacks a dense field gives 0. Raises as
        `ByteSource` does."""

    def strided(self, field: str) -> StridedRows | None:
        """Return the places of a field's rows in a map; None if they can't be copied from one, or
        must be checked before."""
        return None

    def lengths(self, field: str, rows: Ints) -> Ints | None:
        """Return the first lengths of samples of a field, int64, shape (n,), if they are known
        without reading."""
        return None

    @abstractmethod
    def name(self, row: int) -> str:
        """Return the sample's name for messages."""

    def source_names(self) -> list[bytes] | None:
        """Return the samples' names in the data from which the shard was made; None if it isn't a
        copy or doesn't record them."""
        return None


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

    @property
    def layout(self) -> tuple[Any, ...]:
        """Return what must be equal if rows of several shards are copied together."""
        return self.stride_bytes, self.row_bytes, self.dtype, self.below

    def fits(self, rows: Numbers) -> bool:
        """Return True if no row is bad."""
        if self.below is None:
            return True
        is_small = int(rows.max()) < self.below
        return is_small and (self.dtype.kind == "u" or int(rows.min()) >= 0)
