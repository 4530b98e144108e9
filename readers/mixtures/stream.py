"""Map the positions of a mixture's stream to (part, index in the part's own stream). Pure.

A mixture has one stream, whose samples are counted from the job's start over all its epochs. A part
continues where it was when an epoch of the mixture ends: index j of a part of n samples is sample
j % n of its own epoch j // n, so that a part's epochs are complete whatever the weights. With
epoch="once" both kinds of epochs are the same.

The stream consists of *stages*, in each of which the integer shares are constant (`ShareTree`). A
stage begins where weights change; what a part lacked of its exact share is carried over. A linear
change is a row of short stages. With epoch="once" a stage also ends where a part is used up: part i
is used up after the fraction n_i / s_i of its samples and shares, so all of these positions are
known beforehand.
"""

from __future__ import annotations

import bisect
import operator
from dataclasses import dataclass
from itertools import chain, zip_longest
from typing import TYPE_CHECKING, Literal

import numpy as np

from penstock.cache import PlanError
from penstock.readers.mixtures.shares import ShareTree

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from penstock.readers.types import Floats, Ints


RAMP_STAGES = 256
"""The number of stages into which a linear change of weights is divided."""

_KEPT_STAGES = 4
_MOST_SAMPLES = 2**60

EpochRule = Literal["first", "all", "once"] | int
"""The end of a mixture's epoch: when the first part is used up, when every part is, when each
sample was delivered once, or after a number of samples."""


@dataclass(frozen=True, slots=True)
class WeightChange:
    """Integer shares that are in force from a sample of the job's stream on.

    target, until: the shares change linearly to `target`, which they reach at sample `until`; by
    default they are constant.
    """

    start: int
    shares: tuple[int, ...]
    until: int | None = None
    target: tuple[int, ...] | None = None

    def stages(self, end: int | None) -> Iterator[tuple[int, Ints]]:
        """Yield the first sample and the shares of each stage before a sample `end`."""
        first = np.array(self.shares, np.int64)
        if self.until is None or self.target is None:
            yield self.start, first
            return
        last, length = np.array(self.target, np.int64), self.until - self.start
        pieces = min(RAMP_STAGES, length)
        for piece in range(pieces):
            start = self.start + piece * length // pieces
            if end is not None and start >= end:
                return
            done = (2 * piece + 1) / (2 * pieces)
            shares = np.rint(first + (last - first) * done).astype(np.int64)
            # A part that has any share at one end has some in between.
            yield start, np.maximum(shares, (first > 0) | (last > 0))
        if end is None or self.until < end:
            yield self.until, last


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Weights:
    """Integer shares that are in force from sample `start` of a job's stream on.

    shares: int64, shape (parts,). counts: samples of each part before `start`, int64, (parts,).
    owed: what each part lacks of its exact share there, float64, (parts,), or None.
    """

    start: int
    shares: Ints
    counts: Ints
    owed: Floats | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Stage:
    """A range of the stream with constant shares: samples from `start` on, to `end` if it is known.

    counts: samples of each part before it. unit: consecutive samples that belong to one part.
    """

    start: int
    end: int | None
    counts: Ints
    tree: ShareTree
    unit: int = 1

    def contains(self, sample: int) -> bool:
        """Return True for a sample of this stage."""
        return self.start <= sample and (self.end is None or sample < self.end)

    def counts_before(self, samples: Ints) -> Ints:
        """Return how many samples each part has before samples of this stage, (n, parts)."""
        units, rest = np.divmod(samples - self.start, self.unit)
        counts: Ints = self.counts + self.tree.counts_at(units) * self.unit
        if self.unit > 1:
            counts[np.arange(len(samples)), self.tree.locate(units)[0]] += rest
        return counts

    def locate(self, samples: Ints) -> tuple[Ints, Ints]:
        """Return the part of samples of this stage, and their index in the part's own stream."""
        units, rest = np.divmod(samples - self.start, self.unit)
        part, index = self.tree.locate(units)
        return part, index * self.unit + rest + self.counts[part]


