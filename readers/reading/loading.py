"""The bytes of a batch's spans: of local shards one after the other, of blobs all at
once."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import numpy as np

from penstock.cache.base.blob import BlobSpans
from penstock.cache.base.machine import refuse_shortage
from penstock.cache.errors import DatasetError, PenstockError
from penstock.readers.formats.blob_shard import BlobShard

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from penstock.cache.base.blob import Blob, ReadMode
    from penstock.cache.blobs.remote import Remote
    from penstock.readers.formats.shard import OpenShard
    from penstock.readers.reading.open_shards import OpenShards
    from penstock.readers.reading.slots import Slots, Unread
    from penstock.readers.reading.visit import SpanVisit
    from penstock.readers.types import Encoded

_log = logging.getLogger("penstock")


def load_local(
    visit: SpanVisit,
    mode: ReadMode,
    *,
    advise: bool,
    marks: dict[int, str] | None = None,
    slots: Slots | None = None,
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
    visit: SpanVisit, mode: ReadMode, *, remote: Remote, opened: OpenShards, advise: bool
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
