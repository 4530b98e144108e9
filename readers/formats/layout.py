"""How the fields of a dataset's samples are stored, and where an open shard's table notes them.

An open shard has one int64 table, a row a sample, because a batch gathers rows from many shards:
one gather of 4 rows takes 0.7 us, six from separate columns 4.2.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Literal, NamedTuple, get_args

from penstock.readers.fields.arrays import array_form, has_sides

if TYPE_CHECKING:
    from collections.abc import Mapping

    from penstock.readers.fields.schema import Schema

Storage = Literal["span", "value", "rows", "chunks"]
"""A field is stored as bytes that lie somewhere and have a checksum ("span"), as a number that the
table has ("value"), or as what an open shard is asked for by rows: what was noted of samples
("rows"), and what lies in chunks that are decoded as a whole ("chunks")."""

STORAGES: tuple[Storage, ...] = get_args(Storage)

NOWHERE = -1
"""Start and end of a span that a sample lacks."""


@dataclass(frozen=True, kw_only=True)
class Layout:
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

    start, end: of its bytes in the shard's flat data, end exclusive, both `NOWHERE` where a sample
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

    def __init__(self, layout: Layout) -> None:
        self.count = 0
        spans = {name: self._span(layout, name) for name in layout.stored("span")}
        self.values = {name: self._next() for name in layout.stored("value")}
        noted = (n for n in layout.schema if layout.storage[n] in ("value", "rows"))
        self.present = {name: self._next() for name in noted if name in layout.lacking}
        self.spans = {name: place._replace(crc=self._next()) for name, place in spans.items()}

    def _span(self, layout: Layout, name: str) -> SpanPlace:
        place = SpanPlace(self._next(), self._next(), NOWHERE)
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
