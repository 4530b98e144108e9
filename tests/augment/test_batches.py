"""Test sub-batches: each row is in one; they are small after a failure, and a suspect is alone."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from penstock.augment import SMALL_RUN_BATCHES, SMALL_RUN_SAMPLES, SubBatchSizer, select_rows
from penstock.readers import EncodedBatch


def batch(samples: int) -> EncodedBatch:
    return EncodedBatch(
        ids=np.arange(samples) + 100,
        encoded=[np.full(4, row, np.uint8) for row in range(samples)],
        dims=np.arange(2 * samples, dtype=np.int32).reshape(samples, 2),
    )


@given(
    samples=st.integers(0, 70),
    marks=st.sets(st.integers(0, 69)),
    suspects=st.sets(st.integers(100, 169)),
    is_careful=st.booleans(),
)
def test_every_row_is_in_one_sub_batch(
    samples: int, marks: set[int], suspects: set[int], is_careful: bool
) -> None:
    sizer = SubBatchSizer()
    sizer.isolate(suspects)
    if is_careful:
        sizer.use_small_runs()
    runs = sizer.cut(batch(samples), dict.fromkeys(marks, "why"))
    assert sorted(row for run in runs for row in run) == sorted(set(range(samples)) - marks)
    assert all(runs)  # DALI knows no empty batch
    for run in runs:
        assert len(run) == 1 or not suspects.intersection(row + 100 for row in run)
        assert len(run) <= (SMALL_RUN_SAMPLES if is_careful else samples)
    if not is_careful and not suspects:
        assert len(runs) <= 1


def test_caution_lasts_for_some_batches() -> None:
    sizer, whole = SubBatchSizer(), batch(3 * SMALL_RUN_SAMPLES)
    assert len(sizer.cut(whole, {})) == 1
    sizer.use_small_runs()
    for _ in range(SMALL_RUN_BATCHES):
        assert [len(run) for run in sizer.cut(whole, {})] == [SMALL_RUN_SAMPLES] * 3
    assert len(sizer.cut(whole, {})) == 1


def test_selected_rows_come_with_their_draws() -> None:
    whole, draws = batch(5), {"start": np.arange(10).reshape(5, 2)}
    some, their_draws = select_rows(whole, draws, [4, 1])
    assert [sample[0] for sample in some] == [4, 1]
    assert their_draws["start"].tolist() == [[8, 9], [2, 3]]


def test_all_rows_are_the_batch_itself() -> None:
    whole, draws = batch(3), {"start": np.zeros((3, 2))}
    assert select_rows(whole, draws, [0, 1, 2])[0] is whole.encoded
    assert select_rows(whole, draws, [0, 1, 2])[1] is draws
