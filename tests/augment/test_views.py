"""Views of one decoded image: their checks, their draws, and the compiled pass against DALI's
operators."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from penstock.augment import (
    Apply,
    Cast,
    CenterCrop,
    ColorJitter,
    Decode,
    FullImageDecoder,
    GaussianBlur,
    Graph,
    GraphPlan,
    Map,
    MixUp,
    Normalize,
    Pad,
    RandomAutocontrast,
    RandomCrop,
    RandomEqualize,
    RandomErasing,
    RandomGrayscale,
    RandomHorizontalFlip,
    RandomPosterize,
    RandomResizedCrop,
    RandomRotation,
    RandomVerticalFlip,
    Resize,
    SanitizeBoxes,
    Solarize,
    Views,
    ViewTensors,
    check_recipe,
    check_recipes,
    draw,
    view_salts,
)
from penstock.errors import RecipeError
from penstock.readers import EncodedBatch, ImageRange
from penstock.readers.fieldtypes import Boxes, ClassLabel, Image, Keypoints, Mask, Schema, Tokens
from tests import images

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from penstock.augment import CheckedRecipe

SIZES = ImageRange(min_height=30, max_height=120, min_width=30, max_width=120)
SCHEMA = Schema({"image": Image(), "label": ClassLabel(("a", "b"))})
CROP = RandomResizedCrop(32, scale=(0.2, 1.0))
N = 12


@pytest.fixture(scope="module")
def batch() -> EncodedBatch:
    sizes = np.random.default_rng(5).integers(30, 120, (N, 2)).tolist()
    files = [images.jpeg(seed, *size, quality=90) for seed, size in enumerate(sizes)]
    return EncodedBatch(
        ids=7 * np.arange(N) + 3,
        encoded=[np.frombuffer(file, np.uint8) for file in files],
        dims=np.array(sizes, np.int32),
    )


def checked(views: Any, *, before: tuple[Any, ...] = ()) -> CheckedRecipe:
    recipes = check_recipes([*before, Views(views)], SCHEMA, ("image",), {"image": SIZES})
    return recipes.images["image"]


def run(recipe: CheckedRecipe, batch: EncodedBatch, **options: Any) -> Any:
    """The images or the views of a batch, on the CPU."""
    graph = Graph(GraphPlan(recipe, batch_size=N, threads=2, **options))
    graph.feed(batch, draw(recipe, ids=batch.ids, dims=batch.dims, seed=3, epoch=1))
    found = graph.outputs()
    graph.close()
    return found


def alone(recipe: Any, batch: EncodedBatch, salt: int) -> NDArray[Any]:
    """The images of a recipe without views, with the draws of one view."""
    found: NDArray[Any] = run(replace(check_recipe(recipe, images=SIZES), salt=salt), batch).numpy()
    return found


RECIPES: dict[str, list[Any]] = {
    "crop": [CROP],
    "cubic": [replace(CROP, interpolation="bicubic"), RandomHorizontalFlip()],
    "cubic middle": [Resize(40, interpolation="bicubic"), CenterCrop(32), Normalize()],
    "flips": [CROP, RandomHorizontalFlip(), RandomVerticalFlip()],
    "jitter": [CROP, ColorJitter(0.4, 0.4, 0.2, 0.1, p=0.8)],
    "contrast": [CROP, ColorJitter(contrast=0.7)],
    "hue": [CROP, ColorJitter(hue=0.5)],
    "gray": [CROP, RandomGrayscale(0.5)],
    "blur": [CROP, GaussianBlur((7, 17), (0.1, 2.0), p=0.6)],
    "solarize": [CROP, Solarize(99.5, p=0.7)],
    "posterize": [CROP, RandomPosterize(3)],
    "autocontrast": [CROP, RandomAutocontrast(0.8)],
    "equalize": [CROP, RandomEqualize(0.8)],
    "middle": [Resize(40), CenterCrop(32), Normalize()],
    "corner": [RandomCrop(29), Resize((20, 24)), Normalize(), Cast("float16")],
    "all": [
        CROP,
        RandomHorizontalFlip(),
        ColorJitter(0.4, 0.4, 0.2, 0.1, p=0.8),
        RandomGrayscale(0.2),
        GaussianBlur(17, (0.1, 2.0), p=0.5),
        Solarize(128, p=0.2),
        Normalize(),
    ],
    # These have no compiled pass.
    "turn": [CROP, RandomRotation(20)],
    "late flip": [CROP, RandomRotation(20), RandomHorizontalFlip(), Normalize()],
    "erasing": [CROP, Normalize(), RandomErasing(0.7)],
    "function": [CROP, Apply(lambda pixels, _: pixels, moves=False)],
    "padded": [RandomCrop(32, pad_if_needed=True), RandomCrop(28)],
}


@pytest.mark.parametrize("name", RECIPES)
def test_a_view_is_the_image_that_its_recipe_gives_alone(name, batch):
    """Up to one level in few values, by which the compiled passes differ from DALI's operators; a
    later operation may double it."""
    recipe = RECIPES[name]
    views = run(checked({"some": (3, recipe)}), batch).fields["some"].numpy()
    assert views.shape[:2] == (N, 3)
    step = 1.0 if views.dtype == np.uint8 else 1.01 / (255 * 0.224)
    for view, salt in enumerate(view_salts("some", 3, salt=0)):
        wanted = alone(recipe, batch, int(salt))
        away = np.abs(views[:, view].astype(np.float64) - wanted)
        assert (away > 1.5 * step).mean() < 1e-4
        assert (away > step / 4).mean() < 0.01


class Darker(ColorJitter):
    """An operation of another package that changes the node which it inherits."""

    __slots__ = ()

    def node(self, images: Any, inputs: dict[str, Any], shape: Any) -> Any:
        return super().node(images, inputs, shape) // np.uint8(2)


def test_a_class_of_another_package_has_no_compiled_pass(batch):
    recipe = [Resize((20, 20)), Darker((1.0, 1.0), 0.5)]
    views = run(checked({"some": (1, recipe)}), batch).fields["some"]
    assert int(views.max()) < 128
    assert np.array_equal(views[:, 0].numpy(), alone(recipe, batch, int(view_salts("some", 1)[0])))


def test_recipes_of_one_field_and_of_several(batch):
    """Each view has its own draws, by the field's name and its number in the field."""
    bright, dark = [CROP, ColorJitter((1.5, 1.5))], [CROP, ColorJitter((0.5, 0.5), hue=0.2)]
    recipe = checked({"a": [(1, bright), (2, dark)], "b": (2, [Resize((8, 12))])})
    assert [(field.name, field.count) for field in recipe.views] == [("a", 3), ("b", 2)]
    found = run(recipe, batch)
    assert isinstance(found, ViewTensors)
    assert {name: tuple(each.shape) for name, each in found.fields.items()} == {
        "a": (N, 3, 3, 32, 32),
        "b": (N, 2, 3, 8, 12),
    }
    lone = run(checked({"a": (1, bright)}), batch).fields["a"]
    assert found.fields["a"][:, :1].equal(lone)
    assert not found.fields["a"][:, 1].equal(found.fields["a"][:, 2])
    assert found.fields["b"][:, 0].equal(found.fields["b"][:, 1])  # nothing random


