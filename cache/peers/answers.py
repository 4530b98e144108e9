"""Parse a peer's request, check its signature, and answer it from the files of the node's cache.

This module doesn't handle connections. An answer may refer to an open file, which its sender
closes. Only `blobs/` is read, by keys, and nothing is changed. As for every reader, a
shared lock on its inode protects each open file from eviction; the file must still have its name
after the lock is acquired.

The parser accepts only the subset of HTTP that the protocol uses. A library would also parse
bodies, chunks, pipelines, upgrades, folded lines and other methods, all of which would then have to
be refused; and for ranges of 100 KB it costs as much as all the rest of the server.

The CRC-32C of a stretch of a body comes from the catalogue if the stretch is a block; otherwise the
server reads the stretch. So it reads nothing ahead for fills, which request whole MiB, and at most
2 MiB for any other range: the first and the last stretch. If the disk has changed a block since it
was received, the answer carries the checksum of the received bytes, and the client detects the
damage.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import sqlite3
import threading
import time
from dataclasses import dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING

from crc32c import crc32c

from penstock.cache.base import ReaderLocks
from penstock.cache.disk import BLOCK_BYTES, FolderLayout, open_read_only, read_crcs
from penstock.cache.peers import protocol
from penstock.cache.peers.protocol import MOST_HEAD_BYTES, Span
from penstock.cache.peers.trust import PeerSecret, Question, check_token, prove_server

if TYPE_CHECKING:
    from collections.abc import Sequence


_LINE = re.compile(r"([A-Z]{1,16}) ([!-~]{1,512}) HTTP/1\.1")
_HEADER = re.compile(r"([A-Za-z0-9-]{1,64}):[ \t]*([ -~]{0,1024})[ \t]*")
_MOST_HEADERS = 32
# These headers announce a body or another protocol.
_REFUSED = frozenset({"content-length", "transfer-encoding", "upgrade", "expect", "trailer", "te"})

END = b"\r\n\r\n"


@dataclass(frozen=True, slots=True)
class PeerRequest:
    """A parsed request. token: the value of Authorization. spans: those of its Range, None for none
    that the protocol allows. keeps: True if another request may follow on the connection."""

    question: Question
    token: str
    spans: list[Span] | None
    keeps: bool

    @property
    def range_bytes(self) -> int:
        """The size of its ranges."""
        return sum([end - start for start, end in self.spans or ()])


def read_head(data: bytes | bytearray) -> PeerRequest | None:
    """Parse a request's head, without its empty line; None if the protocol doesn't allow it."""
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
        if name in _REFUSED or name in headers:
            return None
        headers[name] = found[2].rstrip(" ")
    question = Question(line[1], line[2], headers.get("range", ""))
    keeps = headers.get("connection", "keep-alive").lower() == "keep-alive"
    spans = protocol.ranges_of(question.range)
    return PeerRequest(question, headers.get("authorization", ""), spans, keeps)


_MOST_LISTED = 64
_MOST_NOTES = 2**13
"""The most blobs whose block checksums are in memory; a blob of 64 MiB has 256 bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldFile:
    """A file that is open and protected from eviction until close().

    size_bytes: the size of the blob. crcs: the checksums of its blocks, None if unknown. opened:
    what close() closes and releases.
    """

    fd: int
    size_bytes: int
    crcs: bytes | None
    opened: contextlib.ExitStack

    def close(self) -> None:
        """Close the file and release its lock. Safe to call twice."""
        self.opened.close()


