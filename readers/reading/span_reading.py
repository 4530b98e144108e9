"""Read the spans of a batch from all its shards by one call, check them against their CRC-32C, and
make columns of them."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING

import numpy as np
from crc32c import crc32c

from penstock.cache import DatasetError
from penstock.readers.byte_source import NO_BYTES, FileSpan, SourceSpans
from penstock.readers.fieldtypes import (
    ARRAY_CODECS,
    DenseColumn,
    EncodedColumn,
    RaggedColumn,
    codec_number,
    to_array,
)
from penstock.readers.files import PageAdvice
from penstock.readers.reading.batch_plan import BatchSpans
from penstock.readers.reading.row_reading import WRONG_CRC

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from penstock.cache.base import ReadMode, TrafficMeter
    from penstock.readers.blocks import Blocks
    from penstock.readers.byte_source import Unread
    from penstock.readers.fieldtypes import ArrayForm, Column
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
        if not isinstance(each, FileSpan):
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


def span_columns(
    choice: BatchFields,
    payloads: list[Encoded],
    table: NDArray[np.int64],
    back: NDArray[np.int64] | None,
    arrays: Mapping[str, Column],
) -> dict[str, Column]:
    """Return the columns of n samples.

    payloads: of all spans, sample by sample. back: the position of each sample in there, int64,
    shape (n,); None if they are in order. table: of the samples, in order. arrays: columns that
    exist already.
    """
    columns = dict(arrays)
    fields = len(choice.names)
    if back is None and fields > 1:
        back = np.arange(len(table))
    for field, (name, place, form) in enumerate(
        zip(choice.names, choice.places, choice.forms, strict=True)
    ):
        if name in arrays:
            continue
        if back is None:
            samples = payloads
        else:
            at = back if fields == 1 else back * fields + field
            samples = [payloads[i] for i in at.tolist()]
        if form is None:
            dims = None
            if place.height is not None:
                dims = table[:, place.height : place.height + 2].astype(np.int32)
            columns[name] = EncodedColumn(samples, dims)
            continue

        assert place.codec is not None
        lengths = None
        if place.lengths is not None:
            lengths = table[:, place.lengths : place.lengths + len(form.shape)]
        columns[name] = array_column(samples, form, codecs=table[:, place.codec], lengths=lengths)
    return columns


def array_column(
    payloads: Sequence[Encoded],
    form: ArrayForm,
    *,
    codecs: NDArray[np.int64],
    lengths: NDArray[np.int64] | None,
) -> DenseColumn | RaggedColumn:
    """Return the arrays of n samples in the dtype of their field.

    payloads: empty if a sample is missing or bad; its numbers are then zeros. codecs: numbers in
    ARRAY_CODECS, shape (n,). lengths: of the arrays, shape (n, dimensions), if shapes differ; 0 if
    a sample is missing or bad. The index has checked that payloads have the bytes that their shapes
    take.
    """
    has_bytes = np.fromiter(map(len, payloads), np.int64, len(payloads)) > 0
    is_native = bool((codecs[has_bytes] == codec_number(form.dtype.str)).all())
    if lengths is None:
        shape = (len(payloads), *form.fixed_shape)
        is_complete = bool(has_bytes.all()) or not math.prod(form.fixed_shape)
        if is_native and is_complete and len(payloads):
            return DenseColumn(np.concatenate(payloads).view(form.dtype).reshape(shape))
        values = np.zeros(shape, form.dtype)
        for row in np.flatnonzero(has_bytes).tolist():
            codec = ARRAY_CODECS[codecs[row]]
            values[row] = to_array(payloads[row], codec, form.fixed_shape, form.dtype)
        return DenseColumn(values)
    if is_native and len(payloads):
        flat = np.concatenate(payloads).view(form.dtype)
    else:
        flat = np.concatenate(
            [
                np.empty(0, form.dtype),
                *(
                    to_array(payload, ARRAY_CODECS[codec], own, form.dtype).reshape(-1)
                    for payload, codec, own in zip(
                        payloads, codecs.tolist(), lengths.tolist(), strict=True
                    )
                    if len(payload)
                ),
            ]
        )
    rest = form.rest
    counts = lengths[:, 0] if rest is not None else lengths.prod(axis=1)
    offsets = np.concatenate(([0], np.cumsum(counts))).astype(np.int64)
    if rest is None:
        return RaggedColumn(flat, offsets, lengths)
    return RaggedColumn(flat.reshape(int(offsets[-1]), *rest), offsets)


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
    ) -> tuple[list[Encoded], DirectArrays | None, int]:
        """Read the spans of a batch and check them. Returns the bytes of all spans, including empty
        ones, the slots of arrays, whose bytes are in their slots, and the number of bytes read."""
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
        if visit.shards:
            self._local.add(bytes_disk=visit.shards[0].source.counted(size_bytes))
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
        if spans.places is None:
            return payloads, slots, size_bytes
        with_empty: list[Encoded] = [NO_BYTES] * spans.count
        for place, payload in zip(spans.places.tolist(), payloads, strict=True):
            with_empty[place] = payload
        return with_empty, slots, size_bytes

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
            if shard.source.has_other_bytes(0):
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


def make_empty(
    rows: list[int],
    places: Sequence[int],
    payloads: list[Encoded],
    table: NDArray[np.int64],
    choice: BatchFields,
) -> None:
    """Empty the payloads and lengths of bad samples. rows: of the visit. places: their positions in
    the batch. table: in the batch's order."""
    for row in rows:
        for field, place in enumerate(choice.places):
            payloads[row * len(choice.places) + field] = NO_BYTES
            if place.lengths is not None:
                table[places[row], place.lengths : place.lengths + choice.dimensions(field)] = 0
