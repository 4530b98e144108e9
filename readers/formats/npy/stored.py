"""Where arrays lie in .npy and .npz files, as their headers say; no number of them is read."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from penstock.cache.errors import DatasetError
from penstock.readers.fields.npy import MAX_HEAD_BYTES, OF_OTHERS, NpyHeader, read_npy_header
from penstock.readers.files.names import printable
from penstock.readers.formats.file_parts import read_parts
from penstock.readers.types import Rejection

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from penstock.readers.fields.facts import ArrayCodec
    from penstock.readers.origin.origin import Entry, Origin

FIRST_BYTES = 512
"""Of a file, in which its header ends as a rule: numpy's take 128."""

MAX_AXES = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Packed:
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
    packed: Packed | None = None

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
    heads = read_parts(
        origin, [(e, 0, min(e.size_bytes, FIRST_BYTES)) for e in entries], workers=workers
    )
    long = [i for i, head in enumerate(heads) if head_bytes(head) > len(head) == FIRST_BYTES]
    if long:
        again = [(entries[i], 0, min(entries[i].size_bytes, MAX_HEAD_BYTES)) for i in long]
        for i, head in zip(long, read_parts(origin, again, workers=workers), strict=True):
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
