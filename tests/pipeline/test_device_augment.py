"""Test `device_augment=`: a function of whole batches, with random numbers that resume exactly."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from penstock import DataLoader, Dataset, World, keyed_uniform, mix
from penstock.errors import ConfigError, RecipeError
from penstock.pipeline import options as options_module
from penstock.pipeline.feed import DeviceBatch
from tests.conftest import jpeg
from tests.torch_datasets import Squares

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="module")
def arrays(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """37 samples of four numbers."""
    place: Path = tmp_path_factory.mktemp("arrays") / "all.npy"
    np.save(place, np.arange(37 * 4, dtype=np.float32).reshape(37, 4))
    return place


def noisy(batch: dict[str, Any], generator: torch.Generator) -> dict[str, Any]:
    """Add noise of the generator, and of torch's global state, as torchvision does."""
    values = batch["array"]
    noise = torch.rand(values.shape, generator=generator, device=values.device)
    return {**batch, "array": values + noise, "global": torch.rand(2)}


def loader(place: Path, function: Any = noisy, **options: Any) -> DataLoader:
    dataset = Dataset(str(place), fields=("array", "id"))
    given = {"shuffle": True, "seed": 3, "global_batch_size": 8, "drop_last": True, **options}
    return DataLoader(dataset, device_augment=function, **given)


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return list(a) == list(b) and all(equal(a[name], b[name]) for name in a)
    return len(a) == len(b) and all(map(equal, a, b))


def test_the_loop_gets_what_the_function_returns(arrays: Path) -> None:
    seen: list[Any] = []

    def doubled(batch: dict[str, Any], generator: torch.Generator) -> Any:
        seen.append(batch)
        assert list(batch) == ["array", "id"]
        assert generator.device == batch["array"].device
        return batch["array"] * 2, batch["id"]

    with loader(arrays, doubled) as ours, loader(arrays, None) as plain:
        for (twice, ids), (values, same) in zip(ours, plain, strict=True):
            assert torch.equal(twice, values * 2)
            assert torch.equal(ids, same)
    assert len(seen) >= len(ours) == 4
    with loader(arrays, lambda batch, _: batch) as unchanged:
        assert all(type(batch) is dict for batch in unchanged)


@pytest.mark.parametrize("stop", range(5))
def test_it_resumes_exactly(arrays: Path, stop: int) -> None:
    with loader(arrays) as job:
        batches = iter(job)
        whole = [next(batches) for _ in range(stop)]
        state = job.state_dict()
        rest = [*batches, *job]
    torch.manual_seed(stop)
    with loader(arrays, seed=None) as again:
        again.load_state_dict(state)
        assert equal([*again, *again][: len(rest)], rest)
    assert len(whole) == stop


def test_the_generator_differs_by_step_rank_and_epoch_and_the_global_state_is_kept(
    arrays: Path,
) -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    noise = []
    for rank in (0, 1):
        with loader(arrays, world=World(rank, 2)) as job:
            for _ in range(2):
                noise += [tuple(batch["global"].tolist()) for batch in job]
    assert torch.equal(torch.rand(3), expected)
    assert len(set(noise)) == len(noise) == 16


def test_draws_of_samples_depend_on_no_batch_and_no_world(arrays: Path) -> None:
    def drawn(**options: Any) -> dict[tuple[int, int], list[float]]:
        found: dict[tuple[int, int], list[float]] = {}
        with loader(arrays, lambda batch, _: (batch["id"], batch.uniform(2)), **options) as job:
            for epoch in range(2):
                for ids, draws in job:
                    assert draws.shape == (len(ids), 2)
                    pairs = zip(ids.tolist(), draws.tolist(), strict=True)
                    found |= {(epoch, number): draw for number, draw in pairs}
        return found

    one = drawn(global_batch_size=4)
    halves = [drawn(world=World(rank, 2), global_batch_size=4) for rank in (0, 1)]
    assert halves[0] | halves[1] == one
    assert not halves[0].keys() & halves[1].keys()
    for (epoch, number), draw in one.items():
        assert keyed_uniform([number], epoch=epoch, n=2, seed=3).tolist() == [draw]


def test_samples_of_a_mixture_draw_by_their_part_s_epoch(arrays: Path) -> None:
    parts = {"a": Dataset(str(arrays)), "b": Dataset(str(arrays))}
    source = mix(parts, weights={"a": 0.8, "b": 0.2}, epoch=150, fields=("array", "id"))
    found: dict[int, list[float]] = {}
    with DataLoader(
        source,
        global_batch_size=10,
        shuffle=True,
        seed=1,
        device_augment=lambda batch, _: (batch["id"], batch.uniform(1)[:, 0]),
    ) as job:
        for ids, draws in job:
            for number, draw in zip(ids.tolist(), draws.tolist(), strict=True):
                found.setdefault(number, []).append(draw)
    assert max(map(len, found.values())) > 2
    assert all(len(set(draws)) == len(draws) for draws in found.values())


