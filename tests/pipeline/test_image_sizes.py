"""Images of different sizes in one batch: as a list, padded to one size, or of a size per batch."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from PIL import Image

from penstock.augment import (
    CenterCrop,
    ColorJitter,
    Letterbox,
    LongestSide,
    MixUp,
    Normalize,
    Pad,
    RandomErasing,
    RandomHorizontalFlip,
    RandomIoUCrop,
    RandomRotation,
    Resize,
    SanitizeBoxes,
    check_recipe,
    draw_with_moves,
)
from penstock.cache import ConfigError, RecipeError
from penstock.pipeline import DataLoader, World
from penstock.readers import ANY_SIZE, Dataset, ImageFacts
from penstock.readers.fieldtypes import Boxes, Mask
from tests import tars
from tests.conftest import photograph

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.filterwarnings("ignore:Sample .* is bad")

N = 24
BAD = 7
FIELDS = ("image", "mask", "boxes", "image.size", "image.mask", "id")
SCHEMA: Any = {"boxes": Boxes(of="image"), "mask": Mask(of="image")}
SIZES = [(20 + 7 * k % 31, 24 + 11 * k % 37) for k in range(N)]


def png(pixels: Any) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def files_of(*, without: tuple[int, ...] = (), damaged: tuple[int, ...] = ()) -> dict[str, bytes]:
    """Photographs of different sizes, with the mask of their bright pixels, and a box."""
    files = {}
    for number, (height, width) in enumerate(SIZES):
        pixels = np.resize(photograph(number), (height, width, 3))
        picture = png(pixels)
        files[f"{number:02d}.other.png"] = png(np.full((8, 8, 3), number, np.uint8))
        if number in without:
            continue
        if number in damaged:
            picture = picture[: len(picture) // 2] + bytes(50) + picture[len(picture) // 2 + 50 :]
        files[f"{number:02d}.image.png"] = picture
        files[f"{number:02d}.mask.png"] = png((pixels[..., 0] > 127).astype(np.uint8))
        box = io.BytesIO()
        np.save(box, np.array([[2, 3, width - 4, height - 5]], np.float32))
        files[f"{number:02d}.boxes.npy"] = box.getvalue()
    return files


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("pictures")
    (place / "pictures.tar").write_bytes(tars.archive(files_of()))
    return place


def batches(place: Path, augment: Any, *, fields: Any = FIELDS, **options: Any) -> list[Any]:
    with (
        Dataset(place, fields=fields, schema=SCHEMA) as dataset,
        DataLoader(dataset, augment=augment, seed=3, as_dict=True, **options) as loader,
    ):
        return list(loader)


def by_id(found: list[Any]) -> dict[int, dict[str, Any]]:
    """Each sample without its padding."""
    samples = {}
    for batch in found:
        for row, number in enumerate(batch["id"].tolist()):
            height, width = batch["image.size"][row].tolist()
            image, mask, shown = (batch[name][row] for name in ("image", "mask", "image.mask"))
            assert shown[:height, :width].all()
            assert shown.sum() == height * width
            samples[number] = {
                "image": image[:, :height, :width],
                "mask": mask[:height, :width],
                "boxes": batch["boxes"][row],
            }
    return samples


def assert_same(one: dict[int, Any], other: dict[int, Any]) -> None:
    assert one.keys() == other.keys()
    for number, sample in one.items():
        for name, value in sample.items():
            assert torch.equal(value, other[number][name]), (number, name)


RECIPE = [LongestSide(32), RandomHorizontalFlip()]


@pytest.mark.parametrize("more", [[], [Normalize()], [ColorJitter(0.3, hue=0.1)]])
def test_a_sample_is_the_same_in_a_list_and_padded_in_any_batch(pictures: Path, more: Any) -> None:
    alone = by_id(batches(pictures, [*RECIPE, *more], batch_size=1))
    assert {max(each["image"].shape[1:]) for each in alone.values()} == {32}
    assert len({each["image"].shape for each in alone.values()}) > 5
    lists = batches(pictures, [*RECIPE, *more], batch_size=7)
    assert isinstance(lists[0]["image"], list)
    assert_same(by_id(lists), alone)
    padded = batches(pictures, [*RECIPE, *more, Pad(to_multiple=8, value=2)], batch_size=7)
    for batch in padded:
        images, sizes = batch["image"], batch["image.size"]
        assert images.shape[2:] == tuple((-(-sizes.amax(0) // 8) * 8).tolist())
        assert batch["mask"].shape == batch["image.mask"].shape == (len(images), *images.shape[2:])
        assert (images.permute(0, 2, 3, 1)[~batch["image.mask"]] == 2).all()
        assert not batch["mask"][~batch["image.mask"]].any()
    assert_same(by_id(padded), alone)


def test_images_that_no_operation_resizes_come_as_they_are(pictures: Path) -> None:
    for number, sample in by_id(batches(pictures, [SanitizeBoxes()], batch_size=5)).items():
        height, width = SIZES[number]
        assert sample["image"].shape == (3, height, width)
        assert torch.equal(sample["mask"], (sample["image"][0] > 127).byte())
        assert sample["boxes"].tolist() == [[2, 3, width - 4, height - 5]]


def test_a_fixed_size_of_padding(pictures: Path) -> None:
    (batch,) = batches(
        pictures, [LongestSide(32), Pad(to=(32, 40), mask_fill=255)], batch_size=N, shuffle=False
    )
    assert batch["image"].shape == (N, 3, 32, 40)
    assert (batch["mask"][~batch["image.mask"]] == 255).all()
    assert batch["mask"][batch["image.mask"]].max() == 1


def test_a_letterbox_shows_the_image_in_its_middle(pictures: Path) -> None:
    for batch in batches(pictures, [Letterbox((32, 40), fill=9)], batch_size=6):
        for row, number in enumerate(batch["id"].tolist()):
            height, width = SIZES[number]
            scale = min(32 / height, 40 / width)
            size = (round(height * scale), round(width * scale))
            assert batch["image.size"][row].tolist() == list(size)
            top, left = (32 - size[0]) // 2, (40 - size[1]) // 2
            shown = torch.zeros(32, 40, dtype=torch.bool)
            shown[top : top + size[0], left : left + size[1]] = True
            assert torch.equal(batch["image.mask"][row], shown)
            assert (batch["image"][row][:, ~shown] == 9).all()
            x, y = size[1] / width, size[0] / height
            wanted = [left + 2 * x, top + 3 * y, left + (width - 4) * x, top + (height - 5) * y]
            np.testing.assert_allclose(batch["boxes"][row][0], wanted, atol=1e-4)


def test_a_size_for_each_batch_is_the_same_on_all_ranks(pictures: Path) -> None:
    recipe = [Letterbox([16, 24, 32, 40, 48], per="batch"), RandomHorizontalFlip(), Normalize()]
    options: Any = {"global_batch_size": 4, "fields": ("image", "id"), "drop_last": True}
    whole = batches(pictures, recipe, **options)
    halves = [batches(pictures, recipe, world=World(rank, 2), **options) for rank in range(2)]
    assert len({batch["image"].shape[2:] for batch in whole}) > 1
    for batch, *parts in zip(whole, *halves, strict=True):
        assert torch.equal(batch["image"], torch.cat([part["image"] for part in parts]))
        assert torch.equal(batch["id"], torch.cat([part["id"] for part in parts]))


def test_images_of_a_size_for_each_batch_are_rotated(pictures: Path) -> None:
    sizes = [16, 24, 32, 40]
    recipe = [Letterbox(sizes, per="batch"), RandomRotation((90, 90)), Pad(to_multiple=20)]
    still = [recipe[0], recipe[2]]
    rotated, plain = (batches(pictures, ops, batch_size=4) for ops in (recipe, still))
    assert len({batch["image"].shape for batch in rotated}) > 1
    for one, other in zip(rotated, plain, strict=True):
        side = int(other["image.mask"].any(1).any(0).nonzero().amax()) + 1
        side = min(size for size in sizes if size >= side)
        for name in ("image", "mask"):
            turned = torch.rot90(other[name][..., :side, :side], dims=(-2, -1))
            assert torch.equal(one[name][..., :side, :side], turned)


@pytest.mark.parametrize("pad", [[], [Pad(to_multiple=8)]])
def test_bad_and_missing_images_change_no_other(tmp_path: Path, pictures: Path, pad: Any) -> None:
    (tmp_path / "some.tar").write_bytes(tars.archive(files_of(without=(3, 4), damaged=(BAD,))))
    with Dataset(tmp_path, schema=SCHEMA) as dataset:
        dataset.open(verify=credulous)
    fields = (*FIELDS, "image.present", "mask.present", "boxes.present")
    recipe = [*RECIPE, *pad]
    alone = by_id(batches(pictures, recipe, batch_size=1))
    for size in (5, N):
        found = batches(tmp_path, recipe, batch_size=size, fields=fields, max_bad=0.5)
        seen = [number for batch in found for number in batch["id"].tolist()]
        assert len(seen) == N
        assert BAD not in seen
        samples = by_id(found)
        for number in (3, 4):
            assert samples[number]["image"].numel() == samples[number]["mask"].numel() == 0
        others = [number for number in samples if number not in (3, 4)]
        assert_same({n: samples[n] for n in others}, {n: alone[n] for n in others})


def credulous(samples: Any) -> list[Any]:
    """Believe that anything is an image."""
    sizes = [Image.open(io.BytesIO(sample.tobytes())).size for sample in samples]
    return [ImageFacts(height=h, width=w, channels=3, codec="png") for w, h in sizes]


def test_marked_samples_of_a_padded_batch_are_black(tmp_path: Path) -> None:
    (tmp_path / "some.tar").write_bytes(tars.archive(files_of(damaged=(BAD,))))
    with Dataset(tmp_path, schema=SCHEMA) as dataset:
        dataset.open(verify=credulous)
    for pad in ([], [Pad(to_multiple=16)]):
        recipe = [LongestSide(32), *pad]
        found = batches(tmp_path, recipe, batch_size=9, pad="mask", shuffle=False, max_bad=0.5)
        valid = torch.cat([batch["valid"] for batch in found]).tolist()
        assert valid == [number != BAD and number < N for number in range(27)]
        assert not found[0]["image"][BAD].any()
        assert found[0]["image"][BAD - 1].any()


REFUSED: Any = {
    "of one size": [LongestSide(32), RandomRotation(10)],
    "Erasing": [LongestSide(32), Normalize(), RandomErasing()],
    "nothing is cut off": [LongestSide(32), Pad(to=24)],
    "MixUp": [LongestSide(32), Normalize(), Pad(to_multiple=8), MixUp()],
    "wanted one of them": lambda: Pad(to=3, to_multiple=8),
    "wanted Pad": lambda: Pad(),
    "wanted a short side": lambda: Resize((10, 20), max_size=30),
    "got size=None and shorter=None": lambda: Resize(max_size=30),
    "different ones": lambda: LongestSide((5, 5)),
    "both pad the images": [Pad(to_multiple=8), Pad(to=64)],
    "a pair of numbers is one size": lambda: Letterbox([16, 24], per="batch"),
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_cant_be_is_said_at_once(pictures: Path, words: str) -> None:
    recipe = REFUSED[words]
    with pytest.raises(RecipeError, match=words):
        batches(pictures, [recipe()] if callable(recipe) else recipe, batch_size=4)


def test_a_forgotten_crop_is_an_error_unless_something_follows_the_image(pictures: Path) -> None:
    with pytest.raises(RecipeError, match="A batch needs one size"):
        batches(pictures, [Resize(32)], batch_size=4, fields=("image", "id"))
    assert isinstance(batches(pictures, [Resize(32)], batch_size=4)[0]["image"], list)
    fixed = [Resize(32), CenterCrop(32)]
    assert batches(pictures, fixed, batch_size=4)[0]["image"].shape == (4, 3, 32, 32)


def test_sizes_need_their_image(pictures: Path) -> None:
    for fields in (("image.size", "id"), ("boxes", "boxes.size")):
        with pytest.raises(ConfigError, match="in addition to selected images"):
            batches(pictures, None, fields=fields, batch_size=2)


def test_a_window_overlaps_with_a_box_as_much_as_is_wanted(pictures: Path) -> None:
    fields = ("image", "boxes", "image.size", "id")
    recipe = [RandomHorizontalFlip(), RandomIoUCrop(sampler_options=(0.6,)), RandomHorizontalFlip()]
    alone: dict[int, Any] = {}
    for batch in batches(pictures, recipe, fields=fields, batch_size=1):
        (number,), size = batch["id"].tolist(), batch["image.size"][0].tolist()
        height, width = SIZES[number]
        alone[number] = batch["image"][0]
        assert 0.3 * height - 1 < size[0] <= height
        assert 0.3 * width - 1 < size[1] <= width
        assert 0.5 <= size[1] / size[0] <= 2
        x1, y1, x2, y2 = batch["boxes"][0][0].tolist()
        assert 0 <= x1 <= x2 <= size[1]
        assert 0 <= y1 <= y2 <= size[0]
        shared = (x2 - x1) * (y2 - y1)
        box = (width - 6) * (height - 8)
        assert shared / (size[0] * size[1] + box - shared) > 0.6 - 1e-5
    assert len({each.shape for each in alone.values()}) > N // 2
    for batch in batches(pictures, recipe, fields=fields, batch_size=7):
        for number, image in zip(batch["id"].tolist(), batch["image"], strict=True):
            assert torch.equal(image, alone[number])


def test_boxes_outside_a_window_go_and_images_without_boxes_stay() -> None:
    crop = RandomIoUCrop(min_scale=0.4, max_scale=0.6, sampler_options=(0.0,))
    boxes = np.array([[0, 0, 10, 10], [70, 70, 100, 100], [0, 0, 10, 10]], np.float32)
    checked = check_recipe([crop], images=ANY_SIZE)
    dims = np.full((40, 2), 100, np.int32)
    owner = np.array([0, 0, 1])
    kept = []
    for epoch in range(20):
        _, moves = draw_with_moves(
            checked, ids=np.arange(40), dims=dims, seed=1, epoch=epoch, boxes=(boxes, owner)
        )
        moved = moves.move_boxes(boxes, owner)
        assert (moves.sizes[:, 2:] == 100).all()
        assert (moves.sizes[:, :2] >= 40).all()
        assert (moves.sizes[:, :2] <= 60).all()
        kept.append((moved[:2, 2:] > moved[:2, :2]).all(axis=1).tolist())
        assert any(kept[-1])
    assert [True, False] in kept
    assert [False, True] in kept
    unchanged = check_recipe([RandomIoUCrop(sampler_options=(1.0,))], images=ANY_SIZE)
    _, moves = draw_with_moves(
        unchanged, ids=np.arange(40), dims=dims, seed=1, epoch=0, boxes=(boxes, owner)
    )
    assert (moves.sizes == 100).all()
    np.testing.assert_array_equal(moves.move_boxes(boxes, owner), boxes)


def test_a_crop_by_boxes_needs_boxes(pictures: Path) -> None:
    with pytest.raises(RecipeError, match="RandomIoUCrop needs the boxes"):
        batches(pictures, [RandomIoUCrop()], fields=("image", "id"), batch_size=2)


def test_a_job_with_sizes_of_batches_resumes_and_keeps_images_in_memory(pictures: Path) -> None:
    def loader(recipe: Any, **options: Any) -> DataLoader:
        dataset = Dataset(pictures, fields=FIELDS, schema=SCHEMA)
        return DataLoader(
            dataset, batch_size=5, shuffle=True, seed=3, as_dict=True, augment=recipe, **options
        )

    for recipe in (
        [Letterbox([16, 24, 32], per="batch"), RandomHorizontalFlip()],
        [*RECIPE, Pad(to_multiple=8)],
        RECIPE,
    ):
        with loader(recipe) as whole, loader(recipe, resident=True) as resident:
            found = [list(whole) for _ in range(2)]
            kept = [list(resident) for _ in range(2)]
        with loader(recipe) as first:
            batches = iter(first)
            next(batches)
            state = first.state_dict()
        with loader(recipe) as second:
            second.load_state_dict(state)
            rest = list(second)
        pairs = [*zip(found[0] + found[1], kept[0] + kept[1], strict=True)]
        for one, other in (*pairs, *zip(found[0][1:], rest, strict=True)):
            assert one["id"].tolist() == other["id"].tolist()
            same = zip(one["image"], other["image"], strict=True)
            assert all(torch.equal(ours, theirs) for ours, theirs in same)
