"""Test the measurement of each stage alone, and that it ends."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest

from penstock.augment import (
    CenterCrop,
    ColorJitter,
    Decode,
    Letterbox,
    LongestSide,
    Normalize,
    Operation,
    Pad,
    RandomHorizontalFlip,
    RandomResizedCrop,
    Resize,
    check_recipe,
    imagenet_eval,
    imagenet_train,
)
from penstock.cache import DiskCache
from penstock.pipeline.bench import measure_ceilings, rate_in_sequence, without_augmenting
from penstock.pipeline.report import Rate
from penstock.readers import Dataset, ImageRange, concat
from tests.images import jpeg
from tests.servers import Faults, serving

if TYPE_CHECKING:
    from pathlib import Path

    from penstock.pipeline.report import ProgressiveCost

IMAGES = ImageRange(min_height=300, max_height=500, min_width=300, max_width=600)


@pytest.mark.parametrize(
    ("recipe", "bare"),
    [
        (imagenet_train(224), [Decode(), RandomResizedCrop(14, antialias=False)]),
        (imagenet_eval(224), [Decode(), Resize(16, antialias=False), CenterCrop(14)]),
        (
            [Decode("gray"), RandomResizedCrop((64, 8)), ColorJitter(0.4), RandomHorizontalFlip()],
            [Decode("gray"), RandomResizedCrop((4, 1), antialias=False)],
        ),
        ([CenterCrop(224), Normalize()], [Decode(), CenterCrop(224)]),
        (
            [CenterCrop(288), Resize((224, 224))],
            [Decode(), CenterCrop(288), Resize((14, 14), antialias=False)],
        ),
    ],
)
def test_decoding_alone_keeps_the_windows_and_drops_the_rest(
    recipe: list[Operation], bare: list[Operation]
) -> None:
    checked = check_recipe(recipe, images=IMAGES)
    found = without_augmenting(checked.ops)
    assert found == bare
    assert check_recipe(found, images=IMAGES).dtype == "uint8"


@pytest.mark.parametrize(
    "recipe",
    [
        [LongestSide(64), Pad(to_multiple=32)],
        [Letterbox(64), RandomHorizontalFlip()],
        [RandomHorizontalFlip(), Pad(to_multiple=32)],
    ],
)
def test_images_of_different_sizes_become_tiny(recipe: list[Operation]) -> None:
    checked = check_recipe(recipe, images=IMAGES, lists=True)
    has_one_size = checked.sizes.fixed is not None
    found = without_augmenting(checked.ops, has_one_size=has_one_size)
    assert check_recipe(found, images=IMAGES).shape == (3, 40, 40)


@pytest.mark.parametrize("kind", ["folder", "pack"])
def test_every_stage_of_a_local_dataset_is_measured(
    kind: str, request: pytest.FixtureRequest
) -> None:
    place: Path = request.getfixturevalue(kind)
    with Dataset(place) as dataset:
        recipe = check_recipe(imagenet_train(32), images=dataset.index.images["image"])
        found = measure_ceilings(dataset, {"image": recipe}, batch_size=16, threads=2, seconds=0.05)
    assert set(found.stages()) == {"read", "decode", "augment", "python"}
    for rate in found.stages().values():
        assert rate.samples_per_s > 0
        assert rate.bytes_per_s > 1000 * rate.samples_per_s  # of encoded samples
    # CPU time counts all threads: nothing is done without.
    assert all(rate.cpu_s_per_1000 > 0 for name, rate in found.stages().items() if name != "read")
    assert found.decode_share is not None
    assert 0 < found.decode_share <= 1


def test_a_dataset_without_images_is_only_read(pack: Path) -> None:
    with Dataset(pack, fields=("label", "id")) as dataset:
        found = measure_ceilings(dataset, {}, batch_size=16, seconds=0.02)
    assert set(found.stages()) == {"read"}
    assert found.decode_share is None


def test_a_part_of_a_dataset_is_measured_as_one_is(pack: Path, tmp_path: Path) -> None:
    cache = DiskCache(tmp_path / "cache", max_bytes="64MiB")
    with serving(pack.parent) as server, Dataset(f"{server.url}/{pack.name}", cache=cache) as far:
        both = concat([Dataset(pack), far]).subset(range(0, 2 * len(far), 5))
        recipe = check_recipe(imagenet_train(32), images=far.contents.images["image"])
        found = measure_ceilings(both, {"image": recipe}, batch_size=16, threads=1, seconds=0.05)
    assert set(found.stages()) == {"remote", "read", "decode", "augment", "python"}


def test_a_slow_remote_is_fetched_from_but_not_waited_for(pack: Path, tmp_path: Path) -> None:
    faults = Faults(latency_s=0.03, bytes_per_s=200_000)
    with serving(pack.parent, faults) as server:
        cache = DiskCache(tmp_path / "cache", max_bytes="64MiB")
        with Dataset(f"{server.url}/{pack.name}", cache=cache) as dataset:
            recipe = check_recipe(imagenet_train(32), images=dataset.index.images["image"])
            found = measure_ceilings(
                dataset, {"image": recipe}, batch_size=16, threads=1, seconds=0.2
            )
        cache.close()
    assert set(found.stages()) == {"remote", "decode", "augment", "python"}


def few(tmp_path: Path, *, progressive: int, baseline: int) -> Dataset:
    place = tmp_path / "some"
    place.mkdir()
    for number in range(progressive + baseline):
        data = jpeg(number, 60, 80, progressive=number < progressive)
        (place / f"{number:02d}.jpg").write_bytes(data)
    return Dataset(place)


def measured(dataset: Dataset) -> ProgressiveCost | None:
    with dataset:
        recipe = check_recipe(imagenet_train(32), images=dataset.index.images["image"])
        return measure_ceilings(
            dataset, {"image": recipe}, batch_size=16, threads=1, seconds=0.02
        ).progressive


def test_progressive_images_are_decoded_like_their_twins(tmp_path: Path) -> None:
    pytest.importorskip("jpeglib")
    found = measured(few(tmp_path, progressive=6, baseline=2))
    assert found is not None
    assert (found.images, found.of_twins) == (6, True)
    assert found.times > 0


@pytest.mark.parametrize(("progressive", "baseline"), [(6, 6), (6, 2), (2, 6)])
def test_without_jpeglib_the_sets_own_baseline_images_stand_in(
    progressive: int, baseline: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "jpeglib", None)
    found = measured(few(tmp_path, progressive=progressive, baseline=baseline))
    if min(progressive, baseline) < 4:
        assert found is None  # too few for a result
    else:
        assert found is not None
        assert (found.images, found.of_twins) == (6, False)


def test_a_set_without_progressive_images_has_no_such_cost(tmp_path: Path) -> None:
    assert measured(few(tmp_path, progressive=0, baseline=8)) is None


@pytest.mark.gpu
def test_on_a_gpu_the_copy_is_measured_too(pack: Path) -> None:
    with Dataset(pack) as dataset:
        recipe = check_recipe(imagenet_train(32), images=dataset.index.images["image"])
        found = measure_ceilings(
            dataset, {"image": recipe}, batch_size=16, device="cuda", threads=2, seconds=0.1
        )
    assert found.copy is not None
    assert found.copy.samples_per_s > 0


def test_what_several_images_take_adds_up() -> None:
    fast = Rate(samples_per_s=400.0, bytes_per_s=4e6, cpu_s_per_1000=1.0)
    slow = Rate(samples_per_s=100.0, bytes_per_s=3e6, cpu_s_per_1000=4.0)
    both = Rate(samples_per_s=80.0, bytes_per_s=3.2e6, cpu_s_per_1000=5.0)
    assert rate_in_sequence([fast, slow]) == both
    assert rate_in_sequence([None, slow]) == slow
    assert rate_in_sequence([None]) is None
