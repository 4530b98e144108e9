"""Put similar samples into the same batches, by tokens or by the shapes of images. Pure.

    position -> pool (a range of the stream) -> sorted by length -> cut into batches -> shuffled

A pool is about 64 consecutive global batches of the stream. Its samples are sorted by length and
cut so that no batch exceeds its number of tokens; then the batches are permuted. So a pool has
the same samples as that range of the stream, any pool can be computed on its own, and positions
count samples as in other plans: a resume costs one pool, at any world size.

A global batch consists of bins: equal numbers of its samples, in the order of the stream, so that a
bin has samples of few lanes. There are as many bins as the job's first world has ranks, and no bin
has more than its share of the tokens: a batch gets fewer samples until that holds. Each rank reads
complete bins. (Bins filled by first fit, or alternately by length, hold 1 to 3 % more, but then
every rank reads every lane.)

The tokens of a batch are the sum of its lengths or, if short samples are padded, its longest length
times its samples. (Bucketing by length within pools: Vaswani et al., "Attention Is All You Need",
2017, section 5.1, batch "by approximate sequence length"; the pool limits how far a sample moves.)

The number of batches in a pool follows from the lengths of its samples, so a step's number has no
closed form: `BucketWalk` counts it from a step whose number is known, pool by pool. Pools that the
job has read are already counted; the lengths of others are looked up (0.5 us a sample), up to a
limit.

Batches of images with similar shapes (`AspectSettings`) have a fixed number of samples instead:
pools consist of whole global batches, are sorted by height / width, and steps are numbered as
without pools. The short batch at the end of an epoch stays there.
"""

from __future__ import annotations

import hashlib
import threading
from dataclasses import dataclass
from dataclasses import field as attribute
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from penstock.cache import PlanError
from penstock.cache.base import keyed_hash
from penstock.pipeline.plan.order import JobPlan, SlotSamples
from penstock.pipeline.plan.walk import Cursor, Walk

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from penstock.pipeline.plan.lanes import Ints
    from penstock.pipeline.plan.order import SlotCut

    Lengths = Callable[[Ints], Ints]
    """Tokens of samples by (shard, row), int64, shape (n,)."""

_BUCKET = 7  # the purpose of these hashes, as in `plan.order`: no two purposes share values

POOL_BATCHES = 64
"""Approximate global batches of a pool: about 1 % of them are then short."""

_MOST_POOL = 2**22  # samples

MOST_COUNTED = 2**24
"""Maximum samples whose lengths are looked up to number a step: 8 s."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketSettings:
    """The settings of batches by tokens, which are part of a plan.

    field: field whose lengths count. tokens: maximum of a global batch. is_padded: samples are
    padded to the longest of their batch. pool: samples of a pool. ranks: minimum samples of a
    batch, unless an epoch has fewer. batch: samples of a usual global batch. bins: equal parts of
    each global batch that hold at most tokens // bins; 1 in states from before bins existed.
    Raises ValueError for a number of bins that the tokens don't allow.
    """

    field: str
    tokens: int
    is_padded: bool
    pool: int
    ranks: int
    batch: int
    bins: int = attribute(default=1, repr=False)

    def __post_init__(self) -> None:
        if not 0 < self.bins <= max(1, self.tokens):
            raise ValueError(f"{self.bins} bins")

    def __str__(self) -> str:
        """Return the text for the fingerprint; with one bin the same as before bins existed."""
        return repr(self) if self.bins == 1 else f"{self!r} in {self.bins} bins"

    def most(self, world: int) -> int:
        """Return the maximum tokens of a rank's batch. world: number of ranks."""
        return self.tokens // self.bins * -(-self.bins // world)

    def cut(self, lengths: Ints) -> tuple[Ints, Ints]:
        """Return the samples of a pool batch by batch, and the end of each batch."""
        return cut_by_tokens(
            lengths, tokens=self.tokens, is_padded=self.is_padded, ranks=self.ranks, bins=self.bins
        )

    def permuted(self, ends: Ints, keys: NDArray[np.uint64]) -> Ints:
        """Return the order of the batches of a pool. keys: random numbers of the batches."""
        del ends
        return np.argsort(keys, kind="stable")


