"""A web server with injected faults: it serves files, ranges, etags, indexes and S3 listings."""

from __future__ import annotations

import contextlib
import hashlib
import html
import os
import random
import re
import socket
import socketserver
import threading
from collections import Counter
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, quote, unquote_to_bytes, urlsplit
from xml.sax.saxutils import escape

if TYPE_CHECKING:
    from collections.abc import Iterator

FAULTS = (
    "500",
    "503",
    "429",
    "hang",  # no answer
    "hang_body",  # the head and a part of the body, then nothing
    "reset",  # the connection is reset before the head
    "reset_body",  # … in the body
    "short",  # the connection ends in the body, politely
    "whole",  # 200 with the whole object for a range
    "wrong_range",  # 206 with other bytes, and said so
    "other_etag",  # a changed object, served despite If-Match
)
LIMIT_S = 120.0
"""A hang ends when the server closes, or after this."""
_RANGE = re.compile(r"bytes=(\d+)-(\d*)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """The faults of a server.

    p: share of requests for files that fail. kinds: of faults, from FAULTS. also: beginnings of the
    paths that may fail, "" for all. times: how often one range may fail, None for no limit.
    retry_after: header of 503 and 429. latency_s: before each answer. bytes_per_s: of each
    connection. listings: listings fail too, with the kinds that a listing can have.
    """

    p: float = 0.0
    kinds: tuple[str, ...] = FAULTS
    seed: int = 0
    also: str = ""
    times: int | None = None
    retry_after: str | None = None
    latency_s: float = 0.0
    bytes_per_s: float | None = None
    listings: bool = False

    def choose(self, path: str, what: str, nth: int) -> str | None:
        """Return the fault of the nth request (from 0) for `what` of a path, or None."""
        if not path.startswith(self.also) or (self.times is not None and nth >= self.times):
            return None
        text = f"{self.seed}\0{path}\0{what}\0{nth}".encode("utf-8", "surrogateescape")
        rng = random.Random(hashlib.sha256(text).digest())
        return rng.choice(self.kinds) if rng.random() < self.p else None


class _Listener(socketserver.ThreadingTCPServer):
    allow_reuse_address = True
    daemon_threads = True
    block_on_close = False
    request_queue_size = 256
    owner: Server

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients that went away are none of the tests' business."""


class Server:
    """A server of a folder until close(). It counts by path, from the start or from reset().

    requests_of, bytes_of: requests, and body bytes written. headers_of, targets_of: of the last
    request. answers: by status. faulted: by kind. in_flight, peak_in_flight: requests being served.
    """

    def __init__(self, folder: str | os.PathLike[str], faults: Faults | None = None) -> None:
        self.folder = os.fspath(folder)
        self.faults = faults or Faults()
        self.closing = threading.Event()
        self.lock = threading.Lock()
        self.connections: set[socket.socket] = set()
        self.in_flight = 0
        self.reset()
        self._listener: _Listener | None = None
        self._thread: threading.Thread | None = None
        self._listen(0)

    def _listen(self, port: int) -> None:
        listener = _Listener(("127.0.0.1", port), _Handler)
        listener.owner = self
        self.port = listener.server_address[1]
        self._thread = threading.Thread(
            target=listener.serve_forever, kwargs={"poll_interval": 0.02}, name="test-server"
        )
        self._thread.start()
        self._listener = listener

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def s3_options(self) -> dict[str, Any]:
        """The storage_options for s3:// URLs of this server; the top folders are the buckets."""
        return {"key": "k" * 20, "secret": "s" * 40, "endpoint_url": self.url}

    @staticmethod
    def s3(path: str) -> str:
        return f"s3://{path}"

    @property
    def requests(self) -> int:
        with self.lock:
            return sum(self.requests_of.values())

    @property
    def bytes_sent(self) -> int:
        with self.lock:
            return sum(self.bytes_of.values())

    def reset(self) -> None:
        """Reset the counts, and restart the sequence of faults."""
        with self.lock:
            self.requests_of: Counter[str] = Counter()
            self.bytes_of: Counter[str] = Counter()
            self.answers: Counter[int] = Counter()
            self.faulted: Counter[str] = Counter()
            self.asked: Counter[tuple[str, str]] = Counter()
            self.headers_of: dict[str, dict[str, str]] = {}
            self.targets_of: dict[str, str] = {}
            self.peak_in_flight = 0

    def go_away(self) -> None:
        """Refuse connections and cut those that are open."""
        if self._listener is None or self._thread is None:
            return
        self._listener.shutdown()
        self._thread.join(10)
        self._listener.server_close()
        self._listener = None
        self.closing.set()
        with self.lock:
            open_ones = list(self.connections)
        for connection in open_ones:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def come_back(self) -> None:
        """Serve again, at the same port."""
        self.closing = threading.Event()
        self._listen(self.port)

    def close(self) -> None:
        self.go_away()


@contextlib.contextmanager
def serving(folder: str | os.PathLike[str], faults: Faults | None = None) -> Iterator[Server]:
    """Serve a folder's files. See tests/servers/__init__.py."""
    server = Server(folder, faults)
    try:
        yield server
    finally:
        server.close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: _Listener

    def setup(self) -> None:
        super().setup()
        self.owner = self.server.owner
        self.closing = self.owner.closing
        with self.owner.lock:
            self.owner.connections.add(self.connection)

    def finish(self) -> None:
        with self.owner.lock:
            self.owner.connections.discard(self.connection)
        with contextlib.suppress(OSError):
            super().finish()

    def log_message(self, *args: Any) -> None:
        del args

    def do_GET(self) -> None:
        self._serve(with_body=True)

    def do_HEAD(self) -> None:
        self._serve(with_body=False)

    def do_PUT(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        local = self._local()
        os.makedirs(os.path.dirname(local), exist_ok=True)
        with open(local, "wb") as file:
            file.write(body)
        self._answer(200, b"", {"ETag": _etag(local)})

    def _path(self) -> str:
        return os.fsdecode(unquote_to_bytes(urlsplit(self.path).path))

    def _local(self) -> str:
        return os.path.join(self.owner.folder, self._path().strip("/"))

    def _serve(self, *, with_body: bool) -> None:
        owner, path = self.owner, self._path()
        what = f"{self.command} {self.headers.get('Range', '')}"
        with owner.lock:
            owner.requests_of[path] += 1
            owner.headers_of[path] = {name.lower(): text for name, text in self.headers.items()}
            owner.targets_of[path] = self.path
            nth = owner.asked[path, what]
            owner.asked[path, what] += 1
            owner.in_flight += 1
            owner.peak_in_flight = max(owner.peak_in_flight, owner.in_flight)
        try:
            if owner.faults.latency_s:
                self.closing.wait(owner.faults.latency_s)
            query = parse_qs(urlsplit(self.path).query)
            is_listing = "list-type" in query or os.path.isdir(self._local())
            fault = owner.faults.choose(path, what, nth)
            if is_listing and not owner.faults.listings:
                fault = None
            if fault and self._misbehave_before(fault):
                return
            if "list-type" in query:
                self._list(query)
            elif os.path.isdir(self._local()):
                self._index_page()
            elif os.path.isfile(self._local()):
                self._file(with_body=with_body, fault=fault)
            else:
                self._answer(404, b"<Error><Code>NoSuchKey</Code></Error>")
        finally:
            with owner.lock:
                owner.in_flight -= 1

    def _misbehave_before(self, fault: str) -> bool:
        """Misbehave before the answer; return True if the request is finished."""
        with self.owner.lock:
            self.owner.faulted[fault] += 1
        if fault in ("500", "503", "429"):
            after = self.owner.faults.retry_after
            self._answer(int(fault), b"no", {"Retry-After": after} if after else {})
        elif fault == "hang":
            self.closing.wait(LIMIT_S)
            self.close_connection = True
        elif fault == "reset":
            self._reset()
        else:
            return False
        return True

    def _reset(self) -> None:
        """RST instead of FIN: linger 0."""
        self.connection.setsockopt(
            socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00"
        )
        self.close_connection = True
        self.connection.close()

    def _file(self, *, with_body: bool, fault: str | None) -> None:
        local = self._local()
        with open(local, "rb") as file:
            data = file.read()
        etag = _etag(local)
        wanted = self.headers.get("If-Match")
        if wanted not in (None, "*", etag) and fault != "other_etag":
            return self._answer(412, b"")
        headers = {
            "ETag": '"another"' if fault == "other_etag" else etag,
            "Last-Modified": self.date_time_string(int(os.stat(local).st_mtime)),
            "Accept-Ranges": "bytes",
        }
        found = _RANGE.fullmatch(self.headers.get("Range", ""))
        if found is None or fault == "whole":
            return self._answer(200, data, headers, with_body=with_body, fault=fault)
        start = int(found[1])
        end = min(int(found[2]) + 1 if found[2] else len(data), len(data))
        if start >= len(data):
            return self._answer(416, b"", {"Content-Range": f"bytes */{len(data)}"})
        if fault == "wrong_range":
            start, end = (start + 1, end) if end - start > 1 else (0, len(data))
        headers["Content-Range"] = f"bytes {start}-{end - 1}/{len(data)}"
        return self._answer(206, data[start:end], headers, with_body=with_body, fault=fault)

    def _answer(
        self,
        status: int,
        body: bytes,
        headers: dict[str, str] | None = None,
        *,
        with_body: bool = True,
        fault: str | None = None,
    ) -> None:
        with self.owner.lock:
            self.owner.answers[status] += 1
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if not with_body or self.command == "HEAD":
            return
        if fault in ("hang_body", "short", "reset_body"):
            self._write(body[: len(body) // 2])
            if fault == "hang_body":
                self.closing.wait(LIMIT_S)
            if fault == "reset_body":
                self._reset()
            self.close_connection = True
            return
        self._write(body)

    def _write(self, body: bytes) -> None:
        rate = self.owner.faults.bytes_per_s
        step = max(1, int(rate / 50)) if rate else 1 << 20
        path = self._path()
        for start in range(0, len(body), step):
            part = body[start : start + step]
            with self.owner.lock:  # before the client can know of them
                self.owner.bytes_of[path] += len(part)
            try:
                self.wfile.write(part)
            except OSError:  # the client went away
                self.close_connection = True
                return
            if rate:
                self.closing.wait(len(part) / rate)

    def _index_page(self) -> None:
        rows = []
        for entry in sorted(os.scandir(self._local()), key=lambda entry: entry.name):
            name = entry.name + ("/" if entry.is_dir() else "")
            shown = html.escape(name).encode("utf-8", "replace").decode()
            rows.append(f'<a href="{quote(name, errors="surrogateescape")}">{shown}</a>')
        if not urlsplit(self.path).path.endswith("/"):
            return self._answer(301, b"", {"Location": urlsplit(self.path).path + "/"})
        page = '<a href="../">..</a><a href="?C=N">Name</a>' + "\n".join(rows)
        return self._answer(200, page.encode(), {"Content-Type": "text/html"})

    def _list(self, query: dict[str, list[str]]) -> None:
        """S3's ListObjectsV2 of a top folder."""
        bucket = self._local()
        if not os.path.isdir(bucket):
            return self._answer(404, b"<Error><Code>NoSuchBucket</Code></Error>")
        prefix = query.get("prefix", [""])[0]
        delimiter = query.get("delimiter", [""])[0]
        after = max(query.get("continuation-token", [""])[0], query.get("start-after", [""])[0])
        keys: list[str] = []
        folders: dict[str, None] = {}
        for key in sorted(_keys(bucket)):
            if not key.startswith(prefix) or key <= after:
                continue
            head, slash, _ = key[len(prefix) :].partition(delimiter or "\0")
            if delimiter and slash:
                folders[prefix + head + slash] = None
            else:
                keys.append(key)
        page = keys[: int(query.get("max-keys", ["1000"])[0])]
        more = len(page) < len(keys)
        rows = [_contents(bucket, key) for key in page]
        rows += [
            f"<CommonPrefixes><Prefix>{escape(folder)}</Prefix></CommonPrefixes>"
            for folder in folders
        ]
        token = f"<NextContinuationToken>{escape(page[-1])}</NextContinuationToken>" if more else ""
        text = (
            '<?xml version="1.0" encoding="UTF-8"?>'
            '<ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'
            f"<Prefix>{escape(prefix)}</Prefix><KeyCount>{len(page)}</KeyCount>"
            f"<IsTruncated>{str(more).lower()}</IsTruncated>{token}{''.join(rows)}"
            "</ListBucketResult>"
        )
        return self._answer(200, text.encode(), {"Content-Type": "application/xml"})


def _keys(bucket: str) -> Iterator[str]:
    for folder, _, names in os.walk(bucket):
        for name in names:
            yield os.path.relpath(os.path.join(folder, name), bucket)


def _contents(bucket: str, key: str) -> str:
    local = os.path.join(bucket, key)
    return (
        f"<Contents><Key>{escape(key)}</Key><LastModified>2026-01-01T00:00:00.000Z</LastModified>"
        f"<ETag>{escape(_etag(local))}</ETag><Size>{os.stat(local).st_size}</Size>"
        "<StorageClass>STANDARD</StorageClass></Contents>"
    )


def _etag(local: str) -> str:
    found = os.stat(local)
    return f'"{found.st_size:x}-{found.st_mtime_ns:x}"'
