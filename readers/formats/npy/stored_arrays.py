"""Locate arrays in .npy and .npz files by their headers; no array's numbers are read.

Python's zipfile reads an archive's directory from the end of the file. Every claim of the directory
is checked against the file before it is used. Nothing is ever unpickled.

Source: APPNOTE.TXT, the description of .ZIP files; numpy.savez.
"""

from __future__ import annotations

import io
import math
import struct
import zipfile
import zlib
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from penstock.cache import DatasetError, ordered
from penstock.readers.fieldtypes import MAX_HEAD_BYTES, UNSUPPORTED_NPY, NpyHeader, read_npy_header
from penstock.readers.files import printable
from penstock.readers.formats.unindexed_files import read_file_parts
from penstock.readers.types import Rejection

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from penstock.readers.origin import Entry, Origin
    from penstock.readers.types import ArrayCodec

FIRST_BYTES = 512
"""First bytes of a file that are read for its header; numpy's headers usually take 128 bytes."""

MAX_AXES = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressedArray:
    """The sizes of an array that is compressed in an archive.

    size_bytes: of the decompressed member, .npy header included. head_bytes: of that header. crc32:
    of the decompressed member.
    """

    size_bytes: int
    head_bytes: int
    crc32: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredArray:
    """The location of an array in a file.

    start, size_bytes: its bytes in the file. packed: None if these bytes are the array's numbers
    themselves.
    """

    entry: Entry
    start: int
    size_bytes: int
    codec: ArrayCodec
    shape: tuple[int, ...]
    packed: CompressedArray | None = None

    @property
    def is_fortran(self) -> bool:
        """True if its numbers are stored column by column and that makes a difference."""
        return self.codec.is_fortran and sum(length > 1 for length in self.shape) > 1

    @property
    def numbers_bytes(self) -> int:
        """The bytes of its numbers, decompressed."""
        return math.prod(self.shape) * self.codec.dtype.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFile:
    """The arrays of one file by name, and the members that can't be read, with the reason."""

    entry: Entry
    arrays: Mapping[str, StoredArray]
    refused: Mapping[str, str]


def read_arrays(origin: Origin, entries: Sequence[Entry], *, workers: int) -> list[StoredArray]:
    """Read the headers of .npy files, all at once.

    Raises DatasetError (a file is damaged, or can't be a tensor), IndexChangedError or FetchError.
    """
    heads = read_file_parts(
        origin, [(e, 0, min(e.size_bytes, FIRST_BYTES)) for e in entries], workers=workers
    )
    long = [i for i, head in enumerate(heads) if _header_bytes(head) > len(head) == FIRST_BYTES]
    if long:
        parts = [(entries[i], 0, min(entries[i].size_bytes, MAX_HEAD_BYTES)) for i in long]
        for i, head in zip(long, read_file_parts(origin, parts, workers=workers), strict=True):
            heads[i] = head
    return [_array(entry, head) for entry, head in zip(entries, heads, strict=True)]


def _array(entry: Entry, head: bytes) -> StoredArray:
    header = _parse_header(head, entry.size_bytes)
    if isinstance(header, Rejection):
        raise DatasetError(
            f"{printable(entry.name)}: {header.reason}. Write or fetch it again, or remove it from "
            "the dataset."
        )
    return StoredArray(
        entry=entry,
        start=header.start,
        size_bytes=entry.size_bytes - header.start,
        codec=header.codec,
        shape=header.shape,
    )


def _header_bytes(head: bytes) -> int:
    """Return the length that the header of a .npy file claims in its first bytes."""
    if len(head) < 12:
        return 0
    width = 2 if head[6] == 1 else 4
    return 8 + width + int.from_bytes(head[8 : 8 + width], "little")


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
_MOST_EXTRA_BYTES = 2**16
_MAX_RATIO = 1032
"""Deflate decompresses one byte to at most this many."""

_DAMAGE = (
    *(zipfile.BadZipFile, zlib.error, struct.error, ValueError, OverflowError, EOFError),
    *(NotImplementedError, IndexError, KeyError),
)
_ENCRYPTED = 0x1
_UTF_8 = 0x800


def read_archives(origin: Origin, entries: Sequence[Entry], *, workers: int) -> list[StoredFile]:
    """Read the directories and headers of .npz files.

    Raises DatasetError, IndexChangedError or FetchError.
    """
    read = partial(_read_archive, origin)
    if len(entries) == 1:
        return [read(entries[0])]
    return list(ordered(read, entries, workers=workers, ahead=2 * workers, name="footers"))


def _read_archive(origin: Origin, entry: Entry) -> StoredFile:
    try:
        return _Archive(origin, entry).read()
    except DatasetError:
        raise
    except _DAMAGE as error:
        raise DatasetError(
            f"{printable(entry.name)}: this isn't an .npz file, or it is damaged ({error}). Write "
            "or fetch it again, or remove it from the dataset."
        ) from error


