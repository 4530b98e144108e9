"""The peers as a store for a fetcher, which never fails: what nobody gives is an answer, too."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from penstock.cache.base.store import Answer, RequestError
from penstock.cache.peers.half_ranges import Pieces, worthwhile
from penstock.cache.peers.peer_client import WrongAnswerError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from penstock.cache.base.counters import TrafficMeter
    from penstock.cache.base.store import ObjectInfo
    from penstock.cache.peers.peer_client import PeerClient
    from penstock.cache.peers.peer_directory import Peer, PeerDirectory
    from penstock.cache.peers.protocol import Span

NOT_THERE = Answer(data=b"", version="", object_bytes=-1)
"""The answer for a range that no peer gave."""
_MOST_GIVERS = 65_536
_BLOB, _LIST = "blob", "list"


def blob_name(key: str, size_bytes: int) -> str:
    """What a blob is called here."""
    return f"{_BLOB}/{key}/{size_bytes}"


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

    def read(
        self,
        path: str,
        span: tuple[int, int] | None = None,
        *,
        version: str | None = None,
        most_bytes: int | None = None,
    ) -> Answer:
        """What the first peer gives that has it all; else `Pieces` of the first one that has some;
        else NOT_THERE."""
        del version, most_bytes
        kind, name, *rest = path.split("/")
        if kind == _LIST:
            return self._list(int(name))
        assert span is not None
        half: tuple[Peer, list[Span]] | None = None
        for peer in self._directory.candidates(name, self._clock()):
            found = self._range(peer, name, span, int(*rest))
            if isinstance(found, memoryview):
                return Answer(data=found, version="", object_bytes=0)
            if half is None and (parts := worthwhile(found, span)):
                half = peer, parts
        return NOT_THERE if half is None else self._pieces(*half, name, int(*rest))

    def _pieces(self, peer: Peer, parts: list[Span], key: str, size_bytes: int) -> Answer:
        given = ((part[0], self._range(peer, key, part, size_bytes)) for part in parts)
        pieces = tuple((at, data) for at, data in given if isinstance(data, memoryview))
        return Pieces(data=b"", version="", object_bytes=0, pieces=pieces) if pieces else NOT_THERE

    def giver(self, key: str) -> Peer | None:
        """Who gave bytes of a blob last."""
        return self._givers.get(key)

    def _range(
        self, peer: Peer, key: str, span: tuple[int, int], size_bytes: int
    ) -> memoryview | list[Span]:
        """The bytes; else which of the blob's the peer says it has."""
        self._meter.add(peer_requests=1)
        try:
            data = self._client.blob(peer, key, span, size_bytes)
        except RequestError as error:
            self._failed(peer, error)
            return []
        if isinstance(data, list):
            self._directory.lacks(peer, key, self._clock())
            return data
        self._directory.answered(peer)
        self._meter.add(bytes_peers=len(data))
        with self._lock:
            if len(self._givers) >= _MOST_GIVERS:
                self._givers.clear()
            self._givers[key] = peer
        return data

    def _list(self, node: int) -> Answer:
        peer = self._directory.peer(node)
        if peer is None:
            return NOT_THERE
        try:
            marks = self._client.held(peer, self._directory.group)
        except RequestError as error:
            self._failed(peer, error)
            return NOT_THERE
        self._directory.tell(peer, marks, self._clock())
        return NOT_THERE

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
        self._client.abort()

    def close(self) -> None:
        """Let connections go. Safe to call twice."""
        self._client.abort()
