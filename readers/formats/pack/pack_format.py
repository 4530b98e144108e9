"""Recognise packs, and open their shards, in local files or in blobs of the cache.

A pack consists of Arrow files. They contain everything that an index would record about them. A
sample is a slice of the flat buffer; no Arrow object is made for it. Rows of a field of one shape
are gathered at once, and each block is checked once. If the shard isn't on the local disk, the
bytes that locate the samples are fetched first, then those of the samples that are read.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np
import pyarrow as pa
from crc32c import crc32c

from penstock.readers.byte_source import SourceSpans
from penstock.readers.files import OWN_FOLDER, LazyColumn, printable
from penstock.readers.formats.format import Format, ShardEntry
from penstock.readers.formats.open_shard import OpenShard, RowRequest, RowsOut, StridedRows
from penstock.readers.formats.pack.pack_columns import (
    REMEDY,
    PackColumns,
    PackField,
    fetch_columns,
    shard_errors,
)
from penstock.readers.formats.pack.pack_forms import block_bounds, block_rows
from penstock.readers.formats.shard_summary import sample_table
from penstock.readers.types import Bools, Facts, Ints, Numbers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from numpy.typing import NDArray

    from penstock.readers.formats.open_shard import Places
    from penstock.readers.formats.sidecar import ShardPlace, Sidecar
    from penstock.readers.origin import Origin, RemoteFolder

# Copying a larger row by a statement of its own costs less than copying it twice: for 128 rows of
# 12 KiB, 0.26 ms instead of 0.38 ms.
_LARGE_ROW_BYTES = 4096

WRONG_CRC = "its bytes differ from those that were packed: its CRC-32C is wrong"


class PackRows:
    """The rows of one field in one shard. has_ranges: rows are large enough to be fetched one by
    one.

    A block is compared with its CRC-32C when one of its rows is first read. Safe for several
    threads: at worst, two check the same block.
    """

    def __init__(self, field: PackField) -> None:
        assert field.dense is not None
        assert field.blocks is not None
        assert field.crcs is not None
        self._form, self._values = field.form, field.dense
        self._data: NDArray[np.uint8] = field.dense.reshape(-1).view(np.uint8)
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

    def wrong(self, rows: Ints) -> Bools | None:
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

    def wrong_samples(self, rows: Ints, samples: Iterable[Any]) -> Bools | None:
        """Check rows by their own checksums, because the rest of their blocks may not be on the
        local disk. Returns the same as `wrong`."""
        pairs = zip(samples, self._crcs[rows].tolist(), strict=True)
        wrong = np.array([crc32c(sample) != crc for sample, crc in pairs], np.bool_)
        return wrong if wrong.any() else None

    def samples(self, loaded: Sequence[Any]) -> list[Numbers]:
        """Return rows that were loaded one by one as arrays."""
        return [sample.view(self._form.dtype).reshape(self._form.row) for sample in loaded]

    def put(self, rows: Ints, out: Numbers, places: Places) -> None:
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

    def strided(self) -> StridedRows | None:
        """Return the places of the rows once all blocks have been found intact; None before."""
        if self._is_bits or not self._are_all_right:
            return None
        size, dtype = self._form.row_bytes, self._form.dtype
        return StridedRows(data=self._data, stride_bytes=size, row_bytes=size, dtype=dtype)

    def each(self, rows: Ints) -> Iterator[Numbers]:
        """Yield views of the rows, unchecked, one after the other."""
        if self._is_bits:
            yield from self._bits(rows)
        for row in () if self._is_bits else rows.tolist():
            yield self._values[row]

    def _bits(self, rows: Ints) -> Numbers:
        numbers = self._form.numbers
        at = rows[:, None] * numbers + np.arange(numbers)
        bits = self._data[at >> 3] >> (at & 7).astype(np.uint8) & 1
        found: Numbers = bits.astype(self._form.dtype)
        return found.reshape(len(rows), *self._form.row)


class PackShard(OpenShard):
    """An open shard of a pack. shown: its name for messages."""

    def __init__(self, place: ShardPlace, entry: ShardEntry) -> None:
        """Open the shard's file, and fetch what locates the samples. entry: the manifest's record
        of the shard.

        Raises CorruptShardError, DatasetError, ReadError, FetchError.
        """
        self.shown, self._entry = printable(entry.name), entry
        self.source = source = place.file(
            entry.name, entry.size_bytes, is_below=True, remedy=REMEDY
        )
        with source.parsing():
            if source.is_whole:
                with shard_errors(source.shown, source.remedy):
                    self._columns = PackColumns(source.buffer(()), entry.layout.schema)
            else:
                self._columns = fetch_columns(source, entry)
            self.table = sample_table(entry.layout, self._promised, samples=entry.samples)
        self._dense: dict[str, PackRows] = {}
        self._codecs: dict[str, list[str]] = {}
        if all(field.dense is None for field in self._promised.values()):
            # The table, which takes as much memory, suffices for reading batches.
            del self._promised

    @cached_property
    def _promised(self) -> dict[str, PackField]:
        """All fields, as the manifest promises them. They are read again if they were dropped."""
        entry, source = self._entry, self.source
        with shard_errors(source.shown, source.remedy):
            return self._columns.promised(entry.layout, samples=entry.samples, sums=entry.sums)

    def name(self, row: int) -> str:
        """Return a sample's name for messages, such as "shard-000003.arrow[17]"."""
        return f"{self.shown}[{row}]"

    def source_names(self) -> list[bytes] | None:
        """Return the samples' names in the pack's source; see `PackColumns`."""
        return self._columns.source_names()

    @cached_property
    def names(self) -> Sequence[bytes]:
        """The samples' names in the pack's source, or their own if these are damaged, kept in
        memory."""
        found = self.source_names()
        if found is None:
            found = [self.name(row).encode() for row in range(len(self.table))]
        return LazyColumn(pa.array(found, pa.large_binary()))

    def facts(self, name: str, rows: Ints) -> list[Facts]:
        """Return the recorded facts of samples of an encoded field. Raises CorruptShardError."""
        field = self._promised[name]
        assert field.crcs is not None
        shapes, codecs = [()] * len(rows), [""] * len(rows)
        if field.form.is_picture and field.shapes is not None:
            if name not in self._codecs:
                with shard_errors(self.source.shown, self.source.remedy):
                    self._codecs[name] = self._columns.codecs(name)
            shapes = [tuple(shape) for shape in field.shapes[rows].tolist()]
            codecs = [self._codecs[name][row] for row in rows.tolist()]
        numbers = field.crcs[rows].tolist(), field.sizes[rows].tolist()
        return [
            Facts(crc, 0, size, shape, codec)
            for crc, size, shape, codec in zip(*numbers, shapes, codecs, strict=True)
        ]

    def dense(self, name: str) -> PackRows:
        """Return the rows of one field, opened once."""
        found = self._dense.get(name)
        if found is None:  # two threads may both create it; each then checks blocks by itself
            found = self._dense[name] = PackRows(self._promised[name])
        return found

    def strided(self, field: str) -> StridedRows | None:
        """Return the places of a field's rows in the map, if all have been checked."""
        return None if self.source.is_fetched else self.dense(field).strided()

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
            is_whole, samples = self.source.is_whole, None
            if not is_whole and (spans := dense.needed(rows)):
                if dense.has_ranges and not self.source.is_kept:
                    wanted = SourceSpans(self.source, *map(list, zip(*spans, strict=True)))
                    samples = dense.samples(self.source.load([wanted], request.mode)[0])
                else:  # `fetch` has counted the hits, which `load` would count again
                    self.source.buffer(spans)
            if is_whole or not dense.has_ranges:
                bad = dense.wrong(rows)
            else:
                bad = dense.wrong_samples(rows, samples or dense.each(rows))
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


