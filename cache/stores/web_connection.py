"""One connection of the web client: sending a request, reading a head, and being ended by others.

Every read has a limit in bytes and in time.
"""

from __future__ import annotations

import contextlib
import errno
import select
import socket
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from penstock.cache.base.store import RequestError
from penstock.cache.stores.tls import REMEDY, certificate_fault

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.cache.stores.web_address import WebOrigin

_HEAD_BYTES = 64 * 2**10
_FIRST_READ = 16 * 2**10
_STEP = 2**20
_IDLE_S = 60.0
"""Gateways forget connections that are idle for longer, and then a request on one hangs."""
_UNREACHABLE = frozenset(
    {errno.ECONNREFUSED, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.ENETDOWN}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeouts:
    """Timeouts limit a request in seconds: to connect, without a byte, and all of it."""

    connect_s: float
    read_s: float
    whole_s: float

    def patience_s(self, deadline_s: float) -> float:
        """How long one call may take. Raises RequestError behind the deadline."""
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            raise RequestError("transient", f"no complete answer came in {self.whole_s:.0f} s")
        return min(self.read_s, left_s)


class StaleError(RequestError):
    """A kept connection turned out to be closed, before anything of an answer came."""

    def __init__(self) -> None:
        super().__init__("transient", "the server closed the connection")


class Head(NamedTuple):
    """A Head is the beginning of an answer: its status and headers.

    headers: by lower-case name, ":old": the server speaks HTTP/1.0; begin, end: where the body
    begins, and what was read ends, in the connection's buffer.
    """

    status: int
    headers: dict[str, str]
    begin: int
    end: int


class Connection:
    """A Connection is an open socket to one origin, and what was read ahead from it.

    is_public: the address belongs to the internet; is_kept: it had a request before; prefix: of
    targets, for a proxy; proxy_headers: for it too; buffer: what is read ahead.
    """

    def __init__(
        self, sock: socket.socket, origin: WebOrigin, *, is_public: bool, timeouts: Timeouts
    ) -> None:
        self.sock = sock
        self.origin = origin
        self.is_public = is_public
        self.is_kept = False
        self.prefix = ""
        self.proxy_headers = ""
        self.buffer = bytearray(_FIRST_READ)
        self.timeouts = timeouts
        self._idle_since_s = 0.0
        self._is_aborted = False
        self._poll = select.poll()

    def watch(self) -> None:
        """Begin to notice what comes unasked; once, when the connection is made."""
        self._poll.register(self.sock, select.POLLIN)

    def is_fit(self, now_s: float) -> bool:
        """Whether a kept connection can be used again: open, and nothing unasked came on it."""
        return now_s - self._idle_since_s < _IDLE_S and not self._poll.poll(0)

    def rest(self) -> None:
        """Note that the connection waits for another request from now on."""
        self._idle_since_s = time.monotonic()
        self.is_kept = True
        if len(self.buffer) != _FIRST_READ:
            self.buffer = bytearray(_FIRST_READ)

    def send(self, head: str, body: Any, deadline_s: float) -> None:
        """Send a request. Raises RequestError, StaleError."""
        with self.explaining():
            self.limit(deadline_s)
            try:
                self.sock.sendall(head.encode("latin-1"))
            except (ConnectionResetError, BrokenPipeError):
                if self.is_kept and not self._is_aborted:
                    raise StaleError from None
                raise
            for start in range(0, len(body), _STEP):
                self.limit(deadline_s)
                self.sock.sendall(memoryview(body)[start : start + _STEP])

    def read_head(self, deadline_s: float) -> Head:
        """The head of the answer. Raises RequestError, StaleError."""
        begin = there = 0
        buffer = self.buffer
        while True:
            end = buffer.find(b"\r\n\r\n", begin, there)
            if end < 0:
                if there >= _HEAD_BYTES:
                    raise RequestError("refused", "the head of the server's answer has no end")
                if there == len(buffer):
                    buffer.extend(bytes(len(buffer)))
                with memoryview(buffer) as view:
                    got = self.receive(view[there:], deadline_s)
                if not got and not there and self.is_kept:
                    raise StaleError
                if not got:
                    raise RequestError(
                        "transient", "the connection ended before the answer's head was there"
                    )
                there += got
                continue
            status, headers = parse_head(buffer[begin:end].decode("latin-1"))
            begin = end + 4
            if status >= 200 or status == 101:
                return Head(status, headers, begin, there)

    def limit(self, deadline_s: float) -> None:
        """Limit the next call's time. Raises RequestError behind the deadline."""
        self.sock.settimeout(self.timeouts.patience_s(deadline_s))

    def receive(self, room: memoryview, deadline_s: float, *, flags: int = 0) -> int:
        """Bytes that came into the room, 0 at the end. flags: of recv. Raises RequestError."""
        try:
            self.limit(deadline_s)
            got = self.sock.recv_into(room, 0, flags)
            if not got and self._is_aborted:
                raise RequestError("refused", "closed")
            return got
        except (ConnectionResetError, BrokenPipeError) as error:
            # As if it had ended in peace: whoever reads knows what is missing.
            if self._is_aborted:
                raise self._failure(error, None) from None
            return 0
        except (OSError, ValueError) as error:
            raise self._failure(error, None) from None

    def receive_all(self, room: memoryview, deadline_s: float, *, following: int = 0) -> int:
        """Bytes that came into the room: fewer than it has only at the end. following: bytes of the
        answer that come behind them. Raises RequestError."""
        del following
        there = 0
        while there < len(room) and (got := self.receive(room[there:], deadline_s)):
            there += got
        return there

    @contextlib.contextmanager
    def explaining(self) -> Iterator[None]:
        """Turn what the system raises inside into a RequestError."""
        try:
            yield
        except (OSError, ValueError) as error:
            raise self._failure(error, self.origin) from None

    def _failure(self, error: Exception, origin: WebOrigin | None) -> RequestError:
        if self._is_aborted:
            return RequestError("refused", "closed")
        return request_failure(error, origin, read_timeout_s=self.timeouts.read_s)

    def abort(self) -> None:
        """End the connection from any thread: who waits for it gets an error."""
        self._is_aborted = True
        with contextlib.suppress(OSError):
            # The plain socket's method: that of a TLS one isn't for other threads.
            socket.socket.shutdown(self.sock, socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket. Safe to call twice."""
        with contextlib.suppress(OSError, ValueError):
            self.sock.close()


def request_failure(
    error: Exception, origin: WebOrigin | None, *, read_timeout_s: float
) -> RequestError:
    """Make a RequestError of an error of a socket. origin: named where it isn't reached."""
    is_late = isinstance(error, TimeoutError) and error.errno is None
    if is_late or isinstance(error, BlockingIOError):  # the kernel's own limit
        return RequestError("transient", f"nothing came for {read_timeout_s:.3g} s")
    if (fault := certificate_fault(error)) is not None:
        return RequestError("refused", fault, remedy=REMEDY)
    if isinstance(error, UnicodeEncodeError):
        return RequestError("refused", "a header holds characters that HTTP can't send")
    reason = getattr(error, "strerror", None) or type(error).__name__
    if origin is not None:
        reason = f"{reason}: {origin.url}"
    code = getattr(error, "errno", None)
    if isinstance(error, socket.gaierror):
        return RequestError("unreachable", f"the host's name isn't known: {reason}")
    return RequestError("unreachable" if code in _UNREACHABLE else "transient", reason)


def parse_head(head: str) -> tuple[int, dict[str, str]]:
    """Read status and headers out of an answer's head. Raises RequestError."""
    first, *lines = head.split("\r\n")
    protocol, _, rest = first.partition(" ")
    status = rest[:3]
    if protocol not in ("HTTP/1.1", "HTTP/1.0") or not status.isdigit() or len(status) < 3:
        raise RequestError("transient", "what came isn't an HTTP answer")
    headers: dict[str, str] = {}
    for line in lines:
        name, colon, value = line.partition(":")
        if not colon or name != name.strip():
            raise RequestError("transient", "the head of the server's answer is broken")
        name, value = name.lower(), value.strip()
        if name in headers:
            if name == "content-length" and headers[name] != value:
                raise RequestError("transient", "the server states two lengths for one answer")
            value = value if name in ("content-length", "location") else f"{headers[name]}, {value}"
        headers[name] = value
    if protocol == "HTTP/1.0" and "keep-alive" not in headers.get("connection", "").lower():
        headers[":old"] = "1"
    return int(status), headers
