"""Load the bytes of a batch's spans, compute their checksums, and make columns of them.

Spans of local shards are loaded one shard after the other, those of blobs all at once.
"""

from __future__ import annotations

import logging
import math
import time
from typing import TYPE_CHECKING, cast

import numpy as np
from crc32c import crc32c

from penstock.cache import DatasetError, PenstockError
from penstock.cache.base import BlobSpans, refuse_shortage
from penstock.readers.fieldtypes import (
    ARRAY_CODECS,
    DenseColumn,
    EncodedColumn,
    RaggedColumn,
    codec_number,
    to_array,
)
from penstock.readers.files import PageAdvice
from penstock.readers.formats import BlobShard
from penstock.readers.reading.batch_plan import BatchSpans
from penstock.readers.reading.row_reading import WRONG_CRC

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from numpy.typing import NDArray

    from penstock.cache.base import ReadMode, TrafficMeter
    from penstock.cache.blobs import Remote
    from penstock.readers.blocks import Blocks
    from penstock.readers.fieldtypes import ArrayForm, Column
    from penstock.readers.formats import FileSpan, OpenShard
    from penstock.readers.reading.batch_plan import BatchFields, BatchRows
    from penstock.readers.reading.direct_arrays import DirectArrays
    from penstock.readers.reading.open_shards import OpenShards
    from penstock.readers.reading.row_reading import ShardAccess
    from penstock.readers.types import Encoded

    Unread = Encoded | FileSpan
    Slots = Sequence[Encoded | None]

_log = logging.getLogger("penstock")


def load_local(
    visit: BatchSpans,
    mode: ReadMode,
    *,
    advise: bool,
    marks: dict[int, str] | None = None,
    slots: Slots | None = None,
) -> list[Unread]:
    """Load the bytes of local spans: views, or read into fresh memory. A span that has a slot may
    be returned as a FileSpan, to be read later. advise: read the views' pages ahead. marks:
    collects the reasons against unreadable files of a folder, by span, instead of raising."""
    first, last, rows = visit.starts.tolist(), visit.ends.tolist(), visit.rows.tolist()
    encoded: list[Unread] = []
    if advise and mode != "pread":
        visit.advise()
    for shard, a, b in visit.pieces():
        if mode != "pread" and shard.is_mapped:
            encoded += shard.views(first[a:b], last[a:b])
            continue
        file_spans = None if slots is None else getattr(shard, "file_spans", None)
        if slots is None or file_spans is None:
            encoded += _read(shard, range(a, b), first, last, rows, marks)
            continue
        others = [i for i in range(a, b) if slots[i] is None]
        read = iter(_read(shard, others, first, last, rows, marks) if others else ())
        sizes = [end - start for start, end in zip(first[a:b], last[a:b], strict=True)]
        unread: list[Unread] = file_spans(rows[a:b], first[a:b], sizes)
        encoded += [next(read) if slots[i] is None else each for i, each in enumerate(unread, a)]
    return encoded


def _read(
    shard: OpenShard,
    spans: Sequence[int],
    first: list[int],
    last: list[int],
    rows: list[int],
    marks: dict[int, str] | None,
) -> list[Encoded]:
    """Read some spans into memory of their own."""
    starts = [first[i] for i in spans]
    # An array each, so that a sample that is kept doesn't hold its whole batch; one block for all
    # was no faster. `read_into` needs one byte more.
    slots = [np.empty(last[i] - first[i] + 1, np.uint8) for i in spans]
    if marks is None or not shard.is_file_per_sample:
        shard.read_into([rows[i] for i in spans], starts, slots)
    else:
        for i, slot in zip(spans, slots, strict=True):
            try:
                shard.read_into([rows[i]], [first[i]], [slot])
            except DatasetError as error:  # not a FetchError, which is raised
                marks[i] = str(error)
    samples = []
    for slot in slots:
        sample = slot[:-1]
        sample.flags.writeable = False
        samples.append(sample)
    return samples


