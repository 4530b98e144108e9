"""Choose the peers to ask for a blob: first those whose list contains it, then those of the plan.

The list of a peer is a sorted array of the first 64 bits of each key, so a million shards take
8 MB. Two keys that share these bits cost one request with a negative answer. A peer that failed or
sent wrong bytes isn't asked for a while.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from penstock.cache.peers.protocol import key_prefix

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    Marks = NDArray[np.uint64]

_FIRST_REST_S, _LONGEST_REST_S = 1.0, 120.0
_WRONG_COUNTS = 4
"""An answer with wrong bytes permanently counts as so many failures in a row."""
_MOST_DOUBLINGS = 10


class PeerHealth:
    """The recent failures of one peer, and the pause that follows them. Not thread-safe.

    Each failure in a row doubles the pause; an answer resets it. Wrong bytes count permanently.
    """

    def __init__(self) -> None:
        self._failures = self._wrong = 0
        self._rests_until_s = 0.0

    def rests(self, now_s: float) -> bool:
        """Return True if the peer mustn't be asked now."""
        return now_s < self._rests_until_s

    def answered(self) -> None:
        """Record an answer, positive or negative."""
        self._failures = 0

    def failed(self, now_s: float, *, is_wrong: bool = False) -> float:
        """Record a request without an answer, or with a wrong one; return the seconds of the
        pause."""
        # Only one of many concurrent failures lengthens the pause.
        if self.rests(now_s) and not is_wrong:
            return self._rests_until_s - now_s
        self._failures += 1
        self._wrong += is_wrong
        doublings = min(self._failures - 1 + _WRONG_COUNTS * self._wrong, _MOST_DOUBLINGS)
        rest_s = min(_FIRST_REST_S * 2.0**doublings, _LONGEST_REST_S)
        self._rests_until_s = max(self._rests_until_s, now_s + rest_s)
        return self._rests_until_s - now_s


_log = logging.getLogger("penstock")

_MOST_CANDIDATES = 3
_LACK_S = 2.0
"""Seconds for which a peer that lacks bytes of a blob isn't asked for others of it."""
_MOST_LACKS, _MOST_KNOWN = 65_536, 262_144


@dataclass(frozen=True, slots=True)
class Peer:
    """Another node of the job. node: its number. address: "HOST:PORT" of its server."""

    node: int
    address: str


class PlannedHolders:
    """The holders of blobs by the job's plan, as node numbers. This base class plans nothing."""

    def likely(self, key: str) -> Sequence[int]:
        """Return nodes that may hold a blob, the best first."""
        del key
        return ()

    def owner(self, key: str) -> int | None:
        """Return the node that fetches a blob from the remote for all nodes that need it; None if
        it is this node, or no other node needs it."""
        del key
        return None

    def is_needed(self, key: str) -> bool:
        """Return True if this node reads a blob in the current epoch."""
        del key
        return True

    def record_held(self, texts: dict[int, str]) -> None:
        """Record the blobs that nodes hold, from texts in a format of the plan, by node."""


