"""Load the bytes of a batch's spans, and make columns of them.

Spans of local shards are loaded one shard after the other, those of blobs all at once.
"""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.cache import DatasetError, PenstockError
from penstock.cache.base import BlobSpans, refuse_shortage
from penstock.readers.fields import (
    ARRAY_CODECS,
    DenseColumn,
    EncodedColumn,
    RaggedColumn,
    codec_number,
    to_array,
)
from penstock.readers.formats import BlobShard

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from numpy.typing import NDArray

    from penstock.cache.base import Blob, ReadMode
    from penstock.cache.blobs import Remote
    from penstock.readers.fields import ArrayForm, Column
    from penstock.readers.formats import OpenShard
    from penstock.readers.reading.batch_plan import BatchFields, BatchSpans
    from penstock.readers.reading.direct_arrays import DirectArrays, Unread
    from penstock.readers.reading.open_shards import OpenShards
    from penstock.readers.types import Encoded

_log = logging.getLogger("penstock")


def load_local(
    visit: BatchSpans,
    mode: ReadMode,
    *,
    advise: bool,
    marks: dict[int, str] | None = None,
    slots: DirectArrays | None = None,
) -> list[Unread]:
    """The spans' bytes: views, or read into fresh memory; of what has a slot it may be what is to
    be read yet. advise: read the views' pages ahead. marks: where files of a folder that can't be
    read are noted, by span, instead of raising."""
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
        of_spans, others = slots.of_spans, [i for i in range(a, b) if slots.of_spans[i] is None]
        read = iter(_read(shard, others, first, last, rows, marks) if others else ())
        sizes = [end - start for start, end in zip(first[a:b], last[a:b], strict=True)]
        unread: list[Unread] = file_spans(rows[a:b], first[a:b], sizes)
        encoded += [next(read) if of_spans[i] is None else each for i, each in enumerate(unread, a)]
    return encoded


def _read(
    shard: OpenShard,
    spans: Sequence[int],
    first: list[int],
    last: list[int],
    rows: list[int],
    marks: dict[int, str] | None,
) -> list[Encoded]:
    """Some spans, read into memory of their own."""
    starts = [first[i] for i in spans]
    slots = _slots(starts, [last[i] for i in spans])
    if marks is None or not shard.is_file_per_sample:
        shard.read_into([rows[i] for i in spans], starts, slots)
    else:
        for i, slot in zip(spans, slots, strict=True):
            try:
                shard.read_into([rows[i]], [first[i]], [slot])
            except DatasetError as error:  # a FetchError is none
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
    """The spans' bytes of a remote dataset, of all shards at once. What the local disk can't give
    is fetched again, and behind that read past the cache. Raises FetchError."""
    if advise and mode != "pread":
        visit.advise()
    first, last = visit.starts.tolist(), visit.ends.tolist()

    def load(pieces: Iterable[tuple[OpenShard, int, int]]) -> list[Encoded]:
        wanted = [
            BlobSpans(blob=_blob(shard), starts=first[a:b], ends=last[a:b])
            for shard, a, b in pieces
        ]
        found = remote.load(wanted, mode=mode)
        return [sample for samples in found for sample in samples]

    try:
        return load(visit.pieces())
    except (OSError, EOFError) as error:
        if isinstance(error, PenstockError):  # the network's
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
                    # What was just written can't be read: that disk is left alone for a while.
                    remote.cache.give_up(error, reads=True)
                visit.shards[i] = shard = opened.replace(visit.numbers[i], shard)
    return encoded


def _blob(shard: OpenShard) -> Blob:
    if not isinstance(shard, BlobShard):
        raise TypeError(f"{shard!r} isn't a remote dataset's")
    return shard.blob


def _slots(starts: list[int], ends: list[int]) -> list[Encoded]:
    """Room for spans and one byte more each. An array each, so that a sample that someone keeps
    doesn't hold its whole batch; one block for all was no faster."""
    return [np.empty(end - start + 1, np.uint8) for start, end in zip(starts, ends, strict=True)]


EMPTY = np.empty(0, np.uint8)
"""In place of bytes that a sample lacks, or that are bad."""
EMPTY.flags.writeable = False


def span_columns(
    choice: BatchFields,
    payloads: list[Encoded],
    table: NDArray[np.int64],
    back: NDArray[np.int64] | None,
    arrays: Mapping[str, Column],
) -> dict[str, Column]:
    """The columns of n samples. payloads: of all spans, those of a sample side by side; back: where
    each sample stands in there, int64, shape (n,), None: in order; table: of the samples, in
    order. arrays: columns that are made already."""
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
    """The arrays of n samples in the dtype of their field.

    payloads: empty where a sample is missing or bad, which is then zeros. codecs: numbers in
    ARRAY_CODECS, shape (n,). lengths: of the arrays, shape (n, dimensions), where shapes differ; 0
    where a sample is missing or bad. Whether payloads have the bytes that their shapes take was
    checked with the index.
    """
    there = np.fromiter(map(len, payloads), np.int64, len(payloads)) > 0
    is_native = bool((codecs[there] == codec_number(form.dtype.str)).all())
    if lengths is None:
        return DenseColumn(_dense(payloads, form, codecs, there, is_native=is_native))
    flat = _flat(payloads, form, codecs, lengths, is_native=is_native)
    rest = form.rest
    counts = lengths[:, 0] if rest is not None else lengths.prod(axis=1)
    offsets = np.concatenate(([0], np.cumsum(counts))).astype(np.int64)
    if rest is None:
        return RaggedColumn(flat, offsets, lengths)
    return RaggedColumn(flat.reshape(int(offsets[-1]), *rest), offsets)


def _dense(
    payloads: Sequence[Encoded],
    form: ArrayForm,
    codecs: NDArray[np.int64],
    there: NDArray[np.bool_],
    *,
    is_native: bool,
) -> NDArray[Any]:
    shape = form.fixed_shape
    is_whole = bool(there.all()) or not math.prod(shape)
    if is_native and is_whole and len(payloads):
        return np.concatenate(payloads).view(form.dtype).reshape(len(payloads), *shape)
    values = np.zeros((len(payloads), *shape), form.dtype)
    for row in np.flatnonzero(there).tolist():
        values[row] = to_array(payloads[row], ARRAY_CODECS[codecs[row]], shape, form.dtype)
    return values


def _flat(
    payloads: Sequence[Encoded],
    form: ArrayForm,
    codecs: NDArray[np.int64],
    lengths: NDArray[np.int64],
    *,
    is_native: bool,
) -> NDArray[Any]:
    if not len(payloads):
        return np.empty(0, form.dtype)
    if is_native:
        return np.concatenate(payloads).view(form.dtype)
    shapes = lengths.tolist()
    arrays = [
        to_array(payload, ARRAY_CODECS[codec], shape, form.dtype).reshape(-1)
        if len(payload)
        else np.empty(0, form.dtype)
        for payload, codec, shape in zip(payloads, codecs.tolist(), shapes, strict=True)
    ]
    return np.concatenate(arrays)
