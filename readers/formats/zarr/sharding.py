"""Shards of version 3: many inner chunks in one file, and an index of where each lies.

Source: the specification of the codec sharding_indexed 1.0.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from crc32c import crc32c

from penstock.readers.formats.zarr.specs import CodecSpec, v3_specs

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from penstock.readers.types import Encoded

    Ints = NDArray[np.int64]

SHARDING = "sharding_indexed"
MISSING = -1
"""In a parsed index: there is no such inner chunk, it is all fill value."""

MAX_INNER_CHUNKS = 2**22
"""Of one shard: an index of 64 MiB."""

_ENTRY_BYTES, _CRC_BYTES = 16, 4
_NOTHING = 2**64 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharding:
    """How inner chunks lie in the file of a shard.

    chunk_shape: of an inner chunk. counts: how many there are along each axis. codecs: of an inner
    chunk, in the order of writing. is_at_end: whether the index stands at the file's end, else at
    its start. has_checksum: whether a CRC-32C follows the index. byte_order: of its numbers.
    """

    chunk_shape: tuple[int, ...]
    counts: tuple[int, ...]
    codecs: tuple[CodecSpec, ...]
    is_at_end: bool
    has_checksum: bool
    byte_order: str

    @property
    def index_bytes(self) -> int:
        """Bytes of the index in a file."""
        return math.prod(self.counts) * _ENTRY_BYTES + (_CRC_BYTES if self.has_checksum else 0)

    def index_range(self, file_bytes: int) -> tuple[int, int]:
        """Where the index stands in a file of that size: its first byte, and the one behind its
        last. Raises ValueError where the file is too short to have one."""
        size = self.index_bytes
        if file_bytes < size:
            raise ValueError(
                f"a shard's file has {file_bytes:,} bytes, and its index alone takes {size:,}"
            )
        return (file_bytes - size, file_bytes) if self.is_at_end else (0, size)

    def parse_index(self, data: Encoded, file_bytes: int) -> Ints:
        """Where the inner chunks lie: int64, shape (*counts, 2), first byte in the file and how
        many; both MISSING where there is none.

        data: the bytes of index_range(), uint8. Raises ValueError for an index that is damaged, or
        points outside of the file, into itself or to the same bytes twice.
        """
        begin, end = self.index_range(file_bytes)
        if len(data) != end - begin:
            raise ValueError(f"a shard's index has {len(data):,} bytes, wanted {end - begin:,}")
        entries = data
        if self.has_checksum:
            entries = data[:-_CRC_BYTES]
            told = int.from_bytes(data[-_CRC_BYTES:].tobytes(), "little")
            if crc32c(entries) != told:
                raise ValueError("a shard's index isn't what was written: its CRC-32C differs")
        # A copy: the bytes may stand at any address, and be a view of a file.
        pairs = np.frombuffer(entries.tobytes(), f"{self.byte_order}u8").reshape(-1, 2)
        starts, sizes = pairs.astype(np.uint64).T
        is_there = ~((starts == _NOTHING) & (sizes == _NOTHING))
        first, count = starts[is_there], sizes[is_there]
        limit = np.uint64(file_bytes)
        if bool(np.any((first > limit) | (count > limit - np.minimum(first, limit)))):
            raise ValueError(f"a shard's index points outside of its file of {file_bytes:,} bytes")
        self._check_overlaps(first.astype(np.int64), count.astype(np.int64), begin, end)
        found = np.full(pairs.shape, MISSING, np.int64)
        found[is_there, 0] = first
        found[is_there, 1] = count
        return found.reshape(*self.counts, 2)

    @staticmethod
    def _check_overlaps(first: Ints, count: Ints, begin: int, end: int) -> None:
        first, count = first[count > 0], count[count > 0]
        if bool(np.any((first < end) & (first + count > begin))):
            raise ValueError("a shard's index says that chunks lie where it lies itself")
        order = np.argsort(first, kind="stable")
        ends = (first + count)[order]
        if bool(np.any(ends[:-1] > first[order][1:])):
            raise ValueError("a shard's index says that several chunks lie in the same bytes")


def sharding_of(codecs: tuple[CodecSpec, ...], shape: tuple[int, ...]) -> Sharding | None:
    """How a shard of that shape is made up; None where these codecs make no shards whose inner
    chunks could be had alone: the whole is one chunk then.

    Raises ValueError.
    """
    if len(codecs) != 1 or codecs[0].name != SHARDING:
        return None
    told = codecs[0].configuration
    chunk = _inner_shape(told.get("chunk_shape"), shape)
    counts = tuple(length // part for length, part in zip(shape, chunk, strict=True))
    if math.prod(counts) > MAX_INNER_CHUNKS:
        raise ValueError(
            f"its shards hold {math.prod(counts):,} inner chunks each, at most "
            f"{MAX_INNER_CHUNKS:,} are read"
        )
    location = told.get("index_location", "end")
    if location not in ("start", "end"):
        raise ValueError(f"its shards' index_location is {_short(location)}")
    index = v3_specs(told.get("index_codecs"))
    names = [codec.name for codec in index]
    if names not in (["bytes"], ["bytes", "crc32c"]):
        return None  # compressed, say: its size isn't known
    return Sharding(
        chunk_shape=chunk,
        counts=counts,
        codecs=v3_specs(told.get("codecs")),
        is_at_end=location == "end",
        has_checksum=len(index) > 1,
        byte_order=byte_order_of(index[0]),
    )


def byte_order_of(codec: CodecSpec) -> Literal["<", ">"]:
    """numpy's sign for the byte order that the codec `bytes` says. Raises ValueError."""
    endian: Any = codec.configuration.get("endian", sys.byteorder)
    if endian not in ("little", "big"):
        raise ValueError(f"its codec bytes says endian {_short(endian)}")
    return "<" if endian == "little" else ">"


def _inner_shape(told: object, shape: tuple[int, ...]) -> tuple[int, ...]:
    if (
        not isinstance(told, list)
        or len(told) != len(shape)
        or not all(type(part) is int and part > 0 for part in told)
        or any(length % part for length, part in zip(shape, told, strict=True))
    ):
        raise ValueError(f"its shards of shape {shape} hold inner chunks of shape {_short(told)}")
    return tuple(told)


def _short(value: object) -> str:
    return repr(value)[:80]
