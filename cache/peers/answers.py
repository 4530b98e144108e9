"""Parse a peer's request, check its signature, and answer it from the files of the node's cache.

This module doesn't handle connections. An answer may refer to an open file, which its sender
closes.

The parser accepts only the subset of HTTP that the protocol uses. A library would also parse
bodies, chunks, pipelines, upgrades, folded lines and other methods, all of which would then have to
be refused; and for ranges of 100 KB it costs as much as all the rest of the server. Measured over
loopback, CPU-seconds a GB of the server: this module on asyncio 0.4, asyncio's streams 0.8,
aiohttp's low-level server 1.3.

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
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, overload

from crc32c import crc32c

from penstock.cache.disk import BLOCK_BYTES
from penstock.cache.peers import protocol
from penstock.cache.peers.protocol import MOST_HEAD_BYTES
from penstock.cache.peers.tokens import Question, check_token, job_of, prove_server

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from penstock.cache.peers.held_files import HeldFile, HeldFiles
    from penstock.cache.peers.protocol import Span
    from penstock.cache.peers.tokens import PeerSecret

_LINE = re.compile(r"([A-Z]{1,16}) ([!-~]{1,512}) HTTP/1\.1")
_HEADER = re.compile(r"([A-Za-z0-9-]{1,64}):[ \t]*([ -~]{0,1024}?)[ \t]*")
_MOST_HEADERS = 32
# These headers announce a body or another protocol.
_REFUSED = frozenset({"content-length", "transfer-encoding", "upgrade", "expect", "trailer", "te"})
_ONCE = frozenset({"authorization", "range", "connection", "host"})

END = b"\r\n\r\n"


@dataclass(frozen=True, slots=True)
class PeerRequest:
    """A parsed request. token: the value of Authorization. keeps: True if another request may
    follow on the connection."""

    question: Question
    token: str
    keeps: bool


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
        if name in _REFUSED or (name in headers and name in _ONCE):
            return None
        headers[name] = found[2]
    return PeerRequest(
        Question(line[1], line[2], headers.get("range", "")),
        headers.get("authorization", ""),
        headers.get("connection", "keep-alive").lower() == "keep-alive",
    )


_STEP = 2**17


class _ReadBuffer(threading.local):
    """A thread's buffer for reading: allocating memory for each range would cost more than reading
    it."""

    def __init__(self) -> None:
        self.view = memoryview(bytearray(_STEP))


_read_buffer = _ReadBuffer()


@overload
def crc_of_file(fd: int, start: int, end: int) -> int: ...


@overload
def crc_of_file(fd: int, start: int, end: int, *, waits: bool) -> int | None: ...


def crc_of_file(fd: int, start: int, end: int, *, waits: bool = True) -> int | None:
    """Compute the CRC-32C of bytes [start, end) of a file. waits: False returns None instead of
    waiting for the disk.

    The file is read rather than mapped: if it is truncated meanwhile, that is an error instead of
    the end of the process. Raises OSError, EOFError.
    """
    view, crc = _read_buffer.view, 0
    flags = 0 if waits else os.RWF_NOWAIT
    while start < end:
        try:
            got = os.preadv(fd, [view[: end - start]], start, flags)
        except OSError as error:
            if not flags:
                raise
            if error.errno == errno.EAGAIN:
                return None
            flags = 0  # the file system doesn't support RWF_NOWAIT
            continue
        if not got:
            raise EOFError("the file is shorter than it was")
        crc, start = crc32c(view[:got], crc), start + got
    return crc


def noted_crc(blocks: bytes | None, size_bytes: int, stretch: Span) -> int | None:
    """Return the checksum of a stretch from those of the blob's blocks; None if the stretch must be
    read. blocks: the CRC-32C of each MiB, little-endian; None if unknown."""
    start, end = stretch
    number, within = divmod(start, BLOCK_BYTES)
    if blocks is None or within or (end - start < BLOCK_BYTES and end != size_bytes):
        return None
    return int.from_bytes(blocks[4 * number : 4 * number + 4], "little")


def bytes_to_read(blocks: bytes | None, size_bytes: int, wanted: Iterable[Span]) -> int:
    """Return how many bytes of some stretches must be read for their checksums."""
    unknown = [span for span in wanted if noted_crc(blocks, size_bytes, span) is None]
    return sum([end - start for start, end in unknown])


AT_ONCE_BYTES = 2**21
"""The most bytes that are read for a checksum while other connections wait (half a millisecond),
and the bytes of a body that must be in memory before the server starts to send it."""
_REASONS = {
    200: "OK",
    206: "Partial Content",
    400: "Bad Request",
    401: "Unauthorized",
    404: "Not Found",
    405: "Method Not Allowed",
    416: "Range Not Satisfiable",
}


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
    spans: Sequence[protocol.Span] = ()

    @property
    def length(self) -> int:
        """The number of bytes in the body."""
        if self.file is None:
            return len(self.body)
        return sum([end - start for start, end in self.spans])

    def parts(self, at: int, most: int) -> Iterator[protocol.Span]:
        """Yield the spans of the file that hold the body from byte `at` on, at most `most` bytes in
        total."""
        for start, end in self.spans:
            if at < end - start:
                part_end = min(end, start + at + most)
                yield start + at, part_end
                most -= part_end - start - at
                at = 0
                if not most:
                    return
            else:
                at -= end - start

    def head(self) -> bytes:
        """Return the head of the answer as it is sent."""
        lines = [
            f"HTTP/1.1 {self.status} {_REASONS[self.status]}",
            *(f"{name}: {value}" for name, value in self.headers),
            f"Content-Length: {self.length}",
        ]
        if not self.keeps:
            lines.append("Connection: close")
        return "\r\n".join([*lines, "", ""]).encode("ascii")

    def close(self) -> None:
        """Close the file. Safe to call twice."""
        if self.file is not None:
            self.file.close()


class Responder:
    """The part of a server that answers requests from a cache folder.

    secrets: of the jobs that may send requests, by job name. clock: returns seconds since the
    epoch.
    """

    def __init__(
        self,
        held: HeldFiles,
        secrets: dict[str, PeerSecret],
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._held, self._secrets, self._clock = held, secrets, clock
        self._date, self._date_s = "", -1

    def answer(self, request: PeerRequest | None) -> ServerReply:
        """Return the answer to a request. request: None if the protocol doesn't allow it."""
        now_s = self._clock()
        if int(now_s) != self._date_s:
            self._date, self._date_s = protocol.date_text(now_s), int(now_s)
        date = self._date
        if request is None:
            return ServerReply(status=400, headers=[("Date", date)], is_known=False, keeps=False)
        question = request.question
        who = check_token(self._secrets.get, question, request.token, now_s=now_s)
        headers = [("Date", date)]
        if isinstance(who, str):
            if who == "expired":
                headers.append((protocol.FAULT_HEADER, who))
                self._prove(request.token, date, headers)
            keeps = request.keeps and who == "expired"
            return ServerReply(status=401, headers=headers, is_known=False, keeps=keeps)
        reply = ServerReply(status=404, headers=headers, is_known=True, keeps=request.keeps)
        if question.method != "GET":
            reply.status = 405
        elif question.path == protocol.ALIVE:
            reply.status = 200
            self._prove(request.token, date, headers)
        elif question.path == protocol.ANY:
            if (key := self._held.any_key()) is not None:
                self._find(reply, key, question.range)
        elif (key := protocol.key_of(question.path)) is not None:
            self._find(reply, key, question.range)
        elif (group := protocol.group_of(question.path)) is not None:
            self._list(reply, group)
        return reply

    def _find(self, reply: ServerReply, key: str, ranges: str) -> None:
        spans = protocol.ranges_of(ranges)
        if spans is None:
            reply.status = 400
            return
        file = self._held.open(key)
        if file is None:
            return
        try:
            if all([file.has(*span) for span in spans]):
                reply.status, reply.file, reply.spans = 206, file, spans
                text = protocol.content_range(spans, file.size_bytes)
                reply.headers.append(("Content-Range", text))
                return
            reply.headers.append(("Content-Range", protocol.size_text(file.size_bytes)))
            held = protocol.held_text(file.held(spans[0][0]))
            reply.headers.append((protocol.HELD_HEADER, held))
            reply.status = 416
        finally:
            if reply.file is None:
                file.close()

    def _list(self, reply: ServerReply, group: str) -> None:
        reply.status = 200
        keys = self._held.keys_of(group, most=protocol.MOST_HELD_KEYS)
        reply.body = protocol.held_keys(keys)
        crc = protocol.crcs_text([crc32c(reply.body)])
        reply.headers.append((protocol.CRC_HEADER, crc))

    def _prove(self, token: str, date: str, headers: list[tuple[str, str]]) -> None:
        secret = self._secrets.get(job_of(token) or "")
        if secret is not None:
            headers.append((protocol.PROOF_HEADER, prove_server(secret, token, date)))


