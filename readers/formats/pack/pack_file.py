"""Open a pack's shard in a local file, which is mapped once.

A sample is a slice of the flat buffer; no Arrow object is made for it. Rows of a field of one shape
are gathered at once, and each block is checked once.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import numpy as np
from crc32c import crc32c

from penstock.cache import CorruptShardError, IndexChangedError, ReadError
from penstock.cache.base import machine_remedy, read_error
from penstock.readers.files import BROKEN, advise_willneed, map_buffer, only_the_tail, printable
from penstock.readers.formats.local_files import read_up_to
from penstock.readers.formats.pack.pack_columns import PackColumns
from penstock.readers.formats.pack.pack_forms import block_bounds, block_rows

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from penstock.readers.fieldtypes import Column, Schema
    from penstock.readers.formats.format import ShardEntry
    from penstock.readers.formats.open_shard import Ints, Places
    from penstock.readers.formats.pack.pack_columns import PackField
    from penstock.readers.types import Encoded

# Rows are copied through a buffer that stays in the processor's cache: 13 % faster than through one
# buffer for all rows, for 256 rows of 12 KiB from 4 shards.
_CHUNK_BYTES = 64 * 2**10

WRONG_CRC = "its bytes differ from those that were packed: its CRC-32C is wrong"


class DenseRows:
    """The rows of one field in one shard.

    A block is compared with its CRC-32C when one of its rows is first read. Safe for several
    threads: at worst, two check the same block.
    """

    def __init__(self, field: PackField) -> None:
        assert field.values is not None
        assert field.blocks is not None
        self._form, self._values = field.form, field.values
        self._data: NDArray[np.uint8] = field.values.reshape(-1).view(np.uint8)
        self._start = field.start
        self._bounds = block_bounds(field.form, field.rows)
        self._each = block_rows(field.form)
        self._at_once = max(1, _CHUNK_BYTES // max(1, field.form.row_bytes))
        self._is_bits = field.form.is_bits
        self._sums = field.blocks.tolist()
        self._is_right = np.zeros(len(self._sums), bool)
        self._are_all_right = False

    def unchecked(self, rows: NDArray[np.int64]) -> list[int]:
        """Return the blocks of these rows that haven't been found intact yet."""
        if self._are_all_right:
            return []
        blocks = rows // self._each
        unchecked: list[int] = np.unique(blocks[~self._is_right[blocks]]).tolist()
        return unchecked

    def span(self, block: int) -> tuple[int, int]:
        """Return the bytes [start, end) of a block in the file."""
        return self._start + int(self._bounds[block]), self._start + int(self._bounds[block + 1])

    def wrong(self, rows: NDArray[np.int64]) -> NDArray[np.bool_] | None:
        """Check the blocks of these rows.

        Returns a mask of the rows in corrupt blocks, bool, shape (len(rows),), or None if there are
        none.
        """
        unchecked = self.unchecked(rows)
        if not unchecked:
            return None
        for block in unchecked:
            data = self._data[self._bounds[block] : self._bounds[block + 1]]
            self._is_right[block] = crc32c(data) == self._sums[block]
        self._are_all_right = bool(self._is_right.all())
        right = self._is_right[rows // self._each]
        return None if right.all() else ~right

    def wrong_alone(
        self, rows: NDArray[np.int64], crcs: NDArray[np.uint32]
    ) -> NDArray[np.bool_] | None:
        """Check single rows by their own checksums: the rest of their blocks may not be cached.

        crcs: of all samples of the shard. Returns the same as `wrong`.
        """
        unsure = rows if self._are_all_right else rows[~self._is_right[rows // self._each]]
        if self._are_all_right or not len(unsure):
            return None
        values = self._values
        sums = {
            row: crc32c(values[row].reshape(-1).view(np.uint8)) != crcs[row]
            for row in np.unique(unsure).tolist()
        }
        wrong = np.array([sums.get(row, False) for row in rows.tolist()], np.bool_)
        return wrong if wrong.any() else None

    def take(self, rows: NDArray[np.int64]) -> NDArray[Any]:
        """Return the rows unchecked, shape (len(rows), *row); zeros if a sample lacks the field."""
        if self._is_bits:
            return self._bits(rows)
        found: NDArray[Any] = self._values.take(rows, axis=0)
        return found

    def put(self, rows: Ints, out: NDArray[Any], places: Places) -> None:
        """Copy the rows, unchecked, to out[places]; without a temporary array for a slice."""
        if self._is_bits:
            out[places] = self._bits(rows)
        elif isinstance(places, slice):
            # mode="raise" would copy once more; the caller has checked that the rows exist.
            self._values.take(rows, axis=0, out=out[places], mode="clip")
        elif len(rows) <= (step := self._at_once):
            out[places] = self._values.take(rows, axis=0)
        else:
            buffer = np.empty((step, *out.shape[1:]), out.dtype)
            for start in range(0, len(rows), step):
                part = rows[start : start + step]
                taken = self._values.take(part, axis=0, out=buffer[: len(part)], mode="clip")
                out[places[start : start + step]] = taken

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


class DenseFields:
    """The part that local and remote shards of a pack share: their names and their rows of one
    shape.

    columns: of the shard. shown: the shard's name for messages.
    """

    shown: str

    def __init__(self, columns: PackColumns) -> None:
        self.columns = columns
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

    def wrong_rows(self, field: str, rows: Ints) -> NDArray[np.bool_] | None:
        """Return a mask of the rows whose bytes are corrupt, as `DenseRows.wrong` does."""
        return self.dense(field).wrong(rows)

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
        """Copy the rows of a field to out[places], and check each of their blocks once.

        wrong: receives the reason for each corrupt row, by its place in rows.
        """
        dense = self.dense(field)
        bad = self.wrong_rows(field, rows)
        if bad is not None:
            wrong.update(dict.fromkeys(np.flatnonzero(bad).tolist(), WRONG_CRC))
        if corners is None:
            dense.put(rows, out, places)
        else:
            from penstock.readers.fieldtypes import put_parts  # only crops of arrays need it

            put_parts(dense.each(rows), corners, out, places)

    def read_rows(
        self, rows: Ints, fields: Sequence[str], wrong: dict[int, str]
    ) -> dict[str, Column]:
        """Raise TypeError: a pack's fields that are stored by rows have one shape each."""
        del rows, wrong
        raise TypeError(f"{self.shown}: {list(fields)} have one shape each: call gather() for each")


_REMEDY = "Run the same `penstock pack` again into an empty folder, or fetch the shard again."


class PackShard(DenseFields):
    """A mapped shard of a pack. It keeps no file descriptor; views that it returned keep the map
    alive."""

    is_mapped = True
    is_file_per_sample = False

    def __init__(self, path: bytes, entry: ShardEntry) -> None:
        """Map a shard's file. entry: the manifest's record of the shard.

        Raises CorruptShardError, IndexChangedError, ReadError.
        """
        self.path, self.shown = path, printable(entry.name)
        _check_size(path, entry.size_bytes)
        try:
            buffer = map_buffer(path)
            with only_the_tail(buffer.address, buffer.size):
                columns = PackColumns(buffer, entry.layout.schema)
                self.table = columns.table(entry.layout, samples=entry.samples, sums=entry.sums)
        except FileNotFoundError:
            raise _missing(path) from None
        except BROKEN as error:
            raise _no_shard(path, error) from error
        super().__init__(columns)
        self._data, self._address = columns.data, buffer.address

    def views(self, starts: list[int], ends: list[int]) -> list[Encoded]:
        """Return views of the map."""
        data = self._data
        return [data[start:end] for start, end in zip(starts, ends, strict=True)]

    def read_into(self, rows: list[int], starts: list[int], slots: list[Encoded]) -> None:
        """Read spans from the file, not through the map."""
        del rows
        try:
            fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            raise _missing(self.path) from None
        except OSError as error:
            raise read_error(printable(self.path), error) from error
        try:
            for start, slot in zip(starts, slots, strict=True):
                wanted = slot[:-1]
                if read_up_to(fd, wanted, start) < len(wanted):
                    raise CorruptShardError(
                        f"{printable(self.path)}: truncated: it ends before byte "
                        f"{start + len(wanted)}. {_REMEDY}"
                    )
        except OSError as error:
            raise read_error(printable(self.path), error) from error
        finally:
            os.close(fd)

    def advise(self, starts: NDArray[np.int64], ends: NDArray[np.int64]) -> None:
        """Ask the kernel to read these pages ahead."""
        advise_willneed(self._address + starts, self._address + ends)


def rewrite_source(path: bytes, schema: Schema, source: NDArray[np.int64]) -> None:
    """Replace the column of source ids in a shard's file, in place.

    Only the packer calls it, before the pack is read. Raises CorruptShardError.
    """
    try:
        at = PackColumns(map_buffer(path), schema).source_offset()
    except BROKEN as error:
        raise _no_shard(path, error) from error
    with open(path, "r+b", buffering=0) as file:
        file.seek(at)
        file.write(np.ascontiguousarray(source, "<i8").tobytes())
        os.fsync(file.fileno())


def _no_shard(path: bytes, error: Exception) -> CorruptShardError | ReadError:
    if machine_remedy(error) is not None:
        return read_error(printable(path), error)
    return CorruptShardError(
        f"{printable(path)}: not a shard that Penstock wrote, or changed since then ({error}). "
        f"{_REMEDY}"
    )


def _check_size(path: bytes, size_bytes: int) -> None:
    try:
        got = os.stat(path).st_size
    except FileNotFoundError:
        raise _missing(path) from None
    except OSError as error:
        raise read_error(printable(path), error) from error
    if got < size_bytes:
        raise CorruptShardError(
            f"{printable(path)}: truncated: got {got} bytes, the manifest promises {size_bytes}. "
            f"{_REMEDY}"
        )
    if got > size_bytes:
        raise IndexChangedError(
            f"{printable(path)}: changed: got {got} bytes, the manifest promises {size_bytes}. "
            f"{_REMEDY}"
        )


def _missing(path: bytes) -> CorruptShardError:
    return CorruptShardError(
        f"{printable(path)}: the shard is missing, though the manifest names it. {_REMEDY}"
    )
