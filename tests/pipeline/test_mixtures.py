"""Test whole loaders over mixtures: exact at any world, resumed anywhere, weights that change."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from penstock import DataLoader, Dataset, Map, Value, World, mix
from penstock.errors import ConfigError, PenstockWarning, PlanError, ResumeError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from penstock.readers import Mixture

SIZES = {"web": 300, "code": 90, "math": 31}
WEIGHTS = {"web": 0.5, "code": 0.3, "math": 0.2}
OTHER = {"web": 0.1, "code": 0.1, "math": 0.8}
THIRD = {"web": 0.4, "code": 0.4, "math": 0.2}
BATCH = 24
FIRST = {"web": 0, "code": 1000, "math": 2000}  # the value of each part's first sample


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Dataset]]:
    """Three arrays, whose samples are numbers that name them."""
    folder: Path = tmp_path_factory.mktemp("parts")
    for name, size in SIZES.items():
        np.save(folder / f"{name}.npy", FIRST[name] + np.arange(size))
    found = {name: Dataset(str(folder / f"{name}.npy")) for name in SIZES}
    yield found
    for each in found.values():
        each.close()


def mixture(parts: dict[str, Dataset], **arguments: Any) -> Mixture:
    return mix(parts, **{"weights": WEIGHTS, "epoch": 200, **arguments})


def loader(dataset: Any, **arguments: Any) -> DataLoader:
    return DataLoader(
        dataset, **{"shuffle": True, "seed": 5, "global_batch_size": BATCH, **arguments}
    )


def values(batches: Any) -> list[list[int]]:
    return [batch[0].tolist() for batch in batches]


def shares(batches: list[list[int]]) -> np.ndarray:
    return np.bincount(np.concatenate(batches) // 1000, minlength=3)


def test_a_mixture_has_its_shares(parts):
    source = mixture(parts)
    with loader(source) as job:
        np.testing.assert_allclose(shares(values(job)), [100, 60, 40], atol=2)
    assert len(source) == 200
    assert source.parts == ("web", "code", "math")


@pytest.mark.parametrize("world", [2, 3, 5, 24])
def test_every_world_gives_the_same_global_batches(parts, world):
    source = mixture(parts)
    with loader(source) as alone:
        wanted = values(alone) + values(alone)
    found: list[list[int]] = [[] for _ in wanted]
    for rank in range(world):
        with loader(source, world=World(rank, world), pad="mask") as one:
            for step, (numbers, valid) in enumerate([*one, *one]):
                found[step] += numbers[valid].tolist()
    assert found == wanted


def test_a_job_resumes_at_every_step(parts):
    """Through two epochs of the smallest part, and a change of weights."""
    source = mixture(parts)
    with loader(source) as job:
        batches, states = list[list[int]](), [job.state_dict()]
        while len(batches) < 20:
            for batch in job:
                batches.append(batch[0].tolist())
                if len(batches) == 7:
                    job.set_weights(OTHER)
                states.append(job.state_dict())
                if len(batches) == 20:
                    break
    assert shares(batches)[2] > 2 * SIZES["math"]
    for step in range(8, 20):
        state = json.loads(json.dumps(states[step]))
        with loader(source, global_batch_size=None, batch_size=BATCH) as again:
            again.load_state_dict(state)
            assert again.step == step
            assert next(iter(again))[0].tolist() == batches[step]


def test_the_epochs_of_parts_are_complete(parts):
    with loader(mixture(parts, epoch="first"), drop_last=True) as job:
        numbers = np.concatenate([b for _ in range(6) for b in values(job)])
    for name, size in SIZES.items():
        own = numbers[numbers // 1000 == FIRST[name] // 1000] - FIRST[name]
        counts = np.bincount(own, minlength=size)
        assert {*counts.tolist()} <= {len(own) // size, -(-len(own) // size)}


def test_an_epoch_has_each_sample_once(parts):
    with loader(mixture(parts, epoch="once")) as job:
        for _ in range(2):
            numbers = np.sort(np.concatenate(values(job)))
            assert len(numbers) == len(np.unique(numbers)) == sum(SIZES.values())


def test_a_batch_is_of_one_part(parts):
    with loader(mixture(parts, per="batch")) as job:
        batches = values(job)
    assert all(len({number // 1000 for number in batch}) == 1 for batch in batches)
    assert {len(batch) for batch in batches} == {BATCH}


def test_batches_of_one_part_keep_their_size(parts):
    source = mixture(parts, per="batch", epoch="all")
    with loader(source) as job:
        numbers = np.concatenate(values(job))
        state = job.state_dict()
    assert len(np.unique(numbers)) == sum(SIZES.values())
    with (
        loader(source, global_batch_size=2 * BATCH) as other,
        pytest.warns(PenstockWarning, match="from 24 to 48"),
        pytest.raises(ConfigError, match=f"Pass global_batch_size={BATCH}"),
    ):
        other.load_state_dict(state)


def test_weights_that_are_set_between_passes_leave_their_begin(parts):
    with loader(mixture(parts)) as job:
        first = next(iter(job))[0].tolist()
        job.set_weights(WEIGHTS)
        assert next(iter(job))[0].tolist() == first


def test_the_part_of_each_sample_is_a_field(parts):
    source = mixture(parts, fields=("array", "part", "id"))
    assert source.schema["part"].class_names == ("web", "code", "math")
    with loader(source) as job:
        for batch in job:
            numbers, part, ids = (column.numpy() for column in batch)
            np.testing.assert_array_equal(part, numbers // 1000)
            np.testing.assert_array_equal(ids, numbers % 1000 + np.array([0, 300, 390])[part])


def test_repeats_get_draws_of_their_own(parts):
    """The draws of a sample are keyed by its part's epoch; two equal parts have different ids."""
    noise = Map(_noise, fields="array", returns={"noise": Value("float64")})
    source = mix({"a": parts["math"], "b": parts["math"]}, weights={"a": 1, "b": 1}, epoch=310)
    seen = dict[int, list[float]]()
    with loader(source, augment=[noise], as_dict=True) as job:
        for batch in job:
            for number, noised in zip(
                batch["array"].tolist(), batch["noise"].tolist(), strict=True
            ):
                seen.setdefault((number, 0), []).append(noised)
    assert {len(each) for each in seen.values()} == {10}
    assert all(len({*each}) == 10 for each in seen.values())


