"""Read the spans of a batch from all its shards by one call, check them against their CRC-32C, and
make columns of them."""

from __future__ import annotations

import time
from itertools import chain, compress, repeat
from typing import TYPE_CHECKING, cast

import numpy as np
from crc32c import crc32c

from penstock.cache import DatasetError
from penstock.readers.byte_source import NO_BYTES, SourceSpans
from penstock.readers.fieldtypes import EncodedColumn
from penstock.readers.files import PageAdvice
from penstock.readers.reading.batch_plan import BatchRows
from penstock.readers.reading.open_shards import WRONG_CRC

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from numpy.typing import NDArray

    from penstock.cache.base import ReadMode, TrafficMeter
    from penstock.readers.blocks import Blocks
    from penstock.readers.byte_source import Unread
    from penstock.readers.fieldtypes import Column
    from penstock.readers.formats import OpenShard
    from penstock.readers.reading.batch_plan import BatchFields
    from penstock.readers.reading.direct_arrays import DirectArrays
    from penstock.readers.reading.open_shards import OpenShards
    from penstock.readers.types import Encoded

    Ints = NDArray[np.int64]


class _Spans:
    """The spans of a batch, sample by sample; a sample has an empty span of a field that it lacks.

    starts, ends, crcs: of each, int64, shape (spans,). bounds: the first span of each shard, and
    the end. has_empty: some are empty.
    """

    def __init__(self, visit: BatchRows, choice: BatchFields) -> None:
        self.visit, self.width = visit, len(choice.spans)
        self.starts, self.ends, self.crcs = choice.span_facts(visit.table)
        self.bounds = [bound * self.width for bound in visit.bounds]
        self.has_empty = False
        if not choice.are_never_empty:
            has_bytes = self.ends > self.starts
            self.has_empty = not has_bytes.all()
            if self.has_empty:
                self.crcs = np.where(has_bytes, self.crcs, 0)

    def __len__(self) -> int:
        return len(self.starts)

    def pieces(self) -> Iterator[tuple[OpenShard, int, int]]:
        """Yield each shard and its spans [a, b)."""
        return zip(self.visit.shards, self.bounds, self.bounds[1:], strict=False)

    def load(self, mode: ReadMode, opened: OpenShards) -> list[Unread]:
        """Load the spans of all shards at once. Bytes that the local disk can't deliver are fetched
        again, and then read past the cache. Raises what reading raises."""
        starts, ends, bounds, places = self.starts, self.ends, self.bounds, None
        if self.has_empty:
            places = np.flatnonzero(ends > starts)
            starts, ends = starts[places], ends[places]
            bounds = np.searchsorted(places, bounds).tolist()
        first, last, shards = starts.tolist(), ends.tolist(), self.visit.shards
        wanted = [
            SourceSpans(shard.source, first[a:b], last[a:b])
            for shard, a, b in zip(shards, bounds, bounds[1:], strict=False)
        ]
        found = self._loaded(wanted, mode, opened)
        if places is None:
            return found
        every: list[Unread] = [NO_BYTES] * len(self)
        for place, span in zip(places.tolist(), found, strict=True):
            every[place] = span
        return every

    def _loaded(
        self, wanted: list[SourceSpans], mode: ReadMode, opened: OpenShards
    ) -> list[Unread]:
        if not wanted:
            return []
        source = wanted[0].source
        try:
            return [span for spans in source.load(wanted, mode) for span in spans]
        except (OSError, EOFError) as error:
            source.refuse(error, 0)
        # One of the shards can't be read (a failing disk, a truncated file): find out which.
        shards: list[OpenShard] = self.visit.shards
        found: list[Unread] = []
        for i, each in enumerate(wanted):

            def load(
                shard: OpenShard, i: int = i, each: SourceSpans = each
            ) -> tuple[list[Unread], bool]:
                shards[i] = shard
                (spans,) = shard.source.load([each._replace(source=shard.source)], mode)
                return spans, True

            found += opened.read(self.visit.numbers[i], shards[i], load)
        return found

    def are_copied(self, mode: ReadMode) -> list[bool]:
        """Return which spans are views of maps that must be copied before they are checked."""
        runs = (
            repeat(mode == "copy" and shard.source.is_mapped, b - a)
            for shard, a, b in self.pieces()
        )
        return list(chain.from_iterable(runs))


