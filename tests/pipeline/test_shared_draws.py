"""Fields of one list, or of one entry of a tuple, share their draws; other entries don't."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from penstock.augment import (
    ArrayDraws,
    Map,
    RandomCrop,
    RandomErasing,
    RandomHorizontalFlip,
    RandomResizedCrop,
    by_field,
    check_array_crops,
    check_recipes,
    draw,
    entry_salts,
)
from penstock.cache import ConfigError, RecipeError
from penstock.pipeline import DataLoader
from penstock.readers import Dataset, ImageRange
from penstock.readers.fieldtypes import Array, Image, Schema
from tests import images, tars

if TYPE_CHECKING:
    from pathlib import Path

SAMPLES = 600
CROP = (RandomResizedCrop(16), RandomHorizontalFlip())
OTHER = (RandomResizedCrop(24), RandomHorizontalFlip())
SCHEMA = Schema({"v1": Image(), "v2": Image(), "v3": Image()})
SAME = ImageRange(min_height=64, max_height=64, min_width=64, max_width=64)


def drawn(augment: Any, *fields: str) -> dict[str, dict[str, Any]]:
    """The arguments of each image's graph, for samples of one size."""
    recipes = check_recipes(
        by_field(augment), SCHEMA, fields, dict.fromkeys(fields, SAME), entry_salts(augment)
    )
    ids, dims = np.arange(SAMPLES), np.full((SAMPLES, 2), 64, np.int32)
    return {
        name: draw(recipe, ids=ids, dims=dims, seed=3, epoch=1)
        for name, recipe in recipes.images.items()
    }


def correlation(one: dict[str, Any], other: dict[str, Any]) -> float:
    """The largest between the draws of two fields: crop centres along both axes, and flips."""
    values = [
        np.column_stack([each["start"] + each["shape"] / 2, each["mirror"]])
        for each in (one, other)
    ]
    pairs = zip(values[0].T, values[1].T, strict=True)
    return max(abs(float(np.corrcoef(a, b)[0, 1])) for a, b in pairs)


def alike(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return all(np.array_equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("second", [CROP, tuple(CROP), OTHER], ids=["same", "equal", "another"])
def test_entries_of_a_mapping_draw_apart(second: Any) -> None:
    found = drawn({"v1": CROP, "v2": second}, "v1", "v2")
    assert correlation(found["v1"], found["v2"]) < 0.15
    assert abs(found["v1"]["mirror"].mean() - 0.5) < 0.1


def test_a_tuple_shares_its_draws_in_any_order() -> None:
    found = drawn({("v1", "v2"): CROP, "v3": CROP}, "v1", "v2", "v3")
    assert alike(found["v1"], found["v2"])
    assert correlation(found["v1"], found["v3"]) < 0.15
    turned = drawn({"v3": CROP, ("v2", "v1"): CROP}, "v1", "v2", "v3")
    assert all(alike(found[name], turned[name]) for name in found)


def test_a_list_and_a_single_entry_add_nothing_to_the_key() -> None:
    alone = drawn(CROP, "v1", "v2")
    assert alike(alone["v1"], alone["v2"])
    assert alike(alone["v1"], drawn({"v1": CROP}, "v1")["v1"])
    assert alike(alone["v1"], drawn({("v1", "v2"): CROP}, "v1", "v2")["v2"])
    # What it was before entries drew apart, byte for byte.
    assert alone["v1"]["start"][:3].tolist() == [[2, 1], [26, 1], [15, 25]]
    assert not alike(alone["v1"], drawn({"v1": CROP, "v2": CROP}, "v1", "v2")["v1"])


def test_salts_are_stable() -> None:
    salts = entry_salts({"v1": (), ("b", "a"): ()})
    assert salts == dict(a=863998162420618712, b=863998162420618712, v1=16331001930283326212)
    assert entry_salts({"v1": ()}) == entry_salts(CROP) == entry_salts(None) == {}


def test_arrays_draw_apart_too() -> None:
    schema = Schema({name: Array("float32", (64, 64)) for name in "xyz"})
    op = RandomCrop(8)

    def corners(augment: Any) -> dict[str, Any]:
        crops = check_array_crops(by_field(augment), schema, tuple("xyz"), entry_salts(augment))
        parts = ArrayDraws(crops=crops, seed=3).before(np.arange(SAMPLES), 1)
        return {name: part.corners[:, 0] for name, part in parts.items()}

    shared = corners([op])
    assert np.array_equal(shared["x"], shared["y"])
    apart = corners({("x", "y"): [op], "z": [op]})
    assert np.array_equal(apart["x"], apart["y"])
    assert abs(np.corrcoef(apart["x"], apart["z"])[0, 1]) < 0.15
    assert not np.array_equal(shared["x"], apart["x"])


def test_keys_that_cannot_be() -> None:
    with pytest.raises(RecipeError, match='"v1" is in several of the keys'):
        by_field({"v1": CROP, ("v1", "v2"): CROP})
    with pytest.raises(RecipeError, match="is in the list of"):
        by_field({("v1", "v2"): [Map(len, ("v1", "v2"))]})
    assert by_field({("v1", "v2"): CROP}) == {"v1": CROP, "v2": CROP}


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Samples whose two pictures are the same bytes."""
    root = tmp_path_factory.mktemp("pairs")
    files: dict[str, bytes] = {}
    for number in range(12):
        picture = images.encoded(images.picture(number, 48, 48), "PNG")
        files |= {f"{number:02d}.v1.png": picture, f"{number:02d}.v2.png": picture}
    (root / "pairs-0.tar").write_bytes(tars.archive(files))
    return root


def batches(root: Path, augment: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    dataset = Dataset(root, fields={"v1": "v1.png", "v2": "v2.png"})
    with DataLoader(dataset, seed=3, augment=augment, batch_size=4, **options) as loader:
        one, other = zip(*loader, strict=True)
    return torch.cat(one), torch.cat(other)


def test_two_views_of_a_dataset_are_two(pairs: Path) -> None:
    recipe = [RandomResizedCrop(16), RandomHorizontalFlip(), RandomErasing(p=1.0)]
    one, other = batches(pairs, {"v1": recipe, "v2": recipe})
    assert not any(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    for shared in (recipe, {("v1", "v2"): recipe}):
        one, other = batches(pairs, shared)
        assert torch.equal(one, other)


@pytest.mark.parametrize("key", [(), (1,), 1, ("v1", None)])
def test_a_key_is_a_name_or_a_tuple_of_names(pairs: Path, key: Any) -> None:
    with pytest.raises(ConfigError, match="by a tuple of fields that share its draws"):
        batches(pairs, {key: CROP})
