"""The pages of a column chunk by their headers, checked before anything is decompressed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from penstock.readers.formats.parquet.thrift import Reader

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from penstock.readers.types import Encoded

DATA_V1, INDEX, DICTIONARY, DATA_V2 = range(4)
PLAIN, PLAIN_DICTIONARY, RLE_DICTIONARY = 0, 2, 8

_HEAD_BYTES, _MOST_HEAD_BYTES = 128, 2**20  # statistics in a header can be long
_FREE_BYTES = 2**28
"""So much a chunk may always take when it is decompressed; beyond it a share of what it takes in
the file."""
_MOST_TIMES = 1000


@dataclass(frozen=True, slots=True)
class Page:
    """A page of a chunk.

    kind: of page; head: where its header begins in the chunk; start, size: of its bytes behind
    that; decoded: bytes decompressed; values: nulls too; encoding: of them; crc: CRC-32 of the
    bytes, None where it isn't told. levels: bytes before the values, of version 2, which aren't
    compressed; is_compressed: the values are.
    """

    kind: int
    head: int
    start: int
    size: int
    decoded: int
    values: int = 0
    encoding: int = -1
    crc: int | None = None
    levels: int = 0
    is_compressed: bool = True


def pages_of(data: Encoded) -> Iterator[Page]:
    """The pages of a chunk, from its first byte on. Raises ValueError."""
    at, count = 0, len(data)
    while at < count:
        page = _page(data, at)
        yield page
        at = page.start + page.size


def _page(data: Encoded, at: int) -> Page:
    length = _HEAD_BYTES
    while True:
        head = data[at : at + length].tobytes()
        reader = Reader(head)
        try:
            told = reader.struct()
            break
        except ValueError:
            if at + length >= len(data) or length >= _MOST_HEAD_BYTES:
                raise ValueError(f"its bytes at {at:,} are no page's header") from None
            length *= 8
    kind, decoded, size = told.count(1), told.count(2), told.count(3)
    start = at + reader.at
    if min(kind, decoded, size) < 0:
        raise ValueError(f"its page at byte {at:,} has no kind or size")
    if size > len(data) - start:
        raise ValueError(f"its page at byte {at:,} has {size:,} bytes, more than are there")
    own = told.part({DATA_V1: 5, DICTIONARY: 7, DATA_V2: 8}.get(kind, -1))
    if own is None:
        return Page(kind, at, start, size, decoded)
    values, encoding = own.count(1), own.count(4 if kind == DATA_V2 else 2)
    if min(values, encoding) < 0:
        raise ValueError(f"its page at byte {at:,} has no number of values")
    crc = told.get(4)
    found = Page(
        kind,
        at,
        start,
        size,
        decoded,
        values,
        encoding,
        crc & 0xFFFFFFFF if type(crc) is int else None,
    )
    if kind != DATA_V2:
        return found
    levels = max(own.count(5), 0) + max(own.count(6), 0)
    return replace(found, levels=levels, is_compressed=own.get(7, True) is not False)


@dataclass(frozen=True, slots=True)
class Survey:
    """What the headers of a chunk's pages tell. is_dictionary: all values are of a dictionary;
    largest: bytes that the values may take decoded, if each is the largest of a dictionary."""

    is_dictionary: bool
    largest: int


def survey(pages: Sequence[Page], *, values: int, size_bytes: int) -> Survey:
    """Look at all pages of a chunk. values: what the footer says; size_bytes: of the chunk. Raises
    ValueError where they can't be so, or where the pages would take far more memory than that."""
    total = numbers = of_dictionary = entry = 0
    for page in pages:
        total += page.decoded
        if page.kind == DICTIONARY:
            entry = page.decoded
        elif page.kind in (DATA_V1, DATA_V2):
            numbers += page.values
            if page.encoding in (PLAIN_DICTIONARY, RLE_DICTIONARY):
                of_dictionary += page.values
        if numbers > values:
            raise ValueError(f"its pages have {numbers:,} values or more, and {values:,} were told")
        if total > max(_FREE_BYTES, _MOST_TIMES * size_bytes):
            raise ValueError(
                f"its pages would take {total:,} bytes decompressed, of {size_bytes:,} in the file"
            )
    if numbers != values:
        raise ValueError(f"its pages have {numbers:,} values, and {values:,} were told: truncated")
    return Survey(
        is_dictionary=bool(numbers) and of_dictionary == numbers,
        largest=total + of_dictionary * entry,
    )
