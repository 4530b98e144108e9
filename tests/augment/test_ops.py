"""Test that operations check their arguments, and that recipes are checked as a whole."""

from __future__ import annotations

import dataclasses
import inspect
import math
import pickle
import re
import subprocess
import sys
import types
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

import penstock
from penstock.augment import (
    IMAGENET_MEAN,
    Apply,
    AutoAugment,
    Cast,
    CenterCrop,
    ColorJitter,
    CutMix,
    Decode,
    GaussianBlur,
    MixUp,
    Normalize,
    RandAugment,
    RandomCrop,
    RandomErasing,
    RandomGrayscale,
    RandomHorizontalFlip,
    RandomResizedCrop,
    RandomRotation,
    Resize,
    TrivialAugmentWide,
    check_recipe,
    imagenet_eval,
    imagenet_train,
    input_kinds,
)
from penstock.cache import ConfigError, RecipeError
from penstock.readers import ANY_SIZE, ImageRange
from tests.properties import examples

if TYPE_CHECKING:
    from collections.abc import Callable


MIXED = ImageRange(min_height=300, max_height=600, min_width=200, max_width=800)


SAME = ImageRange(min_height=48, max_height=48, min_width=64, max_width=64)


def test_importing_augment_loads_neither_torch_nor_dali():
    code = "import sys\nfrom penstock.augment import draws, graph, policies, recipe, verify\n"
    code += "assert not {'torch', 'nvidia.dali', 'nvidia.nvimgcodec'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_operations_are_frozen_hashable_values():
    assert RandomResizedCrop(224) == RandomResizedCrop((224, 224))
    assert hash(Normalize([0.5] * 3, [0.2] * 3)) == hash(Normalize((0.5,) * 3, (0.2,) * 3))
    with pytest.raises(dataclasses.FrozenInstanceError):
        RandomHorizontalFlip().p = 1


@pytest.mark.parametrize(
    "make",
    [
        lambda: Decode("bgr"),
        lambda: Resize(0),
        lambda: Resize(2.5),
        lambda: Resize((1, 2, 3)),
        lambda: Resize("224"),
        lambda: Resize(True),
        lambda: Resize(224, antialias=1),
        lambda: CenterCrop(-1),
        lambda: Resize(1_000_000),
        lambda: RandomResizedCrop(224, scale=(0, 1)),
        lambda: RandomResizedCrop(224, scale=(0.5, 1.5)),
        lambda: RandomResizedCrop(224, scale=(0.9, 0.1)),
        lambda: RandomResizedCrop(224, ratio=(0.75,)),
        lambda: RandomResizedCrop(224, ratio=(0.75, float("nan"))),
        lambda: RandomHorizontalFlip(1.5),
        lambda: RandomHorizontalFlip("often"),
        lambda: Normalize((0.5, 0.5), (0.5,)),
        lambda: Normalize((0.5,), (0.0,)),
        lambda: Normalize((123.7, 116.3, 103.5), (58.4, 57.1, 57.4)),
        lambda: Normalize("mean", "std"),
        lambda: Normalize((), ()),
        lambda: Cast("float64"),
    ],
)
def test_a_bad_value_is_refused_at_birth(make):
    with pytest.raises(RecipeError, match=r"got .*wanted"):
        make()


def test_the_recipes_of_imagenet():
    train = check_recipe(imagenet_train(176), images=MIXED)
    assert (train.shape, train.dtype, train.random) == ((3, 176, 176), "float32", True)
    evaluation = check_recipe(imagenet_eval(224, resize=232), images=MIXED)
    assert (evaluation.shape, evaluation.dtype) == ((3, 224, 224), "float32")
    assert not evaluation.random
    assert evaluation.normalize
    assert evaluation.normalize.mean == IMAGENET_MEAN


@pytest.mark.parametrize("recipe", [None, (), []])
def test_no_recipe_decodes_images_of_one_size(recipe):
    checked = check_recipe(recipe, images=SAME)
    assert (checked.shape, checked.dtype) == ((3, 48, 64), "uint8")
    with pytest.raises(RecipeError, match=r"different sizes.*add RandomResizedCrop"):
        check_recipe(recipe, images=MIXED)


