"""Compute what a node will read, and how far and how fast to fetch ahead of it. Pure.

Two mechanisms follow from it. Batches ahead (`LookAhead`): exact ranges of the samples of the next
batches, as many as hide the store's latency. Whole shards ahead (`Needs`, `Pace`): in the order of
first need, at a pace that never asks the store for much more than training consumes.
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

    from numpy.typing import NDArray

    from penstock.pipeline.plan.order import JobPlan
    from penstock.pipeline.plan.walk import Cursor, Walk
    from penstock.pipeline.plan.world import World

    Ints = NDArray[np.int64]

# Connections K = 1.25·(R/s)·E[T] for consumption R, request size s, request time T: a quarter more
# than Little's law, as requests don't end evenly.
CONNECTIONS_MARGIN = 1.25
# Batches in flight hold their bytes in memory, so this is what a rank spends on them at most.
AHEAD_BYTES = 2**30
MOST_AHEAD = 64
# While batches wait, what is fetched for one over what it needs: more would make its wait longer.
MOST_WIDENING = 16
# Requests that are asked for ahead, over connections: what waits for a connection hides no latency,
# and what comes for later batches shares the line with what the next one waits for.
AHEAD_A_CONNECTION = 2

# Fetched over consumed: what is above 1 fills shards that batches haven't asked for yet.
DEMAND = 1.4

# Of a node's share, that a cache must have room for at most.
MOST_ROOM = 0.45

# Batches in flight that are ready, as a share: below the first fills make room, above the second
# they may take more.
_FEW_READY, _MANY_READY = 0.25, 0.5

# Weight of the newest batch in running means: about the last 16 count.
_NEWEST = 1 / 16
# A batch that waited longer than this share of its time says that the look-ahead was too short.
_LATE = 0.05


def connections(bytes_per_s: float, *, request_bytes: float, request_s: float) -> float:
    """K: requests in flight that bring so many bytes a second, by Little's law and a quarter more.

    request_s: their mean time.
    """
    return CONNECTIONS_MARGIN * bytes_per_s / request_bytes * request_s


def ahead_s(*, mean_s: float, slow_s: float) -> float:
    """Seconds of consumption to have asked for ahead: R·T + K·s bytes at R bytes a second.

    mean_s, slow_s: request times, the mean and that of the slowest ones to hide.
    """
    return slow_s + CONNECTIONS_MARGIN * mean_s


def node_ranks(world: World) -> tuple[int, int]:
    """Ranks [first, end) of this process's node, as far as is known: launchers number a node's
    ranks in a row. This rank alone where the world contradicts that, or where several processes
    have a rank and nobody told which ranks the node has.

    Alone, each process of a node keeps what its own rank reads: shards that several ranks share
    count for each, and a cache that can't hold everything is divided among them.
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
    """Shards that ranks [first, end) of a world read in any epoch, in global batches of all those
    sizes; int64, ascending, shape (shards,)."""
    found = [plan.shards(size, first=first, end=end, world=world) for size in batches]
    return found[0] if len(found) == 1 else np.unique(np.concatenate(found))


def open_windows_bytes(
    *, open_shards: float, shard_bytes: float, share: float, node_bytes: int
) -> int:
    """Bytes of two open windows of a node: one that is read while the next one is fetched.

    open_shards: that all ranks mix at a time; shard_bytes: mean of a shard; share: of the ranks
    that are on this node, 0 to 1; node_bytes: of all shards that the node reads. Never more than
    45 % of these: where windows are that wide (a small dataset, unshuffled data), half a dataset in
    the cache is still worth having.
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


def little_room_words(max_bytes: int, needed_bytes: int, *, window: int, lanes: int) -> str | None:
    """What to say of a cache that can't hold two open windows; None for one that can."""
    if max_bytes >= needed_bytes:
        return None
    return (
        f"max_bytes={format_size(max_bytes)} is less than the {format_size(needed_bytes)} of two "
        f"open windows of what this node reads (window={window}, lanes={lanes}): for want of room "
        "many samples come by requests of their own, the first time and in each epoch. "
        f"max_bytes={needed_bytes} or a smaller window= would make these fewer."
    )


class Needs:
    """The shards that ranks [first, end) need from a cursor on, in the order of first need.

    Walks with a plan of its own, a step at a time, so that whoever asks bounds what it costs.
    """

    def __init__(self, plan: JobPlan, walk: Walk, *, first: int, end: int, world: int) -> None:
        self._plan, self._walk = plan, walk
        self._ranks, self._world = (first, end), world

    @property
    def shard_count(self) -> int:
        """How many shards the whole dataset has, needed or not."""
        return len(self._plan.sizes)

    def shards(self, start: Cursor, *, endless: bool) -> Iterator[tuple[Cursor, Ints]]:
        """For each step its cursor, and shards in which it has samples (ascending; many come again
        in later steps)."""
        for step in self._walk.steps(start, endless=endless):
            at, size, bins = step.start, step.size, self._plan.bins
            low, high = (first_slot(size, rank, self._world, bins) for rank in self._ranks)
            rows = self._plan.places(at.epoch, at.position, size, low=low, high=high).rows
            yield at, np.unique(rows[:, 0])


