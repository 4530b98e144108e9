"""Open a pack's shard, in a local file or in a blob of the cache.

A sample is a slice of the flat buffer; no Arrow object is made for it. Rows of a field of one shape
are gathered at once, and each block is checked once. If the shard isn't on the local disk, the
bytes that locate the samples are fetched first, then those of the samples that are read.
"""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from crc32c import crc32c

from penstock.cache import CorruptShardError, IndexChangedError, ReadError
from penstock.cache.base import machine_remedy, read_error
from penstock.readers.byte_source import FileErrors, SourceSpans
from penstock.readers.files import BROKEN, batch_head_end, footer_start, map_buffer, printable
from penstock.readers.formats.open_shard import OpenShard
from penstock.readers.formats.pack.pack_columns import PackColumns
from penstock.readers.formats.pack.pack_forms import block_bounds, block_rows

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from numpy.typing import NDArray

    from penstock.readers.byte_source import ByteSource, ShardPlace
    from penstock.readers.fieldtypes import Schema
    from penstock.readers.formats.format import ShardEntry
    from penstock.readers.formats.open_shard import Ints, Places, RowRequest, RowsOut
    from penstock.readers.formats.pack.pack_columns import PackField

# Copying a larger row by a statement of its own costs less than copying it twice: for 128 rows of
# 12 KiB, 0.26 ms instead of 0.38 ms.
_LARGE_ROW_BYTES = 4096

WRONG_CRC = "its bytes differ from those that were packed: its CRC-32C is wrong"


