"""Define the protocol between the nodes of a job: paths, headers, ranges and limits. Pure.

    GET /v4/blobs/<key>   Range: bytes=a-b,c-d   206  the ranges of a whole blob, concatenated, with
                                                      the CRC-32C of each stretch; Content-Range
                                                      names them
                                                 404  the node doesn't have all of the blob
    GET /v4/held                                 200  keys of all whole blobs, 8 bytes each
    GET /v4/alive                                200  empty
    GET /v4/any                                  206  the beginning of any whole blob

It is a subset of HTTP/1.1: no other methods, no request bodies, and no multipart answers for
several ranges. Every request is signed (trust.py); a client outside the job learns only the time.
"""

from __future__ import annotations

import functools
import re
from email.utils import formatdate, parsedate_to_datetime
from typing import TYPE_CHECKING

from penstock.cache.disk import BLOCK_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    import numpy as np
    from numpy.typing import NDArray

ALIVE = "/v4/alive"
ANY = "/v4/any"
"""The first bytes of any whole blob, to measure the connection."""
HELD = "/v4/held"
_BLOBS = "/v4/blobs/"

CRC_HEADER = "Penstock-CRC32C"
"""CRC-32C of each stretch of the body, eight hex digits each, with commas between them."""
PROOF_HEADER = "Penstock-Proof"
"""A signature of the request's token and the answer's Date, which proves that the server knows the
secret. An answer 401 has it if the token was right but has expired."""

MOST_RANGE_BYTES = 2**26
"""The most bytes of all ranges of one request."""
MOST_RANGES = 24
"""The most ranges of one request."""
RANGE_BYTES = 2**24
"""The most bytes of an answer to `ANY`."""
MOST_HELD_KEYS = 2**20
"""The most keys in one answer; it omits the others."""
MOST_HEAD_BYTES = 4096
"""The most bytes of a request's head."""
HELD_KEY_BYTES = 8

_KEY = re.compile(r"[0-9a-f]{40}")
_BLOB_PATH = re.compile(rf"{_BLOBS}({_KEY.pattern})")
_ONE_RANGE = r"[0-9]{1,18}-[0-9]{1,18}"
_RANGES = re.compile(rf"bytes=({_ONE_RANGE}(?:,{_ONE_RANGE}){{0,{MOST_RANGES - 1}}})")
_CRCS = re.compile(r"[0-9a-f]{8}(?:,[0-9a-f]{8})*")

Span = tuple[int, int]
"""Bytes [start, end)."""


def is_key(text: object) -> bool:
    """Return True if `text` is a blob's key."""
    return isinstance(text, str) and _KEY.fullmatch(text) is not None


def blob_path(key: str) -> str:
    """Return the path of a blob."""
    return _BLOBS + key


def key_of(path: str) -> str | None:
    """Return the key in a request's path; None for any other path."""
    found = _BLOB_PATH.fullmatch(path)
    return None if found is None else found[1]


def ranges_text(spans: Sequence[Span]) -> str:
    """Return the value of Range for spans, which must ascend and not overlap."""
    return "bytes=" + _listed(spans)


def ranges_of(text: str) -> list[Span] | None:
    """Return the spans of a Range; None if the protocol doesn't allow it."""
    found = _RANGES.fullmatch(text)
    if found is None:
        return None
    spans: list[Span] = []
    left_bytes, at = MOST_RANGE_BYTES, 0
    for part in found[1].split(","):
        first, _, last = part.partition("-")
        start, end = int(first), int(last) + 1
        if start < at or not 0 < end - start <= left_bytes:
            return None
        spans.append((start, end))
        left_bytes, at = left_bytes - (end - start), end
    return spans


def _listed(spans: Sequence[Span]) -> str:
    return ",".join([f"{start}-{end - 1}" for start, end in spans])


def stretches(spans: Sequence[Span]) -> list[Span]:
    """Cut spans of a blob at MiB borders into stretches, each with its own checksum."""
    found: list[Span] = []
    for start, end in spans:
        while (border := start // BLOCK_BYTES * BLOCK_BYTES + BLOCK_BYTES) < end:
            found.append((start, border))
            start = border
        found.append((start, end))
    return found


def content_range(spans: Sequence[Span], size_bytes: int) -> str:
    """Return the value of Content-Range for spans of a blob."""
    return f"bytes {_listed(spans)}/{size_bytes}"


def crcs_text(crcs: Iterable[int]) -> str:
    """Return the value of `CRC_HEADER`."""
    return ",".join([f"{crc:08x}" for crc in crcs])


def crcs_of(headers: Mapping[str, str], count: int) -> list[int] | None:
    """Return the checksums of `count` stretches from the head of an answer 206; None if they are
    missing or malformed. headers: by lower-case name."""
    text = headers.get(CRC_HEADER.lower(), "")
    if len(text) != 9 * count - 1 or not _CRCS.fullmatch(text):
        return None
    return [int(part, 16) for part in text.split(",")]


def held_keys(keys: Iterable[str]) -> bytes:
    """Return the body with the keys of whole blobs: the first 8 bytes of each, sorted, big-endian.

    keys: sorted, at most MOST_HELD_KEYS. Two keys of a dataset share them with a probability of
    10^-19; a request then gets a 404.
    """
    body = bytearray()
    for key in keys:
        body += bytes.fromhex(key[: 2 * HELD_KEY_BYTES])
    return bytes(body)


def held_prefixes(body: bytes | memoryview) -> NDArray[np.uint64] | None:
    """Return the sorted 64-bit prefixes of keys from a body of `held_keys`; None if malformed."""
    import numpy as np  # not loaded by the server's process

    if len(body) % HELD_KEY_BYTES or len(body) > HELD_KEY_BYTES * MOST_HELD_KEYS:
        return None
    found = np.frombuffer(body, ">u8").astype(np.uint64)
    return found if bool(np.all(found[1:] >= found[:-1])) else None


def key_prefix(key: str) -> int:
    """Return the first 64 bits of a key, as in `held_prefixes`."""
    return int(key[: 2 * HELD_KEY_BYTES], 16)


@functools.lru_cache(maxsize=1)  # the server asks for the same second again and again
def date_text(now_s: float) -> str:
    """Return the value of Date."""
    return formatdate(now_s, usegmt=True)


def date_of(text: str) -> float | None:
    """Return the seconds since the epoch of a Date; None if it is malformed."""
    try:
        return parsedate_to_datetime(text).timestamp() if len(text) < 64 else None
    except (TypeError, ValueError, OverflowError):
        return None
