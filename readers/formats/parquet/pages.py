"""The pages of a column chunk by their headers, checked before anything is decompressed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.readers.formats.parquet.thrift import Reader

if TYPE_CHECKING:
    from collections.abc import Iterator

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
    """A page of a chunk. kind: of page; start, size: of its bytes behind its header, in the chunk;
    decoded: bytes decompressed; values: nulls too; encoding: of them."""

    kind: int
    head: int
    start: int
    size: int
    decoded: int
    values: int
    encoding: int


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
        return Page(kind, at, start, size, decoded, 0, -1)
    values, encoding = own.count(1), own.count(4 if kind == DATA_V2 else 2)
    if min(values, encoding) < 0:
        raise ValueError(f"its page at byte {at:,} has no number of values")
    return Page(kind, at, start, size, decoded, values, encoding)


@dataclass(frozen=True, slots=True)
class Survey:
    """What the headers of a chunk's pages tell. is_dictionary: all values are of a dictionary;
    largest: bytes that the values may take decoded, if each is the largest of a dictionary."""

    is_dictionary: bool
    largest: int


def survey(data: Encoded, *, values: int, decoded: int) -> Survey:
    """Look at all headers. values, decoded: what the footer says. Raises ValueError where they
    can't be so, or where the pages would take far more memory than the file."""
    total = numbers = of_dictionary = entry = 0
    for page in pages_of(data):
        total += page.decoded
        if page.kind == DICTIONARY:
            entry = page.decoded
        elif page.kind in (DATA_V1, DATA_V2):
            numbers += page.values
            if page.encoding in (PLAIN_DICTIONARY, RLE_DICTIONARY):
                of_dictionary += page.values
        if numbers > values:
            raise ValueError(f"its pages have {numbers:,} values or more, and {values:,} were told")
        if total > max(_FREE_BYTES, _MOST_TIMES * len(data)):
            raise ValueError(
                f"its pages would take {total:,} bytes decompressed, of {len(data):,} in the file"
            )
    if numbers != values:
        raise ValueError(f"its pages have {numbers:,} values, and {values:,} were told: truncated")
    del decoded
    return Survey(
        is_dictionary=bool(numbers) and of_dictionary == numbers,
        largest=total + of_dictionary * entry,
    )