def test_images_and_padded_batches(pack: Path) -> None:
    from penstock import imagenet_eval

    def shrunk(batch: dict[str, Any], _: torch.Generator) -> dict[str, Any]:
        assert list(batch) == ["image", "label", "valid"]
        return {"small": batch["image"][:, :, ::2, ::2], "valid": batch["valid"]}

    with (
        Dataset(str(pack)) as dataset,
        DataLoader(
            dataset, batch_size=64, augment=imagenet_eval(32), pad="mask", device_augment=shrunk
        ) as job,
    ):
        batches = list(job)
    assert all(batch["small"].shape == (64, 3, 16, 16) for batch in batches)
    assert sum(int(batch["valid"].sum()) for batch in batches) == 203


@pytest.mark.parametrize("rest", [0, 2])
def test_an_error_names_the_function_and_the_step_and_the_loop_may_go_on(
    arrays: Path, rest: int
) -> None:
    fails = True

    def broken(batch: dict[str, Any], _: torch.Generator) -> Any:
        if fails and len(seen) == rest:
            raise KeyError("mask")
        return batch

    seen: list[Any] = []
    with loader(arrays, broken) as job, loader(arrays, None, as_dict=True) as plain:
        batches = iter(job)
        with pytest.raises(KeyError) as caught:
            seen.extend(batches)
        (note,) = caught.value.__notes__
        assert "broken was called at" in note
        assert f"step {rest} (epoch 0)" in note
        fails = False
        seen += list(batches)
        assert equal(seen, list(plain))


def test_a_result_that_is_no_batch_is_refused(arrays: Path) -> None:
    with loader(arrays, lambda *_: None) as job:
        with pytest.raises(RecipeError, match="returned None") as caught:
            next(iter(job))
        assert "step 0" in caught.value.__notes__[0]
    with (
        loader(arrays, lambda *several: several) as job,
        pytest.raises(RecipeError, match="lambda batch, generator: transform"),
    ):
        next(iter(job))
    copied = DeviceBatch({"array": torch.zeros(2)})
    with pytest.raises(RecipeError, match="a copy without its samples' ids"):
        copied.uniform(1)


