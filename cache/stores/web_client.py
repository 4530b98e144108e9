"""HTTP/1.1 requests over connections that are kept, checked, bounded and cut at any moment.

Why not obstore, urllib3 or aiohttp: none of them lets one refuse a redirect's address, see every
header and cut a connection that hangs, at a price below obstore's. Measured on a loopback nginx,
client CPU-seconds a GB: 8 MiB ranges 0.32 (obstore 0.47), 100 KB ranges 0.5 (obstore 0.6, urllib's
`http.client` 0.9). Only plain answers with a Content-Length take the short way; chunked ones and
those that end with the connection are `http.client`'s.

Every read has a limit in bytes and in time. `cut()` ends what hangs, in any phase but a name's
lookup.
"""

from __future__ import annotations

import contextlib
import errno
import io
import select
import socket
import threading
import time
import weakref
from dataclasses import dataclass, field
from functools import lru_cache
from http.client import HTTPException, HTTPResponse
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

import numpy as np

from penstock.cache.base.store import RequestError
from penstock.cache.stores.tls import REMEDY, certificate_fault
from penstock.cache.stores.web_address import (
    MOST_REDIRECTS,
    Origin,
    is_public,
    origin_of,
    redirected,
    target_of,
)

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable, Iterator, Mapping

_HEAD_BYTES = 64 * 2**10
_FIRST_READ = 16 * 2**10
_ERROR_BYTES = 16 * 2**10
"""So much of the body of an answer that isn't a success is read."""
_STEP = 2**20
_IDLE_S = 60.0
"""Gateways forget connections that are idle for longer, and then a request on one hangs."""
_REDIRECTS = (301, 302, 303, 307, 308)
_UNREACHABLE = frozenset(
    {errno.ECONNREFUSED, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.ENETDOWN}
)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a request goes. is_origin: it may have the user's headers; from_public: a public server
    sent it there, so that only public addresses will do."""

    url: str
    is_origin: bool = True
    from_public: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Proxies:
    """Proxies by scheme ("http", "https", "all": http://[user:password@]host:port), and hosts that
    are reached without (NO_PROXY's syntax)."""

    by_scheme: Mapping[str, str] = field(default_factory=dict)
    excludes: str = ""

    @classmethod
    def of_environment(cls) -> Proxies:
        """What the environment says, as urllib understands it."""
        from urllib.request import getproxies_environment

        found = dict(getproxies_environment())
        return cls(excludes=found.pop("no", ""), by_scheme=found)

    def of(self, origin: Origin) -> str | None:
        """The proxy for an origin; None: it is reached directly."""
        found = self.by_scheme.get(origin.scheme) or self.by_scheme.get("all")
        if not found:
            return None
        from urllib.request import proxy_bypass_environment  # type: ignore[attr-defined]

        host = f"{origin.host}:{origin.port}"
        if proxy_bypass_environment(host, {"no": self.excludes, **self.by_scheme}):
            return None
        return found if "://" in found else f"http://{found}"


class _StaleError(RequestError):
    """A kept connection turned out to be closed, before anything of an answer came."""

    def __init__(self) -> None:
        super().__init__("transient", "the server closed the connection")


class _Connection:
    """One connection. is_kept: it had a request before; buffer: what is read ahead."""

    def __init__(self, sock: socket.socket, *, is_public: bool) -> None:
        self.sock = sock
        self.is_public = is_public
        self.is_kept = False
        self.idle_s = 0.0
        self.prefix = ""  # of targets, for a proxy
        self.more = ""  # headers, for a proxy
        self.buffer = bytearray(_FIRST_READ)
        self._poll = select.poll()

    def watch(self) -> None:
        self._poll.register(self.sock, select.POLLIN)

    def is_fit(self, now_s: float) -> bool:
        """Whether a kept connection can be used again: open, and nothing unasked came on it."""
        return now_s - self.idle_s < _IDLE_S and not self._poll.poll(0)

    def cut(self) -> None:
        """End it from any thread: who waits for it gets an error."""
        with contextlib.suppress(OSError):
            # The plain socket's method: that of a TLS one isn't for other threads.
            socket.socket.shutdown(self.sock, socket.SHUT_RDWR)

    def close(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            self.sock.close()


class Reply:
    """An answer whose head has come. headers: by lower-case name. Read at most once, with a limit;
    what isn't read in full is cut off."""

    def __init__(
        self,
        client: WebClient,
        connection: _Connection,
        origin: Origin,
        *,
        place: Place,
        method: str,
        deadline_s: float,
    ) -> None:
        self._client, self._connection, self._origin = client, connection, origin
        self._method = method
        self._deadline_s = deadline_s
        self.place = place
        self.is_public = connection.is_public
        self.status, self.headers, self._begin, self._end = client._head(connection, deadline_s)
        keep = self.headers.get("connection", "").lower()
        self._keeps = "close" not in keep and not self.headers.get(":old")
        self._done = False

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
        room = np.empty(length, np.uint8)
        view = room.data
        there = min(self._end - self._begin, length)
        view[:there] = memoryview(self._connection.buffer)[self._begin : self._begin + there]
        self._keeps = self._keeps and self._end - self._begin <= length
        while there < length:
            got = self._client._receive(self._connection, view[there:], self._deadline_s)
            if not got:
                raise RequestError(
                    "transient", f"the connection ended after {there} of {length} bytes"
                )
            there += got
        self._done = True
        return view

    def error_body(self) -> bytes:
        """The beginning of a body that tells what went wrong."""
        with contextlib.suppress(RequestError):
            length = self.length
            if length is None or length <= _ERROR_BYTES:
                return bytes(
                    self._read_stream(_ERROR_BYTES, cut=True)
                    if length is None
                    else self.read(_ERROR_BYTES)
                )
        return b""

    def close(self) -> None:
        """Keep the connection for others, or end it if something of the body is left."""
        done = self._done or self._has_no_body() or self.length == 0
        self._client._put_back(self._connection, self._origin, keep=done and self._keeps)

    def _has_no_body(self) -> bool:
        return self._method == "HEAD" or self.status in (204, 304)

    def _read_stream(self, most: int, *, cut: bool = False) -> memoryview:
        """A body whose length isn't told. cut: take its beginning."""
        self._keeps = False
        rest = _Rest(
            bytes(self._connection.buffer[: self._end]),
            lambda view: self._client._receive(self._connection, view, self._deadline_s),
        )
        response = HTTPResponse(_Held(io.BufferedReader(rest)), method=self._method)  # type: ignore[arg-type]
        parts: list[bytes] = []
        total = 0
        try:
            response.begin()
            while total <= most and (part := response.read(min(_STEP, most + 1 - total))):
                parts.append(part)
                total += len(part)
        except (HTTPException, ValueError) as error:
            raise RequestError("transient", f"a broken answer ({type(error).__name__})") from None
        if total > most and not cut:
            raise _too_long(None, most)
        self._done = total <= most
        return memoryview(b"".join(parts)[:most])


def _too_long(length: int | None, most: int) -> RequestError:
    told = "without end" if length is None else f"of {length} bytes"
    return RequestError(
        "refused",
        f"the server sends an answer {told} where {most} bytes were asked for: that is the "
        "server's fault (or a proxy's), and nothing of it was used",
    )


class _Rest(io.RawIOBase):
    """What was read of an answer, and then what comes."""

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


class _Held:
    """What HTTPResponse wants of a socket."""

    def __init__(self, file: io.BufferedReader) -> None:
        self._file = file

    def makefile(self, mode: str) -> io.BufferedReader:
        del mode
        return self._file


class WebClient:
    """Requests to any number of origins, from any number of threads; not across fork.

    timeout_s: for one request, all of it; read_timeout_s: without a byte. tls: makes the context at
    the first https request. resolve, public: of names and addresses, for tests.
    """

    def __init__(
        self,
        *,
        connect_timeout_s: float,
        read_timeout_s: float,
        timeout_s: float,
        tls: Callable[[], ssl.SSLContext],
        proxies: Proxies | None = None,
        agent: str = "penstock",
        resolve: Callable[[str, int], list[tuple[int, Any]]] | None = None,
        public: Callable[[str], bool] = is_public,
    ) -> None:
        self._connect_timeout_s = connect_timeout_s
        self._read_timeout_s = read_timeout_s
        self._timeout_s = timeout_s
        self._make_tls = tls
        self._tls: ssl.SSLContext | None = None
        self._proxies = proxies if proxies is not None else Proxies.of_environment()
        self._agent = agent
        self._resolve = resolve or _resolved
        self._public = public
        self._lock = threading.Lock()
        self._idle: dict[Origin, list[_Connection]] = {}
        self._live: set[_Connection] = set()
        self._is_cut = False
        weakref.finalize(self, _close_all, self._idle)

    def ask(
        self,
        place: Place,
        *,
        method: str = "GET",
        headers: Mapping[str, str],
        own: Mapping[str, str],
        body: Any = b"",
    ) -> Reply:
        """Send a request and follow redirects; the answer, to be closed. headers: the user's, which
        only the origin gets; own: of this request, which all get. Raises RequestError."""
        deadline_s = time.monotonic() + self._timeout_s
        for _ in range(MOST_REDIRECTS + 1):
            try:
                reply = self._ask_once(place, method, headers, own, body, deadline_s)
            except _StaleError:  # a server may close a connection while a request is on its way
                reply = self._ask_once(
                    place, method, headers, own, body, deadline_s, may_be_kept=False
                )
            location = reply.headers.get("location")
            if reply.status not in _REDIRECTS or location is None:
                return reply
            try:
                if body:
                    raise RequestError("refused", "the server redirects an upload")
                reply.error_body()  # so that the connection can be used again
                url = redirected(place.url, location)
            finally:
                reply.close()
            place = Place(
                url,
                is_origin=place.is_origin and origin_of(url) == origin_of(place.url),
                from_public=place.from_public or reply.is_public,
            )
        raise RequestError("refused", f"the server redirects more than {MOST_REDIRECTS} times")

    def cut(self) -> None:
        """End all requests, now and later. Safe to call twice."""
        with self._lock:
            self._is_cut = True
            live = list(self._live)
            idle = [each for some in self._idle.values() for each in some]
            self._idle.clear()
        for connection in live:
            connection.cut()
        for connection in idle:
            connection.close()

    # -- one request -----------------------------------------------------------------------------

    def _ask_once(
        self,
        place: Place,
        method: str,
        headers: Mapping[str, str],
        own: Mapping[str, str],
        body: Any,
        deadline_s: float,
        *,
        may_be_kept: bool = True,
    ) -> Reply:
        origin = _origin(place.url)
        if may_be_kept:
            connection = self._take(origin, only_public=place.from_public)
        else:
            connection = self._connect(origin, only_public=place.from_public)
        try:
            with self._explained(origin):
                lines = [
                    f"{method} {connection.prefix}{target_of(place.url)} HTTP/1.1\r\n"
                    f"Host: {origin.host_header}\r\nAccept-Encoding: identity\r\n{connection.more}"
                ]
                given = {**headers, **own} if place.is_origin else own
                if not any(name.lower() == "user-agent" for name in given):
                    lines.append(f"User-Agent: {self._agent}\r\n")
                lines += [f"{name}: {value}\r\n" for name, value in given.items()]
                if body or method == "PUT":
                    lines.append(f"Content-Length: {len(body)}\r\n")
                connection.sock.settimeout(self._patience_s(deadline_s))
                try:
                    connection.sock.sendall("".join([*lines, "\r\n"]).encode("latin-1"))
                except (ConnectionResetError, BrokenPipeError):
                    if connection.is_kept and not self._is_cut:
                        raise _StaleError from None
                    raise
                for start in range(0, len(body), _STEP):
                    connection.sock.settimeout(self._patience_s(deadline_s))
                    connection.sock.sendall(memoryview(body)[start : start + _STEP])
            return Reply(
                self, connection, origin, place=place, method=method, deadline_s=deadline_s
            )
        except BaseException:
            self._put_back(connection, origin, keep=False)
            raise

    def _head(
        self, connection: _Connection, deadline_s: float
    ) -> tuple[int, dict[str, str], int, int]:
        """(status, headers, where the body begins and what was read ends, in the buffer)."""
        begin = there = 0
        buffer = connection.buffer
        while True:
            end = buffer.find(b"\r\n\r\n", begin, there)
            if end < 0:
                if there >= _HEAD_BYTES:
                    raise RequestError("refused", "the head of the server's answer has no end")
                if there == len(buffer):
                    buffer.extend(bytes(len(buffer)))
                with memoryview(buffer) as view:
                    got = self._receive(connection, view[there:], deadline_s)
                if not got and not there and connection.is_kept:
                    raise _StaleError
                if not got:
                    raise RequestError(
                        "transient", "the connection ended before the answer's head was there"
                    )
                there += got
                continue
            status, headers = _parsed(buffer[begin:end].decode("latin-1"))
            begin = end + 4
            if status >= 200 or status == 101:
                return status, headers, begin, there

    def _receive(self, connection: _Connection, room: memoryview, deadline_s: float) -> int:
        try:
            connection.sock.settimeout(self._patience_s(deadline_s))
            got = connection.sock.recv_into(room)
            if not got and self._is_cut:
                raise RequestError("refused", "closed")
            return got
        except (ConnectionResetError, BrokenPipeError) as error:
            # As if it had ended in peace: whoever reads knows what is missing.
            if self._is_cut:
                raise self._failure(error, None) from None
            return 0
        except (OSError, ValueError) as error:
            raise self._failure(error, None) from None

    def _patience_s(self, deadline_s: float) -> float:
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            raise RequestError("transient", f"no whole answer came in {self._timeout_s:.0f} s")
        return min(self._read_timeout_s, left_s)

    @contextlib.contextmanager
    def _explained(self, origin: Origin | None) -> Iterator[None]:
        """What the system says becomes a RequestError."""
        try:
            yield
        except (OSError, ValueError) as error:
            raise self._failure(error, origin) from None

    def _failure(self, error: Exception, origin: Origin | None) -> RequestError:
        if self._is_cut:
            return RequestError("refused", "closed")
        if isinstance(error, TimeoutError) and error.errno is None:
            return RequestError("transient", f"nothing came for {self._read_timeout_s:.3g} s")
        if (fault := certificate_fault(error)) is not None:
            return RequestError("refused", fault, remedy=REMEDY)
        if isinstance(error, UnicodeEncodeError):
            return RequestError("refused", "a header holds what HTTP can't")
        reason = getattr(error, "strerror", None) or type(error).__name__
        if origin is not None:
            reason = f"{reason}: {origin.shown}"
        kind = getattr(error, "errno", None)
        if isinstance(error, socket.gaierror):
            return RequestError("unreachable", f"the name isn't known: {reason}")
        return RequestError("unreachable" if kind in _UNREACHABLE else "transient", reason)

    # -- connections -----------------------------------------------------------------------------

    def _take(self, origin: Origin, *, only_public: bool) -> _Connection:
        now_s = time.monotonic()
        while True:
            with self._lock:
                if self._is_cut:
                    raise RequestError("refused", "closed")
                kept = self._idle.get(origin)
                fit = [each for each in kept or () if each.is_public or not only_public]
                if kept is None or not fit:
                    break
                connection = fit[-1]
                kept.remove(connection)
                self._live.add(connection)
            if connection.is_fit(now_s):
                return connection
            self._put_back(connection, origin, keep=False)
        return self._connect(origin, only_public=only_public)

    def _put_back(self, connection: _Connection, origin: Origin, *, keep: bool) -> None:
        with self._lock:
            if connection not in self._live:
                return
            self._live.discard(connection)
            keep = keep and not self._is_cut
            if keep:
                connection.idle_s = time.monotonic()
                connection.is_kept = True
                if len(connection.buffer) != _FIRST_READ:
                    connection.buffer = bytearray(_FIRST_READ)
                self._idle.setdefault(origin, []).append(connection)
        if not keep:
            connection.close()

    def _connect(self, origin: Origin, *, only_public: bool) -> _Connection:
        deadline_s = time.monotonic() + self._connect_timeout_s
        proxy = self._proxies.of(origin)
        if proxy is None:
            connection = self._dial(origin.host, origin.port, only_public, deadline_s, origin)
        else:
            connection = self._dial_proxy(proxy, origin, only_public, deadline_s)
        try:
            if origin.scheme == "https":
                with self._explained(origin):
                    self._secure(connection, origin.host, deadline_s)
            connection.watch()
        except BaseException:
            self._put_back(connection, origin, keep=False)
            raise
        return connection

    def _dial(
        self, host: str, port: int, only_public: bool, deadline_s: float, origin: Origin
    ) -> _Connection:
        """A plain connection. The address that is connected to is the one that is judged, so a name
        can't mean one thing to the check and another to the connection."""
        with self._explained(origin):
            found = self._resolve(host, port)
        error: Exception | None = None
        for number, (family, address) in enumerate(found):
            public = self._public(address[0])
            if only_public and not public:
                continue
            sock = socket.socket(family, socket.SOCK_STREAM)
            connection = _Connection(sock, is_public=public)
            with self._lock:
                self._live.add(connection)
            try:
                if self._is_cut:
                    raise RequestError("refused", "closed")
                left_s = deadline_s - time.monotonic()
                sock.settimeout(max(0.05, left_s / (len(found) - number)))
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                sock.connect(address)
            except OSError as failed:
                error = failed
                self._put_back(connection, origin, keep=False)
                continue
            except BaseException:
                self._put_back(connection, origin, keep=False)
                raise
            return connection
        if error is None:
            raise RequestError(
                "refused",
                f"a public server redirects to {origin.shown}, which is an address of this machine "
                "or network: that isn't followed",
            )
        if isinstance(error, TimeoutError):
            raise RequestError(
                "transient",
                f"no connection to {origin.shown} in {self._connect_timeout_s:.3g} s",
            )
        raise self._failure(error, origin)

    def _dial_proxy(
        self, proxy: str, origin: Origin, only_public: bool, deadline_s: float
    ) -> _Connection:
        """Through a proxy, which looks names up itself: only addresses and this machine's names can
        be judged here."""
        parts = urlsplit(proxy)
        if parts.scheme != "http" or not parts.hostname:
            raise RequestError(
                "refused", f"a proxy of the kind {parts.scheme}://, wanted http://host:port"
            )
        is_private = _is_literal(origin.host) and not self._public(origin.host)
        if only_public and (is_private or origin.host.rpartition(".")[2] == "localhost"):
            raise RequestError("refused", f"a public server redirects to {origin.shown}")
        connection = self._dial(parts.hostname, parts.port or 80, False, deadline_s, origin)
        connection.is_public = not is_private
        login = ""
        if parts.username is not None:
            from penstock.cache.stores.options import basic_auth

            user = unquote(parts.username), unquote(parts.password or "")
            login = f"Proxy-Authorization: {basic_auth(user)}\r\n"
        if origin.scheme == "http":
            connection.prefix = origin.shown
            connection.more = login
            return connection
        try:
            host = origin.shown.partition("://")[2]
            with self._explained(origin):
                connection.sock.settimeout(self._patience_s(deadline_s))
                connection.sock.sendall(
                    f"CONNECT {host} HTTP/1.1\r\nHost: {host}\r\n{login}\r\n".encode("latin-1")
                )
            status = self._head(connection, deadline_s)[0]
            if status != 200:
                raise RequestError(
                    "denied" if status in (403, 407) else "transient",
                    f"the proxy answered with status {status}",
                )
        except BaseException:
            self._put_back(connection, origin, keep=False)
            raise
        return connection

    def _secure(self, connection: _Connection, host: str, deadline_s: float) -> None:
        with self._lock:
            if self._tls is None:
                self._tls = self._make_tls()
            context = self._tls
        connection.sock.settimeout(self._patience_s(deadline_s))
        connection.sock = context.wrap_socket(
            connection.sock, server_hostname=host, do_handshake_on_connect=False
        )
        connection.sock.do_handshake()


def _close_all(idle: dict[Origin, list[_Connection]]) -> None:
    """Of a client that nobody has any more."""
    while idle:
        for connection in idle.popitem()[1]:
            connection.close()


def _resolved(host: str, port: int) -> list[tuple[int, Any]]:
    """Addresses of a name, as (family, address)."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [(int(family), address) for family, _, _, _, address in found]


def _is_literal(host: str) -> bool:
    return ":" in host or host.replace(".", "").isdigit()


@lru_cache(maxsize=1024)
def _origin(url: str) -> Origin:
    try:
        return origin_of(url)
    except (ValueError, UnicodeError):
        raise RequestError("refused", "not an http or https URL with a host") from None


def _parsed(head: str) -> tuple[int, dict[str, str]]:
    """Status and headers; ":old": the server speaks HTTP/1.0."""
    first, *lines = head.split("\r\n")
    protocol, _, rest = first.partition(" ")
    status = rest[:3]
    if protocol not in ("HTTP/1.1", "HTTP/1.0") or not status.isdigit() or len(status) < 3:
        raise RequestError("transient", "what came isn't an answer of HTTP")
    headers: dict[str, str] = {}
    for line in lines:
        name, colon, value = line.partition(":")
        if not colon or name != name.strip():
            raise RequestError("transient", "the head of the server's answer is broken")
        name, value = name.lower(), value.strip()
        if name in headers:
            if name == "content-length" and headers[name] != value:
                raise RequestError("transient", "the server tells two lengths of one answer")
            value = value if name in ("content-length", "location") else f"{headers[name]}, {value}"
        headers[name] = value
    if protocol == "HTTP/1.0" and "keep-alive" not in headers.get("connection", "").lower():
        headers[":old"] = "1"
    return int(status), headers
