"""An answer of a web server: its head, and a body that is read once and within a limit.

Only plain answers with a Content-Length take the short way; chunked ones and those that end with
the connection are `http.client`'s.
"""

from __future__ import annotations

import contextlib
import io
from http.client import HTTPException, HTTPResponse
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.cache.base.store import RequestError

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.cache.stores.web_address import Hop
    from penstock.cache.stores.web_connection import Connection
    from penstock.cache.stores.web_pool import ConnectionPool

_ERROR_BYTES = 16 * 2**10
"""So much of the body of an answer that isn't a success is read."""
_STEP = 2**20


class Reply:
    """A Reply is an answer whose head has come, and whose body can be read once.

    hop: who answered; headers: by lower-case name. What isn't read in full is thrown away with the
    connection.
    """

    def __init__(
        self,
        pool: ConnectionPool,
        connection: Connection,
        *,
        hop: Hop,
        method: str,
        deadline_s: float,
    ) -> None:
        self._pool, self._connection = pool, connection
        self._method = method
        self._deadline_s = deadline_s
        self.hop = hop
        self.is_public = connection.is_public
        self.status, self.headers, self._begin, self._end = connection.read_head(deadline_s)
        keep = self.headers.get("connection", "").lower()
        self._keeps = "close" not in keep and not self.headers.get(":old")
        self._done = False
        self._read_bytes = 0

    @property
    def length(self) -> int | None:
        """Bytes of the body as the server tells; None if it doesn't."""
        text = self.headers.get("content-length", "")
        if "transfer-encoding" in self.headers or not (text.isascii() and text.isdigit()):
            return None
        return int(text)

    def read(self, most: int) -> memoryview:
        """The body. Raises RequestError, also for one that is longer than `most`: not more than
        that and one byte is read."""
        if self._has_no_body():
            self._done = True
            return memoryview(b"")
        length = self.length
        if length is None:
            return self._read_stream(most)
        if length > most:
            raise _too_long(length, most)
        view = np.empty(length, np.uint8).data
        self.read_into(view)
        return view

    def read_into(self, room: memoryview) -> None:
        """The next bytes of a body whose length is told, as many as the room has. Raises
        RequestError."""
        there = min(self._end - self._begin, len(room))
        room[:there] = memoryview(self._connection.buffer)[self._begin : self._begin + there]
        self._begin += there
        if there < len(room):
            following = (self.length or 0) - self._read_bytes - len(room)
            there += self._connection.receive_all(
                room[there:], self._deadline_s, following=following
            )
        self._read_bytes += there
        if there < len(room):
            raise RequestError(
                "transient",
                f"the connection ended after {self._read_bytes} of {self.length} bytes",
            )
        if self._read_bytes == self.length:
            self._done = True
            self._keeps = self._keeps and self._begin == self._end

    def error_body(self) -> bytes:
        """The beginning of a body that tells what went wrong."""
        with contextlib.suppress(RequestError):
            length = self.length
            if length is None:
                return bytes(self._read_stream(_ERROR_BYTES, truncate=True))
            if length <= _ERROR_BYTES:
                return bytes(self.read(_ERROR_BYTES))
        return b""

    def close(self) -> None:
        """Keep the connection for others, or end it if something of the body is left."""
        done = self._done or self._has_no_body() or self.length == 0
        self._pool.put_back(self._connection, keep=done and self._keeps)

    def _has_no_body(self) -> bool:
        return self._method == "HEAD" or self.status in (204, 304)

    def _read_stream(self, most: int, *, truncate: bool = False) -> memoryview:
        """A body whose length isn't told. truncate: take its beginning."""
        self._keeps = False
        stream = _Stream(
            bytes(self._connection.buffer[: self._end]),
            lambda view: self._connection.receive(view, self._deadline_s),
        )
        file = _StreamSocket(io.BufferedReader(stream))
        response = HTTPResponse(file, method=self._method)  # type: ignore[arg-type]
        parts: list[bytes] = []
        total = 0
        try:
            response.begin()
            while total <= most and (part := response.read(min(_STEP, most + 1 - total))):
                parts.append(part)
                total += len(part)
        except (HTTPException, ValueError) as error:
            raise RequestError("transient", f"a broken answer ({type(error).__name__})") from None
        if total > most and not truncate:
            raise _too_long(None, most)
        self._done = total <= most
        return memoryview(b"".join(parts)[:most])


def _too_long(length: int | None, most: int) -> RequestError:
    size = "without end" if length is None else f"of {length} bytes"
    return RequestError(
        "refused",
        f"the server sends an answer {size} where {most} bytes were asked for: that is the "
        "server's fault (or a proxy's), and nothing of it was used",
    )


class _Stream(io.RawIOBase):
    """What was read of an answer already, and then what comes."""

    def __init__(self, begun: bytes, receive: Callable[[memoryview], int]) -> None:
        self._begun = begun
        self._receive = receive

    def readable(self) -> bool:
        return True

    def readinto(self, room: Any) -> int:
        view = memoryview(room)
        if not self._begun:
            return self._receive(view)
        part, self._begun = self._begun[: len(view)], self._begun[len(view) :]
        view[: len(part)] = part
        return len(part)


class _StreamSocket:
    """What HTTPResponse wants of a socket."""

    def __init__(self, file: io.BufferedReader) -> None:
        self._file = file

    def makefile(self, mode: str) -> io.BufferedReader:
        del mode
        return self._file
