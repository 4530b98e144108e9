"""Test how samples are drawn: images with their masks, boxes, names and points."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from PIL import ImageFont

from penstock import Boxes, ClassLabel, Image, Keypoints, Mask
from penstock.readers import (
    Picture,
    Reading,
    class_color,
    contact_sheet,
    displayed_pixels,
    pictures_of,
    spread,
)

BLACK = np.zeros((3, 40, 60), np.uint8)


def drawn(picture: Picture) -> np.ndarray[Any, Any]:
    """The pixels of the one picture of a sheet that is as wide as the picture."""
    height, width = picture.pixels.shape[:2]
    return np.asarray(contact_sheet([picture], width=width + 6))[6 : 6 + height, 6 : 6 + width]


@pytest.mark.parametrize(
    "shape", [(1, 8, 8, 3), (7, 32, 20, 1), (40, 224, 224, 3), (3, 16, 300, 3)]
)
def test_a_contact_sheet_holds_every_image(shape: tuple[int, int, int, int]) -> None:
    caption = "a caption that is much too long " * 9
    images = np.zeros(shape, np.uint8)
    sheet = np.asarray(contact_sheet([Picture(pixels=each, caption=caption) for each in images]))
    assert sheet.shape[1] < 1400
    assert (sheet == 0).all(-1).mean() > 0.3
    assert (sheet == 255).all(-1).any()


def test_masks_boxes_and_points_are_drawn_over_their_image() -> None:
    pixels = np.zeros((320, 320, 3), np.uint8)
    mask, instance = np.zeros((2, 320, 320), np.int64)
    mask[40:120, 40:120] = 2
    instance[150:300, 180:290] = 1
    picture = Picture(
        pixels=pixels,
        masks=[mask, np.ones((2, 2), np.uint8)],
        instances=instance[None],
        boxes=np.array([[150, 150, 300, 300], [5, 5, 5, 5], [np.nan, 0, 1, 1]], np.float32),
        names=["a name", "none", "none"],
        points=[np.array([[250, 50], [np.nan, 0]], np.float32)],
    )
    seen = drawn(picture)
    first = list(class_color(1))
    assert seen[60, 60].tolist() == [round(each / 2) for each in class_color(2)]
    assert seen[150, 225].tolist() == seen[225, 150].tolist() == first
    assert seen[225, 170].tolist() == [0, 0, 0]
    assert seen[225, 240].tolist() == [round(each / 2) for each in first]
    assert seen[225, 180].tolist() == first  # the outline
    assert seen[50, 250].tolist() == first
    assert (seen[130:149, 150:190] == first).all(-1).mean() > 0.3  # the name's ground
    assert not seen[:30, :30].any()
    assert not pixels.any()


def test_neighbouring_classes_have_colours_far_apart() -> None:
    colors = np.array([class_color(number) for number in range(64)], int)
    assert len({tuple(each) for each in colors.tolist()}) == 64
    assert np.abs(colors[1:] - colors[:-1]).max(axis=1).min() >= 64
    assert colors[1:].max(axis=1).min() > 150
    assert class_color(0) == (0, 0, 0)


def test_pixels_are_scaled_back() -> None:
    raw = np.random.default_rng(0).integers(0, 256, (3, 8, 5), np.uint8)
    mean, std = np.array([[0.4, 0.5, 0.6], [0.2, 0.3, 0.4]], np.float32)
    seen = (raw / np.float32(255) - mean[:, None, None]) / std[:, None, None]
    assert np.array_equal(displayed_pixels(seen, scaling=(mean, std)), raw)
    assert np.array_equal(displayed_pixels(raw, scaling=(mean, std)), raw)
    assert displayed_pixels(np.float32([[[np.nan, 9]]]), scaling=((0.0,), (1.0,))).max() == 255


def test_types_say_what_a_value_is() -> None:
    schema = {
        "left": Image(),
        "right": Image(),
        "things": Boxes(of="left"),
        "corners": Keypoints(of="right"),
        "ground": Mask(of="left"),
        "kind": ClassLabel(("cat", "dog")),
    }
    sample = {
        "id": np.int64(7),
        "left": BLACK,
        "right": BLACK[:, :20, :20],
        "things": np.ones((2, 4), np.float32),
        "corners": np.ones((5, 2), np.float32),
        "ground": np.ones((40, 60), np.uint8),
        "kind": np.int64(1),
        "vector": np.ones((2, 4), np.float32),
        "text": "some words\nof text",
        "lacking": None,
    }
    left, right = pictures_of(sample, Reading(schema=schema))
    assert left.pixels.shape == (40, 60, 3)
    assert left.boxes is sample["things"]
    assert [len(left.masks), len(left.points)] == [1, 0]
    assert [len(right.masks), len(right.points), right.boxes] == [0, 1, None]
    assert left.caption == "#7 · dog · some words of text · left"
    assert left.names == []


def test_names_and_shapes_say_it_without_types() -> None:
    sample = {
        "image": BLACK.astype(np.float32),
        "boxes": np.ones((3, 4), np.float32),
        "labels": np.array([0, 5, 1]),
        "masks": np.ones((3, 40, 60), np.uint8),
        "keypoints": np.float32([[[1, 2, 2], [3, 4, 0]]] * 3),
        "area": np.ones(3, np.float32),
        "image.size": np.array([40, 60]),
        "image.mask": np.ones((40, 60), np.bool_),
    }
    (picture,) = pictures_of(sample, Reading(classes=("cat", "dog")))
    assert picture.names == ["cat", "5", "dog"]
    assert picture.instances is sample["masks"]
    assert picture.masks == []
    (points,) = picture.points
    assert np.isfinite(points).all(-1).tolist() == [[True, False]] * 3
    unnamed = dict(zip("abcd", list(sample.values())[:4], strict=True))
    unnamed["a"] = BLACK
    (same,) = pictures_of(unnamed, Reading(by_shape=True))
    assert same.names == ["0", "5", "1"]
    assert same.boxes is sample["boxes"]
    assert same.instances is sample["masks"]


def test_views_are_pictures_of_their_own() -> None:
    views = {"global": np.zeros((2, 3, 32, 32), np.uint8), "local": np.zeros((3, 3, 16, 16))}
    found = pictures_of({**views, "label": 4, "valid": False}, Reading())
    assert [each.caption for each in found] == [
        *(f"4 · not valid · global {number}" for number in range(2)),
        *(f"4 · not valid · local {number}" for number in range(3)),
    ]
    assert pictures_of({"keypoints": np.zeros((3, 9, 9)), "boxes": BLACK}, Reading()) == []


def test_places_are_spread() -> None:
    assert spread(0, 8) == []
    assert spread(3, 8) == [0, 1, 2]
    assert spread(100, 3) == [0, 50, 99] or spread(100, 3) == [0, 49, 99]


def test_captions_may_have_any_letters() -> None:
    try:
        ImageFont.truetype("DejaVuSans.ttf")
    except OSError:
        pytest.skip("needs the font DejaVu")
    pixels = np.zeros((40, 400, 3), np.uint8)
    sheets = [contact_sheet([Picture(pixels=pixels, caption=each)]) for each in ("zèbre", "zébre")]
    assert np.asarray(sheets[0]).tobytes() != np.asarray(sheets[1]).tobytes()
