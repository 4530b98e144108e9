"""Which nodes may hold a shard, and which of them fetches it for the others. Pure.

Nobody is asked: a node's cache fills with what its ranks read, and who reads what in which epoch is
arithmetic. Beside that stands what the nodes told at the job's start.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from penstock.cache.base.hashing import keyed_hash
from penstock.cache.errors import PlanError
from penstock.pipeline.plan.lane_order import LaneGroups

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from penstock.pipeline.plan.lanes import StrandPieces
    from penstock.pipeline.plan.order import Plan

    Ints = NDArray[np.int64]

_OWNER = 0x0E4E7B05  # keeps these hashes apart from those of order and draws
_EPOCHS_KEPT = 3
_MOST_HOLDERS = 3  # of the job's start, that are named for a shard


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Moves:
    """What changes hands between two epochs: int64, shape (moves,) each, by shard.

    shard: moves from `source` to `to`: numbers of lanes, or of nodes. Where a shard lies in two
    (its end reaches into the next lane), each new one is a move from where most of it was.
    """

    shard: Ints
    source: Ints
    to: Ints

    def __len__(self) -> int:
        """How many there are."""
        return len(self.shard)


def moves(plan: Plan, epoch: int) -> Moves:
    """The shards that lie in another lane in the epoch after this one; none without `reshuffle`."""
    if not plan.reshuffle:
        none = np.empty(0, dtype=np.int64)
        return Moves(shard=none, source=none, to=none)
    now, then = _ShardLanes.of(plan, epoch), _ShardLanes.of(plan, epoch + 1)
    return _moves(now, then, plan.lanes)


class Holders:
    """Which nodes hold a shard, or will fetch it, at an epoch of a job. Safe for several threads.

    Memory is O(shards) for each of the epochs that were asked for last, of which one is all where
    lanes are fixed.
    """

    def __init__(
        self,
        plan: Plan,
        *,
        nodes: Sequence[int],
        held: Ints | None = None,
        start_epoch: int = 0,
    ) -> None:
        """plan: with the job's lane order. nodes: how many ranks each has, in the order of their
        ranks; at least 1. held: how much each held of each group of lanes when the job started, in
        bytes or in parts of them, int64, shape (nodes, groups); None: nothing. start_epoch:
        the epoch that this was told for. Raises PlanError for what doesn't fit together."""
        if not len(nodes) or min(nodes) < 1:
            raise PlanError(f"holders: got nodes of {list(nodes)} ranks, wanted 1 or more of each.")
        self._plan, self._start, self._groups = plan, start_epoch, LaneGroups(plan.lanes)
        self._nodes = len(nodes)
        self._held: Ints | None = None
        if held is not None:
            self.hear(held)
        self._first, self._end = _readers(plan, nodes)
        self._tables: dict[int, _ShardLanes] = {}
        self._lock = threading.Lock()

    @property
    def held_shape(self) -> tuple[int, int]:
        """Nodes, and groups of lanes."""
        return self._nodes, len(self._groups)

    def hear(self, held: Ints) -> None:
        """Take over what nodes held when the job started, as the constructor has it."""
        if held.shape != self.held_shape:
            raise PlanError(
                f"holders: got held bytes of shape {held.shape}, wanted one row for each of the "
                f"{self._nodes} nodes and one column for each of {len(self._groups)} groups of "
                "lanes."
            )
        self._held = held if held.any() else None

    def readers(self, shard: int, epoch: int) -> tuple[int, ...]:
        """The nodes whose ranks read a shard in an epoch, ascending. None reads an empty one."""
        lanes = self._table(epoch).lanes_of(shard)
        found = {n for lane in lanes.tolist() for n in range(self._first[lane], self._end[lane])}
        return tuple(sorted(found))

    def nodes_of(self, shard: int, epoch: int) -> tuple[int, ...]:
        """The nodes that may hold a shard in an epoch, the likeliest first: those that read it in
        the epoch before, those that held most of its lane at the job's start, and those that read
        it now."""
        found = dict.fromkeys(self.readers(shard, epoch - 1) if epoch > self._start else ())
        found.update(dict.fromkeys(self._first_holders(shard)))
        owner = self.owner(shard, epoch)
        found.update(dict.fromkeys(() if owner is None else (owner,)))
        found.update(dict.fromkeys(self.readers(shard, epoch)))
        return tuple(found)

    def owner(self, shard: int, epoch: int, nodes: Sequence[int] | None = None) -> int | None:
        """The node that fetches a shard for the others, where nobody holds it: of those that read
        it in this epoch the one of the highest hash (rendezvous: Thaler and Ravishankar, IEEE/ACM
        Transactions on Networking 6, 1998), so that who goes takes no more than its own along.

        nodes: only these count, those that are well; None: all. None where none of them reads it.
        """
        readers = self.readers(shard, epoch)
        if nodes is not None:
            well = set(nodes)
            readers = tuple(node for node in readers if node in well)
        if len(readers) < 2:
            return readers[0] if readers else None
        hashes = keyed_hash(_OWNER, shard, np.array(readers, dtype=np.int64))
        return readers[int(np.argmax(hashes))]

    def moves(self, epoch: int) -> Moves:
        """The shards that a node reads in the epoch after this one and doesn't in this one."""
        if not self._plan.reshuffle:
            return moves(self._plan, epoch)
        now, then = (self._of_nodes(self._table(e)) for e in (epoch, epoch + 1))
        return _moves(now, then, self._nodes)

    def _first_holders(self, shard: int) -> list[int]:
        """Nodes that told they held of the shard's lanes at the job's start, the most first."""
        told = self._held
        if told is None:
            return []
        groups = self._table(self._start).lanes_of(shard) // self._groups.size
        held = told[:, groups].sum(axis=1)
        # Of those that hold as much others for each shard: they share who asks.
        tie = keyed_hash(_OWNER, shard, np.arange(self._nodes, dtype=np.int64))
        most = np.lexsort((tie, -held))[:_MOST_HOLDERS]
        return [int(node) for node in most if held[node]]

    def _of_nodes(self, table: _ShardLanes) -> _ShardLanes:
        """The same by nodes that read the lanes."""
        first, end = self._first[table.lane], self._end[table.lane]
        count = end - first
        shard, rows = np.repeat(table.shards(), count), np.repeat(table.rows, count)
        begin = np.cumsum(count) - count
        node = np.arange(int(count.sum())) - np.repeat(begin - first, count)
        order = np.argsort(shard * self._nodes + node, kind="stable")
        return _ShardLanes.grouped(shard[order], node[order], rows[order], len(self._plan.sizes))

    def _table(self, epoch: int) -> _ShardLanes:
        key = epoch if self._plan.reshuffle else 0
        with self._lock:
            table = self._tables.pop(key, None) or _ShardLanes.of(self._plan, key)
            self._tables[key] = table
            while len(self._tables) > _EPOCHS_KEPT:
                del self._tables[next(iter(self._tables))]
        return table


