"""Read the samples of an open index by (shard, row), and check each span against its CRC-32C."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, get_args

import numpy as np

from penstock.cache import ConfigError
from penstock.cache.base import ReadMode, Traffic, TrafficMeter, joined_traffic
from penstock.readers.blocks import Blocks
from penstock.readers.fieldtypes import RaggedColumn, SampleBatch
from penstock.readers.reading.batch_plan import BatchFields, BatchRows
from penstock.readers.reading.open_shards import OpenShards
from penstock.readers.reading.row_reading import present_fields, read_by_rows

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from penstock.readers.fieldtypes import Column, ColumnCrop
    from penstock.readers.index import Index
    from penstock.readers.reading.parallel_copies import CopyThreads
    from penstock.readers.reading.plain_rows import PlainRows
    from penstock.readers.reading.span_reading import SpanReader

_MODES = get_args(ReadMode)


class SampleReader:
    """Reads samples by (shard, row) and checks each span against its CRC-32C. Safe for several
    threads.

    url: of the dataset, for messages. shards: the open ones. fields: of the schema, in the order
    that batches have.
    """

    def __init__(self, index: Index, *, url: str, fields: Sequence[str]) -> None:
        self.index, self._url = index, url
        self.shards = OpenShards(index)
        self._layout = index.layout
        self._choice = BatchFields(self._layout, fields)
        self._blocks = Blocks()
        self._copy_threads: CopyThreads | None = None
        self._local = TrafficMeter()
        self._plain = self._find_plain()

    @cached_property
    def _spans(self) -> SpanReader:
        """The reader of spans, which arrays of one shape don't have."""
        from penstock.readers.reading.span_reading import SpanReader

        return SpanReader(self, self._local)

    def traffic(self) -> Traffic:
        """Return the bytes read so far, by tier; for a local dataset only bytes_disk."""
        # Rows count as read from the disk: those of remote shards are fetched to it first.
        local = self._local.snapshot()
        return joined_traffic([*self.index.traffic(), local])

    def read(
        self,
        rows: NDArray[np.int64],
        *,
        mode: ReadMode,
        bad: dict[int, str] | None,
        fields: Sequence[str] | None = None,
        crops: Mapping[str, ColumnCrop] | None = None,
        blocks: Blocks | None = None,
    ) -> SampleBatch:
        """Read samples in the order of rows; arguments and errors as for `Dataset.read`."""
        blocks = blocks or self._blocks
        index = self.index
        choice = self._choice if fields is None else BatchFields(self._layout, fields)
        _check_rows(rows, index, mode, self._url)
        if self._plain is not None and not crops and mode != "pread":  # plain rows are read whole
            is_chosen = fields is None or tuple(fields) == self._choice.fields
            plain = self._plain.read(rows, blocks=blocks) if is_chosen else None
            if plain is not None:
                self._local.add(bytes_disk=plain.bytes_read)
                return plain
        visit = self._visit(rows, choice)
        marks: dict[int, str] | None = None if bad is None else {}
        spans = self._spans.read(visit, choice, mode, marks, blocks) if choice.places else None
        size_bytes = 0 if spans is None else spans.size_bytes
        by_rows: dict[str, Column] = {}
        back = visit.back()
        if choice.dense or choice.rows:
            by_rows = read_by_rows(
                visit,
                choice,
                back,
                mode=mode,
                reader=self,
                blocks=blocks,
                marks=marks,
                crops=crops or {},
            )
            size_bytes += self._count_rows(visit, by_rows, choice)
        table = visit.table if back is None else visit.table[back]
        if marks:
            assert bad is not None
            places = range(len(rows)) if visit.order is None else visit.order.tolist()
            bad |= {places[row]: reason for row, reason in marks.items()}
        columns = {**choice.values(table), **by_rows}
        if spans is not None:
            columns |= spans.columns(visit, choice, table, back, marks or ())
        for name, crop in (crops or {}).items():
            if name not in choice.dense:
                from penstock.readers.fieldtypes import cropped  # few need it

                columns[name] = cropped(columns[name], crop)
        return SampleBatch(
            ids=index.starts[rows[:, 0]] + rows[:, 1],
            columns={name: columns[name] for name in choice.fields},
            present={**choice.present(table), **present_fields(choice, by_rows)},
            bytes_read=size_bytes,
        )

    def _count_rows(
        self, visit: BatchRows, columns: Mapping[str, Column], choice: BatchFields
    ) -> int:
        """Count and return the bytes that were read by rows. Values in tables are in memory and
        aren't counted; chunks count with their stored bytes since the last call."""
        if self.index.is_self_contained:
            size_bytes = sum(column.size_bytes for column in columns.values())
            self._local.add(bytes_disk=size_bytes)
            return size_bytes
        if not choice.has_chunks:
            return 0
        chunks = self.index.chunks
        size_bytes = 0 if chunks is None else chunks.reads.take()
        if visit.shards and not visit.shards[0].source.is_fetched:
            self._local.add(bytes_disk=size_bytes)
        return size_bytes

    def _find_plain(self) -> PlainRows | None:
        """Return a reader of plain rows if the chosen fields may lie in them, else None."""
        choice, index = self._choice, self.index
        if not choice.may_be_plain or index.remote is not None:
            return None
        from penstock.readers.reading.plain_rows import PlainRows  # images need none of it

        return PlainRows(choice, index, self.shards)

    def lengths(self, name: str, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the first length of samples of a ragged field, int64, shape (n,): from the shards'
        tables if they are spans, else from the samples. Raises ConfigError for other fields."""
        choice = BatchFields(self._layout, (name,))
        form = self._layout.schema[name].form
        if form is None or not form.is_ragged or form.shape[0] is not None:
            raise ConfigError(f'"{name}": its samples don\'t differ in their first length.')
        _check_rows(rows, self.index, "copy", self._url)
        if choice.places:
            (place,) = choice.places
            visit = self._visit(rows, choice)
            back = visit.back()
            table = visit.table if back is None else visit.table[back]
            assert place.lengths is not None
            return np.maximum(table[:, place.lengths], 0)
        if (known := self._known_lengths(name, self._visit(rows, choice))) is not None:
            return known
        column = self.read(rows, mode="copy", bad={}, fields=(name,)).columns[name]
        assert isinstance(column, RaggedColumn), name
        return column.first_lengths

    def _known_lengths(self, name: str, visit: BatchRows) -> NDArray[np.int64] | None:
        """Return the lengths if the shards know them without reading samples."""
        lengths = np.empty(len(visit.rows), np.int64)
        for shard, a, b in visit.pieces():
            known = shard.lengths(name, visit.rows[a:b])
            if known is None:
                return None
            lengths[visit.places(a, b)] = known
        return lengths

    def close(self) -> None:
        """Close all shards; delivered batches stay valid. Safe to call twice."""
        self.shards.close()
        self._blocks.close()
        if self._plain is not None:
            self._plain.close()
        if self._copy_threads is not None:
            self._copy_threads.close()

    def _visit(self, rows: NDArray[np.int64], choice: BatchFields) -> BatchRows:
        columns = self._layout.table.count if choice.needs_table else 0
        return BatchRows.of(rows, self.shards, columns=columns)

    def copy_threads(self) -> CopyThreads:
        """Return the threads that copy large arrays."""
        if self._copy_threads is None:
            from penstock.readers.reading.parallel_copies import CopyThreads

            # Two threads may make one each; the unused one ends when its user drops it.
            self._copy_threads = CopyThreads()
        return self._copy_threads

    def corruption(self, number: int, row: int, reason: str) -> Exception:
        """Return the error for a sample that can't be read, such as one with a wrong checksum."""
        from penstock.readers.reading.corruption import corruption

        (shard,) = self.shards.get([number])
        sample_id = int(self.index.starts[number]) + row
        shown = f"{shard.name(row)} (sample {sample_id} of {self._url})"
        return corruption(shown, sample_id, reason, is_pack=self.index.is_self_contained)


def _check_rows(rows: NDArray[np.int64], index: Index, mode: ReadMode, url: str) -> None:
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
            f"rows: some don't exist: {url} has {len(index.sizes)} shards, and a row must be "
            "below its shard's size. The plan was made for another dataset."
        )
