"""Choose the peers to ask for a blob: first those that said they hold it, then those of the plan.

What each peer holds of a dataset is a sorted array of 64 bits of each key, so that a million shards
take 8 MB; two keys that share them cost a request that is answered with a no. A peer that failed or
gave wrong bytes is left alone for a while.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from penstock.cache.peers.protocol import key_prefix

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    Marks = NDArray[np.uint64]

_FIRST_REST_S, _LONGEST_REST_S = 1.0, 120.0
_WRONG_COUNTS = 4
"""An answer with wrong bytes weighs like so many in a row that failed, and isn't forgotten."""
_MOST_DOUBLINGS = 10


class PeerHealth:
    """Judges one peer by what became of requests to it. Not locked.

    Each failure in a row doubles its rest; an answer ends it. Wrong bytes are never made good.
    """

    def __init__(self) -> None:
        self._failures = self._wrong = 0
        self._rests_until_s = 0.0

    def rests(self, now_s: float) -> bool:
        """Whether it is left alone for now."""
        return now_s < self._rests_until_s

    def answered(self) -> None:
        """Note an answer, if only a no."""
        self._failures = 0

    def failed(self, now_s: float, *, is_wrong: bool = False) -> float:
        """Note a request without an answer, or with one that was wrong; seconds that it is left
        alone for."""
        # Of many that fail at one moment, one makes the rest longer.
        if self.rests(now_s) and not is_wrong:
            return self._rests_until_s - now_s
        self._failures += 1
        self._wrong += is_wrong
        doublings = min(self._failures - 1 + _WRONG_COUNTS * self._wrong, _MOST_DOUBLINGS)
        rest_s = min(_FIRST_REST_S * 2.0**doublings, _LONGEST_REST_S)
        self._rests_until_s = max(self._rests_until_s, now_s + rest_s)
        return self._rests_until_s - now_s


log = logging.getLogger("penstock")

_MOST_CANDIDATES = 3
_LACK_S = 2.0
"""A peer that hasn't some bytes of a blob isn't asked for others of it for so long."""
_MOST_LACKS, _MOST_KNOWN = 65_536, 262_144


@dataclass(frozen=True, slots=True)
class Peer:
    """A peer is another node of the job, whose cache may be asked.

    node: its number in the job. address: "HOST:PORT" where its server listens.
    """

    node: int
    address: str


class PlannedHolders(Protocol):
    """What the job's plan says of who has what: nodes by their numbers."""

    def likely(self, key: str) -> Sequence[int]:
        """Nodes that may hold a blob, the best first."""

    def owner(self, key: str) -> int | None:
        """The node that fetches a blob from the remote for the others that need it too; None where
        that is this node, or nobody else needs it."""

    def is_needed(self, key: str) -> bool:
        """Whether this node itself reads a blob in the epoch that is read now."""

    def hear(self, words: dict[int, str]) -> None:
        """Take over what nodes say they hold, in words of the plan's own."""


class NothingPlanned:
    """Nobody knows who has what."""

    def likely(self, key: str) -> Sequence[int]:
        """No node."""
        del key
        return ()

    def owner(self, key: str) -> int | None:
        """Nobody."""
        del key
        return None

    def is_needed(self, key: str) -> bool:
        """Who knows."""
        del key
        return True

    def hear(self, words: dict[int, str]) -> None:
        """Nobody asks."""


@dataclass(frozen=True, slots=True)
class _HeldList:
    """What a peer said it holds of a dataset, and when."""

    marks: Marks
    at_s: float


