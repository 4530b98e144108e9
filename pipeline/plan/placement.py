"""Derive which nodes hold or fetch a shard, from the plan and from what the nodes report. Pure.

What a node is follows from its cache, not from a launcher's variables: processes whose caches are
one folder belong to one node. Each process publishes one report; whoever has all of them knows the
nodes, and how many bytes of each group of lanes they hold.

Nobody is asked during the job: a node's cache fills with what its ranks read, and who reads what in
which epoch is arithmetic. Beside that stands what the nodes reported at the job's start.
"""

from __future__ import annotations

import base64
import json
import threading
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from penstock.cache import PlanError
from penstock.cache.base import keyed_hash
from penstock.pipeline.plan.lanes import LaneGroups

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from penstock.pipeline.plan.lanes import StrandPieces
    from penstock.pipeline.plan.order import Plan

    Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ProcessReport:
    """What one process of a job tells the others.

    rank: whose batches it gets. cache: names the folder that it keeps blobs in, the same for all
    processes of a node. goes_on: from where and how, which must be the same for all. held: bytes
    of each group of lanes that are there, int64, shape (groups,); None where another process speaks
    for the node.
    """

    rank: int
    cache: str
    goes_on: str = ""
    held: Ints | None = None

    def text(self) -> str:
        """The word as others read it."""
        held = None if self.held is None else _packed(self.held)
        told = {"rank": self.rank, "cache": self.cache, "goes_on": self.goes_on, "held": held}
        return json.dumps(told)

    @classmethod
    def parse(cls, text: str, *, groups: int) -> ProcessReport:
        """Read a word. Raises PlanError for what isn't one, or of another number of groups."""
        try:
            told = json.loads(text)
            return cls(
                rank=int(told["rank"]),
                cache=str(told["cache"]),
                goes_on=str(told["goes_on"]),
                held=None if told["held"] is None else _unpacked(told["held"], groups),
            )
        except (ValueError, KeyError, TypeError, zlib.error) as error:
            raise PlanError(
                f"A rank told something else than what its cache holds of {groups} groups of lanes "
                f"({error}). Run the same Penstock with the same arguments on every rank."
            ) from None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Nodes:
    """A job's nodes, by what each one's ranks read.

    ranks: [first, end) of each node; where a model is split over nodes, several have the same.
    held: bytes that each node's cache holds of each group of lanes, int64, shape (nodes, groups).
    """

    ranks: tuple[tuple[int, int], ...]
    held: Ints

    def __len__(self) -> int:
        """How many nodes there are."""
        return len(self.ranks)

    @classmethod
    def of_words(cls, words: Sequence[ProcessReport], *, size: int, groups: int) -> Nodes | None:
        """The nodes of processes 0, 1, 2, … by their words. size: ranks of the job. None where the
        ranks of nodes aren't numbered in a row, as no order of lanes suits them."""
        caches: dict[str, list[ProcessReport]] = {}
        for word in words:
            caches.setdefault(word.cache, []).append(word)
        ranks = [sorted({word.rank for word in told}) for told in caches.values()]
        if any(own != list(range(own[0], own[-1] + 1)) for own in ranks):
            return None
        runs = sorted({(own[0], own[-1] + 1) for own in ranks})
        ends = [0, *(end for _, end in runs)]
        if [first for first, _ in runs] != ends[:-1] or ends[-1] != size:
            return None
        held = np.zeros((len(caches), groups), dtype=np.int64)
        for node, told in enumerate(caches.values()):
            for word in told:
                if word.held is not None:
                    np.maximum(held[node], word.held, out=held[node])
        return cls(ranks=tuple((own[0], own[-1] + 1) for own in ranks), held=held)

    def shares(self) -> tuple[tuple[int, ...], Ints]:
        """The ranks that begin a run of a node's ranks, ascending, and what the caches of all nodes
        with these ranks hold of each group, int64, shape (runs, groups)."""
        runs = sorted(set(self.ranks))
        held = np.zeros((len(runs), self.held.shape[1]), dtype=np.int64)
        for own, bytes_held in zip(self.ranks, self.held, strict=True):
            held[runs.index(own)] += bytes_held
        return tuple(first for first, _ in runs), held


