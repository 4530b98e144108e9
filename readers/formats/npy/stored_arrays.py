"""Locate arrays in .npy and .npz files by their headers; no array's numbers are read.

Python's zipfile reads an archive's directory from the end of the file. Every claim of the directory
is checked against the file before it is used. The headers of members are read here, all at once:
zipfile would need a request for each, and doesn't state where a member's contents begin. Nothing is
ever unpickled.

Source: APPNOTE.TXT, the description of .ZIP files; numpy.savez.
"""

from __future__ import annotations

import io
import math
import struct
import zlib
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING
from zipfile import ZIP_DEFLATED, ZIP_STORED, BadZipFile, ZipFile, ZipInfo

import numpy as np

from penstock.cache import DatasetError, ordered
from penstock.readers.fieldtypes import MAX_HEAD_BYTES, UNSUPPORTED_NPY, NpyHeader, read_npy_header
from penstock.readers.files import printable
from penstock.readers.formats.npy.npy_format import MAX_AXES
from penstock.readers.formats.unindexed_files import read_file_parts
from penstock.readers.types import Rejection

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from penstock.readers.formats.array_windows import ArrayWindows
    from penstock.readers.origin import Entry, Origin
    from penstock.readers.types import ArrayCodec

    Read = Callable[[Sequence[tuple[int, int]]], list[bytes]]


@dataclass(frozen=True, slots=True)
class StoredArray:
    """The location of an array in a file.

    start, size_bytes: its bytes in the file. packed: None if these bytes are the array's numbers
    themselves; if they are compressed, the bytes of the decompressed .npy file, those of its
    header, and its CRC-32.
    """

    entry: Entry
    start: int
    size_bytes: int
    codec: ArrayCodec
    shape: tuple[int, ...]
    packed: tuple[int, int, int] | None = None

    @property
    def is_fortran(self) -> bool:
        """True if its numbers are stored column by column and that makes a difference."""
        return self.codec.is_fortran and sum(length > 1 for length in self.shape) > 1

    @property
    def numbers_bytes(self) -> int:
        """The bytes of its numbers, decompressed."""
        return math.prod(self.shape) * self.codec.dtype.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrayGroup:
    """Arrays whose samples belong together, by field.

    name: of their file, or of the first file. left_out: other arrays of the file, and why they
    aren't fields. windows: the samples of each field, the same number for all; empty until they are
    chosen.
    """

    name: bytes
    arrays: Mapping[str, StoredArray]
    left_out: Mapping[str, str] = field(default_factory=dict)
    windows: Mapping[str, ArrayWindows] = field(default_factory=dict)

    @property
    def samples(self) -> int:
        """The number of samples."""
        return next(iter(self.windows.values())).samples


def read_arrays(origin: Origin, entries: Sequence[Entry], *, workers: int) -> list[StoredArray]:
    """Read the headers of .npy files, all at once.

    Raises DatasetError (a file is damaged, or can't be a tensor), IndexChangedError or FetchError.
    """
    parts = [(entry, 0, min(entry.size_bytes, MAX_HEAD_BYTES)) for entry in entries]
    arrays = []
    for entry, head in zip(entries, read_file_parts(origin, parts, workers=workers), strict=True):
        header = _parse_header(head, entry.size_bytes)
        if isinstance(header, Rejection):
            raise DatasetError(
                f"{printable(entry.name)}: {header.reason}. Write or fetch it again, or remove it "
                "from the dataset."
            )
        start, size_bytes = header.start, entry.size_bytes - header.start
        arrays.append(StoredArray(entry, start, size_bytes, header.codec, header.shape))
    return arrays


def _parse_header(head: bytes, size_bytes: int) -> NpyHeader | Rejection:
    """Parse the header of a .npy file of this size."""
    header = read_npy_header(np.frombuffer(head, np.uint8), size_bytes=size_bytes)
    if isinstance(header, NpyHeader) and len(header.shape) > MAX_AXES:
        return Rejection(f"{UNSUPPORTED_NPY} {len(header.shape)} axes: at most {MAX_AXES} are read")
    return header


MAX_CHUNK_BYTES = 2**32
"""The largest compressed member that is read, because a member is decompressed as a whole."""

_TAIL_BYTES = (2**16 + 22, 2**22)
"""Bytes at the end of an archive that are read for its directory, at first and if it is long."""

_LOCAL = struct.Struct("<4s5H3L2H")
_HEAD_BYTES = _LOCAL.size + 2**8 + MAX_HEAD_BYTES
"""The first bytes of a member that are read, besides its name: writers add few extra fields."""

_MAX_RATIO = 1032
"""Deflate decompresses one byte to at most this many."""

_DAMAGE = (
    *(BadZipFile, zlib.error, struct.error, ValueError, OverflowError, EOFError),
    *(NotImplementedError, IndexError, KeyError),
)
_ENCRYPTED = 0x1
_UTF_8 = 0x800


def read_archives(origin: Origin, entries: Sequence[Entry], *, workers: int) -> list[ArrayGroup]:
    """Read the directories and headers of .npz files.

    Raises DatasetError, IndexChangedError or FetchError.
    """
    read = partial(_read_archive, origin)
    if len(entries) == 1:
        return [read(entries[0])]
    return list(ordered(read, entries, workers=workers, ahead=2 * workers, name="footers"))


