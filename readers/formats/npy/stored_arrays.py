"""Locate arrays in .npy and .npz files by their headers, within bounds; no number is read.

An archive's directory is read by Python's zipfile, from the end of the file; whatever it says is
checked against the file before anything is made of it. Nothing is ever unpickled.
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
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from penstock.cache import DatasetError, ordered
from penstock.readers.fields import MAX_HEAD_BYTES, OF_OTHERS, NpyHeader, read_npy_header
from penstock.readers.files import printable
from penstock.readers.formats.unindexed_files import read_file_parts
from penstock.readers.types import Rejection

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from penstock.readers.origin import Entry, Origin
    from penstock.readers.types import ArrayCodec

FIRST_BYTES = 512
"""Of a file, in which its header ends as a rule: numpy's take 128."""

MAX_AXES = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressedArray:
    """An array that is compressed in an archive. size_bytes: decoded, with the .npy header, which
    takes head_bytes; crc32: of all that."""

    size_bytes: int
    head_bytes: int
    crc32: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredArray:
    """An array in a file. start, size_bytes: of its stored bytes; packed: None where these are its
    numbers."""

    entry: Entry
    start: int
    size_bytes: int
    codec: ArrayCodec
    shape: tuple[int, ...]
    packed: CompressedArray | None = None

    @property
    def is_fortran(self) -> bool:
        """Whether its numbers lie column by column, where that makes a difference."""
        return self.codec.is_fortran and sum(length > 1 for length in self.shape) > 1

    @property
    def numbers_bytes(self) -> int:
        """Bytes of its numbers."""
        return math.prod(self.shape) * self.codec.dtype.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFile:
    """What one file holds: arrays by name, and what of it can't be read, with the reason."""

    entry: Entry
    arrays: Mapping[str, StoredArray]
    refused: Mapping[str, str]


def read_arrays(origin: Origin, entries: Sequence[Entry], *, workers: int) -> list[StoredArray]:
    """The arrays of .npy files, by their headers: all at once. Raises DatasetError (damaged, or
    nothing that can be a tensor), IndexChangedError, FetchError."""
    heads = read_file_parts(
        origin, [(e, 0, min(e.size_bytes, FIRST_BYTES)) for e in entries], workers=workers
    )
    long = [i for i, head in enumerate(heads) if head_bytes(head) > len(head) == FIRST_BYTES]
    if long:
        again = [(entries[i], 0, min(entries[i].size_bytes, MAX_HEAD_BYTES)) for i in long]
        for i, head in zip(long, read_file_parts(origin, again, workers=workers), strict=True):
            heads[i] = head
    return [_array(entry, head) for entry, head in zip(entries, heads, strict=True)]


def _array(entry: Entry, head: bytes) -> StoredArray:
    header = header_of(head, entry.size_bytes)
    if isinstance(header, Rejection):
        raise DatasetError(
            f"{printable(entry.name)}: {header.reason}. Write or fetch it again, or take it out of "
            "the dataset."
        )
    return StoredArray(
        entry=entry,
        start=header.start,
        size_bytes=entry.size_bytes - header.start,
        codec=header.codec,
        shape=header.shape,
    )


def head_bytes(head: bytes) -> int:
    """Where a header says that it ends, by the first bytes of a file."""
    if len(head) < 12:
        return 0
    width = 2 if head[6] == 1 else 4
    return 8 + width + int.from_bytes(head[8 : 8 + width], "little")


def header_of(head: bytes, size_bytes: int) -> NpyHeader | Rejection:
    """The header of an .npy file of that size, by its first bytes."""
    found = read_npy_header(np.frombuffer(head, np.uint8), size_bytes=size_bytes)
    if isinstance(found, NpyHeader) and len(found.shape) > MAX_AXES:
        return Rejection(f"{OF_OTHERS} {len(found.shape)} axes: at most {MAX_AXES} are read")
    return found


MAX_CHUNK_BYTES = 2**32
"""A compressed member is decoded as a whole: no larger one is."""

_TAIL_BYTES = 2**16 + 22
_MAX_DIRECTORY_BYTES = 2**22
_LOCAL = struct.Struct("<4s5H3L2H")
_MAX_RATIO = 1032
"""Deflate makes at most so many bytes of one."""

