"""Cut batches by tokens: samples of about one length together, up to a number of tokens. Pure.

    position -> pool (a run of the stream) -> its samples by length -> cut into batches -> shuffled

A pool is some dozens of global batches of the stream in a row. Its samples are sorted by length and
cut so that no batch holds more tokens than it may; then its batches are permuted. So a pool is the
same set of samples as without it, any pool can be computed alone, and positions count samples as
before: a resume costs one pool, at any world size.

A global batch consists of bins: equal numbers of its samples, in the order of the stream, so that a
bin keeps to few lanes. There are as many as the job's first world has ranks, and no bin holds more
than its share of the tokens: a batch takes fewer samples until that is so. Ranks take whole bins.
(Bins filled by first fit or dealt by length hold 1 to 3 % more, but then every rank reads every
lane.)

What a batch takes is the sum of its lengths, or, where short samples are padded, its longest one
times its samples. (Bucketing by length within pools: Vaswani et al., "Attention Is All You Need",
2017, section 5.1, batch "by approximate sequence length"; the pool bounds how far from its place a
sample is moved.)

How many batches a pool has follows from the lengths of its samples, so a step's number has no
closed form: `BucketWalk` counts it from a step whose number is known, pool by pool. Pools that the
job went through are counted on the way; others cost what their samples' lengths cost (0.5 us a
sample), up to a limit.
"""

from __future__ import annotations

import hashlib
import threading
from dataclasses import dataclass
from dataclasses import field as attribute
from typing import TYPE_CHECKING

import numpy as np

from penstock.cache import PlanError
from penstock.cache.base import keyed_hash
from penstock.pipeline.plan.order import SlotSamples
from penstock.pipeline.plan.walk import Cursor, Walk
from penstock.pipeline.plan.world import first_slot

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from penstock.pipeline.plan.order import JobPlan

    Ints = NDArray[np.int64]
    Lengths = Callable[[Ints], Ints]
    """Tokens of samples by (shard, row), int64, shape (n,)."""

_BUCKET = 7  # after the seed, as `plan.order` has its own: no two uses share their draws

POOL_BATCHES = 64
"""Global batches of a pool, about: what is left over by lengths is then a hundredth."""

_MOST_POOL = 2**22  # samples
_KEPT_COUNTS = 3  # epochs

MOST_COUNTED = 2**24
"""Samples whose lengths are looked up to number a step that the job didn't come by: 8 s."""


