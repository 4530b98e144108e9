"""Test `keyed_uniform`: random numbers of samples that depend on nothing but the arguments."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock import keyed_uniform
from penstock.augment import Uniform
from penstock.cache.base import keyed_hash
from penstock.errors import ConfigError
from tests.properties import examples

ids_of = st.lists(st.integers(0, 2**62), max_size=12)


@given(
    ids=ids_of,
    epoch=st.integers(0, 2**40),
    seed=st.integers(-(2**70), 2**70),
    n=st.integers(0, 5),
    data=st.data(),
)
@examples(100)
def test_arrays_and_tensors_give_the_same_numbers(ids, epoch, seed, n, data):
    per_sample = st.lists(st.integers(0, 3), min_size=len(ids), max_size=len(ids))
    occurrences = data.draw(st.one_of(st.none(), per_sample))
    epochs = data.draw(st.one_of(st.just(epoch), per_sample))
    found = keyed_uniform(ids, epoch=epochs, n=n, seed=seed, occurrences=occurrences)
    assert found.shape == (len(ids), n)
    assert found.dtype == np.float64
    assert found.flags.c_contiguous
    assert ((found >= 0) & (found < 1)).all()
    tensor = torch.tensor(ids, dtype=torch.int64)
    same = keyed_uniform(tensor, epoch=epochs, n=n, seed=seed, occurrences=occurrences)
    assert same.dtype == torch.float64
    assert torch.equal(same, torch.from_numpy(found))
    if occurrences is not None:
        again = keyed_uniform(
            tensor, epoch=epochs, n=n, seed=seed, occurrences=torch.tensor(occurrences).long()
        )
        assert torch.equal(again, same)


@given(ids=ids_of, data=st.data(), n=st.integers(1, 4))
@examples(50)
def test_a_sample_has_its_numbers_in_any_batch(ids, data, n):
    whole = keyed_uniform(ids, epoch=3, n=n, seed=7)
    order = data.draw(st.permutations(range(len(ids))))
    assert (keyed_uniform([ids[i] for i in order], epoch=3, n=n, seed=7) == whole[order]).all()
    assert (keyed_uniform(ids, epoch=3, n=n + 2, seed=7)[:, :n] == whole).all()


def test_every_key_counts_and_no_draw_of_a_recipe_is_repeated():
    ids = np.arange(30_000)
    base = keyed_uniform(ids, epoch=0, n=2)
    others = [
        keyed_uniform(ids, epoch=1, n=1)[:, 0],
        keyed_uniform(ids, epoch=0, n=1, seed=1)[:, 0],
        keyed_uniform(ids, epoch=0, n=1, occurrences=np.ones_like(ids))[:, 0],
        keyed_uniform(ids + 1, epoch=0, n=1)[:, 0],
        base[:, 1],
        *Uniform(keyed_hash(0, 0, ids), 0)(2),
    ]
    for other in others:
        assert abs(np.corrcoef(base[:, 0], other)[0, 1]) < 0.02
    assert abs(base.mean() - 0.5) < 0.01


def test_the_numbers_stay_the_same_in_all_versions():
    found = keyed_uniform([0, 1, 2**40], epoch=2, n=2, seed=5, occurrences=[0, 1, 0])
    expected = [
        [0.7871510628610335, 0.6776212650708257],
        [0.4464839838572533, 0.4125951139576287],
        [0.19046944173286218, 0.30021845431110095],
    ]
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"ids": [0.5]}, "ids of float64"),
        ({"ids": [[1, 2]]}, r"ids of int64 and shape \(1, 2\)"),
        ({"ids": torch.ones(2)}, "ids of torch.float32"),
        ({"ids": torch.ones(2, dtype=torch.bool)}, "ids of torch.bool"),
        ({"epoch": 0.5}, "epoch of float64"),
        ({"epoch": [1, 2, 3]}, "one, or 2 of them"),
        ({"epoch": True}, "epoch of bool"),
        ({"ids": torch.arange(2), "epoch": torch.arange(3)}, "one, or 2 of them"),
        ({"occurrences": [1]}, r"occurrences of int64 and shape \(1,\)"),
        ({"n": -1}, "n=-1"),
        ({"n": 1.5}, "n=1.5"),
        ({"seed": "a"}, "seed='a'"),
    ],
)
def test_other_arguments_are_refused(arguments, words):
    with pytest.raises(ConfigError, match=words):
        keyed_uniform(**{"ids": [1, 2], "epoch": 0, "n": 1, **arguments})