MOST_LEVEL = 3
"""Of what a node holds of a group of lanes: all of it."""


def level_text(held: Ints, whole: Ints) -> str:
    """What a node holds of each group of lanes, in thirds of it, as a short text for other nodes: a
    few characters for few groups, 1,600 at most. whole: bytes of the groups."""
    return _packed(-(-MOST_LEVEL * held // np.maximum(whole, 1)))


def levels_of(text: str, *, groups: int) -> Ints | None:
    """Read `level_text` back, int64, shape (groups,); None for what isn't one."""
    try:
        return _unpacked(text, groups)
    except (ValueError, zlib.error):
        return None


def _packed(held: Ints) -> str:
    """Bytes of groups as a short text: most caches hold nothing of most groups."""
    return base64.b64encode(zlib.compress(held.astype("<i8").tobytes())).decode()


def _unpacked(text: str, groups: int) -> Ints:
    if not isinstance(text, str) or len(text) > 64 + 16 * groups:
        raise ValueError("too long")
    unpack = zlib.decompressobj()
    data = unpack.decompress(base64.b64decode(text, validate=True), 8 * groups + 1)
    held = np.frombuffer(data, dtype="<i8").astype(np.int64)
    if len(held) != groups or (groups and int(held.min()) < 0):
        raise ValueError(f"{len(held)} groups")
    return held


def held_bytes_of_lanes(plan: Plan, epoch: int, held: Ints) -> Ints:
    """Bytes of each group of lanes that somebody holds, in an epoch (which says something only
    where `reshuffle` moves shards).

    held: bytes of each shard that are there, int64, shape (shards,). A shard that lies in two lanes
    counts for both by its rows. Returns int64, shape (groups,). Raises PlanError for the bytes of
    another number of shards.
    """
    if held.shape != plan.sizes.shape:
        raise PlanError(f"held: got shape {held.shape}, wanted {plan.sizes.shape}: bytes a shard.")
    pieces = plan.pieces(epoch)
    groups = LaneGroups(plan.lanes)
    strand = np.repeat(np.arange(plan.strands), pieces.strand_pieces)
    group = strand % plan.lanes // groups.size
    size, there = plan.sizes[pieces.shard], held[pieces.shard]
    # there · rows // size without leaving 64 bits.
    part = there // size * pieces.rows + there % size * pieces.rows // size
    lanes = np.zeros(len(groups), dtype=np.int64)
    np.add.at(lanes, group, part)
    return lanes


_OWNER = 0x0E4E7B05  # keeps these hashes apart from those of order and draws
_EPOCHS_KEPT = 3
_MOST_HOLDERS = 3  # of the job's start, that are named for a shard


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ShardMoves:
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


def moves(plan: Plan, epoch: int) -> ShardMoves:
    """The shards that lie in another lane in the epoch after this one; none without `reshuffle`."""
    if not plan.reshuffle:
        none = np.empty(0, dtype=np.int64)
        return ShardMoves(shard=none, source=none, to=none)
    now, then = _ShardLanes.of(plan, epoch), _ShardLanes.of(plan, epoch + 1)
    return _moves(now, then, plan.lanes)


class Holders:
    """Which nodes hold a shard, or will fetch it, at an epoch of a job. Safe for several threads.

    Memory is O(shards) for each of the epochs that were asked for last, of which one is all where
    lanes are fixed.
    """

    def __init__(
        self, plan: Plan, *, nodes: Sequence[int], held: Ints | None = None, start_epoch: int = 0
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

    def moves(self, epoch: int) -> ShardMoves:
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


def _moves(now: _ShardLanes, then: _ShardLanes, count: int) -> ShardMoves:
    """Pairs of `then` that aren't among those of `now`. count: lanes, or nodes."""
    shard_then = then.shards()
    key, known = shard_then * count + then.lane, now.shards() * count + now.lane  # ascending
    at = np.minimum(np.searchsorted(known, key), len(known) - 1)
    is_new = known[at] != key
    shard = shard_then[is_new]
    return ShardMoves(shard=shard, source=now.homes()[shard], to=then.lane[is_new])
