"""A pack's shard of a local folder, open for reading.

It is mapped once; a sample is a slice of the flat buffer, and no Arrow object is made for it.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import numpy as np

from penstock.cache.base.machine import machine_remedy, read_error
from penstock.cache.errors import CorruptShardError, IndexChangedError, ReadError
from penstock.readers.files.names import printable
from penstock.readers.files.pages import BROKEN, advise_willneed, map_buffer, only_the_tail
from penstock.readers.formats.local_files import read_up_to
from penstock.readers.formats.pack.columns import PackColumns
from penstock.readers.formats.pack.dense import DenseFields

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from penstock.readers.fields.schema import Schema
    from penstock.readers.formats.format import ShardEntry
    from penstock.readers.types import Encoded

_REMEDY = "Run the same `penstock pack` again into an empty folder, or fetch the shard again."


class PackShard(DenseFields):
    """A mapped shard of a pack. It holds no descriptor; views that it gave keep the map alive."""

    is_mapped = True
    is_file_per_sample = False

    def __init__(self, path: bytes, entry: ShardEntry) -> None:
        """entry: what the manifest promises. Raises CorruptShardError, IndexChangedError,
        ReadError."""
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

    def name(self, row: int) -> str:
        """A sample's name for people, such as "shard-000003.arrow[17]"."""
        return f"{self.shown}[{row}]"

    def source_names(self) -> list[bytes] | None:
        """The samples' names in what the pack was made from; see `PackColumns`."""
        return self.columns.source_names()

    def views(self, starts: list[int], ends: list[int]) -> list[Encoded]:
        """Views of the map."""
        data = self._data
        return [data[start:end] for start, end in zip(starts, ends, strict=True)]

    def read_into(self, rows: list[int], starts: list[int], slots: list[Encoded]) -> None:
        """Read the file, past the map."""
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
                        f"{printable(self.path)}: torn: it ends before byte "
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
    """Replace the column of source ids in a shard's file, in place; for the packer, before anyone
    reads. Raises CorruptShardError."""
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
        f"{printable(path)}: not a shard that Penstock wrote, or changed since ({error}). {_REMEDY}"
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
            f"{printable(path)}: torn: got {got} bytes, the manifest promises {size_bytes}. "
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
