"""Fields are exact in any container, with any world, batch, threads, cache and restart."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from penstock import (
    DataLoader,
    Dataset,
    DiskCache,
    Order,
    RandomHorizontalFlip,
    RandomResizedCrop,
    World,
)
from penstock.readers.fields import Array
from tests import field_sets
from tests.files import upload

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

COUNT = 41
STREET = ("image", "mask", "boxes", "caption", "vector", "points", "label", "number", "id")
NUMBERS = ("signal", "tokens", "text", "target", "number", "id")
TOKENS = {"tokens": Array("int64", (None,))}
CROP = (RandomResizedCrop((12, 16)), RandomHorizontalFlip())

pytestmark = pytest.mark.filterwarnings("ignore::penstock.cache.errors.PenstockWarning")


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Callable[..., Dataset]]:
    """Opens each set in each container."""
    root = tmp_path_factory.mktemp("sets")
    folder = field_sets.write_folder(root / "folder", COUNT)
    tar = field_sets.write_tars(root / "tar", COUNT)
    numbers = field_sets.write_numbers(root / "numbers", COUNT)
    packed = field_sets.pack_of(folder, root / "pack", schema=field_sets.SCHEMA)
    packed_numbers = field_sets.pack_of(numbers, root / "packed-numbers", schema=TOKENS)

    def opener(path: Path, fields: Any, schema: Any) -> Callable[..., Dataset]:
        def open(**options: Any) -> Dataset:
            url = options.pop("url", path)
            return Dataset(url, schema=schema, **options).select(*fields)

        open.path = path  # type: ignore[attr-defined]
        return open

    return {
        "folder": opener(folder, STREET, field_sets.SCHEMA),
        "tar": opener(tar, STREET, field_sets.SCHEMA),
        "pack": opener(packed, STREET, None),
        "numbers": opener(numbers, NUMBERS, TOKENS),
        "packed numbers": opener(packed_numbers, NUMBERS, None),
    }


CONTAINERS = ("folder", "tar", "pack", "numbers", "packed numbers")


def loader(dataset: Dataset, rank: int = 0, size: int = 1, **options: Any) -> DataLoader[Any]:
    options = {"global_batch_size": 8, "seed": 11, "shuffle": True, "as_dict": True, **options}
    if size > 1:
        options["pad"] = "mask"
    return DataLoader(dataset, world=World(rank, size), **options)


def epoch(dataset: Dataset, **options: Any) -> list[list[dict[str, Any]]]:
    with loader(dataset, **options) as batches:
        return [field_sets.plain(batch) for batch in batches]


def recipe(container: str) -> Any:
    return None if "numbers" in container else CROP


@pytest.mark.parametrize("container", CONTAINERS)
def test_every_value_is_the_one_that_was_written(container: str, sets: Any) -> None:
    with sets[container]() as dataset:
        found = [sample for batch in epoch(dataset) for sample in batch]
    assert len(found) == COUNT
    seen = set()
    for sample in found:
        number = int(np.frombuffer(sample["number"][2], np.int64)[0])
        seen.add(number)
        wanted: dict[str, Any]
        if "numbers" in container:
            wanted = field_sets.numbers(number)
            assert sample["text"] == wanted["text"]
            assert array(sample["signal"]).tobytes() == wanted["signal"].tobytes()
            assert array(sample["tokens"]).tolist() == wanted["tokens"].tolist()
            assert array(sample["target"]) == np.float32(wanted["target"])
            continue
        each = field_sets.street(number)
        assert np.array_equal(array(sample["image"]), each.pixels)
        assert np.array_equal(array(sample["mask"]), each.mask)
        for name in ("boxes", "vector", "points"):
            assert np.array_equal(array(sample[name]), getattr(each, name)), name
            assert array(sample[name]).dtype == getattr(each, name).dtype
        assert sample["caption"] == each.caption
        assert array(sample["label"]) == each.label
    assert seen == set(range(COUNT))


def array(plain: tuple[str, tuple[int, ...], bytes]) -> Any:
    dtype, shape, data = plain
    return np.frombuffer(data, dtype).reshape(shape)


@pytest.mark.parametrize("container", CONTAINERS)
@pytest.mark.parametrize("size", [2, 3, 5])
def test_a_global_batch_is_the_same_in_every_world(container: str, size: int, sets: Any) -> None:
    with sets[container]() as dataset:
        alone = epoch(dataset, augment=recipe(container))
        ranks = [
            epoch(dataset, rank=rank, size=size, augment=recipe(container)) for rank in range(size)
        ]
    for number, wanted in enumerate(alone):
        together = [
            {k: v for k, v in sample.items() if k != "valid"}
            for batches in ranks
            for sample in batches[number]
            if np.frombuffer(sample["valid"][2], np.bool_)[0]
        ]
        assert together == wanted


@pytest.mark.parametrize("container", CONTAINERS)
def test_batches_threads_and_reading_change_no_sample(container: str, sets: Any) -> None:
    def samples(dataset: Dataset, **options: Any) -> dict[bytes, Any]:
        batches = epoch(
            dataset, augment=recipe(container), order=Order(lanes=2, window=2), **options
        )
        return {sample["id"][2]: sample for batch in batches for sample in batch}

    with sets[container]() as dataset:
        wanted = samples(dataset)
        for options in (
            {"global_batch_size": 3},
            {"global_batch_size": 40},
            {"num_workers": 3},
            {"prefetch_factor": 5},
            {"read": "pread"},
            {"read": "mmap"},
        ):
            assert samples(dataset, **options) == wanted, options


@pytest.mark.parametrize("container", CONTAINERS)
def test_every_steps_state_goes_on_exactly(container: str, sets: Any) -> None:
    with sets[container]() as dataset:
        whole = epoch(dataset, augment=recipe(container))
        with loader(dataset, augment=recipe(container)) as first:
            states = [first.state_dict() for _ in first]
        for done, state in enumerate(states[:-1], start=1):
            with loader(dataset, augment=recipe(container)) as again:
                again.load_state_dict(state)
                assert [field_sets.plain(batch) for batch in again] == whole[done:]


@pytest.mark.parametrize("container", CONTAINERS)
def test_a_remote_and_its_cache_give_the_same(container: str, sets: Any, tmp_path: Path) -> None:
    import fsspec

    memory = fsspec.filesystem("memory")
    place = f"/fields-{tmp_path.name}"
    upload(sets[container].path, memory, place)
    try:
        with sets[container]() as dataset:
            wanted = epoch(dataset, augment=recipe(container))
        index = {} if "pack" in container else {"index": tmp_path / "index"}
        url = f"memory:/{place}"
        with sets[container](url=url, **index) as dataset:
            assert epoch(dataset, augment=recipe(container)) == wanted
        for _ in range(2):
            with (
                closing(DiskCache(tmp_path / "cache", max_bytes="64MiB")) as cache,
                sets[container](url=url, cache=cache, **index) as dataset,
            ):
                assert epoch(dataset, augment=recipe(container)) == wanted
    finally:
        memory.rm(place, recursive=True)


def test_masks_and_boxes_stay_with_their_pixels(sets: Any) -> None:
    """Each class of a mask lies in its box, however they were cut and mirrored."""
    with sets["pack"]() as dataset, loader(dataset, augment=CROP) as batches:
        seen = 0
        for batch in batches:
            assert batch["mask"].shape[1:] == batch["image"].shape[2:]
            for mask, boxes in zip(batch["mask"], batch["boxes"], strict=True):
                for number, (left, top, right, bottom) in enumerate(boxes.tolist(), start=1):
                    rows, columns = torch.where(mask == number)
                    if not len(rows):
                        continue
                    seen += 1
                    # A nearest pixel stands for one whose centre is up to a pixel's width away.
                    assert left - 1.5 <= int(columns.min())
                    assert int(columns.max()) <= right + 1.5
                    assert top - 1.5 <= int(rows.min())
                    assert int(rows.max()) <= bottom + 1.5
    assert seen > 20
