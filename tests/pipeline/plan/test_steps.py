"""The walk through epochs, as arithmetic."""

from __future__ import annotations

from itertools import islice

from hypothesis import given
from hypothesis import strategies as st

from penstock.pipeline.plan.steps import Cursor, Walk

walks = st.builds(
    Walk,
    samples=st.integers(1, 300),
    global_batch=st.integers(1, 64),
    drop_last=st.booleans(),
)


@given(walks)
def test_an_epoch_has_len_steps(walk: Walk) -> None:
    assert len(list(walk.steps(Cursor(3, 0), endless=False))) == len(walk) or len(walk) == 0


@given(walks)
def test_steps_tile_the_epoch(walk: Walk) -> None:
    if len(walk) == 0:
        return
    steps = list(walk.steps(Cursor(0, 0), endless=False))
    assert [s.start.position for s in steps] == [i * walk.global_batch for i in range(len(steps))]
    covered = sum(s.size for s in steps)
    if walk.drop_last:
        assert walk.samples - covered < walk.global_batch
    else:
        assert covered == walk.samples


@given(walks, st.integers(0, 40))
def test_an_epoch_moves_on_with_its_last_step(walk: Walk, skip: int) -> None:
    if len(walk) == 0:
        return
    steps = list(islice(walk.steps(Cursor(0, 0), endless=True), skip, skip + 2))
    assert steps[0].then == steps[1].start
    assert steps[0].start.epoch == skip // len(walk)


@given(walks, st.integers(0, 300))
def test_any_position_resumes_inside_the_epoch_or_at_the_next(walk: Walk, position: int) -> None:
    cursor = walk.normalise(Cursor(5, min(position, walk.samples)))
    assert cursor.epoch in (5, 6)
    assert walk.step(cursor) is not None or len(walk) == 0