def test_one_decode_in_the_colours_of_any_recipe(batch):
    gray = [Decode("gray"), CROP, ColorJitter(0.3, 0.3), GaussianBlur(5)]
    inner = run(checked({"a": (2, gray), "b": (1, [CROP])}), batch)
    outer = run(checked({"a": (2, gray[1:]), "b": (1, [CROP])}, before=(gray[0],)), batch)
    for name in "ab":
        assert inner.fields[name].shape[2] == 1
        assert inner.fields[name].equal(outer.fields[name])


def test_the_same_from_decoded_images_in_memory(batch):
    recipe = checked({"a": (2, RECIPES["all"]), "b": (2, RECIPES["turn"])})
    encoded = run(recipe, batch)
    decoder = FullImageDecoder(GraphPlan(recipe, batch_size=N, threads=1))
    pixels = dict[int, Any]()
    for part in decoder(batch.encoded, batch.dims.prod(axis=1).tolist()):
        pixels |= {row: image.numpy().copy() for row, image in part}
    kept = Graph(
        GraphPlan(recipe, batch_size=N, threads=2), kept=lambda _: [pixels[row] for row in range(N)]
    )
    kept.feed(batch, draw(recipe, ids=batch.ids, dims=batch.dims, seed=3, epoch=1))
    found = kept.outputs_marked().images
    kept.close()
    for name, views in encoded.fields.items():
        assert found.fields[name].equal(views)


