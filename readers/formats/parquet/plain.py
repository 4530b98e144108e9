"""Large binary values that lie as they are in their pages: views of these, without a copy.

pyarrow copies each value out of its page. Of photographs that is as much as reading them again, so
where pages hold nothing but values behind one another (encoding PLAIN, no nulls) they are told
where they lie instead. Pages that are compressed are decompressed, once.
"""

from __future__ import annotations

import struct
import zlib
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from penstock.readers.formats.parquet.pages import DATA_V1, DATA_V2, PLAIN

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.readers.formats.parquet.pages import Page
    from penstock.readers.types import Encoded

LEAST_BYTES = 1024
"""Mean size of values from which this is the quicker way."""

_CODECS = {0: None, 1: "snappy", 2: "gzip", 4: "brotli", 6: "zstd", 7: "lz4_raw"}
_LENGTH = struct.Struct("<I")
_INLINE_BYTES, _LARGEST_PAGE = 12, 2**31 - 1


def are_plain(pages: Sequence[Page], codec: int) -> bool:
    """Whether all values lie so, and could be told where. Nulls and lists aren't looked for."""
    return codec in _CODECS and all(
        page.encoding == PLAIN and page.decoded <= _LARGEST_PAGE
        for page in pages
        if page.kind in (DATA_V1, DATA_V2)
    )


def plain_values(
    data: Encoded, pages: Sequence[Page], *, codec: int, has_levels: bool, values: int
) -> Any:
    """The values as an array of views. has_levels: pages say of each value that it is there.
    Raises ValueError for damage."""
    views = np.zeros((values, 4), np.int32)
    short = views.view(np.uint8)
    buffers: list[Any] = []
    row = 0
    for page in pages:
        if page.kind not in (DATA_V1, DATA_V2):
            continue  # a dictionary that nobody uses
        body, at = _body(data, page, codec, has_levels=has_levels)
        number, size, view = len(buffers), len(body), body.data
        told: list[tuple[int, int, int, int]] = []
        for _ in range(page.values):
            if at + 4 > size:
                raise ValueError("a page of it ends before its values do")
            (length,) = _LENGTH.unpack_from(view, at)
            at += 4
            if length > size - at:
                raise ValueError("a value of it would end behind its page")
            told.append((length, 0, number, at))
            at += length
        views[row : row + page.values] = told
        for place, (length, _, _, start) in enumerate(told, row):
            if length <= _INLINE_BYTES:
                short[place, 4:] = 0
                short[place, 4 : 4 + length] = body[start : start + length]
            else:
                short[place, 4:8] = body[start : start + 4]
        buffers.append(pa.py_buffer(body))
        row += page.values
    return pa.Array.from_buffers(
        pa.binary_view(), values, [None, pa.py_buffer(views), *buffers], null_count=0
    )


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
            raise ValueError(f"its bytes are damaged ({str(error)[:200]})") from error
    if page.kind == DATA_V2 or not has_levels:
        return part, 0
    if len(part) < 4:
        raise ValueError("a page of it ends before its values do")
    return part, 4 + int(_LENGTH.unpack_from(part.data, 0)[0])