def _read_checked(
    unread: Sequence[Unread],
    are_copied: Sequence[bool],
    marks: dict[int, str] | None,
    blocks: Blocks,
) -> tuple[list[Encoded], list[int]]:
    """Return the bytes of each span and their CRC-32C.

    Views that are copied, and files, are read into one block, and each is summed just after that:
    memory is read once, and the bytes that were summed are those that are decoded, even if the file
    changes meanwhile. marks: collects the reasons against unreadable files, by span, instead of
    raising.
    """
    if {*map(type, unread)} <= {np.ndarray}:
        views = cast("list[Encoded]", unread)
        return views, _copy_and_sum(views, are_copied, blocks)
    sizes = [0 if isinstance(each, np.ndarray) else each.size_bytes for each in unread]
    room, shown = blocks.take(sum(sizes))
    payloads: list[Encoded] = []
    crcs, at = list[int](), 0
    for span, each in enumerate(unread):
        if isinstance(each, np.ndarray):
            payloads.append(each.copy() if are_copied[span] else each)
            crcs.append(crc32c(payloads[-1]))
            continue
        end = at + sizes[span]
        try:
            crcs.append(each.copy(room[at:end], 0))
            payloads.append(shown[at:end])
        except DatasetError as error:  # not a FetchError, which is raised
            if marks is None:
                raise
            marks[span] = str(error)
            crcs.append(0)
            payloads.append(NO_BYTES)
        at = end
    return payloads, crcs


def _copy_and_sum(views: list[Encoded], are_copied: Sequence[bool], blocks: Blocks) -> list[int]:
    """Compute the CRC-32C of each view, and replace those that are copied."""
    sizes = list(map(len, views))
    needed = sum(compress(sizes, are_copied))
    if not needed:
        return list(map(crc32c, views))
    room, shown = blocks.take(needed)
    sums, at = list[int](), 0
    for i, sample in enumerate(views):
        if are_copied[i]:
            end = at + sizes[i]
            room[at:end] = sample
            views[i] = sample = shown[at:end]
            at = end
        sums.append(crc32c(sample))
    return sums