@dataclass(frozen=True, slots=True, kw_only=True)
class AspectSettings:
    """The settings of batches of images with similar shapes, which are part of a plan.

    field: of the images. pool: samples of a pool, a multiple of batch. batch: samples of the job's
    first global batch. Raises ValueError for any other pool.
    """

    field: str
    pool: int
    batch: int

    bins: ClassVar[int] = 1

    def __post_init__(self) -> None:
        if not 0 < self.batch <= self.pool or self.pool % self.batch:
            raise ValueError(f"pools of {self.pool} samples")

    @classmethod
    def of(cls, field: str, batch: int) -> AspectSettings:
        """Return the settings of a new job. batch: samples of a global batch."""
        pools = max(1, min(POOL_BATCHES, _MOST_POOL // batch))
        return cls(field=field, pool=pools * batch, batch=batch)

    def cut(self, lengths: Ints) -> tuple[Ints, Ints]:
        """Return the samples of a pool batch by batch, and the end of each batch."""
        count = len(lengths)
        ends = np.arange(self.batch, count + self.batch, self.batch, dtype=np.int64)
        return np.argsort(lengths, kind="stable").astype(np.int64), np.minimum(ends, count)

    def permuted(self, ends: Ints, keys: NDArray[np.uint64]) -> Ints:
        """Return the order of the batches of a pool; a short last one stays the last."""
        full = int(ends[-1]) // self.batch if len(ends) else 0
        return np.append(np.argsort(keys[:full], kind="stable"), np.arange(full, len(ends)))


class Aspects:
    """Height / width of images, as integers to sort by. Thread-safe.

    dims: returns the height and width of the images in a shard, shape (samples, 2); called once for
    each of the latest `MOST_COUNTED` images.
    """

    def __init__(self, dims: Callable[[int], NDArray[np.int32]]) -> None:
        self._dims, self._count = dims, 0
        self._known: dict[int, Ints] = {}
        self._lock = threading.Lock()

    def __call__(self, rows: Ints) -> Ints:
        """Return the aspects of samples (shard, row), int64, shape (n,)."""
        order = np.argsort(rows[:, 0], kind="stable")
        shards, begins = np.unique(rows[order, 0], return_index=True)
        found = np.empty(len(rows), np.int64)
        for shard, places in zip(shards.tolist(), np.split(order, begins[1:]), strict=False):
            found[places] = self._of(shard)[rows[places, 1]]
        return found

    def _of(self, shard: int) -> Ints:
        with self._lock:
            found = self._known.pop(shard, None)
            if found is None:
                dims = self._dims(shard).astype(np.int64)
                found = (dims[:, 0] << 20) // np.maximum(dims[:, 1], 1)
                self._count += len(found)
            self._known[shard] = found
            while self._count > MOST_COUNTED and len(self._known) > 1:
                self._count -= len(self._known.pop(next(iter(self._known))))
        return found


def bucket_settings(
    field: str, *, tokens: int, is_padded: bool, ranks: int, some: Ints
) -> BucketSettings:
    """Return the settings of a new job. tokens: maximum of a global batch. ranks: number of ranks.
    some: lengths of a representative part of the samples, the same on every rank."""
    mean = max(1.0, float(some.mean())) if len(some) else 1.0
    usual = max(1, int(tokens / mean))
    return BucketSettings(
        field=field,
        tokens=tokens,
        is_padded=is_padded,
        pool=min(_MOST_POOL, max(POOL_BATCHES * usual, 2 * ranks)),
        ranks=ranks,
        # A power of two, so that lanes find divisors.
        batch=max(ranks, 2 ** int(np.log2(usual))),
        bins=ranks,
    )


def least_tokens(longest: int, *, ranks: int) -> int:
    """Return the minimum tokens of a global batch that give every rank a sample of each batch:
    twice the longest sample for each rank, since the last samples of a pool are divided over
    batches."""
    return longest * ranks * (2 if ranks > 1 else 1)


def cut_by_tokens(
    lengths: Ints, *, tokens: int, is_padded: bool, ranks: int, bins: int = 1
) -> tuple[Ints, Ints]:
    """Cut samples into batches of similar lengths with at most `tokens` tokens each.

    Returns the samples batch by batch, int64, shape (n,), and the end of each batch, int64, shape
    (batches,). The longest samples come first; samples of one length keep their order. A short last
    batch gets samples of the one before it, so that each rank has one. Each of the bins of a batch,
    [b·n // bins, (b + 1)·n // bins) of its n samples, holds at most tokens // bins. Raises
    PlanError for a sample that is longer than a bin.
    """
    order, each = np.argsort(-lengths, kind="stable").astype(np.int64), tokens // bins
    sizes = np.maximum(lengths[order], 1)
    if len(sizes) and sizes[0] > each:
        what = "a global batch" if bins == 1 else f"a rank's part of a global batch ({bins} parts)"
        raise PlanError(
            f"batch_tokens: a sample of {int(sizes[0]):,} tokens is longer than the {each:,} of "
            f"{what}. Pass more tokens, or shorter samples."
        )
    sums, ends = np.cumsum(sizes), list[int]()
    at = 0
    while at < len(sizes):
        safe = bins * (each // int(sizes[at]))  # samples that fit in any order
        if is_padded:
            count = safe
        else:
            before = int(sums[at - 1]) if at else 0
            count = int(np.searchsorted(sums, before + tokens, side="right")) - at
        count = min(count, len(sizes) - at)
        if bins > 1:
            count = _fitting(lengths, order[at:], count=count, safe=safe, each=each, bins=bins)
        at += count
        ends.append(at)
    if bins == 1 and len(ends) > 1 and ends[-1] - ends[-2] < ranks:
        begin = ends[-3] if len(ends) > 2 else 0
        ends[-2] = (begin + ends[-1]) // 2
    return order, np.array(ends, np.int64)


def _fitting(lengths: Ints, order: Ints, *, count: int, safe: int, each: int, bins: int) -> int:
    """Return the number of samples of the next batch: `count` or fewer, so that each of its bins
    holds at most `each` tokens and the remaining samples, if any, are enough for another batch."""
    while True:
        if 0 < len(order) - count < bins <= len(order) // 2:
            count = len(order) // 2
        if count <= safe:  # also all batches with fewer samples than bins
            return count
        sums = np.cumsum(np.concatenate([[0], np.maximum(lengths[np.sort(order[:count])], 1)]))
        most = int(np.diff(sums[np.arange(bins + 1) * count // bins]).max())
        if most <= each:
            return count
        count = max(safe, min(count - 1, count * each // most))


@dataclass(frozen=True, slots=True, eq=False)
class _Pool:
    """The samples of one pool.

    start: position of its first sample. samples: batch by batch. ends: ends of the batches,
    relative to start. lane_keys: keys that sort the rows of a batch by the place of their lane;
    None: they already have this order. bins: number of bins of a batch, which change places as a
    whole.
    """

    start: int
    samples: SlotSamples
    ends: Ints
    lane_keys: Ints | None
    bins: int

    @property
    def end(self) -> int:
        """The position after the last sample."""
        return self.start + len(self.samples.rows)

    def slot_order(self, begin: int, end: int) -> Ints | None:
        """Return positions [begin, end), relative to `begin`, in the order of their slots: sorted
        by the place of the lane and the offset. None if they already have this order."""
        if self.lane_keys is None:
            return None
        keys, bins = self.lane_keys[begin - self.start : end - self.start], self.bins
        if bins == 1:
            return np.argsort(keys)
        cuts = np.arange(bins + 1) * len(keys) // bins
        sizes, places = np.diff(cuts), np.arange(bins)
        means = np.diff(np.concatenate([[0], np.cumsum(keys)])[cuts]) / np.maximum(1, sizes)
        for size in np.unique(sizes):  # only bins with equally many samples change places
            equal = np.flatnonzero(sizes == size)
            places[equal] = equal[np.argsort(means[equal], kind="stable")]
        return np.concatenate([np.arange(cuts[b], cuts[b + 1]) for b in places.tolist()])


class BucketPlan(JobPlan):
    """The `JobPlan` of batches of similar samples: another plan with each pool in another order.

    Pools are computed on demand; the latest two are cached. Thread-safe. seed: None leaves batches
    in the order of their lengths. known: a cursor, and the number of the step that begins there.
    """

    def __init__(
        self,
        plan: JobPlan,
        settings: BucketSettings | AspectSettings,
        lengths: Lengths,
        *,
        seed: int | None,
    ) -> None:
        self._plan, self.settings = plan, settings
        self.samples, self.sizes = plan.samples, plan.sizes
        self.lanes, self.window, self.bins = plan.lanes, plan.window, settings.bins
        self._lengths, self._seed = lengths, seed
        self._pools: dict[tuple[int, int], _Pool] = {}
        self._counts: dict[int, Ints] = {}  # batches of each pool by epoch, 0 if unknown
        self.known = Cursor(0, 0), 0
        self._lock = threading.Lock()

    @property
    def open_shards(self) -> float:
        """Mean number of shards that all lanes mix at a time."""
        return self._plan.open_shards

    @property
    def fingerprint(self) -> str:
        """Hash of all that the order depends on, 64 hex digits."""
        return hashlib.sha256(f"{self._plan.fingerprint} {self.settings}".encode()).hexdigest()

    def part_counts(self, epoch: int, position: int) -> Ints | None:
        """Return how many samples each part has before a position: exact where a pool begins, as
        the batches of a pool hold samples of all of it."""
        return self._plan.part_counts(epoch, position)

    def shards(self, global_batch: int, *, first: int, end: int, world: int) -> Ints:
        """Return the shards of the lanes of ranks [first, end). Lanes have changing shares of a
        batch, so that the ranks also read some samples of neighbouring lanes."""
        return self._plan.shards(global_batch, first=first, end=end, world=world)

    @property
    def pools(self) -> int:
        """The number of pools of an epoch."""
        return max(1, self.samples // self.settings.pool)

    def number(self, position: int) -> int:
        """Return the number of the pool of a position."""
        return min(position // self.settings.pool, self.pools - 1)

    def counts(self, epoch: int, first: int, end: int) -> Ints:
        """Return the batches of pools [first, end) of an epoch, 0 if they aren't counted yet."""
        with self._lock:
            return self._counts_of(epoch)[first:end].copy()

    def learn(self, other: BucketPlan) -> None:
        """Copy the counts of another plan, if it has the same order."""
        if self.fingerprint != other.fingerprint:
            return
        with other._lock:
            self.known = other.known
            self._counts = {epoch: counts.copy() for epoch, counts in other._counts.items()}

    def _counts_of(self, epoch: int) -> Ints:
        """Return the batches of each pool of an epoch: 4 bytes for each pool that a job reads."""
        return self._counts.setdefault(epoch, np.zeros(self.pools, np.int32))

    def pool(self, epoch: int, position: int) -> _Pool:
        """Return the pool of a position. Raises PlanError, and errors of looking up lengths."""
        samples, each, last = self.samples, self.settings.pool, self.pools - 1
        number = self.number(position)
        key = epoch, number
        with self._lock:
            found = self._pools.pop(key, None)
            if found is None:
                end = samples if number == last else (number + 1) * each
                found = self._make(epoch, number, number * each, end)
                self._counts_of(epoch)[number] = len(found.ends)
            self._pools[key] = found
            while len(self._pools) > 2:
                del self._pools[next(iter(self._pools))]
        return found

    def _make(self, epoch: int, number: int, start: int, end: int) -> _Pool:
        count, settings = end - start, self.settings
        samples = self._plan.places(epoch, start, max(1, count), low=0, high=count)
        # The samples of a batch must not depend on the lane order, so it is undone first.
        own = self._plan.own_slots(epoch, start, count) if count else None
        lane_keys = None
        if own is not None:
            lane_keys = np.empty(count, dtype=np.int64)
            lane_keys[own] = np.arange(count)
            samples = samples.take(lane_keys)
        order, ends = settings.cut(self._lengths(samples.rows))
        sizes, place = np.diff(ends, prepend=0), np.arange(len(ends))
        if self._seed is not None:
            keys = keyed_hash(self._seed, _BUCKET, epoch, number, place)
            place = np.argsort(settings.permuted(ends, keys))
        # A batch keeps the stream's order, lane by lane, so that ranks read their own lanes.
        batch = np.repeat(place, sizes)
        order = order[np.lexsort((order, batch))]
        if lane_keys is not None:
            lane_keys = lane_keys[order]
        ends = np.cumsum(sizes[np.argsort(place)])
        return _Pool(start, samples.take(order), ends, lane_keys, settings.bins)

    def places(self, epoch: int, position: int, size: int, *, low: int, high: int) -> SlotSamples:
        """Return slots [low, high) of the positions [position, position + size), cut at the end of
        the epoch. Raises PlanError for slots outside of it."""
        count = self._count(position, size, low, high)
        parts = list[SlotSamples]()
        at, end = position + low, position + high
        while at < end:
            pool = self.pool(epoch, at)
            begin, stop = max(position, pool.start), min(position + count, pool.end)
            samples = pool.samples.take(slice(begin - pool.start, stop - pool.start))
            if (in_slots := pool.slot_order(begin, stop)) is not None:
                samples = samples.take(in_slots)
            parts.append(samples.take(slice(at - begin, end - begin)))
            at += len(parts[-1].rows)
        return SlotSamples.end_to_end(parts or [SlotSamples(rows=np.empty((0, 2), np.int64))])

    def places_together(self, epoch: int, cuts: Sequence[SlotCut]) -> SlotSamples:
        """Return `places` of several batches of an epoch, end to end."""
        parts = [self.places(epoch, at, size, low=low, high=high) for at, size, low, high in cuts]
        return SlotSamples.end_to_end(parts)

    def own_slots(self, epoch: int, position: int, size: int) -> Ints | None:
        """Return the number of each slot of a global batch without a lane order, as
        `JobPlan.own_slots`."""
        parts: list[Ints] = []
        at, end = position, min(position + size, self.samples)
        while at < end:
            pool = self.pool(epoch, at)
            stop = min(end, pool.end)
            if (in_slots := pool.slot_order(at, stop)) is None:
                return None
            parts.append(in_slots + (at - position))
            at = stop
        return np.concatenate(parts) if parts else None


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketWalk(Walk):
    """The division of epochs into global batches by tokens. schedule: size of a usual batch."""

    buckets: BucketPlan

    def step_size(self, at: Cursor) -> int:
        """Return the samples of the step at a cursor: up to the end of its batch."""
        if at.position >= self.samples:
            return 0
        pool = self.buckets.pool(at.epoch, at.position)
        within = at.position - pool.start
        return int(pool.ends[np.searchsorted(pool.ends, within, side="right")]) - within

    def change_sample(self, at: Cursor) -> int:
        """Return the first sample of the first pool that begins at or after a cursor, because the
        batches of a pool hold samples of all of it."""
        buckets = self.buckets
        number = buckets.number(at.position)
        number += number * buckets.settings.pool < at.position
        if number == buckets.pools:
            return self.sample(Cursor(at.epoch + 1, 0))
        return self.sample(Cursor(at.epoch, number * buckets.settings.pool))

    def left(self, cursor: Cursor, *, most: int | None = None) -> int:
        """Return the number of steps from a cursor to the end of its epoch, at most `most`."""
        count, at = 0, cursor
        while at.position < self.samples and (most is None or count < most):
            pool = self.buckets.pool(at.epoch, at.position)
            count += int((pool.ends > at.position - pool.start).sum())
            at = Cursor(at.epoch, pool.end)
        return count if most is None else min(count, most)

    def step_number(self, cursor: Cursor) -> int:
        """Return the number of the first step that begins at or after a cursor.

        Raises PlanError if it is too far from a step whose number is known.
        """
        place, number = self.buckets.known
        tally = _StepTally(self.buckets)
        if cursor < place:
            return number - tally.between(cursor, place)
        return number + tally.between(place, cursor)

    def cursor_of(self, step: int) -> Cursor:
        """Return the cursor at which a step begins. Raises PlanError for a negative number, and for
        a step that is too far from one whose number is known."""
        if step < 0:
            raise PlanError(f"step: got {step:,}, wanted 0 or more.")
        buckets, tally = self.buckets, _StepTally(self.buckets)
        place, number = buckets.known
        epoch, pool = place.epoch, buckets.number(place.position)
        # Steps from the pool's first one on.
        wanted = step - number + tally.in_pool(place)
        while wanted < 0:
            if (epoch, pool) == (0, 0):
                raise PlanError(f"step: got {step:,}, and no epoch of this job has that step.")
            epoch, pool = (epoch, pool - 1) if pool else (epoch - 1, buckets.pools - 1)
            wanted += tally.batches(epoch, pool, pool + 1)
        while wanted >= (count := tally.batches(epoch, pool, pool + 1)):
            wanted -= count
            epoch, pool = (epoch, pool + 1) if pool + 1 < buckets.pools else (epoch + 1, 0)
        found = buckets.pool(epoch, pool * buckets.settings.pool)
        return Cursor(epoch, found.start + int(_begins(found.ends)[wanted]))

    def know(self, cursor: Cursor, step: int | None) -> None:
        """Store the number of the step at a cursor, to count from there."""
        if step is not None:
            self.buckets.known = cursor, step

    def learn(self, other: Walk) -> None:
        """Copy the counts of another walk."""
        if isinstance(other, BucketWalk):
            self.buckets.learn(other.buckets)


class _StepTally:
    """Counts the steps of pools for one number. Raises PlanError for too many samples whose lengths
    would have to be looked up."""

    def __init__(self, buckets: BucketPlan) -> None:
        self._buckets, self._looked = buckets, 0

    def batches(self, epoch: int, first: int, end: int) -> int:
        """Return the batches of pools [first, end) of an epoch."""
        buckets, each = self._buckets, self._buckets.settings.pool
        counts = buckets.counts(epoch, first, end)
        missing = (np.flatnonzero(counts == 0) + first).tolist()
        self._looked += len(missing) * each
        if self._looked > MOST_COUNTED:
            raise PlanError(
                "With batch_tokens= a step's number is counted from the lengths of the samples "
                f"between it and the loader's position: about {self._looked:,} of them, which is "
                "too much to wait for. Ask for a step nearer to the loader's position."
            )
        new = sum(len(buckets.pool(epoch, number * each).ends) for number in missing)
        return int(counts.sum()) + new

    def between(self, begin: Cursor, end: Cursor) -> int:
        """Return the number of steps that begin at or after one cursor and before another."""
        total, pool = -self.in_pool(begin), self._buckets.number(begin.position)
        for epoch in range(begin.epoch, end.epoch):
            total += self.batches(epoch, pool, self._buckets.pools)
            pool = 0
        total += self.batches(end.epoch, pool, self._buckets.number(end.position))
        return total + self.in_pool(end)

    def in_pool(self, at: Cursor) -> int:
        """Return how many batches of a cursor's pool begin before it."""
        buckets = self._buckets
        if buckets.number(at.position) * buckets.settings.pool == at.position:
            return 0
        pool = buckets.pool(at.epoch, at.position)
        return int(np.searchsorted(_begins(pool.ends), at.position - pool.start, side="left"))


def _begins(ends: Ints) -> Ints:
    return np.concatenate([[0], ends[:-1]])
