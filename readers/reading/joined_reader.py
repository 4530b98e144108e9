"""Read the spans and numbers of several local datasets end to end by one pass.

A batch of a mixture of many parts has one or two samples of each. To read them part by part costs
about 100 us a part, and the images of a batch may take as long to decode.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from penstock.cache import CorruptSampleError
from penstock.cache.base import TrafficMeter
from penstock.readers.fieldtypes import Column, SampleBatch
from penstock.readers.reading.batch_plan import BatchRows
from penstock.readers.reading.span_reading import SpanReader

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from penstock.cache.base import ReadMode
    from penstock.readers.blocks import Blocks
    from penstock.readers.formats import OpenShard
    from penstock.readers.reading.parallel_copies import CopyThreads
    from penstock.readers.reading.sample_reader import SampleReader
    from penstock.readers.types import Ints


T = TypeVar("T")


class _JoinedShards:
    """The open shards of several datasets, numbered end to end."""

    def __init__(self, readers: Sequence[SampleReader], first_ids: Sequence[int]) -> None:
        self._each = [reader.shards for reader in readers]
        counts = [len(reader.index.sizes) for reader in readers]
        self._part_of = np.repeat(np.arange(len(readers)), counts).tolist()
        self._first = (np.cumsum(counts) - counts).tolist()
        self._first_ids = first_ids

    def get(self, numbers: Sequence[int]) -> list[OpenShard]:
        """Return shards by number, as `OpenShards.get`."""
        own: dict[int, list[int]] = {}
        for number in numbers:
            part = self._part_of[number]
            own.setdefault(part, []).append(number - self._first[part])
        found = {
            self._first[part] + number: shard
            for part, some in own.items()
            for number, shard in zip(some, self._each[part].get(some), strict=True)
        }
        return [found[number] for number in numbers]

    def read(self, number: int, shard: OpenShard, read: Callable[[OpenShard], tuple[T, bool]]) -> T:
        """Return what `read` returns for a shard, as `OpenShards.read`."""
        part = self._part_of[number]
        return self._each[part].read(number - self._first[part], shard, read)

    def replace(self, number: int, shard: OpenShard) -> OpenShard:
        """Reopen a shard, as `OpenShards.replace`."""
        part = self._part_of[number]
        return self._each[part].replace(number - self._first[part], shard)

    def corruption(self, number: int, row: int, reason: str) -> Exception:
        """Return the error for a sample that can't be read, as `OpenShards.corruption`."""
        part = self._part_of[number]
        error = self._each[part].corruption(number - self._first[part], row, reason)
        if isinstance(error, CorruptSampleError):
            error.sample_id += self._first_ids[part]
        return error

    def copy_threads(self) -> CopyThreads:
        """Return the threads that copy large arrays."""
        return self._each[0].copy_threads()


class JoinedReader:
    """Reads samples of several local datasets by (shard, row), numbered end to end. Safe for
    several threads.

    All have the same fields, of the same types, and the same tables (`can_join`).
    """

    def __init__(self, readers: Sequence[SampleReader], first_ids: Ints) -> None:
        """first_ids: the id of each dataset's sample 0, int64, shape (parts,)."""
        self._meters = [reader.meter for reader in readers]
        self._choice = readers[0].choice
        self._shards = _JoinedShards(readers, first_ids.tolist())
        self._starts = np.concatenate(
            [reader.index.starts + first for reader, first in zip(readers, first_ids, strict=True)]
        )
        sizes = [reader.index.sizes for reader in readers]
        self._sizes = np.concatenate(sizes).view(np.uint64)
        self._part_of = np.repeat(np.arange(len(readers)), [len(each) for each in sizes])
        self._own = TrafficMeter()  # the bytes are counted for each dataset

    @staticmethod
    def can_join(readers: Sequence[SampleReader]) -> bool:
        """Return True if datasets are local and of one format, so that their bytes are read alike,
        their fields are spans and numbers of tables, and their tables have the same columns."""
        first, kind = readers[0].choice, readers[0].index.manifest.about.kind
        layout = first.fields, first.spans, first.values_of, first.columns, first.are_never_empty
        return bool(first.spans) and all(
            reader.index.remote is None
            and reader.index.manifest.about.kind == kind
            and not (reader.choice.dense or reader.choice.rows or reader.choice.lacks_some)
            and (
                reader.choice.fields,
                reader.choice.spans,
                reader.choice.values_of,
                reader.choice.columns,
                reader.choice.are_never_empty,
            )
            == layout
            for reader in readers
        )

    @cached_property
    def _spans(self) -> SpanReader:
        return SpanReader(self._shards, self._own)

    def read(
        self, rows: Ints, *, mode: ReadMode, bad: dict[int, str] | None, blocks: Blocks
    ) -> SampleBatch | None:
        """Read samples in the order of rows, as `SampleReader.read`; None for rows that don't
        exist."""
        shards = rows[:, 0]
        if int(shards.view(np.uint64).max()) >= len(self._sizes):
            return None
        if (rows[:, 1].view(np.uint64) >= self._sizes[shards]).any():
            return None
        visit = BatchRows.of(rows, self._shards, columns=self._choice.columns)
        marks: dict[int, str] | None = None if bad is None else {}
        columns: dict[str, Column] = {**self._choice.values(visit.sorted_table)}
        spans, size_bytes = self._spans.read(
            visit, self._choice, mode=mode, marks=marks, blocks=blocks
        )
        columns |= spans
        if marks:
            assert bad is not None
            positions = visit.positions
            bad |= {int(positions[row]): reason for row, reason in marks.items()}
        counts = np.bincount(self._part_of[shards])
        for part in np.flatnonzero(counts).tolist():
            self._meters[part].add(bytes_disk=size_bytes * int(counts[part]) // len(rows))
        return SampleBatch(
            ids=self._starts[shards] + rows[:, 1],
            columns={name: columns[name] for name in self._choice.fields},
            bytes_read=size_bytes,
        )
