"""Read-only maps of whole files, by libc.

pyarrow's own map asks for the whole file to be read ahead, and Python's `mmap` keeps a descriptor
open for each map.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

_libc = ctypes.CDLL(None, use_errno=True)
_mmap, _munmap = _libc.mmap, _libc.munmap
_mmap.argtypes = (
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int64,
)
_mmap.restype = ctypes.c_void_p
_munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_FAILED = ctypes.c_void_p(-1).value


class Map:
    """A Map is a whole file, mapped read-only until nothing refers to this object any more.

    on_unmap: called behind that. Raises OSError, ValueError (an empty file).
    """

    def __init__(self, fd: int, *, on_unmap: Callable[[], None] | None = None) -> None:
        self.address: int | None = None
        self._on_unmap: Callable[[], None] | None = None
        file = os.fstat(fd)
        self.size_bytes, self.inode = file.st_size, file.st_ino
        if self.size_bytes == 0:
            raise ValueError("the file is empty")
        address = _mmap(None, self.size_bytes, mmap.PROT_READ, mmap.MAP_SHARED, fd, 0)
        if address is None or address == _FAILED:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
        self.address, self._on_unmap = address, on_unmap

    def buffer(self) -> Any:
        """A pyarrow buffer of it, which keeps the map alive as does all that looks into it."""
        import pyarrow as pa

        return pa.foreign_buffer(self.address, self.size_bytes, base=self)

    def __del__(
        self,
        unmap: Callable[[int, int], int] = _munmap,
        is_finalizing: Callable[[], bool] = sys.is_finalizing,
    ) -> None:
        if self.address is not None:
            unmap(self.address, self.size_bytes)
            # At exit the modules that a callback needs may be gone, and the kernel frees its locks.
            if self._on_unmap is not None and not is_finalizing():
                self._on_unmap()


def map_file(path: bytes | str) -> Map:
    """Map a file by its path; no descriptor stays open. Raises as Map does."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return Map(fd)
    finally:
        os.close(fd)
