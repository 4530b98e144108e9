"""Test whole loaders with weights of samples: exact counts, any world, resumed, changed, mixed."""

from __future__ import annotations

import json
import pickle
from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
import pytest

from penstock import DataLoader, Dataset, DiskCache, Map, Value, World, concat, mix
from penstock.augment import RandomResizedCrop
from penstock.errors import ConfigError, PlanError, ResumeError
from penstock.readers.fieldtypes import Array
from tests import field_sets
from tests.servers import serving
from tests.sources import Values, classes

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from numpy.typing import NDArray

    from penstock.readers import Source

    Floats = NDArray[np.float64]

COUNT = 1500
SIZES = [17 + n % 9 for n in range(71)] + [13]
BATCH = 96
RNG = np.random.default_rng(8)
WEIGHTS: Floats = np.where(RNG.random(COUNT) < 0.1, 0.0, RNG.gamma(0.8, 1.0, COUNT))
OTHER: Floats = RNG.random(COUNT)
TOKENS = {"tokens": Array("int64", (None,))}
LABELS = RNG.choice(4, COUNT, p=[0.7, 0.2, 0.08, 0.02])


def source(name: str = "values") -> Values:
    """Return a source of 72 shards, whose values are its ids."""
    columns = {"value": np.arange(COUNT), "label": LABELS, "score": np.arange(COUNT) % 3}
    return Values(SIZES, columns, types={"label": classes("a", "b", "c", "d")}, name=name)


def loader(dataset: Any, **arguments: Any) -> DataLoader:
    return DataLoader(
        dataset, **{"shuffle": True, "seed": 5, "global_batch_size": BATCH, **arguments}
    )


def values(batches: Iterable[Any]) -> list[list[int]]:
    return [batch[0].tolist() for batch in batches]


def counts(batches: Iterable[list[int]], count: int = COUNT) -> NDArray[np.int64]:
    return np.bincount(np.concatenate([*batches]), minlength=count)


def check_counts(found: NDArray[np.int64], weights: Any, samples: int | None = None) -> None:
    """Check that each sample was delivered floor or ceil of its expected count."""
    weights = np.asarray(weights, np.float64)
    samples = max(1, round(weights.sum())) if samples is None else samples
    expected = weights * (samples / weights.sum())
    assert found.sum() == samples
    assert np.all(found >= np.floor(expected - 1e-6))
    assert np.all(found <= np.ceil(expected + 1e-6))


def _noise(value: Any, rng: np.random.Generator) -> float:
    del value
    return rng.random()


NOISE = Map(_noise, fields="score", returns={"score": Value("float64")})


