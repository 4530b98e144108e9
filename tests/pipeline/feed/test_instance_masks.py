"""Instance masks through the loader: each is where a mask of its own would be, whatever moves the
image, and goes with its box. They are the same in a folder, a table and a pack.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from penstock import DataLoader, Dataset, Order, pack
from penstock.augment import (
    ColorJitter,
    InstanceIds,
    Letterbox,
    LongestSide,
    Map,
    Pad,
    RandomAffine,
    RandomCrop,
    RandomHorizontalFlip,
    RandomPerspective,
    RandomResizedCrop,
    RandomVerticalFlip,
    Resize,
    SanitizeBoxes,
    ScaleJitter,
)
from penstock.cache import BadSampleError, ConfigError, DatasetError, PenstockWarning, RecipeError
from penstock.readers.fieldtypes import Array, Boxes, FieldType, Image, InstanceMasks, Mask, Schema
from tests import images
from tests.pipeline.feed.memory import Memory
from tests.readers.fieldtypes.segmentations import compressed, decoded, runs_of

if TYPE_CHECKING:
    from pathlib import Path

N, HEIGHT, WIDTH = 12, 40, 48
COUNTS = np.arange(N) % 4
PLACES = np.random.default_rng(1).uniform(-3, 40, (N, 4, 2, 3, 2))
PLAIN: dict[str, Any] = {"batch_size": 5, "shuffle": True, "seed": 3, "order": Order(lanes=2)}


def polygons(i: int, box: int) -> list[list[float]]:
    """One or two triangles."""
    return PLACES[i, box, : 1 + box % 2].reshape(-1, 6).round(2).tolist()


def full(i: int) -> np.ndarray[Any, Any]:
    """The masks of a sample, of which the third has none."""
    found = [decoded(polygons(i, box) if box < 2 else None, HEIGHT, WIDTH) for box in range(4)]
    return np.stack(found)[: COUNTS[i]]


def segmentations(i: int) -> list[Any]:
    """Polygons, runs, and none."""
    mask = decoded(polygons(i, 1), HEIGHT, WIDTH)
    runs = {"size": [HEIGHT, WIDTH], "counts": compressed(runs_of(mask))}
    return [polygons(i, 0), runs, None, None][: COUNTS[i]]


def corners(i: int) -> np.ndarray[Any, Any]:
    places = PLACES[i, : COUNTS[i], 0]
    low, high = places.min(axis=1), places.max(axis=1)
    return np.concatenate([low, high], axis=1).astype(np.float32)


TYPES: dict[str, FieldType] = {
    "image": Image(),
    "boxes": Boxes(of="image"),
    "masks": InstanceMasks(of="boxes"),
    "number": Array("int64", (None,), of="boxes"),
    **{f"mask{k}": Mask(of="image", dtype="uint8") for k in range(4)},
}
COLUMNS: dict[str, list[Any]] = {
    "image": [np.full((HEIGHT, WIDTH, 3), i, np.uint8) for i in range(N)],
    "boxes": [corners(i) for i in range(N)],
    "masks": [json.dumps(segmentations(i)).encode() for i in range(N)],
    "number": [np.arange(COUNTS[i]) for i in range(N)],
    **{f"mask{k}": [np.zeros((HEIGHT, WIDTH), np.uint8) for _ in range(N)] for k in range(4)},
}
for i in range(N):
    for k in range(COUNTS[i]):
        COLUMNS[f"mask{k}"][i] = full(i)[k]
MASKS = tuple(f"mask{k}" for k in range(4))


def batches(recipe: Any, *fields: str, **options: Any) -> list[dict[str, Any]]:
    source = Memory(TYPES, COLUMNS, fields=fields or ("id", "image", "boxes", "masks", "number"))
    with DataLoader(source, augment=recipe, as_dict=True, **PLAIN, **options) as loader:
        return list(loader)


PADDED = Pad(to_multiple=32)
WARPS = [RandomAffine(40, translate=(0.2, 0.1)), RandomVerticalFlip(), RandomPerspective(0.4, 1)]
RECIPES: dict[str, list[Any]] = {
    "still": [],
    "crop": [RandomCrop((30, 64), padding=9, mask_fill=7), RandomHorizontalFlip()],
    "resize": [RandomResizedCrop((33, 20)), RandomVerticalFlip(), RandomHorizontalFlip()],
    "larger": [Resize((97, 60)), RandomHorizontalFlip()],
    "list": [LongestSide((30, 44)), RandomHorizontalFlip()],
    "padded": [ScaleJitter((40, 40), scale_range=(0.5, 1.5)), RandomVerticalFlip(), PADDED],
    "letterbox": [RandomHorizontalFlip(), Letterbox((50, 40), mask_fill=7)],
    "warp and pad": [Resize((33, 37)), *WARPS, PADDED],
    "warp": [RandomHorizontalFlip(), Resize((44, 40)), ColorJitter(0.1), *WARPS],
}


@pytest.mark.parametrize("name", RECIPES)
def test_each_mask_is_where_one_of_its_own_would_be(name: str) -> None:
    """And the boxes that are dropped take theirs along."""
    recipe = RECIPES[name]
    everything = ("id", "image", "boxes", "masks", "number", *MASKS)
    dropped = 0
    whole = batches(recipe, *everything)
    for each, some in zip(whole, batches([*recipe, SanitizeBoxes(min_area=200)]), strict=True):
        assert torch.equal(each["id"], some["id"])
        for row, sample_id in enumerate(each["id"].tolist()):
            wanted = torch.stack([each[mask][row] for mask in MASKS])[: COUNTS[sample_id]]
            wanted[wanted == 7] = 0  # the semantic masks' own value outside
            found, left = each["masks"][row], some["masks"][row]
            assert found.dtype == torch.uint8
            assert torch.equal(found, wanted)
            assert len(left) == len(some["boxes"][row]) == len(some["number"][row])
            assert torch.equal(left, found[some["number"][row]])
            dropped += len(found) - len(left)
    assert dropped


@pytest.mark.parametrize("name", ["crop", "list", "padded"])
def test_ids_are_the_places_of_the_boxes_that_are_left(name: str) -> None:
    recipe = [*RECIPES[name], SanitizeBoxes(min_area=60)]
    for each, map_ in zip(batches(recipe), batches([*recipe, InstanceIds()]), strict=True):
        assert map_["masks"].dtype == torch.int32
        if name != "list":
            assert map_["masks"].shape == (len(each["id"]), *each["image"].shape[2:])
        for image, ids in zip(each["image"], map_["masks"], strict=True):
            assert ids.shape == image.shape[1:]
        for bits, ids in zip(each["masks"], map_["masks"], strict=True):
            numbers = torch.arange(1, 1 + len(bits), dtype=torch.int32)[:, None, None]
            last = torch.cat([ids[None] * 0, bits * numbers]).amax(dim=0)
            assert torch.equal(ids, last.to(torch.int32))


def test_masks_may_be_padded_to_one_tensor() -> None:
    (first, *_) = batches([*RECIPES["resize"], Pad("masks", to=4)], "image", "masks")
    assert first["masks"].shape == (5, 4, 33, 20)


def test_masks_of_images_of_different_sizes_need_no_boxes_beside_them() -> None:
    images = [np.zeros((20 + i, 30, 3), np.uint8) for i in range(N)]
    values = [[[[2, 2, 9, 2, 9, 9 + i]], None] for i in range(N)]
    columns = {"image": images, "masks": [json.dumps(each).encode() for each in values]}
    types = {name: TYPES[name] for name in ("image", "boxes", "masks")}
    columns["boxes"] = [np.ones((2, 4), np.float32)] * N
    source = Memory(types, columns, fields=("image", "masks"))
    with DataLoader(source, batch_size=N) as loader:
        ((images, masks),) = loader
    assert [each.shape for each in masks] == [(2, *image.shape[1:]) for image in images]
    for each, value in zip(masks, values, strict=True):
        assert each[0].tolist() == decoded(value[0], *each.shape[1:]).tolist()


def test_masks_alone_need_neither_image_nor_boxes() -> None:
    for each in batches(None, "id", "masks"):
        for sample_id, found in zip(each["id"].tolist(), each["masks"], strict=True):
            assert found.tolist() == full(sample_id).tolist()


def test_a_function_gets_and_returns_segmentations() -> None:
    def flipped(masks: Any) -> list[Any]:
        return [*masks][::-1]

    for each in batches([Map(flipped, "masks"), *RECIPES["still"]], "id", "masks"):
        for sample_id, found in zip(each["id"].tolist(), each["masks"], strict=True):
            assert found.tolist() == full(sample_id)[::-1].tolist()


def test_a_bad_sample_of_an_evaluation_has_no_masks() -> None:
    def refuse(number: Any, masks: Any) -> Any:
        if len(number) == 3:
            raise BadSampleError("three boxes")
        return number, masks

    recipe = [Map(refuse, ("number", "masks")), SanitizeBoxes(min_size=0, min_area=0)]
    with pytest.warns(PenstockWarning, match="three boxes"):
        seen = batches(recipe, pad="mask", max_bad=1.0)
    for each in seen:
        for valid, boxes, masks in zip(each["valid"], each["boxes"], each["masks"], strict=True):
            assert len(boxes) == len(masks)
            assert bool(valid) or not len(masks)
    assert sum(int((~each["valid"]).sum()) for each in seen) >= 3


def test_refusals_name_what_to_do() -> None:
    with pytest.raises(RecipeError, match=r'"boxes", which isn\'t selected.*Select "boxes" too'):
        batches([SanitizeBoxes()], "image", "masks")
    with pytest.raises(RecipeError, match=r'InstanceIds.*"boxes" is Boxes.*wanted InstanceMasks'):
        batches([InstanceIds("boxes")])
    with pytest.raises(RecipeError, match=r"Pad.*don't differ in length"):
        batches([*RECIPES["resize"], InstanceIds(), Pad("masks")])
    with pytest.raises(RecipeError, match='"other" is no selected field'):
        batches([InstanceIds("other")])
    with pytest.raises(ConfigError, match='"image" is no field of type Boxes'):
        Schema({"image": Image(), "masks": InstanceMasks(of="image")})


def test_masks_of_another_size_than_their_image_end_the_job() -> None:
    runs = {"size": [3, 4], "counts": [12]}
    columns = {**COLUMNS, "masks": [json.dumps([runs] * COUNTS[i]).encode() for i in range(N)]}
    source = Memory(TYPES, columns, fields=("image", "masks"))
    with (
        DataLoader(source, batch_size=4) as loader,
        pytest.raises(DatasetError, match="4 wide and 3 high and its image 48 wide and 40 high"),
    ):
        list(loader)


def test_a_folder_with_a_table_and_its_pack_have_the_same_masks(tmp_path: Path) -> None:
    folder = tmp_path / "street"
    folder.mkdir()
    lines = []
    for i in range(N):
        image = np.full((HEIGHT, WIDTH, 3), i, np.uint8)
        (folder / f"{i:02}.png").write_bytes(images.png(image))
        sample = {"boxes": corners(i).tolist(), "masks": segmentations(i)}
        lines.append(json.dumps({"file_name": f"{i:02}.png", **sample}))
    (folder / "metadata.jsonl").write_text("\n".join(lines))
    schema = {"boxes": Boxes(of="image"), "masks": InstanceMasks(of="boxes")}
    fields = ("id", "image", "boxes", "masks")
    source = Dataset(folder, schema=schema, fields=fields)
    pack(source, tmp_path / "pack")
    for dataset in (source, Dataset(tmp_path / "pack", fields=fields)):
        with DataLoader(dataset, batch_size=N, as_dict=True) as loader:
            (batch,) = loader
        for image, found in zip(batch["image"], batch["masks"], strict=True):
            assert found.tolist() == full(int(image[0, 0, 0])).tolist()
    dataset = Dataset(tmp_path / "pack")
    assert dataset.schema["masks"] == InstanceMasks(of="boxes")


def test_files_of_masks_are_checked_against_their_boxes_and_image(tmp_path: Path) -> None:
    for name in ("image", "boxes", "masks"):
        (tmp_path / "set" / name).mkdir(parents=True)
    for i, (count, size) in enumerate([(1, [9, 8]), (2, [9, 8]), (1, [8, 9])]):
        runs = [{"size": size, "counts": [24, 48]}] * count
        pixels = np.zeros((9, 8, 3), np.uint8)
        (tmp_path / "set" / "image" / f"{i}.png").write_bytes(images.png(pixels))
        (tmp_path / "set" / "masks" / f"{i}.json").write_text(json.dumps(runs))
        np.save(tmp_path / "set" / "boxes" / f"{i}.npy", np.ones((1, 4), np.float32))
    schema = {"boxes": Boxes(of="image"), "masks": InstanceMasks(of="boxes")}
    places = {name: name for name in ("image", "boxes", "masks")}
    dataset = Dataset(tmp_path / "set", fields=places, schema=schema, allow_left_out=1.0)
    assert len(dataset) == 1
    reasons = sorted(dataset.left_out)
    assert "masks: 2 rows for the 1 boxes" in reasons[0]
    assert "masks: it is 9 wide and 8 high, and its image is 8 wide and 9 high" in reasons[1]
