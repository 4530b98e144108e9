"""The .idx of a Megatron dataset: how the tokens of the .bin beside it make up documents.

Layout, all little-endian (Megatron-LM, megatron/core/datasets/indexed_dataset.py): nine bytes of
magic, the version as u64, a dtype's code as u8, how many sequences and how many document borders as
u64 each; then of each sequence its tokens as i32 and its first byte as i64, the borders as i64
(numbers of sequences, the first 0, the last all of them), and maybe a byte of each sequence that
says what it is (0: text).
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from crc32c import crc32c

from penstock.cache.errors import DatasetError
from penstock.readers.files.names import printable
from penstock.readers.formats.data_file import open_data_file

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import DTypeLike, NDArray

    from penstock.readers.formats.data_file import DataFile
    from penstock.readers.origin.origin import Entry, Origin

MAGIC = b"MMIDIDX\0\0"
MAX_SEQUENCES = 2**27
"""As many an .idx may have: 134 million, which take 0.5 GB while they are indexed."""

_HEADER = struct.Struct("<9sQBQQ")
_DTYPES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}
_FLOATS = {6: "float64", 7: "float32"}
_ITEMS_AT_ONCE = 2**20
_INT32_MAX = 2**31 - 1


@dataclass(frozen=True, slots=True, eq=False)
class Told:
    """What an .idx says. dtype: numpy's name; lengths: tokens of each document, shape (n,).
    checksum: CRC-32C of its bytes."""

    dtype: str
    lengths: NDArray[np.integer]
    checksum: int


def has_magic(origin: Origin, entry: Entry) -> bool:
    """Whether a file begins as an .idx does."""
    with open_data_file(origin, entry) as file:
        return file.read_at(0, len(MAGIC)) == MAGIC


def read_idx(origin: Origin, entry: Entry, data: Entry) -> Told:
    """Read and check an .idx. data: its .bin. Raises DatasetError for one that can't be, or doesn't
    fit its .bin; what reading raises."""
    try:
        with open_data_file(origin, entry) as file:
            return _read(file, entry, data)
    except ValueError as error:
        if isinstance(error, DatasetError):
            raise
        raise DatasetError(
            f"{printable(entry.name)}: can't be the index of {printable(data.name)}: {error}. "
            "Fetch or write both again, or take them out of the folder."
        ) from error


def _read(file: DataFile, entry: Entry, data: Entry) -> Told:
    head = file.read_at(0, _HEADER.size)
    if len(head) < _HEADER.size or not head.startswith(MAGIC):
        raise ValueError("it doesn't begin as a Megatron index does (MMIDIDX); torn or another's")
    _, version, code, sequences, borders = _HEADER.unpack(head)
    if version != 1:
        raise ValueError(f"its version is {version}, wanted 1")
    if code in _FLOATS:
        raise ValueError(f"its numbers are {_FLOATS[code]}, and tokens are integers")
    if code not in _DTYPES:
        raise ValueError(f"its dtype code is {code}, wanted one of {sorted(_DTYPES)}")
    if sequences > MAX_SEQUENCES or borders > sequences + 1:
        raise ValueError(
            f"it claims {sequences:,} sequences and {borders:,} borders of documents; wanted at "
            f"most {MAX_SEQUENCES:,}, and one border more than sequences"
        )
    wanted = _HEADER.size + 12 * sequences + 8 * borders
    if entry.size_bytes not in (wanted, wanted + sequences):
        raise ValueError(
            f"it has {entry.size_bytes:,} bytes, and its {sequences:,} sequences and {borders:,} "
            f"borders take {wanted:,}: torn"
        )
    itemsize = np.dtype(_DTYPES[code]).itemsize
    sums = _Checksum(crc32c(head))
    at = _HEADER.size
    sizes = np.empty(sequences, np.int32)
    for place, some in _items(file, at, sequences, "<i4", sums):
        if int(some.min()) < 0:
            raise ValueError(f"sequence {place + int(some.argmin()):,} has {some.min():,} tokens")
        sizes[place : place + len(some)] = some
    at += 4 * sequences
    total = _check_pointers(_items(file, at, sequences, "<i8", sums), sizes, itemsize)
    if total != data.size_bytes:
        raise ValueError(
            f"its sequences end at byte {total:,}, and that file has {data.size_bytes:,}"
        )
    lengths = _documents(_items(file, at + 8 * sequences, borders, "<i8", sums), sizes, borders)
    _check_modes(_items(file, wanted, entry.size_bytes - wanted, "<i1", sums))
    return Told(_DTYPES[code], lengths, sums.value)


class _Checksum:
    """Of the bytes that were read, in order."""

    def __init__(self, value: int) -> None:
        self.value = value


def _items(
    file: DataFile, at: int, count: int, dtype: DTypeLike, sums: _Checksum
) -> Iterator[tuple[int, NDArray[np.integer]]]:
    """Some numbers at a time, and the place of the first. Raises ValueError where they end."""
    itemsize = np.dtype(dtype).itemsize
    for place in range(0, count, _ITEMS_AT_ONCE):
        wanted = min(_ITEMS_AT_ONCE, count - place) * itemsize
        found = file.read_at(at + place * itemsize, wanted)
        if len(found) < wanted:
            raise ValueError(f"it ends at byte {at + place * itemsize + len(found):,}: torn")
        sums.value = crc32c(found, sums.value)
        yield place, np.frombuffer(found, dtype)


def _check_pointers(
    pointers: Iterator[tuple[int, NDArray[np.integer]]],
    sizes: NDArray[np.int32],
    itemsize: int,
) -> int:
    """Where the last sequence ends; each must begin where the one before it does. Raises
    ValueError."""
    end = 0
    for place, some in pointers:
        bounds = np.cumsum(sizes[place : place + len(some)], dtype=np.int64) * itemsize + end
        begins = np.concatenate(([end], bounds[:-1]))
        wrong = np.flatnonzero(some != begins)
        if len(wrong):
            at = int(wrong[0])
            raise ValueError(
                f"sequence {place + at:,} begins at byte {some[at]:,}, wanted {begins[at]:,}, "
                "where the one before it ends: they overlap, leave a gap or aren't in order"
            )
        end = int(bounds[-1])
    return end


def _documents(
    borders: Iterator[tuple[int, NDArray[np.integer]]], sizes: NDArray[np.int32], count: int
) -> NDArray[np.integer]:
    """Tokens of each document; without borders each sequence is one. Raises ValueError for borders
    that can't be."""
    if not count:
        return sizes
    lengths: NDArray[np.integer] = np.empty(count - 1, np.int32)
    last = 0
    for place, some in borders:
        bounds = np.concatenate(([last], some)) if place else some
        steps = np.diff(bounds)
        if (place == 0 and some[0]) or (steps < 0).any() or int(bounds[-1]) > len(sizes):
            raise ValueError(
                "the borders of its documents don't ascend from 0 to the number of sequences"
            )
        found = np.zeros(len(steps), np.int64)
        there, first, last = steps > 0, int(bounds[0]), int(bounds[-1])
        if last > first:
            begins = bounds[:-1][there] - first
            found[there] = np.add.reduceat(sizes[first:last], begins, dtype=np.int64)
            if int(found.max()) > _INT32_MAX:
                lengths = lengths.astype(np.int64)
        begin = max(0, place - 1)
        lengths[begin : begin + len(found)] = found
    if last != len(sizes):
        raise ValueError(
            f"the borders of its documents end at sequence {last:,}, and it has {len(sizes):,}"
        )
    return lengths


def _check_modes(modes: Iterator[tuple[int, NDArray[np.integer]]]) -> None:
    for place, some in modes:
        if some.any():
            at = int(np.flatnonzero(some)[0])
            raise ValueError(
                f"sequence {place + at:,} is of mode {some[at]}, and only text (0) is read"
            )
