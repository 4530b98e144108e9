"""Map files or spans of them read-only, by libc.

pyarrow's own map makes the kernel read the entire file ahead, and Python's `mmap` keeps a
descriptor open for each map.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    OnUnmap = Callable[[], None]

_libc = ctypes.CDLL(None, use_errno=True)
libc_mmap, _munmap = _libc.mmap, _libc.munmap
_INTS = (ctypes.c_int,) * 3
libc_mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *_INTS, ctypes.c_int64)
libc_mmap.restype = ctypes.c_void_p
_munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
MAP_FAILED = ctypes.c_void_p(-1).value


class FileMap:
    """A read-only map of a file, which lasts until nothing refers to this object any more.

    on_unmap: called after the file is unmapped. span: the bytes [start, end) of the file to map;
    None for all of it. Raises OSError, and ValueError if there is nothing to map.
    """

    address: int | None = None

    def __init__(
        self, fd: int, *, on_unmap: OnUnmap | None = None, span: tuple[int, int] | None = None
    ) -> None:
        file = os.fstat(fd)
        start, end = span or (0, file.st_size)
        self._ahead = start % mmap.ALLOCATIONGRANULARITY
        self.size_bytes, self.inode = end - start, file.st_ino
        if self.size_bytes <= 0:
            raise ValueError("the file is empty")
        at, length = start - self._ahead, self.size_bytes + self._ahead
        address = libc_mmap(None, length, mmap.PROT_READ, mmap.MAP_SHARED, fd, at)
        if address is None or address == MAP_FAILED:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
        self.address, self._on_unmap = address + self._ahead, on_unmap

    def buffer(self) -> Any:
        """Return a pyarrow buffer of the map, which keeps the map alive, as its slices do."""
        import pyarrow as pa

        return pa.foreign_buffer(self.address, self.size_bytes, base=self)

    def __del__(
        self,
        unmap: Callable[[int, int], int] = _munmap,
        is_finalizing: Callable[[], bool] = sys.is_finalizing,
    ) -> None:
        if self.address is not None:
            unmap(self.address - self._ahead, self.size_bytes + self._ahead)
            # At exit the callback's modules may be unloaded, and the kernel releases its locks.
            if self._on_unmap is not None and not is_finalizing():
                self._on_unmap()


def map_file(path: bytes | str) -> FileMap:
    """Map a file by its path, keeping no descriptor open. Raises as FileMap does."""
    with open(path, "rb", buffering=0) as file:
        return FileMap(file.fileno())
