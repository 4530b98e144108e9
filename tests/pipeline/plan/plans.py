"""Strategies for plans in the tests of the order, and an epoch of a plan."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from hypothesis import strategies as st

from penstock.pipeline.plan import LaneOrder, Plan, World, rank_slots

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from penstock.pipeline.plan import JobPlan

PRIMES_AND_POWERS = (1, 2, 3, 5, 7, 8, 16, 31, 64, 96)

sizes_lists = st.one_of(
    st.lists(st.integers(0, 40), min_size=1, max_size=30),
    st.lists(st.sampled_from([0, 1]), min_size=1, max_size=30),
    st.lists(st.sampled_from([0, 1, 2, 400]), min_size=1, max_size=12),
)
seeds = st.one_of(st.integers(-(2**70), 2**70), st.integers(0, 9))


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    return Plan(
        draw(sizes_lists),
        seed=draw(st.one_of(seeds, st.none())) if draw(st.booleans()) else draw(seeds),
        lanes=draw(st.integers(1, 24)),
        window=draw(st.one_of(st.integers(1, 5), st.sampled_from([50, 2**70]))),
        reshuffle=draw(st.sampled_from([0.0, 0.3, 1.0])),
    )


def order_of_lanes(places: Sequence[int]) -> LaneOrder:
    """The order of a few lanes, by the lane at each place."""
    return LaneOrder(tuple(places), len(places))


def ids_of(plan: Plan, epoch: int, position: int, size: int, **ranks: int) -> NDArray[np.int64]:
    """The ids of a batch: samples of the preceding shards, plus row."""
    rows = batch_of(plan, epoch, position, size, **ranks)
    ids: NDArray[np.int64] = (np.cumsum(plan.sizes) - plan.sizes)[rows[:, 0]] + rows[:, 1]
    return ids


def fresh(plan: Plan) -> Plan:
    """An equal plan without anything cached."""
    return Plan(
        plan.sizes, seed=plan.seed, lanes=plan.lanes, window=plan.window, reshuffle=plan.reshuffle
    )


def batch_of(
    plan: JobPlan, epoch: int, position: int, size: int, *, rank: int = 0, world: int = 1
) -> NDArray[np.int64]:
    """(shard, row) of a rank's slots of a global batch."""
    low, high = rank_slots(World(rank, world), min(size, plan.samples - position), plan.bins)
    return plan.places(epoch, position, size, low=low, high=high).rows


def whole(plan: Plan, epoch: int, size: int) -> NDArray[np.int64]:
    """Ids of an epoch walked in global batches of `size`."""
    steps = [ids_of(plan, epoch, p, size) for p in range(0, plan.samples, size)]
    return np.concatenate([*steps, np.empty(0, dtype=np.int64)])
