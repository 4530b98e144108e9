"""Wrap the peers as a store that never fails: if no peer has a range, the answer reports that.

One request fetches one range of a blob, or several small ranges of it: a batch needs several
samples of a shard at once, and each request costs a signature, a lookup in the other cache, two
heads and the waking of two threads, as much as 100 KB of data. If a peer has only parts of a range,
those parts are fetched from it, and the store is asked for the gaps between them.
"""

from __future__ import annotations

import contextlib
import threading
import time
from bisect import bisect_right
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, cast

from penstock.cache.base import Answer, ObjectRange, RequestError, StreamedAnswer
from penstock.cache.errors import PenstockError
from penstock.cache.peers.peer_client import MissingRanges, WrongAnswerError
from penstock.cache.peers.protocol import MOST_RANGES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from penstock.cache.base import ObjectInfo, Store, TrafficMeter
    from penstock.cache.blobs import BlobRange
    from penstock.cache.peers.peer_client import Keep, PeerClient
    from penstock.cache.peers.peer_directory import Peer, PeerDirectory
    from penstock.cache.peers.protocol import Span

_SMALL_BYTES = 2**20
"""A range of at least so many bytes gets a separate request."""
_MOST_BYTES = 2**22
"""The most bytes of several ranges in one request: more arrive faster in two requests."""

NOT_FOUND = Answer(data=b"", version="", object_bytes=-1)
"""The answer for a range that no peer has delivered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerRanges(ObjectRange):
    """Spans of one blob that one request fetches; end - start is their total size.

    blob_bytes: the blob's size. numbers: the caller's number of each span. keep: receives the bytes
    of all spans, stretch by stretch; None returns them in the answer.
    """

    key: str
    blob_bytes: int
    spans: tuple[Span, ...]
    numbers: tuple[int, ...]
    keep: Keep | None = None

    def read(self, store: Store) -> Answer:
        """Request the spans from the peers. Raises what `keep` raises."""
        return cast("PeerStore", store).ranges(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class RangesAnswer(Answer):
    """The answers for the spans of PeerRanges, one for each span."""

    answers: tuple[Answer, ...]
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
    shared: dict[str, list[int]] = {}
    groups: list[list[int]] = []
    for number in numbers:
        wanted = ranges[number]
        if wanted.end - wanted.start >= _SMALL_BYTES:
            groups.append([number])
        elif (group := shared.get(wanted.blob.key)) is None:
            groups.append(shared.setdefault(wanted.blob.key, [number]))
        else:
            group.append(number)
    return [_request(ranges, part, keep_of) for group in groups for part in _cut(ranges, group)]


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
        keep=_keep(spans, [keep_of(number) for number in numbers]),
    )


def _keep(spans: Sequence[Span], keeps: list[Keep | None]) -> Keep | None:
    """Return a function that stores each stretch by the function of its span; None unless every
    span has one."""
    by_span = [keep for keep in keeps if keep is not None]
    if len(by_span) < len(keeps):
        return None
    if len(by_span) == 1:
        return by_span[0]
    starts = [start for start, _ in spans]
    return lambda start, data, crc: by_span[bisect_right(starts, start) - 1](start, data, crc)


_MOST_PIECES = 2  # of a range, because each piece adds one request to the store
_LEAST_BYTES = 2**16  # a smaller piece costs more than it saves


@dataclass(frozen=True, slots=True, kw_only=True)
class PartialAnswer(Answer):
    """The answer for a range of which peers have delivered some pieces.

    pieces: (start in the blob, bytes) of each, ascending.
    """

    pieces: tuple[tuple[int, memoryview], ...]


def worthwhile_parts(held: Iterable[Span], span: Span) -> list[Span]:
    """Choose the parts of a range to request from a peer that holds these spans: the longest ones,
    ascending."""
    inside = [(max(low, span[0]), min(high, span[1])) for low, high in held]
    found = [(low, high) for low, high in inside if high - low >= _LEAST_BYTES]
    return sorted(sorted(found, key=lambda part: part[0] - part[1])[:_MOST_PIECES])


def gaps_between(span: Span, parts: Iterable[Span]) -> list[Span]:
    """Return the spans of a range that disjoint parts don't cover, ascending. Parts outside the
    range are ignored."""
    inside = sorted(part for part in parts if span[0] <= part[0] and part[1] <= span[1])
    borders = [span[0], *(end for part in inside for end in part), span[1]]
    pairs = zip(borders[::2], borders[1::2], strict=True)
    return [(low, high) for low, high in pairs if low < high]


class PartialRange:
    """A range that is assembled from the pieces of peers and the gaps between them.

    gaps: the ranges that are still missing. Safe for several threads.
    """

    def __init__(self, whole: BlobRange, pieces: tuple[tuple[int, memoryview], ...]) -> None:
        self._whole = whole
        self._data = bytearray(whole.end - whole.start)
        self._left_bytes, self._lock = len(self._data), threading.Lock()
        for start, data in pieces:
            self.put(start, data)
        parts = [(start, start + len(data)) for start, data in pieces]
        offset = whole.stored.start - whole.start
        self.gaps = [
            replace(
                whole,
                start=low,
                end=high,
                stored=replace(whole.stored, start=low + offset, end=high + offset),
            )
            for low, high in gaps_between((whole.start, whole.end), parts)
        ]

    def put(self, start: int, data: memoryview | bytes) -> bool:
        """Add bytes that begin at a position in the blob; return True if no bytes are missing any
        more."""
        at = start - self._whole.start
        self._data[at : at + len(data)] = data
        with self._lock:
            self._left_bytes -= len(data)
            return not self._left_bytes

    def answer(self, last: Answer) -> Answer:
        """Return the answer for the entire range. last: the answer for one of the gaps, or a
        similar answer if there were no gaps."""
        return replace(last, data=memoryview(self._data).toreadonly())


_MOST_SOURCES = 65_536
_SILENT_S = 1.0
"""A peer that fails later than this sends nothing at all, and a probe would take as long."""
_SILENT_REMEDY = (
    "Most often a firewall drops packets: open its TCP port between the nodes. Otherwise the "
    "address belongs to another network, or that machine is down, stopped or overloaded."
)
_LOG_REMEDY = "Check its address, and read the log of the job on that node."
_LIST = "list"


def list_name(peer: Peer) -> str:
    """Return the path of a peer's list of blobs, for `PeerStore.read`."""
    return f"{_LIST}/{peer.node}"


