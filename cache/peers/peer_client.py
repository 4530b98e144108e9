"""Send requests to peers: signed, checked, bounded in bytes and time, and never redirected.

One request fetches one range of a blob, or several small ranges of it: a batch needs several
samples of a shard at once, and each request costs a signature, a lookup in the other cache, two
heads and the waking of two threads, as much as 100 KB of data. A peer that doesn't have the whole
blob sends none of them, and the next one is asked; what no peer has is left out.

Measured in cold epochs of 4 nodes (`benchmarks.cluster`: change, two, and shards of 4 MiB): peers
that also served blobs while they filled them saved 0 to 2.4 % of the store's bytes (median 1 %).

Connections are reused. The bytes of an answer are used only if their length and checksum are right;
status, ranges and size must match the request exactly. Streamed bytes are checked and passed on MiB
by MiB, while they are in the processor's cache.
"""

from __future__ import annotations

import contextlib
import ssl
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import numpy as np
from crc32c import crc32c

from penstock.cache.base import Answer, ObjectRange, RequestError, Store, TrafficMeter
from penstock.cache.disk import BLOCK_BYTES
from penstock.cache.errors import PenstockError, warn
from penstock.cache.peers import protocol
from penstock.cache.peers.peer_diagnosis import Fault, ProbeSettings, fault_of, probe
from penstock.cache.peers.trust import PeerSecret, Question, authorize, server_time
from penstock.cache.stores import ConnectionPool, Hop, Proxies, Timeouts, WebClient, WebRequest
from penstock.cache.threads import Outcome, Workers, ordered

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager

    from numpy.typing import NDArray

    from penstock.cache.blobs import BlobRange
    from penstock.cache.peers.peer_directory import Peer, PeerDirectory
    from penstock.cache.peers.protocol import Span
    from penstock.cache.stores import Reply


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
Keeps = Sequence[Keep | None]
Tls = Callable[[], ssl.SSLContext]


class _StretchBuffer(threading.local):
    """Reused memory for streamed stretches: allocating each would cost more than the copy."""

    def __init__(self) -> None:
        self.view = memoryview(bytearray(BLOCK_BYTES))


_stretch_buffer = _StretchBuffer()


class PeerClient:
    """A client that requests ranges of blobs and lists of blobs from peers.

    secret: of the job. tls: returns the context of encrypted connections; None if connections are
    plain. Safe for several threads; not across fork.
    """

    def __init__(
        self, secret: PeerSecret, *, tls: Tls | None = None, limits: PeerLimits | None = None
    ) -> None:
        self._secret, self._tls = secret, tls
        self._limits = limits = limits or PeerLimits()
        self._scheme = "http" if tls is None else "https"
        connect_s, read_s, whole_s = limits.connect_s, limits.silent_s, limits.whole_s(0)
        pool = ConnectionPool(
            timeouts=Timeouts(connect_s=connect_s, read_s=read_s, whole_s=whole_s),
            tls=tls or ssl.create_default_context,  # without it none is needed
            proxies=Proxies(),  # nodes of a job reach each other directly
        )
        self._web = WebClient(pool, agent="")
        self._ahead_s: dict[str, float] = {}  # of peers' clocks that differ from this node's

    def blob(
        self, peer: Peer, key: str, spans: Sequence[Span], size_bytes: int, *, keeps: Keeps = ()
    ) -> list[memoryview] | None:
        """Fetch spans [start, end) of a blob in one request; return the bytes of each, or None if
        the peer doesn't have the blob.

        spans: within the limits MOST_RANGES and MOST_RANGE_BYTES of the protocol. size_bytes: of
        the blob. keeps: for each span None, or a function that stores its stretches as they arrive;
        the returned bytes are then empty. Raises RequestError, WrongAnswerError, and what these
        functions raise; stretches that were stored before are right."""
        question = Question("GET", protocol.blob_path(key), protocol.ranges_text(spans))
        wanted = sum([end - start for start, end in spans])
        with contextlib.closing(self._request(peer, question, wanted)) as reply:
            if reply.status == 404:
                reply.error_body()
                return None
            if reply.status != 206:
                raise WrongAnswerError(f"it answered with status {reply.status}")
            sent = reply.headers.get("content-range")
            if sent != protocol.content_range(spans, size_bytes) or reply.length != wanted:
                raise WrongAnswerError("it answered with another range than was requested")
            crcs = protocol.crcs_of(reply.headers, len(protocol.stretches(spans)))
            if crcs is None:
                raise WrongAnswerError("its answer has no checksums")
            return _read_spans(reply, spans, keeps or [None] * len(spans), iter(crcs))

    def held(self, peer: Peer) -> NDArray[np.uint64]:
        """Fetch the list of a peer's blobs; see `protocol.held_prefixes`. Raises
        RequestError, WrongAnswerError."""
        most = protocol.HELD_KEY_BYTES * protocol.MOST_HELD_KEYS
        question = Question("GET", protocol.HELD)
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
        self._ahead_s[peer.address] = now_s - time.time()
        return self._request_once(peer, question, size_bytes)[0]

    def _request_once(self, peer: Peer, question: Question, size_bytes: int) -> tuple[Reply, str]:
        """Return an answer, which may be a redirect, and the token of its request."""
        now_s = time.time() + self._ahead_s.get(peer.address, 0.0)
        token = authorize(self._secret, question, now_s=now_s)
        hop = Hop(f"{self._scheme}://{peer.address}{question.path}")
        deadline_s = time.monotonic() + self._limits.whole_s(size_bytes)
        return self._web.ask_once(hop, WebRequest(question.headers(token)), deadline_s), token


