"""Test mixtures of torch datasets: exact shares and epochs, any world and workers, resume."""

from __future__ import annotations

import io
import itertools
import json
import pickle
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch.utils.data

from penstock import DataLoader, Dataset, Order, World, imagenet_train, mix
from penstock.errors import ConfigError, PenstockWarning, PlanError, ResumeError

if TYPE_CHECKING:
    from collections.abc import Iterator

SIZES = {"web": 120, "code": 45, "math": 16}
WEIGHTS = {"web": 0.5, "code": 0.3, "math": 0.2}
BATCH = 12


class Numbers(torch.utils.data.Dataset[Any]):
    """Numbers from a first one on, each with a draw of torch's generator."""

    def __init__(self, first: int, count: int, *, bad: int | None = None) -> None:
        self.first, self.count, self.bad = first, count, bad

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[int, float]:
        if index == self.bad:
            raise ValueError("unreadable")
        return self.first + index, torch.rand(()).item()


class Fetching(Numbers):
    """Numbers that are read several at a time, without draws."""

    def __getitems__(self, indices: list[int]) -> list[tuple[int, float]]:
        return [(self.first + index, 0.0) for index in indices]


class Stream(torch.utils.data.IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(5))

    def __len__(self) -> int:
        return 5


def parts(kind: Any = Numbers, **more: Any) -> dict[str, Any]:
    return {name: kind(1000 * n, size, **more) for n, (name, size) in enumerate(SIZES.items())}


def mixture(kind: Any = Numbers, **arguments: Any) -> Any:
    return mix(parts(kind), **{"weights": WEIGHTS, "epoch": 120, **arguments})


def loader(dataset: Any, **arguments: Any) -> DataLoader:
    options = {"shuffle": True, "seed": 5, "global_batch_size": BATCH, "drop_last": True}
    return DataLoader(dataset, **{**options, "world": World(0, 1), **arguments})


def values(batches: Any) -> list[list[int]]:
    return [batch[0].tolist() for batch in batches]


