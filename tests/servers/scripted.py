"""A web server whose answers a function writes; it records its requests. See tests/servers."""

from __future__ import annotations

import contextlib
import socket
import socketserver
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable, Iterator


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A request. target: path and query. headers: by lower-case name."""

    method: str
    target: str
    headers: dict[str, str]

    @property
    def path(self) -> str:
        return self.target.partition("?")[0]

    def span(self) -> tuple[int, int] | None:
        """Return the requested range of bytes, or None."""
        found = self.headers.get("range", "").removeprefix("bytes=")
        if not found:
            return None
        start, _, end = found.partition("-")
        return int(start), int(end) + 1


class Talk:
    """The answer to one request while it is written."""

    def __init__(self, handler: BaseHTTPRequestHandler, closing: threading.Event) -> None:
        self._handler = handler
        self.closing = closing
        self.sent_bytes = 0

    def head(self, status: int, headers: dict[str, str] | None = None) -> None:
        self._handler.send_response(status)
        for name, value in (headers or {}).items():
            self._handler.send_header(name, value)
        self._handler.end_headers()
        if "Content-Length" not in (headers or {}):
            self._handler.close_connection = True

    def write(self, data: bytes) -> bool:
        """Write a part of the body; return False if the client has closed the connection."""
        if self._handler.command == "HEAD":
            return False
        try:
            self._handler.wfile.write(data)
        except OSError:
            self._handler.close_connection = True
            return False
        self.sent_bytes += len(data)
        return True

    def answer(self, status: int, data: bytes = b"", headers: dict[str, str] | None = None) -> None:
        self.head(status, {"Content-Length": str(len(data)), **(headers or {})})
        self.write(data)

    def serve(self, data: bytes, asked: Asked, headers: dict[str, str] | None = None) -> None:
        """Answer with an object, or with the requested range of it."""
        more = {"ETag": '"v1"', **(headers or {})}
        span = asked.span()
        if span is None:
            return self.answer(200, data, more)
        end = min(span[1], len(data))
        more["Content-Range"] = f"bytes {span[0]}-{end - 1}/{len(data)}"
        return self.answer(206, data[span[0] : end], more)

    def redirect(self, url: str, status: int = 302) -> None:
        self.answer(status, b"", {"Location": url})

    def endless(self, status: int, headers: dict[str, str]) -> None:
        """Answer with a head and a body that ends when the client closes the connection."""
        self.head(status, headers)
        block = bytes(2**16)
        while not self.closing.is_set() and self.write(block):
            pass


@dataclass
class ScriptedServer:
    """A running server. url: of its root. asked: all requests so far. talks: their answers."""

    url: str
    asked: list[Asked] = field(default_factory=list)
    talks: list[Talk] = field(default_factory=list)

    @property
    def sent_bytes(self) -> int:
        return sum(talk.sent_bytes for talk in self.talks)

    def seen(self, name: str) -> list[str]:
        """Return the values of a header in all requests."""
        return [asked.headers[name] for asked in self.asked if name in asked.headers]


@contextlib.contextmanager
def scripted(
    act: Callable[[Talk, Asked], None],
    *,
    host: str = "127.0.0.1",
    tls: ssl.SSLContext | None = None,
) -> Iterator[ScriptedServer]:
    """Run a server that answers by act(talk, asked), on one thread per connection."""
    closing = threading.Event()
    lock = threading.Lock()
    connections: set[socket.socket] = set()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def setup(self) -> None:
            with lock:
                connections.add(self.request)
            super().setup()

        def finish(self) -> None:
            with lock:
                connections.discard(self.request)
            with contextlib.suppress(OSError):
                super().finish()

        def log_message(self, *args: Any) -> None:
            del args

        def serve(self) -> None:
            length = int(self.headers.get("Content-Length", 0))
            self.rfile.read(length)
            asked = Asked(
                method=self.command,
                target=self.path,
                headers={name.lower(): text for name, text in self.headers.items()},
            )
            talk = Talk(self, closing)
            with lock:
                server.asked.append(asked)
                server.talks.append(talk)
            act(talk, asked)

        do_GET = do_HEAD = do_PUT = serve

    class Listener(socketserver.ThreadingTCPServer):
        allow_reuse_address = True
        daemon_threads = True
        block_on_close = False
        request_queue_size = 64

        def handle_error(self, request: Any, client_address: Any) -> None:
            """Clients that went away are none of the tests' business."""

        def finish_request(self, request: Any, client_address: Any) -> None:
            if tls is None:
                super().finish_request(request, client_address)
                return
            # Here, on the connection's own thread.
            with tls.wrap_socket(request, server_side=True, do_handshake_on_connect=False) as safe:
                safe.do_handshake()
                super().finish_request(safe, client_address)

    listener = Listener((host, 0), Handler)
    scheme = "http" if tls is None else "https"
    server = ScriptedServer(url=f"{scheme}://{host}:{listener.server_address[1]}")
    thread = threading.Thread(target=listener.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield server
    finally:
        closing.set()
        listener.shutdown()
        thread.join(10)
        listener.server_close()
        with lock:
            left = list(connections)
        for connection in left:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
