"""Serve a cache with blobs from a process of its own, and send it valid and invalid requests."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import socket
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from penstock.cache.base import BlobSource, Peers, Segment
from penstock.cache.disk import DiskCache
from penstock.cache.peers import (
    PeerSecret,
    PeerServer,
    Question,
    authorize,
    credentials_of,
    protocol,
)

if TYPE_CHECKING:
    import ssl
    from collections.abc import Iterator
    from pathlib import Path

GROUP = "a" * 32
PATIENCE_S = 30.0


def key_of(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()[:40]


def source(name: str, *sizes: int, ranges: bool = False) -> BlobSource:
    segments = [
        Segment(
            path=f"{name}-{i}", size_bytes=size, version=None, object_bytes=size if ranges else None
        )
        for i, size in enumerate(sizes)
    ]
    return BlobSource(
        key=key_of(name), uri=f"memory://{name}", segments=segments, size_bytes=sum(sizes)
    )


def content(name: str, size_bytes: int) -> bytes:
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big")
    return np.random.default_rng(seed).bytes(size_bytes)


def put(cache: DiskCache, name: str, size_bytes: int, *, group: str = GROUP) -> bytes:
    """Store a whole blob in a cache; return its bytes."""
    data = content(name, size_bytes)
    blob = source(name, size_bytes)
    cache.use(lambda folder: folder.put(blob, memoryview(data), group=group, kept=False))
    return data


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes


def read_answer(sock: socket.socket, left: bytes = b"") -> tuple[Answer, bytes]:
    """Return one answer of a connection, and the bytes after it. Raises
    ConnectionError at its end."""
    data = left
    while b"\r\n\r\n" not in data:
        part = sock.recv(2**16)
        if not part:
            raise ConnectionResetError("the server ended the connection")
        data += part
    head, _, data = data.partition(b"\r\n\r\n")
    first, *lines = head.decode("ascii").split("\r\n")
    headers = {k.lower(): v.strip() for k, _, v in (line.partition(":") for line in lines)}
    length = int(headers["content-length"])
    parts = [data]
    while (there := sum(map(len, parts))) < length:
        part = sock.recv(2**20)
        if not part:
            raise ConnectionResetError(f"the body ended after {there} of {length} bytes")
        parts.append(part)
    data = b"".join(parts)
    return Answer(int(first.split()[1]), headers, data[:length]), data[length:]


@dataclass(eq=False)
class Served:
    """A cache, its server, and a client with the secret."""

    cache: DiskCache
    peers: Peers
    secret: PeerSecret
    server: PeerServer

    @property
    def place(self) -> tuple[str, int]:
        host, _, port = self.server.address.rpartition(":")
        return host, int(port)

    @functools.cache  # noqa: B019
    def client_context(self) -> ssl.SSLContext | None:
        credentials = credentials_of(self.peers, self.secret)
        return None if credentials is None else credentials.client_context()

    def dial(self) -> socket.socket:
        sock = socket.create_connection(self.place, timeout=PATIENCE_S)
        context = self.client_context()
        if context is None:
            return sock
        return context.wrap_socket(sock, server_hostname=self.place[0])

    def head(
        self,
        path: str,
        span: protocol.Span | list[protocol.Span] | None = None,
        *,
        secret: PeerSecret | None = None,
        now_s: float | None = None,
        more: str = "",
    ) -> bytes:
        spans = [span] if isinstance(span, tuple) else span
        range_ = "" if spans is None else protocol.ranges_text(spans)
        token = authorize(
            secret or self.secret,
            Question("GET", path, range_),
            now_s=time.time() if now_s is None else now_s,
        )
        asked = f"Range: {range_}\r\n" if range_ else ""
        return (
            f"GET {path} HTTP/1.1\r\nHost: x\r\nAuthorization: {token}\r\n{asked}{more}\r\n"
        ).encode()

    def ask(
        self, path: str, span: protocol.Span | list[protocol.Span] | None = None, **how: object
    ) -> Answer:
        """Return the answer to a client with the secret."""
        with contextlib.closing(self.dial()) as sock:
            sock.sendall(self.head(path, span, **how))
            return read_answer(sock)[0]

    def rss_bytes(self) -> int:
        with open(f"/proc/{self.server.pid}/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@contextlib.contextmanager
def serving(
    folder: Path, peers: Peers | None = None, *, secret: PeerSecret | None = None
) -> Iterator[Served]:
    """Serve a cache in a folder to clients with the secret."""
    peers = peers or Peers("127.0.0.1:0")
    secret = secret or PeerSecret.draw()
    cache = DiskCache(folder, max_bytes="1GiB", peers=peers)
    server = PeerServer(cache, peers, secret)
    try:
        yield Served(cache, peers, secret, server)
    finally:
        server.close()
        cache.close()
