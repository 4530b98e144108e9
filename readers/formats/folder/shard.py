"""A virtual shard of a local folder, open for reading: its files are opened when they are read."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from penstock.readers.files.names import printable
from penstock.readers.formats.local_files import read_file_into

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from penstock.readers.types import Encoded


class FolderShard:
    """A shard of some files of a local folder."""

    is_mapped = False
    is_file_per_sample = True

    def __init__(self, root: bytes, names: Sequence[bytes], table: NDArray[np.int64]) -> None:
        """root: the dataset's folder; names: of the files below it."""
        self._root, self._names, self.table = root, names, table

    def views(self, starts: list[int], ends: list[int]) -> list[Encoded]:
        """Raise TypeError: small files aren't mapped, as reading costs less."""
        del starts, ends
        raise TypeError("a folder's files are read, not mapped")

    def read_into(self, rows: list[int], starts: list[int], slots: list[Encoded]) -> None:
        """Read whole files into their slots."""
        del starts
        for row, slot in zip(rows, slots, strict=True):
            name = self._names[row]
            read_file_into(os.path.join(self._root, name), slot, name=name)

    def advise(self, starts: NDArray[np.int64], ends: NDArray[np.int64]) -> None:
        """Do nothing: each file is read whole by one call, which is its own read-ahead."""

    def name(self, row: int) -> str:
        """The file's name below the dataset's root."""
        return printable(self._names[row])

    def source_names(self) -> list[bytes] | None:
        """Always None: these are the data themselves."""
        return None
