"""What is refused of operations and of recipes, and that a refusal names the argument."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from penstock.augment import (
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
    RandomErasing,
    RandomGrayscale,
    RandomHorizontalFlip,
    RandomResizedCrop,
    RandomRotation,
    Resize,
    TrivialAugmentWide,
    check_recipe,
    input_names,
)
from penstock.cache import RecipeError
from penstock.readers import ImageRange

ANY = ImageRange(min_height=1, max_height=65_535, min_width=1, max_width=65_535)

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
@settings(max_examples=50, deadline=None)
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
        ((*FIRST, ColorJitter(0.1), CenterCrop(4)), "crops and resizes first"),
        ((*FIRST, ColorJitter(0.1), Resize((4, 4))), "crops and resizes first"),
        ((ColorJitter(0.1), RandomResizedCrop(4)), "crops and resizes first"),
        ((Resize(8), ColorJitter(0.1)), "of sizes that nobody knows"),
        ((*FIRST, Normalize(), ColorJitter(0.1)), "stands after Normalize"),
        ((*FIRST, RandomErasing(), Normalize()), "put RandomErasing behind it"),
        ((*FIRST, RandomErasing(), RandomGrayscale()), "stands after RandomErasing"),
        ((*FIRST, RandomErasing(), RandomHorizontalFlip()), "stands after RandomErasing"),
        ((*FIRST, Cast("float32"), RandomErasing()), "put Cast after it"),
        ((*FIRST, Normalize(), RandomErasing(value=(1, 2))), r"value=.*got 2 numbers, wanted 1 or"),
        ((*FIRST, RandomErasing(value=0.5)), "whole numbers from 0 to 255"),
        ((*FIRST, RandomErasing(value=-1), Cast("uint8")), "whole numbers from 0 to 255"),
        ((*FIRST, GaussianBlur(17)), "wanted less than twice"),
        ((*FIRST, GaussianBlur((3, 17))), "wanted less than twice"),
        ((*GRAY, ColorJitter(saturation=0.1)), "works on colours"),
        ((*GRAY, ColorJitter(hue=0.1)), "works on colours"),
        ((*GRAY, RandomGrayscale()), "works on colours"),
        ((*GRAY, RandAugment()), "works on colours"),
        ((*FIRST, MixUp()), "ends in uint8"),
        ((*FIRST, Cast("uint8"), CutMix()), "ends in uint8"),
        ((*FIRST, Normalize(), MixUp(), CutMix(), MixUp()), "Two MixUp"),
        ((*FIRST, MixUp(), Normalize()), "put it last"),
        ((*FIRST, Normalize(), CutMix(), RandomErasing()), "put it last"),
        ((*FIRST, ColorJitter), "the class ColorJitter, wanted a value"),
    ],
)
def test_what_does_not_fit_is_refused(recipe, message):
    with pytest.raises(RecipeError, match=message):
        check_recipe(recipe, images=ANY)


def test_mixing_is_told_and_left_to_others():
    recipe = (*FIRST, Normalize(), RandomErasing(), Cast("float16"), CutMix(), MixUp(0.3))
    checked = check_recipe(recipe, images=ANY)
    assert checked.mixing == (CutMix(), MixUp(0.3))
    assert input_names(checked) == input_names(check_recipe(recipe[:-2], images=ANY))
    assert check_recipe(FIRST, images=ANY).mixing == ()


def test_a_recipe_without_them_has_no_further_inputs():
    recipe = (RandomResizedCrop(8), RandomHorizontalFlip(), Normalize())
    assert input_names(check_recipe(recipe, images=ANY)) == ["start", "shape", "filter0", "mirror"]
