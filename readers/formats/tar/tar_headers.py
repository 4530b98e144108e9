"""Parse the headers of a tar archive strictly: ustar, pax, GNU long names; nothing is extracted.

A parser of our own, because Python's `tarfile` is lenient where a dataset must not be: it takes a
damaged header behind the first for the end of the archive, and skips what follows. Here an archive
is whole, up to its end mark, or refused with the offset. Every size is compared with the bytes that
are left before anything is read, so no field makes this allocate more than EXTENDED_BYTES.
Source: POSIX.1-2017, pax, "ustar Interchange Format" and "pax Header Block"; GNU tar manual, "Basic
Tar Format".
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from penstock.cache import DatasetError
from penstock.readers.files import printable

BLOCK = 512
EXTENDED_BYTES = 2**20
"""Longest pax header or GNU long name that is read; real ones have hundreds of bytes."""

ReadAt = Callable[[int, int], bytes]
"""read(offset, bytes): that many bytes of the file, fewer only where it ends."""

_ZEROS = bytes(BLOCK)
_SCAN_BYTES = 2**20
_OCTAL = re.compile(rb"[ \0]*([0-7]*)[ \0]*")
_RECORD = re.compile(rb"([0-9]{1,7}) ")
_REGULAR = frozenset((b"0", b"\0", b"7"))
_DIRECTORY = b"5"
# What is refused by name. None of them has data blocks, whatever its size field says (POSIX).
_WITHOUT_DATA = {
    b"1": "a hard link",
    b"2": "a symbolic link",
    b"3": "a character device",
    b"4": "a block device",
    b"6": "a FIFO",
}
_SPARSE = "a sparse file: pack it again without --sparse"
_TORN = "Fetch or write this archive again."


@dataclass(frozen=True, slots=True, kw_only=True)
class TarMember:
    """One file in an archive. name: as it stands there, never a path to be used. start, end: its
    bytes in the archive, end exclusive. refused: why it is none of a dataset, or None."""

    name: bytes
    start: int
    end: int
    refused: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Header:
    name: bytes
    type: bytes
    size_bytes: int
    extended: bool


def archive_members(read: ReadAt, size_bytes: int, *, shown: str) -> Iterator[TarMember]:
    """All members of an archive in order, folders left out.

    size_bytes: of the archive; shown: its name for people. Raises DatasetError, naming the byte
    where the archive is torn, damaged, compressed, sparse beyond reading, part of a multi-volume
    set, or followed by something behind its end mark.
    """
    at, name, extended = 0, None, _NO_PAX
    while True:
        block = read(at, BLOCK)
        if at == 0:
            _refuse_compressed(block, shown)
        if len(block) < BLOCK:
            raise _without_end(shown, at, whole=at > 0 and not block and at <= size_bytes)
        if block == _ZEROS:
            if name is not None or extended is not _NO_PAX:
                raise _broken(shown, at, "a long name or pax header stands before the end mark")
            _refuse_more(read, at + BLOCK, size_bytes, shown)
            return
        header = _header(block, shown, at)
        start = at + BLOCK
        if header.extended:
            start = _after_sparse_map(read, start, shown)
        own = header.type in _WITHOUT_DATA or header.type == _DIRECTORY
        length = 0 if own else (header.size_bytes if extended.size is None else extended.size)
        if length > size_bytes - start:
            left = max(0, size_bytes - start)
            raise _broken(
                shown, at, f"a member says it has {length} bytes, and {left} are left in the file"
            )
        end = start + length
        at = start + -(-length // BLOCK) * BLOCK
        if header.type in (b"L", b"K", b"x", b"X", b"g"):
            data = _extension(read, start, length, shown)
            if header.type == b"L":
                name = data.rstrip(b"\0")
            elif header.type in (b"x", b"X"):
                extended = _pax(data, shown, start)
            elif header.type == b"g":
                _refuse_global(_pax(data, shown, start), shown, start)
            continue
        if extended.path is not None:
            name = extended.path
        found = name if name is not None else header.name
        sparse, name, extended = extended.sparse, None, _NO_PAX
        if header.type == b"M":
            raise DatasetError(
                f"{shown}: at byte {start - BLOCK}: part of a multi-volume archive, which goes on "
                "in another file. Join the volumes with GNU tar (tar --multi-volume -x), then "
                "write plain archives."
            )
        if header.type == b"V" or header.type == _DIRECTORY:
            continue
        if header.type == b"\0" and found.endswith(b"/"):  # how V7 wrote a folder
            continue
        yield TarMember(name=found, start=start, end=end, refused=_refused(header.type, sparse))


def _without_end(shown: str, at: int, *, whole: bool) -> DatasetError:
    """whole: all that is there is well, so that its writer may be one that never ends archives."""
    remedy = " (if its writer never ends archives: truncate -s +1024)" if whole else ""
    return _broken(
        shown, at, f"it ends here without an end mark, so it is torn or still being written{remedy}"
    )


def _refused(kind: bytes, sparse: bool) -> str | None:
    if sparse or kind == b"S":
        return _SPARSE
    if kind in _REGULAR:
        return None
    what = _WITHOUT_DATA.get(kind)
    return what if what is not None else f"a tar member of unknown type {printable(kind)!r}"


def _header(block: bytes, shown: str, at: int) -> _Header:
    # The checksum counts its own field as spaces; old programs summed signed bytes.
    rest = block[:148] + b" " * 8 + block[156:]
    total, wanted = sum(rest), _number(block[148:156], shown, at, "checksum")
    if wanted != total and wanted != total - 256 * sum(byte > 127 for byte in rest):
        raise _broken(shown, at, "the header's checksum is wrong")
    # GNU's own magic is "ustar  ": where ustar has its prefix, GNU keeps times and sparse maps.
    name = _string(block[:100])
    prefix = _string(block[345:500]) if block[257:263] == b"ustar\0" else b""
    kind = block[156:157]
    return _Header(
        name=prefix + b"/" + name if prefix else name,
        type=kind,
        size_bytes=_number(block[124:136], shown, at, "size"),
        extended=kind == b"S" and block[482] != 0,
    )


def _string(field: bytes) -> bytes:
    return field.partition(b"\0")[0]


def _number(field: bytes, shown: str, at: int, what: str) -> int:
    if field[0] == 0x80:  # GNU: base 256
        return int.from_bytes(field[1:], "big")
    found = _OCTAL.fullmatch(field)
    if found is None:
        raise _broken(shown, at, f"the header's {what} isn't a number")
    return int(found[1] or b"0", 8)


def _after_sparse_map(read: ReadAt, at: int, shown: str) -> int:
    """GNU's old sparse format: further blocks of the map, up to one that says it is the last."""
    while True:
        block = read(at, BLOCK)
        if len(block) < BLOCK:
            raise _broken(shown, at, "it ends inside a sparse map")
        at += BLOCK
        if block[504] == 0:
            return at


