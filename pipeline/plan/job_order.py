"""Freeze a job's order, and select the samples of a step that one rank reads.

A `JobOrder` holds the plan settings, the walk and the fingerprint; each reader (a loader, a
warm-up, a prefetch) gets its own plan from it. Pure.

A rank reads its own samples of a step, stand-ins for padding, and partners, which MixUp and CutMix
mix. The samples of a global batch are sorted by (lane, offset) in the plan's numbering of lanes,
whatever rank reads them. Within a lane the first and the second sample are partners, the third and
the fourth, and so on; the last of an odd number has the one before it. So a partner is always a
neighbour: a rank with complete lanes reads no additional samples, any other rank at most two.
Neighbours in a lane come from different strands, so never from one shard: on data that are sorted
by class, partners have the same class no more often than by chance. If a batch has only one sample
of some lane (the last batch of an epoch, or as many lanes as samples), that sample's partner is one
of the neighbouring lane.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from penstock.cache import PlanError
from penstock.pipeline.plan.order import SlotSamples, default_lanes, window_of
from penstock.pipeline.plan.walk import Cursor
from penstock.pipeline.plan.weighted_plan import WeightSettings, make_part_plan
from penstock.pipeline.plan.world import rank_slots

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from penstock.pipeline.plan.buckets import Aspects, AspectSettings, BucketPlan, BucketSettings
    from penstock.pipeline.plan.lanes import Ints, LaneOrder
    from penstock.pipeline.plan.listed_plan import ListSettings
    from penstock.pipeline.plan.mixture_plan import MixtureSettings
    from penstock.pipeline.plan.order import JobPlan
    from penstock.pipeline.plan.walk import Step, Walk
    from penstock.pipeline.plan.weighted_plan import PartPlan
    from penstock.pipeline.plan.world import World
    from penstock.readers import Contents, Source

PARTNERS_ELSEWHERE = 2
"""Maximum samples of other ranks that a rank reads as partners, in the plan's own order of lanes
or if each of its lanes has two samples of a batch or more."""


def most_elsewhere(batch: int, *, lanes: int, ranks: int) -> int:
    """Return the maximum samples that a rank reads in addition to a usual batch as partners, with
    any lane order: the partner of a lane's only sample may be on any rank.

    batch: samples of the usual global batch. If it has four samples a lane, a batch with fewer than
    two a lane is less than half as long, and fits into a usual batch together with its partners.
    """
    return PARTNERS_ELSEWHERE if batch >= 4 * lanes else max(PARTNERS_ELSEWHERE, -(-batch // ranks))


def with_partners(low: int, wanted: Ints) -> tuple[Ints, Ints]:
    """Return the slots that a rank with slots [low, low + n) of a global batch reads, and the index
    of each own slot's partner in these.

    wanted: the slot of each own slot's partner, shape (n,). Returns (slots, partner): slots has the
    rank's own slots, then a few of other ranks (`most_elsewhere`); partner has shape (n,).
    """
    own = np.arange(low, low + len(wanted))
    outside = (wanted < low) | (wanted >= low + len(wanted))
    more = np.unique(wanted[outside])
    place = np.where(outside, len(own) + np.searchsorted(more, wanted), wanted - low)
    return np.concatenate([own, more]), place


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RankSlots:
    """The samples that one rank reads for one step.

    samples: those of its batch, `real` of them, and then stand-ins for padding, or partners from
    other ranks. valid: bool, shape (n,), False for stand-ins; None without padding. partner: for
    each real sample the index of its partner in `samples`, int64, shape (real,); None without
    mixing.
    """

    samples: SlotSamples
    real: int
    valid: NDArray[np.bool_] | None = None
    partner: Ints | None = None

    @property
    def rows(self) -> Ints:
        """The rows to read: (shard, row), int64, shape (n, 2)."""
        return self.samples.rows


@dataclass(frozen=True, slots=True, kw_only=True)
class RankOrder:
    """The selection of one rank's rows of each step of a plan.

    padded_by: the walk with the full batch size to which pad="mask" fills batches; None without
    padding. mixes: True if samples have partners; not together with padding.
    """

    plan: JobPlan
    world: World
    padded_by: Walk | None = None
    mixes: bool = False

    def slots(self, step: Step) -> RankSlots:
        """Return the samples that this rank reads for a step."""
        epoch, position = step.start.epoch, step.start.position
        low, high = rank_slots(self.world, step.size, self.plan.bins)
        samples = self.plan.places(epoch, position, step.size, low=low, high=high)
        real = len(samples.rows)
        if self.mixes:
            wanted = self.plan.partner_slots(epoch, position, step.size, low=low, high=high)
            slots, partner = with_partners(low, wanted)
            elsewhere = [
                self.plan.places(epoch, position, step.size, low=slot, high=slot + 1)
                for slot in slots[real:].tolist()
            ]
            samples = SlotSamples.end_to_end([samples, *elsewhere])
            return RankSlots(samples=samples, real=real, partner=partner)
        if self.padded_by is None:
            return RankSlots(samples=samples, real=real)
        padded_size = -(-self.padded_by.full_size(step.start) // self.world.size)
        valid = np.arange(padded_size) < real
        if missing := padded_size - real:
            stand_in = self.plan.places(epoch, position, 1, low=0, high=1)
            samples = SlotSamples.end_to_end([samples, *[stand_in] * missing])
        return RankSlots(samples=samples, real=real, valid=valid)

    def slots_together(self, steps: Sequence[Step]) -> tuple[list[RankSlots], SlotSamples] | None:
        """Return the samples that this rank reads for steps of one epoch, and all of them end to
        end; None if they are of two epochs, padded or mixed."""
        epoch, world = steps[0].start.epoch, self.world
        if steps[-1].start.epoch != epoch or self.mixes or self.padded_by is not None:
            return None
        bins, bounds = self.plan.bins, [0]
        cuts = []
        for step in steps:
            low, high = rank_slots(world, step.size, bins) if world.size > 1 else (0, step.size)
            cuts.append((step.start.position, step.size, low, high))
            bounds.append(bounds[-1] + high - low)
        samples = self.plan.places_together(epoch, cuts)
        parts = [samples.take(slice(a, b)) for a, b in pairwise(bounds)]
        return [RankSlots(samples=part, real=len(part.rows)) for part in parts], samples


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSettings:
    """The settings of a job's plan. seed: keys random draws, and the order if it is shuffled.
    buckets: settings of batches by tokens, else None. aspects: of batches of images with similar
    shapes, else None. mixture: of a mixture's parts, else None;
    lanes is then the number of all lanes, and window the largest. weights: of weights of samples,
    else None. lists: of a sampler, else None."""

    seed: int
    shuffle: bool
    lanes: int
    window: int
    reshuffle: float
    buckets: BucketSettings | None = None
    aspects: AspectSettings | None = None
    mixture: MixtureSettings | None = None
    weights: WeightSettings | None = None
    lists: ListSettings | None = None

    def epoch_samples(self, contents: Contents) -> int:
        """Return the samples of an epoch."""
        several = self.mixture or self.weights or self.lists
        return contents.samples if several is None else several.samples

    @property
    def weights_text(self) -> str:
        """A text of the weights of samples and of those that `set_weights` set, or of a sampler, to
        compare them."""
        return "".join(each.text for each in (self.mixture, self.weights, self.lists) if each)

    @property
    def order_seed(self) -> int | None:
        """The seed of the order; None for index order."""
        return self.seed if self.shuffle else None


def first_settings(
    contents: Contents,
    *,
    seed: int,
    global_batch: int,
    shuffle: bool = True,
    lanes: float | None = None,
    window: float | None = None,
    reshuffle: float = 0.0,
    drop_last: bool = False,
) -> PlanSettings:
    """Return the plan settings of a job's first start; defaults follow from dataset and global
    batch. seed: keys random draws, and the order. shuffle: False for index order. drop_last: of
    the loader; only mixtures need it. Raises PlanError for lanes or a window of a mixture."""
    mixture = weights = None
    if contents.mixture is not None:
        if lanes or window:
            raise PlanError(
                "order: got lanes or a window for a mixture, whose parts have their own, in "
                "proportion to their shares. Leave them out."
            )
        from penstock.pipeline.plan.mixture_plan import mixture_settings  # only these jobs load it

        mixture = mixture_settings(
            contents.mixture, shuffle=shuffle, global_batch=global_batch, drop_last=drop_last
        )
        lanes, window = sum(mixture.lanes), max(mixture.windows)
    elif contents.lists is not None:
        from penstock.pipeline.plan.listed_plan import ListSettings, refuse_order_settings

        refuse_order_settings({"lanes": lanes, "window": window, "reshuffle": reshuffle})
        lists = ListSettings.of(contents.lists, seed=seed)
        return PlanSettings(seed=seed, shuffle=False, lanes=1, window=1, reshuffle=0.0, lists=lists)
    else:
        weights = WeightSettings.first(contents.weights, shuffle=shuffle)
        if not shuffle:
            return PlanSettings(seed=seed, shuffle=False, lanes=1, window=1, reshuffle=0.0)
        contents = contents.expected
        lanes = int(lanes or default_lanes(global_batch, int(np.count_nonzero(contents.sizes))))
        window = int(window or window_of(contents, lanes, global_batch=global_batch))
    return PlanSettings(
        seed=seed,
        shuffle=shuffle,
        lanes=lanes,
        window=window,
        reshuffle=reshuffle,
        mixture=mixture,
        weights=weights,
    )


def make_plan(
    contents: Contents, settings: PlanSettings, lane_order: LaneOrder | None = None
) -> PartPlan:
    """Return a plan of one part with these settings, for one reader.

    Each reader needs its own: a plan caches the windows of one position, and two readers would
    evict each other's.
    """
    return make_part_plan(
        contents,
        settings.weights,
        seed=settings.order_seed,
        lanes=settings.lanes,
        window=settings.window,
        reshuffle=settings.reshuffle,
        lane_order=lane_order,
    )


def stream_plan(
    contents: Contents, settings: PlanSettings, lane_order: LaneOrder | None = None
) -> JobPlan:
    """Return a plan of one part, or of the parts of a mixture, for one reader; batches by tokens
    are cut from it."""
    if settings.lists is not None:
        from penstock.pipeline.plan.listed_plan import ListedPlan  # only these jobs load it

        return ListedPlan(contents, settings.lists, seed=settings.seed)
    if settings.mixture is None:
        return make_plan(contents, settings, lane_order)
    from penstock.pipeline.plan.mixture_plan import make_mixture_plan  # only these jobs load it

    assert contents.mixture is not None
    seed, reshuffle = settings.order_seed, settings.reshuffle
    return make_mixture_plan(contents.mixture, settings.mixture, seed=seed, reshuffle=reshuffle)


def order_fingerprint(contents: Contents, settings: PlanSettings) -> str:
    """Return the hash of dataset and order, as hex, which a resumed job must have, too."""
    known = [contents.fingerprint, stream_plan(contents, settings).fingerprint]
    known += [str(each) for each in (settings.buckets, settings.aspects) if each is not None]
    return hashlib.sha256(" ".join(known).encode()).hexdigest()


def bucket_plan(
    source: Source,
    settings: PlanSettings,
    lane_order: LaneOrder | None = None,
    aspects: Aspects | None = None,
) -> BucketPlan | None:
    """Return the plan of one reader for batches of similar samples; None unless they are cut so.

    aspects: of the images, if batches have images with similar shapes.
    """
    if (similar := settings.buckets or settings.aspects) is None:
        return None
    from penstock.pipeline.plan.buckets import BucketPlan  # only these jobs load it

    plan = stream_plan(source.contents, settings, lane_order)
    lengths = aspects or partial(source.lengths, similar.field)
    return BucketPlan(plan, similar, lengths, seed=settings.order_seed)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class JobOrder:
    """The samples that a job reads in each step, on any rank.

    lane_order: decides which part of a global batch each rank reads; None for the identity.
    aspects: of the images, if batches have images with similar shapes.
    """

    source: Source
    settings: PlanSettings
    walk: Walk
    lane_order: LaneOrder | None = None
    aspects: Aspects | None = None

    def plan(self) -> JobPlan:
        """Return a new plan for one reader."""
        source, settings, lane_order = self.source, self.settings, self.lane_order
        similar = bucket_plan(source, settings, lane_order, self.aspects)
        return similar or stream_plan(source.contents, settings, lane_order)

    def partners_elsewhere(self, world: World) -> int:
        """Return the maximum samples of other ranks that a rank reads as partners of mixing."""
        if self.settings.mixture is not None:  # a lane may have one sample of a batch
            return max(-(-size // world.size) for size in self.walk.schedule.sizes)
        if self.lane_order is None:
            return PARTNERS_ELSEWHERE
        sizes, lanes = self.walk.schedule.sizes, self.settings.lanes
        most = max(most_elsewhere(size, lanes=lanes, ranks=world.size) for size in sizes)
        by_tokens = self.settings.buckets
        if by_tokens is None:
            return most
        bins = -(-by_tokens.bins // world.size)  # each bin of a rank may have other neighbours
        return max(most, PARTNERS_ELSEWHERE * bins)

    def fingerprint(self) -> str:
        """Return the hash of dataset and order, as hex, which a resumed job must have, too."""
        return order_fingerprint(self.source.contents, self.settings)

    def batches(self, epoch: int, world: World) -> Iterator[list[int]]:
        """Yield the sample ids of a rank's batches in an epoch."""
        order = RankOrder(plan=self.plan(), world=world)
        for step in self.walk.steps(Cursor(epoch, 0), endless=False):
            yield self.source.ids(order.slots(step).rows).tolist()

    def samples(self, epoch: int, world: World) -> int:
        """Return the number of samples in all `batches` of an epoch."""
        walk = self.walk
        if (by_tokens := self.settings.buckets) is not None:
            steps = walk.steps(Cursor(epoch, 0), endless=False)
            return sum(world.share(step.size, by_tokens.bins) for step in steps)
        return sum(run.count * world.share(run.size) for run in walk.runs(Cursor(epoch, 0)))
