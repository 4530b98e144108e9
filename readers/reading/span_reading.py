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
from penstock.readers.fieldtypes import Column, EncodedColumn
from penstock.readers.files import PageAdvice
from penstock.readers.reading.batch_plan import BatchFields, BatchRows
from penstock.readers.reading.open_shards import WRONG_CRC, Shards

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from penstock.cache.base import ReadMode, TrafficMeter
    from penstock.readers.blocks import Blocks
    from penstock.readers.byte_source import Unread
    from penstock.readers.formats import OpenShard
    from penstock.readers.reading.direct_arrays import DirectArrays
    from penstock.readers.types import Encoded


class _Spans:
    """The spans of a batch, sample by sample; a sample has an empty span of a field that it lacks.

    crcs: that are wanted, int64, shape (spans,). size_bytes: of all. slots: the memory of the batch
    into which arrays are read; None if there is none. payloads: the bytes that were read. reasons:
    collects the reasons against spans that can't be read; None raises instead.
    """

    def __init__(
        self,
        visit: BatchRows,
        choice: BatchFields,
        opened: Shards,
        *,
        mode: ReadMode,
        blocks: Blocks,
    ) -> None:
        self._visit, self._choice, self._opened = visit, choice, opened
        self._mode, self._blocks, self._width = mode, blocks, len(choice.spans)
        self._starts, self._ends, self.crcs = choice.span_facts(visit.table)
        self._bounds = [bound * self._width for bound in visit.bounds]
        self.size_bytes = int((self._ends - self._starts).sum())
        self._has_empty = False
        if not choice.are_never_empty:
            has_bytes = self._ends > self._starts
            self._has_empty = not has_bytes.all()
            if self._has_empty:
                self.crcs = np.where(has_bytes, self.crcs, 0)
        self.slots: DirectArrays | None = None
        self.payloads: list[Encoded] = []
        self.reasons: dict[int, str] | None = None

    def __len__(self) -> int:
        return len(self._starts)

    def _pieces(self) -> Iterator[tuple[OpenShard, int, int]]:
        """Yield each shard and its spans [a, b)."""
        return zip(self._visit.shards, self._bounds, self._bounds[1:], strict=False)

    def advise(self) -> None:
        """Let the kernel read ahead the spans that are on the local disk."""
        for shard, a, b in self._pieces():
            shard.source.advise(self._starts[a:b], self._ends[a:b])

    def load(self) -> list[Unread]:
        """Load the spans of all shards at once. Bytes that the local disk can't deliver are fetched
        again, and then read past the cache. Raises what reading raises."""
        starts, ends, bounds, places = self._starts, self._ends, self._bounds, None
        if self._has_empty:
            places = np.flatnonzero(ends > starts)
            starts, ends = starts[places], ends[places]
            bounds = np.searchsorted(places, bounds).tolist()
        first, last, shards = starts.tolist(), ends.tolist(), self._visit.shards
        found = self._loaded(
            [
                SourceSpans(shard.source, first[a:b], last[a:b])
                for shard, a, b in zip(shards, bounds, bounds[1:], strict=False)
            ]
        )
        if places is None:
            return found
        every: list[Unread] = [NO_BYTES] * len(self)
        for place, span in zip(places.tolist(), found, strict=True):
            every[place] = span
        return every

    def _loaded(self, wanted: list[SourceSpans]) -> list[Unread]:
        if not wanted:
            return []
        source = wanted[0].source
        try:
            return [span for spans in source.load(wanted, self._mode) for span in spans]
        except (OSError, EOFError) as error:
            source.refuse(error, 0)
        # One of the shards can't be read (a failing disk, a truncated file): find out which.
        shards, numbers = self._visit.shards, self._visit.numbers
        found: list[Unread] = []
        for i, each in enumerate(wanted):

            def load(
                shard: OpenShard, i: int = i, each: SourceSpans = each
            ) -> tuple[list[Unread], bool]:
                shards[i] = shard
                (spans,) = shard.source.load([each._replace(source=shard.source)], self._mode)
                return spans, True

            found += self._opened.read(numbers[i], shards[i], load)
        return found

    def read(self, unread: list[Unread]) -> list[int]:
        """Read the payloads of loaded spans. Return their CRC-32Cs."""
        runs = (
            repeat(self._mode == "copy" and shard.source.is_mapped, b - a)
            for shard, a, b in self._pieces()
        )
        are_copied = list(chain.from_iterable(runs))
        if self.slots is None:
            self.payloads, crcs = self._read(range(len(unread)), unread, are_copied)
            return crcs
        threads = self._opened.copy_threads()
        self.payloads, crcs = self.slots.fill(unread, threads=threads, marks=self.reasons)
        others = [span for span, slot in enumerate(self.slots.of_spans) if slot is None]
        if not others:
            return crcs
        mine = [unread[span] for span in others]
        found, sums = self._read(others, mine, [are_copied[span] for span in others])
        for span, payload, crc in zip(others, found, sums, strict=True):
            self.payloads[span], crcs[span] = payload, crc
        return crcs

    def _read(
        self, spans: Sequence[int], unread: Sequence[Unread], are_copied: Sequence[bool]
    ) -> tuple[list[Encoded], list[int]]:
        """Return the bytes of some spans and their CRC-32C.

        Views that are copied, and files, are read into one block, and each is summed just after
        that: memory is read once, and the bytes that were summed are those that are decoded, even
        if the file changes meanwhile.
        """
        if {*map(type, unread)} <= {np.ndarray}:
            views = cast("list[Encoded]", unread)
            return views, _copy_and_sum(views, are_copied, self._blocks)
        sizes = [0 if isinstance(each, np.ndarray) else each.size_bytes for each in unread]
        room, shown = self._blocks.take(sum(sizes))
        payloads: list[Encoded] = []
        crcs, at = list[int](), 0
        for i, each in enumerate(unread):
            if isinstance(each, np.ndarray):
                payloads.append(each.copy() if are_copied[i] else each)
                crcs.append(crc32c(payloads[-1]))
                continue
            end = at + sizes[i]
            try:
                crcs.append(each.copy(room[at:end]))
                payloads.append(shown[at:end])
            except DatasetError as error:  # not a FetchError, which is raised
                if self.reasons is None:
                    raise
                self.reasons[spans[i]] = str(error)
                crcs.append(0)
                payloads.append(NO_BYTES)
            at = end
        return payloads, crcs

    def fetch_again(self, wrong: list[int]) -> None:
        """Fetch wrong spans once more if they come from a cache. There is a reason against spans
        that are still wrong."""
        visit = self._visit
        for number, (shard, a, b) in zip(visit.numbers, [*self._pieces()], strict=True):
            bad = [span for span in wrong if a <= span < b]
            if bad and shard.source.is_fetched:
                self._opened.replace(number, shard)
                rows = [(number, visit.rows[span // self._width]) for span in bad]
                columns = self._choice.columns
                again = BatchRows.of(np.array(rows, np.int64), self._opened, columns=columns)
                bad = self._replaced(bad, again)
            for span in bad:
                if self.reasons is None:
                    row = int(visit.rows[span // self._width])
                    raise self._opened.corruption(number, row, WRONG_CRC)
                self.reasons[span] = WRONG_CRC

    def _replaced(self, bad: list[int], visit: BatchRows) -> list[int]:
        """Read wrong spans again; return those that are still wrong. visit: the sample of each."""
        again = _Spans(visit, self._choice, self._opened, mode=self._mode, blocks=self._blocks)
        crcs, wrong = again.read(again.load()), list[int]()
        for row, span in enumerate(bad):
            at = row * self._width + span % self._width
            slot = None if self.slots is None else self.slots.of_spans[span]
            new = again.payloads[at]
            if slot is None:
                self.payloads[span] = new
            elif len(new) == len(slot):  # else the new bytes hold another array
                slot[:] = new
            if crcs[at] != again.crcs[at] or len(self.payloads[span]) != len(new):
                wrong.append(span)
        return wrong

    def reasons_by_sample(self) -> Iterator[tuple[int, str]]:
        """Yield each sample of the visit with a span that can't be read, and the reason."""
        for span, reason in (self.reasons or {}).items():
            row, field = divmod(span, self._width)
            yield row, f"{list(self._choice.spans)[field]}: {reason}" if self._width > 1 else reason

    def columns(self, bad: Collection[int]) -> dict[str, Column]:
        """Return the columns in the batch's order. bad: samples of the visit, whose values become
        empty or 0."""
        payloads, width, visit = self.payloads, self._width, self._visit
        for row in bad:
            payloads[row * width : (row + 1) * width] = [NO_BYTES] * width
        columns = {} if self.slots is None else self.slots.columns(payloads, bad)
        order = range(len(visit.rows)) if visit.back is None else visit.back.tolist()
        for field, (name, place) in enumerate(self._choice.spans.items()):
            if name in columns:
                continue
            samples, dims = payloads, None
            if visit.back is not None or width > 1:
                samples = [payloads[row * width + field] for row in order]
            if place.height is not None:
                dims = visit.sorted_table[:, place.height : place.height + 2].astype(np.int32)
            columns[name] = EncodedColumn(samples, dims)
        return columns


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

    def __init__(self, opened: Shards, local: TrafficMeter) -> None:
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
        spans = _Spans(visit, choice, self._opened, mode=mode, blocks=blocks)
        if marks is not None:
            spans.reasons = {}
        if choice.arrays:
            from penstock.readers.reading.direct_arrays import DirectArrays  # images need none

            spans.slots = DirectArrays(visit, choice, blocks)
        if self._advice.is_on and mode != "pread":
            spans.advise()
        unread = spans.load()
        began = time.perf_counter()  # the network's time isn't the disk's
        crcs = spans.read(unread)
        if visit.shards and not visit.shards[0].source.is_fetched:
            self._local.add(bytes_disk=spans.size_bytes)
        seconds = time.perf_counter() - began
        self._advice.note(samples=len(spans), size_bytes=spans.size_bytes, seconds=seconds)
        if crcs != (wanted := spans.crcs.tolist()):
            known = spans.reasons or {}
            spans.fetch_again(
                [i for i, crc in enumerate(crcs) if crc != wanted[i] and i not in known]
            )
        if marks is not None:
            for row, reason in spans.reasons_by_sample():
                marks.setdefault(row, reason)
        return spans.columns(marks or ()), spans.size_bytes