@dataclass(slots=True)
class Pace:
    """A token bucket in bytes: how much may be fetched beside what batches ask for themselves.

    Tokens come with the bytes that are handed out (`DEMAND` times as many) and go with every byte
    that is fetched, by batches too: so all demand together stays below DEMAND times consumption
    plus the starting allowance. What isn't used can't be saved up.

    allowance_bytes: K·s, what connections hold in flight.
    """

    allowance_bytes: int
    tokens: float = 0.0
    begun: bool = False

    def count_batch(self, size_bytes: int) -> None:
        """Count a batch; the first one brings the allowance."""
        earned = DEMAND * size_bytes + (0 if self.begun else self.allowance_bytes)
        self.begun = True
        if self.tokens < self._most:
            self.tokens = min(self.tokens + earned, self._most)

    def spend(self, size_bytes: int) -> None:
        """Take what a fill fetches (or will); negative: give back what it didn't."""
        self.tokens -= size_bytes

    def spend_for_batches(self, size_bytes: int) -> None:
        """Take what batches fetched. Another loader's on the same dataset are among them: they
        can hold this one's fills up for a while, not for ever."""
        self.tokens = max(self.tokens - size_bytes, min(self.tokens, -self.allowance_bytes))

    @property
    def _most(self) -> float:
        return 2.0 * self.allowance_bytes

    @property
    def open(self) -> bool:
        """Whether another fill may begin."""
        return self.tokens > 0


class LookAhead:
    """How many batches to read ahead: bytes ahead = R·T99 + K·s, in batches of mean bytes.

    With K = 1.25·(R/s)·E[T] that is R·(T99 + 1.25·E[T]). R is what training would consume if it
    never waited for bytes. Where batches wait all the same (the store's rate, not its latency, may
    be what varies) it grows by and by, as far as there are connections for what is missing; where
    nothing is missing from the local disk it is `least`.

    least: batches that are in flight anyway. connections: that there are at most.
    """

    def __init__(self, *, least: int, connections: int = 96, max_bytes: int = AHEAD_BYTES) -> None:
        self._least, self._connections, self._max_bytes = least, connections, max_bytes
        self._batch_bytes = 0.0
        self._busy_s = 0.0
        self._missing = 1.0
        self._misses, self._counted = 0.0, 0
        self._late = 1.0

    def count_misses(self, samples: int) -> None:
        """Count what was missing from the local disk since the batch before, for each batch from
        the first one on."""
        self._counted += 1
        self._misses += max(_NEWEST, 1 / self._counted) * (samples - self._misses)

    def count_batch(
        self, size_bytes: int, *, period_s: float, waited_s: float, missed: bool
    ) -> None:
        """Count a batch. period_s: since the one before; waited_s: of that, waiting for bytes;
        missed: whether bytes were missing from the local disk meanwhile."""
        new = _NEWEST if self._batch_bytes else 1.0
        self._batch_bytes += new * (size_bytes - self._batch_bytes)
        self._busy_s += new * (max(period_s - waited_s, 1e-6) - self._busy_s)
        self._missing += _NEWEST * (missed - self._missing)
        is_late = missed and waited_s > _LATE * period_s
        self._late = min(self._late * 1.25, 16.0) if is_late else max(self._late * 0.98, 1.0)

    @property
    def is_cold(self) -> bool:
        """Whether bytes were missing from the local disk lately."""
        return self._missing >= _NEWEST

    def batches(self, *, mean_s: float, p99_s: float) -> int:
        """Batches to keep in flight, for request times' mean and 99th percentile."""
        if not self._batch_bytes or not self.is_cold:
            return self._least
        wanted = math.ceil(self._late * ahead_s(mean_s=mean_s, slow_s=p99_s) / self._busy_s)
        most = min(int(self._max_bytes // self._batch_bytes), MOST_AHEAD)
        if self._misses:
            asked = AHEAD_A_CONNECTION * self._connections / self._misses
            most = min(most, 1 + math.ceil(asked))
        return max(self._least, min(self._least + wanted, most))


def widening(now: int, *, ready_share: float) -> int:
    """How many times as much as the next batch needs of a shard is fetched for it at a time.

    A remote that batches wait for has no connections left for fills, so each sample would come by a
    request of its own, and a store that limits requests would limit training. What lies beside it
    is read soon, so it costs later batches nothing. now: for the batch before.
    """
    if ready_share < _FEW_READY:
        return min(4 * now, MOST_WIDENING)
    return max(1, now // 2) if ready_share >= _MANY_READY else now


def room_for_fills(now: int, *, ready_share: float, most: int) -> int:
    """Connections that fills may use while batches fetch too, for the next batch.

    Half again while many of the batches in flight are ready, half when few are: a queue that runs
    empty says so before training waits.
    """
    if ready_share < _FEW_READY:
        return now // 2
    return min(now + 1 + now // 2, most) if ready_share >= _MANY_READY else now
