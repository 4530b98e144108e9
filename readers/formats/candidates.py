"""Describe what may be samples of a dataset before any of them is decoded.

`Candidates` is the result of listing a dataset in any format: the spans and values of each field,
or, for formats in chunks, the shards that metadata alone describe.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from penstock.cache import ConfigError
from penstock.readers.fields import (
    DenseColumn,
    EncodedColumn,
    ListColumn,
    RaggedColumn,
    array_form,
    is_encoded,
    number_dtype,
)
from penstock.readers.formats.open_shard import SampleLayout
from penstock.readers.types import MAX_PIXELS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import ArrayLike, NDArray

    from penstock.readers.fields import Column, Schema
    from penstock.readers.formats.extents import ChunkedShard
    from penstock.readers.formats.open_shard import Storage
    from penstock.readers.origin import Entry, LeftOut, QuarantineEntry

MISSING = -1
"""In place of a file's number: the sample lacks the field."""

PART_BYTES = 64 * 2**20
"""A shard's size, unless what lies there is larger and can't be cut: as a pack's."""


def part_bounds(sizes: ArrayLike, *, target_bytes: int | None = None) -> NDArray[np.int64]:
    """Bounds of contiguous parts of about one size: int64, shape (parts + 1,).

    target_bytes: that size; None is `PART_BYTES`. sizes: bytes of each item, which isn't cut, at
    least 0, shape (items,). Part i is items [bounds[i], bounds[i + 1]); none is empty, and there is
    one at least where there are items. The parts are as equal as the items let them be, so none is
    a small rest: a part differs from the mean by one item at most.
    """
    ends = np.cumsum(np.asarray(sizes, np.int64))
    if not len(ends):
        return np.zeros(1, np.int64)
    total, target = int(ends[-1]), target_bytes or PART_BYTES
    count = max(1, min(len(ends), round(total / target)))
    # Items go where their middle lies. As floats, since count * total may pass 2^63.
    middles = (ends - np.asarray(sizes, np.int64) / 2) * (count / max(1, total))
    number = np.minimum(middles.astype(np.int64), count - 1)
    first = np.flatnonzero(np.diff(number, prepend=-1))
    return np.append(first, len(ends)).astype(np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Grouping:
    """Positions in a listing, shard by shard.

    order: positions, int64, shape (n,); bounds: where each shard starts and ends in it, int64,
    shape (shards + 1,).
    """

    order: NDArray[np.int64]
    bounds: NDArray[np.int64]

    @property
    def shards(self) -> int:
        """How many shards there are."""
        return len(self.bounds) - 1

    def positions(self, shard: int) -> NDArray[np.int64]:
        """The positions of one shard, int64, shape (its samples,)."""
        return self.order[self.bounds[shard] : self.bounds[shard + 1]]


def group_positions(groups: NDArray[np.int64]) -> Grouping:
    """Group positions by number, in order inside a group; numbers that nobody has are left out."""
    order = np.argsort(groups, kind="stable")
    counts = np.bincount(groups) if len(groups) else np.empty(0, np.int64)
    ends = np.cumsum(counts[counts > 0], dtype=np.int64)
    return Grouping(order=order.astype(np.int64), bounds=np.concatenate(([0], ends)))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Spans:
    """Where the bytes of one field lie, for n candidates; all int64, shape (n,).

    files: numbers in `Candidates.files`, MISSING where the sample lacks the field. starts, sizes:
    bytes in that file. codec: of an array whose bytes are bare numbers, without an .npy header:
    numpy's `dtype.str`; its shape is the schema's, where one length may be None.
    """

    files: NDArray[np.int64]
    starts: NDArray[np.int64]
    sizes: NDArray[np.int64]
    codec: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Candidates:
    """What may be samples: known by names, sizes and by what is noted beside them.

    schema: the fields in order; an Array's dtype and shape may be unsettled yet. files: what the
    spans lie in. names: of the samples, below the dataset's root, for people and quarantines.
    spans: of each field whose bytes lie in files. values: of every other field, which is known by
    now (labels, what a table or a JSON file says). present: of values that some lack, bool, shape
    (n,). shards: which candidates make up which shard, empty ones too. shard_bytes: the mean size
    that these were cut to, None where they lie as the data have them. quarantined: what can't be a
    candidate; passed_over: what is no part of a sample, by extension. chunked: shards of chunks,
    which metadata tell: there are no candidates then, as no sample is looked at. left_out: what
    is there and no field, by the name that it would have, and why. has_papers: files that were
    never meant to be samples may be among the candidates and the quarantined. unnamed: samples
    that are left out and stand in no quarantine, by reason. max_pixels: of an image or a mask.
    """

    schema: Schema
    files: Sequence[Entry]
    names: Sequence[bytes]
    spans: Mapping[str, Spans]
    values: Mapping[str, Column]
    shards: Grouping
    shard_bytes: int | None
    quarantined: list[QuarantineEntry]
    passed_over: dict[str, int]
    present: Mapping[str, NDArray[np.bool_]] = field(default_factory=dict)
    chunked: Sequence[ChunkedShard] = ()
    left_out: Mapping[str, str] = field(default_factory=dict)
    has_papers: bool = False
    unnamed: Mapping[str, LeftOut] = field(default_factory=dict)
    max_pixels: int = MAX_PIXELS

    @classmethod
    def of_chunks(
        cls,
        schema: Schema,
        shards: Sequence[ChunkedShard],
        *,
        left_out: Mapping[str, str] | None = None,
        unnamed: Mapping[str, LeftOut] | None = None,
    ) -> Candidates:
        """What metadata say of data in chunks. schema: settled."""
        nothing = np.empty(0, np.int64)
        return cls(
            schema=schema,
            files=(),
            names=(),
            spans={},
            values={},
            shards=Grouping(order=nothing, bounds=np.zeros(1, np.int64)),
            shard_bytes=None,
            quarantined=[],
            passed_over={},
            chunked=shards,
            left_out=dict(left_out or {}),
            unnamed=dict(unnamed or {}),
        )

    def __len__(self) -> int:
        return len(self.names)

    @property
    def layout(self) -> SampleLayout:
        """How the samples are stored, as far as that is known before they were seen. Raises
        ConfigError for a field that is nowhere, or of which nobody knows what is noted."""
        storage = {name: self._storage(name) for name in self.schema}
        return SampleLayout(schema=self.schema, storage=storage)

    def _storage(self, name: str) -> Storage:
        if self.chunked:
            return "chunks"
        if name in self.spans:
            return "span"
        type = self.schema[name]
        if name not in self.values:
            raise ConfigError(f'schema["{name}"]: got {type!r}, and no such field was found.')
        if number_dtype(type) is not None:
            return "value"
        if not is_encoded(type) and array_form(type) is None:
            raise ConfigError(
                f'schema["{name}"]: got {type!r}, wanted a dtype and a shape for what a table says.'
            )
        return "rows"

    @property
    def sizes(self) -> NDArray[np.int64]:
        """Bytes of each candidate, of all its fields together, int64, shape (n,)."""
        total = np.zeros(len(self), np.int64)
        for spans in self.spans.values():
            total += spans.sizes
        for column in self.values.values():
            total += column_bytes(column)
        return total


def column_bytes(column: Column) -> NDArray[np.int64]:
    """Bytes of each sample of a column, int64, shape (n,)."""
    if isinstance(column, EncodedColumn | ListColumn):
        return np.array([len(sample) for sample in column.samples], np.int64)
    if isinstance(column, DenseColumn):
        return np.full(len(column), column.values[:1].nbytes, np.int64)
    return np.diff(column.offsets) * column.values.dtype.itemsize * _row_length(column)


def _row_length(column: RaggedColumn) -> int:
    """Numbers in one row of the values."""
    return int(np.prod(column.values.shape[1:], dtype=np.int64))
