"""Choose the peers to ask for a blob: those whose list contains it.

The list of a peer is a sorted array of the first 64 bits of each key, so a million shards take
8 MB. Two keys that share these bits cost one request with a negative answer. A peer that failed or
sent wrong bytes isn't asked for a while.
"""

from __future__ import annotations

import math
import threading
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import numpy as np

from penstock.cache.errors import log
from penstock.cache.peers.protocol import key_prefix

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    Marks = NDArray[np.uint64]

V = TypeVar("V")

_FIRST_REST_S, _LONGEST_REST_S = 1.0, 120.0
_WRONG_COUNTS = 4
"""An answer with wrong bytes permanently counts as so many failures in a row."""
_MOST_DOUBLINGS = 10


class PeerRecord:
    """The state of one peer as this node sees it: recent failures, its list and its fault. Not
    thread-safe.

    Each failure in a row doubles the pause that follows it; an answer resets it. Wrong bytes count
    permanently. marks, listed_s: the sorted 64-bit prefixes of its blobs' keys, None until it has
    sent them, and the time of their receipt. fault: why it sent none, and the remedy; None if
    unknown.
    """

    def __init__(self) -> None:
        self._failures = self._wrong = 0
        self._rests_until_s = 0.0
        self.marks: Marks | None = None
        self.listed_s = -math.inf
        self.fault: str | None = None

    def rests(self, now_s: float) -> bool:
        """Return True if the peer mustn't be asked now."""
        return now_s < self._rests_until_s

    def answered(self) -> None:
        """Record an answer, positive or negative."""
        self._failures = 0

    def failed(self, now_s: float, *, is_wrong: bool) -> float:
        """Record a request without an answer, or with a wrong one; return the seconds of the
        pause. Of many concurrent failures, the caller records one."""
        self._failures += 1
        self._wrong += is_wrong
        doublings = min(self._failures - 1 + _WRONG_COUNTS * self._wrong, _MOST_DOUBLINGS)
        rest_s = min(_FIRST_REST_S * 2.0**doublings, _LONGEST_REST_S)
        self._rests_until_s = max(self._rests_until_s, now_s + rest_s)
        return self._rests_until_s - now_s

    def lists(self, key: str) -> bool:
        """Return True if its list contains a blob."""
        if self.marks is None:
            return False
        mark = np.uint64(key_prefix(key))
        at = int(np.searchsorted(self.marks, mark))
        return at < len(self.marks) and bool(self.marks[at] == mark)


_MOST_CANDIDATES = 3
_MOST_REMEMBERED = 262_144


class Peer(NamedTuple):
    """Another node of the job. node: its number. address: "HOST:PORT" of its server."""

    node: int
    address: str


class PlannedReaders:
    """The nodes that read and fetch blobs by the job's plan. This base class plans nothing."""

    def owner(self, key: str) -> int | None:
        """Return the node that fetches a blob from the remote for all nodes that need it; None if
        it is this node, or no other node needs it."""
        return None

    def is_needed(self, key: str) -> bool:
        """Return True if this node reads a blob in the current epoch."""
        return True