@pytest.mark.parametrize("recipe", [None, (Resize(256),), (CenterCrop(9),), (RandomCrop(9),)])
def test_unknown_sizes_are_not_shown_as_bounds(recipe):
    with pytest.raises(RecipeError, match="of sizes that aren't known") as refused:
        check_recipe(recipe, images=ANY_SIZE)
    assert not re.search(r"65,?535|1 x 1\b|16776960", str(refused.value))


def test_decode_is_implied_and_changes_nothing_when_spelt_out():
    assert check_recipe([Resize((8, 9))], images=MIXED) == check_recipe(
        (Decode(), Resize((8, 9))), images=MIXED
    )


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        ([Normalize(), RandomResizedCrop(8)], r"comes after Normalize.*The order of a recipe is"),
        ([Cast("uint8"), Resize((8, 8))], "comes after Cast"),
        ([RandomResizedCrop(8), Cast("float32"), Normalize()], "comes after Cast"),
        ([Decode(), Decode(), Resize((8, 8))], "Two Decode in one recipe"),
        ([Resize((8, 8)), Decode("gray")], "comes after Resize.*The order of a recipe is: Decode;"),
        ([Resize((8, 8)), Normalize(), Cast("uint8")], "round the numbers of Normalize"),
        ([Resize((8, 8)), Normalize(), Normalize()], "Two Normalize"),
        ([Resize((8, 8)), Cast("uint8"), Cast("uint8")], "Two Cast"),
        ([Resize(256)], "different sizes"),
        ([RandomHorizontalFlip()], "different sizes"),
        ([CenterCrop(224)], "from 300 x 200 to 600 x 800.*Resize"),
        ([Resize(64), CenterCrop(65)], "wanted 65 x 65"),
        ([Decode("gray"), Resize((8, 8)), Normalize()], "got 3 means, wanted 1"),
        ([Resize((8, 8)), Normalize((0.5,), (0.5,))], "got 1 means, wanted 3"),
        ([Resize], "the class Resize, wanted an instance"),
        ([Resize((8, 8)), "flip"], "got 'flip' at place 1"),
        ("imagenet", "wanted operations in a list"),
        (3, "wanted operations in a list"),
    ],
)
def test_what_does_not_fit_is_refused(recipe, message):
    with pytest.raises(RecipeError, match=message):
        check_recipe(recipe, images=MIXED)


def test_a_wide_crop_fits_where_all_images_are_wide():
    wide = ImageRange(min_height=300, max_height=310, min_width=600, max_width=640)
    assert check_recipe([Resize(256), CenterCrop((256, 490))], images=wide).shape == (3, 256, 490)


@given(short=st.integers(1, 600), height=st.integers(1, 5000), width=st.integers(1, 5000))
def test_resize_of_the_short_side_rounds_as_torchvision(short, height, width):
    long = int(short * max(height, width) / min(height, width))
    wanted = (short, long) if height <= width else (long, short)
    image = ImageRange(min_height=height, max_height=height, min_width=width, max_width=width)
    assert Resize(short).sizes(image).fixed == wanted


ANY: Any = penstock  # calls aren't type-checked


# Arguments of torchvision 0.29's operations, in their order, without labels_getter.
TORCHVISION = {
    penstock.Resize: "size interpolation max_size antialias",
    penstock.CenterCrop: "size",
    penstock.RandomCrop: "size padding pad_if_needed fill padding_mode",
    penstock.RandomResizedCrop: "size scale ratio interpolation antialias",
    penstock.RandomHorizontalFlip: "p",
    penstock.RandomVerticalFlip: "p",
    penstock.ColorJitter: "brightness contrast saturation hue",
    penstock.RandomGrayscale: "p",
    penstock.GaussianBlur: "kernel_size sigma",
    penstock.RandomRotation: "degrees interpolation expand center fill",
    penstock.RandomAffine: "degrees translate scale shear interpolation fill center",
    penstock.RandomPerspective: "distortion_scale p interpolation fill",
    penstock.RandomPosterize: "bits p",
    penstock.Solarize: "threshold p",
    penstock.RandomEqualize: "p",
    penstock.RandomAutocontrast: "p",
    penstock.RandAugment: "num_ops magnitude num_magnitude_bins interpolation fill",
    penstock.TrivialAugmentWide: "num_magnitude_bins interpolation fill",
    penstock.AutoAugment: "policy interpolation fill",
    penstock.Normalize: "mean std inplace",
    penstock.RandomErasing: "p scale ratio value inplace",
    penstock.MixUp: "alpha num_classes",
    penstock.CutMix: "alpha num_classes",
    penstock.SanitizeBoxes: "min_size min_area",
}


