"""Test which slots of global batches the parts of a mixture get."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.pipeline.plan import SlotGroups
from penstock.readers.mixtures import ShareTree, integer_shares
from tests.properties import examples

if TYPE_CHECKING:
    from numpy.typing import NDArray


def parts_by_slot(counts: Any, before: Any) -> NDArray[np.int64]:
    """The part of each slot of some batches, end to end. Both arguments: shape (batches, parts)."""
    counts, before = np.array(counts), np.array(before)
    part, batch = np.nonzero(counts.T)
    own = counts[batch, part]
    slots = SlotGroups(part, batch, own, before[batch, part], counts.sum(1)).slots()
    assert np.sort(slots).tolist() == list(range(int(counts.sum())))
    found = np.empty(len(slots), np.int64)
    found[slots] = np.repeat(part, own)
    in_groups = np.split(slots, np.cumsum(own)[:-1])
    assert all((np.diff(each) > 0).all() for each in in_groups)
    return found


@examples(50)
@given(
    counts=st.integers(1, 6).flatmap(
        lambda parts: st.lists(
            st.lists(st.integers(0, 40), min_size=parts, max_size=parts), min_size=1, max_size=5
        )
    ),
    start=st.integers(0, 2**50),
)
def test_each_sample_gets_a_slot_of_its_batch_whatever_is_resolved_with_it(counts, start):
    before = np.cumsum(counts, 0) - counts + start
    together = parts_by_slot(counts, before)
    sizes = np.sum(counts, 1)
    for number, found in enumerate(np.split(together, np.cumsum(sizes)[:-1])):
        assert np.bincount(found, minlength=len(counts[0])).tolist() == counts[number]
        alone = parts_by_slot(counts[number : number + 1], before[number : number + 1])
        assert alone.tolist() == found.tolist()


@pytest.mark.parametrize("weights", [(0.7, 0.3), (0.55, 0.25, 0.15, 0.05), (0.9, 0.08, 0.02)])
@pytest.mark.parametrize(("size", "first"), [(672, 0), (1024, 500), (997, 10**9)])
def test_every_rank_gets_its_share_of_each_part(weights, size, first):
    """Within 10 %, or 2.5 samples where that is more, over 64 batches; in a batch within 5."""
    tree, batches = ShareTree(integer_shares(weights)), 64
    before = tree.counts_at((np.arange(batches + 1) + first) * size)
    counts = np.diff(before, axis=0)
    parts = parts_by_slot(counts, before[:-1]).reshape(batches, size)
    for world in (2, 3, 7, 8, 12, 16, 32, 64, 96):
        edges = np.arange(world + 1) * size // world
        for part, weight in enumerate(weights):
            found = np.add.reduceat(parts == part, edges[:-1], axis=1)
            expected = weight * np.diff(edges)
            assert np.abs(found - expected).max() < 5
            limit = np.maximum(2.5, 0.1 * expected * batches)
            assert (np.abs(found.sum(0) - expected * batches) < limit).all()


def test_a_batch_of_one_part_and_no_batch():
    assert parts_by_slot([[0, 5]], [[3, 9]]).tolist() == [1] * 5
    none = np.empty(0, np.int64)
    assert SlotGroups(none, none, none, none, np.zeros(1, np.int64)).slots().tolist() == []