_DAMAGE = (
    zipfile.BadZipFile,
    zlib.error,
    struct.error,
    ValueError,
    OverflowError,
    EOFError,
    NotImplementedError,
    IndexError,
    KeyError,
)
_ENCRYPTED = 0x1
_UTF_8 = 0x800


class _MemberPlace(NamedTuple):
    """Where a member's bytes lie."""

    start: int
    end: int


def read_archives(origin: Origin, entries: Sequence[Entry], *, workers: int) -> list[StoredFile]:
    """What .npz files hold, by their directories and headers. Raises DatasetError,
    IndexChangedError, FetchError."""
    read = partial(read_archive, origin)
    if len(entries) == 1:
        return [read(entries[0])]
    return list(ordered(read, entries, workers=workers, ahead=2 * workers, name="footers"))


def read_archive(origin: Origin, entry: Entry) -> StoredFile:
    """What an archive holds. Raises DatasetError, IndexChangedError, FetchError."""
    try:
        return _Archive(origin, entry).read()
    except DatasetError:
        raise
    except _DAMAGE as error:
        raise DatasetError(
            f"{printable(entry.name)}: isn't an .npz file, or a damaged one ({error}). Write or "
            "fetch it again, or take it out of the dataset."
        ) from error


class _Archive:
    def __init__(self, origin: Origin, entry: Entry) -> None:
        self._origin, self._entry = origin, entry

    def _read(self, spans: list[tuple[int, int]]) -> list[bytes]:
        parts = [(self._entry, start, end) for start, end in spans]
        return read_file_parts(self._origin, parts, workers=1)

    def read(self) -> StoredFile:
        members, refused = self._members()
        places = self._places(members)
        arrays: dict[str, StoredArray] = {}
        for member, place, head in zip(members, places, self._heads(members, places), strict=True):
            name = member.filename.removesuffix(".npy")
            found = self._array(member, place, head)
            if isinstance(found, Rejection):
                refused[name] = found.reason
            elif name in arrays:
                raise ValueError(f"two members are called {member.filename!r}")
            else:
                arrays[name] = found
        return StoredFile(entry=self._entry, arrays=arrays, refused=refused)

    def _members(self) -> tuple[list[zipfile.ZipInfo], dict[str, str]]:
        """The members that are .npy files, in the order of the directory; and why others aren't
        read, by name."""
        size = self._entry.size_bytes
        first = max(0, size - _TAIL_BYTES)
        (tail,) = self._read([(first, size)]) if size else [b""]
        with zipfile.ZipFile(_Tail(self, first, tail, size)) as archive:
            everyone = archive.infolist()
            self._directory = archive.start_dir
        found, refused = [], dict[str, str]()
        for member in everyone:
            why = _why_not(member)
            if why is None:
                found.append(member)
            elif not member.is_dir():
                refused[member.filename.removesuffix(".npy")] = why
        self._everyone = everyone
        return found, refused

    def _places(self, members: list[zipfile.ZipInfo]) -> list[_MemberPlace]:
        """Where the members' bytes lie: behind headers of their own, which say how long they are.
        Raises ValueError for members that can't be where the directory says."""
        size = self._entry.size_bytes
        order = sorted(self._everyone, key=lambda member: member.header_offset)
        ends = [*(member.header_offset for member in order[1:]), self._directory]
        for member, end in zip(order, ends, strict=True):
            if not 0 <= member.header_offset <= min(end, size) - _LOCAL.size - member.compress_size:
                raise ValueError(f"{member.filename!r} overlaps others, or lies outside")
        names = [_stored_name(member) for member in members]
        spans = [
            (member.header_offset, min(member.header_offset + _LOCAL.size + len(name), size))
            for member, name in zip(members, names, strict=True)
        ]
        before = {member.header_offset: end for member, end in zip(order, ends, strict=True)}
        found = []
        for member, name, data in zip(members, names, self._read(spans), strict=True):
            magic, *_, name_bytes, extra_bytes = _LOCAL.unpack(data[: _LOCAL.size])
            if data[_LOCAL.size :] != name or name_bytes != len(name):
                raise ValueError(f"{member.filename!r} has another name where its bytes lie")
            start = member.header_offset + _LOCAL.size + name_bytes + extra_bytes
            end = start + member.compress_size
            if magic != b"PK\3\4" or end > before[member.header_offset]:
                raise ValueError(f"the header of {member.filename!r} isn't where it should be")
            found.append(_MemberPlace(start, end))
        return found

    def _heads(self, members: list[zipfile.ZipInfo], places: list[_MemberPlace]) -> list[bytes]:
        """The first bytes of each member, decoded."""
        heads = self._first_bytes(members, places, FIRST_BYTES)
        long = [i for i, head in enumerate(heads) if not 0 < head_bytes(head) <= len(head)]
        if long:
            some = [members[i] for i in long], [places[i] for i in long]
            for i, head in zip(long, self._first_bytes(*some, MAX_HEAD_BYTES), strict=True):
                heads[i] = head
        return heads

    def _first_bytes(
        self, members: list[zipfile.ZipInfo], places: list[_MemberPlace], size_bytes: int
    ) -> list[bytes]:
        spans = [(place.start, min(place.end, place.start + size_bytes)) for place in places]
        heads = []
        for member, data in zip(members, self._read(spans), strict=True):
            if member.compress_type != zipfile.ZIP_DEFLATED:
                heads.append(data)
                continue
            try:
                heads.append(zlib.decompressobj(-15).decompress(data, MAX_HEAD_BYTES))
            except zlib.error as error:
                raise ValueError(f"{member.filename!r}: {error}") from None
        return heads

    def _array(
        self, member: zipfile.ZipInfo, place: _MemberPlace, head: bytes
    ) -> StoredArray | Rejection:
        header = header_of(head, member.file_size)
        if isinstance(header, Rejection):
            if not header.reason.startswith(OF_OTHERS):
                raise ValueError(f"{member.filename!r}: {header.reason}")
            return header
        packed = None
        start = place.start
        if member.compress_type == zipfile.ZIP_DEFLATED:
            packed = CompressedArray(
                size_bytes=member.file_size, head_bytes=header.start, crc32=member.CRC
            )
        else:
            start += header.start
        return StoredArray(
            entry=self._entry,
            start=start,
            size_bytes=place.end - start,
            codec=header.codec,
            shape=header.shape,
            packed=packed,
        )


