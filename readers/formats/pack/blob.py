"""A pack's shard in a blob: its head and tail are asked for, the images as they are needed."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING

from penstock.cache.errors import CorruptShardError
from penstock.readers.files.pages import BROKEN, only_the_tail
from penstock.readers.formats.blob_shard import BlobShard
from penstock.readers.formats.pack.columns import PackColumns
from penstock.readers.formats.shard import END, START

if TYPE_CHECKING:
    from penstock.cache.base.blob import Blob
    from penstock.cache.blobs.remote import Remote
    from penstock.readers.formats.summary import Sums

# Around a pack's shard's image bytes lie 8 bytes of offset a sample in front and up to 45 of
# columns behind (label, height, width, channels, codec, CRC, source), each column padded to 64;
# schema and footer take 1.5 KB.
_HEAD_BYTES, _HEAD_SAMPLE_BYTES = 4096, 8
_TAIL_BYTES, _TAIL_SAMPLE_BYTES = 4096, 48


class PackBlob(BlobShard, PackColumns):
    """A pack's shard in a blob.

    Opening it asks for its head (schema, offsets) and tail (columns, footer) only, guessed from the
    number of samples. Bytes that aren't there read as zeros, so a guess that is too small fails the
    manifest's sums, and then all is asked for.
    """

    def __init__(
        self,
        remote: Remote,
        blob: Blob,
        *,
        samples: int,
        sums: Sums,
        shown: str,
        overhead_bytes: int | None = None,
    ) -> None:
        """samples, sums: what the manifest promises; shown: the shard's name for people;
        overhead_bytes: what stands beside the images, at most. Raises CorruptShardError,
        FetchError."""
        self._shown = shown
        size_bytes = blob.source.size_bytes
        head = min(size_bytes, _HEAD_BYTES + _HEAD_SAMPLE_BYTES * samples)
        behind = overhead_bytes or _TAIL_BYTES + _TAIL_SAMPLE_BYTES * samples
        tail = max(head, size_bytes - behind)
        try:
            self._read(blob, [(0, head), (tail, size_bytes)], samples, sums)
            start, end = self._file_offset, self._file_offset + self._flat_bytes
            if start > head or end < tail:
                self._read(blob, [(0, start), (end, size_bytes)], samples, sums)
        except _NotParsedError:
            try:
                self._read(blob, [(0, size_bytes)], samples, sums)
            except _NotParsedError as error:
                raise CorruptShardError(
                    f"{blob.source.uri}: not a shard that Penstock wrote, or changed since "
                    f"({error}). Upload the pack again."
                ) from error
        rows = self.table
        rows[:, START : END + 1] += self._file_offset
        super().__init__(remote, blob, rows)

    def _read(self, blob: Blob, spans: list[tuple[int, int]], samples: int, sums: Sums) -> None:
        buffer = blob.buffer(spans)
        quiet = only_the_tail(buffer.address, buffer.size) if blob.is_cached else nullcontext()
        try:
            with quiet:
                self._parse(buffer, samples, sums)
        except BROKEN as error:
            raise _NotParsedError(str(error)) from error


class _NotParsedError(Exception):
    """These bytes are no shard; not an OSError, as what fetching raises is."""