@pytest.mark.parametrize("operation", TORCHVISION)
def test_arguments_are_torchvisions_in_its_order(operation: type) -> None:
    names = TORCHVISION[operation].split()
    assert list(inspect.signature(operation).parameters)[: len(names)] == names


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: ANY.RandomResizedCrop(224, area=(0.1, 1)), "has no argument 'area'"),
        (lambda: ANY.Resize(256, interpolaton="nearest"), "did you mean 'interpolation'?"),
        (lambda: ANY.Resize(256, None, None, True, 5), "Resize: too many positional arguments"),
        (lambda: ANY.Resize(256, size=256), "Resize: multiple values for argument 'size'"),
        (lambda: ANY.GaussianBlur(), "missing a required argument: 'kernel_size'"),
        (lambda: ANY.Map(), "missing a required argument: 'fn'"),
        (lambda: ANY.imagenet_train(size=224, foo=1), "imagenet_train has no argument 'foo'"),
        (lambda: ANY.cifar_train(32, 4), "cifar_train: too many positional arguments"),
        (lambda: ANY.Pad("boxes", lenght=3), "has no argument 'lenght'"),
        (lambda: ANY.SanitizeBoxes(min_sise=3), "did you mean 'min_size'?"),
        (lambda: ANY.Resize("256"), "Resize(size=...): got '256'"),
        (lambda: ANY.Resize(np.True_), "wanted pixels as a whole number"),
        (lambda: ANY.RandomCrop(np.float32(32)), "wanted a whole number of 1 or more"),
        (lambda: ANY.Resize(256, "nearest"), "Resize(interpolation=...): got 'nearest'"),
        (lambda: ANY.Resize(256, max_size=200), "at least as many pixels for the long side"),
        (lambda: ANY.RandomCrop(32, (4, 8)), "the same for all four sides"),
        (lambda: ANY.RandomCrop(32, padding_mode="reflect"), 'wanted one of "constant"'),
        (lambda: ANY.RandomCrop(32, padding=-1), "wanted a whole number from 0"),
        (lambda: ANY.RandomHorizontalFlip(2), "wanted a probability from 0 to 1"),
        (lambda: ANY.RandomHorizontalFlip(math.nan), "wanted a probability from 0 to 1"),
        (lambda: ANY.RandomRotation(10, expand=True), "only False is supported"),
        (lambda: ANY.RandAugment(interpolation="bilinear"), 'wanted one of "nearest"'),
        (lambda: ANY.Boxes(off="image"), "has no argument 'off', did you mean 'of'?"),
        (lambda: ANY.ClassLabel(["a"], ["b"]), "ClassLabel: too many positional arguments"),
        (lambda: ANY.Image("rgb"), "Image: too many positional arguments"),
    ],
)
def test_arguments_that_dont_fit_are_named(make: Callable[[], Any], words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        make()


def test_torchvisions_ways_to_say_a_thing_are_understood() -> None:
    bilinear = types.SimpleNamespace(value="bilinear")  # as its InterpolationMode
    assert penstock.Resize(256, bilinear, None, True) == penstock.Resize(256)
    assert penstock.RandomCrop(32, 4, True) == penstock.RandomCrop(
        32, padding=[4, 4], pad_if_needed=True
    )
    assert penstock.RandomCrop(32, None) == penstock.RandomCrop(32)
    assert penstock.RandomResizedCrop(224, (0.2, 1)).scale == (0.2, 1.0)
    assert penstock.ColorJitter(0.4, None) == penstock.ColorJitter(brightness=0.4)
    assert penstock.Resize([256]) == penstock.Resize(256)
    assert penstock.RandomResizedCrop((32,)) == penstock.RandomResizedCrop(32)
    assert penstock.CenterCrop((32,)).height_width == (32, 32)
    assert penstock.RandAugment(fill=None).fill == 0
    assert pickle.loads(pickle.dumps(penstock.Resize(256))) == penstock.Resize(256)
    assert dataclasses.replace(penstock.Resize(256), size=9).size == 9


@pytest.mark.parametrize("kind", [np.int64, np.uint8, torch.tensor, np.array])
def test_numbers_of_numpy_and_torch_are_pythons(kind: Callable[[int], Any]) -> None:
    n = kind(5)
    made: list[Any] = [
        penstock.Resize(n),
        penstock.Resize((n, n)),
        penstock.CenterCrop(n),
        penstock.RandomCrop((n, None), padding=n, mask_fill=n),
        penstock.RandomResizedCrop(n, scale=(n / 10, n / 5)),
        penstock.GaussianBlur(n),
        penstock.RandAugment(n, n),
        penstock.TrivialAugmentWide(n),
        penstock.MixUp(num_classes=n),
        penstock.Normalize(np.array([0.5] * 3), torch.tensor([0.5] * 3)),
        penstock.Pad("boxes", to=n),
        penstock.Map(len, processes=n),
        penstock.imagenet_train(n),
    ]
    assert not re.search("int64|uint8|float|tensor|array", repr(made))
    assert penstock.Resize(n) == penstock.Resize(5)
    assert penstock.Pad("boxes", to=np.array([5, 2])).to == (5, 2)


NUMBERS = st.one_of(
    st.floats(allow_nan=True),
    st.integers(-300, 300),
    st.booleans(),
    st.none(),
    st.text(max_size=3),
    st.lists(st.floats(-3, 3), max_size=3),
    st.tuples(st.floats(-2, 5), st.floats(-2, 5)),
)


ARGUMENTS = [
    (ColorJitter, "brightness", {}),
    (ColorJitter, "contrast", {}),
    (ColorJitter, "saturation", {}),
    (ColorJitter, "hue", {}),
    (RandomGrayscale, "p", {}),
    (GaussianBlur, "kernel_size", {}),
    (GaussianBlur, "sigma", {"kernel_size": 3}),
    (GaussianBlur, "p", {"kernel_size": 3}),
    (RandomRotation, "degrees", {}),
    (RandomRotation, "fill", {"degrees": 3}),
    (RandomRotation, "interpolation", {"degrees": 3}),
    (penstock.RandomAffine, "degrees", {}),
    (penstock.RandomAffine, "translate", {"degrees": 1}),
    (penstock.RandomAffine, "scale", {"degrees": 1}),
    (penstock.RandomAffine, "shear", {"degrees": 1}),
    (penstock.RandomPerspective, "distortion_scale", {}),
    (penstock.RandomPosterize, "bits", {}),
    (penstock.Solarize, "threshold", {}),
    (RandomErasing, "p", {}),
    (RandomErasing, "scale", {}),
    (RandomErasing, "ratio", {}),
    (RandomErasing, "value", {}),
    (Apply, "fn", {}),
    (Apply, "draws", {"fn": print}),
    (RandAugment, "num_ops", {}),
    (RandAugment, "magnitude", {}),
    (RandAugment, "num_magnitude_bins", {"magnitude": 0}),
    (RandAugment, "fill", {}),
    (TrivialAugmentWide, "num_magnitude_bins", {}),
    (TrivialAugmentWide, "fill", {}),
    (AutoAugment, "policy", {}),
    (AutoAugment, "fill", {}),
    (MixUp, "alpha", {}),
    (MixUp, "num_classes", {}),
    (CutMix, "alpha", {}),
    (CutMix, "num_classes", {}),
]


@pytest.mark.parametrize(("kind", "name", "others"), ARGUMENTS)
@given(value=NUMBERS)
@example(value=float("inf"))
@example(value=(0.9, 0.1))
@examples(50)
def test_an_argument_is_taken_or_names_itself(kind, name, others, value):
    try:
        op = kind(**{name: value}, **others)
    except RecipeError as error:
        refusal = str(error)
        named = refusal.startswith(f"{kind.__name__}({name}=...)")
    else:
        refusal = "got, wanted"
        named = hash(op) == hash(kind(**{name: value}, **others))
    assert named
    assert "got" in refusal
    assert "wanted" in refusal


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: ColorJitter(-0.1), "brightness"),
        (lambda: ColorJitter(hue=0.6), "hue"),
        (lambda: ColorJitter(hue=(-0.6, 0)), "hue"),
        (lambda: ColorJitter(contrast=(2, 1)), "contrast"),
        (lambda: GaussianBlur(4), "kernel_size"),
        (lambda: GaussianBlur(3, sigma=0), "sigma"),
        (lambda: RandomRotation(-3), "degrees"),
        (lambda: RandomRotation(3, fill=(1, 2, 3)), "fill"),
        (lambda: RandomErasing(value="random"), "value"),
        (lambda: Apply(print, draws=0), "draws"),
        (lambda: RandAugment(magnitude=31), "magnitude"),
        (lambda: AutoAugment("mnist"), "policy"),
        (lambda: MixUp(0), "alpha"),
        (lambda: CutMix(num_classes=0), "num_classes"),
    ],
)
def test_a_bad_argument_names_itself(make, named):
    with pytest.raises(RecipeError, match=rf"\({named}=\.\.\.\): got .*wanted"):
        make()