class HeldFiles:
    """The whole blobs of one cache folder. Safe for several threads.

    root, mode: the path and the permission bits of the cache. Raises OSError if the folder isn't a
    cache.
    """

    def __init__(self, root: str, *, mode: int) -> None:
        self._layout = FolderLayout(root, mode=mode)
        self._readers = ReaderLocks(self._layout.top.open_or_create("readers.lock"))
        self._catalogue: sqlite3.Connection | None = None
        self._catalogue_inode = 0
        self._lock = threading.Lock()  # of the catalogue's connection and the notes
        self._notes: dict[tuple[str, int], bytes] = {}

    def open(self, key: str) -> HeldFile | None:
        """Open a whole blob; None if there is none, or it is being evicted. key: 40 hexadecimal
        digits."""
        with contextlib.suppress(OSError), contextlib.ExitStack() as opened:
            fd = self._layout.blobs.open(key)
            opened.callback(os.close, fd)
            found = os.fstat(fd)
            if not found.st_size or not self._readers.acquire(found.st_ino):
                return None
            opened.callback(self._readers.release, found.st_ino)
            if not os.fstat(fd).st_nlink:
                return None
            size_bytes, crcs = found.st_size, self._crcs(key, found)
            return HeldFile(fd=fd, size_bytes=size_bytes, crcs=crcs, opened=opened.pop_all())
        return None

    def _crcs(self, key: str, found: os.stat_result) -> bytes | None:
        """Return the checksums of a blob's blocks; None if the catalogue has none, can't be read or
        is being rebuilt."""
        at = key, found.st_ino
        if at not in self._notes and (crcs := self._read_crcs(key, found.st_size)) is not None:
            with self._lock:
                self._notes[at] = crcs
                while len(self._notes) > _MOST_NOTES:
                    del self._notes[next(iter(self._notes))]
        return self._notes.get(at)

    def _read_crcs(self, key: str, size_bytes: int) -> bytes | None:
        with self._lock:
            with contextlib.suppress(sqlite3.Error, OSError):
                inode = self._layout.top.stat("catalogue.db").st_ino
                if self._catalogue is None or inode != self._catalogue_inode:
                    self._close_catalogue()
                    self._catalogue = open_read_only(self._layout.top, "mode=ro")
                    self._catalogue_inode = inode
                return read_crcs(self._catalogue, key, size_bytes)
            self._close_catalogue()
        return None

    def keys(self) -> list[str]:
        """Return the sorted keys of all whole blobs, at most MOST_HELD_KEYS. Raises OSError."""
        keys = sorted(filter(protocol.is_key, self._layout.blobs.names()))
        return keys[: protocol.MOST_HELD_KEYS]

    def any_key(self) -> str | None:
        """Return the key of the largest among some whole blobs; None if there is none."""
        blobs = self._layout.blobs
        with contextlib.suppress(OSError):  # one was just evicted
            some = self.keys()[:_MOST_LISTED]
            return max(some, key=lambda key: blobs.stat(key).st_size, default=None)
        return None

    def _close_catalogue(self) -> None:
        catalogue, self._catalogue = self._catalogue, None
        if catalogue is not None:
            catalogue.close()

    def close(self) -> None:
        """Close the folder."""
        self._close_catalogue()
        self._readers.close()


_STEP = 2**17
_PROBE_STEP = 2**18
_MOST_SPARE = 8
_spare: list[memoryview] = []
"""Buffers for reading: allocating one for each range would cost more than reading it, and one for
each thread would take memory while the thread waits for its client."""


def _read(fd: int, view: memoryview, start: int, *, waits: bool) -> int | None:
    """Read bytes of a file into a view; return their number, None if reading would wait for the
    disk and `waits` isn't set. Raises OSError, EOFError."""
    try:
        got = os.preadv(fd, [view], start, 0 if waits else os.RWF_NOWAIT)
    except OSError as error:
        if waits or error.errno not in (errno.EAGAIN, errno.EOPNOTSUPP):
            raise
        return None
    if not got:
        raise EOFError("the file is shorter than it was")
    return got


def crc_of_file(fd: int, start: int, end: int, *, waits: bool = True) -> int | None:
    """Compute the CRC-32C of bytes [start, end) of a file; None if reading them would wait for the
    disk and `waits` isn't set.

    The file is read rather than mapped: if it is truncated meanwhile, that is an error instead of
    the end of the process. Raises OSError, EOFError.
    """
    try:
        view = _spare.pop()
    except IndexError:
        view = memoryview(bytearray(_STEP))
    crc = 0
    while start < end and (got := _read(fd, view[: end - start], start, waits=waits)):
        crc, start = crc32c(view[:got], crc), start + got
    if len(_spare) < _MOST_SPARE:
        _spare.append(view)
    return crc if start == end else None


def is_cached(fd: int, start: int, end: int) -> bool:
    """Return True if the page cache has a sample of the pages of bytes [start, end) of a file, so
    that reading them hardly waits for the disk. Raises OSError, EOFError."""
    view = memoryview(bytearray(1))
    places = (*range(start, end, _PROBE_STEP), end - 1)
    return all(_read(fd, view, at, waits=False) is not None for at in places)


def noted_crc(blocks: bytes | None, size_bytes: int, stretch: Span) -> int | None:
    """Return the checksum of a stretch from those of the blob's blocks; None if the stretch must be
    read. blocks: the CRC-32C of each MiB, little-endian; None if unknown."""
    start, end = stretch
    number, within = divmod(start, BLOCK_BYTES)
    if blocks is None or within or (end - start < BLOCK_BYTES and end != size_bytes):
        return None
    return int.from_bytes(blocks[4 * number : 4 * number + 4], "little")