class PeerDirectory:
    """Knows the job's other nodes, how well they are, and what each said it holds. Asks nobody.

    Safe for several threads. Times are seconds of one monotonic clock that the caller reads.
    """

    def __init__(self, *, group: str) -> None:
        """group: of the dataset, as caches name it."""
        self.group = group
        self._lock = threading.Lock()
        self._peers: dict[int, Peer] = {}
        self._health: dict[Peer, PeerHealth] = {}
        self._told: dict[Peer, _HeldList] = {}
        self._faults: dict[Peer, str] = {}  # of those that never said what they hold
        self._lacks: dict[tuple[Peer, str], float] = {}
        self._known: dict[str, tuple[Peer, ...]] = {}
        self._holders: dict[str, tuple[Peer, ...]] = {}
        self._planned: PlannedHolders = NothingPlanned()

    @property
    def peers(self) -> tuple[Peer, ...]:
        """All that are known."""
        return tuple(self._peers.values())

    def peer(self, node: int) -> Peer | None:
        """The peer of a number; None of one that isn't known any more."""
        return self._peers.get(node)

    def know(self, peers: Sequence[Peer], *, planned: PlannedHolders | None = None) -> None:
        """Take over the job's other nodes; what is known of those that stay, stays."""
        with self._lock:
            self._peers = {peer.node: peer for peer in peers}
            self._health = {peer: self._health.get(peer) or PeerHealth() for peer in peers}
            self._told = {peer: told for peer, told in self._told.items() if peer in self._health}
            if planned is not None:
                self._planned = planned
            self._lacks.clear()
            self._known.clear()
            self._holders.clear()

    def candidates(self, key: str, now_s: float) -> list[Peer]:
        """The peers to ask for a blob, in this order; empty: nobody."""
        known = self._known.get(key)
        if known is None:
            with self._lock:
                known = self._look(key)
                if len(self._known) >= _MOST_KNOWN:
                    self._known.clear()
                self._known[key] = known
        found = []
        for peer in known:
            health = self._health.get(peer)
            may = health is not None and not health.rests(now_s)
            if may and self._lacks.get((peer, key), 0.0) <= now_s:
                found.append(peer)
        return found[:_MOST_CANDIDATES]

    def _look(self, key: str) -> tuple[Peer, ...]:
        holders = list(self._told_holders(key))
        # Where several hold it, who asks which is spread by the key.
        holders.sort(key=lambda peer: hash((key, peer.node)))
        named = [self._peers[node] for node in self._planned.likely(key) if node in self._peers]
        return tuple(dict.fromkeys([*holders, *named]))

    def _told_holders(self, key: str) -> tuple[Peer, ...]:
        found = self._holders.get(key)
        if found is None:
            found = tuple(peer for peer, told in self._told.items() if _has(told.marks, key))
            if len(self._holders) >= _MOST_KNOWN:
                self._holders.clear()
            self._holders[key] = found
        return found

    def plan_again(self) -> None:
        """Ask the plan again who has what: it may be another epoch."""
        with self._lock:
            self._known.clear()

    def holds(self, key: str, now_s: float) -> bool:
        """Whether a peer that is well said that it holds a whole blob."""
        with self._lock:
            holders = self._told_holders(key)
            return any(not self._health[peer].rests(now_s) for peer in holders)

    def has_other_owner(self, key: str, now_s: float) -> bool:
        """Whether another node, which is well, fetches a blob from the remote for this one."""
        node = self._planned.owner(key)
        peer = None if node is None else self._peers.get(node)
        health = None if peer is None else self._health.get(peer)
        return health is not None and not health.rests(now_s)

    # -- what peers say

    def is_needed(self, key: str) -> bool:
        """Whether this node reads a blob in this epoch, as far as the plan tells."""
        return self._planned.is_needed(key)

    def tell(self, peer: Peer, marks: Marks, now_s: float) -> None:
        """Take over what a peer says it holds."""
        with self._lock:
            if peer in self._health:
                self._told[peer] = _HeldList(marks, now_s)
                self._known.clear()
                self._holders.clear()

    def unheard(self, now_s: float, *, older_s: float, most: int) -> list[Peer]:
        """Peers to ask what they hold: those that never said it, then the oldest lists."""
        with self._lock:
            said = {peer: told.at_s for peer, told in self._told.items()}
            well = [peer for peer, health in self._health.items() if not health.rests(now_s)]
        due = [peer for peer in well if now_s - said.get(peer, -np.inf) >= older_s]
        return sorted(due, key=lambda peer: said.get(peer, -np.inf))[:most]

    @property
    def told_blobs(self) -> int:
        """How many blobs peers said they hold, one that several have for each."""
        with self._lock:
            return sum(len(told.marks) for told in self._told.values())

    def has_heard(self, peer: Peer) -> bool:
        """Whether a peer has said what it holds."""
        return peer in self._told

    def note_fault(self, peer: Peer, text: str) -> None:
        """Note why a peer doesn't say what it holds, and what to do."""
        self._faults[peer] = text

    def fault(self, peer: Peer) -> str | None:
        """What was noted so of a peer."""
        return self._faults.get(peer)

    # -- what became of requests

    def answered(self, peer: Peer) -> None:
        """Note that a peer gave what it was asked for."""
        with self._lock:
            if (health := self._health.get(peer)) is not None:
                health.answered()

    def lacks(self, peer: Peer, key: str, now_s: float) -> None:
        """Note that a peer hasn't some bytes of a blob."""
        with self._lock:
            if (health := self._health.get(peer)) is not None:
                health.answered()
            if len(self._lacks) >= _MOST_LACKS:
                self._lacks.clear()
            self._lacks[peer, key] = now_s + _LACK_S

    def failed(self, peer: Peer, now_s: float, *, reason: str, is_wrong: bool = False) -> None:
        """Note that a peer gave no answer, or a wrong one: it is left alone for a while."""
        with self._lock:
            health = self._health.get(peer)
            if health is None or (health.rests(now_s) and not is_wrong):
                return
            rest_s = health.failed(now_s, is_wrong=is_wrong)
        log.info("node %d (%s) isn't asked for %.0f s: %s", peer.node, peer.address, rest_s, reason)


def _has(marks: Marks, key: str) -> bool:
    mark = np.uint64(key_prefix(key))
    at = int(np.searchsorted(marks, mark))
    return at < len(marks) and bool(marks[at] == mark)