@pytest.mark.parametrize("kind", [Numbers, Fetching])
def test_a_mixture_has_its_shares_and_epochs(kind):
    dataset = mixture(kind)
    assert len(dataset) == 120
    assert dataset.parts == ("web", "code", "math")
    with loader(dataset) as job:
        assert len(job) == 10
        batches = [each for _ in range(4) for each in values(job)]
    first = np.bincount(np.concatenate(batches[:10]) // 1000, minlength=3)
    np.testing.assert_allclose(first, [60, 36, 24], atol=2)
    numbers = np.concatenate(batches)
    for part, size in enumerate(SIZES.values()):
        own = numbers[numbers // 1000 == part] - 1000 * part
        for begin, end in itertools.pairwise(range(0, len(own) + 1, size)):
            np.testing.assert_array_equal(np.sort(own[begin:end]), np.arange(size))


def test_an_epoch_has_each_sample_once():
    with loader(mixture(epoch="once"), drop_last=False) as job:
        numbers = np.concatenate(values(job))
    assert len(numbers) == len(np.unique(numbers)) == sum(SIZES.values())


@pytest.mark.parametrize("workers", [0, 2])
def test_any_world_and_workers_give_the_same_batches_and_draws(workers):
    with loader(mixture()) as alone:
        wanted = [list(zip(*map(torch.Tensor.tolist, batch), strict=True)) for batch in alone]
        wanted += [list(zip(*map(torch.Tensor.tolist, batch), strict=True)) for batch in alone]
    for size in (2, 3):
        found: list[list[Any]] = [[] for _ in wanted]
        for rank in range(size):
            with loader(mixture(), world=World(rank, size), num_workers=workers) as one:
                for step, batch in enumerate([*one, *one]):
                    found[step] += zip(*map(torch.Tensor.tolist, batch), strict=True)
        assert found == wanted


def test_repeats_get_draws_of_their_own():
    seen: dict[int, list[float]] = {}
    with loader(mix({"a": Numbers(0, 20), "b": Numbers(0, 20)}, weights={"a": 1, "b": 1})) as job:
        for batch in itertools.chain(job, job, job):
            for number, draw in zip(*map(torch.Tensor.tolist, batch), strict=True):
                seen.setdefault(number, []).append(draw)
    assert all(len(each) == len({*each}) > 4 for each in seen.values())


@pytest.mark.parametrize("workers", [0, 2])
def test_a_job_resumes_at_every_step_and_at_another_world_size(workers):
    with loader(mixture()) as job:
        batches, states = list[list[int]](), [job.state_dict()]
        for batch in itertools.chain(job, job):
            batches.append(batch[0].tolist())
            states.append(job.state_dict())
    for step in range(0, 20, 1 if workers == 0 else 7):
        state = json.loads(json.dumps(states[step]))
        for size in (1, 2):
            found: list[int] = []
            for rank in range(size):
                with loader(mixture(), world=World(rank, size), num_workers=workers) as again:
                    again.load_state_dict(state)
                    found += next(iter(again))[0].tolist()
            assert found == batches[step]


def test_a_job_resumes_with_another_global_batch():
    """The epoch and the lanes of the job's first start stay."""
    with loader(mixture(epoch=115)) as job:
        assert len(job) == 10
        whole = [number for batch in values(job) for number in batch]
        batches = iter(job)
        next(batches)
        state = job.state_dict()
        rest = [number for batch in batches for number in batch[0].tolist()]
    with loader(mixture(epoch=115), global_batch_size=18) as other:
        other.load_state_dict(json.loads(json.dumps(state)))
        found = [number for batch in other for number in batch[0].tolist()]
    assert sorted(found) == sorted(rest[: len(found)])
    assert len(found) == 108
    assert len(whole) == 120


def test_a_batch_is_of_one_part():
    with loader(mixture(per="batch")) as job:
        assert all(len({number // 1000 for number in batch}) == 1 for batch in values(job))


def test_mixtures_in_mixtures_and_in_pickles():
    inner = mix({"a": Numbers(1000, 45), "b": Numbers(2000, 16)}, weights={"a": 1, "b": 3})
    dataset: Any = mix({"web": Numbers(0, 120), "rest": inner}, weights={"web": 1, "rest": 1})
    assert dataset.parts == ("web", "rest/a", "rest/b")
    with loader(pickle.loads(pickle.dumps(dataset))) as job:
        numbers = np.concatenate(values(job))
    shares = np.bincount(numbers // 1000) / len(numbers)
    np.testing.assert_allclose(shares, [0.5, 0.125, 0.375], atol=0.05)


def test_augmented_repeats_get_other_crops():
    from PIL import Image

    class Images(Numbers):
        def __getitem__(self, index: int) -> Any:
            pixels = np.random.default_rng(self.first + index).integers(0, 256, (40, 40, 3))
            data = io.BytesIO()
            Image.fromarray(pixels.astype(np.uint8)).save(data, "JPEG")
            return {"image": data.getvalue(), "number": self.first + index}

    dataset = mix({"a": Images(0, 3), "b": Images(0, 3)}, weights={"a": 1, "b": 2}, epoch=24)
    seen: dict[int, list[bytes]] = {}
    with loader(dataset, augment=imagenet_train(16), num_workers=0) as job:
        for batch in job:
            for number, image in zip(batch["number"].tolist(), batch["image"], strict=True):
                seen.setdefault(number, []).append(image.numpy().tobytes())
    assert all(len(each) == len({*each}) > 6 for each in seen.values())


@pytest.mark.filterwarnings("ignore:Sample 43 is bad")
def test_a_bad_sample_is_replaced_by_one_of_its_part():
    dataset = mix(
        {"a": Numbers(0, 40), "b": Numbers(1000, 8, bad=3)}, weights={"a": 4, "b": 1}, epoch=48
    )
    with loader(dataset, max_bad=0.5, shuffle=False) as job:
        numbers = np.concatenate(values(job))
    b = numbers[numbers >= 1000]
    assert 1003 not in b
    np.testing.assert_allclose(len(b), 48 / 5, atol=2)


def test_more_parts_than_a_batch_has_samples():
    many = {f"p{n}": Numbers(n, 3) for n in range(15)}
    with (
        pytest.warns(PenstockWarning, match="15 parts, and a global batch 12 samples") as found,
        loader(mix(many, weights=dict.fromkeys(many, 1), epoch=60)) as job,
    ):
        assert len(np.unique(np.concatenate(values(job)[:2]))) >= 15
    assert len(found) == 1


class TestBadInput:
    def test_without_a_seed(self):
        with pytest.raises(ConfigError, match=r"needs seed=.*ConcatDataset"):
            DataLoader(mixture(), 4, shuffle=True)

    def test_parts(self, tmp_path):
        np.save(tmp_path / "a.npy", np.arange(20))
        with (
            Dataset(str(tmp_path / "a.npy")) as native,
            pytest.raises(ConfigError, match=r'"a" is a penstock.Dataset, and "b" a torch'),
        ):
            mix({"a": native, "b": Numbers(0, 5)}, weights={"a": 1, "b": 1})
        with pytest.raises(ConfigError, match=r"an iterable dataset.*__getitem__ and __len__"):
            mix({"a": Numbers(0, 5), "b": Stream()}, weights={"a": 1, "b": 1})
        with pytest.raises(ConfigError, match=r"wanted penstock\.Dataset"):
            mix({"a": Numbers(0, 5), "b": 7}, weights={"a": 1, "b": 1})
        with pytest.raises(ConfigError, match=r'"b" .*has no samples'):
            mix({"a": Numbers(0, 5), "b": Numbers(0, 0)}, weights={"a": 1, "b": 1})

    @pytest.mark.parametrize(
        "arguments",
        [
            {"fields": ("part",)},
            {"missing": "mask"},
            {"per": "token"},
            {"part_augment": {"web": []}},
        ],
    )
    def test_arguments_about_fields(self, arguments):
        with pytest.raises(ConfigError, match=r"mix: got .* for torch datasets"):
            mixture(**arguments)

    def test_lanes(self):
        with pytest.raises(PlanError, match="lanes or a window for a mixture"):
            loader(mixture(), order=Order(lanes=2))

    def test_weights_during_the_job(self):
        with loader(mixture()) as job, pytest.raises(ConfigError, match="native datasets"):
            job.set_weights(WEIGHTS)

    def test_states(self):
        with loader(mixture()) as job:
            state = job.state_dict()
        renamed: Any = mix(
            dict(zip(("web", "source", "math"), parts().values(), strict=True)),
            weights={"web": 0.5, "source": 0.3, "math": 0.2},
            epoch=120,
        )
        with loader(renamed) as job, pytest.raises(ResumeError, match=r"added \['source'"):
            job.load_state_dict(state)
        with loader(mixture(weights="size")) as job, pytest.raises(ResumeError):
            job.load_state_dict(state)
        with loader(mixture()) as job, pytest.raises(ResumeError, match="damaged"):
            job.load_state_dict({**state, "mixture": {"names": ["web"]}})
