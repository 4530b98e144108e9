"""Keep the decoders' libraries from writing to the process's standard error.

libjpeg, libpng, libtiff, OpenCV and nvImageCodec print lines for each oddity of a file, in each
epoch anew. None of them exports its error handler, and descriptor 2 belongs to the user: other
threads write there. So OpenCV and nvImageCodec get a level from the environment, which stands
there only while they are loaded; and in nvImageCodec's libraries alone, the addresses of C's
`stderr` and C++'s `std::cerr` are replaced by those of streams that drop what they get. An address
is replaced only where it is the one that is expected: with another version or system the libraries
stay as loud as they were.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_LEVELS = {
    b"OPENCV_LOG_LEVEL": b"SILENT",
    b"DALI_NVIMGCODEC_LOG_LEVEL": b"0",
    b"PYNVIMGCODEC_VERBOSITY": b"0",
}
_LIBRARIES = b"/nvimgcodec/"
_STDERR, _CERR = b"stderr", b"_ZSt4cerr"
_NEW_OSTREAM = "_ZNSoC1EPSt15basic_streambufIcSt11char_traitsIcEE"
_OSTREAM_BYTES = 1024  # more than any libstdc++ needs
_PT_DYNAMIC = 2
_STRTAB, _SYMTAB, _RELA, _RELASZ = 5, 6, 7, 8
_GLOB_DAT = (6, 1025)  # of x86_64, of aarch64

_once = threading.Lock()
_kept: list[Any] = []  # what the libraries point at


class _Segment(ctypes.Structure):
    _fields_ = (
        ("type", ctypes.c_uint32),
        ("flags", ctypes.c_uint32),
        ("offset", ctypes.c_uint64),
        ("vaddr", ctypes.c_uint64),
        ("paddr", ctypes.c_uint64),
        ("filesz", ctypes.c_uint64),
        ("memsz", ctypes.c_uint64),
        ("align", ctypes.c_uint64),
    )


class _Library(ctypes.Structure):
    _fields_ = (
        ("base", ctypes.c_uint64),
        ("name", ctypes.c_char_p),
        ("segments", ctypes.POINTER(_Segment)),
        ("count", ctypes.c_uint16),
    )


def load_quietly(load: Callable[[], object]) -> None:
    """Call `load`, which loads the decoders' libraries, the first time, and silence those."""
    with _once:
        if _kept:
            return
        libc = ctypes.CDLL(None)
        libc.getenv.restype = ctypes.c_char_p
        unset = [name for name in _LEVELS if libc.getenv(name) is None]
        for name in unset:
            libc.setenv(name, _LEVELS[name], 0)
        try:
            load()
        finally:
            for name in unset:
                libc.unsetenv(name)
        _kept.append(libc)
        streams = _silent_streams(libc)
        for slot, now, silent in _slots(libc, streams):
            if ctypes.c_uint64.from_address(slot).value == now:
                _write(libc, slot, silent)


def _silent_streams(libc: Any) -> dict[bytes, tuple[int, int]]:
    """For each name where it lies, and where its silent stand-in does."""
    libc.fopen.restype = ctypes.c_void_p
    sink = ctypes.c_void_p(libc.fopen(b"/dev/null", b"w"))
    streams: dict[bytes, tuple[int, int]] = {}
    if sink.value:
        _kept.append(sink)
        streams[_STDERR] = _address(libc, _STDERR), ctypes.addressof(sink)
    try:
        cxx = ctypes.CDLL("libstdc++.so.6")
        stream = ctypes.create_string_buffer(_OSTREAM_BYTES)
        make = getattr(cxx, _NEW_OSTREAM)
        make.restype, make.argtypes = None, (ctypes.c_void_p, ctypes.c_void_p)
        make(stream, None)  # without a buffer: it drops all
        _kept.append(stream)
        streams[_CERR] = _address(cxx, _CERR), ctypes.addressof(stream)
    except (OSError, AttributeError, ValueError):
        pass
    return streams


def _address(library: Any, name: bytes) -> int:
    return ctypes.addressof(ctypes.c_char.in_dll(library, name.decode()))


def _slots(libc: Any, streams: dict[bytes, tuple[int, int]]) -> Iterator[tuple[int, int, int]]:
    """Of nvImageCodec's libraries: where each keeps an address, what is expected there, and what
    is to be there."""
    libraries: list[tuple[int, int]] = []

    def see(library: Any, _size: int, _data: object) -> int:
        found = library.contents
        if found.name and _LIBRARIES in found.name:
            libraries.extend(
                (found.base, found.base + found.segments[i].vaddr)
                for i in range(found.count)
                if found.segments[i].type == _PT_DYNAMIC
            )
        return 0

    kind = ctypes.CFUNCTYPE(
        ctypes.c_int, ctypes.POINTER(_Library), ctypes.c_size_t, ctypes.c_void_p
    )
    libc.dl_iterate_phdr(kind(see), None)
    for base, dynamic in libraries:
        tags: dict[int, int] = {}
        while (tag := ctypes.c_int64.from_address(dynamic).value) != 0:
            tags[tag] = ctypes.c_uint64.from_address(dynamic + 8).value
            dynamic += 16
        if not {_STRTAB, _SYMTAB, _RELA, _RELASZ} <= tags.keys():
            continue
        for at in range(tags[_RELA], tags[_RELA] + tags[_RELASZ], 24):
            info = ctypes.c_uint64.from_address(at + 8).value
            if info & 0xFFFFFFFF not in _GLOB_DAT:
                continue
            symbol = tags[_SYMTAB] + 24 * (info >> 32)
            name = ctypes.string_at(tags[_STRTAB] + ctypes.c_uint32.from_address(symbol).value)
            if name in streams:
                yield base + ctypes.c_uint64.from_address(at).value, *streams[name]


def _write(libc: Any, slot: int, value: int) -> None:
    """Write an address into a page that the loader made read-only."""
    page = slot - slot % mmap.PAGESIZE
    size = ctypes.c_size_t(mmap.PAGESIZE)
    if libc.mprotect(ctypes.c_void_p(page), size, mmap.PROT_READ | mmap.PROT_WRITE) == 0:
        ctypes.c_uint64.from_address(slot).value = value
