"""Derive which nodes hold or fetch a shard, from the plan and from what the nodes report. Pure.

Processes with the same cache folder belong to one node, whatever a launcher's variables say. Each
process publishes one report; all reports together give the nodes and the bytes that each of them
holds of each group of lanes.

Nodes don't report again during the job: a cache fills with what its node's ranks read, which
follows from the plan for any epoch.
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

    from penstock.pipeline.plan.order import Plan

    Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ProcessReport:
    """The report that one process of a job publishes to the others.

    rank: this process's rank. cache: identity of its cache folder, the same for all processes of a
    node. resume_point: state from which the job continues, which must be the same for all. held:
    bytes of each group of lanes in the cache, int64, shape (groups,); None if another process
    reports for the node.
    """

    rank: int
    cache: str
    resume_point: str = ""
    held: Ints | None = None

    def text(self) -> str:
        """Return the report as JSON."""
        held = None if self.held is None else _packed(self.held)
        return json.dumps(
            {"rank": self.rank, "cache": self.cache, "goes_on": self.resume_point, "held": held}
        )

    @classmethod
    def parse(cls, text: str, *, groups: int) -> ProcessReport:
        """Return the report of a text. Raises PlanError for an invalid one, and for another number
        of groups."""
        try:
            values = json.loads(text)
            held = values["held"]
            return cls(
                rank=int(values["rank"]),
                cache=str(values["cache"]),
                resume_point=str(values["goes_on"]),
                held=None if held is None else _unpacked(held, groups),
            )
        except (ValueError, KeyError, TypeError, zlib.error) as error:
            raise PlanError(
                f"The report of a rank is invalid ({error}): wanted the cached bytes of {groups} "
                "groups of lanes. Run the same Penstock with the same arguments on every rank."
            ) from None


def nodes_of_reports(
    reports: Sequence[ProcessReport], *, size: int, groups: int
) -> tuple[list[int], Ints] | None:
    """Return the nodes of the processes 0, 1, 2, … that sent these reports: the number of ranks of
    each, in the order of the ranks, and the bytes that they hold of each group of lanes, int64,
    shape (nodes, groups).

    Nodes with the same ranks, over which a model is split, count as one that holds the bytes of
    all. Returns None if the ranks of a node aren't consecutive, since no lane order helps then.
    size: number of the job's ranks.
    """
    caches: dict[str, list[ProcessReport]] = {}
    for report in reports:
        caches.setdefault(report.cache, []).append(report)
    held: dict[tuple[int, ...], Ints] = {}
    for own in caches.values():
        ranks = tuple(sorted({report.rank for report in own}))
        of_cache = np.zeros(groups, dtype=np.int64)
        for report in own:
            if report.held is not None:
                np.maximum(of_cache, report.held, out=of_cache)
        held[ranks] = held.get(ranks, 0) + of_cache
    nodes = sorted(held)
    if [rank for ranks in nodes for rank in ranks] != list(range(size)):
        return None
    return [len(ranks) for ranks in nodes], np.stack([held[ranks] for ranks in nodes])


def _packed(held: Ints) -> str:
    """Return bytes of groups as a short text: most caches hold nothing of most groups."""
    return base64.b64encode(zlib.compress(held.astype("<i8").tobytes())).decode()


def _unpacked(text: str, groups: int) -> Ints:
    if not isinstance(text, str) or len(text) > 64 + 16 * groups:
        raise ValueError("too long")
    unpack = zlib.decompressobj()
    data = unpack.decompress(base64.b64decode(text, validate=True), 8 * groups + 1)
    held = np.frombuffer(data, dtype="<i8").astype(np.int64)
    if len(held) != groups or (groups and not 0 <= int(held.min()) <= int(held.max()) < 2**53):
        raise ValueError(f"{len(held)} groups")
    return held


def held_bytes_of_lanes(plan: Plan, epoch: int, held: Ints) -> Ints:
    """Return the held bytes of each group of lanes in an epoch (all epochs are the same without
    `reshuffle`), int64, shape (groups,).

    held: held bytes of each shard, int64, shape (shards,). The bytes of a shard in two lanes are
    divided by its rows in each. Raises PlanError for another number of shards.
    """
    if held.shape != plan.sizes.shape:
        raise PlanError(f"held: got shape {held.shape}, wanted {plan.sizes.shape}: bytes a shard.")
    pieces = plan.pieces(epoch)
    groups = LaneGroups(plan.lanes)
    strand = np.repeat(np.arange(plan.strands), pieces.strand_pieces)
    group = strand % plan.lanes // groups.size
    size, own = plan.sizes[pieces.shard], held[pieces.shard]
    # own · rows // size without leaving 64 bits.
    part = own // size * pieces.rows + own % size * pieces.rows // size
    lanes = np.zeros(len(groups), dtype=np.int64)
    np.add.at(lanes, group, part)
    return lanes


_OWNER = 0x0E4E7B05  # keeps these hashes apart from those of order and draws
_EPOCHS_KEPT = 3


class ShardReaders:
    """The nodes that read and fetch each shard in the epochs of a job. Thread-safe.

    plan: has the job's lane order. nodes: number of ranks of each node, in the order of the ranks;
    at least 1. Memory is O(shards) for each of the three most recently used epochs; for one if
    lanes are fixed.
    """

    def __init__(self, plan: Plan, *, nodes: Sequence[int]) -> None:
        self._plan = plan
        self._first, self._end = _readers(plan, nodes)
        self._tables: dict[int, tuple[Ints, Ints]] = {}
        self._lock = threading.Lock()

    def readers(self, shard: int, epoch: int) -> tuple[int, ...]:
        """Return the nodes whose ranks read a shard in an epoch, ascending; () for a shard without
        samples."""
        lanes = self._lanes_of(shard, epoch)
        found = {n for lane in lanes.tolist() for n in range(self._first[lane], self._end[lane])}
        return tuple(sorted(found))

    def owner(self, shard: int, epoch: int) -> int | None:
        """Return the node that fetches a shard from the store for all others; None if none reads
        it.

        It is the node with the highest hash of those that read the shard in this epoch (rendezvous:
        Thaler and Ravishankar, IEEE/ACM Transactions on Networking 6, 1998).
        """
        readers = self.readers(shard, epoch)
        if len(readers) < 2:
            return readers[0] if readers else None
        hashes = keyed_hash(_OWNER, shard, np.array(readers, dtype=np.int64))
        return readers[int(np.argmax(hashes))]

    def _lanes_of(self, shard: int, epoch: int) -> Ints:
        """Return the lanes of a shard in an epoch, ascending."""
        key = epoch if self._plan.reshuffle else 0
        with self._lock:
            table = self._tables.pop(key, None) or _shard_lanes(self._plan, key)
            self._tables[key] = table
            while len(self._tables) > _EPOCHS_KEPT:
                del self._tables[next(iter(self._tables))]
        lanes, begin = table
        return lanes[begin[shard] : begin[shard + 1]]


def _readers(plan: Plan, nodes: Sequence[int]) -> tuple[Ints, Ints]:
    """Return the nodes [first, end) whose ranks have slots of each lane: int64, shape (lanes,)."""
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


def _shard_lanes(plan: Plan, epoch: int) -> tuple[Ints, Ints]:
    """Return the lanes of all shards in an epoch, ascending for each, int64, shape (pairs,), and
    the place at which those of each shard begin, int64, shape (shards + 1,)."""
    pieces = plan.pieces(epoch)
    strand = np.repeat(np.arange(plan.strands, dtype=np.int64), pieces.strand_pieces)
    pairs = np.unique(pieces.shard * plan.lanes + strand % plan.lanes)
    begin = np.searchsorted(pairs, np.arange(len(plan.sizes) + 1) * plan.lanes)
    return pairs % plan.lanes, begin
