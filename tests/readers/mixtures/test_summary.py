"""Test summaries of mixtures: counts of the stream, repeats as delivered, tokens and bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock import DataLoader, Dataset, mix
from penstock.errors import ConfigError
from tests.properties import examples

if TYPE_CHECKING:
    from pathlib import Path

SIZES = {"web": 300, "code": 90, "math": 31}


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Dataset]:
    folder: Path = tmp_path_factory.mktemp("parts")
    for number, (name, size) in enumerate(SIZES.items()):
        np.save(folder / f"{name}.npy", 1000 * number + np.arange(size))
    return {name: Dataset(folder / f"{name}.npy") for name in SIZES}


@examples(30)
@given(
    weights=st.lists(st.floats(0.01, 1), min_size=3, max_size=3),
    epoch=st.integers(0, 3),
    samples=st.integers(1, 900) | st.sampled_from(["first", "all", "once"]),
)
def test_a_summary_says_what_a_job_delivers(parts, weights, epoch, samples):
    mixture = mix(parts, weights=dict(zip(SIZES, weights, strict=True)), epoch=samples)
    stream = mixture.contents.mixture.stream()
    found, length = mixture.summary(epoch=epoch), len(mixture)
    part, index = stream.locate(np.arange(epoch * length, (epoch + 1) * length))
    assert found.samples == length == sum(each.samples for each in found.parts)
    for number, each in enumerate(found.parts):
        assert each.size == SIZES[each.name]
        own = index[part == number]
        assert each.samples == len(own)
        # Each own epoch delivers every sample once, in an order that isn't known here: a sample is
        # delivered at least once a complete epoch, and at most once a part of an epoch more.
        epochs, counts = np.unique(own // each.size, return_counts=True)
        complete = int((counts == each.size).sum())
        assert (each.least_repeats, each.most_repeats) == (complete, len(epochs))
        assert each.epochs == len(own) / each.size


def test_a_loader_delivers_these_repeats(parts):
    mixture = mix(parts, weights={"web": 1, "code": 1, "math": 2}, epoch=400)
    with DataLoader(mixture, 20, shuffle=True, seed=1) as loader:
        for epoch in range(2):
            numbers = np.concatenate([batch[0].numpy() for batch in loader])
            for number, part in enumerate(mixture.summary(epoch=epoch).parts):
                own = numbers[numbers // 1000 == number] - 1000 * number
                times = np.bincount(own, minlength=part.size)
                assert part.least_repeats <= times.min()
                assert times.max() <= part.most_repeats
                assert times.sum() == part.samples


def test_bytes_follow_from_the_files(parts):
    found = mix(parts, epoch="once").summary()
    assert [part.stored_bytes for part in found.parts] == [8 * size for size in SIZES.values()]
    assert found.bytes == sum(part.bytes for part in found.parts) == 8 * sum(SIZES.values())
    half = mix({"half": parts["web"].subset(np.arange(0, 300, 2))}, epoch="once").summary()
    assert half.parts[0].bytes == 8 * 150


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("tokens")
    for name in "ab":
        np.arange(3000, dtype=np.uint16).tofile(folder / f"{name}.bin")
    return folder


def test_tokens_of_one_length_are_exact(tokens):
    sets = {n: Dataset(tokens / f"{n}.bin", dtype="uint16", sample=(100,)) for n in "ab"}
    for per in ("token", "sample"):
        found = mix(sets, weights={"a": 1, "b": 2}, epoch=60, per=per).summary()  # type: ignore[arg-type]
        assert found.tokens == 6000
        assert all(part.tokens == 100 * part.samples for part in found.parts)
        assert all(part.tokens_are_exact for part in found.parts)


def test_the_text_is_a_table(parts):
    text = str(mix(parts, epoch="once").summary())
    lines = text.splitlines()
    assert len(lines) == 2 + len(SIZES)
    assert lines[0].split()[:3] == ["part", "share", "samples"]
    assert lines[1].split()[:3] == ["web", "71.2589", "%"]
    assert "-" in lines[1]
    assert lines[-1].startswith("all")


@pytest.mark.parametrize("epoch", [-1, True, 1.5])
def test_an_epoch_is_a_number(parts, epoch: Any):
    with pytest.raises(ConfigError, match="epoch: got"):
        mix(parts).summary(epoch=epoch)
