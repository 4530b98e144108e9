"""Offer the peers as a store that never fails: that no peer has a range is an answer too.

One request asks for a range of a blob, or for several small ones of the same: a batch wants several
samples of a shard at once, and each request costs a signature, a look into the other cache, two
heads and two threads that are woken, as much as 100 KB of data. Of a range of which a peer has a
part, its pieces are taken, and the store is asked for what lies around them.
"""

from __future__ import annotations

import contextlib
import threading
import time
from bisect import bisect_right
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol, cast

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
"""A range of so much is worth a request of its own."""
_MOST_BYTES = 2**22
"""Of several ranges in one request: more come faster by two."""

NOT_THERE = Answer(data=b"", version="", object_bytes=-1)
"""The answer for a range that no peer gave."""


class RangesStore(Protocol):
    """A store that is asked for peer ranges."""

    def ranges(self, wanted: PeerRanges) -> Answer:
        """Ask the peers: `Given`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerRanges(ObjectRange):
    """Peer ranges are spans of a blob of so many bytes; start and end tell their bytes in all.

    numbers: of each span, for who asks. keep: takes the bytes of all, stretch by stretch.
    """

    key: str
    blob_bytes: int
    spans: tuple[Span, ...]
    numbers: tuple[int, ...]
    keep: Keep | None = None

    def read(self, store: Store) -> Answer:
        """Ask the peers. Raises what keep raises."""
        return cast("RangesStore", store).ranges(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class RangesAnswer(Answer):
    """The answer to peer ranges: one for each span."""

    answers: tuple[Answer, ...]
    given_bytes: int

    @property
    def size_bytes(self) -> int:
        """Bytes of all of them."""
        return self.given_bytes


def peer_ranges(
    ranges: Sequence[BlobRange], numbers: Sequence[int], keep_of: Callable[[int], Keep | None]
) -> list[PeerRanges]:
    """Make requests for some of the ranges, in their order; small ones of a blob share some.
    keep_of: what keeps the bytes of a number's range as they come, None where its answer does."""
    shared: dict[str, list[int]] = {}
    found: list[list[int]] = []
    for number in numbers:
        one = ranges[number]
        if one.end - one.start >= _SMALL_BYTES:
            found.append([number])
        elif (together := shared.get(one.blob.key)) is None:
            found.append(shared.setdefault(one.blob.key, [number]))
        else:
            together.append(number)
    return [
        _request(ranges, some, keep_of) for together in found for some in _cut(ranges, together)
    ]


def _cut(ranges: Sequence[BlobRange], numbers: list[int]) -> Iterator[list[int]]:
    """Cut numbers of ranges of a blob into such as one request may have: ascending, disjoint."""
    some: list[int] = []
    at = left = 0
    for number in sorted(numbers, key=lambda number: ranges[number].start):
        one = ranges[number]
        size_bytes = one.end - one.start
        if some and (one.start < at or size_bytes > left or len(some) == MOST_RANGES):
            yield some
            some = []
        if not some:
            left = _MOST_BYTES
        some.append(number)
        at, left = one.end, left - size_bytes
    yield some


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
    """What keeps each stretch by the span in which it lies; None where not all are kept."""
    each = [keep for keep in keeps if keep is not None]
    if len(each) < len(keeps):
        return None
    if len(each) == 1:
        return each[0]
    starts = [start for start, _ in spans]
    return lambda start, data, crc: each[bisect_right(starts, start) - 1](start, data, crc)


_MOST_PIECES = 2  # of a range: each leaves one more request to the store
_LEAST_BYTES = 2**16  # a smaller piece costs more than it saves


@dataclass(frozen=True, slots=True, kw_only=True)
class PartialAnswer(Answer):
    """The answer for a range of which a peer gave some pieces: (start in the blob, bytes) each,
    ascending."""

    pieces: tuple[tuple[int, memoryview], ...]


def worthwhile_parts(held: Iterable[Span], span: Span) -> list[Span]:
    """Which parts of a range to ask of a peer that holds these spans: the longest, ascending."""
    inside = [(max(low, span[0]), min(high, span[1])) for low, high in held]
    found = [(low, high) for low, high in inside if high - low >= _LEAST_BYTES]
    return sorted(sorted(found, key=lambda part: part[0] - part[1])[:_MOST_PIECES])


