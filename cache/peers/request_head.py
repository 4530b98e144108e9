"""Reading a request: exactly what this protocol has, and nothing else of HTTP. Pure.

Why no library: what these read beside it (bodies, chunks, pipelines, upgrades, folded lines, other
methods) would have to be refused behind them, and for ranges of 100 KB they cost as much as all the
rest of the server. Measured over loopback, CPU-seconds a GB of the server: this on asyncio 0.4,
asyncio's streams 0.8, aiohttp's low-level server 1.3.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from penstock.cache.peers.protocol import MOST_HEAD_BYTES
from penstock.cache.peers.tokens import Question

_LINE = re.compile(r"([A-Z]{1,16}) ([!-~]{1,512}) HTTP/1\.1")
_HEADER = re.compile(r"([A-Za-z0-9-]{1,64}):[ \t]*([ -~]{0,1024}?)[ \t]*")
_MOST_HEADERS = 32
# Each announces more than a head, or another protocol.
_REFUSED = frozenset({"content-length", "transfer-encoding", "upgrade", "expect", "trailer", "te"})
_ONCE = frozenset({"authorization", "range", "connection", "host"})

END = b"\r\n\r\n"


@dataclass(frozen=True, slots=True)
class Request:
    """A request, as far as it is one of ours. token: of Authorization. keeps: another may follow on
    the connection."""

    question: Question
    token: str
    keeps: bool


def read_head(data: bytes | bytearray) -> Request | None:
    """Read a head without its empty line; None for what isn't one of this protocol."""
    if len(data) > MOST_HEAD_BYTES:
        return None
    try:
        first, *lines = data.decode("ascii").split("\r\n")
    except UnicodeDecodeError:
        return None
    line = _LINE.fullmatch(first)
    if line is None or len(lines) > _MOST_HEADERS:
        return None
    headers: dict[str, str] = {}
    for text in lines:
        found = _HEADER.fullmatch(text)
        if found is None:
            return None
        name = found[1].lower()
        if name in _REFUSED or (name in headers and name in _ONCE):
            return None
        headers[name] = found[2]
    return Request(
        Question(line[1], line[2], headers.get("range", "")),
        headers.get("authorization", ""),
        headers.get("connection", "keep-alive").lower() == "keep-alive",
    )