class PeerStore:
    """A store that requests ranges from the peers of a directory, and records the results there.

    meter: counts the received bytes. Safe for several threads.
    """

    url = "peers"
    scope = ""
    secrets: tuple[str, ...] = ()

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

    def read(
        self,
        path: str,
        span: tuple[int, int] | None = None,
        *,
        version: str | None = None,
        most_bytes: int | None = None,
    ) -> Answer:
        """Fetch a peer's list of blobs, whose path `list_name` returns, and store it in the
        directory; the answer is empty."""
        del span, version, most_bytes
        kind, _, node = path.partition("/")
        if kind != _LIST:
            raise RequestError("refused", "peers are asked by ranges")
        peer = self._directory.peer(int(node))
        if peer is not None:
            began_s = self._clock()
            try:
                marks = self._client.held(peer, self._directory.group)
            except RequestError as error:
                self._failed(peer, error)
                if not self._is_closed:
                    self._explain(peer, error, waited_s=self._clock() - began_s)
            else:
                self._directory.set_list(peer, marks, self._clock())
        return NOT_FOUND

    def ranges(self, wanted: PeerRanges) -> Answer:
        """Request spans from one peer after another until none is missing; return a RangesAnswer.

        A span that no peer has is answered by NOT_FOUND, or, if it is the only one, by a
        PartialAnswer with the pieces that peers have: nodes that share a shard hold different
        samples of it. Raises what `keep` raises."""
        left = list(range(len(wanted.spans)))
        answers = [NOT_FOUND] * len(left)
        partial: list[tuple[Peer, list[Span]]] = []
        gaps = list(wanted.spans) if len(wanted.spans) == 1 else []
        for peer in self._directory.candidates(wanted.key, self._clock()):
            held = self._request(peer, wanted, left, answers)
            spans = [wanted.spans[n] for n in left]
            present = [
                n
                for n, (start, end) in zip(left, spans, strict=True)
                if any([low <= start and end <= high for low, high in held])
            ]
            if present:  # the peer has some of several spans
                self._request(peer, wanted, present, answers)
            left = [n for n in left if answers[n] is NOT_FOUND]
            if not left:
                break
            parts = [part for gap in gaps for part in worthwhile_parts(held, gap)]
            if parts:
                partial.append((peer, parts))
                gaps = [rest for gap in gaps for rest in gaps_between(gap, parts)]
        if left and partial:
            fetched = [
                (part[0], self._fetch(peer, wanted, [part], None))
                for peer, parts in partial
                for part in parts
            ]
            pieces = sorted(
                (at, data[0]) for at, data in fetched if not isinstance(data, MissingRanges)
            )
            if pieces:
                answers[0] = PartialAnswer(
                    data=b"", version="", object_bytes=0, pieces=tuple(pieces)
                )
        return RangesAnswer(
            data=b"",
            version="",
            object_bytes=0,
            answers=tuple(answers),
            delivered_bytes=sum(
                end - start
                for (start, end), answer in zip(wanted.spans, answers, strict=True)
                if answer is not NOT_FOUND
            ),
        )

    def _request(
        self, peer: Peer, wanted: PeerRanges, numbers: list[int], answers: list[Answer]
    ) -> list[Span]:
        """Request some of the spans from a peer, and store their answers. If the peer lacks some
        bytes, store none, and return the spans of the blob that it has."""
        fetched = self._fetch(peer, wanted, [wanted.spans[n] for n in numbers], wanted.keep)
        if isinstance(fetched, MissingRanges):
            return fetched.held
        for place, number in enumerate(numbers):
            if fetched:
                answers[number] = Answer(data=fetched[place], version="", object_bytes=0)
            else:
                answers[number] = StreamedAnswer(data=b"", version="", object_bytes=0)
        return []

    def last_source(self, key: str) -> Peer | None:
        """Return the peer that last delivered bytes of a blob; None if there is none."""
        return self._sources.get(key)

    def _fetch(
        self, peer: Peer, wanted: PeerRanges, spans: list[Span], keep: Keep | None
    ) -> list[memoryview] | MissingRanges:
        """Return the bytes of each span, an empty list if `keep` has stored them, or the spans that
        the peer has."""
        self._meter.add(peer_requests=1)
        key = wanted.key
        try:
            fetched = self._client.blob(peer, key, spans, wanted.blob_bytes, keep=keep)
        except RequestError as error:
            self._failed(peer, error)
            return MissingRanges([])
        if isinstance(fetched, MissingRanges):
            self._directory.lacks(peer, key, self._clock())
            return fetched
        self._directory.answered(peer)
        self._meter.add(bytes_peers=sum([end - start for start, end in spans]))
        with self._lock:
            if len(self._sources) >= _MOST_SOURCES:
                self._sources.clear()
            self._sources[key] = peer
        return fetched

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

    # -- the other methods of a store

    def walk(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """Raise RequestError: peers have no names of objects."""
        raise RequestError("refused", f"peers list no folders ({prefix})")

    def list_folder(self, prefix: str = "") -> tuple[list[ObjectInfo], list[str]]:
        """Raise RequestError: peers have no names of objects."""
        raise RequestError("refused", f"peers list no folders ({prefix})")

    def info(self, path: str) -> ObjectInfo | None:
        """Raise RequestError: peers have no names of objects."""
        raise RequestError("refused", f"peers have no objects by name ({path})")

    def put(self, local: str, path: str) -> None:
        """Raise RequestError: peers accept no uploads."""
        raise RequestError("refused", f"peers accept no uploads ({local} to {path})")

    def abort(self) -> None:
        """End all requests at once."""
        self._is_closed = True
        self._client.abort()

    def close(self) -> None:
        """Close the connections. Safe to call twice."""
        self.abort()