class PeerDirectory:
    """The job's other nodes, their health, and the lists of their blobs. Sends no requests.

    Safe for several threads. Times are seconds of one monotonic clock, passed by the caller.
    """

    def __init__(self, *, group: str) -> None:
        """group: identifies the dataset in caches."""
        self.group = group
        self._lock = threading.Lock()
        self._peers: dict[int, Peer] = {}
        self._health: dict[Peer, PeerHealth] = {}
        self._lists: dict[Peer, tuple[Marks, float]] = {}  # and the times of their receipt
        self._faults: dict[Peer, str] = {}  # of peers that never sent a list
        self._lacks: dict[tuple[Peer, str], float] = {}
        self._known: dict[str, tuple[tuple[Peer, ...], int]] = {}  # by key, see `_sources`
        self._planned: PlannedHolders = PlannedHolders()

    @property
    def peers(self) -> tuple[Peer, ...]:
        """All known peers."""
        return tuple(self._peers.values())

    def set_peers(self, peers: Sequence[Peer], *, planned: PlannedHolders | None = None) -> None:
        """Set the job's other nodes; the records of nodes that stay are kept. planned: the plan's
        holders of blobs; None leaves them unchanged."""
        with self._lock:
            self._peers = {peer.node: peer for peer in peers}
            self._health = {peer: self._health.get(peer) or PeerHealth() for peer in peers}
            self._lists = {peer: held for peer, held in self._lists.items() if peer in self._health}
            if planned is not None:
                self._planned = planned
            self._lacks.clear()
            self._known.clear()

    def candidates(self, key: str, now_s: float) -> list[Peer]:
        """Return the peers to ask for a blob, in order."""
        found = [
            peer
            for peer in self._sources(key)[0]
            if self._is_well(peer, now_s) and self._lacks.get((peer, key), 0.0) <= now_s
        ]
        return found[:_MOST_CANDIDATES]

    def holds(self, key: str, now_s: float) -> bool:
        """Return True if the list of a healthy peer contains the blob."""
        peers, count = self._sources(key)
        return any(self._is_well(peer, now_s) for peer in peers[:count])

    def has_other_owner(self, key: str, now_s: float) -> bool:
        """Return True if another, healthy node fetches a blob from the remote for this one."""
        node = self._planned.owner(key)
        peer = None if node is None else self._peers.get(node)
        return peer is not None and self._is_well(peer, now_s)

    def _is_well(self, peer: Peer, now_s: float) -> bool:
        health = self._health.get(peer)
        return health is not None and not health.rests(now_s)

    def _sources(self, key: str) -> tuple[tuple[Peer, ...], int]:
        """Return the peers that have or may have a blob, in the order of requests, and how many of
        them, the first ones, have it on their lists."""
        found = self._known.get(key)
        if found is None:
            with self._lock:
                holders = [peer for peer, (marks, _) in self._lists.items() if _has(marks, key)]
                # If several peers hold a blob, the hash spreads the requests over them.
                holders.sort(key=lambda peer: hash((key, peer.node)))
                likely = self._planned.likely(key)
                planned = [self._peers[node] for node in likely if node in self._peers]
                found = tuple(dict.fromkeys([*holders, *planned])), len(holders)
                if len(self._known) >= _MOST_KNOWN:
                    self._known.clear()
                self._known[key] = found
        return found

    def plan_again(self) -> None:
        """Forget the plan's holders, because a new epoch may have others."""
        with self._lock:
            self._known.clear()

    # -- the lists of peers

    def is_needed(self, key: str) -> bool:
        """Return True if this node reads a blob in the current epoch, by the plan."""
        return self._planned.is_needed(key)

    def set_list(self, peer: Peer, marks: Marks, now_s: float) -> None:
        """Store the list of a peer's blobs."""
        with self._lock:
            if peer in self._health:
                self._lists[peer] = marks, now_s
                self._known.clear()

    def due_for_list(self, now_s: float, *, older_s: float, most: int) -> list[Peer]:
        """Return at most `most` healthy peers without a list or with one that is at least older_s
        seconds old, the oldest first."""
        with self._lock:
            times_s = {peer: at_s for peer, (_, at_s) in self._lists.items()}
            well = [peer for peer, health in self._health.items() if not health.rests(now_s)]
        due = [peer for peer in well if now_s - times_s.get(peer, -np.inf) >= older_s]
        return sorted(due, key=lambda peer: times_s.get(peer, -np.inf))[:most]

    @property
    def listed_blobs(self) -> int:
        """The total length of all lists."""
        with self._lock:
            return sum(len(marks) for marks, _ in self._lists.values())

    def has_list(self, peer: Peer) -> bool:
        """Return True if a peer has sent a list."""
        return peer in self._lists

    def note_fault(self, peer: Peer, text: str) -> None:
        """Record why a peer sends no list, and the remedy."""
        self._faults[peer] = text

    def fault(self, peer: Peer) -> str | None:
        """Return the recorded fault of a peer; None if there is none."""
        return self._faults.get(peer)

    # -- the results of requests

    def answered(self, peer: Peer) -> None:
        """Record that a peer answered, positively or negatively."""
        with self._lock:
            if (health := self._health.get(peer)) is not None:
                health.answered()

    def lacks(self, peer: Peer, key: str, now_s: float) -> None:
        """Record that a peer lacks bytes of a blob."""
        with self._lock:
            if len(self._lacks) >= _MOST_LACKS:
                self._lacks.clear()
            self._lacks[peer, key] = now_s + _LACK_S

    def failed(self, peer: Peer, now_s: float, *, reason: str, is_wrong: bool = False) -> None:
        """Record that a peer sent no answer or a wrong one: it isn't asked for a while."""
        with self._lock:
            health = self._health.get(peer)
            if health is None or (health.rests(now_s) and not is_wrong):
                return
            rest_s = health.failed(now_s, is_wrong=is_wrong)
        _log.info(
            "node %d (%s) isn't asked for %.0f s: %s", peer.node, peer.address, rest_s, reason
        )


def _has(marks: Marks, key: str) -> bool:
    mark = np.uint64(key_prefix(key))
    at = int(np.searchsorted(marks, mark))
    return at < len(marks) and bool(marks[at] == mark)
