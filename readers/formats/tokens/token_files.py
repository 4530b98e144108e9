"""Find the files of a token dataset, the dtype and first byte of their tokens, and their documents.

Layout of a Megatron .idx file, all little-endian (Megatron-LM,
megatron/core/datasets/indexed_dataset.py):

- nine bytes of magic, the version as u64, the code of a dtype as u8, the numbers of sequences and
  of document borders as u64;
- the tokens of each sequence as i32;
- the first byte of each sequence as i64;
- the borders as i64: numbers of sequences; the first is 0, the last is the number of all sequences;
- optionally, a byte for each sequence that states its mode (0: text).
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from crc32c import crc32c

from penstock.cache import ConfigError, DatasetError, DatasetNotFoundError
from penstock.readers.fieldtypes import read_npy_header
from penstock.readers.files import is_passed_over, printable
from penstock.readers.formats.tokens.token_sequences import DocumentLengths
from penstock.readers.formats.unindexed_files import open_data_file
from penstock.readers.types import Rejection

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import DTypeLike, NDArray

    from penstock.readers.formats.unindexed_files import DataFile
    from penstock.readers.origin import Entry, Origin

MAGIC = b"MMIDIDX\0\0"
MAX_SEQUENCES = 2**27
"""The most sequences of an .idx file: 134 million, which take 0.5 GB while they are indexed."""

_HEADER = struct.Struct("<9sQBQQ")
_DTYPES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}
_FLOATS = {6: "float64", 7: "float32"}
ITEMS_PER_READ = 2**20
"""Numbers of an .idx file that are read at once."""
_INT32_MAX = 2**31 - 1


@dataclass(frozen=True, slots=True, eq=False)
class MegatronIndex:
    """The contents of an .idx file.

    dtype: numpy's name. lengths: tokens of each document, shape (n,). checksum: CRC-32C of the
    file.
    """

    dtype: str
    lengths: NDArray[np.integer]
    checksum: int


def has_magic(origin: Origin, entry: Entry) -> bool:
    """Return True if a file begins as an .idx file does."""
    with open_data_file(origin, entry) as file:
        return file.read_at(0, len(MAGIC)) == MAGIC


def read_idx(origin: Origin, entry: Entry, data: Entry) -> MegatronIndex:
    """Read and check an .idx file. data: its .bin file.

    Raises DatasetError if it is damaged or doesn't match its .bin file; errors of reading pass
    through.
    """
    try:
        with open_data_file(origin, entry) as file:
            return _read(file, entry, data)
    except ValueError as error:
        if isinstance(error, DatasetError):
            raise
        raise DatasetError(
            f"{printable(entry.name)}: this isn't the index of {printable(data.name)}: {error}. "
            "Fetch or write both again, or remove them from the folder."
        ) from error


def _read(file: DataFile, entry: Entry, data: Entry) -> MegatronIndex:
    head = file.read_at(0, _HEADER.size)
    if len(head) < _HEADER.size or not head.startswith(MAGIC):
        raise ValueError("it doesn't begin as a Megatron index does (MMIDIDX)")
    _, version, code, sequences, borders = _HEADER.unpack(head)
    if version != 1:
        raise ValueError(f"its version is {version}, expected 1")
    if code in _FLOATS:
        raise ValueError(f"its numbers are {_FLOATS[code]}, and tokens are integers")
    if code not in _DTYPES:
        raise ValueError(f"its dtype code is {code}, expected one of {sorted(_DTYPES)}")
    if sequences > MAX_SEQUENCES or borders > sequences + 1:
        raise ValueError(
            f"it claims {sequences:,} sequences and {borders:,} borders of documents; expected at "
            f"most {MAX_SEQUENCES:,} sequences, and one more border than sequences"
        )
    modes_at = _HEADER.size + 12 * sequences + 8 * borders
    if entry.size_bytes not in (modes_at, modes_at + sequences):
        raise ValueError(
            f"it has {entry.size_bytes:,} bytes, and its {sequences:,} sequences and {borders:,} "
            f"borders take {modes_at:,}: it is truncated"
        )
    itemsize = np.dtype(_DTYPES[code]).itemsize
    sums = _Checksum(crc32c(head))
    at = _HEADER.size
    sizes = np.empty(sequences, np.int32)
    for place, part in _items(file, at, sequences, "<i4", sums):
        if int(part.min()) < 0:
            raise ValueError(f"sequence {place + int(part.argmin()):,} has {part.min():,} tokens")
        sizes[place : place + len(part)] = part
    at += 4 * sequences
    total = _check_pointers(_items(file, at, sequences, "<i8", sums), sizes, itemsize)
    if total != data.size_bytes:
        raise ValueError(
            f"its sequences end at byte {total:,}, and that file has {data.size_bytes:,} bytes"
        )
    lengths = _documents(_items(file, at + 8 * sequences, borders, "<i8", sums), sizes, borders)
    for place, part in _items(file, modes_at, entry.size_bytes - modes_at, "<i1", sums):
        if part.any():
            wrong = int(np.flatnonzero(part)[0])
            raise ValueError(
                f"sequence {place + wrong:,} has mode {part[wrong]}, and only text (0) is read"
            )
    return MegatronIndex(_DTYPES[code], lengths, sums.value)


class _Checksum:
    """The running CRC-32C of the bytes that have been read, in order."""

    def __init__(self, value: int) -> None:
        self.value = value


def _items(
    file: DataFile, at: int, count: int, dtype: DTypeLike, sums: _Checksum
) -> Iterator[tuple[int, NDArray[np.integer]]]:
    """Yield the numbers in blocks, each with the index of its first number. Raises ValueError if
    the file is truncated."""
    itemsize = np.dtype(dtype).itemsize
    for place in range(0, count, ITEMS_PER_READ):
        size_bytes = min(ITEMS_PER_READ, count - place) * itemsize
        data = file.read_at(at + place * itemsize, size_bytes)
        if len(data) < size_bytes:
            raise ValueError(
                f"it is truncated: it ends at byte {at + place * itemsize + len(data):,}"
            )
        sums.value = crc32c(data, sums.value)
        yield place, np.frombuffer(data, dtype)


def _check_pointers(
    pointers: Iterator[tuple[int, NDArray[np.integer]]], sizes: NDArray[np.int32], itemsize: int
) -> int:
    """Return the byte at which the last sequence ends.

    Raises ValueError if a sequence doesn't begin where the one before it ends.
    """
    end = 0
    for place, part in pointers:
        bounds = np.cumsum(sizes[place : place + len(part)], dtype=np.int64) * itemsize + end
        begins = np.concatenate(([end], bounds[:-1]))
        wrong = np.flatnonzero(part != begins)
        if len(wrong):
            at = int(wrong[0])
            raise ValueError(
                f"sequence {place + at:,} begins at byte {part[at]:,}, expected {begins[at]:,}, "
                "the end of the one before it: sequences overlap, leave a gap or aren't in order"
            )
        end = int(bounds[-1])
    return end


def _documents(
    borders: Iterator[tuple[int, NDArray[np.integer]]], sizes: NDArray[np.int32], count: int
) -> NDArray[np.integer]:
    """Return the tokens of each document; without borders, each sequence is one document.

    Raises ValueError if the borders are invalid.
    """
    if not count:
        return sizes
    lengths: NDArray[np.integer] = np.empty(count - 1, np.int32)
    last = 0
    for place, part in borders:
        bounds = np.concatenate(([last], part)) if place else part
        steps = np.diff(bounds)
        if (place == 0 and part[0]) or (steps < 0).any() or int(bounds[-1]) > len(sizes):
            raise ValueError(
                "the borders of its documents don't ascend from 0 to the number of sequences"
            )
        tokens = np.zeros(len(steps), np.int64)
        is_used, first, last = steps > 0, int(bounds[0]), int(bounds[-1])
        if last > first:
            begins = bounds[:-1][is_used] - first
            tokens[is_used] = np.add.reduceat(sizes[first:last], begins, dtype=np.int64)
            if int(tokens.max()) > _INT32_MAX:
                lengths = lengths.astype(np.int64)
        begin = max(0, place - 1)
        lengths[begin : begin + len(tokens)] = tokens
    if last != len(sizes):
        raise ValueError(
            f"the borders of its documents end at sequence {last:,}, and it has {len(sizes):,} "
            "sequences"
        )
    return lengths


IDX, BIN, NPY = b".idx", b".bin", b".npy"
_HEAD_BYTES = 10_012


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenFilePair:
    """A file of tokens, and its .idx file if it has one."""

    data: Entry
    idx: Entry | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenFile:
    """The layout of one file of tokens.

    dtype: numpy's `dtype.str`. start: byte of its first token. documents: None if the file doesn't
    record them. checksum: CRC-32C of its .idx file.
    """

    entry: Entry
    dtype: str
    start: int
    tokens: int
    documents: DocumentLengths | None = None
    checksum: int = 0


def find_files(origin: Origin) -> list[TokenFilePair]:
    """Return the files of a dataset, sorted by name.

    Raises DatasetNotFoundError, DatasetError or FetchError.
    """
    top = origin.top(lambda name: not is_passed_over(name))
    if top.missing:
        raise DatasetNotFoundError(f"{origin.url}: no file {printable(top.missing[0])}.")
    by_name = {entry.name: entry for entry in top.entries}
    data = [entry for entry in top.entries if entry.name.endswith((BIN, NPY))]
    if not data:  # files of any name: reading them finds contents that can't be tokens
        data = [entry for entry in top.entries if not entry.name.endswith(IDX)]
    if not data:
        raise DatasetNotFoundError(
            f"{origin.url}: no file of tokens. Expected .bin or .npy files, or other files of "
            "token ids, directly in this folder."
        )
    pairs = [TokenFilePair(data=entry, idx=_idx_of(origin, entry, by_name)) for entry in data]
    used = {pair.idx.name for pair in pairs if pair.idx is not None}
    for name in by_name:
        if name.endswith(IDX) and name not in used:
            raise DatasetError(
                f"{origin.url}: {printable(name)} has no data file "
                f"{printable(name[: -len(IDX)] + BIN)}. Fetch that file too, or remove the .idx "
                "from the folder."
            )
    if used and len(used) < len(pairs):
        other = next(pair.data.name for pair in pairs if pair.idx is None)
        raise DatasetError(
            f"{origin.url}: {len(used)} of {len(pairs)} files have an .idx, and "
            f"{printable(other)} has none. Put the files without an .idx into another folder."
        )
    return pairs


def _idx_of(origin: Origin, entry: Entry, by_name: dict[bytes, Entry]) -> Entry | None:
    if not entry.name.endswith(BIN):
        return None
    name = entry.name[: -len(BIN)] + IDX
    idx = by_name.get(name)
    # If the URL names single files, the listing lacks their .idx files.
    return idx if idx is not None or origin.selection is None else origin.entry(name)


def inspect_token_file(origin: Origin, pair: TokenFilePair, *, dtype: str | None) -> TokenFile:
    """Read the layout of a file. dtype: from the user.

    Raises ConfigError (the dtype is missing, or isn't the file's) or DatasetError.
    """
    entry = pair.data
    if pair.idx is not None:
        index = read_idx(origin, pair.idx, entry)
        _check_dtype(entry, dtype, index.dtype, source=printable(pair.idx.name))
        documents = DocumentLengths(index.lengths)
        return TokenFile(
            entry=entry,
            dtype=np.dtype(index.dtype).newbyteorder("<").str,
            start=0,
            tokens=documents.tokens,
            documents=documents,
            checksum=index.checksum,
        )
    if entry.name.endswith(NPY):
        return _npy(origin, entry, dtype)
    if dtype is None:
        raise ConfigError(
            f"dtype: {printable(entry.name)} doesn't record its dtype. Pass the one that it was "
            'written with, such as dtype="uint16".'
        )
    return _flat(entry, np.dtype(dtype).newbyteorder("<").str, 0)


def _flat(entry: Entry, dtype: str, start: int) -> TokenFile:
    itemsize = np.dtype(dtype).itemsize
    tokens, rest = divmod(entry.size_bytes - start, itemsize)
    if rest:
        raise DatasetError(
            f"{printable(entry.name)}: the file has {entry.size_bytes:,} bytes, which isn't a "
            f"whole number of {np.dtype(dtype).name} tokens: it is truncated or has another dtype."
        )
    return TokenFile(entry=entry, dtype=dtype, start=start, tokens=tokens)


def _npy(origin: Origin, entry: Entry, dtype: str | None) -> TokenFile:
    with open_data_file(origin, entry) as file:
        data = np.frombuffer(file.read_at(0, _HEAD_BYTES), np.uint8)
    header = read_npy_header(data, size_bytes=entry.size_bytes)
    if isinstance(header, Rejection):
        raise DatasetError(f"{printable(entry.name)}: {header.reason}.")
    if len(header.shape) != 1 or header.codec.dtype.kind not in "iu":
        raise DatasetError(
            f"{printable(entry.name)}: the array is {header.codec.dtype.name} of shape "
            f"{header.shape}, and tokens are integers in one dimension. Pass "
            'format="npy", or save a flat array.'
        )
    _check_dtype(entry, dtype, header.codec.dtype.name, source="its header")
    return _flat(entry, header.codec.dtype.str, header.start)


def _check_dtype(entry: Entry, given: str | None, stored: str, *, source: str) -> None:
    if given is not None and given != stored:
        raise ConfigError(
            f"dtype: got {given!r}, and {printable(entry.name)} is {stored} according to {source}. "
            "Omit dtype=."
        )