def _noise(array: Any, rng: np.random.Generator) -> float:
    del array
    return rng.random()


def test_a_mixture_of_mixtures_has_its_parts(parts):
    inner = mix({"a": parts["code"], "b": parts["math"]}, weights={"a": 1, "b": 3})
    source = mix({"web": parts["web"], "rest": inner}, weights={"web": 1, "rest": 1}, epoch=400)
    assert source.parts == ("web", "rest/a", "rest/b")
    with loader(source) as job:
        np.testing.assert_allclose(shares(values(job)), [200, 50, 150], atol=2)
        job.set_weights({"web": 1, "rest": 3})
        np.testing.assert_allclose(shares(values(job)), [100, 75, 225], atol=2)


def test_weights_follow_a_schedule(parts):
    with loader(mixture(parts, weights={0: WEIGHTS, 120: OTHER}, epoch=240)) as job:
        batches = values(job)
    np.testing.assert_allclose(shares(batches[:5]), [60, 36, 24], atol=2)
    np.testing.assert_allclose(shares(batches[5:]), [12, 12, 96], atol=2)


def test_weights_are_set_for_a_later_step(parts):
    source = mixture(parts)
    with loader(source) as early, loader(source) as late:
        first, second = iter(early), iter(late)
        numbers = values(next(first) for _ in range(2))
        early.set_weights(OTHER, step=5)
        numbers += values(first)
        others = values(next(second) for _ in range(5))
        late.set_weights(OTHER)
        others += values(second)
        assert numbers == others
        np.testing.assert_array_equal(
            np.sort(early.samples_of(2)), np.sort([_id(number) for number in numbers[2]])
        )