def _read_spans(
    reply: Reply, spans: Sequence[Span], keeps: Keeps, crcs: Iterator[int]
) -> list[memoryview]:
    """Read the spans of an answer in order, check their stretches, and store those that are kept;
    return the bytes of the others, and no bytes of these."""
    # One allocation: many small ones would be mapped and unmapped page by page.
    sizes = [
        end - start if keep is None else 0 for (start, end), keep in zip(spans, keeps, strict=True)
    ]
    view, found = np.empty(sum(sizes), np.uint8).data, []
    for (start, end), keep, size in zip(spans, keeps, sizes, strict=True):
        found.append(view[:size])
        view = view[size:]
        for low, high in protocol.stretches([(start, end)]):
            if keep is None:
                data = found[-1][low - start : high - start]
            else:
                data = _stretch_buffer.view[: high - low]
            reply.read_into(data)
            crc = next(crcs)
            if crc32c(data) != crc:
                raise WrongAnswerError("its bytes have a wrong checksum")
            if keep is not None:
                keep(low, data, crc)
    return found


_SMALL_BYTES = 2**20
"""A range of at least so many bytes gets a separate request."""
_MOST_BYTES = 2**22
"""The most bytes of several ranges in one request: more arrive faster in two requests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerRanges(ObjectRange):
    """Ranges of one blob that one request fetches, ascending and disjoint; end - start is their
    total size.

    numbers, deliver: the caller's number of each range, and the function that receives its answer.
    """

    ranges: tuple[BlobRange, ...]
    numbers: tuple[int, ...]
    deliver: Callable[[int, Answer], None]

    def read(self, store: Store, delivering: Callable[[], AbstractContextManager[None]]) -> Answer:
        """Request the ranges from the peers. Raises what `deliver` and the ranges' `keep` raise."""
        return cast("PeerStore", store).ranges(self, delivering)


def peer_ranges(
    ranges: Sequence[BlobRange], numbers: Sequence[int], deliver: Callable[[int, Answer], None]
) -> list[PeerRanges]:
    """Make requests for those of the ranges that `numbers` lists, in their order; small ranges of a
    blob share requests. deliver: receives the answer to a range, by the range's number."""
    groups: dict[tuple[str, int], list[int]] = {}
    for number in numbers:
        wanted = ranges[number]
        is_small = wanted.end - wanted.start < _SMALL_BYTES
        groups.setdefault((wanted.blob.key, -1 if is_small else number), []).append(number)
    found = []
    for (key, _), group in groups.items():
        for part in _cut(ranges, group):
            path, some = f"blob/{key}", tuple([ranges[number] for number in part])
            end = sum([one.end - one.start for one in some])
            found.append(
                PeerRanges(path=path, end=end, ranges=some, numbers=tuple(part), deliver=deliver)
            )
    return found


