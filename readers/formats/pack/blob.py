"""A pack's shard in a blob: its head and tail are asked for, the images as they are needed."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from penstock.cache.errors import CorruptShardError
from penstock.readers.files.pages import BROKEN, only_the_tail
from penstock.readers.formats.blob_shard import BlobShard
from penstock.readers.formats.pack.columns import PackColumns

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from penstock.cache.base.blob import Blob
    from penstock.cache.blobs.remote import Remote
    from penstock.readers.fields.columns import Column
    from penstock.readers.formats.layout import Layout
    from penstock.readers.formats.shard import Ints
    from penstock.readers.formats.summary import Sums

# Around a pack's shard's image bytes lie 8 bytes of offset a sample in front and up to 45 of
# columns behind (label, height, width, channels, codec, CRC, source), each column padded to 64;
# schema and footer take 1.5 KB.
_HEAD_BYTES, _HEAD_SAMPLE_BYTES = 4096, 8
_TAIL_BYTES, _TAIL_SAMPLE_BYTES = 4096, 48


class PackBlob(BlobShard):
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
        layout: Layout,
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
            columns = _read(blob, [(0, head), (tail, size_bytes)], samples, sums, layout)
            start, end = columns.file_offset, columns.file_offset + columns.flat.size
            if start > head or end < tail:
                columns = _read(blob, [(0, start), (end, size_bytes)], samples, sums, layout)
        except _NotParsedError:
            try:
                columns = _read(blob, [(0, size_bytes)], samples, sums, layout)
            except _NotParsedError as error:
                raise CorruptShardError(
                    f"{blob.source.uri}: not a shard that Penstock wrote, or changed since "
                    f"({error}). Upload the pack again."
                ) from error
        self.columns = columns
        super().__init__(remote, blob, columns.table)

    def name(self, row: int) -> str:
        """A sample's name for people, such as "shard-000003.arrow[17]"."""
        return f"{self._shown}[{row}]"

    def gather(
        self, field: str, rows: Ints, out: NDArray[Any], places: Ints, wrong: dict[int, str]
    ) -> None:
        """Raise TypeError: no field is stored so."""
        del rows, out, places, wrong
        raise TypeError(f"{self._shown}: {field} isn't stored by rows")

    def read_rows(
        self, rows: Ints, fields: Sequence[str], wrong: dict[int, str]
    ) -> dict[str, Column]:
        """Raise TypeError: no field is stored so."""
        del rows, wrong
        raise TypeError(f"{self._shown}: {fields} aren't stored by rows")

    def source_names(self) -> list[bytes] | None:
        """The samples' names in what the pack was made from; see `PackColumns`."""
        return self.columns.source_names()


def _read(
    blob: Blob, spans: list[tuple[int, int]], samples: int, sums: Sums, layout: Layout
) -> PackColumns:
    buffer = blob.buffer(spans)
    quiet = only_the_tail(buffer.address, buffer.size) if blob.is_cached else nullcontext()
    try:
        with quiet:
            return PackColumns(buffer, samples=samples, sums=sums, layout=layout, from_file=True)
    except BROKEN as error:
        raise _NotParsedError(str(error)) from error


class _NotParsedError(Exception):
    """These bytes are no shard; not an OSError, as what fetching raises is."""