class MixtureStream:
    """The parts of a job's samples, by their positions in its stream. Not thread-safe.

    sizes: samples of each part, at least 1. changes: the weights, ascending by their first sample.
    counts, owed: at the first change, samples of each part before it, and what each lacks of its
    exact share (`ShareTree.owed_after`); None at the job's start. is_once: an epoch has each sample
    once. unit: consecutive positions that belong to one part, 1 or a global batch, of which the
    start of each change is a multiple; not together with is_once.
    """

    def __init__(
        self,
        sizes: Ints,
        changes: Sequence[WeightChange],
        *,
        counts: Ints | None = None,
        owed: Floats | None = None,
        is_once: bool = False,
        unit: int = 1,
    ) -> None:
        self.sizes, self.changes = sizes, tuple(changes)
        self._is_once, self.unit = is_once, unit
        self._total = int(sizes.sum())
        ends = [change.start for change in self.changes[1:]]
        self._planned = chain.from_iterable(
            change.stages(end) for change, end in zip_longest(self.changes, ends)
        )
        start, shares = next(self._planned)
        before = np.zeros(len(sizes), np.int64) if counts is None else counts
        self._known = [Weights(start=start, shares=shares, counts=before, owed=owed)]
        self._next = next(self._planned, None)
        self._stages: list[_Stage] = []
        self._used_up: tuple[tuple[int, bool], _UsedUp] | None = None

    def counts(self, sample: int) -> Ints:
        """Return how many samples each part has before a sample of the stream, int64, (parts,).

        Raises PlanError for a sample before the first change.
        """
        found: Ints = self._stage(sample).counts_before(np.array([sample]))[0]
        return found

    def counts_at(self, samples: Ints) -> Ints:
        """Return `counts` before several samples of the stream, ascending: int64, shape (n,
        parts)."""
        counts = np.empty((len(samples), len(self.sizes)), np.int64)
        for stage, some in self._in_stages(samples):
            counts[some] = stage.counts_before(samples[some])
        return counts

    def locate(self, samples: Ints) -> tuple[Ints, Ints]:
        """Return the part of each sample of the stream, and its index in the part's own stream:
        int64, shape (n,) each. samples: ascending, int64, shape (n,). Raises PlanError as
        `counts`."""
        part, index = np.empty((2, len(samples)), np.int64)
        for stage, some in self._in_stages(samples):
            part[some], index[some] = stage.locate(samples[some])
        return part, index

    def weights_at(self, sample: int) -> Weights:
        """Return the weights in force at a sample, with the counts where they took effect."""
        return self._known[self._known_at(sample)]

    # -- stages

    def _in_stages(self, samples: Ints) -> Iterator[tuple[_Stage, slice]]:
        """Yield the stages of ascending samples, each with its part of them."""
        at = 0
        while at < len(samples):
            stage, end = self._stage(int(samples[at])), len(samples)
            if stage.end is not None:
                end = int(np.searchsorted(samples, stage.end))
            yield stage, slice(at, end)
            at = end

    def _stage(self, sample: int) -> _Stage:
        """Return the stage that contains a sample."""
        for stage in self._stages:
            if stage.contains(sample):
                return stage
        number = self._known_at(sample)
        weights, end = self._known[number], self._end(number)
        if self._is_once:
            stage = self._until_used_up(sample, weights, end)
        else:
            tree = ShareTree(weights.shares, owed=weights.owed)
            start, counts = weights.start, weights.counts
            stage = _Stage(start=start, end=end, counts=counts, tree=tree, unit=self.unit)
        self._stages = [stage, *self._stages[: _KEPT_STAGES - 1]]
        return stage

    def _until_used_up(self, sample: int, weights: Weights, end: int | None) -> _Stage:
        """Return the stage of an epoch that has each sample once. end: of the weights in force."""
        epoch = sample // self._total
        begin, counts = weights.start, weights.counts
        if begin < epoch * self._total:
            begin, counts = epoch * self._total, epoch * self.sizes
        left = (epoch + 1) * self.sizes - counts
        key = weights.start, begin == weights.start
        if self._used_up is None or self._used_up[0] != key:
            self._used_up = key, _UsedUp(left, weights.shares)
        used_up = self._used_up[1]
        number = int(np.searchsorted(used_up.ends, sample - begin, side="right"))
        before, after = np.zeros_like(left), used_up.counts(np.array([number]))[0]
        if number:
            before = used_up.counts(np.array([number - 1]))[0]
        until = begin + int(used_up.ends[number])
        return _Stage(
            start=begin + int(before.sum()),
            end=until if end is None else min(until, end),
            counts=counts + before,
            tree=ShareTree(np.where(left > before, weights.shares, 0), most=after - before),
        )

    def _known_at(self, sample: int) -> int:
        """Return the number of the weights in force at a sample; all before them get known."""
        if sample < self._known[0].start:
            raise PlanError(
                f"mixture: sample {sample:,} of the job is before {self._known[0].start:,}, the "
                "oldest change of weights that its state records."
            )
        while self._next is not None and sample >= self._next[0]:
            (start, shares), last = self._next, self._known[-1]
            stage, owed = self._stage(start - 1), None
            if not self._is_once:
                owed = stage.tree.owed_after((start - last.start) // self.unit)
            counts = stage.counts_before(np.array([start]))[0]
            self._next = next(self._planned, None)
            self._known.append(Weights(start=start, shares=shares, counts=counts, owed=owed))
        return bisect.bisect_right(self._known, sample, key=_START) - 1

    def _end(self, number: int) -> int | None:
        """Return the sample at which weights stop being in force; None if there is none."""
        if number + 1 < len(self._known):
            return self._known[number + 1].start
        return None if self._next is None else self._next[0]


_START = operator.attrgetter("start")


class _UsedUp:
    """The positions at which parts are used up, if each sample is delivered once.

    left: samples of each part. shares: at least 1 where left is. While a part has samples, it gets
    positions in proportion to its shares: so part k ends after left_k / shares_k samples a share,
    when any other part has delivered its shares times that, or all that it has.

    ends: number of positions until the first part ends, the second, …, int64, (ends,).
    """

    def __init__(self, left: Ints, shares: Ints) -> None:
        self._left, self._shares = left, shares
        some = np.flatnonzero(left > 0)
        self._ending = some[np.unique(left[some] / shares[some], return_index=True)[1]]
        rows = [
            self.counts(np.arange(k, min(k + 64, len(self._ending)))).sum(axis=1)
            for k in range(0, len(self._ending), 64)
        ]
        self.ends: Ints = np.concatenate(rows)

    def counts(self, numbers: Ints) -> Ints:
        """Return the counts of all parts at some of the ends, int64, shape (numbers, parts)."""
        ending = self._ending[numbers]
        ended = self._shares[ending][:, None]
        whole, rest = np.divmod(self._left[ending][:, None], ended)
        whole = np.minimum(whole, self._left // np.maximum(1, self._shares) + 1)  # no overflow
        counts = whole * self._shares + (2 * rest * self._shares + ended) // (2 * ended)
        last = (numbers == len(self._ending) - 1)[:, None]
        return np.where(last, self._left, np.minimum(counts, self._left))


def epoch_samples(
    sizes: Ints, changes: Sequence[WeightChange], rule: EpochRule, *, unit: int = 1
) -> int:
    """Return the samples of a mixture's epoch, as those of its first one. unit: as of
    `MixtureStream`.

    Raises PlanError for a rule with which it has no end: a part without weight is never used up.
    """
    if not isinstance(rule, str):
        return rule
    if rule == "once":
        return int(sizes.sum())
    stream = MixtureStream(sizes, changes, unit=unit)
    ends = any if rule == "first" else all
    most = 1
    while not ends(stream.counts(most) >= sizes):
        most *= 2
        if most >= _MOST_SAMPLES:
            raise PlanError(
                f'epoch="{rule}": an epoch of this mixture would have more than {_MOST_SAMPLES:,} '
                "samples. Raise the smallest weights, or pass a number of samples."
            )
    reached = range(most // 2 + 1, most)
    return reached.start + bisect.bisect_left(
        reached, True, key=lambda n: bool(ends(stream.counts(n) >= sizes))
    )