class _Archive:
    """Reads the directory and the headers of one archive."""

    def __init__(self, origin: Origin, entry: Entry) -> None:
        self._origin, self._entry, self._size = origin, entry, entry.size_bytes

    def read(self) -> StoredFile:
        """Return its arrays."""
        ends = self._directory()
        members, refused = [], dict[str, str]()
        for member in ends:
            reason = _refusal(member)
            if reason is None:
                members.append(member)
            elif not member.is_dir():
                refused[member.filename.removesuffix(".npy")] = reason
        found = self._heads(members, ends, FIRST_BYTES)
        long = [m for m in members if not 0 < _header_bytes(found[m][1]) <= len(found[m][1])]
        found |= self._heads(long, ends, _MOST_EXTRA_BYTES + MAX_HEAD_BYTES)
        arrays: dict[str, StoredArray] = {}
        for member, (start, head) in found.items():
            name = member.filename.removesuffix(".npy")
            array = self._array(member, start, head)
            if isinstance(array, Rejection):
                refused[name] = array.reason
            elif name in arrays:
                raise ValueError(f"two members have the name {member.filename!r}")
            else:
                arrays[name] = array
        return StoredFile(entry=self._entry, arrays=arrays, refused=refused)

    def _read(self, spans: list[tuple[int, int]]) -> list[bytes]:
        parts = [(self._entry, start, end) for start, end in spans]
        return read_file_parts(self._origin, parts, workers=1)

    def _directory(self) -> dict[zipfile.ZipInfo, int]:
        """Return the members, in the order of the directory, and where each ends at the latest: at
        the next one, or at the directory. Raises ValueError if members overlap."""
        for size_bytes in _TAIL_BYTES:
            first = max(0, self._size - size_bytes)
            (tail,) = self._read([(first, self._size)])
            try:
                # zipfile takes the end for a whole archive, whose members begin before it.
                with zipfile.ZipFile(io.BytesIO(tail)) as archive:
                    members, directory = archive.infolist(), archive.start_dir + first
                break
            except (ValueError, zipfile.BadZipFile):
                if not first or size_bytes == _TAIL_BYTES[-1]:
                    raise
        for member in members:
            member.header_offset += first
        order = sorted(members, key=lambda member: member.header_offset)
        ends = [*(member.header_offset for member in order[1:]), directory]
        latest = dict(zip(order, ends, strict=True))
        for member, end in latest.items():
            if not 0 <= member.header_offset <= end - _LOCAL.size - member.compress_size:
                raise ValueError(
                    f"{member.filename!r} overlaps another member or ends behind the file"
                )
        return {member: latest[member] for member in members}

    def _heads(
        self, members: list[zipfile.ZipInfo], ends: Mapping[zipfile.ZipInfo, int], size_bytes: int
    ) -> dict[zipfile.ZipInfo, tuple[int, bytes]]:
        """Return the first byte in the file of each member's contents, which begin behind the
        member's own header, and the first bytes of these contents, decompressed.

        size_bytes: to read of each. Raises ValueError if a member can't be where the directory
        states.
        """
        names = [
            member.orig_filename.encode("utf-8" if member.flag_bits & _UTF_8 else "cp437")
            for member in members
        ]
        begins = [member.header_offset for member in members]
        spans = [
            (begin, min(begin + _LOCAL.size + len(name) + size_bytes, self._size))
            for begin, name in zip(begins, names, strict=True)
        ]
        found = {}
        for member, name, data in zip(members, names, self._read(spans), strict=True):
            magic, *_, name_bytes, extra_bytes = _LOCAL.unpack(data[: _LOCAL.size])
            begin = _LOCAL.size + name_bytes + extra_bytes
            start = member.header_offset + begin
            is_there = magic == b"PK\3\4" and start + member.compress_size <= ends[member]
            if not is_there or data[_LOCAL.size : _LOCAL.size + name_bytes] != name:
                raise ValueError(
                    f"{member.filename!r} has no header of this name where the directory expects it"
                )
            head = data[begin : begin + member.compress_size]
            if member.compress_type == zipfile.ZIP_DEFLATED:
                head = zlib.decompressobj(-15).decompress(head, MAX_HEAD_BYTES)
            found[member] = start, head
        return found

    def _array(self, member: zipfile.ZipInfo, start: int, head: bytes) -> StoredArray | Rejection:
        header = _parse_header(head, member.file_size)
        if isinstance(header, Rejection):
            if not header.reason.startswith(UNSUPPORTED_NPY):
                raise ValueError(f"{member.filename!r}: {header.reason}")
            return header
        is_packed, at = member.compress_type == zipfile.ZIP_DEFLATED, header.start
        packed = CompressedArray(size_bytes=member.file_size, head_bytes=at, crc32=member.CRC)
        return StoredArray(
            entry=self._entry,
            start=start if is_packed else start + at,
            size_bytes=member.compress_size - (0 if is_packed else at),
            codec=header.codec,
            shape=header.shape,
            packed=packed if is_packed else None,
        )


def _refusal(member: zipfile.ZipInfo) -> str | None:
    """Return why a member can't be read as an array; None if it may be readable.

    Raises ValueError if the directory contradicts itself.
    """
    is_packed = member.compress_type == zipfile.ZIP_DEFLATED
    if member.flag_bits & _ENCRYPTED:
        return "it is encrypted: write it without a password"
    if not is_packed and member.compress_type != zipfile.ZIP_STORED:
        return "its compression isn't the one that numpy uses: write it with np.savez"
    if not is_packed and member.compress_size != member.file_size:
        raise ValueError(f"{member.filename!r} isn't compressed and yet has two sizes")
    if is_packed and member.file_size > _MAX_RATIO * (member.compress_size + 1):
        raise ValueError(
            f"{member.filename!r} claims {member.file_size:,} bytes, compressed to "
            f"{member.compress_size:,}, which is impossible"
        )
    if not member.filename.endswith(".npy"):
        return "its name doesn't end in .npy, so it is no array"
    if is_packed and member.file_size > MAX_CHUNK_BYTES:
        return (
            f"a compressed array is decoded as a whole, and this one takes {member.file_size:,} "
            f"bytes, more than {MAX_CHUNK_BYTES:,}: write it with np.savez, which doesn't compress"
        )
    return None