def _cut(ranges: Sequence[BlobRange], numbers: list[int]) -> Iterator[list[int]]:
    """Divide numbers of ranges of a blob into groups that fit into one request: ascending and
    disjoint."""
    group: list[int] = []
    at = left = 0
    for number in sorted(numbers, key=lambda number: ranges[number].start):
        wanted = ranges[number]
        size_bytes = wanted.end - wanted.start
        if group and (wanted.start < at or size_bytes > left or len(group) == protocol.MOST_RANGES):
            yield group
            group = []
        if not group:
            left = _MOST_BYTES
        group.append(number)
        at, left = wanted.end, left - size_bytes
    yield group


_SILENT_S = 1.0
"""A peer that fails later than this sends nothing at all, and a probe would take as long."""
_SILENT_REMEDY = (
    "Most often a firewall drops packets: open its TCP port between the nodes. Otherwise the "
    "address belongs to another network, or that machine is down, stopped or overloaded."
)
_LOG_REMEDY = "Check its address, and read the log of the job on that node."


_FIRST_S = 4.0
"""Seconds for which the first ranges wait for the peers' lists."""
_AGAIN_S, _SOON_S = 10.0, 2.0
"""Seconds between requests for lists: fewer for short lists, which cost little."""
_SHORT = 100_000  # blobs in all of them
_MOST = 64
"""The most peers that are asked for lists, one after another on each of a few threads."""
_LIST_THREADS = 16
_SHOWN = 5  # of those that don't answer
_NO_ANSWER = (
    f"no answer within {_FIRST_S:.0f} s. Check the address, that the job runs there, and that no "
    "firewall blocks it: `penstock doctor --peer ADDRESS` tries each stage."
)


