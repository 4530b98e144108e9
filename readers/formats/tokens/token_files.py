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
from typing import TYPE_CHECKING, Any

import numpy as np
from crc32c import crc32c

from penstock.cache import ConfigError, DatasetError, DatasetNotFoundError
from penstock.readers.fieldtypes import read_npy_header
from penstock.readers.files import is_passed_over, printable
from penstock.readers.formats.unindexed_files import open_data_file
from penstock.readers.types import Rejection

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from penstock.readers.origin import Entry, Origin

    Ints = NDArray[np.int64]

MAGIC = b"MMIDIDX\0\0"
MAX_SEQUENCES = 2**27
"""The most sequences of an .idx file: 134 million, which take 6 GB while they are indexed."""

_HEADER = struct.Struct("<9sQBQQ")
_DTYPES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}
_FLOATS = {6: "float64", 7: "float32"}
_NPY_HEAD_BYTES = 10_012

IDX, BIN, NPY = b".idx", b".bin", b".npy"


Pair = tuple["Entry", "Entry | None"]
"""A file of tokens, and its .idx file if it has one."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenFile:
    """The layout of one file of tokens.

    dtype: numpy's `dtype.str`. start: byte of its first token. documents: the first token of each
    document, and the end of the last, int64, shape (documents + 1,); None if the file doesn't
    record them. checksum: CRC-32C of its .idx file.
    """

    entry: Entry
    dtype: str
    start: int = 0
    tokens: int
    documents: Ints | None = None
    checksum: int = 0


def read_idx(origin: Origin, entry: Entry, data: Entry) -> TokenFile:
    """Read and check an .idx file. data: its .bin file.

    Raises DatasetError if it is damaged or doesn't match its .bin file; errors of reading pass
    through.
    """
    try:
        with open_data_file(origin, entry) as file:
            dtype, sequences, borders = _parse_header(file.read_at(0, _HEADER.size), entry)
            content = file.read_at(0, entry.size_bytes)
        bounds = _parse_documents(content, dtype.itemsize, sequences, borders, data.size_bytes)
    except ValueError as error:
        if isinstance(error, DatasetError):
            raise
        raise DatasetError(
            f"{printable(entry.name)}: this isn't the index of {printable(data.name)}: {error}. "
            "Fetch or write both again, or remove them from the folder."
        ) from error
    return TokenFile(
        entry=data,
        dtype=dtype.str,
        tokens=data.size_bytes // dtype.itemsize,
        documents=bounds,
        checksum=crc32c(content),
    )


def _parse_header(head: bytes, entry: Entry) -> tuple[np.dtype[Any], int, int]:
    """Return the dtype, and the numbers of sequences and of borders. Raises ValueError."""
    if len(head) < _HEADER.size or not head.startswith(MAGIC):
        raise ValueError("it doesn't begin as a Megatron index does (MMIDIDX)")
    _, version, code, sequences, borders = _HEADER.unpack(head)
    if version != 1:
        raise ValueError(f"its version is {version}, expected 1")
    if code not in _DTYPES:
        shown = _FLOATS.get(code, f"of the dtype code {code}")
        raise ValueError(f"its numbers are {shown}, expected one of {list(_DTYPES.values())}")
    if sequences > MAX_SEQUENCES or borders > sequences + 1:
        raise ValueError(
            f"it claims {sequences:,} sequences and {borders:,} borders of documents; expected "
            f"at most {MAX_SEQUENCES:,} sequences, and one more border than sequences"
        )
    end = _HEADER.size + 12 * sequences + 8 * borders
    if entry.size_bytes not in (end, end + sequences):
        raise ValueError(
            f"it has {entry.size_bytes:,} bytes, and its {sequences:,} sequences and "
            f"{borders:,} borders take {end:,}: it is truncated"
        )
    return np.dtype(_DTYPES[code]).newbyteorder("<"), sequences, borders


def _parse_documents(
    content: bytes, itemsize: int, sequences: int, borders: int, data_bytes: int
) -> Ints:
    """Return the bounds of the documents, see `TokenFile`. Raises ValueError. data_bytes: of the
    .bin file, whose tokens take `itemsize` each."""
    at = _HEADER.size
    sizes = np.frombuffer(content, "<i4", sequences, at)
    pointers = np.frombuffer(content, "<i8", sequences, at + 4 * sequences)
    numbers = np.frombuffer(content, "<i8", borders, at + 12 * sequences)
    modes = np.frombuffer(content, "<i1", offset=at + 12 * sequences + 8 * borders)
    if sequences and int(sizes.min()) < 0:
        raise ValueError(f"sequence {int(sizes.argmin()):,} has {sizes.min():,} tokens")
    bounds = np.zeros(sequences + 1, np.int64)
    np.cumsum(sizes, out=bounds[1:])
    wrong = np.flatnonzero(pointers != bounds[:-1] * itemsize)
    if len(wrong):
        first = int(wrong[0])
        raise ValueError(
            f"sequence {first:,} begins at byte {pointers[first]:,}, expected "
            f"{bounds[first] * itemsize:,}, the end of the one before it: sequences "
            "overlap, leave a gap or aren't in order"
        )
    if bounds[-1] * itemsize != data_bytes:
        raise ValueError(
            f"its sequences end at byte {bounds[-1] * itemsize:,}, and that file has "
            f"{data_bytes:,} bytes"
        )
    if modes.any():
        first = int(np.flatnonzero(modes)[0])
        raise ValueError(f"sequence {first:,} has mode {modes[first]}, and only text (0) is read")
    if not borders:
        return bounds  # each sequence is one document
    if numbers[0] or (np.diff(numbers) < 0).any() or numbers[-1] != sequences:
        raise ValueError(
            f"the borders of its documents don't ascend from 0 to the number of sequences: they "
            f"end at sequence {numbers[-1]:,} of {sequences:,}"
        )
    documents: Ints = bounds[numbers]
    return documents


def find_files(origin: Origin) -> list[Pair]:
    """Return the files of a dataset, sorted by name.

    Raises DatasetNotFoundError, DatasetError or FetchError.
    """
    top = origin.top(lambda name: not is_passed_over(name))
    if top.missing:
        raise DatasetNotFoundError(f"{origin.url}: no file {printable(top.missing[0])}.")
    data = [entry for entry in top.entries if entry.name.endswith((BIN, NPY))]
    if not data:  # files of any name: reading them finds contents that can't be tokens
        data = [entry for entry in top.entries if not entry.name.endswith(IDX)]
    if not data:
        raise DatasetNotFoundError(
            f"{origin.url}: no file of tokens. Expected .bin or .npy files, or other files of "
            "token ids, directly in this folder."
        )
    left = {entry.name: entry for entry in top.entries if entry.name.endswith(IDX)}
    pairs: list[Pair] = []
    for entry in data:
        name = entry.name.removesuffix(BIN) + IDX
        idx = left.pop(name, None) if entry.name.endswith(BIN) else None
        if idx is None and origin.selection is not None and entry.name.endswith(BIN):
            idx = origin.entry(name)  # the URL names single files: the listing lacks their .idx
        pairs.append((entry, idx))
    for name in left:
        raise DatasetError(
            f"{origin.url}: {printable(name)} has no data file "
            f"{printable(name.removesuffix(IDX) + BIN)}. Fetch that file too, or remove the .idx "
            "from the folder."
        )
    without = [entry for entry, idx in pairs if idx is None]
    if 0 < len(without) < len(pairs):
        raise DatasetError(
            f"{origin.url}: {len(pairs) - len(without)} of {len(pairs)} files have an .idx, and "
            f"{printable(without[0].name)} has none. Put the files without an .idx into another "
            "folder."
        )
    return pairs


def inspect_token_file(origin: Origin, pair: Pair, *, dtype: str | None) -> TokenFile:
    """Read the layout of a file. dtype: from the user.

    Raises ConfigError (the dtype is missing, or isn't the file's) or DatasetError.
    """
    entry, idx = pair
    if idx is not None:
        found = read_idx(origin, idx, entry)
    elif entry.name.endswith(NPY):
        found = _read_npy(origin, entry)
    elif dtype is not None:
        found = _flat_file(entry, np.dtype(dtype).newbyteorder("<"), 0)
    else:
        raise ConfigError(
            f"dtype: {printable(entry.name)} doesn't record its dtype. Pass the one that it was "
            'written with, such as dtype="uint16".'
        )
    if dtype is not None and dtype != (name := np.dtype(found.dtype).name):
        source = "its header" if idx is None else printable(idx.name)
        raise ConfigError(
            f"dtype: got {dtype!r}, and {printable(entry.name)} is {name} according to {source}. "
            "Omit dtype=."
        )
    return found


def _flat_file(entry: Entry, dtype: np.dtype[Any], start: int) -> TokenFile:
    """Return the layout of a file of tokens from byte `start` on. Raises DatasetError."""
    tokens, rest = divmod(entry.size_bytes - start, dtype.itemsize)
    if rest:
        raise DatasetError(
            f"{printable(entry.name)}: the file has {entry.size_bytes:,} bytes, which isn't a "
            f"whole number of {dtype.name} tokens: it is truncated or has another dtype."
        )
    return TokenFile(entry=entry, dtype=dtype.str, start=start, tokens=tokens)


def _read_npy(origin: Origin, entry: Entry) -> TokenFile:
    with open_data_file(origin, entry) as file:
        data = np.frombuffer(file.read_at(0, _NPY_HEAD_BYTES), np.uint8)
    header = read_npy_header(data, size_bytes=entry.size_bytes)
    if isinstance(header, Rejection):
        raise DatasetError(f"{printable(entry.name)}: {header.reason}.")
    dtype = header.codec.dtype
    if len(header.shape) != 1 or dtype.kind not in "iu":
        raise DatasetError(
            f"{printable(entry.name)}: the array is {dtype.name} of shape {header.shape}, and "
            'tokens are integers in one dimension. Pass format="npy", or save a flat array.'
        )
    return _flat_file(entry, dtype, header.start)
