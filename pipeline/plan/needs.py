"""Compute what a node will read, and how far ahead and how fast to fetch it. Pure.

`LookAhead` is for batches: the loader fetches the exact ranges of the samples of the next batches,
as many batches as hide the store's latency. `Needs` and `Pace` are for shards: the cache fills
complete shards in the order of first need, at a rate not much above that of training.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from penstock.cache import ConfigError
from penstock.cache.base import format_size
from penstock.pipeline.plan.world import first_slot

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from penstock.pipeline.plan.lanes import Ints
    from penstock.pipeline.plan.order import JobPlan
    from penstock.pipeline.plan.walk import Cursor, Walk
    from penstock.pipeline.plan.world import World

# Connections K = 1.25·(R/s)·E[T] for consumption R, request size s, request time T: a quarter more
# than Little's law, since requests don't end evenly.
CONNECTIONS_MARGIN = 1.25
# A rank's limit for batches in flight, whose bytes are in memory.
AHEAD_BYTES = 2**30
MOST_AHEAD = 64
# Maximum ratio of the bytes fetched for a late batch to those that it needs: more would delay it.
MOST_WIDENING = 16
# Requests in flight or queued ahead, per connection: a request that waits for a connection hides no
# latency, and bytes of later batches share the link with those of the next one.
AHEAD_A_CONNECTION = 2

# Bytes fetched per byte consumed: the part above 1 fills shards that batches don't need yet.
DEMAND = 1.4

# Maximum share of a node's bytes for which a cache must be large enough.
MOST_ROOM = 0.45

# Share of the batches in flight that are ready: below the first value fills use fewer connections,
# from the second on they may use more.
_FEW_READY, _MANY_READY = 0.25, 0.5

# Weight of the newest batch in running means, over about 16 batches.
_NEWEST = 1 / 16
# A batch that waited for a larger share of its time than this came late.
_LATE = 0.05


def connections(bytes_per_s: float, *, request_bytes: float, request_s: float) -> float:
    """Return K, the requests in flight for a throughput: 25 % more than Little's law.

    request_bytes, request_s: mean size and time of a request.
    """
    return CONNECTIONS_MARGIN * bytes_per_s / request_bytes * request_s


def ahead_s(*, mean_s: float, slow_s: float) -> float:
    """Return the seconds of consumption to request ahead: R·T + K·s bytes at R bytes a second.

    mean_s, slow_s: mean time of requests, and time of the slowest ones to hide.
    """
    return slow_s + CONNECTIONS_MARGIN * mean_s


def node_ranks(world: World) -> tuple[int, int]:
    """Return the ranks [first, end) of this process's node: launchers number them consecutively.

    Returns only this rank if the world contradicts that, or if several processes have one rank and
    the node's ranks are unknown. Then each process pins what its own rank reads: a shard that
    several ranks read counts for each of them, and they divide a cache that can't hold everything.
    """
    if world.node is not None:
        return world.node
    first = world.rank - world.local_rank
    if world.place is not None or first < 0 or first + world.local_size > world.size:
        return world.rank, world.rank + 1
    return first, first + world.local_size


def shards_of_ranks(
    plan: JobPlan, batches: Iterable[int], *, first: int, end: int, world: int
) -> Ints:
    """Return the shards that ranks [first, end) read in any epoch, in global batches of these
    sizes: int64, ascending, shape (shards,)."""
    found = [plan.shards(size, first=first, end=end, world=world) for size in batches]
    return found[0] if len(found) == 1 else np.unique(np.concatenate(found))


def open_windows_bytes(
    *, open_shards: float, shard_bytes: float, share: float, node_bytes: int
) -> int:
    """Return the bytes of two open windows of a node: one is read while the next one is fetched.

    open_shards: shards that all ranks mix at a time. shard_bytes: mean size of a shard. share:
    share of the ranks that are on this node, 0 to 1. node_bytes: size of all shards that the node
    reads. The result is at most 45 % of these: with wider windows (a small dataset, unshuffled
    data) a cache of half of the dataset is still useful.
    """
    windows = math.ceil(2 * open_shards * shard_bytes * share)
    return min(windows, int(MOST_ROOM * node_bytes))


def check_room(max_bytes: int, largest_bytes: int) -> None:
    """Raise ConfigError for a cache that can't hold one shard."""
    if max_bytes < largest_bytes:
        raise ConfigError(
            f"max_bytes: the cache folder's limit is {max_bytes} ({format_size(max_bytes)}), "
            f"wanted at least {largest_bytes} ({format_size(largest_bytes)}), the dataset's "
            "largest shard: the cache keeps whole shards. Pass a larger max_bytes= (--max-bytes), "
            "which replaces the folder's limit, or leave cache= out to read from the remote each "
            "time."
        )


def window_room_warning(max_bytes: int, need_bytes: int, *, window: int, lanes: int) -> str | None:
    """Return the warning about a cache that can't hold two open windows; None if it can."""
    if max_bytes >= need_bytes:
        return None
    return (
        f"max_bytes={format_size(max_bytes)} is less than the {format_size(need_bytes)} of two "
        f"open windows of what this node reads (window={window}, lanes={lanes}), so in every epoch "
        "many samples are fetched by single requests. Pass max_bytes="
        f"{need_bytes} or a smaller window= for fewer of these."
    )