def test_bad_images_have_views_of_zeros(batch):
    bad = replace(batch, encoded=[*batch.encoded[:4], batch.encoded[4][:200], *batch.encoded[5:]])
    recipe = checked({"a": (2, [CROP, Normalize()]), "b": (1, RECIPES["turn"])})
    graph = Graph(GraphPlan(recipe, batch_size=N, threads=2))
    graph.feed(bad, draw(recipe, ids=bad.ids, dims=bad.dims, seed=3, epoch=1), bad={7: "missing"})
    found = graph.outputs_marked()
    graph.close()
    assert sorted(found.bad) == [4, 7]
    good = run(recipe, batch)
    rows = [row for row in range(N) if row not in (4, 7)]
    for name, views in found.outputs("image").items():
        assert not views[[4, 7]].any()
        assert views[rows].equal(good.fields[name][rows])


class TestDraws:
    def test_views_and_occurrences_are_independent(self):
        """The same number of two views, of all pairs of views and of occurrences."""
        count = 30_000
        some = [CROP, RandomHorizontalFlip(), ColorJitter(0.4, 0.4, 0.2, 0.1), GaussianBlur(9)]
        recipe = checked({"global": (2, some), "local": (3, some)})
        ids, dims = np.arange(count), np.full((count, 2), (90, 70), np.int32)
        given: dict[str, Any] = {"ids": ids, "dims": dims, "seed": 11, "epoch": 2}
        numbers: dict[str, list[NDArray[Any]]] = {}
        for occurrence in (0, 1, 2):
            drawn = draw(recipe, occurrences=np.full(count, occurrence), **given)
            for name, values in drawn.items():
                flat = values.reshape(count, values.shape[1], -1).astype(np.float64)
                own = name.split(".", 2)[2]
                numbers.setdefault(own, []).append(flat)
        assert len(numbers) > 6
        for name, parts in numbers.items():
            together = np.concatenate(parts, axis=1)  # (samples, views of all, numbers)
            assert together.shape[1] == 15
            for column in range(together.shape[2]):
                values = together[:, :, column]
                values = values[:, values.std(axis=0) > 0]
                if values.shape[1]:
                    r = np.corrcoef(values.T) - np.eye(15)
                    assert np.abs(r).max() < 0.02, name

    def test_the_same_for_a_sample_in_any_batch(self):
        recipe = checked({"global": (2, RECIPES["all"]), "local": [(1, [CROP]), (2, [CROP])]})
        ids, dims = np.arange(40), np.full((40, 2), (90, 70), np.int32)
        every, rows = np.arange(40) % 3, np.array([31, 2, 17])
        whole = draw(recipe, ids=ids, dims=dims, seed=1, epoch=ids // 9, occurrences=every)
        some = draw(
            recipe, ids=ids[rows], dims=dims[rows], seed=1, epoch=rows // 9, occurrences=every[rows]
        )
        assert whole.keys() == some.keys()
        for name, values in whole.items():
            np.testing.assert_array_equal(values[rows], some[name])

    def test_entries_of_a_mapping_differ(self):
        schema = Schema({"left": Image(), "right": Image()})
        augment: Any = {"left": [Views({"a": (2, [CROP])})], "right": [Views({"b": (2, [CROP])})]}
        ranges = {"left": SIZES, "right": SIZES}
        found = check_recipes(augment, schema, ("left", "right"), ranges, {"left": 5, "right": 6})
        assert found.fields == ("a", "b")
        assert found.images["left"].salt == 5
        dims = np.full((9, 2), (90, 70), np.int32)
        one, other, lone = (
            draw(recipe, ids=np.arange(9), dims=dims, seed=1, epoch=0)
            for recipe in (*found.images.values(), checked({"a": (2, [CROP])}))
        )
        assert not np.array_equal(one["0.0.start"], other["0.0.start"])
        assert not np.array_equal(one["0.0.start"], lone["0.0.start"])


class TestChecks:
    def test_fields_of_a_batch(self):
        recipes = check_recipes(
            [Views({"global": (2, [CROP]), "local": (8, [CROP])}), Pad("tokens", to=4)],
            Schema({"label": SCHEMA["label"], "image": Image(), "tokens": Tokens("int32")}),
            ("label", "image", "tokens", "id"),
            {"image": SIZES},
        )
        assert recipes.fields == ("label", "global", "local", "tokens", "id")
        assert recipes.images["image"].random
        assert not recipes.images["image"].decodes_window

    def test_equal_and_hashed_by_value(self):
        one, other = (Views({"a": (2, [CROP]), "b": [(1, [CROP])]}) for _ in range(2))
        assert one == other
        assert hash(one) == hash(other)
        assert str(one) == "Views(a: 2, b: 1)"

    @pytest.mark.parametrize(
        ("views", "message"),
        [
            ([], "wanted a mapping from the names of new fields"),
            ({}, "wanted a mapping"),
            ({"a": [CROP]}, "wanted a mapping"),
            ({"a": (0, [CROP])}, "whole number from 1"),
            ({"a": (2, CROP)}, "Put it in"),
            ({"a": ([CROP], 2)}, "whole number"),
            ({"a": []}, "wanted a mapping"),
            ({"a.b": (1, [CROP])}, "wanted the name of a field"),
            ({3: (1, [CROP])}, "wanted the name of a field"),
            ({"a": [(600, [CROP]), (600, [CROP])]}, "more than 1024 views"),
            ({"a": (1, [CROP, MixUp(0.2)])}, "Mix them in your training step"),
            ({"a": (1, [Map(len, fields="text")])}, "Put Maps in front of Views"),
            ({"a": (1, [SanitizeBoxes()])}, "into the list that has Views"),
            ({"a": (1, [Views({"b": (1, [CROP])})])}, "operations on one image"),
        ],
    )
    def test_arguments(self, views, message):
        with pytest.raises(RecipeError, match=message):
            Views(views)

    @pytest.mark.parametrize(
        ("views", "others", "message"),
        [
            (
                {"a": (1, [Normalize()])},
                [],
                r'Views, of "a": The images are of different.*CenterCrop\(224\)\.$',
            ),
            ({"a": [(1, [CROP]), (1, [Resize((8, 8))])]}, [], "Give them different keys"),
            ({"a": [(1, [CROP]), (1, [CROP, Normalize()])]}, [], "Give them different keys"),
            ({"label": (1, [CROP])}, [], "Choose another key"),
            ({"id": (1, [CROP])}, [], "Choose another key"),
            ({"a": (1, [CROP])}, [RandomHorizontalFlip()], "put it into the recipes of Views"),
            ({"a": (1, [CROP])}, [Views({"b": (1, [CROP])})], "the only operation on an image"),
            ({"a": (1, [Decode("gray"), CROP]), "b": (1, [Decode(windows="slice"), CROP])}, [],
             "decodes an image once"),
        ],
    )  # fmt: skip
    def test_what_does_not_fit(self, views, others, message):
        for recipe in ([Views(views), *others], [*others, Views(views)]):
            with pytest.raises(RecipeError, match=message):
                check_recipes(recipe, SCHEMA, ("image", "label", "id"), {"image": SIZES})

    @pytest.mark.parametrize("kind", [Mask(of="image"), Boxes(of="image"), Keypoints(of="image")])
    def test_masks_boxes_and_points_can_not_follow(self, kind):
        schema = Schema({"image": Image(), "other": kind})
        with pytest.raises(RecipeError, match=r"can't follow it.*make the views in your training"):
            check_recipes([Views({"a": (1, [CROP])})], schema, ("image", "other"), {"image": SIZES})

    def test_one_field_for_two_images(self):
        schema = Schema({"left": Image(), "right": Image()})
        ranges = {"left": SIZES, "right": SIZES}
        with pytest.raises(RecipeError, match='makes a field "a"'):
            check_recipes([Views({"a": (1, [CROP])})], schema, ("left", "right"), ranges)

    def test_only_in_recipes_of_fields(self):
        with pytest.raises(RecipeError, match="works on native datasets"):
            check_recipe([Views({"a": (1, [CROP])})], images=SIZES)


def test_jitter_of_some_images():
    """As torchvision's RandomApply around it."""
    op = ColorJitter(0.4, hue=0.1, p=0.3)
    recipe = check_recipe([Resize((8, 8)), op], images=SIZES)
    ids, dims = np.arange(20_000), np.full((20_000, 2), (40, 50), np.int32)
    drawn = draw(recipe, ids=ids, dims=dims, seed=1, epoch=0)
    assert abs(drawn["ColorJitter2.on"].mean() - 0.3) < 0.01
    every = check_recipe([Resize((8, 8)), replace(op, p=1.0)], images=SIZES)
    wanted = draw(every, ids=ids, dims=dims, seed=1, epoch=0)
    assert "ColorJitter2.on" not in wanted
    for name in wanted:
        np.testing.assert_array_equal(drawn[name], wanted[name])
