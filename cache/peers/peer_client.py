"""Requests to peers: signed, checked, bounded in bytes and time, and never redirected.

Connections are kept. Nothing that an answer says is believed but its bytes, once their length and
checksum are right: status, range and size must be exactly what was asked for.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from crc32c import crc32c

from penstock.cache.base.store import RequestError
from penstock.cache.peers.protocol import (
    FAULT_HEADER,
    HELD_KEY_BYTES,
    MOST_HELD_KEYS,
    PROOF_HEADER,
    blob_part,
    blob_path,
    held_part,
    held_path,
    held_prefixes,
    range_text,
)
from penstock.cache.peers.tokens import PeerSecret, Question, authorize, server_time
from penstock.cache.stores.proxies import Proxies
from penstock.cache.stores.web_address import Hop, request_origin
from penstock.cache.stores.web_connection import StaleError, Timeouts
from penstock.cache.stores.web_dialer import Dialer
from penstock.cache.stores.web_pool import ConnectionPool
from penstock.cache.stores.web_reply import Reply

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable

    from numpy.typing import NDArray

    from penstock.cache.peers.peer_directory import Peer
    from penstock.cache.peers.protocol import Span

_LACKING = (404, 416)


class WrongAnswerError(RequestError):
    """A peer answered with what wasn't asked for, or with bytes that aren't those."""

    def __init__(self, message: str) -> None:
        super().__init__("refused", message)


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerLimits:
    """Peer limits say how long a peer may take, in seconds: to connect, and without a byte.

    least_rate: bytes/s that an answer must keep up with, behind the time of a silent moment.
    """

    connect_s: float = 1.5
    silent_s: float = 2.0
    least_rate: float = 512 * 2**10

    def whole_s(self, size_bytes: int) -> float:
        """So long an answer of that size may take in all."""
        return self.connect_s + self.silent_s + size_bytes / self.least_rate


class _Asked(NamedTuple):
    """What is asked for, and how large the answer may be."""

    question: Question
    size_bytes: int


def _no_tls() -> ssl.SSLContext:
    raise RequestError("refused", "peers are asked without TLS")


class PeerClient:
    """Asks peers for ranges of blobs and for what they hold. Safe for several threads; not across
    fork.

    secret: of the job. tls: makes the context of encrypted connections; None: plain ones.
    """

    def __init__(
        self,
        secret: PeerSecret,
        *,
        tls: Callable[[], ssl.SSLContext] | None = None,
        limits: PeerLimits | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._secret, self._clock = secret, clock
        self._limits = limits = limits or PeerLimits()
        self._scheme = "http" if tls is None else "https"
        self._pool = ConnectionPool()
        self._dialer = Dialer(
            self._pool,
            timeouts=Timeouts(
                connect_s=limits.connect_s,
                read_s=limits.silent_s,
                whole_s=limits.whole_s(0),
            ),
            proxies=Proxies(),  # what lies between nodes of a job is the job's
            tls=tls or _no_tls,
        )
        self._ahead_s: dict[str, float] = {}  # of a peer's clock, where it proved to differ

    def blob(
        self, peer: Peer, key: str, span: tuple[int, int], size_bytes: int
    ) -> memoryview | list[Span]:
        """Bytes [start, end) of a blob of that size; where the peer hasn't all of them, the spans
        of the blob that it has, as far as it tells. Raises RequestError, WrongAnswerError."""
        question = Question("GET", blob_path(key), range_text(span))
        wanted = span[1] - span[0]
        reply = self._ask(peer, _Asked(question, wanted))
        try:
            if reply.status in _LACKING:
                reply.error_body()
                told = held_part(reply.headers) if reply.status == 416 else None
                return told[1] if told is not None and told[0] == size_bytes else []
            part = blob_part(reply.headers) if reply.status == 206 else None
            if part is None:
                raise WrongAnswerError(f"it answered with status {reply.status}")
            if (part.span, part.size_bytes, reply.length) != (span, size_bytes, wanted):
                raise WrongAnswerError("it answered with another range than it was asked for")
            data = reply.read(wanted)
            if crc32c(data) != part.crc:
                raise WrongAnswerError("its bytes aren't those of the checksum beside them")
            return data
        finally:
            reply.close()

    def held(self, peer: Peer, group: str) -> NDArray[np.uint64]:
        """What a peer holds of a dataset: `protocol.held_prefixes`. Raises RequestError,
        WrongAnswerError."""
        most = HELD_KEY_BYTES * MOST_HELD_KEYS
        reply = self._ask(peer, _Asked(Question("GET", held_path(group)), most))
        try:
            if reply.status == 404:
                reply.error_body()
                return np.empty(0, np.uint64)
            if reply.status != 200 or reply.length is None:
                raise WrongAnswerError(f"it answered with status {reply.status}")
            found = held_prefixes(reply.read(most))
        finally:
            reply.close()
        if found is None:
            raise WrongAnswerError("what it says it holds is no list of keys")
        return found

    def abort(self) -> None:
        """End all requests, now and later. Safe to call twice."""
        self._pool.abort()

    # -- one request

    def _ask(self, peer: Peer, asked: _Asked) -> Reply:
        """The answer to a signed request; a second try where the peer's clock differs from ours."""
        reply, token = self._once(peer, asked)
        if reply.status != 401:
            return reply
        date, proof = (reply.headers.get(name.lower(), "") for name in ("Date", PROOF_HEADER))
        now_s = server_time(self._secret, token, date, proof)
        is_late = reply.headers.get(FAULT_HEADER.lower()) == "expired"
        reply.error_body()
        reply.close()
        if now_s is None or not is_late:
            raise RequestError("denied", "it doesn't know this job's token")
        self._ahead_s[peer.address] = now_s - self._clock()
        return self._once(peer, asked)[0]

    def _once(self, peer: Peer, asked: _Asked) -> tuple[Reply, str]:
        """An answer, and the token of its request."""
        hop = Hop(f"{self._scheme}://{peer.address}")
        deadline_s = time.monotonic() + self._limits.whole_s(asked.size_bytes)
        now_s = self._clock() + self._ahead_s.get(peer.address, 0.0)
        token = authorize(self._secret, asked.question, now_s=now_s)
        try:
            return self._send(hop, asked.question, token, deadline_s), token
        except StaleError:  # a server may close a connection while a request is on its way
            return self._send(hop, asked.question, token, deadline_s, may_be_kept=False), token

    def _send(
        self,
        hop: Hop,
        question: Question,
        token: str,
        deadline_s: float,
        *,
        may_be_kept: bool = True,
    ) -> Reply:
        origin = request_origin(hop.url)
        connection = self._pool.take(origin, only_public=False) if may_be_kept else None
        if connection is None:
            connection = self._dialer.connect(origin, only_public=False)
        ranged = f"Range: {question.range}\r\n" if question.range else ""
        head = (
            f"{question.method} {question.path} HTTP/1.1\r\nHost: {origin.host_header}\r\n"
            f"Authorization: {token}\r\n{ranged}\r\n"
        )
        try:
            connection.send(head, b"", deadline_s)
            return Reply(self._pool, connection, hop=hop, method="GET", deadline_s=deadline_s)
        except BaseException:
            self._pool.put_back(connection, keep=False)
            raise
