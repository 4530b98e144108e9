"""Open, keep and close the connections of the web client.

A connection is opened directly or through a proxy, to an address that is checked after its name was
looked up, with TLS for https. It is kept for the next request to its origin. Every read has a limit
in bytes and in time, and any thread can abort all connections at once.
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import threading
import time
import weakref
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from penstock.cache.base import RequestError
from penstock.cache.stores.request_failures import request_failure
from penstock.cache.stores.web_address import Proxies, WebOrigin, basic_auth, is_public

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable, Iterator


_HEAD_BYTES = 64 * 2**10
_FIRST_READ = 16 * 2**10
_STEP = 2**20
_LEAST_S = 0.001  # 0 would mean no limit
_AT_ONCE = 2**18
"""The number of received bytes that wakes a thread that waits for a body. Measured with ranges of
1 MiB between nodes: a third less CPU time on both sides than if each packet wakes it."""
_IDLE_S = 60.0
"""Gateways drop connections that are idle for longer, and a request on such a connection hangs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeouts:
    """The time limits of a request in seconds: to connect, without a byte, and in total."""

    connect_s: float
    read_s: float
    whole_s: float

    def patience_s(self, deadline_s: float) -> float:
        """Return how long one call may take. Raises RequestError after the deadline."""
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            raise RequestError("transient", f"no complete answer came in {self.whole_s:.0f} s")
        return min(self.read_s, left_s)


class StaleError(RequestError):
    """A kept connection was closed before the answer began."""

    def __init__(self) -> None:
        super().__init__("transient", "the server closed the connection")


