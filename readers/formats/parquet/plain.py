"""Large binary values that lie as they are in their pages: views of these, without a copy.

pyarrow copies each value out of its page. Of photographs that is as much as reading them again, so
where pages hold nothing but values behind one another (encoding PLAIN, no nulls), or places in a
dictionary of such values, it is told where they lie instead. Pages that are compressed are
decompressed, once.
"""

from __future__ import annotations

import struct
import zlib
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from penstock.cache.base.machine import machine_remedy
from penstock.readers.formats.parquet.pages import (
    DATA_V1,
    DATA_V2,
    DICTIONARY,
    PLAIN,
    PLAIN_DICTIONARY,
    RLE_DICTIONARY,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from penstock.readers.formats.parquet.pages import Page
    from penstock.readers.types import Encoded

    Views = NDArray[np.int32]

LEAST_BYTES = 1024
"""Mean size of values from which this is the quicker way."""

_CODECS = {0: None, 1: "snappy", 2: "gzip", 4: "brotli", 6: "zstd", 7: "lz4_raw"}
_LENGTH = struct.Struct("<I")
_INLINE_BYTES, _LARGEST_PAGE, _WIDEST = 12, 2**31 - 1, 32


def are_plain(pages: Sequence[Page], codec: int) -> bool:
    """Whether all values lie so, in pages or in a dictionary, and could be told where. Nulls and
    lists aren't looked for."""
    return codec in _CODECS and all(
        page.encoding in (PLAIN, PLAIN_DICTIONARY, RLE_DICTIONARY) and page.decoded <= _LARGEST_PAGE
        for page in pages
        if page.kind in (DATA_V1, DATA_V2, DICTIONARY)
    )


def plain_values(
    data: Encoded, pages: Sequence[Page], *, codec: int, has_levels: bool, values: int
) -> Any:
    """The values as an array of views. has_levels: pages say of each value that it is there.
    Raises ValueError for damage."""
    parts: list[Views] = []
    dictionary = np.empty((0, 4), np.int32)
    buffers: list[Any] = []
    for page in pages:
        if page.kind not in (DATA_V1, DATA_V2, DICTIONARY):
            continue
        body, at = _body(data, page, codec, has_levels=has_levels and page.kind == DATA_V1)
        if page.kind != DICTIONARY and page.encoding != PLAIN:
            places = indices(body, at, page.values)
            if len(places) and int(places.max()) >= len(dictionary):
                raise ValueError("it has places beyond its dictionary")
            parts.append(dictionary[places])
            continue
        views = _views(body, at, page.values, len(buffers))
        buffers.append(pa.py_buffer(body))
        if page.kind == DICTIONARY:
            dictionary = views
        else:
            parts.append(views)
    found = np.concatenate([np.empty((0, 4), np.int32), *parts])
    return pa.Array.from_buffers(
        pa.binary_view(), values, [None, pa.py_buffer(found), *buffers], null_count=0
    )


def _views(body: Encoded, at: int, count: int, number: int) -> Views:
    """Views of values that lie behind one another: length, first bytes, buffer, place in it; a
    short value stands in its view. number: of the buffer."""
    size, view = len(body), body.data
    if 4 * count > size:
        raise ValueError("a page of it ends before its values do")
    told: list[tuple[int, int, int, int]] = []
    for _ in range(count):
        if at + 4 > size:
            raise ValueError("a page of it ends before its values do")
        (length,) = _LENGTH.unpack_from(view, at)
        at += 4
        if length > size - at:
            raise ValueError("a value of it would end behind its page")
        told.append((length, 0, number, at))
        at += length
    views = np.array(told, np.int32).reshape(-1, 4)
    bytes_ = views.view(np.uint8)
    for place, (length, _, _, start) in enumerate(told):
        if length <= _INLINE_BYTES:
            bytes_[place, 4:] = 0
            bytes_[place, 4 : 4 + length] = body[start : start + length]
        else:
            bytes_[place, 4:8] = body[start : start + 4]
    return views


def indices(body: Encoded, at: int, count: int) -> NDArray[np.int64]:
    """Places in a dictionary, as runs of one place and packed ones (RLE and bit-packing hybrid).
    Raises ValueError for damage."""
    found = np.empty(count, np.int64)
    if not count:
        return found
    if at >= len(body) or body[at] > _WIDEST:
        raise ValueError("its places in a dictionary have no width")
    width, at, filled = int(body[at]), at + 1, 0
    powers = 1 << np.arange(width, dtype=np.int64)
    while filled < count:
        head, at = _varint(body, at)
        run = head >> 1
        if not run:
            raise ValueError("it has a run of no places in a dictionary")
        if head & 1:
            size = min(run * width, len(body) - at)
            bits = np.unpackbits(body[at : at + size], bitorder="little")
            if width:
                here = bits[: len(bits) // width * width].reshape(-1, width) @ powers
            else:
                here = np.zeros(min(8 * run, count), np.int64)
        else:
            size = (width + 7) // 8
            here = np.full(
                min(run, count), int.from_bytes(body[at : at + size].tobytes(), "little")
            )
        taken = min(len(here), count - filled)
        if not taken:
            raise ValueError("its places in a dictionary end early")
        found[filled : filled + taken] = here[:taken]
        filled, at = filled + taken, at + size
    return found


def _varint(body: Encoded, at: int) -> tuple[int, int]:
    value = shift = 0
    while at < len(body) and shift < 35:
        byte = int(body[at])
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
        shift += 7
    raise ValueError("its places in a dictionary end early")


def _body(data: Encoded, page: Page, codec: int, *, has_levels: bool) -> tuple[Encoded, int]:
    """A page's bytes decompressed, and where in them its values begin."""
    part = data[page.start : page.start + page.size]
    if page.crc is not None and zlib.crc32(part.data) != page.crc:
        raise ValueError("the checksum of a page is wrong")
    levels = page.levels if page.kind == DATA_V2 else 0
    if levels > min(page.size, page.decoded):
        raise ValueError("a page of it is smaller than its levels")
    part, wanted = part[levels:], page.decoded - levels  # those of version 2 aren't compressed
    name = _CODECS[codec] if page.is_compressed else None
    if name is not None and wanted:
        try:
            part = np.frombuffer(pa.Codec(name).decompress(pa.py_buffer(part), wanted), np.uint8)
        except (pa.ArrowException, OSError) as error:
            if machine_remedy(error) is not None:
                raise
            raise ValueError(f"its bytes are damaged ({str(error)[:200]})") from error
    if not has_levels:
        return part, 0
    if len(part) < 4:
        raise ValueError("a page of it ends before its values do")
    return part, 4 + int(_LENGTH.unpack_from(part.data, 0)[0])