def _read_archive(origin: Origin, entry: Entry) -> ArrayGroup:
    def read(spans: Sequence[tuple[int, int]]) -> list[bytes]:
        return read_file_parts(origin, [(entry, *span) for span in spans], workers=1)

    try:
        return _archive(entry, read)
    except DatasetError:
        raise
    except _DAMAGE as error:
        raise DatasetError(
            f"{printable(entry.name)}: this isn't an .npz file, or it is damaged ({error}). Write "
            "or fetch it again, or remove it from the dataset."
        ) from error


def _archive(entry: Entry, read: Read) -> ArrayGroup:
    """Return the arrays of an archive, and the reasons against its other members. read: reads bytes
    [start, end) of the file."""
    ends = _directory(entry.size_bytes, read)
    arrays, refused, spans = (
        dict[str, StoredArray](),
        dict[str, str](),
        dict[ZipInfo, tuple[int, int]](),
    )
    for member in ends:
        if (reason := _refusal(member)) is None:
            at, head_bytes = member.header_offset, len(_name(member)) + _HEAD_BYTES
            spans[member] = (at, min(at + head_bytes, entry.size_bytes))
        elif not member.is_dir():
            refused[member.filename.removesuffix(".npy")] = reason
    for member, data in zip(spans, read([*spans.values()]), strict=True):
        start, head = _contents(member, ends[member], data)
        name = member.filename.removesuffix(".npy")
        header = _parse_header(head, member.file_size)
        if isinstance(header, Rejection):
            if not header.reason.startswith(UNSUPPORTED_NPY):
                raise ValueError(f"{member.filename!r}: {header.reason}")
            refused[name] = header.reason
        elif name in arrays:
            raise ValueError(f"two members have the name {member.filename!r}")
        else:
            is_packed, at = member.compress_type == ZIP_DEFLATED, header.start
            packed = (member.file_size, at, member.CRC) if is_packed else None
            at = 0 if is_packed else at
            size_bytes = member.compress_size - at
            arrays[name] = StoredArray(
                entry, start + at, size_bytes, header.codec, header.shape, packed
            )
    return ArrayGroup(name=entry.name, arrays=arrays, left_out=refused)


def _directory(file_bytes: int, read: Read) -> dict[ZipInfo, int]:
    """Return the members, in the order of the directory, and where each ends at the latest: at the
    next one, or at the directory. Raises ValueError if members overlap."""
    for size_bytes in _TAIL_BYTES:
        first = max(0, file_bytes - size_bytes)
        (tail,) = read([(first, file_bytes)])
        try:
            # zipfile takes the end for a whole archive, whose members begin before it.
            with ZipFile(io.BytesIO(tail)) as archive:
                members, directory = archive.infolist(), archive.start_dir + first
            break
        except (ValueError, BadZipFile):
            if not first or size_bytes == _TAIL_BYTES[-1]:
                raise
    for member in members:
        member.header_offset += first
    order = sorted(members, key=lambda member: member.header_offset)
    ends = [*(member.header_offset for member in order[1:]), directory]
    latest = dict(zip(order, ends, strict=True))
    for member, end in latest.items():
        if not 0 <= member.header_offset <= end - _LOCAL.size - member.compress_size:
            raise ValueError(f"{member.filename!r} overlaps another member or ends behind the file")
    return {member: latest[member] for member in members}


def _name(member: ZipInfo) -> bytes:
    return member.orig_filename.encode("utf-8" if member.flag_bits & _UTF_8 else "cp437")


def _contents(member: ZipInfo, end: int, data: bytes) -> tuple[int, bytes]:
    """Return where a member's contents begin in the file, and the first of them, decompressed.

    end: of the member in the file, at the latest. data: the first bytes of its header. Raises
    ValueError if the member can't be where the directory states.
    """
    name = _name(member)
    magic, *_, name_bytes, extra_bytes = _LOCAL.unpack(data[: _LOCAL.size])
    begin = _LOCAL.size + name_bytes + extra_bytes
    start = member.header_offset + begin
    is_there = magic == b"PK\3\4" and start + member.compress_size <= end
    if not is_there or data[_LOCAL.size : _LOCAL.size + name_bytes] != name:
        raise ValueError(
            f"{member.filename!r} has no header of this name where the directory expects it"
        )
    head = data[begin : begin + member.compress_size]
    if member.compress_type == ZIP_DEFLATED:
        head = zlib.decompressobj(-15).decompress(head, MAX_HEAD_BYTES)
    return start, head


def _refusal(member: ZipInfo) -> str | None:
    """Return why a member can't be read as an array; None if it may be readable.

    Raises ValueError if the directory contradicts itself.
    """
    is_packed, size_bytes = member.compress_type == ZIP_DEFLATED, member.file_size
    if member.flag_bits & _ENCRYPTED or not (is_packed or member.compress_type == ZIP_STORED):
        return "it is encrypted, or its compression isn't numpy's: write it with np.savez"
    stored = member.compress_size
    if size_bytes > _MAX_RATIO * (stored + 1) if is_packed else size_bytes != stored:
        raise ValueError(
            f"{member.filename!r} claims {size_bytes:,} bytes, stored as {stored:,}, which is "
            "impossible"
        )
    if not member.filename.endswith(".npy"):
        return "its name doesn't end in .npy, so it is no array"
    if is_packed and size_bytes > MAX_CHUNK_BYTES:
        return (
            f"a compressed array is decoded as a whole, and this one takes {size_bytes:,} bytes, "
            f"more than {MAX_CHUNK_BYTES:,}: write it with np.savez, which doesn't compress"
        )
    return None
