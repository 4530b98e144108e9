"""`part_bounds` cuts items into contiguous parts of about one size."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from penstock.readers.formats import part_bounds

SIZES = st.lists(st.integers(0, 2**40), max_size=60)


@given(sizes=SIZES, target=st.integers(1, 2**40))
def test_parts_hold_each_item_once_and_none_is_empty(sizes: list[int], target: int) -> None:
    bounds = part_bounds(sizes, target_bytes=target)
    assert bounds[0] == 0
    assert bounds[-1] == len(sizes)
    assert (np.diff(bounds) > 0).all()


@given(sizes=st.lists(st.integers(1, 2**40), min_size=1, max_size=60), target=st.integers(1, 2**40))
def test_parts_are_as_equal_as_the_items_allow(sizes: list[int], target: int) -> None:
    bounds = part_bounds(sizes, target_bytes=target)
    held = np.add.reduceat(np.array(sizes, object), bounds[:-1])
    wanted = max(1, min(len(sizes), round(sum(sizes) / target)))
    assert max(held) <= sum(sizes) / wanted * (1 + 1e-9) + max(sizes)


def test_equal_items_make_equal_parts() -> None:
    assert np.diff(part_bounds([2**20] * 640)).tolist() == [64] * 10
    assert np.diff(part_bounds([2**20] * 100)).tolist() == [50] * 2
    assert part_bounds([]).tolist() == [0]
    assert part_bounds([0, 0]).tolist() == [0, 2]
    assert part_bounds([2**31]).tolist() == [0, 1]