def _readers(plan: Plan, nodes: Sequence[int]) -> tuple[Ints, Ints]:
    """Nodes [first, end) whose ranks have slots of each lane: int64, shape (lanes,) each."""
    lanes, ranks = plan.lanes, np.asarray(nodes, dtype=np.int64)
    node_end = np.cumsum(ranks) * lanes
    place = np.arange(lanes, dtype=np.int64) * int(ranks.sum())
    first = np.searchsorted(node_end, place, side="right")
    end = np.searchsorted(node_end - ranks * lanes, place + int(ranks.sum()), side="left")
    if plan.lane_order is None:
        return first, end
    lane_at = plan.lane_order.lanes_of(lanes)
    of_lane = np.empty((2, lanes), dtype=np.int64)
    of_lane[:, lane_at] = first, end
    return of_lane[0], of_lane[1]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _ShardLanes:
    """The lanes of each shard in an epoch: those of shard x are lane[begin[x] : begin[x + 1]].

    lane, rows (that it has there): int64, shape (pieces,). begin: int64, shape (shards + 1,).
    """

    begin: Ints
    lane: Ints
    rows: Ints

    @classmethod
    def of(cls, plan: Plan, epoch: int) -> _ShardLanes:
        pieces: StrandPieces = plan.pieces(epoch)
        lane = np.repeat(np.arange(plan.strands, dtype=np.int64), pieces.strand_pieces)
        lane %= plan.lanes
        order = np.argsort(pieces.shard * plan.lanes + lane, kind="stable")
        return cls.grouped(pieces.shard[order], lane[order], pieces.rows[order], len(plan.sizes))

    @classmethod
    def grouped(cls, shard: Ints, lane: Ints, rows: Ints, shards: int) -> _ShardLanes:
        """Of pairs sorted by shard and lane, that may come several times."""
        is_new = np.ones(len(shard), dtype=bool)
        is_new[1:] = (np.diff(shard) != 0) | (np.diff(lane) != 0)
        starts = np.flatnonzero(is_new)
        sums = np.add.reduceat(rows, starts) if len(starts) else rows
        count = np.bincount(shard[starts], minlength=shards)
        return cls(begin=np.concatenate([[0], np.cumsum(count)]), lane=lane[starts], rows=sums)

    def lanes_of(self, shard: int) -> Ints:
        """The lanes of a shard, ascending."""
        return self.lane[self.begin[shard] : self.begin[shard + 1]]

    def shards(self) -> Ints:
        """The shard of each pair."""
        return np.repeat(np.arange(len(self.begin) - 1), np.diff(self.begin))

    def homes(self) -> Ints:
        """The lane that has most of each shard, the first of several; -1 of an empty one."""
        home = np.full(len(self.begin) - 1, -1, dtype=np.int64)
        best = np.lexsort((self.lane, -self.rows, self.shards()))
        filled = np.flatnonzero(np.diff(self.begin))
        home[filled] = self.lane[best[self.begin[filled]]]
        return home


def _moves(now: _ShardLanes, then: _ShardLanes, count: int) -> Moves:
    """Pairs of `then` that aren't among those of `now`. count: lanes, or nodes."""
    shard_then = then.shards()
    key, known = shard_then * count + then.lane, now.shards() * count + now.lane  # ascending
    at = np.minimum(np.searchsorted(known, key), len(known) - 1)
    is_new = known[at] != key
    shard = shard_then[is_new]
    return Moves(shard=shard, source=now.homes()[shard], to=then.lane[is_new])