def counting_error(samples: int) -> PlanError:
    """The error for a step whose number takes too much counting."""
    return PlanError(
        f"With batch_tokens= the number of a step is counted by the lengths of all samples between "
        f"it and here: about {samples:,} of them, which is too much to wait for. Ask for steps "
        "nearer to the loader's own place."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketSettings:
    """What batches by tokens were frozen with, as part of a plan.

    field: whose lengths count. tokens: of a global batch at most. is_padded: samples are filled up
    to the longest of their batch. pool: samples of a pool. ranks: samples that each batch has at
    least, but for an epoch of fewer. batch: samples of a usual global batch. bins: equal parts of
    each global batch that hold at most tokens // bins; 1 in states that were written before bins.
    """

    field: str
    tokens: int
    is_padded: bool
    pool: int
    ranks: int
    batch: int
    bins: int = attribute(default=1, repr=False)

    def __str__(self) -> str:
        """What the order depends on; with one bin, as before there were bins."""
        return repr(self) if self.bins == 1 else f"{self!r} in {self.bins} bins"

    def most(self, world: int) -> int:
        """Tokens of a rank's batch at most, in a world of so many ranks."""
        return self.tokens // self.bins * -(-self.bins // world)


def bucket_settings(
    field: str, *, tokens: int, is_padded: bool, ranks: int, some: Ints
) -> BucketSettings:
    """Settings for a job's first start. tokens: of a global batch; ranks: of the world; some:
    lengths of samples that stand for all, the same on every rank."""
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
    """Tokens of a global batch at least, so that every rank has a sample in each: twice the longest
    for each rank, as what is left over is shared out."""
    return longest * ranks * (2 if ranks > 1 else 1)


def cut_by_tokens(
    lengths: Ints, *, tokens: int, is_padded: bool, ranks: int, bins: int = 1
) -> tuple[Ints, Ints]:
    """Cut samples into batches of at most so many tokens, each of about one length.

    Returns the samples batch by batch, int64, shape (n,), and where each batch ends, int64, shape
    (batches,). Longest samples first, and those of a batch as they were; the rest is shared out
    with the batch before it, so that it has as many samples as there are ranks. Each of the bins of
    a batch, [b·n // bins, (b + 1)·n // bins) of its n samples, holds tokens // bins at most. Raises
    PlanError for a sample that takes more than a bin.
    """
    order, each = np.argsort(-lengths, kind="stable").astype(np.int64), tokens // bins
    sizes = np.maximum(lengths[order], 1)
    if len(sizes) and sizes[0] > each:
        whose = "a global batch" if bins == 1 else f"a rank's part of a global batch ({bins} parts)"
        raise PlanError(
            f"batch_tokens: a sample of {int(sizes[0]):,} tokens is longer than the {each:,} of "
            f"{whose}. Pass more tokens, or shorter samples."
        )
    sums, ends = np.cumsum(sizes), list[int]()
    at = 0
    while at < len(sizes):
        safe = bins * (each // int(sizes[at]))  # as many samples fit, whatever their order
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
    """How many of the samples in `order` make the next batch: `count` or fewer, so that each of its
    bins holds at most `each` tokens and what is left, if anything, makes a batch too."""
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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Pool:
    """start: position of its first sample; rows: batch by batch; ends: of batches, from start.
    turns: what sorts the rows of a batch by the place of their lane; None: they stand so. bins: of
    a batch, which change places as a whole."""

    epoch: int
    start: int
    rows: Ints
    ends: Ints
    turns: Ints | None
    bins: int

    @property
    def end(self) -> int:
        """The position behind its last sample."""
        return self.start + len(self.rows)

    def stands(self, begin: int, end: int) -> Ints | None:
        """Positions [begin, end), counted from `begin`, as their slots have them: sorted by the
        place of the lane and the offset. None where they stand so."""
        if self.turns is None:
            return None
        turns, bins = self.turns[begin - self.start : end - self.start], self.bins
        if bins == 1:
            return np.argsort(turns)
        cuts = np.arange(bins + 1) * len(turns) // bins
        sizes, places = np.diff(cuts), np.arange(bins)
        means = np.diff(np.concatenate([[0], np.cumsum(turns)])[cuts]) / np.maximum(1, sizes)
        for size in np.unique(sizes):  # a bin takes the place of one with as many samples
            alike = np.flatnonzero(sizes == size)
            places[alike] = alike[np.argsort(means[alike], kind="stable")]
        return np.concatenate([np.arange(cuts[b], cuts[b + 1]) for b in places.tolist()])


class Buckets:
    """The pools of a stream, on demand; the two that were asked for last are kept. Safe for several
    threads.

    known: a place, and the number of the step that begins there.
    """

    def __init__(
        self, plan: JobPlan, settings: BucketSettings, lengths: Lengths, *, seed: int | None
    ) -> None:
        """plan: of the stream. seed: None: batches stay in the order of their lengths."""
        self.plan, self.settings = plan, settings
        self._lengths, self._seed = lengths, seed
        self._pools: dict[tuple[int, int], _Pool] = {}
        self._counts: dict[int, Ints] = {}  # by epoch: batches of each pool, 0 where unknown
        self._totals: dict[int, int] = {}  # of whole epochs
        self.known = Cursor(0, 0), 0
        self._lock = threading.Lock()

    @property
    def pools(self) -> int:
        """How many an epoch has."""
        return max(1, self.plan.samples // self.settings.pool)

    def number(self, position: int) -> int:
        """The number of the pool that holds a position."""
        return min(position // self.settings.pool, self.pools - 1)

    def count(self, epoch: int, first: int, end: int) -> tuple[int, int]:
        """Batches of pools [first, end) of an epoch, and samples that were looked at for it: none
        of those pools that the job went through. Raises PlanError where that is too much."""
        with self._lock:
            if (total := self._totals.get(epoch)) is not None and end - first == self.pools:
                return total, 0
            counts = self._counts_of(epoch)[first:end].copy()
            missing = (np.flatnonzero(counts == 0) + first).tolist()
        if (looked := len(missing) * self.settings.pool) > MOST_COUNTED:
            raise counting_error(looked)
        total = int(counts.sum())
        for number in missing:
            total += len(self.pool(epoch, number * self.settings.pool).ends)
        return total, looked

    def total(self, epoch: int) -> int | None:
        """Batches of a whole epoch, where these are known without counting."""
        return self._totals.get(epoch)

    def learn(self, other: Buckets) -> None:
        """Take over what others of the same order have counted."""
        mine, theirs = self.plan.fingerprint, other.plan.fingerprint
        if (mine, self.settings) != (theirs, other.settings):
            return
        with other._lock:
            self.known = other.known
            self._totals = dict(other._totals)
            self._counts = {epoch: counts.copy() for epoch, counts in other._counts.items()}

    def _note(self, epoch: int, number: int, batches: int) -> None:
        counts = self._counts_of(epoch)
        counts[number] = batches
        if epoch not in self._totals and counts.all():
            self._totals[epoch] = int(counts.sum())

    def _counts_of(self, epoch: int) -> Ints:
        """The latest few epochs' are kept."""
        counts = self._counts.pop(epoch, None)
        if counts is None:
            counts = np.zeros(self.pools, np.int64)
        self._counts[epoch] = counts
        while len(self._counts) > _KEPT_COUNTS:
            del self._counts[next(iter(self._counts))]
        return counts

    def pool(self, epoch: int, position: int) -> _Pool:
        """The pool that holds a position of an epoch. Raises PlanError, and what looking up lengths
        raises."""
        samples, each, last = self.plan.samples, self.settings.pool, self.pools - 1
        number = self.number(position)
        key = epoch, number
        with self._lock:
            found = self._pools.pop(key, None)
            if found is None:
                end = samples if number == last else (number + 1) * each
                found = self._make(epoch, number, number * each, end)
                self._note(epoch, number, len(found.ends))
            self._pools[key] = found
            while len(self._pools) > 2:
                del self._pools[next(iter(self._pools))]
        return found

    def _make(self, epoch: int, number: int, start: int, end: int) -> _Pool:
        count, settings = end - start, self.settings
        rows = self.plan.places(epoch, start, max(1, count), low=0, high=count).rows
        # What is in a batch may not depend on the lanes' order, so it is undone here.
        own = self.plan.own_slots(epoch, start, count) if count else None
        turns = None
        if own is not None:
            turns = np.empty(count, dtype=np.int64)
            turns[own] = np.arange(count)
            rows = rows[turns]
        order, ends = cut_by_tokens(
            self._lengths(rows),
            tokens=settings.tokens,
            is_padded=settings.is_padded,
            ranks=settings.ranks,
            bins=settings.bins,
        )
        sizes = np.diff(ends, prepend=0)
        # Inside a batch samples stand as the stream has them, lane by lane: ranks keep to theirs.
        batch = np.repeat(np.arange(len(ends)), sizes)
        order = order[np.lexsort((order, batch))]
        if self._seed is not None:
            keys = keyed_hash(self._seed, _BUCKET, epoch, number, np.arange(len(ends)))
            swapped = np.argsort(keys, kind="stable")
            begins = ends - sizes
            order = np.concatenate(
                [order[begins[turn] : ends[turn]] for turn in swapped.tolist()] or [order]
            )
            ends = np.cumsum(sizes[swapped])
        if turns is not None:
            turns = turns[order]
        return _Pool(
            epoch=epoch, start=start, rows=rows[order], ends=ends, turns=turns, bins=settings.bins
        )


class BucketPlan:
    """A plan whose batches are those of buckets: as `order.Plan`, each pool in another order."""

    def __init__(self, buckets: Buckets) -> None:
        self._buckets, self._plan = buckets, buckets.plan
        self.samples, self.sizes = self._plan.samples, self._plan.sizes
        self.lanes, self.window = self._plan.lanes, self._plan.window
        self.bins = buckets.settings.bins

    @property
    def open_shards(self) -> float:
        """Mean shards that all lanes together mix at a time."""
        return self._plan.open_shards

    @property
    def fingerprint(self) -> str:
        """64 hex digits of all that the order depends on."""
        told = f"{self._plan.fingerprint} {self._buckets.settings}"
        return hashlib.sha256(told.encode()).hexdigest()

    def places(self, epoch: int, position: int, size: int, *, low: int, high: int) -> SlotSamples:
        """Slots [low, high) of the positions [position, position + size), clipped at the end of the
        epoch. Raises PlanError for what lies outside."""
        count = min(size, self.samples - position)
        if position < 0 or not 0 <= low <= high <= max(0, count):
            raise PlanError(f"slots [{low}, {high}): wanted some within [0, {max(0, count)}).")
        parts: list[Ints] = []
        at, end = position + low, position + high
        while at < end:
            pool = self._buckets.pool(epoch, at)
            begin, stop = max(position, pool.start), min(position + count, pool.end)
            rows = pool.rows[begin - pool.start : stop - pool.start]
            if (stands := pool.stands(begin, stop)) is not None:
                rows = rows[stands]
            part = rows[at - begin : end - begin]
            parts.append(part)
            at += len(part)
        if not parts:
            return SlotSamples(rows=np.empty((0, 2), np.int64))
        return SlotSamples(rows=parts[0].copy() if len(parts) == 1 else np.concatenate(parts))

    def own_slots(self, epoch: int, position: int, size: int) -> Ints | None:
        """The number that each slot of a global batch has where lanes have no order of their own,
        as `JobPlan.own_slots`."""
        parts: list[Ints] = []
        at, end = position, min(position + size, self.samples)
        while at < end:
            pool = self._buckets.pool(epoch, at)
            stop = min(end, pool.end)
            if (stands := pool.stands(at, stop)) is None:
                return None
            parts.append(stands + (at - position))
            at = stop
        return np.concatenate(parts) if parts else None

    def batch(self, epoch: int, position: int, size: int, *, rank: int = 0, world: int = 1) -> Ints:
        """(shard, row) of one rank's slots of a global batch, as `JobPlan.batch`."""
        count = max(0, min(size, self.samples - position))
        low, high = (first_slot(count, r, world, self.bins) for r in (rank, rank + 1))
        return self.places(epoch, position, size, low=low, high=high).rows

    def shards(self, global_batch: int, *, first: int, end: int, world: int) -> Ints:
        """Shards that ranks [first, end) mainly read in any epoch: those of their lanes. As batches
        hold lanes in changing shares, some samples of their neighbours' come too."""
        return self._plan.shards(global_batch, first=first, end=end, world=world)


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketWalk(Walk):
    """How an epoch is cut into global batches by tokens. schedule: of one size, a usual one's."""

    buckets: Buckets

    def step_size(self, at: Cursor) -> int:
        """Samples of the step that begins at a cursor: to the end of the batch that it lies in."""
        if at.position >= self.samples:
            return 0
        pool = self.buckets.pool(at.epoch, at.position)
        within = at.position - pool.start
        return int(pool.ends[np.searchsorted(pool.ends, within, side="right")]) - within

    def left(self, cursor: Cursor, *, most: int | None = None) -> int:
        """Steps from a cursor to the end of its epoch; most: who asks needs no more."""
        count, at = 0, cursor
        while at.position < self.samples and (most is None or count < most):
            pool = self.buckets.pool(at.epoch, at.position)
            count += int((pool.ends > at.position - pool.start).sum())
            at = Cursor(at.epoch, pool.start + len(pool.rows))
        return count if most is None else min(count, most)

    # -- numbers

    def step_number(self, cursor: Cursor) -> int:
        """The number of the first step that begins at or behind a cursor.

        Raises PlanError where too many samples' lengths lie between it and what is known.
        """
        place, number = self.buckets.known
        if cursor < place:
            return number - self._between(cursor, place)
        return number + self._between(place, cursor)

    def cursor_of(self, step: int) -> Cursor:
        """Where a step begins, by its number. Raises PlanError for a negative one, and for one that
        is too far from what is known."""
        if step < 0:
            raise PlanError(f"step: got {step:,}, wanted 0 or more.")
        buckets = self.buckets
        place, number = buckets.known
        epoch, pool, looked = place.epoch, buckets.number(place.position), 0
        # Steps from the pool's first one on.
        wanted = step - number + self._in_pool(epoch, place.position)
        while wanted < 0:
            if pool == 0:
                epoch, pool = epoch - 1, buckets.pools
                if epoch < 0:
                    raise PlanError(f"step: got {step:,}, which no epoch of this job has.")
                if (total := buckets.total(epoch)) is not None and wanted + total < 0:
                    wanted, pool = wanted + total, 0
                    continue
            pool -= 1
            count, more = buckets.count(epoch, pool, pool + 1)
            wanted, looked = wanted + count, _added(looked, more)
        while True:
            if pool == 0 and (total := buckets.total(epoch)) is not None and wanted >= total:
                wanted, epoch = wanted - total, epoch + 1
                continue
            count, more = buckets.count(epoch, pool, pool + 1)
            if wanted < count:
                found = buckets.pool(epoch, pool * buckets.settings.pool)
                return Cursor(epoch, found.start + int(_begins(found.ends)[wanted]))
            wanted, looked, pool = wanted - count, _added(looked, more), pool + 1
            if pool == buckets.pools:
                epoch, pool = epoch + 1, 0

    def know(self, cursor: Cursor, step: int | None) -> None:
        """Note the number of the step at a cursor, to count from there."""
        if step is not None:
            self.buckets.known = cursor, step

    def learn(self, other: Walk) -> None:
        """Take over what was counted by the walk before."""
        if isinstance(other, BucketWalk):
            self.buckets.learn(other.buckets)

    def _between(self, begin: Cursor, end: Cursor) -> int:
        """Steps that begin at or behind one cursor and before another."""
        if begin.epoch == end.epoch:
            return self._count(begin.epoch, begin.position, end.position)[0]
        total, looked = self._count(begin.epoch, begin.position, self.samples)
        for epoch in range(begin.epoch + 1, end.epoch):
            count, more = self._count(epoch, 0, self.samples)
            total, looked = total + count, _added(looked, more)
        return total + self._count(end.epoch, 0, end.position)[0]

    def _count(self, epoch: int, begin: int, end: int) -> tuple[int, int]:
        """Steps of an epoch that begin in positions [begin, end), and samples looked at for it."""
        buckets = self.buckets
        if begin >= self.samples or begin >= end:
            return 0, 0
        if begin == 0 and end >= self.samples:
            return buckets.count(epoch, 0, buckets.pools)
        first, last = buckets.number(begin), buckets.number(end)
        count, looked = buckets.count(epoch, first, last)
        return count + self._in_pool(epoch, end) - self._in_pool(epoch, begin), looked

    def _in_pool(self, epoch: int, position: int) -> int:
        """Batches of a position's pool that begin before it."""
        if self.buckets.number(position) * self.buckets.settings.pool == position:
            return 0
        pool = self.buckets.pool(epoch, position)
        return int(np.searchsorted(_begins(pool.ends), position - pool.start, side="left"))


def _begins(ends: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.concatenate([[0], ends[:-1]])


def _added(looked: int, more: int) -> int:
    if looked + more > MOST_COUNTED:
        raise counting_error(looked + more)
    return looked + more