def load_blobs(
    visit: BatchSpans, mode: ReadMode, *, remote: Remote, opened: OpenShards, advise: bool
) -> list[Encoded]:
    """Load the bytes of spans of a remote dataset, from all shards at once. Bytes that the local
    disk can't deliver are fetched again, and then read past the cache. Raises FetchError."""
    if advise and mode != "pread":
        visit.advise()
    first, last = visit.starts.tolist(), visit.ends.tolist()

    def load(pieces: Iterable[tuple[OpenShard, int, int]]) -> list[Encoded]:
        wanted = []
        for shard, a, b in pieces:
            assert isinstance(shard, BlobShard), shard
            wanted.append(BlobSpans(blob=shard.blob, starts=first[a:b], ends=last[a:b]))
        found = remote.load(wanted, mode=mode)
        return [sample for samples in found for sample in samples]

    try:
        return load(visit.pieces())
    except (OSError, EOFError) as error:
        if isinstance(error, PenstockError):  # from the network
            raise
        refuse_shortage(error, remote.label)
        _log.warning("%s: the cache can't be read (%s)", remote.label, error)
    # One of the shards can't be read (a failing disk, a truncated file): find out which.
    encoded: list[Encoded] = []
    for i, (shard, a, b) in enumerate(list(visit.pieces())):
        for attempt in range(3):
            try:
                encoded += load([(shard, a, b)])
                break
            except (OSError, EOFError) as error:
                if isinstance(error, PenstockError) or remote.cache is None or attempt == 2:
                    raise
                if attempt:
                    # Bytes that were just written can't be read: stop using that disk for a while.
                    remote.cache.give_up(error, reads=True)
                visit.shards[i] = shard = opened.replace(visit.numbers[i], shard)
    return encoded


def checksums(
    visit: BatchSpans, encoded: list[Encoded], mode: ReadMode, blocks: Blocks
) -> list[int]:
    """Compute the CRC-32C of each span. With mode "copy", views of maps are replaced by copies in
    one block, each just before it is summed: memory is read once, and the bytes that were summed
    are those that are decoded, even if the file changes meanwhile."""
    sums: list[int] = []
    copied = [mode == "copy" and _gives_views(shard) for shard in visit.shards]
    sizes = [len(sample) for sample in encoded]
    needed = sum(
        sum(sizes[a:b]) for (_, a, b), copies in zip(visit.pieces(), copied, strict=True) if copies
    )
    room, shown = blocks.take(needed) if needed else (EMPTY, EMPTY)
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


def _gives_views(shard: OpenShard) -> bool:
    """Return True if a shard's samples are views of a mapped file, not memory of their own."""
    return shard.blob.is_cached if isinstance(shard, BlobShard) else shard.is_mapped


EMPTY = np.empty(0, np.uint8)
"""Replaces bytes that a sample lacks, or that are bad."""
EMPTY.flags.writeable = False


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
        began = time.perf_counter()
        found: dict[int, str] | None = None if marks is None else {}
        unread: list[Unread] = []
        advise, remote = self._advice.is_on, self._reader.index.remote
        if remote is not None:
            if len(spans):
                unread += load_blobs(
                    spans, mode, remote=remote, opened=self._reader.shards, advise=advise
                )
            began = time.perf_counter()  # the network's time isn't the disk's
        elif len(spans):
            of_spans = None if slots is None else slots.of_spans
            unread = load_local(spans, mode, advise=advise, marks=found, slots=of_spans)
        if slots is None:
            payloads = cast("list[Encoded]", unread)
            crcs = checksums(spans, payloads, mode, blocks)
        else:
            threads = self._reader.copy_threads()
            payloads, crcs = slots.fill(unread, threads=threads, marks=found)
            others = [i for i, slot in enumerate(slots.of_spans) if slot is None]
            if others:
                some = [payloads[i] for i in others]
                sums = checksums(spans.some(np.array(others)), some, mode, blocks)
                for i, sample, crc in zip(others, some, sums, strict=True):
                    payloads[i], crcs[i] = sample, crc
        if self._reader.index.remote is None:
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
        if spans.places is None:
            return payloads, slots, size_bytes
        with_empty: list[Encoded] = [EMPTY] * spans.count
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
        """Fetch remote shards with wrong spans once more. Spans that are still wrong are marked, or
        raise if marks is None."""
        remote = self._reader.index.remote
        for piece, (shard, a, b) in enumerate(list(spans.pieces())):
            in_shard = [span for span in wrong if a <= span < b]
            if not in_shard:
                continue
            number = spans.numbers[piece]
            repaired: set[int] = set()
            if remote is not None:
                fresh = self._reader.shards.replace(number, shard)
                again = spans.again(number, fresh, in_shard, choice)
                advise = self._advice.is_on
                found = load_blobs(
                    again, mode, remote=remote, opened=self._reader.shards, advise=advise
                )
                crcs = checksums(again, found, mode, blocks)
                wanted = again.crcs.tolist()
                for i, span in enumerate(in_shard):
                    slot = slots.of_spans[span] if slots is not None else None
                    if slot is None:
                        payloads[span] = found[i]
                    elif len(found[i]) == len(slot):
                        slot[:] = found[i]
                    else:  # the new bytes hold another array
                        continue
                    if crcs[i] == wanted[i]:
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
            payloads[row * len(choice.places) + field] = EMPTY
            if place.lengths is not None:
                table[places[row], place.lengths : place.lengths + choice.dimensions(field)] = 0
