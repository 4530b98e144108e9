"""The peers as a store for a fetcher, which never fails: what nobody gives is an answer, too."""

from __future__ import annotations

import contextlib
import threading
import time
from typing import TYPE_CHECKING

from penstock.cache.base.store import Answer, Kept, RequestError
from penstock.cache.errors import PenstockError
from penstock.cache.peers.half_ranges import Pieces, gaps_of, worthwhile
from penstock.cache.peers.peer_client import Lacks, WrongAnswerError
from penstock.cache.peers.peer_ranges import NOT_THERE, Given

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from penstock.cache.base.counters import TrafficMeter
    from penstock.cache.base.store import ObjectInfo
    from penstock.cache.peers.peer_client import Keep, PeerClient
    from penstock.cache.peers.peer_directory import Peer, PeerDirectory
    from penstock.cache.peers.peer_ranges import PeerRanges
    from penstock.cache.peers.protocol import Span

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
            parts = [part for gap in gaps for part in worthwhile(held, gap)]
            if parts:
                halves.append((peer, parts))
                gaps = [one for gap in gaps for one in gaps_of(gap, parts)]
        if left and halves:
            found[0] = self._pieces(halves, wanted)
        return Given(
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
        if isinstance(given, Lacks):
            return given.held
        for place, number in enumerate(numbers):
            if given:
                found[number] = Answer(data=given[place], version="", object_bytes=0)
            else:
                found[number] = Kept(data=b"", version="", object_bytes=0)
        return []

    def _pieces(self, halves: list[tuple[Peer, list[Span]]], wanted: PeerRanges) -> Answer:
        given = [
            (part[0], self._given(peer, wanted, [part], None))
            for peer, parts in halves
            for part in parts
        ]
        pieces = tuple(sorted((at, data[0]) for at, data in given if not isinstance(data, Lacks)))
        return Pieces(data=b"", version="", object_bytes=0, pieces=pieces) if pieces else NOT_THERE

    def giver(self, key: str) -> Peer | None:
        """Who gave bytes of a blob last."""
        return self._givers.get(key)

    def _given(
        self, peer: Peer, wanted: PeerRanges, spans: list[Span], keep: Keep | None
    ) -> list[memoryview] | Lacks:
        """The bytes of each span, nothing where they were kept; else what the peer says it has."""
        self._meter.add(peer_requests=1)
        key = wanted.key
        try:
            given = self._client.blob(peer, key, spans, wanted.blob_bytes, keep=keep)
        except RequestError as error:
            self._failed(peer, error)
            return Lacks([])
        if isinstance(given, Lacks):
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

    def top(self, prefix: str = "") -> tuple[list[ObjectInfo], list[str]]:
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