def _extension(read: ReadAt, start: int, length: int, shown: str) -> bytes:
    if length > EXTENDED_BYTES:
        raise _broken(shown, start - BLOCK, f"a long name or pax header of {length} bytes")
    return read(start, length)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pax:
    path: bytes | None = None
    size: int | None = None
    sparse: bool = False


_NO_PAX = _Pax()


def _pax(data: bytes, shown: str, start: int) -> _Pax:
    """Records "length key=value\\n"; the length counts itself."""
    path: bytes | None = None
    size: int | None = None
    sparse, at = False, 0
    while at < len(data) and data[at] != 0:  # some writers pad with NUL
        found = _RECORD.match(data, at)
        end = at + int(found[1]) if found else 0
        if found is None or not found.end() < end <= len(data) or data[end - 1] != 0x0A:
            raise _broken(shown, start + at, "a pax header's record is malformed")
        key, equals, value = data[found.end() : end - 1].partition(b"=")
        if not equals:
            raise _broken(shown, start + at, "a pax header's record has no value")
        if key == b"path":
            path = value
        elif key == b"size":
            if not re.fullmatch(rb"[0-9]{1,20}", value):
                raise _broken(shown, start + at, "a pax header's size isn't a number")
            size = int(value)
        elif key.startswith(b"GNU.sparse."):
            sparse = True
        at = end
    return _Pax(path=path, size=size, sparse=sparse)


def _refuse_global(pax: _Pax, shown: str, start: int) -> None:
    if pax != _NO_PAX:
        raise _broken(shown, start, "a global pax header gives all members one name or size")


def _refuse_compressed(block: bytes, shown: str) -> None:
    for magic, kind, command in COMPRESSED:
        if block.startswith(magic):
            raise compressed_archive_error(shown, kind, command)


COMPRESSED = (
    (b"\x1f\x8b", "gzip", "gunzip"),
    (b"BZh", "bzip2", "bunzip2"),
    (b"\xfd7zXZ\0", "xz", "unxz"),
    (b"\x28\xb5\x2f\xfd", "zstd", "unzstd"),
    (b"\x04\x22\x4d\x18", "LZ4", "unlz4"),
)
"""First bytes, the compression's name, the command that undoes it."""


def compressed_archive_error(shown: str, kind: str, command: str) -> DatasetError:
    """The error for an archive in which nothing can be found by offset."""
    return DatasetError(
        f"{shown}: compressed with {kind}, and samples are read by their place in the archive. "
        f"Decompress it ({command} {shown}): encoded images gain nothing from it."
    )


def _refuse_more(read: ReadAt, at: int, size_bytes: int, shown: str) -> None:
    """Behind the end mark only padding may stand: `cat a.tar b.tar` would lose b's members."""
    while at < size_bytes:
        part = read(at, min(_SCAN_BYTES, size_bytes - at))
        if not part:
            return
        if part.count(0) != len(part):
            raise DatasetError(
                f"{shown}: after byte {at}: there is more behind the archive's end mark, such as a "
                "second archive. Join archives with `tar --concatenate`, or keep them apart."
            )
        at += len(part)


def _broken(shown: str, at: int, what: str) -> DatasetError:
    return DatasetError(
        f"{shown}: not a whole tar archive: at byte {at}: {what}. {_TORN} To leave it out, take "
        "it out of the dataset: none of its samples are used, lest some be lost unseen."
    )
