"""Windows of data in units: enough units for the mix, few enough for the memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.pipeline.plan import (
    LEAST_UNITS,
    MIXED_BATCHES,
    WINDOW_BYTES,
    Plan,
    default_unit_window,
    default_window,
    live_share,
    make_plan,
    open_units,
    shuffled_settings,
)
from penstock.readers import Contents
from penstock.readers.fields import Schema


def contents(shards: int, units: int, rows: int, *, unit_bytes: float = 0.0) -> Contents:
    """So many shards of so many units of so many rows."""
    return Contents(
        schema=Schema({}),
        sizes=np.full(shards, units * rows),
        shard_bytes=np.full(shards, 2**26),
        id_end=shards * units * rows,
        fingerprint="f",
        icc=None,
        shuffled=False,
        images={},
        files=shards,
        is_file_per_sample=False,
        units=[np.full(units, rows)] * shards,
        unit_bytes=unit_bytes,
    )


@given(
    shards=st.integers(1, 40),
    units=st.integers(1, 12),
    rows=st.integers(1, 9),
    lanes=st.integers(1, 8),
    window=st.integers(1, 60),
)
def test_open_units_are_those_of_the_plan(
    shards: int, units: int, rows: int, lanes: int, window: int
) -> None:
    found = contents(shards, units, rows)
    plan = Plan(found.sizes, seed=1, lanes=lanes, window=window, units=found.units)
    told = open_units(found, lanes=lanes, window=window)
    assert min(told, shards) == pytest.approx(plan.open_shards)
    assert told <= shards * units


@pytest.mark.parametrize(
    ("what", "batch", "lanes", "wanted"),
    [
        # 10,000 chunks of 180 MB, 8 samples each: what 4 GiB hold.
        (contents(10_000, 1, 8, unit_bytes=180e6), 16, 2, 26),
        # 4 in each lane at least, however large they are.
        (contents(10_000, 1, 8, unit_bytes=180e6), 256, 32, 128),
        # A sample a chunk of 49 kB takes no memory: as many as of shards.
        (contents(2_000, 640, 1, unit_bytes=49e3), 256, 32, 11_328),
        # 392 kB, 8 samples each: enough for 32 batches, and for the root of the units.
        (contents(250, 640, 8, unit_bytes=392e3), 256, 32, 4_000),
        # Photographs in row groups of 100: 11 MB each.
        (contents(2_560, 5, 100, unit_bytes=11e6), 256, 32, 416),
        # Larger than the window's bytes each.
        (contents(500, 1, 4, unit_bytes=6e9), 8, 1, LEAST_UNITS),
        # All there are.
        (contents(3, 2, 8, unit_bytes=1e3), 8, 1, 6),
    ],
)
def test_defaults(what: Contents, batch: int, lanes: int, wanted: int) -> None:
    found = default_unit_window(what, lanes, global_batch=batch)
    assert found * lanes == wanted
    assert shuffled_settings(what, seed=1, global_batch=batch, lanes=lanes).window == found


@given(
    shards=st.integers(1, 300),
    units=st.integers(1, 30),
    rows=st.integers(1, 50),
    unit_bytes=st.floats(0, 1e9),
    batch=st.integers(1, 512),
    lanes=st.integers(1, 32),
)
def test_a_window_fits_and_mixes(
    shards: int, units: int, rows: int, unit_bytes: float, batch: int, lanes: int
) -> None:
    what = contents(shards, units, rows, unit_bytes=unit_bytes)
    window = default_unit_window(what, lanes, global_batch=batch)
    every = shards * units
    opened = min(window * lanes, every)
    kept = opened * unit_bytes * live_share(rows)
    least = max(LEAST_UNITS, 4 * lanes) + lanes
    assert kept <= WINDOW_BYTES + lanes * unit_bytes or opened <= least
    assert opened >= min(every, LEAST_UNITS)
    if kept < WINDOW_BYTES / 2 and opened < every:
        assert opened * rows >= MIXED_BATCHES * batch
    # More memory a unit never opens more of them.
    larger = replace(what, unit_bytes=2 * unit_bytes)
    assert default_unit_window(larger, lanes, global_batch=batch) <= window


def test_shards_without_units_keep_their_windows() -> None:
    what: Any = replace(contents(900, 1, 8), units=None)
    settings = shuffled_settings(what, seed=1, global_batch=256)
    assert settings.window == default_window(
        900, settings.lanes, global_batch=256, icc=None, shuffled=False
    )
    assert make_plan(what, settings).open_shards > 0


def test_a_unit_of_one_row_is_never_kept() -> None:
    assert live_share(1) == 0
    assert live_share(2) == 0.5
    assert live_share(8) > 0.99