@pytest.mark.parametrize(
    ("function", "words"),
    [
        ([], r"Penstock's operations belong in augment="),
        (lambda batch: batch, "missing|too many"),
        (lambda a, _b, _c: a, "missing a required"),
    ],
)
def test_what_isnt_such_a_function_is_refused_at_once(
    arrays: Path, function: Any, words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        loader(arrays, function)


def test_a_torch_dataset_is_refused() -> None:
    with pytest.raises(ConfigError, match="device_augment= works on native datasets"):
        DataLoader(Squares(4), device_augment=noisy)


@pytest.mark.parametrize("ahead", [False, True])
def test_the_time_of_the_function_is_no_wait_for_data(arrays: Path, ahead: bool) -> None:
    def slow(batch: dict[str, Any], _: torch.Generator) -> dict[str, Any]:
        end = time.perf_counter() + 0.02
        while time.perf_counter() < end:
            pass
        return batch

    with loader(arrays, slow) as job:
        if ahead:
            Ahead(job)
        assert len([*job, *job, *job]) == 12
        statistics = job.statistics()
    assert statistics.step_s > 12 * 0.02
    assert statistics.wait_s < statistics.step_s


class Ahead:
    """Make a loader on the CPU run its function one batch ahead, as on CUDA."""

    def __init__(self, job: DataLoader) -> None:
        device: Any = job._engine.assembly.pipeline.on_device  # type: ignore[union-attr]
        device.is_ahead = True
        device.on_stream = contextlib.nullcontext


def test_on_a_gpu_it_runs_one_batch_ahead_and_stays_exact(arrays: Path) -> None:
    made: list[int] = []

    def counted(batch: dict[str, Any], generator: torch.Generator) -> Any:
        made.append(job.epoch)
        return noisy(batch, generator)

    with loader(arrays, counted) as job, loader(arrays) as plain:
        Ahead(job)
        delivered, ahead = [], []
        for epoch in range(2):
            for batch in job:
                delivered.append(batch)
                ahead.append(len(made) - len(delivered))
            assert made == [number for number in range(epoch + 1) for _ in range(4)]
        assert equal(delivered, [*plain, *plain])
        assert max(ahead) <= 1
        batches = iter(job)
        first = next(batches)
        state = job.state_dict()
        job.set_epoch(7)  # drops what was made ahead
        assert equal(next(iter(job)), next(iter(at(plain, 7))))
        job.load_state_dict(state)
        again = next(iter(job))
    with loader(arrays) as plain:
        assert equal([first, again], list(at(plain, 2))[:2])


def at(job: DataLoader, epoch: int) -> DataLoader:
    job.set_epoch(epoch)
    return job


def test_an_error_ahead_is_raised_when_its_batch_is_due(arrays: Path) -> None:
    calls = 0

    def third(batch: dict[str, Any], _: torch.Generator) -> Any:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise ValueError("no such mask")
        return batch

    with loader(arrays, third) as job, loader(arrays, None, as_dict=True) as plain:
        Ahead(job)
        found: list[Any] = []
        batches = iter(job)
        with pytest.raises(ValueError, match="no such mask"):
            found.extend(batches)
        assert len(found) == 2
        assert equal([*found, *batches], list(plain))


def test_with_images_it_runs_ahead_of_the_thread_that_decodes(pack: Path) -> None:
    from penstock import imagenet_train

    def made(**options: Any) -> list[Any]:
        options = {"shuffle": True, "seed": 2, "augment": imagenet_train(16), **options}
        with Dataset(str(pack)) as dataset, DataLoader(dataset, 16, **options) as job:
            if "device_augment" in options:
                Ahead(job)
            return [*job, *job]

    def unchanged(batch: dict[str, Any], _: torch.Generator) -> Any:
        calls.append(len(batch["label"]))
        return tuple(batch.values())

    calls: list[int] = []
    for shuffle in (True, False):
        assert equal(made(device_augment=unchanged, shuffle=shuffle), made(shuffle=shuffle))
    assert len(calls) == 4 * 13


@pytest.mark.parametrize("as_dict", [True, False])
def test_the_cpu_decodes_for_a_device(
    pack: Path, as_dict: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's meta device stands in for a GPU: it has shapes alone."""
    from penstock import Decode, imagenet_train

    monkeypatch.setattr(options_module, "parse_device", lambda *_, **__: torch.device("meta"))
    with (
        Dataset(str(pack), fields=("image", "label", "id")) as dataset,
        DataLoader(
            dataset,
            16,
            shuffle=True,
            seed=2,
            drop_last=True,
            as_dict=as_dict,
            device="cuda",
            augment=[Decode(device="cpu"), *imagenet_train(16)[1:]],
        ) as job,
    ):
        assert job.device.type == "meta"
        batches = [*job, *job]
    assert len(batches) == 2 * (203 // 16)
    for batch in batches:
        images, *others = batch.values() if as_dict else batch
        assert images.shape == (16, 3, 16, 16)
        assert all(each.device.type == "meta" for each in (images, *others))


def test_the_images_of_a_batch_are_decoded_on_one_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from penstock import Decode, Image, Resize

    on_cpu, size = Decode(device="cpu"), Resize((8, 8))
    table = pa.table({"a": [jpeg(0)] * 4, "b": [jpeg(1)] * 4})
    pq.write_table(table, tmp_path / "two.parquet")
    schema = {"a": Image(), "b": Image()}
    with Dataset(str(tmp_path / "two.parquet"), schema=schema) as dataset:
        monkeypatch.setattr(options_module, "parse_device", lambda *_, **__: torch.device("meta"))
        with pytest.raises(RecipeError, match="into all of them, or into none"):
            DataLoader(dataset, 4, device="cuda", augment={"a": [on_cpu, size], "b": [size]})


@pytest.mark.gpu
def test_on_a_gpu_the_function_works_beside_the_step(pack: Path) -> None:
    from penstock import imagenet_train

    def slow(batch: dict[str, Any], generator: torch.Generator) -> dict[str, Any]:
        torch.cuda._sleep(20_000_000)
        noise = torch.rand(batch["image"].shape, device="cuda", generator=generator)
        return {**batch, "image": batch["image"] + noise}

    def sums(**options: Any) -> list[torch.Tensor]:
        with (
            Dataset(str(pack)) as dataset,
            DataLoader(
                dataset,
                batch_size=32,
                shuffle=True,
                seed=1,
                drop_last=True,
                deterministic=True,
                augment=imagenet_train(64),
                device="cuda",
                device_augment=slow,
            ) as job,
        ):
            found = []
            for _ in range(3):
                for batch in job:
                    if options.get("waits"):
                        torch.cuda.synchronize()
                    torch.cuda._sleep(10_000_000)
                    found.append(batch["image"].double().sum())
                    del batch
            return torch.stack(found).tolist()

    assert sums(waits=True) == sums()