@dataclass(slots=True, kw_only=True)
class ServerReply:
    """An answer: its status, its headers, and a body that consists of bytes or of spans of a file.

    is_known: True if the client belongs to the job. keeps: True if the connection stays open for
    another request.
    """

    status: int
    headers: list[tuple[str, str]]
    is_known: bool
    keeps: bool
    body: bytes = b""
    file: HeldFile | None = None
    spans: Sequence[Span] = ()

    def add_crcs(self, *, waits: bool) -> bool:
        """Add the checksums of the file's stretches to the headers; return False if that or sending
        them would wait for the disk and `waits` isn't set. Raises OSError, EOFError."""
        file = self.file
        if file is None:
            return True
        if waits and len(self.spans) > 1:  # the disk reads them all while the first is waited for
            for start, end in self.spans:
                os.posix_fadvise(file.fd, start, end - start, os.POSIX_FADV_WILLNEED)
        crcs = []
        for stretch in protocol.stretches(self.spans):
            crc = noted_crc(file.crcs, file.size_bytes, stretch)
            if crc is None:
                crc = crc_of_file(file.fd, *stretch, waits=waits)
            elif not waits and not is_cached(file.fd, *stretch):
                crc = None
            if crc is None:
                return False
            crcs.append(crc)
        self.headers.append((protocol.CRC_HEADER, protocol.crcs_text(crcs)))
        return True

    def head(self) -> bytes:
        """Return the head of the answer as it is sent."""
        length = len(self.body) + sum([end - start for start, end in self.spans])
        lines = [
            f"HTTP/1.1 {self.status} {HTTPStatus(self.status).phrase}",
            *(f"{name}: {value}" for name, value in self.headers),
            f"Content-Length: {length}",
        ]
        if not self.keeps:
            lines.append("Connection: close")
        return "\r\n".join([*lines, "", ""]).encode("ascii")

    def close(self) -> None:
        """Close the file. Safe to call twice."""
        if self.file is not None:
            self.file.close()


class Responder:
    """The part of a server that answers requests from a cache folder. Safe for several threads.

    secret: of the job that may send requests.
    """

    def __init__(self, held: HeldFiles, secret: PeerSecret) -> None:
        self._held, self._secret = held, secret

    def answer(self, request: PeerRequest | None) -> ServerReply:
        """Return the answer to a request. request: None if the protocol doesn't allow it."""
        now_s = time.time()
        date = protocol.date_text(int(now_s))
        headers = [("Date", date)]
        if request is None:
            return ServerReply(status=400, headers=headers, is_known=False, keeps=False)
        question, token = request.question, request.token
        state = check_token(self._secret, question, token, now_s=now_s)
        if state == "unknown":
            return ServerReply(status=401, headers=headers, is_known=False, keeps=False)
        if state == "expired" or question.path == protocol.ALIVE:
            proof = prove_server(self._secret, token, date)
            headers.append((protocol.PROOF_HEADER, proof))
        if state == "expired":
            return ServerReply(status=401, headers=headers, is_known=False, keeps=request.keeps)
        reply = ServerReply(status=404, headers=headers, is_known=True, keeps=request.keeps)
        if question.method != "GET":
            reply.status = 405
        elif question.path == protocol.ALIVE:
            reply.status = 200
        elif question.path == protocol.ANY:
            if (key := self._held.any_key()) is not None:
                self._find(reply, key, None)
        elif (key := protocol.key_of(question.path)) is not None:
            if request.spans is None:
                reply.status = 400
            else:
                self._find(reply, key, request.spans)
        elif question.path == protocol.HELD:
            reply.status = 200
            reply.body = protocol.held_keys(self._held.keys())
            headers.append((protocol.CRC_HEADER, protocol.crcs_text([crc32c(reply.body)])))
        return reply

    def _find(self, reply: ServerReply, key: str, wanted: list[Span] | None) -> None:
        """Add the wanted spans of a blob, if all are inside it; None: its beginning."""
        file = self._held.open(key)
        if file is None:
            return
        spans = wanted or [(0, min(file.size_bytes, protocol.RANGE_BYTES))]
        if spans[-1][1] > file.size_bytes:
            file.close()
            return
        reply.status, reply.file, reply.spans = 206, file, spans
        reply.headers.append(("Content-Range", protocol.content_range(spans, file.size_bytes)))
