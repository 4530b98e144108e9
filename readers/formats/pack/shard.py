"""A pack's shard of a local folder, open for reading.

It is mapped once; a sample is a slice of the flat buffer, and no Arrow object is made for it.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.cache.errors import CorruptShardError, IndexChangedError
from penstock.readers.files.names import printable
from penstock.readers.files.pages import BROKEN, advise_willneed, map_buffer, only_the_tail
from penstock.readers.formats.local_files import read_up_to
from penstock.readers.formats.pack.columns import PackColumns

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from penstock.readers.fields.columns import Column
    from penstock.readers.formats.layout import Layout
    from penstock.readers.formats.shard import Ints
    from penstock.readers.formats.summary import Sums
    from penstock.readers.types import Encoded

_REMEDY = "Run the same `penstock pack` again into an empty folder, or fetch the shard again."


class PackShard:
    """A mapped shard of a pack. It holds no descriptor; views that it gave keep the map alive."""

    is_mapped = True
    is_file_per_sample = False

    def __init__(
        self,
        path: bytes,
        *,
        size_bytes: int,
        samples: int,
        sums: Sums,
        layout: Layout,
        shown: str,
    ) -> None:
        """size_bytes, samples, sums: what the manifest promises; shown: the shard's name for
        people. Raises CorruptShardError, IndexChangedError."""
        self.path, self._shown = path, shown
        _check_size(path, size_bytes)
        try:
            buffer = map_buffer(path)
            with only_the_tail(buffer.address, buffer.size):
                self.columns = PackColumns(buffer, samples=samples, sums=sums, layout=layout)
        except FileNotFoundError:
            raise _missing(path) from None
        except BROKEN as error:
            raise CorruptShardError(
                f"{printable(path)}: not a shard that Penstock wrote, or changed since ({error}). "
                f"{_REMEDY}"
            ) from error
        self.table = self.columns.table
        self._data = np.frombuffer(self.columns.flat, np.uint8)
        self._address = self.columns.flat.address

    def name(self, row: int) -> str:
        """A sample's name for people, such as "shard-000003.arrow[17]"."""
        return f"{self._shown}[{row}]"

    def source_names(self) -> list[bytes] | None:
        """The samples' names in what the pack was made from; see `PackColumns`."""
        return self.columns.source_names()

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
        try:
            for start, slot in zip(starts, slots, strict=True):
                wanted = slot[:-1]
                if read_up_to(fd, wanted, self.columns.file_offset + start) < len(wanted):
                    raise CorruptShardError(
                        f"{printable(self.path)}: torn: it ends before byte "
                        f"{self.columns.file_offset + start + len(wanted)}. {_REMEDY}"
                    )
        finally:
            os.close(fd)

    def advise(self, starts: NDArray[np.int64], ends: NDArray[np.int64]) -> None:
        """Ask the kernel to read these pages ahead."""
        advise_willneed(self._address + starts, self._address + ends)

    def rewrite_source(self, source: NDArray[np.int64]) -> None:
        """Replace the source column in the file, in place; for the packer, before anyone reads."""
        with open(self.path, "r+b", buffering=0) as file:
            file.seek(self.columns.source_offset)
            file.write(np.ascontiguousarray(source, "<i8").tobytes())
            os.fsync(file.fileno())


def _check_size(path: bytes, size_bytes: int) -> None:
    try:
        got = os.stat(path).st_size
    except FileNotFoundError:
        raise _missing(path) from None
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