class DenseRows:
    """The rows of one field in one shard. has_ranges: rows are large enough to be fetched one by
    one.

    A block is compared with its CRC-32C when one of its rows is first read. Safe for several
    threads: at worst, two check the same block.
    """

    def __init__(self, field: PackField) -> None:
        assert field.values is not None
        assert field.blocks is not None
        assert field.crcs is not None
        self._form, self._values = field.form, field.values
        self._data: NDArray[np.uint8] = field.values.reshape(-1).view(np.uint8)
        self._start = field.start
        self._bounds = block_bounds(field.form, field.rows)
        self._each = block_rows(field.form)
        self._is_bits = field.form.is_bits
        self.has_ranges, self._crcs = field.form.has_ranges, field.crcs
        self._sums = field.blocks.tolist()
        self._is_right = np.zeros(len(self._sums), bool)
        self._are_all_right = False

    def needed(self, rows: Ints) -> list[tuple[int, int]]:
        """Return the bytes [start, end) in the file that are fetched for rows: the rows themselves
        if they are large, otherwise their blocks that haven't been found intact yet."""
        if self.has_ranges:
            each = self._form.row_bytes
            starts = self._start + rows * each
            return [(start, start + each) for start in starts.tolist()]
        bounds = self._start + self._bounds
        return [(int(bounds[block]), int(bounds[block + 1])) for block in self._unchecked(rows)]

    def _unchecked(self, rows: Ints) -> list[int]:
        """Return the blocks of these rows that haven't been found intact yet."""
        if self._are_all_right:
            return []
        blocks = rows // self._each
        unchecked: list[int] = np.unique(blocks[~self._is_right[blocks]]).tolist()
        return unchecked

    def wrong(self, rows: Ints) -> NDArray[np.bool_] | None:
        """Check the blocks of these rows.

        Returns a mask of the rows in corrupt blocks, bool, shape (len(rows),), or None if there are
        none.
        """
        unchecked = self._unchecked(rows)
        if not unchecked:
            return None
        for block in unchecked:
            data = self._data[self._bounds[block] : self._bounds[block + 1]]
            self._is_right[block] = crc32c(data) == self._sums[block]
        self._are_all_right = bool(self._is_right.all())
        right = self._is_right[rows // self._each]
        return None if right.all() else ~right

    def wrong_alone(self, rows: Ints) -> NDArray[np.bool_] | None:
        """Check single rows by their own checksums, because the rest of their blocks may not be
        cached. Returns the same as `wrong`."""
        unsure = rows if self._are_all_right else rows[~self._is_right[rows // self._each]]
        if self._are_all_right or not len(unsure):
            return None
        values, crcs = self._values, self._crcs
        sums = {
            row: crc32c(values[row].reshape(-1).view(np.uint8)) != crcs[row]
            for row in np.unique(unsure).tolist()
        }
        wrong = np.array([sums.get(row, False) for row in rows.tolist()], np.bool_)
        return wrong if wrong.any() else None

    def wrong_samples(self, rows: Ints, loaded: Sequence[Any]) -> NDArray[np.bool_]:
        """Check rows that were loaded one by one, and return a mask of the corrupt ones."""
        crcs = self._crcs[rows].tolist()
        pairs = zip(loaded, crcs, strict=True)
        return np.array([crc32c(sample) != crc for sample, crc in pairs], np.bool_)

    def samples(self, loaded: Sequence[Any]) -> list[NDArray[Any]]:
        """Return rows that were loaded one by one as arrays."""
        row = tuple(length or 0 for length in self._form.row)
        return [sample.view(self._form.dtype).reshape(row) for sample in loaded]

    def put(self, rows: Ints, out: NDArray[Any], places: Places) -> None:
        """Copy the rows, unchecked, to out[places], without a temporary array if they are large."""
        if self._is_bits:
            out[places] = self._bits(rows)
        elif isinstance(places, slice):
            # mode="raise" would copy once more; the caller has checked that the rows exist.
            self._values.take(rows, axis=0, out=out[places], mode="clip")
        elif self._form.row_bytes < _LARGE_ROW_BYTES:
            out[places] = self._values.take(rows, axis=0)
        else:
            values = self._values
            for place, row in zip(places.tolist(), rows.tolist(), strict=True):
                out[place] = values[row]

    def each(self, rows: Ints) -> Iterator[NDArray[Any]]:
        """Yield views of the rows, unchecked, one after the other."""
        if self._is_bits:
            yield from self._bits(rows)
        for row in () if self._is_bits else rows.tolist():
            yield self._values[row]

    def _bits(self, rows: NDArray[np.int64]) -> NDArray[Any]:
        numbers = self._form.numbers
        at = rows[:, None] * numbers + np.arange(numbers)
        bits = self._data[at >> 3] >> (at & 7).astype(np.uint8) & 1
        found: NDArray[Any] = bits.astype(self._form.dtype)
        return found.reshape(len(rows), *self._form.row)


# The schema, the metadata and an offset of 8 bytes for each sample precede the samples of a shard's
# first field. A few columns of numbers, each padded to 64 bytes, and the footer follow its last.
_HEAD_BYTES, _HEAD_SAMPLE_BYTES = 4096, 8
_TAIL_BYTES, _TAIL_SAMPLE_BYTES = 4096, 48

_REMEDY = "Run the same `penstock pack` again into an empty folder, or fetch the shard again."


class _PackErrors(FileErrors):
    """The errors of a pack's shard file."""

    def changed(self, path: bytes, name: bytes, *, had: int, now: int | None) -> Exception:
        """Return the error for a shard that is missing, or has another size."""
        del name
        shown = printable(path)
        if now is None:
            return CorruptShardError(
                f"{shown}: the shard is missing, though the manifest names it. {_REMEDY}"
            )
        kind, what = (
            (IndexChangedError, "changed") if now > had else (CorruptShardError, "truncated")
        )
        return kind(f"{shown}: {what}: got {now} bytes, the manifest promises {had}. {_REMEDY}")

    def unreadable(self, path: bytes, error: OSError) -> Exception:
        """Return the error for a shard that can't be read."""
        return read_error(printable(path), error)


class PackShard(OpenShard):
    """An open shard of a pack.

    columns: of the shard. shown: the shard's name for messages.
    """

    def __init__(self, place: ShardPlace, entry: ShardEntry) -> None:
        """Open the shard's file, and fetch what locates the samples. entry: the manifest's record
        of the shard.

        Raises CorruptShardError, IndexChangedError, ReadError, FetchError.
        """
        self.shown = printable(entry.name)
        self.source = source = place.file(
            entry.name, entry.size_bytes, is_below=True, errors=_PackErrors()
        )
        with source.parsing():
            self.columns = columns = _columns(source, entry)
            with _as_shard_errors(source):
                self.table = columns.table(entry.layout, samples=entry.samples, sums=entry.sums)
        self._dense: dict[str, DenseRows] = {}
        if all(form.kind != "dense" for form in columns.forms.values()):
            columns.forget()  # the table suffices for reading batches

    def name(self, row: int) -> str:
        """Return a sample's name for messages, such as "shard-000003.arrow[17]"."""
        return f"{self.shown}[{row}]"

    def source_names(self) -> list[bytes] | None:
        """Return the samples' names in the pack's source; see `PackColumns`."""
        return self.columns.source_names()

    def dense(self, name: str) -> DenseRows:
        """Return the rows of one field, opened once."""
        found = self._dense.get(name)
        if found is None:  # two threads may both create it; each then checks blocks by itself
            found = self._dense[name] = DenseRows(self.columns.fields[name])
        return found

    def request(self, request: RowRequest) -> RowRequest:
        """Return the request with the bytes that may not be on the local disk. Large rows are
        fetched one by one, others in blocks, which have a checksum."""
        if not self.source.is_whole:
            fields = [self.dense(name) for name in request.dense]
            # Rows of shards that aren't kept are read one by one.
            fields = fields if self.source.is_kept else []
            spans = [span for field in fields for span in field.needed(request.rows)]
            starts, ends = [start for start, _ in spans], [end for _, end in spans]
            request.spans = [SourceSpans(self.source, starts, ends)]
        return request

    @classmethod
    def fetch(cls, requests: Sequence[tuple[Self, RowRequest]]) -> None:
        """Fetch the missing bytes of kept shards. Shards that aren't kept are read row by row."""
        some = [span for _, each in requests for span in each.spans]
        here = sum(len(each.rows) for _, each in requests if not each.spans)
        requests[0][0].source.bring(some, here=here)

    def read(self, request: RowRequest, out: RowsOut) -> None:
        """Copy the rows of fields, and check each of their blocks once."""
        if request.others:
            raise TypeError(f"{self.shown}: {list(request.others)} aren't stored by rows")
        rows, places = request.rows, out.places
        for name in request.dense:
            dense, array, crop = self.dense(name), out.arrays[name], request.crops.get(name)
            samples: Iterable[NDArray[Any]] | None = None
            if self.source.is_whole:
                bad = dense.wrong(rows)
            elif self.source.is_kept or not dense.has_ranges:
                if spans := dense.needed(rows):
                    self.source.buffer(spans)
                bad = dense.wrong_alone(rows) if dense.has_ranges else dense.wrong(rows)
            else:
                spans = dense.needed(rows)
                wanted = SourceSpans(self.source, *map(list, zip(*spans, strict=True)))
                (loaded,) = self.source.load([wanted], request.mode)
                samples, bad = dense.samples(loaded), dense.wrong_samples(rows, loaded)
            if bad is not None:
                out.wrong.update(dict.fromkeys(np.flatnonzero(bad).tolist(), WRONG_CRC))
            if crop is not None:
                from penstock.readers.fieldtypes import put_parts  # only crops of arrays need it

                put_parts(
                    dense.each(rows) if samples is None else samples, crop.corners, array, places
                )
            elif samples is None:
                dense.put(rows, array, places)
            else:
                for place, sample in zip(np.arange(len(array))[places], samples, strict=True):
                    array[place] = sample


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


def _columns(source: ByteSource, entry: ShardEntry) -> PackColumns:
    """Return a shard's columns, after fetching all bytes that locate its samples.

    The sizes of its head and tail are guessed from the number of samples. They contain the
    positions of the other bytes that locate the samples, and these are fetched at once.

    Raises CorruptShardError, FetchError.
    """
    if source.is_whole:
        with _as_shard_errors(source):
            return PackColumns(source.buffer(()), entry.layout.schema)
    parts, size_bytes, samples = _Fetched(source), source.size_bytes, entry.samples
    head = min(size_bytes, _HEAD_BYTES + _HEAD_SAMPLE_BYTES * samples)
    behind = entry.overhead_bytes or _TAIL_BYTES + _TAIL_SAMPLE_BYTES * samples
    buffer = parts.fetch([(0, head), (max(head, size_bytes - behind), size_bytes)])
    with _as_shard_errors(source):
        footer = footer_start(buffer)
    parts.fetch([(footer, size_bytes)])
    with _as_shard_errors(source):
        head = batch_head_end(buffer)
    parts.fetch([(0, head)])
    with _as_shard_errors(source):
        columns = PackColumns(buffer, entry.layout.schema)
        needed = columns.needed()
    parts.fetch(needed)
    return columns


@contextmanager
def _as_shard_errors(source: ByteSource) -> Iterator[None]:
    """Report errors of parsing as those of the shard. Nothing is fetched inside the context."""
    try:
        yield
    except BROKEN as error:
        remedy = source.remedy or _REMEDY
        raise _no_shard(source.shown, error, remedy) from error


def rewrite_source(path: bytes, schema: Schema, source: NDArray[np.int64]) -> None:
    """Replace the column of source ids in a shard's file, in place.

    Only the packer calls it, before the pack is read. Raises CorruptShardError.
    """
    try:
        at = PackColumns(map_buffer(path), schema).source_offset()
    except BROKEN as error:
        raise _no_shard(printable(path), error, _REMEDY) from error
    with open(path, "r+b", buffering=0) as file:
        file.seek(at)
        file.write(np.ascontiguousarray(source, "<i8").tobytes())
        os.fsync(file.fileno())


def _no_shard(shown: str, error: Exception, remedy: str) -> CorruptShardError | ReadError:
    if machine_remedy(error) is not None:
        return read_error(shown, error)
    return CorruptShardError(
        f"{shown}: not a shard that Penstock wrote, or changed since then ({error}). {remedy}"
    )


def pack_shard(shard: OpenShard) -> PackShard:
    """Return an open shard as one of a pack, or raise TypeError if it isn't."""
    if not isinstance(shard, PackShard):
        raise TypeError(f"{shard!r} is not a pack's shard")
    return shard
