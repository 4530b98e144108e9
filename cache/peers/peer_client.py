"""Send requests to peers: signed, checked, bounded in bytes and time, and never redirected.

Connections are reused. The bytes of an answer are used only if their length and checksum are right;
status, ranges and size must match the request exactly. Streamed bytes are checked and passed on MiB
by MiB, while they are in the processor's cache.

On a plain connection the kernel waits, with its own time limit, so a MiB of an answer takes one
system call and wakes its thread once. OpenSSL reads encrypted bytes as they arrive.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from crc32c import crc32c

from penstock.cache.base import RequestError
from penstock.cache.disk import BLOCK_BYTES
from penstock.cache.peers import protocol
from penstock.cache.peers.peer_diagnosis import Fault, ProbeSettings, fault_of, probe
from penstock.cache.peers.tokens import PeerSecret, Question, authorize, server_time
from penstock.cache.stores import Connection, Hop, Proxies, Timeouts, WebClient

if TYPE_CHECKING:
    import ssl
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from penstock.cache.peers.peer_directory import Peer
    from penstock.cache.peers.protocol import Span
    from penstock.cache.stores import Reply, WebOrigin

_LEAST_S = 0.001  # 0 would mean no limit
_AT_ONCE = 2**18
"""The number of received bytes that wakes a waiting thread. Measured with ranges of 1 MiB: a third
less CPU time on both sides than if each packet wakes it."""


class PeerConnection(Connection):
    """A connection to a peer. If it is unencrypted, the deadline is checked only between system
    calls, each of which the kernel ends after read_s without data."""

    def __init__(
        self, sock: socket.socket, origin: WebOrigin, *, is_public: bool, timeouts: Timeouts
    ) -> None:
        super().__init__(sock, origin, is_public=is_public, timeouts=timeouts)
        self._is_plain = origin.scheme == "http"
        self._at_once, self._patience_s = 1, 0.0

    def watch(self) -> None:
        """See `Connection.watch`; from now on the kernel enforces the time limit."""
        super().watch()
        if self._is_plain:
            seconds = max(self.timeouts.read_s, _LEAST_S)
            limit = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
            for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
                self.sock.setsockopt(socket.SOL_SOCKET, option, limit)
            self.sock.settimeout(None)

    def limit(self, deadline_s: float) -> None:
        """See `Connection.limit`."""
        if self._is_plain and time.monotonic() < deadline_s:
            return
        patience_s = self.timeouts.patience_s(deadline_s)
        # Setting it is a system call, and encrypted bytes come 16 KiB a call.
        if patience_s != self._patience_s:
            self.sock.settimeout(patience_s)
            self._patience_s = patience_s

    def receive_all(self, view: memoryview, deadline_s: float, *, following: int = 0) -> int:
        """See `Connection.receive_all`."""
        if not self._is_plain:
            return super().receive_all(view, deadline_s, following=following)
        # For the answer's last bytes a thread would wait forever if it woke only for more bytes.
        first = view[: max(0, len(view) + following - _AT_ONCE)]
        received = self._receive(first, deadline_s, _AT_ONCE)
        if received < len(first):
            return received
        return received + self._receive(view[received:], deadline_s, 1)

    def _receive(self, view: memoryview, deadline_s: float, at_once: int) -> int:
        """Fill a view; return the number of bytes. at_once: the number of bytes that wakes the
        thread."""
        if view and at_once != self._at_once:
            with self.explaining():
                self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, at_once)
            self._at_once = at_once
        received = 0
        while received < len(view) and (
            got := self.receive(view[received:], deadline_s, flags=socket.MSG_WAITALL)
        ):
            received += got
        return received


class WrongAnswerError(RequestError):
    """A peer's answer doesn't match the request, or its bytes have wrong checksums."""

    def __init__(self, message: str) -> None:
        super().__init__("refused", message)


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerLimits:
    """The time limits of a peer, in seconds: to connect, and without receiving a byte.

    least_rate: bytes/s that an answer must reach, in addition to the other limits.
    """

    connect_s: float = 1.5
    silent_s: float = 2.0
    least_rate: float = 512 * 2**10

    def whole_s(self, size_bytes: int) -> float:
        """Return the seconds that an answer of that size may take."""
        return self.connect_s + self.silent_s + size_bytes / self.least_rate


Keep = Callable[[int, memoryview, int], object]
"""A function that stores a stretch of a blob: its start, its bytes, valid only during the call, and
their checked CRC-32C."""


class _StretchBuffer(threading.local):
    """Reused memory for streamed stretches: allocating each would cost more than the copy."""

    def __init__(self) -> None:
        self.view = memoryview(bytearray(BLOCK_BYTES))


_stretch_buffer = _StretchBuffer()


def _no_tls() -> ssl.SSLContext:
    raise RequestError("refused", "peers are asked without TLS")


class PeerClient:
    """A client that requests ranges of blobs and lists of blobs from peers.

    secret: of the job. tls: returns the context of encrypted connections; None if connections are
    plain. Safe for several threads; not across fork.
    """

    def __init__(
        self,
        secret: PeerSecret,
        *,
        tls: Callable[[], ssl.SSLContext] | None = None,
        limits: PeerLimits | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._secret, self._tls, self._clock = secret, tls, clock
        self._limits = limits = limits or PeerLimits()
        self._scheme = "http" if tls is None else "https"
        self._web = WebClient(
            connect_timeout_s=limits.connect_s,
            read_timeout_s=limits.silent_s,
            timeout_s=limits.whole_s(0),
            tls=tls or _no_tls,
            proxies=Proxies(),  # nodes of a job reach each other directly
            make=PeerConnection,
        )
        self._ahead_s: dict[str, float] = {}  # of peers' clocks that differ from this node's

    def blob(
        self,
        peer: Peer,
        key: str,
        spans: Sequence[Span],
        size_bytes: int,
        *,
        keeps: Sequence[Keep | None] | None = None,
    ) -> list[memoryview | None]:
        """Fetch spans [start, end) of a blob in one request; return the bytes of each, None for
        spans that the peer lacks.

        spans: within the limits MOST_RANGES and MOST_RANGE_BYTES of the protocol. size_bytes: of
        the blob. keeps: for each span None, or a function that stores its stretches as they arrive;
        the returned bytes are then empty. Raises RequestError, WrongAnswerError, and what these
        functions raise; stretches that were stored before are right."""
        question = Question("GET", protocol.blob_path(key), protocol.ranges_text(spans))
        wanted = sum([end - start for start, end in spans])
        with contextlib.closing(self._request(peer, question, wanted)) as reply:
            if reply.status == 404:
                reply.error_body()
                return [None] * len(spans)
            if reply.status != 206:
                raise WrongAnswerError(f"it answered with status {reply.status}")
            found = protocol.spans_in_answer(
                reply.headers.get("content-range", ""), spans, size_bytes
            )
            if found is None or reply.length != sum([end - start for start, end in found]):
                raise WrongAnswerError("it answered with another range than was requested")
            crcs = protocol.crcs_of(reply.headers, len(protocol.stretches(found)))
            if crcs is None:
                raise WrongAnswerError("its answer has no checksums")
            keep_of = dict(zip(spans, keeps or [None] * len(spans), strict=True))
            data_of = _read_spans(reply, {span: keep_of[span] for span in found}, iter(crcs))
            return [data_of.get(span) for span in spans]

    def held(self, peer: Peer, group: str) -> NDArray[np.uint64]:
        """Fetch the list of a peer's blobs of a dataset; see `protocol.held_prefixes`. Raises
        RequestError, WrongAnswerError."""
        most = protocol.HELD_KEY_BYTES * protocol.MOST_HELD_KEYS
        question = Question("GET", protocol.held_path(group))
        with contextlib.closing(self._request(peer, question, most)) as reply:
            if reply.status != 200 or reply.length is None:
                raise WrongAnswerError(f"it answered with status {reply.status}")
            found = protocol.held_prefixes(reply.read(most))
        if found is None:
            raise WrongAnswerError("its list of blobs is malformed")
        return found

    def fault(self, peer: Peer) -> Fault | None:
        """Diagnose why a peer doesn't serve this node; None if it does."""
        return fault_of(probe(peer.address, ProbeSettings(self._secret, self._tls), measures=False))

    def abort(self) -> None:
        """End all requests, now and later. Safe to call twice."""
        self._web.abort()

    # -- one request

    def _request(self, peer: Peer, question: Question, size_bytes: int) -> Reply:
        """Return the answer to a signed request; try again if the peer's clock differs. size_bytes:
        the largest size of the answer."""
        reply, token = self._request_once(peer, question, size_bytes)
        if reply.status != 401:
            return reply
        now_s = server_time(self._secret, token, reply.headers)
        reply.error_body()
        reply.close()
        if now_s is None:
            raise RequestError("denied", "it doesn't know this job's token")
        self._ahead_s[peer.address] = now_s - self._clock()
        return self._request_once(peer, question, size_bytes)[0]

    def _request_once(self, peer: Peer, question: Question, size_bytes: int) -> tuple[Reply, str]:
        """Return an answer, which may be a redirect, and the token of its request."""
        now_s = self._clock() + self._ahead_s.get(peer.address, 0.0)
        token = authorize(self._secret, question, now_s=now_s)
        reply = self._web.ask_once(
            Hop(f"{self._scheme}://{peer.address}{question.path}"),
            headers={},
            own=question.headers(token),
            deadline_s=time.monotonic() + self._limits.whole_s(size_bytes),
        )
        return reply, token


def _read_spans(
    reply: Reply, keep_of: dict[Span, Keep | None], crcs: Iterator[int]
) -> dict[Span, memoryview]:
    """Read the spans of an answer in order, check their stretches, and store those that are kept;
    return the bytes of the others."""
    # One allocation: many small ones would be mapped and unmapped page by page.
    returned = [end - start for (start, end), keep in keep_of.items() if keep is None]
    view, found = np.empty(sum(returned), np.uint8).data, {}
    for (start, end), keep in keep_of.items():
        size = end - start if keep is None else 0
        found[start, end], view = view[:size], view[size:]
        for low, high in protocol.stretches([(start, end)]):
            if keep is None:
                data = found[start, end][low - start : high - start]
            else:
                data = _stretch_buffer.view[: high - low]
            reply.read_into(data)
            crc = next(crcs)
            if crc32c(data) != crc:
                raise WrongAnswerError("its bytes have a wrong checksum")
            if keep is not None:
                keep(low, data, crc)
    return found
