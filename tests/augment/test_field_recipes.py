"""Test recipes over fields: which field follows which, invalid recipes, and the fields
of a batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.augment import (
    Apply,
    AutoAugment,
    ColorJitter,
    CutMix,
    Decode,
    FieldRecipes,
    FlipMove,
    GaussianBlur,
    MixUp,
    Normalize,
    Pad,
    RandAugment,
    RandomCrop,
    RandomErasing,
    RandomHorizontalFlip,
    RandomResizedCrop,
    Resize,
    SanitizeBoxes,
    TrivialAugmentWide,
    check_recipe,
    check_recipes,
    draw_with_moves,
    imagenet_train,
)
from penstock.cache import DatasetError, RecipeError
from penstock.readers import ImageRange
from penstock.readers.fieldtypes import (
    Array,
    Boxes,
    Bytes,
    ClassLabel,
    DenseColumn,
    FieldType,
    Image,
    Keypoints,
    ListColumn,
    Mask,
    RaggedColumn,
    Schema,
    Text,
    Tokens,
)
from tests.properties import examples

SCHEMA = Schema(
    {
        "image": Image(),
        "left": Image(),
        "mask": Mask(of="image"),
        "left_mask": Mask(of="left"),
        "boxes": Boxes(of="image", format="xywh"),
        "classes": Array("int64", (None,), of="boxes"),
        "points": Keypoints(of="left"),
        "caption": Text(),
        "tokens": Tokens(),
        "vector": Array("float32", (3,)),
        "label": ClassLabel(("a", "b")),
    }
)
SIZES = ImageRange(min_height=8, max_height=64, min_width=8, max_width=64)
SAME = ImageRange(min_height=24, max_height=24, min_width=32, max_width=32)
RANGES = {"image": SIZES, "left": SIZES}
CROP = (RandomResizedCrop(16), RandomHorizontalFlip())


def checked(augment: Any, *fields: str, ranges: Any = RANGES) -> FieldRecipes:
    return check_recipes(augment, SCHEMA, fields, ranges)


def followed(recipes: FieldRecipes) -> set[str]:
    """Return the images that other fields follow."""
    return {each.of for each in recipes.followers.values() if each.of in recipes.images}


def test_one_image_has_the_recipe_that_it_had() -> None:
    recipe = imagenet_train(32)
    found = checked(recipe, "image", "label", "id")
    assert found == FieldRecipes(
        fields=("image", "label", "id"),
        images={"image": check_recipe(recipe, images=SIZES)},
        followers={},
        columns={},
    )
    assert followed(found) == set()
    assert found.mixed is None


def test_a_list_acts_on_all_images_and_on_what_is_of_them() -> None:
    found = checked(CROP, "mask", "image", "left", "points", "boxes", "caption", "id")
    assert list(found.images) == ["image", "left"]
    assert found.images["image"] == found.images["left"]
    followers = {name: each.of for name, each in found.followers.items()}
    assert followers == {"mask": "image", "points": "left", "boxes": "image"}
    assert found.followers["mask"].shape == (16, 16)
    assert followed(found) == {"image", "left"}


def test_a_crop_may_be_for_some_images_alone() -> None:
    recipe = (RandomCrop(20, fields=("left",)), *CROP)
    found = checked(
        recipe, "image", "left", "mask", "left_mask", ranges={"image": SAME, "left": SAME}
    )
    dims = np.full((4, 2), (24, 32), np.int32)
    moves = [
        draw_with_moves(found.images[name], ids=np.arange(4), dims=dims, seed=1, epoch=1)[1].moves
        for name in ("image", "left")
    ]
    assert [len(each) for each in moves] == [3, 4]
    # the operations behind it draw what they draw for the other image
    ends = [each[-1] for each in moves]
    assert all(isinstance(end, FlipMove) for end in ends)
    first, second = (end.on for end in ends if isinstance(end, FlipMove))
    np.testing.assert_array_equal(first, second)


def test_a_mapping_has_a_list_for_each_field() -> None:
    ranges = {"image": SIZES, "left": SAME}
    lists = {"image": [*CROP, Normalize()], "tokens": [Pad("tokens", to=9)]}
    found = checked(lists, "image", "left", "mask", "left_mask", "tokens", ranges=ranges)
    assert found.images["image"].shape == (3, 16, 16)
    assert found.images["left"] == check_recipe(None, images=SAME)
    assert found.followers["left_mask"].shape == (24, 32)
    assert found.columns == {"tokens": Pad("tokens", to=9)}


def test_without_images_nothing_is_decoded() -> None:
    assert checked(None, "caption", "label").images == {}
    assert checked([Pad("tokens")], "tokens").columns == {"tokens": Pad("tokens")}


def test_bytes_that_may_be_images_are_named() -> None:
    schema = Schema({"image": Bytes()})
    with pytest.raises(RecipeError, match=r"'image': Bytes.*holds encoded images, pass schema="):
        check_recipes(CROP, schema, ("image",), {})


def test_followers_of_what_is_not_selected_are_as_they_are() -> None:
    ranges = {"image": SAME}
    found = checked([Resize((9, 9))], "left", "mask", "boxes", ranges={**ranges, "left": SIZES})
    assert followed(found) == set()
    assert found.followers["mask"].shape == (24, 32)
    mask = np.arange(24 * 32).reshape(24, 32)
    boxes = RaggedColumn(np.array([[1, 2, 3, 4]]), np.array([0, 1]))
    with pytest.raises(DatasetError, match=r"\(1, 32\)"):
        found.follow({}, {"mask": ListColumn([mask[:1]]), "boxes": boxes})
    columns = found.follow({}, {"mask": ListColumn([mask]), "boxes": boxes})
    assert isinstance(columns["mask"], DenseColumn)
    np.testing.assert_array_equal(columns["mask"].values[0], mask)
    np.testing.assert_array_equal(columns["boxes"].values, [[1, 2, 4, 6]])


@pytest.mark.parametrize(
    ("augment", "fields", "message"),
    [
        (CROP, ("label",), r"has none. .*select one of .*'image'"),
        ([MixUp(num_classes=2)], ("label",), "has none"),
        ({"image": CROP}, ("label",), "isn't selected"),
        ({"picture": CROP}, ("image",), "isn't selected"),
        ({"caption": []}, ("caption",), "does nothing"),
        ({"caption": CROP}, ("caption",), "work on images, and this is Text"),
        ({"mask": CROP}, ("image", "mask"), 'follows the operations on "image"'),
        ({"tokens": [Pad("boxes")]}, ("boxes", "tokens"), "got Pad"),
        ({"boxes": [Pad("boxes"), Resize(3)]}, ("image", "boxes"), r"got Resize\(size=3"),
        ({"image": CROP, "left": [Normalize()]}, ("image", "left"), 'of "left": .*sizes'),
        ((*CROP, RandomResizedCrop), ("image",), "got the class"),
        ((SanitizeBoxes(), *CROP), ("image", "boxes"), "put that after all operations that move"),
        (
            (*CROP, SanitizeBoxes(fields="points")),
            ("left", "points"),
            "is no selected field of boxes",
        ),
        ((*CROP, SanitizeBoxes(fields="boxes")), ("image",), "is no selected field of boxes"),
        (
            {"left": (*CROP, SanitizeBoxes(fields="boxes")), "image": CROP},
            ("image", "left", "boxes"),
            "is no selected field of boxes",
        ),
        ((*CROP, SanitizeBoxes()), ("image", "classes"), 'Select "boxes" too'),
        ((*CROP, SanitizeBoxes(), SanitizeBoxes(2.0)), ("image", "boxes"), "Two SanitizeBoxes"),
        ((*CROP, Pad("tokens")), ("image",), "is no selected field"),
        ((*CROP, Pad("vector")), ("image", "vector"), "don't differ in length"),
        ((*CROP, Pad("caption")), ("image", "caption"), "don't differ in length"),
        ((*CROP, Pad("tokens"), Pad("tokens", to=4)), ("image", "tokens"), "Two Pad"),
        ([RandomCrop(8, fields="mask")], ("image", "mask"), "no selected image or array"),
        (None, ("mask",), 'select "image" too'),
    ],
)
def test_invalid_recipes_are_reported(augment: Any, fields: tuple[str, ...], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        checked(augment, *fields)


@pytest.mark.parametrize("mixing", [MixUp(num_classes=2), CutMix(num_classes=2)])
@pytest.mark.parametrize("other", ["left", "mask", "boxes"])
def test_mixing_knows_one_image(mixing: Any, other: str) -> None:
    recipe = (*CROP, Normalize(), mixing)
    assert checked(recipe, "image", "label").mixed == "image"
    name = type(mixing).__name__
    with pytest.raises(RecipeError, match=f"^{name} blends .*(leave|out of fields)"):
        checked(recipe, "image", other, "label")
    if other == "left":
        with pytest.raises(RecipeError, match=name):
            checked({"image": recipe, "left": CROP}, "image", other, "label")


@pytest.mark.parametrize(
    "op", [AutoAugment(), RandAugment(), TrivialAugmentWide(), Apply(lambda images, _: images)]
)
@pytest.mark.parametrize("field", ["mask", "boxes", "points"])
def test_what_cannot_be_followed_is_an_error(op: Any, field: str) -> None:
    recipe = (*CROP, op, Normalize())
    image, other = ("left", "image") if field == "points" else ("image", "left")
    name = type(op).__name__
    with pytest.raises(RecipeError, match=rf'{name}.*"{field}".*{image}.*can\'t follow'):
        checked(recipe, image, field)
    assert checked(recipe, image).images
    # an image that nothing follows may have it
    lists = {other: recipe, image: CROP}
    assert followed(checked(lists, image, other, field)) == {image}


def test_what_leaves_pixels_in_place_may_stand_next_to_masks() -> None:
    still = Apply(lambda images, _: images, moves=False)
    recipe = (Decode(), *CROP, ColorJitter(0.1), GaussianBlur(3), still, Normalize())
    assert followed(checked((*recipe, RandomErasing()), "image", "mask", "boxes")) == {"image"}


@pytest.mark.parametrize(
    "arguments",
    [
        {"min_area": -1},
        {"min_area": "1"},
        {"min_size": float("nan")},
        {"fields": 3},
        {"fields": ()},
    ],
)
def test_sanitize_checks_itself(arguments: Any) -> None:
    with pytest.raises(RecipeError, match=r"SanitizeBoxes\((min_area|min_size|fields)="):
        SanitizeBoxes(**arguments)


def batch_of(recipes: FieldRecipes, columns: Any, dims: Any) -> Any:
    dims = np.asarray(dims, np.int32)
    moves = {}
    for name, recipe in recipes.images.items():
        _, moves[name] = draw_with_moves(
            recipe, ids=np.arange(len(dims)), dims=dims, seed=1, epoch=2
        )
    columns = {n: ListColumn(c) if isinstance(c, list) else c for n, c in columns.items()}
    return recipes.follow(moves, columns)


@pytest.mark.parametrize("stored", [np.int64, np.float32, np.float64])
@pytest.mark.parametrize("format", ["xyxy", "xywh", "cxcywh"])
def test_boxes_come_as_corners_of_their_image(format: Any, stored: Any) -> None:
    schema = Schema({"image": Image(), "boxes": Boxes(of="image", format=format)})
    recipes = check_recipes([Resize((48, 64))], schema, ("image", "boxes"), {"image": SAME})
    values = {
        "xyxy": [[4, 6, 8, 16], [-9, 20, 99, 22]],
        "xywh": [[4, 6, 4, 10], [-9, 20, 108, 2]],
        "cxcywh": [[6, 11, 4, 10], [45, 21, 108, 2]],
    }[format]
    column = RaggedColumn(np.array(values, stored), np.array([0, 1, 1, 2]))
    found = batch_of(recipes, {"boxes": column}, [(24, 32)] * 3)["boxes"]
    assert found.values.dtype == np.float32
    np.testing.assert_allclose(found.values, [[8, 12, 16, 32], [0, 40, 64, 44]])
    assert found.offsets.tolist() == [0, 1, 1, 2]
    np.testing.assert_array_equal(column.values, np.array(values, stored))  # as it was


def test_a_box_that_is_dropped_takes_its_row_along() -> None:
    recipe = (Resize((24, 32)), SanitizeBoxes(min_area=6, min_size=2))
    recipes = checked(recipe, "image", "boxes", "classes", ranges={"image": SAME})
    boxes = [[1, 1, 2, 3], [1, 1, 2, 2], [30, 20, 9, 9], [1, 1, 1, 20], [5, 5, 5, 5], [31, 0, 5, 5]]
    offsets = np.array([0, 0, 4, 4, 6])
    columns = {
        "boxes": RaggedColumn(np.array(boxes, np.float32), offsets),
        "classes": RaggedColumn(np.arange(6), offsets),
    }
    found = batch_of(recipes, columns, [(24, 32)] * 4)
    assert found["classes"].values.tolist() == [0, 2, 4]
    assert found["boxes"].values.tolist() == [[1, 1, 3, 4], [30, 20, 32, 24], [5, 5, 10, 10]]
    for column in found.values():
        assert column.offsets.tolist() == [0, 0, 2, 2, 3]


@given(seed=st.integers(0, 2**40), min_area=st.floats(0, 30), min_size=st.floats(0, 6))
@examples(50)
def test_what_is_dropped_is_what_torchvision_drops(
    seed: int, min_area: float, min_size: float
) -> None:
    torch = pytest.importorskip("torch")
    reference: Any = pytest.importorskip("torchvision.transforms.v2.functional")
    pairs = np.sort(np.random.default_rng(seed).uniform(0, 9, (40, 2, 2)), axis=1)
    boxes = pairs.reshape(40, 4).astype(np.float32)
    keeps = SanitizeBoxes(min_area, min_size=min_size).keeps(boxes)
    _, wanted = reference.sanitize_bounding_boxes(
        torch.from_numpy(boxes),
        format="XYXY",
        canvas_size=(9, 9),
        min_size=min_size,
        min_area=min_area,
    )
    np.testing.assert_array_equal(keeps, wanted.numpy())


def test_rows_of_any_shape_go_with_their_boxes() -> None:
    schema = Schema(
        {
            "image": Image(),
            "boxes": Boxes(of="image"),
            "names": Array("uint8", (None, None), of="boxes"),
            "two": Array("int64", (2, 3), of="boxes"),
        }
    )
    recipe = (Resize((24, 32)), SanitizeBoxes())
    recipes = check_recipes(recipe, schema, tuple(schema), {"image": SAME})
    boxes = DenseColumn(np.array([[[0, 0, 0, 0], [1, 1, 4, 4]], [[2, 2, 5, 5], [9, 9, 9, 9]]]))
    names = [np.full((2, 3), 1, np.uint8), np.full((2, 5), 2, np.uint8)]
    names[0][1] = 7
    like = RaggedColumn(np.zeros(0, np.uint8), np.zeros(1, np.int64), np.zeros((0, 2), np.int64))
    columns = {
        "boxes": boxes,
        "names": RaggedColumn.of(names, like=like),
        "two": DenseColumn(np.arange(12).reshape(2, 2, 3)),
    }
    found = batch_of(recipes, columns, [(24, 32)] * 2)
    assert found["boxes"].values.tolist() == [[1, 1, 4, 4], [2, 2, 5, 5]]
    assert [found["names"].sample(row).tolist() for row in (0, 1)] == [[[7] * 3], [[2] * 5]]
    assert found["two"].values.tolist() == [[3, 4, 5], [6, 7, 8]]


def test_as_many_rows_as_boxes_are_wanted() -> None:
    recipes = checked(
        (Resize(24), SanitizeBoxes()), "image", "boxes", "classes", ranges={"image": SAME}
    )
    columns = {
        "boxes": RaggedColumn(np.ones((3, 4)), np.array([0, 1, 3])),
        "classes": RaggedColumn(np.arange(3), np.array([0, 2, 3])),
    }
    with pytest.raises(DatasetError, match="2 rows in a sample of 1 boxes"):
        batch_of(recipes, columns, [(24, 32)] * 2)


def test_keypoints_may_be_as_many_in_each_sample() -> None:
    recipes = checked([Resize((48, 64))], "left", "points", ranges={"left": SAME})
    points = np.array([[[1, 2], [3, 4]], [[5, 6], [-1, -1]]], np.int32)
    for column in (DenseColumn(points), RaggedColumn(points.reshape(4, 2), np.array([0, 2, 4]))):
        found = batch_of(recipes, {"points": column}, [(24, 32)] * 2)["points"]
        assert type(found) is type(column)
        np.testing.assert_array_equal(found.values.reshape(points.shape), points * 2)


def test_images_of_one_size_have_one_window() -> None:
    recipes = checked(CROP, "image", "left", "mask", "left_mask")
    mask = np.arange(24 * 32).reshape(24, 32)
    columns = {"mask": [mask] * 5, "left_mask": [mask] * 5}
    found = batch_of(recipes, columns, [(24, 32)] * 5)
    np.testing.assert_array_equal(found["mask"].values, found["left_mask"].values)
    assert len({each.tobytes() for each in found["mask"].values}) == 5


@pytest.mark.parametrize(
    ("name", "type", "is_told"),
    [
        ("objects.bbox", Array("float32", (None, 4)), True),
        ("face_boxes", Array("int64", (4,)), True),
        ("bbox", Text(), True),
        ("bbox_labels", Array("int64", (None,)), False),
        ("vector", Array("float32", (4,)), False),
        ("landmarks", Keypoints(of="image"), False),
    ],
)
def test_undeclared_boxes_cause_a_warning(
    name: str, type: FieldType, is_told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    schema = Schema({"image": Image(), name: type})
    ranges = {"image": SAME}

    def is_logged(*ops: Any) -> bool:
        caplog.clear()
        check_recipes(list(ops), schema, ("image", name), ranges)
        return f'"{name}" is ' in caplog.text

    assert is_logged(RandomResizedCrop(16)) is is_told
    assert is_logged(Resize((16, 16)), Normalize()) is is_told
    assert not is_logged(Normalize())


def test_images_with_a_masks_name_are_reported(caplog: pytest.LogCaptureFixture) -> None:
    def is_logged(schema: Schema, augment: Any) -> bool:
        caplog.clear()
        check_recipes(augment, schema, tuple(schema), dict.fromkeys(schema, SAME))
        return 'schema={"gt_mask": Mask(of="image")}' in caplog.text

    pictures = Schema({"image": Image(), "gt_mask": Image()})
    assert is_logged(pictures, [Normalize()])
    assert not is_logged(pictures, {"image": [Normalize()]})
    assert not is_logged(Schema({"image": Image(), "gt_mask": Mask(of="image")}), [Normalize()])
    assert not is_logged(Schema({"gt_mask": Image()}), [Normalize()])