def test_torchvisions_floats_and_pairs():
    assert ColorJitter(0.4) == ColorJitter((0.6, 1.4))
    assert ColorJitter(2).brightness == (0, 3)
    assert ColorJitter(hue=0.1).hue == (-0.1, 0.1)
    assert RandomRotation(30) == RandomRotation((-30, 30))
    assert GaussianBlur(3, 1.5) == GaussianBlur((3, 3), (1.5, 1.5))


FIRST = (Resize((8, 8)),)


GRAY = (Decode("gray"), *FIRST)


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        ((*FIRST, ColorJitter(0.1), CenterCrop(4)), "The order of a recipe is"),
        ((*FIRST, ColorJitter(0.1), Resize((4, 4))), "The order of a recipe is"),
        ((ColorJitter(0.1), RandomResizedCrop(4)), "The order of a recipe is"),
        ((Resize(8), ColorJitter(0.1)), "of sizes that aren't known"),
        ((*FIRST, Normalize(), ColorJitter(0.1)), "comes after Normalize"),
        ((*FIRST, RandomErasing(), Normalize()), "comes after RandomErasing"),
        ((*FIRST, RandomErasing(), RandomGrayscale()), "comes after RandomErasing"),
        ((*FIRST, RandomErasing(), RandomHorizontalFlip()), "comes after RandomErasing"),
        ((*FIRST, Cast("float32"), RandomErasing()), "comes after Cast"),
        ((*FIRST, Normalize(), RandomErasing(value=(1, 2))), r"value=.*wanted 1 or 3 numbers"),
        ((*FIRST, RandomErasing(value=0.5)), "whole numbers from 0 to 255"),
        ((*FIRST, RandomErasing(value=-1), Cast("uint8")), "whole numbers from 0 to 255"),
        ((*FIRST, GaussianBlur(17)), "wanted less than twice"),
        ((*FIRST, GaussianBlur((3, 17))), "wanted less than twice"),
        ((*GRAY, ColorJitter(saturation=0.1)), "needs colours"),
        ((*GRAY, ColorJitter(hue=0.1)), "needs colours"),
        ((*GRAY, RandomGrayscale()), "needs colours"),
        ((*GRAY, RandAugment()), "needs colours"),
        ((*FIRST, MixUp()), "result is (uint8)?"),
        ((*FIRST, Cast("uint8"), CutMix()), "result is (uint8)?"),
        ((*FIRST, Normalize(), MixUp(), CutMix(), MixUp()), "Two MixUp"),
        ((*FIRST, MixUp(), Normalize()), "comes after MixUp"),
        ((*FIRST, Normalize(), CutMix(), RandomErasing()), "comes after CutMix"),
        ((*FIRST, ColorJitter), "the class ColorJitter, wanted an instance"),
    ],
)
def test_operations_that_do_not_fit_together_are_refused(recipe, message):
    with pytest.raises(RecipeError, match=message):
        check_recipe(recipe, images=ANY_SIZE)


def test_mixing_is_listed_and_left_to_others():
    recipe = (*FIRST, Normalize(), RandomErasing(), Cast("float16"), CutMix(), MixUp(0.3))
    checked = check_recipe(recipe, images=ANY_SIZE)
    assert checked.mixing == (CutMix(), MixUp(0.3))
    assert input_kinds(checked) == input_kinds(check_recipe(recipe[:-2], images=ANY_SIZE))
    assert check_recipe(FIRST, images=ANY_SIZE).mixing == ()


def test_a_recipe_without_them_has_no_further_inputs():
    recipe = (RandomResizedCrop(8), RandomHorizontalFlip(), Normalize())
    found = input_kinds(check_recipe(recipe, images=ANY_SIZE))
    assert set(found) == {"start", "shape", "filter0", "mirror"}
