"""Simulate a job step by step over its real order and its real cache rule, to check the formulas.

For each step and node the plan gives the shards that it reads, and the cache's rule which of them
are kept. Uncached bytes are requested when the look-ahead allows it, at most as many steps ahead as
the loader would. Complete shards are filled with the bandwidth that links and pace leave. Store,
network, disk and cores each serve in order of arrival. A step begins when its slowest node has its
batch.
"""

from __future__ import annotations

import hashlib
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from penstock.cache.base import FetchPolicy
from penstock.pipeline.plan import AHEAD_BYTES, LookAhead, Pace, Plan, room_for_fills
from penstock.pipeline.plan.sizing import (
    CONNECTIONS_A_RANK,
    EARLY_BATCHES,
    MARGIN_SHARE,
    PEER_S_PER_GB,
    RAM_SHARE,
    READ_S_PER_GB,
    REQUEST_BYTES,
    au_percent,
    block_samples,
    fetch_cpu_s,
    geometry_of,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from penstock.pipeline.plan.sizing import ClusterSetup, ShardGeometry

    Ints = NDArray[np.int64]
    Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Touch:
    """The shards and samples that a node reads in a step.

    shards: ascending, and samples: the number read of each; int64, shape (n,). ids: of all of these
    samples, in the order of the shards, int64, shape (samples,).
    """

    shards: Ints
    samples: Ints
    ids: Ints


class SizedOrder:
    """A setup's plan over shards of equal size, and the shards that each node's cache keeps.

    sizes: samples of each shard, int64. shard_bytes: float64. Both of shape (shards,). read: shards
    that each node reads. pinned: shards that its cache keeps by its own rule (those with the lowest
    keys that fit). Both bool, shape (nodes, shards).
    """

    def __init__(self, setup: ClusterSetup, geometry: ShardGeometry, *, seed: int) -> None:
        self._setup = setup
        shards = geometry.shards
        each, more = divmod(setup.samples, shards)
        self.sizes = np.full(shards, each, dtype=np.int64)
        self.sizes[:more] += 1
        self._first_id = np.cumsum(self.sizes) - self.sizes
        self.shard_bytes = self.sizes * setup.sample_bytes
        if setup.spread:  # sizes of samples differ, so those of shards do
            uneven = np.random.default_rng(seed).standard_normal(shards)
            factor = 1 + setup.spread * uneven / np.sqrt(np.maximum(self.sizes, 1))
            self.shard_bytes *= np.maximum(factor, 0.05)
        self._plan = Plan(self.sizes, seed=seed, lanes=geometry.lanes, window=geometry.window)
        self.read = np.zeros((setup.nodes, shards), np.bool_)
        for node in range(setup.nodes):
            first = node * setup.gpus
            own = self._plan.shards(
                setup.global_batch, first=first, end=first + setup.gpus, world=setup.ranks
            )
            self.read[node, own] = True
        self.pinned = self._pinned()

    def steps(self, epoch: int) -> Iterator[list[Touch]]:
        """Yield for each step of an epoch what each node reads."""
        setup = self._setup
        for step in range(setup.steps):
            yield [
                self._touch(epoch, step * setup.global_batch, node) for node in range(setup.nodes)
            ]

    def _touch(self, epoch: int, position: int, node: int) -> Touch:
        setup = self._setup
        low = node * setup.gpus * setup.global_batch // setup.ranks
        high = (node + 1) * setup.gpus * setup.global_batch // setup.ranks
        places = self._plan.places(epoch, position, setup.global_batch, low=low, high=high)
        ids = np.sort(self._first_id[places.rows[:, 0]] + places.rows[:, 1])
        counts = np.bincount(places.rows[:, 0])
        shards = np.flatnonzero(counts)
        return Touch(shards=shards, samples=counts[shards], ids=ids)

    def _pinned(self) -> NDArray[np.bool_]:
        from penstock.cache.disk import ReadSet  # the cache's own rule

        room = (1 - MARGIN_SHARE) * self._setup.nvme_bytes
        if self._setup.is_local:
            return self.read.copy()
        keys = [hashlib.sha256(b"%d" % shard).hexdigest() for shard in range(len(self.sizes))]
        pinned = np.zeros_like(self.read)
        for node, read in enumerate(self.read):
            own = np.flatnonzero(read).tolist()
            share = ReadSet(
                "sizing", [keys[n] for n in own], [int(self.shard_bytes[n]) for n in own]
            )
            below = share.threshold(int(room))
            pinned[node, [n for n in own if keys[n] < below]] = True
        return pinned


_RANGE, _LEAST_CONNECTIONS = 8 * 2**20, 8  # of `FetchPolicy`


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchNeed:
    """The sources of a batch's bytes on one node.

    disk, memory: bytes read from the local disk and from memory. absent: shards with samples that
    aren't cached; absent_bytes, absent_samples: bytes and number of these by shard. kept: those of
    the bytes that the cache writes to disk.
    """

    disk: float
    memory: float
    absent: NDArray[np.int64]
    absent_bytes: Floats
    absent_samples: Floats
    kept: float


class NodeState:
    """The state of one node's caches.

    filled, single: bytes of each pinned shard that fills of complete shards and requests for this
    epoch's single samples have fetched, float64, shape (shards,). queue: pinned shards to fill, in
    the order of first need, the next one last.
    """

    def __init__(self, setup: ClusterSetup, order: SizedOrder, node: int) -> None:
        self.pinned = order.pinned[node]
        self._shard_bytes, self._sizes = order.shard_bytes, order.sizes
        self.filled = np.zeros(len(order.sizes))
        self.single = np.zeros(len(order.sizes))
        # The share of the kept bytes that fits into memory; 1 or more is all.
        kept = float(order.shard_bytes[self.pinned].sum())
        self._memory_share = RAM_SHARE * setup.ram_bytes / max(kept, 1.0)
        self._read_at = np.full(setup.samples, -1.0, np.float32)  # place in the last epoch
        shard = float(order.shard_bytes.mean())
        share = float(order.shard_bytes[order.read[node]].sum())
        held = _LEAST_CONNECTIONS * min(_RANGE, shard)
        most = max(held, min(_LEAST_CONNECTIONS * _RANGE, share / 4))
        self.pace = Pace(allowance_bytes=int(setup.gpus * most))
        self._own_share = np.ones(len(order.sizes))  # of each shard's samples, read in this epoch
        self.queue: list[int] = []

    def forget_memory(self) -> None:
        """Drop all cached files from memory."""
        self._read_at[:] = 0.0

    def hold(self, shards: NDArray[np.bool_]) -> None:
        """Store these shards completely on the disk, as far as they are pinned."""
        held = shards & self.pinned
        self.filled[held] = self._shard_bytes[held]

    @property
    def whole(self) -> NDArray[np.bool_]:
        """True for each shard that is cached completely, bool, shape (shards,)."""
        whole: NDArray[np.bool_] = self.filled + self.single >= self._shard_bytes * (1 - 1e-9)
        whole &= self.pinned
        return whole

    def plan_fills(self, touches: list[Touch]) -> None:
        """Begin an epoch: queue the pinned shards that aren't complete, in the order of first
        need."""
        self.filled += self.single  # the new epoch's samples are as likely in these as in fills
        self.single[:] = 0.0
        whole, seen, order = self.whole, np.zeros(len(self._sizes), np.bool_), []
        read = np.zeros(len(self._sizes))
        for touch in touches:
            read[touch.shards] += touch.samples
            new = touch.shards[~seen[touch.shards]]
            seen[new] = True
            order += new[self.pinned[new] & ~whole[new]].tolist()
        self.queue = order[::-1]
        self._own_share = np.clip(read / self._sizes, 1 / self._sizes, 1.0)

    def take(self, touch: Touch, *, at: float, block: float) -> BatchNeed:
        """Return the sources of a batch's bytes, and count missing ones as cached from now on.

        at: the batch's place in the epoch, 0 to 1. block: samples that one request fetches; if
        several nodes read a shard, some of these are another node's.
        """
        shards = touch.shards
        size = self._shard_bytes[shards]
        wanted = touch.samples * size / self._sizes[shards]
        # Single samples were fetched for earlier batches, so the fill fetches the remaining bytes.
        left = np.maximum(size - self.single[shards], 1.0)
        here = np.where(self.pinned[shards], np.minimum(1.0, self.filled[shards] / left), 0.0)
        local = wanted * here
        missing = wanted - local
        absent = missing > 1e-6 * wanted
        own = self._own_share[shards]
        missing *= (1 - (1 - own) ** block) / own
        kept = absent & self.pinned[shards]
        room = self._shard_bytes[shards] - self.filled[shards]
        self.single[shards[kept]] = np.minimum(
            self.single[shards[kept]] + missing[kept], room[kept]
        )
        disk = float((local * self._disk_share(touch, at=at)).sum())
        return BatchNeed(
            disk=disk,
            memory=float(local.sum()) - disk,
            absent=shards[absent],
            absent_bytes=missing[absent],
            absent_samples=(touch.samples * (1 - here))[absent],
            kept=float(missing[kept].sum()),
        )

    def fill(self, room: float) -> tuple[float, int | None]:
        """Fill the next shard with at most `room` bytes. Returns the bytes and the shard; None: no
        shard is left, or the pace allows no fill."""
        while self.queue and self.pace.open:
            shard = self.queue[-1]
            left = float(self._shard_bytes[shard] - self.filled[shard] - self.single[shard])
            if left <= 1:
                self.queue.pop()
                continue
            got = min(left, room)
            self.filled[shard] += got
            self.pace.spend(int(got))
            return got, shard
        return 0.0, None

    def _disk_share(self, touch: Touch, *, at: float) -> Floats:
        """Return the share of each shard's samples that isn't in memory, shape (shards,).

        Memory keeps what was used last. Between places x and y of two epochs in random orders
        1 - x(1 - y) of all samples were used. All that the first epoch has fetched is in memory.
        """
        before = self._read_at[touch.ids]
        self._read_at[touch.ids] = at
        used = 1 - before * (1 - at)
        gone = (before >= 0) & (used > self._memory_share)
        shard = np.repeat(np.arange(len(touch.shards)), touch.samples)
        share: Floats = np.bincount(shard, weights=gone) / touch.samples
        return share


_LEAST_AHEAD = 4  # batches in flight if everything is local
_P99 = 2.0  # p99 of request times over their mean


@dataclass(slots=True, kw_only=True)
class SimulatedEpoch:
    """The measurements of a simulated epoch.

    seconds: from its begin to the end of its last step. au: per cent. bytes_by_tier: bytes of all
    nodes from "remote", "peer", "disk" and "memory". requests: requests to the store.
    """

    seconds: float = 0.0
    au: float = 0.0
    bytes_by_tier: dict[str, float] = field(
        default_factory=lambda: dict.fromkeys(("remote", "peer", "disk", "memory"), 0.0)
    )
    requests: float = 0.0


@dataclass(slots=True)
class _Queue:
    """A resource that serves one request after the other. free_s: time at which it is idle."""

    free_s: float = 0.0

    def serve(self, at_s: float, took_s: float) -> float:
        """Return the time at which a request that arrives at `at_s` and takes `took_s` is done."""
        self.free_s = max(self.free_s, at_s) + took_s
        return self.free_s


class _NodeQueues:
    """The queues of one node's resources."""

    def __init__(self) -> None:
        self.nic_in, self.nic_out = _Queue(), _Queue()
        self.disk, self.cores, self.connections = _Queue(), _Queue(), _Queue()


class Simulation:
    """A running job of a setup.

    held: True for each shard that a node has completely when the job begins, bool, shape (nodes,
    shards); None: the caches are empty.
    """

    def __init__(
        self,
        setup: ClusterSetup,
        *,
        seed: int = 0,
        geometry: ShardGeometry | None = None,
        held: NDArray[np.bool_] | None = None,
    ) -> None:
        self.order = SizedOrder(setup, geometry or geometry_of(setup), seed=seed)
        self._setup = setup
        self._nodes = [NodeState(setup, self.order, node) for node in range(setup.nodes)]
        self._queues = [_NodeQueues() for _ in self._nodes]
        self._store, self._answers = _Queue(), _Queue()
        for node, state in enumerate(self._nodes):
            if setup.is_local:
                state.hold(np.ones_like(state.pinned))
                state.forget_memory()
            elif held is not None:
                state.hold(held[node])
        self._whole = np.array([state.whole for state in self._nodes])
        if held is not None:  # peers also serve shards that they no longer read
            self._whole |= held
        gpus = setup.gpus
        self._look = LookAhead(
            least=_LEAST_AHEAD,
            connections=gpus * FetchPolicy().max_connections,
            max_bytes=AHEAD_BYTES * gpus,
        )
        self._late_steps = 0  # consecutive steps up to now whose batch was late
        self._missed = 0.0  # samples of a step that weren't cached, over all nodes
        self._ends: deque[float] = deque([0.0], maxlen=128)  # of the latest steps
        self._now = 0.0
        self._ahead = 1
        self._filled_until = 0.0
        # Connections of a rank that fills may use while batches fetch.
        self._fill_connections = FetchPolicy().fills_beside_urgent

    @property
    def held(self) -> NDArray[np.bool_]:
        """True for each shard that a node has completely, bool, shape (nodes, shards)."""
        return np.array([state.whole for state in self._nodes])

    def epoch(self, number: int) -> SimulatedEpoch:
        """Simulate an epoch. Call it with 0, 1, …, in this order."""
        steps = list(self.order.steps(number))
        for node, state in enumerate(self._nodes):
            state.plan_fills([step[node] for step in steps])
        found, began = SimulatedEpoch(), self._now
        computes: list[float] = []
        first_end = 0.0
        for place, step in enumerate(steps):
            at = self._ends[-min(self._ahead, len(self._ends))]
            self._fill(found, until=at)
            block = self._block
            times = [
                self._batch(
                    node, state.take(step[node], at=place / len(steps), block=block), found, at
                )
                for node, state in enumerate(self._nodes)
            ]
            begin = max(self._now, *(ready for _, ready in times))
            self._count(begin, came=max(came for came, _ in times))
            self._now = begin + self._setup.step_s
            self._ends.append(begin)
            if computes or first_end:
                computes.append(self._setup.step_s)
            first_end = first_end or self._now
        found.seconds = self._now - began
        found.au = au_percent(computes, self._now - first_end)
        return found

    @property
    def _block(self) -> float:
        """Samples that a request fetches: several neighbours after batches were late."""
        return block_samples(self._setup) if self._late_steps >= EARLY_BATCHES else 1.0

    def _batch(
        self, node: int, need: BatchNeed, found: SimulatedEpoch, at: float
    ) -> tuple[float, float]:
        """Return the times at which a node has the bytes of a batch that it requests at `at`, and
        the decoded batch."""
        queues = self._queues[node]
        came, remote, peer, requests = at, 0.0, 0.0, 0.0
        if len(need.absent):
            self._missed += float(need.absent_samples.sum())
            remote, peer, requests, came = self._fetch(node, need, at)
        disk = queues.disk.serve(at, (need.disk + need.kept) / self._setup.nvme_bytes_per_s)
        work = self._setup.cpu_s_per_1000 * self._setup.global_batch / self._setup.nodes / 1000
        work += READ_S_PER_GB * (need.disk + need.memory) / 1e9 + fetch_cpu_s(remote, requests)
        work += PEER_S_PER_GB[self._setup.tls][0] * peer / 1e9
        for tier, size in (("disk", need.disk), ("memory", need.memory)):
            found.bytes_by_tier[tier] += size
        self._moved(found, remote=remote, peer=peer, requests=requests)
        self._nodes[node].pace.spend_for_batches(int(remote + peer))
        return came, queues.cores.serve(max(came, disk), work / self._setup.cores)

    def _fetch(self, node: int, need: BatchNeed, at: float) -> tuple[float, float, float, float]:
        """Return the bytes from the store and from peers, the number of requests, and the time at
        which all have arrived."""
        setup, queues = self._setup, self._queues[node]
        on_peers = np.zeros(len(need.absent), np.bool_)
        if setup.peers:
            on_peers |= self._whole[:, need.absent].any(axis=0)
        peer = float(need.absent_bytes[on_peers].sum())
        remote = float(need.absent_bytes.sum()) - peer
        each = max(1.0, setup.sample_bytes / REQUEST_BYTES)
        requests = float(need.absent_samples[~on_peers].sum()) * each / self._block
        came = at
        if remote > 0:
            took_s = setup.request_s(min(setup.sample_bytes, REQUEST_BYTES))
            most = setup.gpus * CONNECTIONS_A_RANK
            in_flight_s = requests * setup.store_latency_s + remote / setup.stream_bytes_per_s
            came = max(
                self._store.serve(at, remote / setup.store_bytes_per_s),
                self._answers.serve(at, requests / setup.store_requests_per_s),
                queues.connections.serve(at, in_flight_s / most),
                at + took_s,
            )
        if peer > 0:
            holders = [n for n in range(setup.nodes) if self._whole[n, need.absent].any()]
            came = max(came, self._from_peers(node, holders, peer, at))
        came = max(came, queues.nic_in.serve(at, (remote + peer) / setup.link_bytes_per_s))
        return remote, peer, requests, came

    def _from_peers(self, node: int, holders: Sequence[int], size: float, at: float) -> float:
        """Return the time at which other nodes have sent bytes, each of them an equal part."""
        others = [other for other in holders if other != node]
        each = size / max(1, len(others))
        out_s = each / self._setup.link_bytes_per_s
        cpu_s = PEER_S_PER_GB[self._setup.tls][1] * each / 1e9 / self._setup.cores
        for other in others:
            self._queues[other].cores.free_s += cpu_s
        return max((self._queues[n].nic_out.serve(at, out_s) for n in others), default=at)

    def _fill(self, found: SimulatedEpoch, *, until: float) -> None:
        """Fill complete shards with the bandwidth that is left until a time."""
        since, self._filled_until = self._filled_until, max(self._filled_until, until)
        if self._setup.is_local or until <= since:
            return
        waiting = [n for n, state in enumerate(self._nodes) if state.queue]
        for at, node in enumerate(waiting):
            free = max(since, self._store.free_s, self._answers.free_s)
            share = (until - free) / (len(waiting) - at)  # of the store's idle time
            self._fill_node(node, found, since=since, until=until, share_s=share)

    def _fill_node(
        self, node: int, found: SimulatedEpoch, *, since: float, until: float, share_s: float
    ) -> None:
        setup, state, queues = self._setup, self._nodes[node], self._queues[node]
        streams = setup.gpus * self._fill_connections
        stream = REQUEST_BYTES / setup.request_s(REQUEST_BYTES)
        nic_s = until - max(since, queues.nic_in.free_s)
        link = min(nic_s * setup.link_bytes_per_s, (until - since) * streams * stream)
        disk_s = until - max(since, queues.disk.free_s)
        disk = disk_s * setup.nvme_bytes_per_s
        room = max(0.0, min(link, share_s * setup.store_bytes_per_s, disk))
        while room > 1:
            got, shard = state.fill(room)
            if shard is None:
                return
            room -= got
            holders = np.flatnonzero(self._whole[:, shard]) if setup.peers else ()
            if len(holders):
                self._from_peers(node, [int(n) for n in holders], got, since)
                self._moved(found, peer=got)
            else:
                self._store.serve(since, got / setup.store_bytes_per_s)
                self._answers.serve(since, got / REQUEST_BYTES / setup.store_requests_per_s)
                self._moved(found, remote=got, requests=got / REQUEST_BYTES)
            queues.nic_in.serve(since, got / setup.link_bytes_per_s)
            queues.disk.serve(since, got / setup.nvme_bytes_per_s)
            queues.cores.serve(since, fetch_cpu_s(got, got / REQUEST_BYTES) / setup.cores)
            whole = state.filled[shard] + state.single[shard] >= self.order.shard_bytes[shard] - 1
            self._whole[node, shard] |= whole

    def _moved(
        self, found: SimulatedEpoch, *, remote: float = 0, peer: float = 0, requests: float = 0
    ) -> None:
        found.bytes_by_tier["remote"] += remote
        found.bytes_by_tier["peer"] += peer
        found.requests += requests

    def _count(self, begin: float, *, came: float) -> None:
        """Count a batch that is delivered at `begin`, and update how far to request ahead."""
        setup = self._setup
        size = setup.global_batch * setup.sample_bytes / setup.nodes
        for state in self._nodes:
            state.pace.count_batch(int(size))
        if setup.is_local:
            self._ahead = _LEAST_AHEAD
            return
        waited_s = max(0.0, begin - self._now)
        is_late = came > self._now + 0.01 * setup.step_s
        self._fill_connections = room_for_fills(
            self._fill_connections, ready_share=0.0 if is_late else 1.0, most=CONNECTIONS_A_RANK
        )
        self._late_steps = self._late_steps + 1 if is_late else 0
        self._look.count_misses(round(self._missed / setup.nodes))
        self._look.count_batch(
            int(size), period_s=begin - self._ends[-1], waited_s=waited_s, missed=self._missed > 0
        )
        self._missed = 0.0
        mean_s = setup.request_s(min(setup.sample_bytes, REQUEST_BYTES))
        self._ahead = self._look.batches(mean_s=mean_s, p99_s=_P99 * mean_s)


def simulate(setup: ClusterSetup, *, epochs: int = 2, seed: int = 0) -> list[SimulatedEpoch]:
    """Simulate the first epochs of a job that starts with empty caches."""
    simulation = Simulation(setup, seed=seed)
    return [simulation.epoch(number) for number in range(epochs)]