def add_crcs_at_once(reply: ServerReply) -> bool:
    """Add the checksums as `add_crcs` does, but only if that and sending the first bytes take
    little time; return True if they were added. The kernel starts to read bytes ahead that may not
    be in memory. Raises OSError, EOFError."""
    file = reply.file
    if file is None:
        return True
    crcs = _crcs_at_once(file, protocol.stretches(reply.spans))
    if crcs is None or reply.length > AT_ONCE_BYTES:
        for span in reply.spans:
            with contextlib.suppress(OSError):
                file.advise(*span)
    if crcs is not None:
        reply.headers.append((protocol.CRC_HEADER, protocol.crcs_text(crcs)))
    return crcs is not None


def _crcs_at_once(file: HeldFile, wanted: list[protocol.Span]) -> list[int] | None:
    if bytes_to_read(file.crcs, file.size_bytes, wanted) > AT_ONCE_BYTES:
        return None
    crcs, left = [], AT_ONCE_BYTES
    for start, end in wanted:
        crc = noted_crc(file.crcs, file.size_bytes, (start, end))
        if crc is None:
            crc = crc_of_file(file.fd, start, end, waits=False)
        elif left > 0 and not file.is_in_memory(start, min(end, start + left)):
            crc = None
        if crc is None:
            return None
        crcs.append(crc)
        left -= end - start
    return crcs


def add_crcs(reply: ServerReply) -> None:
    """Add the checksums of a file's stretches to the answer's headers. Raises OSError, EOFError."""
    file = reply.file
    if file is None:
        return
    crcs = []
    for stretch in protocol.stretches(reply.spans):
        crc = noted_crc(file.crcs, file.size_bytes, stretch)
        crcs.append(crc_of_file(file.fd, *stretch) if crc is None else crc)
    reply.headers.append((protocol.CRC_HEADER, protocol.crcs_text(crcs)))