class PeerDirectory:
    """The job's other nodes, and what this node knows of each. Sends no requests.

    Safe for several threads. Times are seconds of one monotonic clock, passed by the caller.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._peers: dict[int, Peer] = {}
        self._records: dict[Peer, PeerRecord] = {}
        self._planned = PlannedReaders()
        # Memories of blobs by their keys, which `_remember` bounds.
        self._holders: dict[str, tuple[Peer, ...]] = {}  # see `_holders_of`
        self._last: dict[str, Peer] = {}  # the peer that last delivered bytes
        self._wrong: dict[str, bool] = {}  # blobs whose bytes were wrong

    @property
    def peers(self) -> tuple[Peer, ...]:
        """All known peers."""
        return tuple(self._peers.values())

    def record(self, peer: Peer) -> PeerRecord:
        """Return the record of a peer; an empty one if the peer is unknown."""
        return self._records.get(peer) or PeerRecord()

    def set_peers(self, peers: Sequence[Peer], *, planned: PlannedReaders | None = None) -> None:
        """Set the job's other nodes; the records of nodes that stay are kept. planned: the plan's
        readers of blobs; None leaves them unchanged."""
        with self._lock:
            self._peers = {peer.node: peer for peer in peers}
            self._records = {peer: self.record(peer) for peer in peers}
            if planned is not None:
                self._planned = planned
            self._holders.clear()

    def candidates(self, key: str, now_s: float) -> list[Peer]:
        """Return the peers to ask for a blob, in order: healthy ones whose lists contain it, unless
        its bytes were wrong."""
        if key in self._wrong:
            return []
        found = [peer for peer in self._holders_of(key) if not self.record(peer).rests(now_s)]
        return found[:_MOST_CANDIDATES]

    def has_other_owner(self, key: str, now_s: float) -> bool:
        """Return True if another, healthy node fetches a blob from the remote for this one."""
        node = self._planned.owner(key)
        peer = None if node is None else self._peers.get(node)
        return peer is not None and not self.record(peer).rests(now_s)

    def is_needed(self, key: str) -> bool:
        """Return True if this node reads a blob in the current epoch, by the plan."""
        return self._planned.is_needed(key)

    def _holders_of(self, key: str) -> tuple[Peer, ...]:
        """Return the peers that have a blob on their lists. If there are several, the hash spreads
        the requests over them."""
        found = self._holders.get(key)
        if found is None:
            with self._lock:
                holders = [peer for peer, record in self._records.items() if record.lists(key)]
                found = tuple(sorted(holders, key=lambda peer: hash((key, peer.node))))
                _remember(self._holders, key, found)
        return found

    # -- the lists of peers

    def set_list(self, peer: Peer, marks: Marks, now_s: float) -> None:
        """Store the list of a peer's blobs."""
        with self._lock:
            record = self.record(peer)
            record.marks, record.listed_s = marks, now_s
            self._holders.clear()

    def due_for_list(self, now_s: float, *, older_s: float, most: int) -> list[Peer]:
        """Return at most `most` healthy peers without a list or with one that is at least older_s
        seconds old, the oldest first."""
        with self._lock:
            listed_s = {
                peer: record.listed_s
                for peer, record in self._records.items()
                if now_s - record.listed_s >= older_s and not record.rests(now_s)
            }
        return sorted(listed_s, key=lambda peer: listed_s[peer])[:most]

    @property
    def listed_blobs(self) -> int:
        """The total length of all lists."""
        with self._lock:
            return sum([len(one.marks) for one in self._records.values() if one.marks is not None])

    # -- the results of requests

    def answered(self, peer: Peer, *, key: str | None) -> None:
        """Record that a peer answered. key: of the blob of which it delivered bytes, or None."""
        with self._lock:
            self.record(peer).answered()
            if key is not None:
                _remember(self._last, key, peer)

    def lacks(self, peer: Peer, key: str) -> None:
        """Record that a peer doesn't have a blob any more, until it sends another list."""
        holders = tuple(one for one in self._holders_of(key) if one != peer)
        with self._lock:
            _remember(self._holders, key, holders)

    def failed(self, peer: Peer, now_s: float, *, reason: str, is_wrong: bool = False) -> None:
        """Record that a peer sent no answer or a wrong one: it isn't asked for a while."""
        with self._lock:
            record = self._records.get(peer)
            if record is None or (record.rests(now_s) and not is_wrong):
                return
            rest_s = record.failed(now_s, is_wrong=is_wrong)
        log.info("node %d (%s) isn't asked for %.0f s: %s", *peer, rest_s, reason)

    def mark_wrong(self, key: str, now_s: float) -> None:
        """Record that bytes of a blob were wrong: no peer is asked for it any more, and the one
        that delivered them isn't asked for anything for a while."""
        with self._lock:
            _remember(self._wrong, key, True)
        if (peer := self._last.get(key)) is not None:
            self.failed(peer, now_s, reason="its bytes had wrong checksums", is_wrong=True)


def _remember(memory: dict[str, V], key: str, value: V) -> None:
    """Store a value in a memory that is emptied when it is full."""
    if len(memory) >= _MOST_REMEMBERED:
        memory.clear()
    memory[key] = value
