"""The order against a plain account of it, and what reshuffling moves."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.cache.base import keyed_hash
from penstock.pipeline.plan import Plan
from tests.pipeline.plan.plans import plans

# -- the order itself, against a plain account of it


@settings(max_examples=80, deadline=None)
@given(plan=plans(), epoch=st.integers(0, 3), size=st.integers(1, 60))
def test_order_is_the_documented_one(plan, epoch, size):
    if plan.seed is not None:
        expected = plainly(plan, epoch)
        at = 0
        for p in range(0, plan.samples, size):
            slots = sorted(
                (q % plan.lanes, q // plan.lanes) for q in range(p, min(p + size, len(expected)))
            )
            rows = plan.batch(epoch, p, size).tolist()
            assert rows == [list(expected[offset * plan.lanes + lane]) for lane, offset in slots]
            at += len(rows)
        assert at == plan.samples


def plainly(plan, epoch):
    """(shard, row) of each position, one sample at a time."""
    filled = np.flatnonzero(plan.sizes).tolist()
    strands = 2 * plan.lanes if len(filled) >= 4 * plan.lanes else plan.lanes
    assert plan.strands == strands
    stream = [(s, r) for s in dealt(plan, epoch, filled, strands) for r in range(plan.sizes[s])]
    lengths = [len(stream) // strands + (s < len(stream) % strands) for s in range(strands)]
    order, piece_number, begin = {}, 0, 0
    for strand, length in enumerate(lengths):
        samples = stream[begin : begin + length]
        begin += length
        pieces: dict[int, list[tuple[int, int]]] = {}
        for shard, row in samples:
            pieces.setdefault(shard, []).append((shard, row))
        ranked = []
        for piece in pieces.values():
            ranked.append((int(keyed_hash(plan.seed, 4, epoch, piece_number)), piece))
            piece_number += 1
        samples = [sample for _, piece in sorted(ranked) for sample in piece]
        for offset, sample in enumerate(in_windows(plan, epoch, strand, samples, len(filled))):
            order[offset * strands + strand] = sample
    return order


def dealt(plan, epoch, filled, strands):
    """Shards in the order in which they are laid end to end."""
    halves = strands // plan.lanes
    count = halves * max(1, len(filled) // strands)
    runs: list[list[int]] = [[] for _ in range(count)]
    for place, shard in enumerate(filled):
        runs[place * count // len(filled)].append(shard)
    halved: list[list[list[int]]] = [[] for _ in range(halves)]
    for number, run in enumerate(runs):
        run.sort(key=lambda shard: int(keyed_hash(plan.seed, 1, shard)))
        swapped = int(keyed_hash(plan.seed, 6, number // halves)) & 1
        halved[(number + swapped) % halves].append(run)
    order = [
        run[turn]
        for half in halved
        for turn in range(max(map(len, half), default=0))
        for run in half
        if turn < len(run)
    ]
    moves = [int(keyed_hash(plan.seed, 2, epoch, s)) / 2**64 < plan.reshuffle for s in order]
    movers = [shard for shard, goes in zip(order, moves, strict=True) if goes]
    movers.sort(key=lambda shard: -int(keyed_hash(plan.seed, 3, epoch, shard)))
    return [movers.pop() if goes else shard for shard, goes in zip(order, moves, strict=True)]


def in_windows(plan, epoch, strand, samples, filled):
    """A strand's samples, shuffled in windows of half of W shards or of W, and what is left."""
    if not samples:
        return []
    rows = max(1, plan.window * plan.samples * plan.lanes // (filled * plan.strands))
    shortest = plan.samples // plan.strands
    windows = max(1, shortest // rows)
    rows = max(1, shortest // windows)
    shift = phases(plan.strands)[strand] * rows // plan.strands - rows // 2
    bounds = [0, *(window * rows + shift for window in range(1, windows)), len(samples)]
    mixed: list[tuple[int, int]] = []
    for window, (start, end) in enumerate(itertools.pairwise(bounds)):
        part = samples[start:end]
        keys = [int(keyed_hash(plan.seed, 5, epoch, strand, window, i)) for i in range(len(part))]
        mixed += [part[i] for i in sorted(range(len(part)), key=lambda i: keys[i] >> 32)]
    return mixed


def phases(strands):
    step = max(1, round(strands * (math.sqrt(5) - 1) / 2))
    while math.gcd(step, strands) > 1:
        step -= 1
    return [strand * step % strands for strand in range(strands)]


# -- reshuffle


def lane_of(plan, epoch):
    """Each shard's lane (of most of its samples) in an epoch."""
    rows = plan.batch(epoch, 0, plan.samples)  # sorted by lane
    lane = np.arange(plan.samples) * plan.lanes // plan.samples
    counts = np.zeros((len(plan.sizes), plan.lanes), dtype=np.int64)
    np.add.at(counts, (rows[:, 0], lane), 1)
    return counts.argmax(axis=1)


@pytest.mark.parametrize("share", [0.0, 0.1, 0.3])
def test_about_the_reshuffle_share_changes_lane(share):
    lanes = 8
    plan = Plan([2] * 20_000, seed=4, lanes=lanes, window=2, reshuffle=share)
    home = lane_of(Plan(plan.sizes, seed=4, lanes=lanes, window=2), 0)
    for epoch in (0, 7):
        moved = np.mean(lane_of(plan, epoch) != home)
        # A shard that moves falls back into its lane once in L times; those near a cut slip across.
        assert abs(moved - share * (1 - 1 / lanes)) < 0.03
    if share:
        assert not np.array_equal(lane_of(plan, 0), lane_of(plan, 7))
