"""Read the spans of a batch from all its shards by one call, check them against their CRC-32C, and
make columns of them."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from crc32c import crc32c

from penstock.cache import DatasetError
from penstock.readers.byte_source import NO_BYTES, SourceSpans
from penstock.readers.fieldtypes import EncodedColumn
from penstock.readers.files import PageAdvice
from penstock.readers.reading.batch_spans import BatchSpans
from penstock.readers.reading.row_reading import WRONG_CRC

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from numpy.typing import NDArray

    from penstock.cache.base import ReadMode, TrafficMeter
    from penstock.readers.blocks import Blocks
    from penstock.readers.byte_source import Unread
    from penstock.readers.fieldtypes import Column
    from penstock.readers.formats import OpenShard
    from penstock.readers.reading.batch_plan import BatchFields, BatchRows
    from penstock.readers.reading.direct_arrays import DirectArrays
    from penstock.readers.reading.open_shards import OpenShards
    from penstock.readers.reading.row_reading import ShardAccess
    from penstock.readers.types import Encoded


def load_spans(visit: BatchSpans, mode: ReadMode, opened: OpenShards) -> list[Unread]:
    """Load spans of all shards at once. Bytes that the local disk can't deliver are fetched again,
    and then read past the cache. Raises what reading raises."""
    first, last = visit.starts.tolist(), visit.ends.tolist()
    wanted = [SourceSpans(shard.source, first[a:b], last[a:b]) for shard, a, b in visit.pieces()]
    if not wanted:
        return []
    source = wanted[0].source
    try:
        return [span for spans in source.load(wanted, mode) for span in spans]
    except (OSError, EOFError) as error:
        source.refuse(error, 0)
    # One of the shards can't be read (a failing disk, a truncated file): find out which.
    found: list[Unread] = []
    for i, (shard, a, b) in enumerate(list(visit.pieces())):

        def load(shard: OpenShard, i: int = i, a: int = a, b: int = b) -> tuple[list[Unread], bool]:
            visit.shards[i] = shard
            (spans,) = shard.source.load([SourceSpans(shard.source, first[a:b], last[a:b])], mode)
            return spans, True

        found += opened.read(visit.numbers[i], shard, load)
    return found


def read_files(unread: Sequence[Unread], marks: dict[int, str] | None) -> list[Encoded]:
    """Read the spans that are left unread. marks: collects the reasons against unreadable files, by
    span, instead of raising."""
    samples: list[Encoded] = []
    for span, each in enumerate(unread):
        if isinstance(each, np.ndarray):
            samples.append(each)
            continue
        try:
            samples.append(each.read())
        except DatasetError as error:  # not a FetchError, which is raised
            if marks is None:
                raise
            marks[span] = str(error)
            samples.append(NO_BYTES)
    return samples


def checksums(
    visit: BatchSpans, encoded: list[Encoded], mode: ReadMode, blocks: Blocks
) -> list[int]:
    """Compute the CRC-32C of each span. With mode "copy", views of maps are replaced by copies in
    one block, each just before it is summed: memory is read once, and the bytes that were summed
    are those that are decoded, even if the file changes meanwhile."""
    sums: list[int] = []
    copied = [mode == "copy" and shard.source.is_mapped for shard in visit.shards]
    sizes = [len(sample) for sample in encoded]
    needed = sum(
        sum(sizes[a:b]) for (_, a, b), copies in zip(visit.pieces(), copied, strict=True) if copies
    )
    room, shown = blocks.take(needed) if needed else (NO_BYTES, NO_BYTES)
    at = 0
    for (_, a, b), copies in zip(visit.pieces(), copied, strict=True):
        if copies:
            for i in range(a, b):
                end = at + sizes[i]
                room[at:end] = encoded[i]
                encoded[i] = sample = shown[at:end]
                sums.append(crc32c(sample))
                at = end
        else:
            sums += map(crc32c, encoded[a:b])
    return sums


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ReadSpans:
    """The spans of a batch that were read and checked.

    payloads: of all spans of the visit, sample by sample; empty if a sample lacks the field. slots:
    the arrays, whose bytes are in their slots; None if there are none. size_bytes: that were read.
    """

    payloads: list[Encoded]
    slots: DirectArrays | None
    size_bytes: int

    def columns(
        self,
        visit: BatchRows,
        choice: BatchFields,
        table: NDArray[np.int64],
        back: NDArray[np.int64] | None,
        bad: Collection[int],
    ) -> dict[str, Column]:
        """Return the columns in the batch's order. table: of the samples, in that order. back: as
        `BatchRows.back` returns it. bad: samples of the visit, whose values become empty or 0."""
        payloads, fields = self.payloads, len(choice.names)
        for row in bad:
            payloads[row * fields : (row + 1) * fields] = [NO_BYTES] * fields
        columns = {} if self.slots is None else self.slots.columns(visit, payloads, choice, bad)
        order = range(len(table)) if back is None else back.tolist()
        for field, (name, place) in enumerate(zip(choice.names, choice.places, strict=True)):
            if name in columns:
                continue
            samples, dims = payloads, None
            if back is not None or fields > 1:
                samples = [payloads[row * fields + field] for row in order]
            if place.height is not None:
                dims = table[:, place.height : place.height + 2].astype(np.int32)
            columns[name] = EncodedColumn(samples, dims)
        return columns


class SpanReader:
    """Reads the spans of batches for a `SampleReader`, and checks them against their CRC-32C."""

    def __init__(self, reader: ShardAccess, local: TrafficMeter) -> None:
        """local: counts the bytes that are read from local shards."""
        self._reader, self._local = reader, local
        self._advice = PageAdvice()

    def read(
        self,
        visit: BatchRows,
        choice: BatchFields,
        mode: ReadMode,
        marks: dict[int, str] | None,
        blocks: Blocks,
    ) -> ReadSpans:
        """Read the spans of a batch and check them. marks: as in `SampleReader.read`, by the
        visit's samples."""
        spans, slots = BatchSpans.of(visit, choice), None
        size_bytes = int((spans.ends - spans.starts).sum())
        if choice.has_arrays:
            from penstock.readers.reading.direct_arrays import (
                DirectArrays,  # images need none of it
            )

            slots = DirectArrays.of(visit, choice, spans, blocks)
        found: dict[int, str] | None = None if marks is None else {}
        if self._advice.is_on and mode != "pread":
            spans.advise()
        unread = load_spans(spans, mode, self._reader.shards)
        began = time.perf_counter()  # the network's time isn't the disk's
        if slots is None:
            payloads = read_files(unread, found)
            crcs = checksums(spans, payloads, mode, blocks)
        else:
            threads = self._reader.copy_threads()
            payloads, crcs = slots.fill(unread, threads=threads, marks=found)
            others = [i for i, slot in enumerate(slots.of_spans) if slot is None]
            if others:
                some_marks: dict[int, str] | None = None if found is None else {}
                some = read_files([unread[i] for i in others], some_marks)
                sums = checksums(spans.some(np.array(others)), some, mode, blocks)
                for i, sample, crc in zip(others, some, sums, strict=True):
                    payloads[i], crcs[i] = sample, crc
                if found is not None and some_marks:
                    found |= {others[i]: reason for i, reason in some_marks.items()}
        if visit.shards and not visit.shards[0].source.is_fetched:
            self._local.add(bytes_disk=size_bytes)
        seconds = time.perf_counter() - began
        self._advice.note(samples=len(spans), size_bytes=size_bytes, seconds=seconds)
        if crcs != (wanted := spans.crcs.tolist()):
            wrong = [i for i, crc in enumerate(crcs) if crc != wanted[i] and i not in (found or ())]
            self._refetch(spans, choice, payloads, wrong, mode, found, slots, blocks)
        for span, reason in (found or {}).items():
            assert marks is not None
            row, field = divmod(spans.place(span), len(choice.places))
            prefix = f"{choice.names[field]}: " if len(choice.names) > 1 else ""
            marks.setdefault(row, f"{prefix}{reason}")
        if spans.places is not None:
            with_empty: list[Encoded] = [NO_BYTES] * spans.count
            for place, payload in zip(spans.places.tolist(), payloads, strict=True):
                with_empty[place] = payload
            payloads = with_empty
        return ReadSpans(payloads=payloads, slots=slots, size_bytes=size_bytes)

    def _refetch(
        self,
        spans: BatchSpans,
        choice: BatchFields,
        payloads: list[Encoded],
        wrong: list[int],
        mode: ReadMode,
        marks: dict[int, str] | None,
        slots: DirectArrays | None,
        blocks: Blocks,
    ) -> None:
        """Fetch wrong spans once more if they come from a cache. Spans that are still wrong are
        marked, or raise if marks is None."""
        opened = self._reader.shards
        for piece, (shard, a, b) in enumerate(list(spans.pieces())):
            in_shard = [span for span in wrong if a <= span < b]
            if not in_shard:
                continue
            number = spans.numbers[piece]
            repaired: set[int] = set()
            if shard.source.is_fetched:
                again = spans.again(number, opened.replace(number, shard), in_shard, choice)
                found = read_files(load_spans(again, mode, opened), None)
                crcs = checksums(again, found, mode, blocks)
                for span, data, crc, right in zip(
                    in_shard, found, crcs, again.crcs.tolist(), strict=True
                ):
                    slot = slots.of_spans[span] if slots is not None else None
                    if slot is None:
                        payloads[span] = data
                    elif len(data) == len(slot):
                        slot[:] = data
                    else:  # the new bytes hold another array
                        continue
                    if crc == right:
                        repaired.add(span)
            for span in in_shard:
                if span in repaired or span in (marks or ()):
                    continue
                if marks is None:
                    raise self._reader.corruption(number, int(spans.rows[span]), WRONG_CRC)
                marks[span] = WRONG_CRC
