"""Open a pack's shard in a blob of the cache.

The bytes that locate the samples are fetched first, then those of the samples that are read.
"""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np
from crc32c import crc32c

from penstock.cache import CorruptShardError
from penstock.cache.base import BlobSpans, machine_remedy, read_error
from penstock.readers.files import BROKEN, batch_head_end, footer_start, only_the_tail, printable
from penstock.readers.formats.open_shard import BlobShard
from penstock.readers.formats.pack.pack_columns import PackColumns
from penstock.readers.formats.pack.pack_file import WRONG_CRC, DenseFields, PackShard

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from penstock.cache.base import Blob
    from penstock.cache.blobs import Remote
    from penstock.readers.formats.format import ShardEntry
    from penstock.readers.formats.open_shard import Ints, OpenShard, Places

# The schema, the metadata and an offset of 8 bytes for each sample precede the samples of a shard's
# first field. A few columns of numbers, each padded to 64 bytes, and the footer follow its last.
_HEAD_BYTES, _HEAD_SAMPLE_BYTES = 4096, 8
_TAIL_BYTES, _TAIL_SAMPLE_BYTES = 4096, 48


class PackBlob(DenseFields, BlobShard):
    """A pack's shard in a blob.

    Opening it fetches its head and tail, whose sizes are guessed from the number of samples. They
    contain the positions of the other bytes that locate the samples, and these are fetched at once.
    """

    def __init__(self, remote: Remote, blob: Blob, entry: ShardEntry) -> None:
        """Fetch what locates the samples. entry: the manifest's record of the shard.

        Raises CorruptShardError, FetchError.
        """
        self.shown = printable(entry.name)
        columns = _columns(blob, entry)
        quiet: Any = nullcontext()
        if blob.is_cached:
            quiet = only_the_tail(columns.data.ctypes.data, len(columns.data))
        with quiet, _parsing(blob):
            table = columns.table(entry.layout, samples=entry.samples, sums=entry.sums)
        BlobShard.__init__(self, remote, blob, table)
        DenseFields.__init__(self, columns)

    def gather(
        self,
        field: str,
        rows: Ints,
        out: NDArray[Any],
        places: Places,
        wrong: dict[int, str],
        *,
        corners: Ints | None = None,
    ) -> None:
        """Gather rows as `DenseFields.gather` does, and fetch only what they need."""
        if not self.blob.is_cached and self.columns.fields[field].form.has_ranges:
            self._ranges(field, rows, out, places, wrong, corners)
            return
        super().gather(field, rows, out, places, wrong, corners=corners)

    def wrong_rows(self, field: str, rows: Ints) -> NDArray[np.bool_] | None:
        """Return a mask of the corrupt rows, as `DenseRows.wrong` does.

        If the shard isn't cached completely, missing bytes are fetched first: large rows one by
        one, others in blocks, which have a checksum.
        """
        own, dense = self.columns.fields[field], self.dense(field)
        if self.blob.is_whole:
            return dense.wrong(rows)
        if own.form.has_ranges and own.crcs is not None:
            self.blob.buffer(self._row_spans(field, rows))
            return dense.wrong_alone(rows, own.crcs)
        spans = [dense.span(block) for block in dense.unchecked(rows)]
        if spans:
            self.blob.buffer(spans)
        return dense.wrong(rows)

    def cold_spans(self, fields: Sequence[str], rows: Ints) -> BlobSpans | None:
        """Return the bytes of these rows of dense fields that may not be on the local disk.

        Returns None if the shard is cached completely, and for fields that are fetched in blocks.
        """
        if self.blob.is_whole:
            return None
        if not self.blob.is_cached:  # its rows are fetched when they are gathered, shard by shard
            return BlobSpans(blob=self.blob, starts=(), ends=())
        here = self.columns.fields
        alone = [name for name in fields if name in here and here[name].form.has_ranges]
        spans = [span for name in alone for span in self._row_spans(name, rows)]
        starts, ends = [start for start, _ in spans], [end for _, end in spans]
        return BlobSpans(blob=self.blob, starts=starts, ends=ends) if spans else None

    def _row_spans(self, name: str, rows: Ints) -> list[tuple[int, int]]:
        field = self.columns.fields[name]
        each = field.form.row_bytes
        starts = field.start + rows * each
        return [(start, start + each) for start in starts.tolist()]

    def _ranges(
        self,
        name: str,
        rows: Ints,
        out: NDArray[Any],
        places: Places,
        wrong: dict[int, str],
        corners: Ints | None,
    ) -> None:
        """Read single rows by requests of their own.

        A block would be too much to fetch for one row if the shard isn't kept.
        """
        field = self.columns.fields[name]
        assert field.crcs is not None
        starts = field.start + rows * field.form.row_bytes
        found = self.views(starts.tolist(), (starts + field.form.row_bytes).tolist())
        crcs = field.crcs[rows].tolist()
        slots = np.arange(len(out))[places].tolist()
        wrong |= {
            i: WRONG_CRC
            for i, (crc, sample) in enumerate(zip(crcs, found, strict=True))
            if crc32c(sample) != crc
        }
        row = tuple(length or 0 for length in field.form.row)
        samples = (sample.view(field.form.dtype).reshape(row) for sample in found)
        if corners is not None:
            from penstock.readers.fieldtypes import put_parts  # only crops of arrays need it

            put_parts(samples, corners, out, slots)
            return
        for place, sample in zip(slots, samples, strict=True):
            out[place] = sample