class SpanReader:
    """Reads the spans of batches and checks them against their CRC-32C. Safe for several
    threads."""

    def __init__(self, opened: OpenShards, local: TrafficMeter) -> None:
        """local: counts the bytes that are read from local shards."""
        self._opened, self._local = opened, local
        self._advice = PageAdvice()

    def read(
        self,
        visit: BatchRows,
        choice: BatchFields,
        *,
        mode: ReadMode,
        marks: dict[int, str] | None,
        blocks: Blocks,
    ) -> tuple[dict[str, Column], int]:
        """Return the columns of spans in the batch's order, checked, and the bytes read. marks: as
        in `SampleReader.read`, by the visit's samples; all samples in it become empty."""
        spans, slots = _Spans(visit, choice), None
        size_bytes = int((spans.ends - spans.starts).sum())
        if choice.arrays:
            from penstock.readers.reading.direct_arrays import DirectArrays  # images need none

            slots = DirectArrays(visit, choice, blocks)
        found: dict[int, str] | None = None if marks is None else {}
        if self._advice.is_on and mode != "pread":
            for shard, a, b in spans.pieces():
                shard.source.advise(spans.starts[a:b], spans.ends[a:b])
        unread = spans.load(mode, self._opened)
        began = time.perf_counter()  # the network's time isn't the disk's
        if slots is None:
            payloads, crcs = _read_checked(unread, spans.are_copied(mode), found, blocks)
        else:
            payloads, crcs = self._fill(slots, unread, spans, mode, found, blocks)
        if visit.shards and not visit.shards[0].source.is_fetched:
            self._local.add(bytes_disk=size_bytes)
        seconds = time.perf_counter() - began
        self._advice.note(samples=len(spans), size_bytes=size_bytes, seconds=seconds)
        if crcs != (wanted := spans.crcs.tolist()):
            wrong = [i for i, crc in enumerate(crcs) if crc != wanted[i] and i not in (found or ())]
            self._refetch(spans, choice, wrong, payloads, slots, mode, found, blocks)
        for span, reason in (found or {}).items():
            assert marks is not None
            row, field = divmod(span, spans.width)
            prefix = f"{list(choice.spans)[field]}: " if spans.width > 1 else ""
            marks.setdefault(row, f"{prefix}{reason}")
        return _columns(visit, choice, payloads, slots, marks or ()), size_bytes

    def _fill(
        self,
        slots: DirectArrays,
        unread: list[Unread],
        spans: _Spans,
        mode: ReadMode,
        marks: dict[int, str] | None,
        blocks: Blocks,
    ) -> tuple[list[Encoded], list[int]]:
        """Read arrays into their slots, and other spans. Return the bytes and their CRC-32Cs."""
        payloads, crcs = slots.fill(unread, threads=self._opened.copy_threads(), marks=marks)
        others = [span for span, slot in enumerate(slots.of_spans) if slot is None]
        if not others:
            return payloads, crcs
        are_copied = spans.are_copied(mode)
        found: dict[int, str] | None = None if marks is None else {}
        mine = [unread[span] for span in others]
        some, sums = _read_checked(mine, [are_copied[span] for span in others], found, blocks)
        for span, sample, crc in zip(others, some, sums, strict=True):
            payloads[span], crcs[span] = sample, crc
        if marks is not None and found:
            marks |= {others[i]: reason for i, reason in found.items()}
        return payloads, crcs

    def _refetch(
        self,
        spans: _Spans,
        choice: BatchFields,
        wrong: list[int],
        payloads: list[Encoded],
        slots: DirectArrays | None,
        mode: ReadMode,
        marks: dict[int, str] | None,
        blocks: Blocks,
    ) -> None:
        """Fetch wrong spans once more if they come from a cache. Spans that are still wrong are
        marked, or raise if marks is None."""
        visit, width = spans.visit, spans.width
        for number, (shard, a, b) in zip(visit.numbers, [*spans.pieces()], strict=True):
            bad = [span for span in wrong if a <= span < b]
            rows = visit.rows[[span // width for span in bad]]
            if bad and shard.source.is_fetched:
                fresh = self._opened.replace(number, shard)
                table = fresh.table.take(rows, axis=0)
                again = BatchRows(
                    numbers=[number],
                    shards=[fresh],
                    bounds=[0, len(rows)],
                    rows=rows,
                    table=table,
                    sorted_table=table,
                )
                new = _Spans(again, choice)
                bad = self._replace_payloads(new, bad, payloads, slots, mode, blocks)
            for span in bad:
                if marks is None:
                    raise self._opened.corruption(number, int(visit.rows[span // width]), WRONG_CRC)
                marks[span] = WRONG_CRC

    def _replace_payloads(
        self,
        again: _Spans,
        bad: list[int],
        payloads: list[Encoded],
        slots: DirectArrays | None,
        mode: ReadMode,
        blocks: Blocks,
    ) -> list[int]:
        """Read wrong spans again; return those that are still wrong. again: the spans of the sample
        of each."""
        unread, wrong = again.load(mode, self._opened), list[int]()
        found, crcs = _read_checked(unread, again.are_copied(mode), None, blocks)
        for row, span in enumerate(bad):
            at = row * again.width + span % again.width
            slot = None if slots is None else slots.of_spans[span]
            if slot is None:
                payloads[span] = found[at]
            elif len(found[at]) == len(slot):  # else the new bytes hold another array
                slot[:] = found[at]
            if crcs[at] != again.crcs[at] or len(payloads[span]) != len(found[at]):
                wrong.append(span)
        return wrong


def _columns(
    visit: BatchRows,
    choice: BatchFields,
    payloads: list[Encoded],
    slots: DirectArrays | None,
    bad: Collection[int],
) -> dict[str, Column]:
    """Return the columns in the batch's order. payloads: of all spans. bad: samples of the visit,
    whose values become empty or 0."""
    width, back = len(choice.spans), visit.back
    for row in bad:
        payloads[row * width : (row + 1) * width] = [NO_BYTES] * width
    columns = {} if slots is None else slots.columns(payloads, bad)
    order = range(len(visit.rows)) if back is None else back.tolist()
    for field, (name, place) in enumerate(choice.spans.items()):
        if name in columns:
            continue
        samples, dims = payloads, None
        if back is not None or width > 1:
            samples = [payloads[row * width + field] for row in order]
        if place.height is not None:
            dims = visit.sorted_table[:, place.height : place.height + 2].astype(np.int32)
        columns[name] = EncodedColumn(samples, dims)
    return columns