def gaps_beside(span: Span, parts: Iterable[Span]) -> list[Span]:
    """What a range lacks beside parts that don't overlap, of which others may lie elsewhere;
    ascending."""
    inside = sorted(part for part in parts if span[0] <= part[0] and part[1] <= span[1])
    borders = [span[0], *(end for part in inside for end in part), span[1]]
    pairs = zip(borders[::2], borders[1::2], strict=True)
    return [(low, high) for low, high in pairs if low < high]


class PartialRange:
    """Puts a range together from pieces and from what lies between them. Safe for several
    threads."""

    def __init__(self, whole: BlobRange, pieces: tuple[tuple[int, memoryview], ...]) -> None:
        self._whole = whole
        self._data = bytearray(whole.end - whole.start)
        self._left_bytes, self._lock = len(self._data), threading.Lock()
        for start, data in pieces:
            self.put(start, data)
        parts = [(start, start + len(data)) for start, data in pieces]
        gaps = gaps_beside((whole.start, whole.end), parts)
        self.gaps = [self._part(low, high) for low, high in gaps]

    def put(self, start: int, data: memoryview | bytes) -> bool:
        """Take over bytes from a place in the blob; whether that was the last of them."""
        at = start - self._whole.start
        self._data[at : at + len(data)] = data
        with self._lock:
            self._left_bytes -= len(data)
            return not self._left_bytes

    def answer(self, last: Answer) -> Answer:
        """All of it. last: the answer for one of the gaps, or one like it where there is none."""
        return replace(last, data=memoryview(self._data).toreadonly())

    def _part(self, start: int, end: int) -> BlobRange:
        whole, offset = self._whole, self._whole.stored.start - self._whole.start
        stored = replace(whole.stored, start=start + offset, end=end + offset)
        return replace(whole, start=start, end=end, stored=stored)


_MOST_GIVERS = 65_536
_SILENT_S = 1.0
"""A peer that failed later than this said nothing at all, and more questions would take as long."""
_SILENT_REMEDY = (
    "Most often a firewall drops packets: open its TCP port between the nodes. Else the address is "
    "of another network, or that machine is down, stopped or overloaded."
)
_LOG_REMEDY = "Check its address, and look at the log of the job there."
_LIST = "list"


def list_name(peer: Peer) -> str:
    """What the list of all that a peer holds is called here."""
    return f"{_LIST}/{peer.node}"


