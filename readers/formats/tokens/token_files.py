"""Find the files of a token dataset: where tokens begin, their dtype, and their documents.

Layout of a Megatron .idx, all little-endian (Megatron-LM, megatron/core/datasets/
indexed_dataset.py): nine bytes of magic, the version as u64, a dtype's code as u8, how many
sequences and how many document borders as u64 each; then of each sequence its tokens as i32 and its
first byte as i64, the borders as i64 (numbers of sequences, the first 0, the last all of them), and
maybe a byte of each sequence that says what it is (0: text).
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from crc32c import crc32c

from penstock.cache import ConfigError, DatasetError, DatasetNotFoundError
from penstock.readers.fields import read_npy_header
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
"""As many an .idx may have: 134 million, which take 0.5 GB while they are indexed."""

_HEADER = struct.Struct("<9sQBQQ")
_DTYPES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}
_FLOATS = {6: "float64", 7: "float32"}
_ITEMS_AT_ONCE = 2**20
_INT32_MAX = 2**31 - 1


@dataclass(frozen=True, slots=True, eq=False)
class MegatronIndex:
    """What an .idx says. dtype: numpy's name; lengths: tokens of each document, shape (n,).
    checksum: CRC-32C of its bytes."""

    dtype: str
    lengths: NDArray[np.integer]
    checksum: int


def has_magic(origin: Origin, entry: Entry) -> bool:
    """Whether a file begins as an .idx does."""
    with open_data_file(origin, entry) as file:
        return file.read_at(0, len(MAGIC)) == MAGIC


def read_idx(origin: Origin, entry: Entry, data: Entry) -> MegatronIndex:
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


def _read(file: DataFile, entry: Entry, data: Entry) -> MegatronIndex:
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
    return MegatronIndex(_DTYPES[code], lengths, sums.value)


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
    pointers: Iterator[tuple[int, NDArray[np.integer]]], sizes: NDArray[np.int32], itemsize: int
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


IDX, BIN, NPY = b".idx", b".bin", b".npy"
_HEAD_BYTES = 10_012


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenFilePair:
    """A file of tokens, and the .idx of its documents where it has one."""

    data: Entry
    idx: Entry | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenFile:
    """What is known of one file. dtype: numpy's `dtype.str`; start: byte of its first token;
    tokens: how many; documents: None where it doesn't tell them. checksum: CRC-32C of an .idx."""

    entry: Entry
    dtype: str
    start: int
    tokens: int
    documents: DocumentLengths | None = None
    checksum: int = field(default=0)


def find_files(origin: Origin) -> list[TokenFilePair]:
    """The files of a dataset, by name. Raises DatasetNotFoundError, DatasetError, FetchError."""
    top = origin.top(lambda name: not is_passed_over(name))
    if top.missing:
        raise DatasetNotFoundError(f"{origin.url}: no file {printable(top.missing[0])}.")
    by_name = {entry.name: entry for entry in top.entries}
    data = [entry for entry in top.entries if entry.name.endswith((BIN, NPY))]
    if not data:  # whatever it is called; what its bytes can't be is told when it is read
        data = [entry for entry in top.entries if not entry.name.endswith(IDX)]
    if not data:
        raise DatasetNotFoundError(
            f"{origin.url}: no file of tokens. Wanted .bin or .npy files, or others whose bytes "
            "are token ids, in this folder itself."
        )
    pairs = [TokenFilePair(data=entry, idx=_idx_of(origin, entry, by_name)) for entry in data]
    used = {pair.idx.name for pair in pairs if pair.idx is not None}
    for name in by_name:
        if name.endswith(IDX) and name not in used:
            raise DatasetError(
                f"{origin.url}: {printable(name)} has no {printable(name[: -len(IDX)] + BIN)} "
                "beside it. Fetch that too, or take the .idx out of the folder."
            )
    if used and len(used) < len(pairs):
        lacks = next(pair.data.name for pair in pairs if pair.idx is None)
        raise DatasetError(
            f"{origin.url}: {len(used)} of {len(pairs)} files have an .idx, and "
            f"{printable(lacks)} has none. Put files with documents and others into folders of "
            "their own."
        )
    return pairs


def _idx_of(origin: Origin, entry: Entry, by_name: dict[bytes, Entry]) -> Entry | None:
    if not entry.name.endswith(BIN):
        return None
    name = entry.name[: -len(BIN)] + IDX
    found = by_name.get(name)
    # Of a file that was named alone, what lies beside it isn't among the files.
    return found if found is not None or origin.selection is None else origin.entry(name)


def inspect_token_file(origin: Origin, pair: TokenFilePair, *, dtype: str | None) -> TokenFile:
    """What a file says of its tokens. dtype: the user's. Raises ConfigError (no dtype, another than
    the file says), DatasetError."""
    entry = pair.data
    if pair.idx is not None:
        told = read_idx(origin, pair.idx, entry)
        _check_dtype(entry, dtype, told.dtype, by=printable(pair.idx.name))
        documents = DocumentLengths(told.lengths)
        stored = np.dtype(told.dtype).newbyteorder("<").str
        return TokenFile(
            entry=entry,
            dtype=stored,
            start=0,
            tokens=documents.tokens,
            documents=documents,
            checksum=told.checksum,
        )
    if entry.name.endswith(NPY):
        return _npy(origin, entry, dtype)
    if dtype is None:
        raise ConfigError(
            f"dtype: {printable(entry.name)} doesn't tell of what numbers it is. Pass "
            'dtype="uint16", or what it was written with.'
        )
    return _flat(entry, np.dtype(dtype).newbyteorder("<").str, 0)


def _flat(entry: Entry, dtype: str, start: int) -> TokenFile:
    itemsize = np.dtype(dtype).itemsize
    tokens, rest = divmod(entry.size_bytes - start, itemsize)
    if rest:
        raise DatasetError(
            f"{printable(entry.name)}: has {entry.size_bytes:,} bytes, which no number of "
            f"{np.dtype(dtype).name} fills: it is torn, or of another dtype."
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
            f"{printable(entry.name)}: is {header.codec.dtype.name} of shape {header.shape}, and "
            'tokens are integers in one row. Read it by format="npy", or save it flat.'
        )
    _check_dtype(entry, dtype, header.codec.dtype.name, by="its header")
    return _flat(entry, header.codec.dtype.str, header.start)


def _check_dtype(entry: Entry, given: str | None, told: str, *, by: str) -> None:
    if given is not None and given != told:
        raise ConfigError(
            f"dtype: got {given!r}, and {printable(entry.name)} is {told}, as {by} says. Leave "
            "dtype= out."
        )