@dataclass(eq=False, repr=False)
class Connection:
    """An open socket to one origin, with the bytes that were read ahead.

    For http the kernel waits, with its own time limit, so a MiB of an answer takes one system call
    and wakes its thread once. OpenSSL reads encrypted bytes as they arrive.

    is_public: True if its address is public. is_kept: True if it has served a request. prefix,
    proxy_headers: the beginning of targets and the headers of requests through a proxy. buffer: the
    bytes that were read ahead.
    """

    sock: socket.socket
    origin: WebOrigin
    _: KW_ONLY
    is_public: bool
    timeouts: Timeouts

    def __post_init__(self) -> None:
        self.is_kept = False
        self.prefix = self.proxy_headers = ""
        self.buffer = bytearray(_FIRST_READ)
        self._idle_since_s = 0.0
        self._is_aborted = False
        self._is_plain = self.origin.scheme == "http"
        self._at_once, self._patience_s = 1, 0.0
        self._poll = select.poll()

    def watch(self) -> None:
        """Start to detect unrequested bytes, and to wait in the kernel; once, when the connection
        is open."""
        self._poll.register(self.sock, select.POLLIN)
        if self._is_plain:
            self.sock.settimeout(None)
        self._patience_s = 0.0

    def is_fit(self, now_s: float) -> bool:
        """Return True if a kept connection can be used again: it is open, without unread bytes."""
        return now_s - self._idle_since_s < _IDLE_S and not self._poll.poll(0)

    def rest(self) -> None:
        """Record that the connection is idle from now on."""
        self._idle_since_s = time.monotonic()
        self.is_kept = True
        if len(self.buffer) != _FIRST_READ:
            self.buffer = bytearray(_FIRST_READ)

    def send(self, head: str, body: Any, deadline_s: float) -> None:
        """Send a request. Raises RequestError, StaleError."""
        try:
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
        except (OSError, ValueError) as error:  # `explaining` would cost 2 us
            raise self._failure(error, self.origin) from None

    def read_head(self, deadline_s: float) -> tuple[int, dict[str, str], int, int]:
        """Receive the head of the answer; return its status, its headers (see parse_head), and the
        positions in the buffer at which the body begins and the received bytes end. Raises
        RequestError, StaleError."""
        begin = received = 0
        buffer = self.buffer
        while True:
            end = buffer.find(b"\r\n\r\n", begin, received)
            if end < 0:
                if received >= _HEAD_BYTES:
                    raise RequestError("refused", "the head of the server's answer has no end")
                if received == len(buffer):
                    buffer.extend(bytes(len(buffer)))
                with memoryview(buffer) as view:
                    got = self.receive(view[received:], deadline_s)
                if not got and not received and self.is_kept:
                    raise StaleError
                if not got:
                    raise RequestError("transient", "the answer ended before its head did")
                received += got
                continue
            status, headers = parse_head(buffer[begin:end].decode("latin-1"))
            begin = end + 4
            if status >= 200 or status == 101:
                return status, headers, begin, received

    def limit(self, deadline_s: float) -> None:
        """Set the time limit of the next call. Raises RequestError after the deadline."""
        patience_s = self.timeouts.patience_s(deadline_s)
        if patience_s == self._patience_s:  # setting it is a system call
            return
        self._patience_s = patience_s
        if not self._is_plain:
            self.sock.settimeout(patience_s)
            return
        seconds = max(patience_s, _LEAST_S)
        limit = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            self.sock.setsockopt(socket.SOL_SOCKET, option, limit)

    def receive(self, view: memoryview, deadline_s: float, *, flags: int = 0) -> int:
        """Receive bytes into a view; return their number, 0 at the end. flags: of recv. Raises
        RequestError."""
        try:
            self.limit(deadline_s)
            got = self.sock.recv_into(view, 0, flags)
        except (ConnectionResetError, BrokenPipeError):
            got = 0  # like a regular end: the caller knows how many bytes are missing
        except (OSError, ValueError) as error:
            raise self._failure(error, None) from None
        if not got and self._is_aborted:
            raise RequestError("refused", "closed")
        return got

    def receive_all(self, view: memoryview, deadline_s: float, *, following: int = 0) -> int:
        """Fill a view; return the number of bytes, which is less than its size only at the end.
        following: bytes of the answer after these. Raises RequestError."""
        if not self._is_plain:
            return self._fill(view, deadline_s)
        # For the answer's last bytes a thread would wait forever if it woke only for more bytes.
        first = view[: max(0, len(view) + following - _AT_ONCE)]
        received = self._fill(first, deadline_s, at_once=_AT_ONCE, flags=socket.MSG_WAITALL)
        if received < len(first):
            return received
        rest = view[received:]
        return received + self._fill(rest, deadline_s, flags=socket.MSG_WAITALL)

    def _fill(
        self, view: memoryview, deadline_s: float, *, at_once: int = 1, flags: int = 0
    ) -> int:
        """Fill a view; return the number of bytes. at_once: the number of bytes that wakes the
        thread."""
        if view and at_once != self._at_once:
            with self.explaining():
                self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, at_once)
            self._at_once = at_once
        total = 0
        while total < len(view) and (got := self.receive(view[total:], deadline_s, flags=flags)):
            total += got
        return total

    @contextlib.contextmanager
    def explaining(self) -> Iterator[None]:
        """Raise the system's errors inside the with statement as RequestErrors."""
        try:
            yield
        except (OSError, ValueError) as error:
            raise self._failure(error, self.origin) from None

    def _failure(self, error: Exception, origin: WebOrigin | None) -> RequestError:
        if self._is_aborted:
            return RequestError("refused", "closed")
        return request_failure(error, origin, read_timeout_s=self.timeouts.read_s)

    def abort(self) -> None:
        """End the connection from any thread; threads that wait for it raise an error."""
        self._is_aborted = True
        with contextlib.suppress(OSError):
            # The plain socket's method, because that of a TLS socket isn't thread-safe.
            socket.socket.shutdown(self.sock, socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket. Safe to call twice."""
        with contextlib.suppress(OSError, ValueError):
            self.sock.close()


def parse_head(head: str) -> tuple[int, dict[str, str]]:
    """Parse the status and the headers, by lower-case name, of an answer's head; ":old" is set for
    HTTP/1.0. Raises RequestError."""
    first, *lines = head.split("\r\n")
    protocol, _, rest = first.partition(" ")
    status = rest[:3]
    if protocol not in ("HTTP/1.1", "HTTP/1.0") or not status.isdigit() or len(status) < 3:
        raise RequestError("transient", "the answer isn't HTTP")
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


def _addresses(host: str, port: int) -> list[tuple[int, Any]]:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [(int(family), address) for family, _, _, _, address in found]


@dataclass(eq=False, repr=False, kw_only=True)
class ConnectionPool:
    """The connections of a client: opened directly or through a proxy, and kept by origin. Safe for
    several threads.

    tls: returns the context, called at the first https request. resolve: looks up names, as
    (family, address). public: returns True for public addresses. Tests replace the last two.
    """

    timeouts: Timeouts
    proxies: Proxies
    tls: Callable[[], ssl.SSLContext]
    resolve: Callable[[str, int], list[tuple[int, Any]]] = _addresses
    public: Callable[[str], bool] = is_public

    def __post_init__(self) -> None:
        self._tls: ssl.SSLContext | None = None
        self._tls_lock = threading.Lock()
        self._lock = threading.Lock()
        self._idle: dict[WebOrigin, list[Connection]] = {}
        self._live: set[Connection] = set()
        self._is_aborted = False
        weakref.finalize(self, _close_all, self._idle)

    # -- kept connections

    def take(self, origin: WebOrigin, *, only_public: bool) -> Connection | None:
        """Return a kept connection that still works, or None. Raises RequestError."""
        now_s = time.monotonic()
        while True:
            with self._lock:
                self._check()
                kept = self._idle.get(origin)
                fit = [each for each in kept or () if each.is_public or not only_public]
                if kept is None or not fit:
                    return None
                connection = fit[-1]
                kept.remove(connection)
                self._live.add(connection)
            if connection.is_fit(now_s):
                return connection
            self.put_back(connection, keep=False)

    def add(self, connection: Connection) -> None:
        """Add a new connection, which may not be open yet, so that abort() ends it, too. After
        abort() it raises RequestError."""
        with self._lock:
            self._live.add(connection)
        self._check()

    def put_back(self, connection: Connection, *, keep: bool) -> None:
        """Keep a connection for other requests, or close it. Safe to call twice."""
        with self._lock:
            if connection not in self._live:
                return
            self._live.discard(connection)
            keep = keep and not self._is_aborted
            if keep:
                connection.rest()
                self._idle.setdefault(connection.origin, []).append(connection)
        if not keep:
            connection.close()

    def _check(self) -> None:
        if self._is_aborted:
            raise RequestError("refused", "closed")

    def abort(self) -> None:
        """End all requests, now and later. Safe to call twice."""
        with self._lock:
            self._is_aborted = True
            live = list(self._live)
        for connection in live:
            connection.abort()
        _close_all(self._idle)

    # -- new connections

    def connect(self, origin: WebOrigin, *, only_public: bool) -> Connection:
        """Open a connection to an origin. only_public: refuse addresses that aren't public. Raises
        RequestError."""
        deadline_s = time.monotonic() + self.timeouts.connect_s
        proxy = self.proxies.of(origin)
        if proxy is None:
            connection = self._dial(origin.host, origin.port, only_public, deadline_s, origin)
        else:
            # The proxy looks names up itself: only addresses and this machine's names can be
            # checked.
            is_private = _is_literal(origin.host) and not self.public(origin.host)
            if only_public and (is_private or origin.host.rpartition(".")[2] == "localhost"):
                raise RequestError("refused", f"a public server redirects to {origin.url}")
            host, port, login = _proxy_parts(proxy)
            connection = self._dial(host, port, False, deadline_s, origin)
            connection.is_public = not is_private
        try:
            if proxy is not None and origin.scheme == "http":
                connection.prefix, connection.proxy_headers = origin.url, login
            elif proxy is not None:
                _open_tunnel(connection, login, deadline_s)
            if origin.scheme == "https":
                with connection.explaining():
                    self._secure(connection, origin.host, deadline_s)
            connection.watch()
        except BaseException:
            self.put_back(connection, keep=False)
            raise
        return connection

    def _dial(
        self, host: str, port: int, only_public: bool, deadline_s: float, origin: WebOrigin
    ) -> Connection:
        """Open a plain connection. The check and the connection use the same address, so that a
        name can't resolve to different ones."""
        try:
            found = self.resolve(host, port)
        except (OSError, ValueError) as error:
            raise self._failure(error, origin) from None
        last: Exception | None = None
        for number, (family, address) in enumerate(found):
            public = self.public(address[0])
            if only_public and not public:
                continue
            sock = socket.socket(family, socket.SOCK_STREAM)
            connection = Connection(sock, origin, is_public=public, timeouts=self.timeouts)
            try:
                self.add(connection)
                left_s = deadline_s - time.monotonic()
                sock.settimeout(max(0.05, left_s / (len(found) - number)))
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                sock.connect(address)
            except BaseException as failed:
                self.put_back(connection, keep=False)
                if not isinstance(failed, OSError):
                    raise
                last = failed
            else:
                return connection
        if last is None:
            raise RequestError(
                "refused",
                f"a public server redirects to {origin.url}, which is an address of this machine "
                "or network: Penstock doesn't follow such redirects",
            )
        if isinstance(last, TimeoutError):
            raise RequestError(
                "transient", f"no connection to {origin.url} in {self.timeouts.connect_s:.3g} s"
            )
        raise self._failure(last, origin)

    def _failure(self, error: Exception, origin: WebOrigin) -> RequestError:
        self._check()
        return request_failure(error, origin, read_timeout_s=self.timeouts.read_s)

    def _secure(self, connection: Connection, host: str, deadline_s: float) -> None:
        with self._tls_lock:
            if self._tls is None:
                self._tls = self.tls()
            context = self._tls
        connection.sock.settimeout(self.timeouts.patience_s(deadline_s))
        connection.sock = context.wrap_socket(
            connection.sock, server_hostname=host, do_handshake_on_connect=False
        )
        connection.sock.do_handshake()


def _close_all(idle: dict[WebOrigin, list[Connection]]) -> None:
    """Close the idle connections of a pool that was aborted or destroyed."""
    while idle:
        for connection in idle.popitem()[1]:
            connection.close()


def _proxy_parts(proxy: str) -> tuple[str, int, str]:
    """Return the host and the port of a proxy, and the header that logs in to it."""
    parts = urlsplit(proxy)
    if parts.scheme != "http" or not parts.hostname:
        raise RequestError("refused", f"a proxy of {parts.scheme}://, wanted http://host:port")
    login = ""
    if parts.username is not None:
        user = unquote(parts.username), unquote(parts.password or "")
        login = f"Proxy-Authorization: {basic_auth(user)}\r\n"
    return parts.hostname, parts.port or 80, login


def _open_tunnel(connection: Connection, login: str, deadline_s: float) -> None:
    """Let a proxy connect to the origin."""
    host = connection.origin.url.partition("://")[2]
    head = f"CONNECT {host} HTTP/1.1\r\nHost: {host}\r\n{login}\r\n"
    connection.send(head, b"", deadline_s)
    status = connection.read_head(deadline_s)[0]
    if status != 200:
        raise RequestError(
            "denied" if status in (403, 407) else "transient",
            f"the proxy answered with status {status}",
        )


def _is_literal(host: str) -> bool:
    return ":" in host or host.replace(".", "").isdigit()
