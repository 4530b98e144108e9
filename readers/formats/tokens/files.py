"""The files of a dataset of tokens: which they are, where their tokens begin, and of what dtype."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from penstock.cache.errors import ConfigError, DatasetError, DatasetNotFoundError
from penstock.readers.fields.npy import read_npy_header
from penstock.readers.files.names import is_passed_over, printable
from penstock.readers.formats.data_file import open_data_file
from penstock.readers.formats.tokens.cutting import Documents
from penstock.readers.formats.tokens.megatron import read_idx
from penstock.readers.types import Rejection

if TYPE_CHECKING:
    from penstock.readers.origin.origin import Entry, Origin

IDX, BIN, NPY = b".idx", b".bin", b".npy"
_HEAD_BYTES = 10_012


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
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
    documents: Documents | None = None
    checksum: int = field(default=0)


def find_files(origin: Origin) -> list[Pair]:
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
    pairs = [Pair(data=entry, idx=_idx_of(origin, entry, by_name)) for entry in data]
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


def look_at(origin: Origin, pair: Pair, *, dtype: str | None) -> TokenFile:
    """What a file says of its tokens. dtype: the user's. Raises ConfigError (no dtype, another than
    the file says), DatasetError."""
    entry = pair.data
    if pair.idx is not None:
        told = read_idx(origin, pair.idx, entry)
        _check_dtype(entry, dtype, told.dtype, by=printable(pair.idx.name))
        documents = Documents(told.lengths)
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
