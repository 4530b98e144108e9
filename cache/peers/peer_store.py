"""Request ranges of blobs from the peers that may have them; what no peer has is left out.

One request fetches one range of a blob, or several small ranges of it: a batch needs several
samples of a shard at once, and each request costs a signature, a lookup in the other cache, two
heads and the waking of two threads, as much as 100 KB of data. A peer sends those of the ranges
that it has, and the next one is asked for the others.
"""

from __future__ import annotations

import contextlib
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from penstock.cache.base import Answer, ObjectRange, RequestError
from penstock.cache.errors import PenstockError
from penstock.cache.peers.peer_client import WrongAnswerError
from penstock.cache.peers.protocol import MOST_RANGES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from penstock.cache.base import Store, TrafficMeter
    from penstock.cache.blobs import BlobRange
    from penstock.cache.peers.peer_client import Keep, PeerClient
    from penstock.cache.peers.peer_directory import Peer, PeerDirectory
    from penstock.cache.peers.protocol import Span

_SMALL_BYTES = 2**20
"""A range of at least so many bytes gets a separate request."""
_MOST_BYTES = 2**22
"""The most bytes of several ranges in one request: more arrive faster in two requests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerRanges(ObjectRange):
    """Spans of one blob that one request fetches; end - start is their total size.

    blob_bytes: the blob's size. numbers, keeps: the caller's number of each span, and the function
    that stores its bytes, stretch by stretch; None returns them in the answer.
    """

    key: str
    blob_bytes: int
    spans: tuple[Span, ...]
    numbers: tuple[int, ...]
    keeps: tuple[Keep | None, ...]

    def read(self, store: Store) -> Answer:
        """Request the spans from the peers. Raises what `keeps` raise."""
        return cast("PeerStore", store).ranges(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class RangesAnswer(Answer):
    """The bytes of each span of PeerRanges, empty if they were stored; None for a span that no peer
    has delivered."""

    parts: tuple[memoryview | None, ...]
    delivered_bytes: int

    @property
    def size_bytes(self) -> int:
        """The number of bytes that the peers have delivered."""
        return self.delivered_bytes


def peer_ranges(
    ranges: Sequence[BlobRange], numbers: Sequence[int], keep_of: Callable[[int], Keep | None]
) -> list[PeerRanges]:
    """Make requests for those of the ranges that `numbers` lists, in their order; small ranges of a
    blob share requests. keep_of: returns the function that stores the bytes of a range as they
    arrive, by the range's number, or None."""
    groups: dict[tuple[str, int], list[int]] = {}
    for number in numbers:
        wanted = ranges[number]
        is_small = wanted.end - wanted.start < _SMALL_BYTES
        groups.setdefault((wanted.blob.key, -1 if is_small else number), []).append(number)
    return [
        _request(ranges, part, keep_of) for group in groups.values() for part in _cut(ranges, group)
    ]


def _cut(ranges: Sequence[BlobRange], numbers: list[int]) -> Iterator[list[int]]:
    """Divide numbers of ranges of a blob into groups that fit into one request: ascending and
    disjoint."""
    group: list[int] = []
    at = left = 0
    for number in sorted(numbers, key=lambda number: ranges[number].start):
        wanted = ranges[number]
        size_bytes = wanted.end - wanted.start
        if group and (wanted.start < at or size_bytes > left or len(group) == MOST_RANGES):
            yield group
            group = []
        if not group:
            left = _MOST_BYTES
        group.append(number)
        at, left = wanted.end, left - size_bytes
    yield group


def _request(
    ranges: Sequence[BlobRange], numbers: list[int], keep_of: Callable[[int], Keep | None]
) -> PeerRanges:
    spans = tuple([(ranges[number].start, ranges[number].end) for number in numbers])
    blob = ranges[numbers[0]].blob
    return PeerRanges(
        path=f"blob/{blob.key}",
        start=0,
        end=sum([end - start for start, end in spans]),
        version=None,
        key=blob.key,
        blob_bytes=blob.size_bytes,
        spans=spans,
        numbers=tuple(numbers),
        keeps=tuple([keep_of(number) for number in numbers]),
    )


