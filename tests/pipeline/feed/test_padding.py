"""Pad: ragged columns become dense, and nothing is cut off."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock
from penstock.augment import Pad
from penstock.cache import ConfigError, RecipeError
from penstock.readers.fieldtypes import DenseColumn, RaggedColumn, SampleBatch


def ragged(samples: list[np.ndarray[Any, Any]], *, several: bool) -> RaggedColumn:
    rest = samples[0].shape[1:] if samples and not several else ()
    dimensions = samples[0].ndim if samples else 2
    shapes = np.empty((0, dimensions), np.int64) if several else None
    dtype = samples[0].dtype if samples else np.float32
    like = RaggedColumn(np.empty((0, *rest), dtype), np.zeros(1, np.int64), shapes)
    return RaggedColumn.of(samples, like=like)


def padded(column: RaggedColumn, pad: Pad) -> DenseColumn:
    content = SampleBatch(ids=np.arange(len(column)) + 15, columns={pad.field or "": column})
    return pad.column(content, lambda ids: [f"{number}.npy" for number in ids])


@settings(deadline=None)
@given(
    shapes=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 4)), max_size=6),
    more=st.none() | st.integers(0, 3),
    value=st.sampled_from([0, -1, 7]),
)
def test_each_sample_is_there_and_the_rest_is_the_value(
    shapes: list[tuple[int, int]], more: int | None, value: int
) -> None:
    samples = [np.arange(1, 1 + h * w).reshape(h, w) for h, w in shapes]
    longest = np.array(shapes, np.int64).reshape(-1, 2).max(axis=0, initial=1)
    to = None if more is None else tuple((longest + more).tolist())
    found = padded(ragged(samples, several=True), Pad("x", to=to, value=value))
    if to is not None:
        assert found.values.shape[1:] == to
    for row, sample in enumerate(samples):
        h, w = sample.shape
        assert np.array_equal(found.values[row, :h, :w], sample)
        outside = np.ones(found.values.shape[1:], bool)
        outside[:h, :w] = False
        assert (found.values[row][outside] == value).all()


@settings(deadline=None)
@given(lengths=st.lists(st.integers(0, 6), max_size=8), to=st.none() | st.integers(1, 6))
def test_where_the_first_length_differs(lengths: list[int], to: int | None) -> None:
    samples = [np.random.default_rng(n).random((n, 4), np.float32) for n in lengths]
    column, pad = ragged(samples, several=False), Pad("boxes", to=to, value=-1)
    longest = max(lengths, default=0)
    if to is not None and longest > to:
        first = next(row for row, n in enumerate(lengths) if n > to)
        message = rf"sample {first + 15} \({first + 15}\.npy\) is longer: .*\({lengths[first]}, 4\)"
        with pytest.raises(ConfigError, match=message):
            padded(column, pad)
        return
    found = padded(column, pad)
    rest = (4,) if samples else ()
    assert found.values.shape == (len(lengths), longest if to is None else to, *rest)
    for row, sample in enumerate(samples):
        assert np.array_equal(found.values[row, : len(sample)], sample)
        assert (found.values[row, len(sample) :] == -1).all()


@pytest.mark.parametrize("value", [-1, 256, 0.5])
def test_a_value_that_the_dtype_cannot_hold_is_refused(value: float) -> None:
    column = ragged([np.zeros(2, np.uint8)], several=False)
    with pytest.raises(RecipeError, match="can't hold"):
        padded(column, Pad("x", value=value))


def test_to_must_fit_the_lengths_that_differ() -> None:
    one = ragged([np.zeros((2, 4))], several=False)
    two = ragged([np.zeros((2, 4))], several=True)
    with pytest.raises(RecipeError, match="wanted 1 lengths"):
        padded(one, Pad("x", to=(3, 3)))
    with pytest.raises(RecipeError, match="wanted 2 lengths"):
        padded(two, Pad("x", to=3))


@pytest.mark.parametrize("to", [0, -1, 1.5, True, (), (3, 0)])
def test_lengths_are_checked(to: Any) -> None:
    with pytest.raises(RecipeError, match=r"Pad\(to=\.\.\.\): got"):
        Pad("x", to=to)


def test_it_is_public() -> None:
    assert penstock.Pad is Pad