def _stored_name(member: zipfile.ZipInfo) -> bytes:
    """A member's name as the directory has it."""
    return member.orig_filename.encode("utf-8" if member.flag_bits & _UTF_8 else "cp437")


def _why_not(member: zipfile.ZipInfo) -> str | None:
    """Why a member is no array that can be read; None for one that may be. Raises ValueError for
    what can't be true."""
    is_packed = member.compress_type == zipfile.ZIP_DEFLATED
    if member.flag_bits & _ENCRYPTED:
        return "it is encrypted: write it without a password"
    if not is_packed and member.compress_type != zipfile.ZIP_STORED:
        return "it is compressed by another method than numpy's: write it with np.savez"
    if not is_packed and member.compress_size != member.file_size:
        raise ValueError(f"{member.filename!r} is stored, and has two sizes")
    if is_packed and member.file_size > _MAX_RATIO * (member.compress_size + 1):
        raise ValueError(
            f"{member.filename!r} claims {member.file_size:,} bytes, compressed to "
            f"{member.compress_size:,}, which can't be"
        )
    if not member.filename.endswith(".npy"):
        return "it isn't called *.npy, so it is no array"
    if is_packed and member.file_size > MAX_CHUNK_BYTES:
        return (
            f"it is decoded as a whole, and takes {member.file_size:,} bytes; at most "
            f"{MAX_CHUNK_BYTES:,}: write it with np.savez, which doesn't compress"
        )
    return None


class _Tail(io.RawIOBase):
    """A file of which the end is at hand; more is read where a directory is large."""

    def __init__(self, archive: _Archive, first: int, data: bytes, size_bytes: int) -> None:
        super().__init__()
        self._archive, self._first, self._data, self._size = archive, first, data, size_bytes
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        if not base + offset >= 0:
            raise ValueError("a directory that begins before the file")
        self._at = base + offset
        return self._at

    def read(self, size: int = -1) -> bytes:
        end = self._size if size < 0 else min(self._at + size, self._size)
        if end - self._at > _MAX_DIRECTORY_BYTES:
            raise ValueError(f"a directory of {end - self._at:,} bytes")
        if self._at >= end:
            return b""
        if self._at >= self._first:
            found = self._data[self._at - self._first : end - self._first]
        else:
            (found,) = self._archive._read([(self._at, end)])
        self._at = end
        return found
