"""Read samples of several local datasets end to end by one pass.

A batch of a mixture of many parts has one or two samples of each. To read them part by part costs
about 100 us a part, and the images of a batch may take as long to decode.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from penstock.cache import CorruptSampleError
from penstock.cache.base import TrafficMeter
from penstock.readers.fieldtypes import Column, PartLoads, SampleBatch
from penstock.readers.reading.batch_plan import BatchRows
from penstock.readers.reading.plain_rows import PlainRows
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
        self._sizes = np.concatenate([reader.index.sizes for reader in readers])
        counts = [len(reader.index.sizes) for reader in readers]
        self._part_of = np.repeat(np.arange(len(readers)), counts)
        self._plain: PlainRows | None = None
        if readers[0].plain is not None:
            self._plain = PlainRows(
                self._choice, self._shards, sizes=self._sizes, starts=self._starts, meter=None
            )

    @staticmethod
    def can_join(readers: Sequence[SampleReader]) -> bool:
        """Return True if datasets are local, their fields are stored alike, as plain rows or as
        spans of one format and numbers, and their tables have the same columns."""
        first = readers[0]
        layout, kind = first.choice.layout, first.index.manifest.about.kind
        if any(reader.choice.layout != layout for reader in readers):
            return False
        if first.plain is not None:
            return all(reader.plain is not None for reader in readers)
        return bool(first.choice.spans) and all(
            reader.index.remote is None
            and reader.index.manifest.about.kind == kind
            and not (reader.choice.dense or reader.choice.rows or reader.choice.lacks_some)
            for reader in readers
        )

    @cached_property
    def _spans(self) -> SpanReader:
        return SpanReader(self._shards, TrafficMeter())  # the bytes are counted for each dataset

    def read(
        self, rows: Ints, *, mode: ReadMode, bad: dict[int, str] | None, blocks: Blocks
    ) -> SampleBatch | None:
        """Read samples in the order of rows, as `SampleReader.read`, and what each dataset gave, in
        no time. Return None for rows that don't exist, or that must be read in another way."""
        shards = rows[:, 0]
        # As unsigned numbers, negative ones are too large.
        if int(shards.view(np.uint64).max()) >= len(self._sizes):
            return None
        if (rows[:, 1].view(np.uint64) >= self._sizes.view(np.uint64)[shards]).any():
            return None
        loads = PartLoads.of(np.bincount(self._part_of[shards]))
        if self._plain is None:
            batch = self._read_spans(rows, loads, mode=mode, bad=bad, blocks=blocks)
        else:
            found = None if mode == "pread" else self._plain.find(rows)
            plain = None if found is None else found.read(blocks, loads=loads)
            if plain is None:
                return None
            batch = plain
        for part, size_bytes in zip(
            loads.parts.tolist(), loads.amounts[:, 1].tolist(), strict=True
        ):
            self._meters[part].add(bytes_disk=int(size_bytes))
        return batch

    def _read_spans(
        self,
        rows: Ints,
        loads: PartLoads,
        *,
        mode: ReadMode,
        bad: dict[int, str] | None,
        blocks: Blocks,
    ) -> SampleBatch:
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
        loads.amounts[:, 1] = loads.amounts[:, 0] * (size_bytes / len(rows))
        return SampleBatch(
            ids=self._starts[rows[:, 0]] + rows[:, 1],
            columns={name: columns[name] for name in self._choice.fields},
            bytes_read=size_bytes,
            loads=loads,
        )