def test_an_epoch_follows_the_weights() -> None:
    with loader(source(), weights=WEIGHTS) as job:
        for _ in range(3):
            batches = values(job)
            assert len(batches) == len(job) == -(-round(WEIGHTS.sum()) // BATCH)
            check_counts(counts(batches), WEIGHTS)


def test_equal_weights_change_nothing() -> None:
    with loader(source()) as plain, loader(source(), weights=[1] * COUNT) as job:
        assert values(plain) == values(job)


@pytest.mark.parametrize("world", [2, 3, 7, 16])
def test_every_world_gives_the_same_global_batches(world: int) -> None:
    def batches(**arguments: Any) -> list[list[tuple[int, float]]]:
        with loader(source(), weights=WEIGHTS, augment=[NOISE], **arguments) as job:
            found = []
            for batch in [*job, *job]:
                valid = batch[-1] if "pad" in arguments else slice(None)
                found.append(
                    [*zip(batch[0][valid].tolist(), batch[2][valid].tolist(), strict=True)]
                )
            return found

    ranks = [batches(world=World(rank, world), pad="mask") for rank in range(world)]
    whole = [[sample for part in step for sample in part] for step in zip(*ranks, strict=True)]
    assert whole == batches()


@pytest.mark.filterwarnings("ignore:Each of 72 shards is read by")
@pytest.mark.parametrize("world", [1, 2, 3, 6, 7, 11, 32, 64, 96])
def test_ranks_take_parts_of_one_global_batch(world: int) -> None:
    with (
        loader(source(), weights=WEIGHTS) as alone,
        loader(source(), weights=WEIGHTS, world=World(0, world), pad="mask") as one,
    ):
        for step in range(0, 3 * len(alone), 5):
            parts = [one.samples_of(step, rank=rank) for rank in range(world)]
            np.testing.assert_array_equal(np.concatenate(parts), alone.samples_of(step))


def test_a_job_resumes_at_every_step() -> None:
    """Through three epochs, with weights that change in the second one for the third."""
    with loader(source(), weights=WEIGHTS) as job:
        states, batches, steps = [job.state_dict()], list[list[int]](), len(job)
        for _ in range(3):
            for batch in job:
                batches.append(batch[0].tolist())
                if len(batches) == steps + 4:
                    job.set_sample_weights(OTHER)
                states.append(job.state_dict())
    check_counts(counts(batches[steps : 2 * steps]), WEIGHTS)
    check_counts(counts(batches[2 * steps :]), OTHER, samples=round(WEIGHTS.sum()))
    for step in range(0, 3 * steps, 3):
        state = json.loads(json.dumps(states[step]))
        assert len(json.dumps(state)) < 10_000
        with loader(source(), weights=WEIGHTS) as again:
            if step > steps + 3:
                with pytest.raises(ResumeError, match="State was saved with weights of samples"):
                    again.load_state_dict(state)
                again.set_sample_weights(OTHER)
            again.load_state_dict(state)
            assert again.step == step
            assert next(iter(again))[0].tolist() == batches[step]


def test_the_last_weights_suffice_after_a_change() -> None:
    with loader(source(), weights=WEIGHTS) as job:
        values(job)
        job.set_sample_weights(OTHER)
        state, wanted = job.state_dict(), values(job)
        first = job.samples_of(0)
    with loader(source(), weights=OTHER) as again:
        again.load_state_dict(state)
        assert values(again) == wanted
        assert len(again) == len(wanted)
        with pytest.raises(PlanError, match=r"epoch 0: its weights of samples \w+ aren't known"):
            again.samples_of(0)
    assert len(first) == BATCH


def test_a_job_without_weights_may_get_some() -> None:
    with loader(source()) as job:
        check_counts(counts(values(job)), np.ones(COUNT))
        job.set_sample_weights("score")
        for _ in range(2):
            check_counts(counts(values(job)), np.arange(COUNT) % 3, samples=COUNT)
        job.set_sample_weights(OTHER)
        check_counts(counts(values(job)), OTHER, samples=COUNT)
        state = job.state_dict()
        for _ in range(5):
            job.set_sample_weights(RNG.random(COUNT))
            values(job)
        assert len(job.samples_of(job.step)) == BATCH
    with loader(source()) as plain, pytest.raises(ResumeError, match="and this loader has none"):
        plain.load_state_dict(state)


def test_weights_set_within_an_epoch_hold_from_the_next_one() -> None:
    with loader(source(), weights=WEIGHTS) as job, loader(source(), weights=WEIGHTS) as plain:
        batches = []
        for batch in job:
            batches.append(batch[0].tolist())
            if len(batches) in (2, 5):
                job.set_sample_weights(OTHER if len(batches) == 5 else WEIGHTS[::-1])
        assert batches == values(plain)
        check_counts(counts(values(job)), OTHER, samples=round(WEIGHTS.sum()))


class TestForms:
    """What weights may be given as."""

    def test_the_name_of_a_field(self) -> None:
        with loader(source(), weights="score") as job:
            np.testing.assert_array_equal(counts(values(job)), np.arange(COUNT) % 3)

    def test_balanced(self) -> None:
        with loader(source(), weights="balanced") as job:
            found = counts(values(job))
        assert found.sum() == COUNT
        each = np.bincount(LABELS, weights=found)
        np.testing.assert_allclose(each, COUNT / 4, atol=15)

    def test_files(self, tmp_path: Path) -> None:
        np.save(tmp_path / "scores.npy", WEIGHTS)
        order = RNG.permutation(COUNT)
        table = pa.table({"id": order, "weight": WEIGHTS[order]})
        pa.parquet.write_table(table, tmp_path / "scores.parquet")
        pa.csv.write_csv(pa.table({"loss": WEIGHTS}), tmp_path / "losses.csv")
        with loader(source(), weights=WEIGHTS) as job:
            wanted = values(job)
        for name in ("scores.npy", "scores.parquet", "losses.csv"):
            for path in (tmp_path / name, str(tmp_path / name), f"file://{tmp_path / name}"):
                with loader(source(), weights=path) as job:
                    assert values(job) == wanted

    @pytest.mark.parametrize(
        ("weights", "message"),
        [
            ([1.0], "got 1 of them, wanted one for each of the 1,500"),
            ([-1.0] * COUNT, "wanted finite numbers of 0 or more"),
            ([float("nan")] * COUNT, "got nan for the sample at index 0 and 1,499 more"),
            ([0] * COUNT, "all are 0"),
            ("scores", r"wanted a field of numbers \(of memory:values: \['value', 'label'"),
            ("none.npy", "none.npy can't be read as a file of scores"),
            (["a"] * COUNT, "wanted one number for each sample"),
        ],
    )
    def test_bad_ones(self, weights: Any, message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            loader(source(), weights=weights)
        with loader(source()) as job, pytest.raises(ConfigError, match=message):
            job.set_sample_weights(weights)

    def test_bad_files(self, tmp_path: Path) -> None:
        path = tmp_path / "two.csv"
        pa.csv.write_csv(pa.table({"a": WEIGHTS, "b": WEIGHTS}), path)
        with pytest.raises(ConfigError, match=r"the columns \['a', 'b'\].* one column \"weight\""):
            loader(source(), weights=path)
        pa.csv.write_csv(pa.table({"id": [0, 1, 1], "score": [1.0, 2.0, 3.0]}), path)
        with pytest.raises(ConfigError, match="has 3 scores, of 2 samples; wanted one for each"):
            loader(source(), weights=path)
        path.write_bytes(b"\xff")
        with pytest.raises(ConfigError, match="can't be read as a file of scores"):
            loader(source(), weights=path)

    def test_classes_are_needed_for_balance(self) -> None:
        plain = Values([5, 5])
        with pytest.raises(ConfigError, match="has no field of classes"):
            loader(plain, weights="balanced", global_batch_size=4)


class TestJobs:
    """Arguments and datasets that weights don't fit, or fit in their own way."""

    def test_index_order_is_refused(self) -> None:
        for dataset, more in (
            (source(), {"weights": WEIGHTS}),
            (source().subset(weights=WEIGHTS), {}),
        ):
            with pytest.raises(PlanError, match=r"have no index order. Pass shuffle=True"):
                loader(dataset, shuffle=False, **more)
        mixture = mix({"a": source().subset(weights=WEIGHTS), "b": source()})
        with pytest.raises(PlanError, match="have no index order"):
            loader(mixture, shuffle=False)
        with loader(source(), shuffle=False) as job, pytest.raises(PlanError, match="index order"):
            job.set_sample_weights(WEIGHTS)

    def test_a_mixture_is_refused(self) -> None:
        mixture = mix({"a": source(), "b": source()})
        with pytest.raises(ConfigError, match=r"mix\(\{\.\.\.: part\.subset\(weights=\.\.\.\)\}\)"):
            loader(mixture, weights=np.ones(2 * COUNT))
        with loader(mixture) as job, pytest.raises(ConfigError, match="is a mixture"):
            job.set_sample_weights(np.ones(2 * COUNT))

    def test_weights_are_given_once(self) -> None:
        with pytest.raises(ConfigError, match="have weights already"):
            loader(source().subset(weights=WEIGHTS), weights=WEIGHTS)

    def test_torch_datasets_are_refused(self) -> None:
        with pytest.raises(ConfigError, match="WeightedRandomSampler"):
            DataLoader([1, 2, 3], weights=[1, 2, 3])
        with DataLoader([1, 2, 3]) as job, pytest.raises(ConfigError, match="native"):
            job.set_sample_weights([1, 2, 3])

    def test_they_are_no_attribute(self) -> None:
        with loader(source(), weights=WEIGHTS) as job:
            with pytest.raises(ConfigError, match="should not be set once the loader is made"):
                job.weights = OTHER
            assert isinstance(job.dataset, Values)

    def test_a_state_without_weights_is_refused(self) -> None:
        with loader(source()) as plain, loader(source(), weights=WEIGHTS) as job:
            with pytest.raises(ResumeError, match="State was saved without weights of samples"):
                job.load_state_dict(plain.state_dict())
            with pytest.raises(ResumeError, match="this loader has none"):
                plain.load_state_dict(job.state_dict())

    def test_damaged_states(self) -> None:
        with loader(source(), weights=WEIGHTS) as job:
            state = job.state_dict()
            wrong: list[Any] = [{"samples": 3, "changes": [[0, "a"]]}, {"changes": []}, [], 5]
            for damage in wrong:
                with pytest.raises(ResumeError, match="State is damaged: its weights"):
                    job.load_state_dict({**state, "plan": {**state["plan"], "weights": damage}})

    def test_a_loader_rejoins_a_changed_job(self) -> None:
        with loader(source(), weights=WEIGHTS, drop_last=True) as job:
            values(job)
            job.set_sample_weights(OTHER)
            state, step = job.state_dict(), job.step + 3
            wanted = job.samples_of(step)
            job.rejoin(World(1, 3), step=step)
            ours = next(iter(job))[0].tolist()
        assert ours == wanted[BATCH // 3 : 2 * BATCH // 3].tolist()
        assert state["plan"]["weights"]["changes"][-1][0] == 1

    def test_batches_by_tokens(self, tmp_path: Path) -> None:
        folder = field_sets.write_numbers(tmp_path / "numbers", 90)
        weights = RNG.random(90) * 3
        with (
            Dataset(
                folder, schema={"tokens": Array("int64", (None,))}, fields=("tokens", "id")
            ) as own,
            DataLoader(own, batch_tokens=24, shuffle=True, seed=4, weights=weights) as job,
        ):
            found, states = list[Any](), list[Any]()
            for tokens, ids in job:
                assert tokens.lengths.clamp(min=1).sum() <= 24
                found.append(ids.tolist())
                states.append(job.state_dict())
            check_counts(counts(found, 90), weights)
            job.load_state_dict(states[3])
            assert [ids.tolist() for _, ids in job] == found[4:]

    def test_batches_by_tokens_draw_for_each_copy(self, tmp_path: Path) -> None:
        folder = field_sets.write_numbers(tmp_path / "numbers", 90)
        noise = Map(_noise, fields="tokens", returns={"noise": Value("float64")})
        with (
            Dataset(
                folder, schema={"tokens": Array("int64", (None,))}, fields=("tokens", "id")
            ) as own,
            DataLoader(
                own,
                batch_tokens=24,
                shuffle=True,
                seed=4,
                weights=[3] * 90,
                augment=[noise],
                as_dict=True,
            ) as job,
        ):
            drawn = [each for batch in job for each in batch["noise"].tolist()]
        assert len(set(drawn)) == len(drawn) == 270


class TestSources:
    """Weighted sources, and sources of them."""

    def test_a_subset_has_weights_in_the_order_of_its_ids(self) -> None:
        ids = RNG.permutation(COUNT)[:300]
        subset = source().subset(ids, weights=WEIGHTS[ids])
        mask = np.isin(np.arange(COUNT), ids)
        other = source().subset(mask, weights=WEIGHTS[mask])
        assert len(subset) == 300
        with loader(subset) as job, loader(other) as same:
            batches = values(job)
            assert batches == values(same)
        check_counts(counts(batches)[np.sort(ids)], WEIGHTS[np.sort(ids)])

    def test_a_field_is_that_of_the_subset(self) -> None:
        with loader(source().subset(np.arange(0, COUNT, 2), weights="score")) as job:
            np.testing.assert_array_equal(counts(values(job))[::2], (np.arange(COUNT) % 3)[::2])

    def test_parts_of_a_weighted_source_keep_their_weights(self) -> None:
        whole = source().subset(weights=np.arange(COUNT) % 4)
        part = whole.subset(np.arange(200))
        with loader(part) as job:
            np.testing.assert_array_equal(counts(values(job), 200), np.arange(200) % 4)
        with loader(concat([part, source()])) as job:
            found = counts([batch[-1].tolist() for batch in job], 2 * COUNT)
        np.testing.assert_array_equal(found[:200], np.arange(200) % 4)
        np.testing.assert_array_equal(found[COUNT:], np.ones(COUNT))
        one, two = whole.split(0.5, 0.5, seed=1)
        assert len(one) + len(two) == COUNT
        with pytest.raises(ConfigError, match="all are 0"):
            len(whole.subset([0, 4]).contents.expected.sizes)

    def test_they_are_pickled(self, tmp_path: Path) -> None:
        np.save(tmp_path / "array.npy", np.arange(90))
        with Dataset(str(tmp_path / "array.npy")) as own:
            weighted = own.subset(weights=np.arange(90) % 3)
            again: Source = pickle.loads(pickle.dumps(weighted))
            renamed = weighted.rename({"array": "number"})
            with loader(weighted) as one, loader(again) as two, loader(renamed) as three:
                wanted = values(one)
                assert values(two) == values(three) == wanted
            np.testing.assert_array_equal(counts(wanted, 90), np.arange(90) % 3)
            assert "with weights" in repr(weighted)
            renamed.bases[0].close()
            again.bases[0].close()  # type: ignore[attr-defined]

    def test_a_subset_needs_something(self) -> None:
        with pytest.raises(ConfigError, match="got neither ids or a mask nor weights="):
            source().subset()


class TestMixtures:
    def mixture(self, weights: Any = WEIGHTS, **arguments: Any) -> Any:
        parts = {"a": source().subset(weights=weights), "b": source("b")}
        own: dict[str, Any] = {
            "weights": {"a": 2, "b": 1},
            "fields": ("value", "part"),
            **arguments,
        }
        return mix(parts, **own)

    def test_epochs_of_a_weighted_part_follow_its_weights(self) -> None:
        samples = 17 * 64  # the part has 64 samples of each batch, so its epochs end with one
        with loader(self.mixture(WEIGHTS * (samples / WEIGHTS.sum())), drop_last=True) as job:
            batches = [batch for _ in range(4) for batch in job]
        part = np.concatenate([batch[1].numpy() for batch in batches])
        numbers = np.concatenate([batch[0].numpy() for batch in batches])
        own = numbers[part == 0]
        assert len(own) > 3 * samples
        for epoch in range(3):
            found = np.bincount(own[epoch * samples : (epoch + 1) * samples], minlength=COUNT)
            check_counts(found, WEIGHTS, samples)

    def test_the_summary_counts_by_weight(self) -> None:
        part = self.mixture(1.5 + np.arange(COUNT) % 2, epoch=9000).summary().parts[0]
        assert (part.size, part.samples, part.epochs) == (COUNT, 6000, 2.0)
        assert (part.least_repeats, part.most_repeats) == (2, 6)

    def test_copies_have_draws_of_their_own(self) -> None:
        parts = {"a": source().subset(weights=np.full(COUNT, 3)), "b": source()}
        with loader(
            mix(parts, weights={"a": 3, "b": 1}, epoch=8000), augment=[NOISE], as_dict=True
        ) as job:
            drawn = [each for batch in job for each in batch["score"].tolist()]
        assert len(set(drawn)) == len(drawn) == 8000

    @pytest.mark.parametrize("world", [3, 7])
    def test_every_world_gives_the_same_global_batches(self, world: int) -> None:
        with loader(self.mixture()) as alone:
            wanted = values(alone)
        found: list[list[int]] = [[] for _ in wanted]
        for rank in range(world):
            with loader(self.mixture(), world=World(rank, world), pad="mask") as one:
                for step, (numbers, _, valid) in enumerate(one):
                    found[step] += numbers[valid].tolist()
        assert found == wanted

    def test_a_job_resumes_with_the_same_weights_only(self) -> None:
        with loader(self.mixture()) as job:
            running = iter(job)
            for _ in range(5):
                next(running)
            state, wanted = job.state_dict(), values(running)
        with loader(self.mixture()) as again:
            again.load_state_dict(json.loads(json.dumps(state)))
            assert values(again) == wanted
        plain = mix({"a": source(), "b": source("b")}, weights={"a": 2, "b": 1})
        for other, words in ((self.mixture(OTHER), "with weights"), (plain, "without weights")):
            with (
                loader(other) as job,
                pytest.raises(ResumeError, match=f"with weights of samples .* this one is {words}"),
            ):
                job.load_state_dict(state)


class TestFiles:
    """Real files: images with random crops, chunks that are decoded as a whole, a remote."""

    @pytest.mark.parametrize("resident", [False, True])
    def test_no_two_copies_have_equal_pixels(self, pack: Path, resident: bool) -> None:
        seen = dict[int, list[bytes]]()
        with Dataset(str(pack), fields=("image", "id")) as dataset:
            weights = np.where(np.arange(len(dataset)) % 10, 0.5, 6.0)
            recipe = [RandomResizedCrop(24)]
            with loader(
                dataset, weights=weights, augment=recipe, resident=resident, global_batch_size=32
            ) as job:
                for _ in range(2):
                    for images, ids in job:
                        for image, sample in zip(images.numpy(), ids.tolist(), strict=True):
                            seen.setdefault(sample, []).append(image.tobytes())
        assert max(map(len, seen.values())) == 12
        for copies in seen.values():
            assert max(Counter(copies).values()) == 1

    def test_chunks(self, tmp_path: Path) -> None:
        folder = tmp_path / "rows"
        folder.mkdir()
        for number in range(8):
            table = pa.table({"value": np.arange(100) + 100 * number})
            pa.parquet.write_table(table, folder / f"{number}.parquet", row_group_size=9)
        weights = RNG.gamma(0.5, 2.0, 800)
        with Dataset(str(folder)) as dataset:
            with loader(dataset, weights=weights) as job:
                for _ in range(2):
                    check_counts(counts(values(job), 800), weights)
            assert dataset.contents.units is not None

    def test_a_cold_epoch_reads_as_much_as_without_weights(
        self, pack: Path, tmp_path: Path
    ) -> None:
        weights = 1 + RNG.random(203)
        with serving(pack.parent) as server:
            read = []
            for name, more in (("plain", {}), ("weighted", {"weights": weights})):
                cache = DiskCache(tmp_path / name, max_bytes="64MiB")
                with Dataset(f"{server.url}/pack", fields=("image", "id"), cache=cache) as dataset:
                    recipe = [RandomResizedCrop(24)]
                    before = server.bytes_sent
                    with loader(dataset, augment=recipe, global_batch_size=16, **more) as job:
                        found = [ids.tolist() for _, ids in job]
                    assert len({*np.concatenate(found).tolist()}) == 203
                    read.append(server.bytes_sent - before)
        assert read[1] <= 1.05 * read[0]


def test_the_length_of_a_dataset_is_its_number_of_samples() -> None:
    weighted = source().subset(weights=WEIGHTS)
    assert len(weighted) == COUNT
    assert weighted.fields == ("value", "label", "score", "id")
    np.testing.assert_array_equal(np.asarray(weighted.column("label")), LABELS)
