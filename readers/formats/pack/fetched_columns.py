"""Fetch the bytes of a remote pack's shard that locate its samples."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.readers.files import batch_head_end, footer_start
from penstock.readers.formats.pack.pack_columns import PackColumns, shard_errors

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.readers.byte_source import ByteSource
    from penstock.readers.formats.format import ShardEntry

# The schema, the metadata and an offset of 8 bytes for each sample precede the samples of a shard's
# first field. A few columns of numbers, each padded to 64 bytes, and the footer follow its last.
_HEAD_BYTES, _HEAD_SAMPLE_BYTES = 4096, 8
_TAIL_BYTES, _TAIL_SAMPLE_BYTES = 4096, 48


def fetch_columns(source: ByteSource, entry: ShardEntry) -> PackColumns:
    """Return a shard's columns, after fetching all bytes that locate its samples.

    The sizes of its head and tail are guessed from the number of samples. They contain the
    positions of the other bytes that locate the samples, and these are fetched at once.

    Raises CorruptShardError, FetchError.
    """
    size_bytes, samples = source.size_bytes, entry.samples
    head = min(size_bytes, _HEAD_BYTES + _HEAD_SAMPLE_BYTES * samples)
    behind = entry.overhead_bytes or _TAIL_BYTES + _TAIL_SAMPLE_BYTES * samples
    tail = max(head, size_bytes - behind)
    buffer = source.buffer([each for each in ((0, head), (tail, size_bytes)) if each[0] < each[1]])

    def fetch(spans: Sequence[tuple[int, int]]) -> None:
        """Fetch these spans [start, end), except what lies in the head and the tail."""
        between = [(max(start, head), min(end, tail)) for start, end in spans]
        if missing := [(start, end) for start, end in between if start < end]:
            source.buffer(missing)

    with shard_errors(source.shown, source.remedy):
        footer = footer_start(buffer)
    fetch([(footer, size_bytes)])
    with shard_errors(source.shown, source.remedy):
        end = batch_head_end(buffer)
    fetch([(0, end)])
    with shard_errors(source.shown, source.remedy):
        columns = PackColumns(buffer, entry.layout.schema)
        needed = columns.needed()
    fetch(needed)
    return columns