class Needs:
    """The shards that ranks [first, end) need from a cursor on, step by step.

    The caller decides how many steps to compute. The plan must not be shared with another reader.
    """

    def __init__(self, plan: JobPlan, walk: Walk, *, first: int, end: int, world: int) -> None:
        self._plan, self._walk = plan, walk
        self._ranks, self._world = (first, end), world

    @property
    def shard_count(self) -> int:
        """The number of shards of the dataset."""
        return len(self._plan.sizes)

    def shards(self, start: Cursor, *, endless: bool) -> Iterator[tuple[Cursor, Ints]]:
        """Yield for each step its cursor and the shards of its samples, ascending; later steps
        repeat many of them."""
        for step in self._walk.steps(start, endless=endless):
            at, size, bins = step.start, step.size, self._plan.bins
            low, high = (first_slot(size, rank, self._world, bins) for rank in self._ranks)
            rows = self._plan.places(at.epoch, at.position, size, low=low, high=high).rows
            yield at, np.unique(rows[:, 0])


@dataclass(slots=True)
class Pace:
    """A token bucket that limits the bytes of fills.

    Each delivered byte adds `DEMAND` tokens, and each byte that a fill or a batch fetches removes
    one. So all fetches together stay below DEMAND times consumption plus the initial allowance. The
    bucket is bounded, so unused tokens don't accumulate.

    allowance_bytes: K·s, the bytes that connections have in flight.
    """

    allowance_bytes: int
    tokens: float = 0.0
    begun: bool = False

    def count_batch(self, size_bytes: int) -> None:
        """Count a batch; the first one adds the allowance."""
        earned = DEMAND * size_bytes + (0 if self.begun else self.allowance_bytes)
        self.begun = True
        most = 2.0 * self.allowance_bytes
        if self.tokens < most:
            self.tokens = min(self.tokens + earned, most)

    def spend(self, size_bytes: int) -> None:
        """Subtract the bytes that a fill fetches; a negative number returns unused ones."""
        self.tokens -= size_bytes

    def spend_for_batches(self, size_bytes: int) -> None:
        """Subtract the bytes that batches fetched, including those of other loaders on the same
        dataset: the lower bound limits how long these can hold up this loader's fills."""
        self.tokens = max(self.tokens - size_bytes, min(self.tokens, -self.allowance_bytes))

    @property
    def open(self) -> bool:
        """True if another fill may begin."""
        return self.tokens > 0


class LookAhead:
    """The number of batches to read ahead: R·T99 + K·s bytes, divided by the mean size of a batch.

    With K = 1.25·(R/s)·E[T] that is R·(T99 + 1.25·E[T]). R is the rate at which training would
    consume bytes without waits. If batches are still late (the store's rate may vary, not only its
    latency), the number grows step by step, as far as the connections suffice for the missing
    samples. If nothing is missing from the local disk, the number is `least`.

    least: minimum of batches in flight. connections: the client's maximum of connections.
    max_bytes: limit of the bytes of batches in flight.
    """

    def __init__(self, *, least: int, connections: int = 96, max_bytes: int = AHEAD_BYTES) -> None:
        self._least, self._connections, self._max_bytes = least, connections, max_bytes
        self._batch_bytes = self._busy_s = self._misses = 0.0
        self._missing, self._late, self._counted = 1.0, 1.0, 0

    def count_misses(self, samples: int) -> None:
        """Count the samples that were missing from the local disk since the previous batch."""
        self._counted += 1
        self._misses += max(_NEWEST, 1 / self._counted) * (samples - self._misses)

    def count_batch(
        self, size_bytes: int, *, period_s: float, waited_s: float, missed: bool
    ) -> None:
        """Count a batch. period_s: seconds since the previous one. waited_s: seconds of these spent
        waiting for bytes. missed: True if bytes were missing from the local disk meanwhile."""
        new = _NEWEST if self._batch_bytes else 1.0
        self._batch_bytes += new * (size_bytes - self._batch_bytes)
        self._busy_s += new * (max(period_s - waited_s, 1e-6) - self._busy_s)
        self._missing += _NEWEST * (missed - self._missing)
        is_late = missed and waited_s > _LATE * period_s
        self._late = min(self._late * 1.25, 16.0) if is_late else max(self._late * 0.98, 1.0)

    @property
    def is_cold(self) -> bool:
        """True if bytes were recently missing from the local disk."""
        return self._missing >= _NEWEST

    def batches(self, *, mean_s: float, p99_s: float) -> int:
        """Return the batches to keep in flight, from the mean and p99 of request times."""
        if not self._batch_bytes or not self.is_cold:
            return self._least
        wanted = math.ceil(self._late * ahead_s(mean_s=mean_s, slow_s=p99_s) / self._busy_s)
        most = min(int(self._max_bytes // self._batch_bytes), MOST_AHEAD)
        if self._misses:
            most = min(most, 1 + math.ceil(AHEAD_A_CONNECTION * self._connections / self._misses))
        return max(self._least, min(self._least + wanted, most))


def widening(now: int, *, ready_share: float) -> int:
    """Return the ratio of the bytes to fetch for the next batch to those that it needs of a shard.

    If batches wait for the remote, fills get no connections, so each sample would take a request of
    its own, and a store that limits requests would limit training. Neighbouring samples are read
    soon, so fetching them, too, costs later batches nothing. now: the current ratio. ready_share:
    share of the batches in flight that are ready.
    """
    if ready_share < _FEW_READY:
        return min(4 * now, MOST_WIDENING)
    return max(1, now // 2) if ready_share >= _MANY_READY else now


def room_for_fills(now: int, *, ready_share: float, most: int) -> int:
    """Return the connections that fills may use while batches fetch, for the next batch.

    Their number grows by half while many of the batches in flight are ready (`ready_share`), and is
    halved when few are, so that fills yield before training waits. now: the current number.
    """
    if ready_share < _FEW_READY:
        return now // 2
    return min(now + 1 + now // 2, most) if ready_share >= _MANY_READY else now