_MOST_SOURCES = 65_536
_SILENT_S = 1.0
"""A peer that fails later than this sends nothing at all, and a probe would take as long."""
_SILENT_REMEDY = (
    "Most often a firewall drops packets: open its TCP port between the nodes. Otherwise the "
    "address belongs to another network, or that machine is down, stopped or overloaded."
)
_LOG_REMEDY = "Check its address, and read the log of the job on that node."


class PeerStore:
    """A store that requests ranges from the peers of a directory, and records the results there.

    It has what a `Fetcher` of `PeerRanges` uses of a store. meter: counts the received bytes. Safe
    for several threads.
    """

    url = "peers"

    def __init__(
        self,
        directory: PeerDirectory,
        client: PeerClient,
        *,
        meter: TrafficMeter,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._directory, self._client, self._meter = directory, client, meter
        self._clock = clock
        self._lock = threading.Lock()
        self._sources: dict[str, Peer] = {}
        self._is_closed = False

    def fetch_list(self, peer: Peer) -> None:
        """Fetch the list of a peer's blobs, and store it in the directory."""
        began_s = self._clock()
        try:
            marks = self._client.held(peer, self._directory.group)
        except RequestError as error:
            self._failed(peer, error)
            if not self._is_closed:
                self._explain(peer, error, waited_s=self._clock() - began_s)
        else:
            self._directory.set_list(peer, marks, self._clock())

    def ranges(self, wanted: PeerRanges) -> RangesAnswer:
        """Request spans from one peer after another until none is missing. Raises what
        `keeps` raise."""
        key, spans, delivered_bytes = wanted.key, wanted.spans, 0
        parts: list[memoryview | None] = [None] * len(spans)
        for peer in self._directory.candidates(key, self._clock()):
            left = [number for number, part in enumerate(parts) if part is None]
            if not left:
                break
            self._meter.add(peer_requests=1)
            try:
                found = self._client.blob(
                    peer,
                    key,
                    [spans[n] for n in left],
                    wanted.blob_bytes,
                    keeps=[wanted.keeps[n] for n in left],
                )
            except RequestError as error:
                self._failed(peer, error)
                continue
            self._directory.answered(peer)
            if None in found:
                self._directory.lacks(peer, key, self._clock())
            size_bytes = 0
            for number, part in zip(left, found, strict=True):
                if part is not None:
                    parts[number] = part
                    size_bytes += spans[number][1] - spans[number][0]
            if size_bytes:
                self._meter.add(bytes_peers=size_bytes)
                delivered_bytes += size_bytes
                with self._lock:
                    if len(self._sources) >= _MOST_SOURCES:
                        self._sources.clear()
                    self._sources[key] = peer
        return RangesAnswer(
            data=b"",
            version="",
            object_bytes=0,
            parts=tuple(parts),
            delivered_bytes=delivered_bytes,
        )

    def last_source(self, key: str) -> Peer | None:
        """Return the peer that last delivered bytes of a blob; None if there is none."""
        return self._sources.get(key)

    def _explain(self, peer: Peer, error: RequestError, *, waited_s: float) -> None:
        """Record why a peer that never answered doesn't answer. Probe it for that, unless it sends
        nothing at all."""
        if self._directory.has_list(peer) or self._directory.fault(peer) is not None:
            return
        is_silent, fault = waited_s >= _SILENT_S, None
        if not is_silent:
            with contextlib.suppress(OSError, ValueError, PenstockError):
                fault = self._client.fault(peer)
        if fault is not None:
            text = f"{fault.found}. {fault.remedy}"
        else:
            text = f"{error}. {_SILENT_REMEDY if is_silent else _LOG_REMEDY}"
        self._directory.note_fault(peer, text)

    def _failed(self, peer: Peer, error: RequestError) -> None:
        self._meter.add(peer_failed=1)
        is_wrong = isinstance(error, WrongAnswerError)
        self._directory.failed(peer, self._clock(), reason=str(error), is_wrong=is_wrong)

    def abort(self) -> None:
        """End all requests at once."""
        self._is_closed = True
        self._client.abort()

    def close(self) -> None:
        """Close the connections. Safe to call twice."""
        self.abort()