def _id(number: int) -> int:
    return number % 1000 + (0, 300, 390)[number // 1000]


def test_more_parts_than_a_batch_has_samples(parts):
    """It works, and the loader says once after how many batches the parts appear."""
    many = {f"p{n}": parts["math"].subset(np.arange(n, n + 2)) for n in range(28)}
    many |= {"rare": parts["code"], "rarest": parts["web"]}
    weights = dict.fromkeys(many, 1.0) | {"rare": 0.05, "rarest": 0.01}
    source = mix(many, weights=weights, epoch=6000, fields=("array", "part"))
    with (
        pytest.warns(PenstockWarning, match="30 parts, and a global batch 24 samples") as found,
        loader(source) as job,
    ):
        batches = [batch[1].numpy() for batch in job]
    first = {
        name: 1 + next(n for n, part in enumerate(batches) if (part == number).any())
        for number, name in enumerate(many)
    }
    (warning,) = found
    assert f'"rarest" after {first["rarest"]}, "rare" after {first["rare"]}' in str(warning.message)
    assert first["rarest"] == max(first.values()) > first["rare"] > 2
    with pytest.warns(PenstockWarning, match='no sample of "rare", "rarest"'):
        loader(mix(many, weights=weights, epoch=48)).close()


def test_a_schedule_may_have_its_samples_as_texts(parts):
    """JSON has no other keys."""
    as_texts = {"0": WEIGHTS, "1_00": OTHER}
    with loader(mixture(parts, weights=as_texts)) as job:
        found = values(job)
    with loader(mixture(parts, weights={0: WEIGHTS, 100: OTHER})) as job:
        assert values(job) == found


class TestBadInput:
    @pytest.mark.parametrize(
        ("weights", "message"),
        [
            ({"web": 1, "code": 1}, 'none for "math"'),
            ({**WEIGHTS, "more": 1}, 'some for "more"'),
            ({"web": 1, "cod": 1, "math": 1}, 'none for "code", and there are some for "cod"'),
            ({**WEIGHTS, "web": -1}, "wanted a finite number above 0"),
            ({**WEIGHTS, "web": float("nan")}, "wanted a finite number above 0"),
            ({**WEIGHTS, "web": 0}, "Leave the part out"),
            ({**WEIGHTS, "web": "1"}, "wanted a finite number"),
            ({5: WEIGHTS}, "wanted 0 first"),
            ({0: WEIGHTS, 9: OTHER, 3: WEIGHTS}, "wanted 0 first, then larger"),
            ({0: WEIGHTS, "web": 1}, "wanted names of parts"),
            ({"0": WEIGHTS, "later": OTHER}, "wanted names of parts, or whole numbers"),
            ([1, 2, 3], "wanted a number for each part"),
        ],
    )
    def test_weights(self, parts, weights, message):
        with pytest.raises(ConfigError, match=message):
            mix(parts, weights=weights)

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"epoch": 0}, "epoch: got 0"),
            ({"epoch": "never"}, "epoch: got 'never'"),
            ({"per": "rank"}, "per: got 'rank'"),
            ({"per": "token"}, "delivers no field of tokens"),
            ({"per": "batch", "epoch": "once"}, "can't be kept"),
            ({"temperature": 0}, "temperature: got 0"),
            ({"transition": "sudden"}, "transition: got 'sudden'"),
            ({"max_repeats": {"more": 2}}, r"max_repeats: got \['more'\]"),
        ],
    )
    def test_arguments(self, parts, arguments, message):
        with pytest.raises(ConfigError, match=message):
            mix(parts, weights=WEIGHTS, **arguments)

    def test_parts(self, parts):
        for wrong in ({}, [parts["web"]], {"a/b": parts["web"]}, {"a": "folder"}):
            with pytest.raises(ConfigError, match="mix: got"):
                mix(wrong)

    def test_too_many_repeats(self, parts):
        with pytest.raises(PlanError, match=r"delivers 40 of \"math\", which has 31: 1.29 times"):
            len(mixture(parts, max_repeats={"math": 1}))
        with pytest.raises(PlanError, match="max_repeats"):
            loader(mixture(parts, max_repeats={"math": 1}))

    @pytest.mark.parametrize("transition", ["step", "linear"])
    def test_too_many_repeats_in_a_later_epoch(self, parts, transition):
        schedule = {0: WEIGHTS, 1500: OTHER}
        later = mixture(parts, weights=schedule, transition=transition, max_repeats={"math": 2})
        with pytest.raises(PlanError, match="epoch 8 of 200 samples"):
            len(later)
        with loader(mixture(parts, max_repeats={"math": 2})) as job:
            job.set_weights(THIRD)
            with pytest.raises(PlanError, match="max_repeats: an epoch of 200"):
                job.set_weights(OTHER, step=2)

    @pytest.mark.parametrize("most", [{"math": 0}, {"math": "2"}, {"math": True}, 4, {"x": 1}])
    def test_limits_of_repeats(self, parts, most):
        with pytest.raises(ConfigError, match="max_repeats: got"):
            mixture(parts, max_repeats=most)

    def test_a_state_of_other_parts(self, parts):
        with loader(mixture(parts)) as job:
            state = job.state_dict()
        renamed = {"web": parts["web"], "source": parts["code"], "math": parts["math"]}
        weights = {"web": 0.5, "source": 0.3, "math": 0.2}
        with (
            loader(mix(renamed, weights=weights, epoch=200)) as other,
            pytest.raises(ResumeError, match=r"added \['source'\] and missing \['code'\]"),
        ):
            other.load_state_dict(state)
        swapped = {"web": parts["web"], "code": parts["code"], "math": parts["code"]}
        for changed, message in (
            (mixture(parts, weights=OTHER), r"other weights of its parts.*loader.set_weights"),
            (mixture(parts, epoch="all"), "with epoch=200, and this one has epoch=all"),
            (mixture(parts, per="batch"), "with per=sample, and this one has per=batch"),
            (mixture(swapped), r"other data of the parts \['math'\]"),
        ):
            with loader(changed) as again, pytest.raises(ResumeError, match=message):
                again.load_state_dict(state)

    def test_weights_that_are_set(self, parts):
        with loader(mixture(parts)) as job:
            next(iter(job))
            with pytest.raises(PlanError, match="step 0 was delivered; the next one is 1"):
                job.set_weights(OTHER, step=0)
            with pytest.raises(ConfigError, match="none for"):
                job.set_weights({"web": 1})
            with pytest.raises(ConfigError, match="wanted a weight for each part"):
                job.set_weights({0: WEIGHTS, 5: OTHER})
        with loader(parts["web"]) as plain, pytest.raises(ConfigError, match="is no mixture"):
            plain.set_weights(OTHER)
