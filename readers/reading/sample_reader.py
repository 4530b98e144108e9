"""Read the samples of an open index by (shard, row), and check each span against its CRC-32C."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, get_args

import numpy as np

from penstock.cache import ConfigError
from penstock.cache.base import ReadMode, Traffic, TrafficMeter, summed
from penstock.readers.blocks import Blocks
from penstock.readers.fieldtypes import PRESENT, DenseColumn, RaggedColumn, SampleBatch
from penstock.readers.reading.batch_plan import BatchFields, BatchRows
from penstock.readers.reading.open_shards import OpenShards
from penstock.readers.reading.row_reading import read_by_rows

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from penstock.readers.fieldtypes import Column, ColumnCrop
    from penstock.readers.index import Index
    from penstock.readers.reading.plain_rows import FoundRows, PlainRows
    from penstock.readers.reading.span_reading import SpanReader
    from penstock.readers.types import Ints

_MODES = get_args(ReadMode)


class SampleReader:
    """Reads samples by (shard, row) and checks each span against its CRC-32C. Safe for several
    threads.

    shards: the open ones. fields: of the schema, in the order that batches have. plain: finds rows
    that lie in memory at equal distances; None if there can't be any. choice: the fields, by how
    they are stored. meter: of the bytes that are read from local files.
    """

    def __init__(self, index: Index, *, fields: Sequence[str]) -> None:
        self.index, self.shards = index, OpenShards(index)
        self.choice = BatchFields(index.layout, fields)
        self._blocks = Blocks()
        self.meter = TrafficMeter()
        self.plain: PlainRows | None = None
        if self.choice.may_be_plain and index.remote is None:
            from penstock.readers.reading.plain_rows import PlainRows  # images need none of it

            self.plain = PlainRows(
                self.choice, self.shards, sizes=index.sizes, starts=index.starts, meter=self.meter
            )

    @cached_property
    def _spans(self) -> SpanReader:
        """The reader of spans, which arrays of one shape don't have."""
        from penstock.readers.reading.span_reading import SpanReader

        return SpanReader(self.shards, self.meter)

    def traffic(self) -> Traffic:
        """Return the bytes read so far, by tier; for a local dataset only bytes_disk."""
        # Rows count as read from the disk: those of remote shards are fetched to it first.
        return summed([*self.index.traffic(), self.meter.snapshot()])

    def read(
        self,
        rows: Ints,
        *,
        mode: ReadMode,
        bad: dict[int, str] | None,
        fields: Sequence[str] | None = None,
        crops: Mapping[str, ColumnCrop] | None = None,
        blocks: Blocks | None = None,
    ) -> SampleBatch:
        """Read samples in the order of rows; arguments and errors as for `Dataset.read`."""
        blocks, index = blocks or self._blocks, self.index
        choice = self.choice if fields is None else BatchFields(index.layout, fields)
        _check_rows(rows, index, mode)
        if self.plain is not None and not crops and mode != "pread":  # plain rows are read whole
            is_chosen = fields is None or choice.fields == self.choice.fields
            found = self.plain.find(rows) if is_chosen else None
            plain = None if found is None else found.read(blocks)
            if plain is not None:
                return plain
        visit = BatchRows.of(rows, self.shards, columns=choice.columns)
        marks: dict[int, str] | None = None if bad is None else {}
        columns: dict[str, Column] = {**choice.values(visit.sorted_table)}
        present, size_bytes = choice.present(visit.sorted_table), 0
        if choice.dense or choice.rows:
            by_rows = read_by_rows(
                visit, choice, self.shards, mode=mode, marks=marks, crops=crops or {}, blocks=blocks
            )
            size_bytes += self._count_rows(visit, by_rows, choice)
            columns |= by_rows
        if choice.spans:
            spans, count = self._spans.read(visit, choice, mode=mode, marks=marks, blocks=blocks)
            size_bytes += count
            columns |= spans
        if marks:
            assert bad is not None
            positions = visit.positions
            bad |= {int(positions[row]): reason for row, reason in marks.items()}
        for name in choice.masked:
            mask = columns[name + PRESENT]
            assert isinstance(mask, DenseColumn)
            present[name] = mask.values
        for name, crop in (crops or {}).items():
            if name not in choice.dense:
                from penstock.readers.fieldtypes import cropped  # few need it

                columns[name] = cropped(columns[name], crop)
        return SampleBatch(
            ids=index.starts[rows[:, 0]] + rows[:, 1],
            columns={name: columns[name] for name in choice.fields},
            present=present,
            bytes_read=size_bytes,
        )

    def find(self, rows: Ints) -> FoundRows | None:
        """Return where samples lie in memory; None if they aren't plain rows."""
        if self.plain is None:
            return None
        _check_rows(rows, self.index, "copy")
        return self.plain.find(rows)

    def _count_rows(
        self, visit: BatchRows, columns: Mapping[str, Column], choice: BatchFields
    ) -> int:
        """Count and return the bytes that were read by rows. Values in tables are in memory and
        aren't counted; chunks count with their stored bytes since the last call."""
        if self.index.is_self_contained:
            size_bytes = sum(column.size_bytes for column in columns.values())
            self.meter.add(bytes_disk=size_bytes)
            return size_bytes
        if not choice.has_chunks:
            return 0
        chunks = self.index.chunks
        size_bytes = 0 if chunks is None else chunks.reads.take()
        if visit.shards and not visit.shards[0].source.is_fetched:
            self.meter.add(bytes_disk=size_bytes)
        return size_bytes

    def lengths(self, name: str, rows: Ints) -> Ints:
        """Return the first length of samples of a ragged field, int64, shape (n,): from the shards'
        tables if they are spans, else from the samples. Raises ConfigError for other fields."""
        choice = BatchFields(self.index.layout, (name,))
        form = self.index.schema[name].form
        if form is None or not form.is_ragged or form.shape[0] is not None:
            raise ConfigError(f'"{name}": its samples don\'t differ in their first length.')
        _check_rows(rows, self.index, "copy")
        visit = BatchRows.of(rows, self.shards, columns=choice.columns)
        for place in choice.spans.values():
            assert place.lengths is not None
            return np.maximum(visit.sorted_table[:, place.lengths], 0)
        lengths = np.empty(len(rows), np.int64)
        for shard, a, b in visit.pieces():
            known = shard.lengths(name, visit.rows[a:b])
            if known is None:
                break
            lengths[visit.places(a, b)] = known
        else:
            return lengths
        column = self.read(rows, mode="copy", bad={}, fields=(name,)).columns[name]
        assert isinstance(column, RaggedColumn), name
        return column.first_lengths

    def close(self) -> None:
        """Close all shards; delivered batches stay valid. Safe to call twice."""
        self.shards.close()
        self._blocks.close()
        if self.plain is not None:
            self.plain.close()


def _check_rows(rows: Ints, index: Index, mode: ReadMode) -> None:
    if rows.ndim != 2 or rows.shape[1] != 2 or rows.dtype != np.int64:
        raise ConfigError(
            f"rows: got {rows.dtype} of shape {rows.shape}, wanted int64 of shape (n, 2), as "
            "(shard, row)."
        )
    if mode not in _MODES:
        raise ConfigError(f"mode: got {mode!r}, wanted one of {list(_MODES)}.")
    if not len(rows):
        return
    # As unsigned numbers, negative ones are too large.
    shards, row = rows[:, 0].view(np.uint64), rows[:, 1].view(np.uint64)
    sizes = index.sizes.view(np.uint64)
    if shards.max() >= len(sizes) or (row >= sizes[rows[:, 0]]).any():
        raise ConfigError(
            f"rows: some don't exist: {index.url} has {len(index.sizes)} shards, and a row must be "
            "below its shard's size. The plan was made for another dataset."
        )
