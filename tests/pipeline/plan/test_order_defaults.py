"""Lanes and windows where nobody says how many."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.pipeline.plan import default_lanes, default_window, label_spread, most_lanes

# -- defaults


@settings(max_examples=200, deadline=None)
@given(batch=st.integers(1, 5000), shards=st.integers(0, 10**6))
def test_default_lanes_divide_the_batch(batch, shards):
    fits = [d for d in range(1, batch + 1) if batch % d == 0 and d <= min(shards / 4, batch / 8)]
    assert default_lanes(batch, shards) == max(fits, default=1)
    assert max([1, *fits]) <= most_lanes(batch, shards)


@pytest.mark.parametrize(
    ("arguments", "window"),
    [
        ({"icc": None, "shuffled": True}, 7),  # sqrt(40_000) = 200 open, over 32 lanes
        ({"icc": None, "shuffled": False}, 63),  # 2,000
        ({"icc": 0.0, "shuffled": False}, 7),
        ({"icc": -0.01, "shuffled": False}, 7),
        ({"icc": 0.1, "shuffled": False}, 80),  # 100 * 256 * 0.1 = 2,560
        ({"icc": 0.02, "shuffled": False}, 63),
        ({"icc": 0.1, "shuffled": True}, 80),
        ({"icc": 1.0, "shuffled": False}, 800),
    ],
)
def test_default_window_opens_what_labels_need(arguments, window):
    assert default_window(40_000, 32, global_batch=256, **arguments) == window


@pytest.mark.parametrize(
    ("shards", "lanes", "window"),
    [
        (1, 1, 1),
        (7, 1, 7),  # small sets mix as a whole
        (16, 4, 4),
        (64, 8, 8),
        (65, 8, 8),  # and larger ones no less
        (1000, 32, 4),  # a rank with one lane has some shards to mix
        (10**6, 32, 32),
    ],
)
def test_default_windows_of_shuffled_packs(shards, lanes, window):
    found = default_window(shards, lanes, global_batch=256, icc=0.0, shuffled=True)
    assert found == window


@settings(max_examples=100, deadline=None)
@given(
    shards=st.integers(0, 10**6),
    batch=st.integers(1, 10**5),
    icc=st.one_of(st.none(), st.floats(-0.1, 1)),
    shuffled=st.booleans(),
)
def test_default_window_is_enough_and_no_more_than_all(shards, batch, icc, shuffled):
    lanes = default_lanes(batch, shards)
    window = default_window(shards, lanes, global_batch=batch, icc=icc, shuffled=shuffled)
    assert window >= 1
    assert window * lanes >= min(shards, max(math.sqrt(shards), 64, 4 * lanes))
    assert (window - 1) * lanes < max(shards, 1)
    if icc is not None:
        assert window * lanes >= min(shards, 100 * batch * icc)
        open_shards = min(window * lanes, shards)
        if 0 < open_shards < shards:
            assert label_spread(batch, icc, open_shards, shards) <= 1.01 + 1e-9


def test_label_spread_follows_a_simulation():
    """Shards of one label each: batches from few open shards vary as the formula says."""
    rng = np.random.default_rng(0)
    batch, open_shards, shards, classes = 64, 32, 1000, 10
    labels = np.repeat(np.arange(classes), shards // classes)
    counts = [
        np.count_nonzero(labels[rng.choice(rng.choice(shards, open_shards, False), batch)] == 0)
        for _ in range(6000)
    ]
    full = batch / classes * (1 - 1 / classes)
    assert np.var(counts) / full == pytest.approx(
        label_spread(batch, 1.0, open_shards, shards), rel=0.1
    )
    assert label_spread(batch, 1.0, shards, shards) == 1
    assert label_spread(batch, 0.0, 1, shards) == 1
    assert label_spread(1, 1.0, 1, 0) == 1


def test_no_more_rows_are_open_than_a_plan_has_room_for() -> None:
    arguments: dict[str, Any] = {"global_batch": 64, "shuffled": False}
    assert default_window(2_400, 8, icc=None, **arguments) == 62
    assert default_window(2_400, 8, icc=None, rows=200_000.0, **arguments) == 6
    assert default_window(2_400, 8, icc=None, rows=1e9, **arguments) == 1
    assert default_window(2_400, 8, icc=1.0, rows=1e9, **arguments) == 300
