"""Ragged: a sequence of tensors that lies end to end."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock
from penstock.cache import ConfigError
from penstock.pipeline.feed import Ragged

if TYPE_CHECKING:
    from collections.abc import Sequence


def joined(samples: Sequence[torch.Tensor], *, rest: tuple[int, ...] = ()) -> Ragged:
    lengths = torch.tensor([0, *map(len, samples)])
    values = torch.cat(list(samples)) if samples else torch.empty((0, *rest))
    return Ragged(values, lengths.cumsum(0))


def flat(samples: Sequence[torch.Tensor], dimensions: int) -> Ragged:
    lengths = torch.tensor([0, *(each.numel() for each in samples)])
    shapes = torch.tensor([tuple(each.shape) for each in samples], dtype=torch.int64)
    values = torch.cat([each.reshape(-1) for each in samples] or [torch.empty(0)])
    return Ragged(values, lengths.cumsum(0), shapes.reshape(len(samples), dimensions))


LENGTHS = st.lists(st.integers(0, 5), max_size=8)


@settings(deadline=None)
@given(lengths=LENGTHS, rest=st.sampled_from([(), (4,), (2, 3)]))
def test_it_is_the_sequence_of_its_samples(lengths: list[int], rest: tuple[int, ...]) -> None:
    samples = [torch.randn((n, *rest)) for n in lengths]
    ragged = joined(samples, rest=rest)
    assert len(ragged) == len(samples)
    assert ragged.lengths.tolist() == lengths
    for way in (ragged, ragged.to_list(), [ragged[i] for i in range(len(samples))]):
        assert all(torch.equal(a, b) for a, b in zip(way, samples, strict=True))
    if samples:
        assert torch.equal(ragged[-1], samples[-1])
    with pytest.raises(IndexError):
        ragged[len(samples)]


@settings(deadline=None)
@given(shapes=st.lists(st.tuples(*[st.integers(0, 4)] * 3), max_size=6))
def test_samples_whose_several_lengths_differ_keep_their_shapes(
    shapes: list[tuple[int, int, int]],
) -> None:
    samples = [torch.randn(shape) for shape in shapes]
    ragged = flat(samples, 3)
    assert [tuple(each.shape) for each in ragged] == shapes
    for i, sample in enumerate(samples):
        assert torch.equal(ragged[i], sample)


@settings(deadline=None)
@given(lengths=LENGTHS, begin=st.integers(-9, 9), end=st.integers(-9, 9))
def test_a_slice_is_a_ragged_of_those_samples(lengths: list[int], begin: int, end: int) -> None:
    samples = [torch.randn(n, 2) for n in lengths]
    for ragged in (joined(samples, rest=(2,)), flat(samples, 2)):
        part = ragged[begin:end]
        assert isinstance(part, Ragged)
        assert int(part.offsets[0]) == 0
        wanted = samples[begin:end]
        assert all(torch.equal(a, b) for a, b in zip(part, wanted, strict=True))


def test_it_travels() -> None:
    ragged = flat([torch.ones(2, 3), torch.zeros(1, 5)], 2)
    copy = pickle.loads(pickle.dumps(ragged))
    there = ragged.to("cpu", non_blocking=True).to(torch.device("cpu"))
    for other in (copy, there):
        assert all(torch.equal(a, b) for a, b in zip(other, ragged, strict=True))
    assert (there.dtype, there.device) == (torch.float32, torch.device("cpu"))
    assert repr(ragged) == "Ragged(2 samples, values (11,) torch.float32, shapes (2, 2), cpu)"


def test_torch_takes_it_as_a_nested_tensor() -> None:
    ragged = joined([torch.ones(2, 4), torch.zeros(3, 4)])
    nested = torch.nested.nested_tensor_from_jagged(ragged.values, ragged.offsets)
    assert all(torch.equal(a, b) for a, b in zip(nested.unbind(), ragged, strict=True))


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"wanted int64 of shape \(samples \+ 1,\)"):
        Ragged(torch.ones(3), torch.tensor([0.0, 3.0]))
    with pytest.raises(ConfigError, match=r"wanted \(1, dimensions\)"):
        Ragged(torch.ones(3), torch.tensor([0, 3]), torch.ones(2, 2, dtype=torch.int64))
    with pytest.raises(ConfigError, match="step 2"):
        joined([torch.ones(1)])[::2]


def test_it_is_public() -> None:
    assert penstock.Ragged is Ragged
