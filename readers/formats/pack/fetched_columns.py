"""Fetch the bytes of a remote pack's shard that locate its samples."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from penstock.readers.files import batch_head_end, footer_start
from penstock.readers.formats.pack.pack_columns import PackColumns
from penstock.readers.formats.pack.pack_errors import as_shard_errors

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.readers.byte_source import ByteSource
    from penstock.readers.formats.format import ShardEntry

# The schema, the metadata and an offset of 8 bytes for each sample precede the samples of a shard's
# first field. A few columns of numbers, each padded to 64 bytes, and the footer follow its last.
_HEAD_BYTES, _HEAD_SAMPLE_BYTES = 4096, 8
_TAIL_BYTES, _TAIL_SAMPLE_BYTES = 4096, 48


class _Fetched:
    """The bytes of a shard that were fetched for parsing. Others may read as zeros."""

    def __init__(self, source: ByteSource) -> None:
        self._source = source
        self._here: list[tuple[int, int]] = []
        self._buffer: Any = None

    def fetch(self, spans: Sequence[tuple[int, int]]) -> Any:
        """Fetch these spans [start, end), and return a buffer of the whole shard."""
        missing = [piece for span in spans for piece in self._missing(*span)]
        self._here += missing
        if missing or self._buffer is None:
            self._buffer = self._source.buffer(missing)
        return self._buffer

    def _missing(self, start: int, end: int) -> list[tuple[int, int]]:
        pieces = [(start, end)] if start < end else []
        for a, b in self._here:
            cut = [((low, min(high, a)), (max(low, b), high)) for low, high in pieces]
            pieces = [piece for pair in cut for piece in pair if piece[0] < piece[1]]
        return pieces


def fetch_columns(source: ByteSource, entry: ShardEntry) -> PackColumns:
    """Return a shard's columns, after fetching all bytes that locate its samples.

    The sizes of its head and tail are guessed from the number of samples. They contain the
    positions of the other bytes that locate the samples, and these are fetched at once.

    Raises CorruptShardError, FetchError.
    """
    parts, size_bytes, samples = _Fetched(source), source.size_bytes, entry.samples
    head = min(size_bytes, _HEAD_BYTES + _HEAD_SAMPLE_BYTES * samples)
    behind = entry.overhead_bytes or _TAIL_BYTES + _TAIL_SAMPLE_BYTES * samples
    buffer = parts.fetch([(0, head), (max(head, size_bytes - behind), size_bytes)])
    with as_shard_errors(source):
        footer = footer_start(buffer)
    parts.fetch([(footer, size_bytes)])
    with as_shard_errors(source):
        head = batch_head_end(buffer)
    parts.fetch([(0, head)])
    with as_shard_errors(source):
        columns = PackColumns(buffer, entry.layout.schema)
        needed = columns.needed()
    parts.fetch(needed)
    return columns
