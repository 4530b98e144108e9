"""Read the samples of an open index by (shard, row), and check each span against its CRC-32C."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, cast, get_args

import numpy as np

from penstock.cache import ConfigError, CorruptSampleError, IndexChangedError
from penstock.cache.base import ReadMode, Traffic, TrafficMeter, joined_traffic
from penstock.readers.blocks import Blocks
from penstock.readers.fields import RaggedColumn, SampleBatch, array_form
from penstock.readers.files import PageAdvice
from penstock.readers.formats import REINDEX
from penstock.readers.reading.batch_plan import BatchFields, BatchRows, BatchSpans
from penstock.readers.reading.checksums import checksums
from penstock.readers.reading.open_shards import OpenShards
from penstock.readers.reading.row_reading import WRONG_CRC, present_fields, read_by_rows
from penstock.readers.reading.span_reading import EMPTY, load_blobs, load_local, span_columns
from penstock.readers.types import UNFIT

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from penstock.readers.fields import Column, ColumnCrop
    from penstock.readers.index import Index
    from penstock.readers.reading.direct_arrays import DirectArrays, Unread
    from penstock.readers.reading.parallel_copies import CopyThreads
    from penstock.readers.reading.plain_rows import PlainRows
    from penstock.readers.types import Encoded

_MODES = get_args(ReadMode)


class SampleReader:
    """Reads samples by (shard, row), each span checked against its CRC-32C. Safe for several
    threads.

    url: of the dataset, for people. shards: those that are open. fields: of the schema, that
    batches get.
    """

    def __init__(self, index: Index, *, url: str, fields: Sequence[str]) -> None:
        self.index, self._url = index, url
        self.shards = OpenShards(index)
        self._layout = index.layout
        self._choice = BatchFields(self._layout, fields)
        self._blocks = Blocks()
        self._movers: CopyThreads | None = None
        self._advice = PageAdvice()
        self._local = TrafficMeter()
        self._plain = self._find_plain()

    def traffic(self) -> Traffic:
        """What was read so far, by tier; of a local dataset bytes_disk alone."""
        # What is stored by rows counts as from the disk: of a remote shard it is brought there.
        remote, local = self.index.remote, self._local.snapshot()
        return local if remote is None else joined_traffic([remote.traffic(), local])

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
        """Samples in the order of rows; arguments and errors as for `Dataset.read`."""
        blocks = blocks or self._blocks
        index = self.index
        choice = self._choice if fields is None else BatchFields(self._layout, fields)
        _check_rows(rows, index, mode, self._url)
        whole = not crops  # a part of a sample is read by who knows its shape
        plain = self._plain_parts(rows, [0, len(rows)], mode, fields, blocks) if whole else None
        if plain is not None:
            return plain[0]
        visit = self._visit(rows, choice)
        marks: dict[int, str] | None = None if bad is None else {}
        payloads: list[Encoded] = []
        slots, size_bytes = None, 0
        if choice.places:
            payloads, slots, size_bytes = self._read_spans(visit, choice, mode, marks, blocks)
        by_rows: dict[str, Column] = {}
        back = visit.back()
        if choice.dense or choice.rows:
            arguments: dict[str, Any] = {"mode": mode, "blocks": blocks, "crops": crops or {}}
            by_rows = read_by_rows(visit, choice, back, reader=self, marks=marks, **arguments)
            size_bytes += self._count_rows(by_rows, choice)
        table = visit.table if back is None else visit.table[back]
        if marks:
            assert bad is not None
            places = range(len(rows)) if visit.order is None else visit.order.tolist()
            bad |= {places[row]: reason for row, reason in marks.items()}
            _make_empty(sorted(marks), places, payloads, table, choice)
        arrays = {} if slots is None else slots.columns(visit, payloads, choice)
        if marks and slots is not None:
            slots.without(arrays, sorted(marks), places)
        columns = {
            **span_columns(choice, payloads, table, back, arrays),
            **choice.values(table),
            **by_rows,
        }
        for name, crop in (crops or {}).items():
            if name not in choice.dense:
                from penstock.readers.fields import cropped  # few need it

                columns[name] = cropped(columns[name], crop)
        return SampleBatch(
            ids=index.starts[rows[:, 0]] + rows[:, 1],
            columns={name: columns[name] for name in choice.fields},
            present={**choice.present(table), **present_fields(choice, by_rows)},
            bytes_read=size_bytes,
        )

    def read_parts(
        self,
        rows: NDArray[np.int64],
        bounds: Sequence[int],
        *,
        mode: ReadMode,
        bad: dict[int, str] | None,
        fields: Sequence[str] | None = None,
        blocks: Blocks | None = None,
    ) -> list[SampleBatch]:
        """Several batches by one read; see `Source.read_parts`."""
        _check_rows(rows, self.index, mode, self._url)
        blocks = blocks or self._blocks
        found = self._plain_parts(rows, bounds, mode, fields, blocks)
        if found is not None:
            return found
        batch = self.read(rows, mode=mode, bad=bad, fields=fields, blocks=blocks)
        return batch.parts(bounds, array=blocks.array)

    def _read_spans(
        self,
        visit: BatchRows,
        choice: BatchFields,
        mode: ReadMode,
        marks: dict[int, str] | None,
        blocks: Blocks,
    ) -> tuple[list[Encoded], DirectArrays | None, int]:
        """The payloads of spans, where arrays were read to, and the bytes of all."""
        spans, slots = BatchSpans.of(visit, choice), None
        size_bytes = int((spans.ends - spans.starts).sum())
        if choice.has_arrays:
            from penstock.readers.reading.direct_arrays import (
                DirectArrays,  # images need none of it
            )

            slots = DirectArrays.of(visit, choice, spans, blocks)
        payloads = self._payloads(
            spans, choice, mode, marks, slots, blocks=blocks, size_bytes=size_bytes
        )
        return payloads, slots, size_bytes

    def _count_rows(self, columns: Mapping[str, Column], choice: BatchFields) -> int:
        """Count what was read by rows; the bytes. What was noted lies in memory and isn't counted,
        chunks are by the bytes that are stored, since somebody asked last."""
        if self.index.is_self_contained:
            size_bytes = sum(column.size_bytes for column in columns.values())
            self._local.add(bytes_disk=size_bytes)
            return size_bytes
        if not choice.has_chunks:
            return 0
        chunks = self.index.shards.chunks
        size_bytes = 0 if chunks is None else chunks.reads.take()
        if self.index.remote is None:  # else it counts by tier
            self._local.add(bytes_disk=size_bytes)
        return size_bytes

    def _plain_parts(
        self,
        rows: NDArray[np.int64],
        bounds: Sequence[int],
        mode: ReadMode,
        fields: Sequence[str] | None,
        blocks: Blocks,
    ) -> list[SampleBatch] | None:
        """Rows that are copied out of maps; None where they aren't."""
        plain = self._plain
        if plain is None or mode == "pread":
            return None
        if fields is not None and tuple(fields) != self._choice.fields:
            return None
        found = plain.read(rows, bounds, blocks=blocks)
        self._local.add(bytes_disk=sum(part.bytes_read for part in found or ()))
        return found

    def _find_plain(self) -> PlainRows | None:
        """What reads the chosen fields where they may be copied out of maps."""
        choice, index = self._choice, self.index
        names = tuple(choice.dense)
        if index.remote is not None or len(names) != 1 or choice.fields != names:
            return None
        if self._layout.storage[names[0]] != "chunks" or index.units is not None:
            return None
        from penstock.readers.reading.plain_rows import PlainRows  # images need none of it

        return PlainRows(names[0], choice.dense[names[0]], index, self.shards)

    def lengths(self, name: str, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """First lengths of samples of a ragged field, int64, shape (n,): from the shards' tables
        where they are spans, else of what is read. Raises ConfigError for other fields."""
        choice = BatchFields(self._layout, (name,))
        form = array_form(self._layout.schema[name])
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
        if (told := self._told_lengths(name, self._visit(rows, choice))) is not None:
            return told
        column = self.read(rows, mode="copy", bad={}, fields=(name,)).columns[name]
        assert isinstance(column, RaggedColumn), name
        return np.diff(column.offsets) if column.shapes is None else column.shapes[:, 0]

    def _told_lengths(self, name: str, visit: BatchRows) -> NDArray[np.int64] | None:
        """The lengths, if the shards know them without reading samples."""
        lengths = np.empty(len(visit.rows), np.int64)
        for shard, a, b in visit.pieces():
            tell = getattr(shard, "lengths", None)
            told = None if tell is None else tell(name, visit.rows[a:b])
            if told is None:
                return None
            lengths[visit.places(a, b)] = told
        return lengths

    def close(self) -> None:
        """Forget all open shards; what was handed out stays valid. Safe to call twice."""
        self.shards.close()
        self._blocks.close()
        if self._plain is not None:
            self._plain.close()
        if self._movers is not None:
            self._movers.close()

    def _visit(self, rows: NDArray[np.int64], choice: BatchFields) -> BatchRows:
        """Open what rows need, and go to each shard once: samples are sorted by shard, unless they
        are already."""
        shards, order = rows[:, 0], None
        borders = np.flatnonzero(shards[1:] != shards[:-1])
        if len(borders) and (shards[1:] < shards[:-1]).any():
            order = np.argsort(shards, kind="stable")
            rows = rows[order]
            shards = rows[:, 0]
            borders = np.flatnonzero(shards[1:] != shards[:-1])
        bounds = [*(borders + 1).tolist(), len(rows)]
        if len(rows):
            bounds.insert(0, 0)
        numbers = shards[bounds[:-1]].tolist()
        return BatchRows.of(
            numbers,
            self.shards.get(numbers),
            bounds,
            rows[:, 1],
            order=order,
            columns=self._layout.table.count if choice.needs_table else 0,
        )

    def _payloads(
        self,
        spans: BatchSpans,
        choice: BatchFields,
        mode: ReadMode,
        marks: dict[int, str] | None,
        slots: DirectArrays | None,
        *,
        blocks: Blocks,
        size_bytes: int,
    ) -> list[Encoded]:
        """The bytes of all spans of the batch, checked; empty ones too. What has a slot lies
        there."""
        began = time.perf_counter()
        found: dict[int, str] | None = None if marks is None else {}
        unread = self._load(spans, mode, found, slots)
        if self.index.remote is not None:
            began = time.perf_counter()  # the network's time isn't the disk's
        if slots is None:
            payloads = cast("list[Encoded]", unread)
            crcs = checksums(spans, payloads, mode, blocks)
        else:
            payloads, crcs = slots.fill(
                spans, unread, mode, blocks, movers=self.movers(), marks=found
            )
        if self.index.remote is None:
            self._local.add(bytes_disk=size_bytes)
        seconds = time.perf_counter() - began
        self._advice.note(samples=len(spans), size_bytes=size_bytes, seconds=seconds)
        if crcs != (wanted := spans.crcs.tolist()):
            wrong = [i for i, crc in enumerate(crcs) if crc != wanted[i] and i not in (found or ())]
            self._refetch(spans, choice, payloads, wrong, mode, found, slots)
        for span, reason in (found or {}).items():
            assert marks is not None
            row, field = divmod(spans.place(span), len(choice.places))
            prefix = f"{choice.names[field]}: " if len(choice.names) > 1 else ""
            marks.setdefault(row, f"{prefix}{reason}")
        if spans.places is None:
            return payloads
        everyone: list[Encoded] = [EMPTY] * spans.count
        for place, payload in zip(spans.places.tolist(), payloads, strict=True):
            everyone[place] = payload
        return everyone

    def _load(
        self,
        spans: BatchSpans,
        mode: ReadMode,
        marks: dict[int, str] | None = None,
        slots: DirectArrays | None = None,
    ) -> list[Unread]:
        if not len(spans):
            return []
        advise, remote = self._advice.is_on, self.index.remote
        if remote is None:
            return load_local(spans, mode, advise=advise, marks=marks, slots=slots)
        return [*load_blobs(spans, mode, remote=remote, opened=self.shards, advise=advise)]

    def movers(self) -> CopyThreads:
        """The threads that help with large arrays."""
        if self._movers is None:
            from penstock.readers.reading.parallel_copies import CopyThreads

            self._movers = CopyThreads()  # two threads may make it: the other's ends with its user
        return self._movers

    def _refetch(
        self,
        spans: BatchSpans,
        choice: BatchFields,
        payloads: list[Encoded],
        wrong: list[int],
        mode: ReadMode,
        marks: dict[int, str] | None,
        slots: DirectArrays | None,
    ) -> None:
        """Fetch remote shards with bad spans once more; raise for what is bad even then, or mark
        it."""
        for piece, (shard, a, b) in enumerate(list(spans.pieces())):
            here = [span for span in wrong if a <= span < b]
            if not here:
                continue
            number = spans.numbers[piece]
            mended: set[int] = set()
            if self.index.remote is not None:
                fresh = self.shards.replace(number, shard)
                again = spans.again(number, fresh, here, choice)
                found = cast("list[Encoded]", self._load(again, mode))
                crcs = checksums(again, found, mode, self._blocks)
                wanted = again.crcs.tolist()
                for i, span in enumerate(here):
                    slot = slots.of_spans[span] if slots is not None else None
                    if slot is None:
                        payloads[span] = found[i]
                    elif len(found[i]) == len(slot):
                        slot[:] = found[i]
                    else:  # another array is there now
                        continue
                    if crcs[i] == wanted[i]:
                        mended.add(span)
            for span in here:
                if span in mended or span in (marks or ()):
                    continue
                if marks is None:
                    raise self.corruption(number, int(spans.rows[span]))
                marks[span] = WRONG_CRC

    def corruption(self, number: int, row: int, reason: str = WRONG_CRC) -> Exception:
        """The error for a sample that can't be had, such as one whose bytes aren't those that were
        indexed."""
        index = self.index
        sample_id = int(index.starts[number]) + row
        (shard,) = self.shards.get([number])
        if reason != WRONG_CRC:
            is_whole = reason.endswith(UNFIT)
            again = "" if is_whole else ". Get that file again, or leave the sample out"
            return CorruptSampleError(
                f"Sample {sample_id} of {self._url} ({shard.name(row)}): {reason}{again}; a loader "
                "replaces and counts such samples, up to max_bad=.",
                sample_id=sample_id,
            )
        if not index.is_self_contained:
            return IndexChangedError(
                f"{shard.name(row)} (sample {sample_id} of {self._url}): its bytes aren't those "
                f"that were indexed; the file was changed in place, or the disk is failing. "
                f"{REINDEX}"
            )
        return CorruptSampleError(
            f"Sample {sample_id} of {self._url} ({shard.name(row)}): its checksum (CRC-32C) is "
            "wrong. The shard was changed or the disk is failing: fetch or pack that shard again.",
            sample_id=sample_id,
        )


def _make_empty(
    rows: list[int],
    places: Sequence[int],
    payloads: list[Encoded],
    table: NDArray[np.int64],
    choice: BatchFields,
) -> None:
    """Take away what was read of bad samples. rows: of the visit, which stand at these places in
    the batch; table: in the batch's order."""
    for row in rows:
        for field, place in enumerate(choice.places):
            payloads[row * len(choice.places) + field] = EMPTY
            if place.lengths is not None:
                table[places[row], place.lengths : place.lengths + choice.dimensions(field)] = 0


def _check_rows(rows: NDArray[np.int64], index: Index, mode: ReadMode, url: str) -> None:
    if rows.ndim != 2 or rows.shape[1] != 2 or rows.dtype != np.int64:
        raise ConfigError(
            f"rows: got {rows.dtype} of shape {rows.shape}, wanted int64, (n, 2) of (shard, row)."
        )
    if mode not in _MODES:
        raise ConfigError(f"mode: got {mode!r}, wanted one of {list(_MODES)}.")
    if not len(rows):
        return
    # As unsigned numbers negative ones are too large.
    shards, row = rows[:, 0].view(np.uint64), rows[:, 1].view(np.uint64)
    sizes = index.sizes.view(np.uint64)
    if shards.max() >= len(sizes) or (row >= sizes[rows[:, 0]]).any():
        raise ConfigError(
            f"rows: some of them don't exist; {url} has {len(index.sizes)} shards, and a row must "
            "be below its shard's size. The plan was made for another dataset."
        )