class _BlobBytes:
    """The fetched bytes of a blob. All others read as zeros."""

    def __init__(self, blob: Blob) -> None:
        self._blob = blob
        self._here: list[tuple[int, int]] = []
        self._buffer: Any = None

    def fetch(self, spans: Sequence[tuple[int, int]]) -> Any:
        """Fetch these spans [start, end), and return a buffer of the whole blob."""
        missing = [piece for span in spans for piece in self._missing(*span)]
        self._here += missing
        if missing or self._buffer is None:
            self._buffer = self._blob.buffer(missing)
        return self._buffer

    def _missing(self, start: int, end: int) -> list[tuple[int, int]]:
        pieces = [(start, end)] if start < end else []
        for a, b in self._here:
            cut = [((low, min(high, a)), (max(low, b), high)) for low, high in pieces]
            pieces = [piece for pair in cut for piece in pair if piece[0] < piece[1]]
        return pieces


def _columns(blob: Blob, entry: ShardEntry) -> PackColumns:
    """Fetch all bytes that locate a shard's samples, and return its columns.

    Raises CorruptShardError, FetchError.
    """
    parts, size_bytes, samples = _BlobBytes(blob), blob.source.size_bytes, entry.samples
    head = min(size_bytes, _HEAD_BYTES + _HEAD_SAMPLE_BYTES * samples)
    behind = entry.overhead_bytes or _TAIL_BYTES + _TAIL_SAMPLE_BYTES * samples
    buffer = parts.fetch([(0, head), (max(head, size_bytes - behind), size_bytes)])
    with _parsing(blob):
        footer = footer_start(buffer)
    parts.fetch([(footer, size_bytes)])
    with _parsing(blob):
        head = batch_head_end(buffer)
    parts.fetch([(0, head)])
    with _parsing(blob):
        columns = PackColumns(buffer, entry.layout.schema)
        needed = columns.needed()
    parts.fetch(needed)
    return columns


@contextmanager
def _parsing(blob: Blob) -> Iterator[None]:
    """Report errors of parsing as those of the shard. Nothing is fetched inside the context."""
    try:
        yield
    except BROKEN as error:
        if machine_remedy(error) is not None:
            raise read_error(blob.source.uri, error) from error
        raise CorruptShardError(
            f"{blob.source.uri}: not a shard that Penstock wrote, or changed since then ({error}). "
            "Upload the pack again."
        ) from error


def pack_shard(shard: OpenShard) -> PackShard | PackBlob:
    """Return an open shard as one of a pack, or raise TypeError if it isn't."""
    if not isinstance(shard, PackShard | PackBlob):
        raise TypeError(f"{shard!r} is not a pack's shard")
    return shard