# The first exists while a pack is being written, the second once it is complete.
_TRACES = (OWN_FOLDER + b"/pack.json", b"shard-000000.arrow")


class PackFormat(Format):
    """The format of packs: a manifest in the pack's own folder lists its shard files."""

    name: ClassVar[str] = "pack"
    least_sample_bytes: ClassVar[int] = 40  # its checksum, source id and name
    has_own_index: ClassVar[bool] = True

    def recognises(self, origin: Origin) -> bool:
        """Return True if the root holds files that even an unfinished pack has.

        A finished pack is recognised earlier, by its manifest.
        """
        return origin.selection is None and any(origin.entry(name) is not None for name in _TRACES)

    def open(
        self, entry: ShardEntry, sidecar: Callable[[], Sidecar], place: ShardPlace
    ) -> PackShard:
        """Open a shard at its place. It needs no sidecar: the shard describes itself."""
        return PackShard(place, entry)

    def blob_key(
        self, origin: RemoteFolder, *, name: bytes, etag: str, crc32c: int, columns_crc32c: int
    ) -> str:
        """Return the cache key of a shard's blob: a key by content, so that copies share it."""
        return origin.blob_key(name, f"crc32c-{crc32c:08x}-{columns_crc32c:08x}")


FORMAT = PackFormat()
