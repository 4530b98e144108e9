"""How many units a window mixes, of data that are decoded in units. Pure.

A unit is decoded as a whole and kept until its rows were read, so a window costs memory, which one
of shards doesn't. But units change places in all of their lane, not just inside a window: a window
needs as many of them as the rows of one unit take to spread, and no more.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from penstock.pipeline.plan.order import LEAST_WINDOW, SHARDS_PER_LANE, default_window
from penstock.pipeline.plan.windows import window_count

if TYPE_CHECKING:
    from penstock.readers.contents import Contents

WINDOW_BYTES = 4 * 2**30
"""Decoded units that all windows together keep by default. The same on every machine, as the order
is: what a quarter of a small training node's memory holds, and all of its ranks together."""

LEAST_UNITS = 16
"""Open units at least, however large they are: docs/order.md has what fewer would mix."""

MIXED_BATCHES = 32
"""Global batches that the open units hold at least, where they are small enough."""


def unit_count(contents: Contents) -> int:
    """Units of all shards."""
    assert contents.units is not None
    return sum(map(len, contents.units))


def live_share(rows: float) -> float:
    """The part of a window's units that is kept decoded in its middle, where it is largest: those
    of which some rows were read and some weren't. rows: of a unit. Of units of one row none is."""
    return max(0.0, 1 - 2 ** (1 - rows))


def open_units(contents: Contents, *, lanes: int, window: int) -> float:
    """Units that all lanes together mix at a time, of a shuffled job: W·L, or more where what is
    left of a lane widens its windows, up to twice."""
    assert contents.units is not None
    units, samples = unit_count(contents), contents.samples
    split = np.count_nonzero(contents.sizes) >= SHARDS_PER_LANE * lanes
    strands = 2 * lanes if split else lanes
    longest = max((int(rows.max(initial=0)) for rows in contents.units if len(rows) > 1), default=0)
    if longest:  # else each shard is one, which windows may cut
        longest = max(int(rows.max(initial=0)) for rows in contents.units)
    rows = max(1, window * samples * lanes // (max(1, units) * strands), longest)
    return units / window_count(samples // strands, rows)


def default_unit_window(contents: Contents, lanes: int, *, global_batch: int) -> int:
    """W of data in units; at least 1.

    Wanted are as many units as `default_window` wants shards, and `MIXED_BATCHES` of samples. What
    they take decoded is at most `WINDOW_BYTES`, but `LEAST_UNITS` are open in any case, and
    `LEAST_WINDOW` in each lane.
    """
    units = unit_count(contents)
    rows = contents.samples / max(1, units)
    as_shards = default_window(
        units,
        lanes,
        global_batch=global_batch,
        icc=contents.icc,
        shuffled=contents.shuffled,
        rows=rows,
    )
    wanted = max(as_shards * lanes, MIXED_BATCHES * global_batch / max(rows, 1.0))
    kept_bytes = contents.unit_bytes * live_share(rows)
    if kept_bytes * wanted > WINDOW_BYTES:
        wanted = max(WINDOW_BYTES / kept_bytes, LEAST_UNITS, LEAST_WINDOW * lanes)
    return max(1, math.ceil(min(wanted, units) / lanes))