class PeerStore:
    """A store that requests ranges from the peers of a directory, and records the results there. It
    fetches the lists of their blobs again when they may be out of date.

    It has what a `Fetcher` of `PeerRanges` uses of a store. pool: the thread that updates the peers
    and their lists. meter: counts the received bytes. look: returns the current peers, None if
    unchanged; called before lists are fetched again. Safe for several threads.
    """

    url = "peers"

    def __init__(
        self,
        directory: PeerDirectory,
        client: PeerClient,
        pool: Workers,
        *,
        meter: TrafficMeter,
        look: Callable[[], Sequence[Peer] | None] | None = None,
    ) -> None:
        self._directory, self._client, self._pool = directory, client, pool
        self._meter, self._look = meter, look
        self._first: Outcome[None] | None = None
        self._wait_until_s = self._due_s = 0.0
        self._has_missed = self._has_warned = self._is_closed = False

    # -- lists

    def missed(self) -> None:
        """Record a range that only the remote had: the lists may be out of date."""
        self._has_missed = True

    def refresh(self) -> None:
        """Fetch the lists if they are due; the first time wait for them, for at most _FIRST_S."""
        now_s = time.monotonic()
        if self._first is None:
            self._due_s, self._wait_until_s = now_s + _SOON_S, now_s + _FIRST_S
            self._first = self._pool.submit(self._fetch, None)
        elif self._has_missed and now_s >= self._due_s:
            self._due_s, self._has_missed = now_s + self._again_s, False
            self._pool.submit(self._fetch, self._look)
        if not self._first.done():
            self._first.wait(self._wait_until_s - now_s)
        if not self._has_warned:
            self._has_warned = True
            self._warn_of_silence()

    @property
    def _again_s(self) -> float:
        share = min(1.0, self._directory.listed_blobs / _SHORT)
        return _SOON_S + share * (_AGAIN_S - _SOON_S)

    def _warn_of_silence(self) -> None:
        directory = self._directory
        reasons: dict[str, list[Peer]] = {}
        for peer in directory.peers[:_MOST]:
            if (record := directory.record(peer)).marks is None:
                reasons.setdefault(record.fault or _NO_ANSWER, []).append(peer)
        for reason, peers in reasons.items():
            shown = ", ".join(f"node {peer.node} ({peer.address})" for peer in peers[:_SHOWN])
            more = f" and {len(peers) - _SHOWN} more" if len(peers) > _SHOWN else ""
            held = "they hold" if len(peers) > 1 else "it holds"
            warn(
                f"peers: {shown}{more}: {reason} Until then, the data that {held} is fetched from "
                "the remote."
            )

    def _fetch(self, look: Callable[[], Sequence[Peer] | None] | None) -> None:
        """Fetch the lists that are due, after updating the peers by look()."""
        if look is not None and (peers := look()) is not None:
            self._directory.set_peers(peers)
        due = self._directory.due_for_list(time.monotonic(), older_s=self._again_s / 2, most=_MOST)
        for _ in ordered(
            self.fetch_list, due, workers=_LIST_THREADS, ahead=_MOST, name="peer-lists"
        ):
            pass

    def fetch_list(self, peer: Peer) -> None:
        """Fetch the list of a peer's blobs, and store it in the directory."""
        began_s = time.monotonic()
        try:
            marks = self._client.held(peer)
        except RequestError as error:
            self._failed(peer, error)
            if not self._is_closed:
                self._explain(peer, error, waited_s=time.monotonic() - began_s)
        else:
            self._directory.set_list(peer, marks, time.monotonic())

    # -- ranges

    def ranges(
        self, wanted: PeerRanges, delivering: Callable[[], AbstractContextManager[None]]
    ) -> Answer:
        """Request ranges from one peer after another until one has their blob, and deliver them.
        delivering: see `ObjectRange.read`. Raises what `deliver` and the ranges' `keep` raise."""

        def keep_of(one: BlobRange) -> Keep | None:
            if (keep := one.keep) is None:
                return None

            def keep_if_wanted(start: int, data: memoryview, crc: int) -> None:
                with delivering():
                    keep(start, data, crc)

            return keep_if_wanted

        blob, passed_bytes = wanted.ranges[0].blob, 0
        spans = [(one.start, one.end) for one in wanted.ranges]
        keeps = [keep_of(one) for one in wanted.ranges]
        for peer in self._directory.candidates(blob.key, time.monotonic()):
            self._meter.add(peer_requests=1)
            try:
                found = self._client.blob(peer, blob.key, spans, blob.size_bytes, keeps=keeps)
            except RequestError as error:
                self._failed(peer, error)
                continue
            self._directory.answered(peer, key=None if found is None else blob.key)
            if found is not None:
                passed_bytes = wanted.end - wanted.start
                self._meter.add(bytes_peers=passed_bytes)
                for number, one, data in zip(wanted.numbers, wanted.ranges, found, strict=True):
                    with delivering():
                        wanted.deliver(number, _answer_of(one, data))
                break
            self._directory.lacks(peer, blob.key)
        return Answer(data=b"", version="", object_bytes=0, passed_bytes=passed_bytes)

    def _explain(self, peer: Peer, error: RequestError, *, waited_s: float) -> None:
        """Record why a peer that never answered doesn't answer. Probe it for that, unless it sends
        nothing at all."""
        record = self._directory.record(peer)
        if record.marks is not None or record.fault is not None:
            return
        is_silent, fault = waited_s >= _SILENT_S, None
        if not is_silent:
            with contextlib.suppress(OSError, ValueError, PenstockError):
                fault = self._client.fault(peer)
        if fault is not None:
            record.fault = f"{fault.found}. {fault.remedy}"
        else:
            record.fault = f"{error}. {_SILENT_REMEDY if is_silent else _LOG_REMEDY}"

    def _failed(self, peer: Peer, error: RequestError) -> None:
        self._meter.add(peer_failed=1)
        is_wrong = isinstance(error, WrongAnswerError)
        self._directory.failed(peer, time.monotonic(), reason=str(error), is_wrong=is_wrong)

    def close(self) -> None:
        """End all requests at once, and close the connections. Safe to call twice."""
        self._is_closed = True
        self._client.abort()


def _answer_of(wanted: BlobRange, data: memoryview) -> Answer:
    """Return the answer with a range's bytes, or without them if they were kept as they arrived."""
    whole_bytes = wanted.segment.whole_bytes
    passed_bytes = 0 if wanted.keep is None else wanted.end - wanted.start
    return Answer(data=data, version="", object_bytes=whole_bytes, passed_bytes=passed_bytes)
