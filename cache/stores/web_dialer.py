"""Making connections: names, addresses that may be connected to, proxies and TLS."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from penstock.cache.base.store import RequestError
from penstock.cache.stores.logins import basic_auth
from penstock.cache.stores.web_address import is_public
from penstock.cache.stores.web_connection import Connection, request_failure

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable, Iterator

    from penstock.cache.stores.proxies import Proxies
    from penstock.cache.stores.web_address import WebOrigin
    from penstock.cache.stores.web_connection import Timeouts
    from penstock.cache.stores.web_pool import ConnectionPool


class Dialer:
    """A Dialer makes connections to origins, directly or through proxies.

    pool: has them from the first moment, so that it can end them. tls: makes the context at the
    first https request. resolve, public: of names and addresses, for tests.
    """

    def __init__(
        self,
        pool: ConnectionPool,
        *,
        timeouts: Timeouts,
        proxies: Proxies,
        tls: Callable[[], ssl.SSLContext],
        make: type[Connection] = Connection,
        resolve: Callable[[str, int], list[tuple[int, Any]]] | None = None,
        public: Callable[[str], bool] = is_public,
    ) -> None:
        self._pool = pool
        self._timeouts = timeouts
        self._proxies = proxies
        self._make_tls = tls
        self._make = make
        self._tls: ssl.SSLContext | None = None
        self._tls_lock = threading.Lock()
        self._resolve = resolve or _addresses
        self._public = public

    def connect(self, origin: WebOrigin, *, only_public: bool) -> Connection:
        """Open a connection to an origin. only_public: to an address of the internet, or not at
        all. Raises RequestError."""
        deadline_s = time.monotonic() + self._timeouts.connect_s
        proxy = self._proxies.of(origin)
        if proxy is None:
            connection = self._dial(origin.host, origin.port, only_public, deadline_s, origin)
        else:
            connection = self._dial_proxy(proxy, origin, only_public, deadline_s)
        with self._kept_if_well(connection):
            if origin.scheme == "https":
                with connection.explaining():
                    self._secure(connection, origin.host, deadline_s)
            connection.watch()
        return connection

    @contextlib.contextmanager
    def _kept_if_well(self, connection: Connection) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self._pool.put_back(connection, keep=False)
            raise

    def _dial(
        self, host: str, port: int, only_public: bool, deadline_s: float, origin: WebOrigin
    ) -> Connection:
        """A plain connection. The address that is connected to is the one that is judged, so a name
        can't mean one thing to the check and another to the connection."""
        try:
            found = self._resolve(host, port)
        except (OSError, ValueError) as error:
            raise self._failure(error, origin) from None
        last: Exception | None = None
        for number, (family, address) in enumerate(found):
            public = self._public(address[0])
            if only_public and not public:
                continue
            sock = socket.socket(family, socket.SOCK_STREAM)
            connection = self._make(sock, origin, is_public=public, timeouts=self._timeouts)
            try:
                with self._kept_if_well(connection):
                    self._pool.add(connection)
                    left_s = deadline_s - time.monotonic()
                    sock.settimeout(max(0.05, left_s / (len(found) - number)))
                    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    sock.connect(address)
            except OSError as failed:
                last = failed
                continue
            return connection
        if last is None:
            raise RequestError(
                "refused",
                f"a public server redirects to {origin.url}, which is an address of this machine "
                "or network: such a redirect isn't followed",
            )
        if isinstance(last, TimeoutError):
            raise RequestError(
                "transient", f"no connection to {origin.url} in {self._timeouts.connect_s:.3g} s"
            )
        raise self._failure(last, origin)

    def _failure(self, error: Exception, origin: WebOrigin) -> RequestError:
        self._pool.check()
        return request_failure(error, origin, read_timeout_s=self._timeouts.read_s)

    def _dial_proxy(
        self, proxy: str, origin: WebOrigin, only_public: bool, deadline_s: float
    ) -> Connection:
        """Through a proxy, which looks names up itself: only addresses and this machine's names can
        be judged here."""
        parts = urlsplit(proxy)
        if parts.scheme != "http" or not parts.hostname:
            raise RequestError(
                "refused", f"a proxy of the kind {parts.scheme}://, wanted http://host:port"
            )
        is_private = _is_literal(origin.host) and not self._public(origin.host)
        if only_public and (is_private or origin.host.rpartition(".")[2] == "localhost"):
            raise RequestError("refused", f"a public server redirects to {origin.url}")
        connection = self._dial(parts.hostname, parts.port or 80, False, deadline_s, origin)
        connection.is_public = not is_private
        login = ""
        if parts.username is not None:
            user = unquote(parts.username), unquote(parts.password or "")
            login = f"Proxy-Authorization: {basic_auth(user)}\r\n"
        if origin.scheme == "http":
            connection.prefix = origin.url
            connection.proxy_headers = login
            return connection
        with self._kept_if_well(connection):
            host = origin.url.partition("://")[2]
            head = f"CONNECT {host} HTTP/1.1\r\nHost: {host}\r\n{login}\r\n"
            connection.send(head, b"", deadline_s)
            status = connection.read_head(deadline_s).status
            if status != 200:
                raise RequestError(
                    "denied" if status in (403, 407) else "transient",
                    f"the proxy answered with status {status}",
                )
        return connection

    def _secure(self, connection: Connection, host: str, deadline_s: float) -> None:
        with self._tls_lock:
            if self._tls is None:
                self._tls = self._make_tls()
            context = self._tls
        connection.sock.settimeout(self._timeouts.patience_s(deadline_s))
        connection.sock = context.wrap_socket(
            connection.sock, server_hostname=host, do_handshake_on_connect=False
        )
        connection.sock.do_handshake()


def _addresses(host: str, port: int) -> list[tuple[int, Any]]:
    """Addresses of a name, as (family, address)."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [(int(family), address) for family, _, _, _, address in found]


def _is_literal(host: str) -> bool:
    return ":" in host or host.replace(".", "").isdigit()