class PeerStore:
    """Makes requests to the peers that a directory names, and tells it what became of them.

    meter: counts what came. Safe for several threads.
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
        self._givers: dict[str, Peer] = {}
        self._is_closed = False

    def read(
        self,
        path: str,
        span: tuple[int, int] | None = None,
        *,
        version: str | None = None,
        most_bytes: int | None = None,
    ) -> Answer:
        """Hear what a peer holds, by `list_name`, and tell the directory; the answer is empty."""
        del span, version, most_bytes
        kind, _, node = path.partition("/")
        if kind != _LIST:
            raise RequestError("refused", "peers are asked by ranges")
        return self._list(int(node))

    def ranges(self, wanted: PeerRanges) -> Answer:
        """What peers give of some spans, one behind another until none is left: `Given`, with
        NOT_THERE where nobody had one; of a single one `Pieces` of those that have some: nodes
        that share a shard have each their samples of it. Raises what keeping raises."""
        left = list(range(len(wanted.spans)))
        found = [NOT_THERE] * len(left)
        halves: list[tuple[Peer, list[Span]]] = []
        gaps = list(wanted.spans) if len(wanted.spans) == 1 else []
        for peer in self._directory.candidates(wanted.key, self._clock()):
            held = self._ask(peer, wanted, left, found)
            there = [n for n in left if _is_in(wanted.spans[n], held)]
            if there:  # of several it may have some
                self._ask(peer, wanted, there, found)
            left = [n for n in left if found[n] is NOT_THERE]
            if not left:
                break
            parts = [part for gap in gaps for part in worthwhile_parts(held, gap)]
            if parts:
                halves.append((peer, parts))
                gaps = [one for gap in gaps for one in gaps_beside(gap, parts)]
        if left and halves:
            found[0] = self._pieces(halves, wanted)
        return RangesAnswer(
            data=b"",
            version="",
            object_bytes=0,
            answers=tuple(found),
            given_bytes=sum(
                end - start
                for (start, end), one in zip(wanted.spans, found, strict=True)
                if one is not NOT_THERE
            ),
        )

    def _ask(
        self, peer: Peer, wanted: PeerRanges, numbers: list[int], found: list[Answer]
    ) -> list[Span]:
        """Ask a peer for some of the spans: what it gives is noted; else which of the blob's bytes
        it has."""
        spans = [wanted.spans[number] for number in numbers]
        given = self._given(peer, wanted, spans, wanted.keep)
        if isinstance(given, MissingRanges):
            return given.held
        for place, number in enumerate(numbers):
            if given:
                found[number] = Answer(data=given[place], version="", object_bytes=0)
            else:
                found[number] = StreamedAnswer(data=b"", version="", object_bytes=0)
        return []

    def _pieces(self, halves: list[tuple[Peer, list[Span]]], wanted: PeerRanges) -> Answer:
        given = [
            (part[0], self._given(peer, wanted, [part], None))
            for peer, parts in halves
            for part in parts
        ]
        pieces = tuple(
            sorted((at, data[0]) for at, data in given if not isinstance(data, MissingRanges))
        )
        return (
            PartialAnswer(data=b"", version="", object_bytes=0, pieces=pieces)
            if pieces
            else NOT_THERE
        )

    def giver(self, key: str) -> Peer | None:
        """Who gave bytes of a blob last."""
        return self._givers.get(key)

    def _given(
        self, peer: Peer, wanted: PeerRanges, spans: list[Span], keep: Keep | None
    ) -> list[memoryview] | MissingRanges:
        """The bytes of each span, nothing where they were kept; else what the peer says it has."""
        self._meter.add(peer_requests=1)
        key = wanted.key
        try:
            given = self._client.blob(peer, key, spans, wanted.blob_bytes, keep=keep)
        except RequestError as error:
            self._failed(peer, error)
            return MissingRanges([])
        if isinstance(given, MissingRanges):
            self._directory.lacks(peer, key, self._clock())
            return given
        self._directory.answered(peer)
        self._meter.add(bytes_peers=sum([end - start for start, end in spans]))
        with self._lock:
            if len(self._givers) >= _MOST_GIVERS:
                self._givers.clear()
            self._givers[key] = peer
        return given

    def _list(self, node: int) -> Answer:
        peer = self._directory.peer(node)
        if peer is None:
            return NOT_THERE
        began_s = self._clock()
        try:
            marks = self._client.held(peer, self._directory.group)
        except RequestError as error:
            self._failed(peer, error)
            if not self._is_closed:
                self._explain(peer, error, waited_s=self._clock() - began_s)
            return NOT_THERE
        self._directory.tell(peer, marks, self._clock())
        return NOT_THERE

    def _explain(self, peer: Peer, error: RequestError, *, waited_s: float) -> None:
        """Note why a peer that never answered doesn't: by a few questions more, unless it is one
        that says nothing."""
        if self._directory.has_heard(peer) or self._directory.fault(peer) is not None:
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

    # -- what else a store can

    def walk(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """Peers list nothing by name."""
        del prefix
        raise RequestError("refused", "peers have no names")

    def list_folder(self, prefix: str = "") -> tuple[list[ObjectInfo], list[str]]:
        """Peers list nothing by name."""
        del prefix
        raise RequestError("refused", "peers have no names")

    def info(self, path: str) -> ObjectInfo | None:
        """Peers know no names."""
        del path
        raise RequestError("refused", "peers have no names")

    def put(self, local: str, path: str) -> None:
        """Peers take nothing."""
        del local, path
        raise RequestError("refused", "peers take nothing")

    def abort(self) -> None:
        """End what is under way, at once."""
        self._is_closed = True
        self._client.abort()

    def close(self) -> None:
        """Let connections go. Safe to call twice."""
        self._is_closed = True
        self._client.abort()


def _is_in(span: Span, held: list[Span]) -> bool:
    return any([start <= span[0] and span[1] <= end for start, end in held])
