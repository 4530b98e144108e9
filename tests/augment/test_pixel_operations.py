"""Pixel operations: torchvision's formulas, and the same bits in any batch.

The references here are torchvision's published formulas in numpy, on float64 and without its
rounding to whole numbers between two steps. Tolerances are in units of 1/255.
"""

from __future__ import annotations

import colorsys
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from penstock.augment import (
    Apply,
    AutoAugment,
    Cast,
    ColorJitter,
    Decode,
    GaussianBlur,
    Graph,
    GraphPlan,
    Normalize,
    RandAugment,
    RandomAutocontrast,
    RandomEqualize,
    RandomErasing,
    RandomGrayscale,
    RandomHorizontalFlip,
    RandomPosterize,
    RandomResizedCrop,
    RandomRotation,
    Resize,
    Solarize,
    TrivialAugmentWide,
    check_recipe,
    draw,
    input_kinds,
)
from penstock.cache import RecipeError
from penstock.readers import EncodedBatch, ImageRange
from tests.conftest import photograph
from tests.images import encoded_array
from tests.properties import examples

HEIGHT, WIDTH = 37, 48


SAMPLES = 64


FIXED = ImageRange(min_height=HEIGHT, max_height=HEIGHT, min_width=WIDTH, max_width=WIDTH)


def picture(number):
    """A photograph, with every fourth full of noise: saturated colours and hard edges."""
    if number % 4 == 3:
        return np.random.default_rng(number).integers(0, 256, (HEIGHT, WIDTH, 3), np.uint8)
    pixels = Image.fromarray(photograph(number)).resize((WIDTH, HEIGHT))
    return np.asarray(pixels)


@pytest.fixture(scope="module")
def pictures():
    return np.stack([picture(number) for number in range(SAMPLES)])


@pytest.fixture(scope="module")
def encoded(pictures):
    return [encoded_array(pixels) for pixels in pictures]


def run(
    recipe,
    encoded,
    *,
    rows=None,
    batch_size=SAMPLES,
    threads=2,
    seed=1,
    epoch=0,
    device="cpu",
    **options,
):
    """The recipe's batches as one array, and the draws of all rows."""
    checked = check_recipe(recipe, images=FIXED)
    rows = np.arange(len(encoded)) if rows is None else np.asarray(rows)
    device_id = 0 if device == "cuda" else None
    plan = GraphPlan(
        checked, batch_size=batch_size, threads=threads, device_id=device_id, **options
    )
    graph = Graph(plan)
    parts, drawn = [], []
    for start in range(0, len(rows), batch_size):
        part = rows[start : start + batch_size]
        dims = np.full((len(part), 2), (HEIGHT, WIDTH), np.int32)
        draws = draw(checked, ids=part * 7 + 5, dims=dims, seed=seed, epoch=epoch)
        batch = EncodedBatch(ids=part * 7 + 5, encoded=[encoded[row] for row in part], dims=dims)
        graph.feed(batch, draws)
        parts.append(graph.outputs().cpu().numpy())
        drawn.append(draws)
    graph.close()
    together = {name: np.concatenate([draws[name] for draws in drawn]) for name in drawn[0]}
    return np.concatenate(parts), together


def hwc(batch):
    return batch.transpose(0, 2, 3, 1).astype(np.float64)


def luma(images):
    return (images @ np.array([0.2989, 0.587, 0.114]))[..., None]


# -- torchvision's formulas (transforms/_functional_tensor.py)


def blend(images, others, factor):
    factor = factor.astype(np.float64).reshape(-1, 1, 1, 1)
    return np.clip(factor * images + (1 - factor) * others, 0, 255)


def adjust_hue(images, shifts):
    result = np.empty_like(images)
    for image, shift, out in zip(images / 255, shifts.astype(np.float64), result, strict=True):
        for place in np.ndindex(image.shape[:2]):
            hue, saturation, value = colorsys.rgb_to_hsv(*image[place])
            out[place] = colorsys.hsv_to_rgb((hue + shift) % 1, saturation, value)
    return result * 255


ADJUST = {
    "brightness": lambda images, factor: blend(images, np.zeros_like(images), factor),
    "contrast": lambda images, factor: blend(
        images, luma(images).mean(axis=(1, 2, 3), keepdims=True), factor
    ),
    "saturation": lambda images, factor: blend(images, luma(images), factor),
    "hue": adjust_hue,
}


@pytest.mark.parametrize(
    ("name", "value", "most"),
    [("brightness", 0.8, 1), ("contrast", 0.8, 1.5), ("saturation", 1.0, 2), ("hue", 0.5, 1)],
)
def test_each_jitter_is_torchvisions_formula(pictures, encoded, name, value, most):
    got, draws = run((ColorJitter(**{name: value}),), encoded[:24])
    wanted = ADJUST[name](pictures[:24].astype(np.float64), draws[f"ColorJitter1.{name}"])
    assert got.dtype == np.uint8
    assert np.abs(hwc(got) - wanted).max() <= most


def test_all_four_jitters_follow_one_another(pictures, encoded):
    got, draws = run((ColorJitter(0.4, 0.4, 0.4, 0.1),), encoded[:24])
    wanted = pictures[:24].astype(np.float64)
    for name, adjust in ADJUST.items():
        wanted = adjust(wanted, draws[f"ColorJitter1.{name}"])
    gap = np.abs(hwc(got) - wanted)
    assert gap.mean() < 1
    assert np.quantile(gap, 0.999) <= 5


def test_grey_images_take_brightness_and_contrast(pictures, encoded):
    got, draws = run((Decode("gray"), ColorJitter(0.5, 0.5)), encoded)
    wanted = luma(pictures.astype(np.float64))
    wanted = blend(wanted, np.zeros_like(wanted), draws["ColorJitter1.brightness"])
    wanted = blend(
        wanted, wanted.mean(axis=(1, 2, 3), keepdims=True), draws["ColorJitter1.contrast"]
    )
    assert got.shape == (SAMPLES, 1, HEIGHT, WIDTH)
    assert np.abs(hwc(got) - wanted).max() <= 3


def test_grayscale_changes_some_to_luma(pictures, encoded):
    got, draws = run((RandomGrayscale(0.4),), encoded)
    on = draws["RandomGrayscale1.on"]
    assert 0 < on.sum() < SAMPLES
    np.testing.assert_array_equal(hwc(got)[~on], pictures[~on])
    assert np.abs(hwc(got)[on] - luma(pictures[on].astype(np.float64))).max() <= 1


def posterize(image, bits):
    return image & (((1 << bits) - 1) << (8 - bits))


def solarize(image, threshold):
    return np.where(image >= threshold, 255 - image, image)


def autocontrast(image):
    low, high = (f(image.astype(float), axis=(0, 1)) for f in (np.min, np.max))
    flat = low == high
    scale = np.where(flat, 1, (high - low) / 255)
    return np.clip((image - np.where(flat, 0, low)) / scale, 0, 255)


def equalize(image):
    """By torchvision's steps of whole pixels."""
    done = image.copy()
    for channel in range(image.shape[-1]):
        count = np.bincount(image[..., channel].ravel(), minlength=256)
        step = (count.sum() - count[count.nonzero()[0][-1]]) // 255
        if step:
            table = np.clip((np.cumsum(count) - count + step // 2) // step, 0, 255)
            done[..., channel] = table[image[..., channel]]
    return done


LEVELS = [
    (RandomPosterize(3, 0.6), lambda image: posterize(image, 3), 0),
    (RandomPosterize(0, 0.6), lambda image: posterize(image, 0), 0),
    (RandomPosterize(8, 0.6), lambda image: image, 0),
    (Solarize(100, 0.6), lambda image: solarize(image, 100), 0),
    (Solarize(99.5, 0.6), lambda image: solarize(image, 99.5), 0),
    (Solarize(0, 1.0), lambda image: 255 - image, 0),
    (RandomAutocontrast(0.6), autocontrast, 0.51),
    (RandomEqualize(0.6), equalize, 0),
]


@pytest.mark.parametrize("color", ["rgb", "gray"])
@pytest.mark.parametrize(("op", "formula", "most"), LEVELS, ids=lambda x: str(x)[:24])
def test_levels_are_torchvisions_formulas(encoded, color, op, formula, most):
    before, _ = run((Decode(color),), encoded)
    got, draws = run((Decode(color), op), encoded)
    on = draws.get(f"{type(op).__name__}1.on", np.ones(SAMPLES, bool))
    assert on.any()
    assert on.all() == (op.p == 1)
    for image, source, changes in zip(hwc(got), before.transpose(0, 2, 3, 1), on, strict=True):
        wanted = formula(source) if changes else source
        assert np.abs(image - wanted).max() <= most


@pytest.mark.parametrize(("kernel", "p"), [((5, 9), 0.6), ((23, 23), 1.0), ((1, 3), 1.0)])
def test_blur_is_torchvisions_kernel(pictures, encoded, kernel, p):
    got, draws = run((GaussianBlur(kernel, sigma=(0.1, 3.0), p=p),), encoded)
    on, sigmas = draws["GaussianBlur1.on"], draws["GaussianBlur1.sigma"]
    assert on.all() == (p == 1)
    for image, before, blurs, sigma in zip(hwc(got), pictures, on, sigmas, strict=True):
        wanted = before.astype(np.float64)
        for axis, side in ((0, kernel[1]), (1, kernel[0])) if blurs else ():
            place = np.arange(side) - side // 2
            weights = np.exp(-0.5 * (place / sigma) ** 2)
            padding = [(side // 2, side // 2) if axis == k else (0, 0) for k in range(3)]
            padded = np.pad(wanted, padding, mode="reflect")
            wanted = sum(
                weight * np.take(padded, np.arange(before.shape[axis]) + k, axis=axis)
                for k, weight in enumerate(weights / weights.sum())
            )
        assert np.abs(image - wanted).max() <= (0.6 if blurs else 0)


def test_rotation_is_torchvisions_nearest(pictures, encoded):
    got, draws = run((RandomRotation(70, fill=9),), encoded)
    rows, columns = np.mgrid[:HEIGHT, :WIDTH]
    same = []
    for image, before, matrix in zip(
        hwc(got), pictures, draws["RandomRotation1.matrix"], strict=True
    ):
        cos, sin = matrix[0, 0], matrix[1, 0]
        y, x = rows - (HEIGHT - 1) / 2, columns - (WIDTH - 1) / 2
        # counter-clockwise on the screen, where y grows downwards
        from_x = np.rint(cos * x - sin * y + (WIDTH - 1) / 2).astype(int)
        from_y = np.rint(sin * x + cos * y + (HEIGHT - 1) / 2).astype(int)
        inside = (from_x >= 0) & (from_x < WIDTH) & (from_y >= 0) & (from_y < HEIGHT)
        wanted = before[from_y.clip(0, HEIGHT - 1), from_x.clip(0, WIDTH - 1)]
        wanted = np.where(inside[..., None], wanted, 9)
        same.append((wanted == image).all(axis=-1).mean())
    assert min(same) > 0.995  # pixels whose source lies between two, by rounding


@pytest.mark.parametrize("value", [0.0, (0.5, -1.0, 2.0)])
def test_erasing_stands_after_normalize(pictures, encoded, value):
    normalize = Normalize((0.4, 0.5, 0.6), (0.2, 0.3, 0.4))
    got, draws = run((normalize, RandomErasing(0.7, value=value)), encoded)
    wanted = (pictures / 255 - normalize.mean) / np.array(normalize.std)
    anchors, shapes = (draws[f"RandomErasing2.{name}"] for name in ("anchor", "shape"))
    for image, (y, x), (h, w) in zip(wanted, anchors.astype(int), shapes.astype(int), strict=True):
        image[y : y + h, x : x + w] = value
    assert 0 < (shapes[:, 0] > 0).sum() < SAMPLES
    np.testing.assert_allclose(hwc(got), wanted, atol=5e-6)


@pytest.mark.parametrize(("cast", "value"), [("uint8", 255), ("float16", 0.5), ("float32", -3)])
def test_erasing_works_on_any_dtype(pictures, encoded, cast, value):
    got, draws = run((RandomErasing(1.0, value=value), Cast(cast)), encoded)
    wanted = pictures.astype(cast)
    anchors, shapes = (draws[f"RandomErasing1.{name}"] for name in ("anchor", "shape"))
    for image, (y, x), (h, w) in zip(wanted, anchors.astype(int), shapes.astype(int), strict=True):
        image[y : y + h, x : x + w] = value
    np.testing.assert_array_equal(got, wanted.transpose(0, 3, 1, 2))


def test_a_users_function_gets_images_and_draws(pictures, encoded):
    def shade(images, draws):
        return images * draws[0] + draws[1] * 100.0

    got, draws = run((Apply(shade, draws=2), Apply(lambda images, _: images)), encoded)
    numbers = draws["Apply1.draws"].astype(np.float64).reshape(SAMPLES, 1, 1, 2)
    wanted = pictures * numbers[..., :1] + numbers[..., 1:] * 100
    assert np.abs(hwc(got) - np.clip(wanted, 0, 255)).max() <= 0.51


def flat(images, _):
    from nvidia.dali import fn

    return fn.resize(images, size=[5, 6])


def planes(images, _):
    from nvidia.dali import fn

    return fn.transpose(images, perm=[2, 0, 1])


def outside(images, _):
    from nvidia.dali import fn

    return fn.crop(images, crop=[HEIGHT + 1, 2])


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (flat, r"returned \(5, 6, 3\).*wanted the same shape"),
        (planes, "in layout 'CHW'"),
        (lambda images, _: images[:, :, 0:1], r"returned \(37, 48, 1\)"),
        (outside, "fails on one image"),
        (lambda images, draws: images * draws[1], "fails on one image"),
        (lambda *_: None, r"Apply.*returned.*one DALI node"),
        (lambda images, _: [images], r"Apply.*returned.*one DALI node"),
    ],
)
def test_a_users_function_is_tried_out_before_samples_are_blamed(encoded, function, message):
    with pytest.raises(RecipeError, match=message):
        run((Apply(function),), encoded)


# -- the flip


def test_a_flip_happens_in_its_place(encoded):
    """Rotation does not commute with a flip: flip and turn by x is turn by -x and flip."""
    flip = RandomHorizontalFlip(1.0)
    first, draws = run((flip, RandomRotation((30, 30))), encoded)
    assert "mirror" in draws
    last, draws = run((RandomRotation((30, 30)), flip), encoded)
    assert "mirror" not in draws
    assert draws["RandomHorizontalFlip2.on"].all()
    turned, _ = run((RandomRotation((30, 30)),), encoded)
    back, _ = run((RandomRotation((-30, -30)),), encoded)
    np.testing.assert_array_equal(last, turned[..., ::-1])
    assert (first == back[..., ::-1]).mean() > 0.99
    assert (first != last).mean() > 0.2


def test_flips_are_folded_into_one_where_nothing_sees_sides(pictures, encoded):
    flip, jitter = RandomHorizontalFlip(), ColorJitter(0.3)
    recipe = (flip, jitter, RandomHorizontalFlip(), GaussianBlur(3), flip, RandomGrayscale())
    checked = check_recipe(recipe, images=FIXED)
    assert [name for name in input_kinds(checked) if "mirror" in name or "Flip" in name] == [
        "mirror"
    ]
    # as many flips one by one, by a function that keeps them from being folded
    same = Apply(lambda images, _: images)
    spread = (flip, same, RandomHorizontalFlip(), same, flip, same)
    got, draws = run(spread, encoded)
    names = ["mirror", "RandomHorizontalFlip3.on", "RandomHorizontalFlip5.on"]
    odd = sum(draws[name].astype(int) for name in names) % 2 == 1
    np.testing.assert_array_equal(hwc(got)[odd], pictures[odd][:, :, ::-1])
    np.testing.assert_array_equal(hwc(got)[~odd], pictures[~odd])


def test_a_flip_after_a_window_and_before_an_operation(encoded):
    """The window's own flip is made once, wherever it is made."""
    crop = (RandomHorizontalFlip(), RandomResizedCrop((20, 24)))
    plain, _ = run(crop, encoded)
    same, draws = run((*crop, Apply(lambda images, _: images)), encoded)
    assert 0 < draws["mirror"].sum() < SAMPLES
    np.testing.assert_array_equal(plain, same)


# -- determinism

STRONG = (
    RandomResizedCrop((30, 34)),
    ColorJitter(0.4, 0.4, 0.4, 0.1),
    RandomHorizontalFlip(),
    RandomGrayscale(0.3),
    GaussianBlur(5, p=0.5),
    RandomRotation(20, interpolation="bilinear"),
    Apply(lambda images, draws: images * draws[0], draws=3),
)


POLICIES = (RandAugment(), TrivialAugmentWide(), RandomHorizontalFlip(), AutoAugment())


RECIPES = {
    "levels": (RandomPosterize(3), ColorJitter(0.2), Solarize(99), RandomEqualize(0.3)),
    "uint8": (*STRONG, RandomErasing()),
    "normal": (*STRONG, Normalize(), RandomErasing(0.5, value=(1, 2, 3)), Cast("float16")),
    "policies": (Resize((30, 34)), *POLICIES, Normalize()),
    "gray": (
        Decode("gray"),
        ColorJitter(0.4, 0.4),
        GaussianBlur(3),
        RandomRotation(30),
        RandomErasing(),
    ),
}


@pytest.mark.parametrize("name", RECIPES)
def test_the_same_bits_at_any_batch_size_thread_count_and_order(encoded, name):
    whole, _ = run(RECIPES[name], encoded, batch_size=SAMPLES)
    order = np.random.default_rng(0).permutation(SAMPLES)
    for size, threads, rows in ((16, 1, order), (5, 2, order[:20]), (1, 2, order[20:32])):
        part, _ = run(RECIPES[name], encoded, rows=rows, batch_size=size, threads=threads)
        np.testing.assert_array_equal(part, whole[rows])
    later, _ = run(RECIPES[name], encoded, epoch=1)
    assert (later != whole).reshape(SAMPLES, -1).any(axis=1).mean() > 0.95


@pytest.mark.parametrize("name", RECIPES)
def test_constant_decode_takes_all_inputs(encoded, name):
    images, _ = run(RECIPES[name], encoded[:8], constant=True)
    assert not images.any()


@pytest.mark.gpu
@pytest.mark.parametrize("name", RECIPES)
def test_cuda_gives_nearly_the_pixels_of_the_cpu(encoded, name):
    ours, _ = run(RECIPES[name], encoded)
    theirs, _ = run(RECIPES[name], encoded, device="cuda")
    scale = 1 if ours.dtype != np.uint8 else 60
    assert np.abs(ours.astype(np.float64) - theirs).mean() < 0.05 * scale


@given(
    rows=st.lists(st.integers(0, 2**62), min_size=1, max_size=20, unique=True),
    seed=st.integers(0, 2**63),
    epoch=st.integers(0, 1000),
    name=st.sampled_from(sorted(RECIPES)),
)
@examples(60)
def test_a_sample_draws_the_same_in_any_batch(rows, seed, epoch, name):
    checked = check_recipe(RECIPES[name], images=FIXED)

    def draws(ids):
        dims = np.full((len(ids), 2), (HEIGHT, WIDTH), np.int32)
        return draw(checked, ids=np.array(ids), dims=dims, seed=seed, epoch=epoch)

    whole, first, last = draws(rows), draws(rows[:1]), draws(rows[::-1])
    assert sorted(whole) == sorted(input_kinds(checked))
    for key, values in whole.items():
        assert values.flags.c_contiguous
        np.testing.assert_array_equal(values[:1], first[key])
        np.testing.assert_array_equal(values[::-1], last[key])


ANY = ImageRange(min_height=1, max_height=65_535, min_width=1, max_width=65_535)


def drawn(op, *, count=20_000, epoch=0, height=40, width=50):
    """An operation's argument inputs for many samples, by suffix."""
    recipe = check_recipe((Resize((height, width)), op), images=ANY)
    dims = np.full((count, 2), 64, np.int32)
    inputs = draw(recipe, ids=np.arange(count), dims=dims, seed=3, epoch=epoch)
    return {name.partition(".")[2]: values for name, values in inputs.items()}


def uniform_from(values, low, high):
    deciles = np.quantile(values, np.linspace(0, 1, 11))
    np.testing.assert_allclose(deciles, np.linspace(low, high, 11), atol=0.016 * (high - low))
    assert values.min() >= np.float32(low)
    assert values.max() <= np.float32(high)


def test_factors_are_uniform_and_independent():
    got = drawn(ColorJitter(0.4, 2.0, (0.5, 3.0), 0.2))
    for name, low, high in (
        ("brightness", 0.6, 1.4),
        ("contrast", 0, 3),
        ("saturation", 0.5, 3),
        ("hue", -0.2, 0.2),
    ):
        uniform_from(got[name], low, high)
    assert np.abs(np.corrcoef(list(got.values())) - np.eye(4)).max() < 0.035
    assert list(drawn(ColorJitter(hue=0.2))) == ["hue"]
    np.testing.assert_array_equal(drawn(ColorJitter(hue=0.2))["hue"], got["hue"])


def test_other_draws_are_as_torchvision_draws():
    matrix = drawn(RandomRotation((-5, 90)))["matrix"]
    uniform_from(np.degrees(np.arctan2(matrix[:, 1, 0], matrix[:, 0, 0])), -5, 90)
    blur = drawn(GaussianBlur((5, 23), p=0.3))
    uniform_from(blur["sigma"], 0.1, 2.0)
    assert abs(blur["on"].mean() - 0.3) < 0.016
    assert (blur["window"] % 2 == 1).all()
    assert blur["window"].max(axis=0).tolist() == [17, 5]  # 4 sigma a side at most; (y, x)
    assert abs(drawn(RandomGrayscale())["on"].mean() - 0.1) < 0.016
    for k in range(3):
        uniform_from(drawn(Apply(print, draws=3))["draws"][:, k], 0, 1)
    assert drawn(Apply(print))["draws"].max() < 1


def erased_by_torchvision(rng, op, height, width):
    """RandomErasing.get_params, one sample."""
    if rng.random() >= op.p:
        return 0, 0, 0, 0
    for _ in range(10):
        area = height * width * rng.uniform(*op.scale)
        ratio = math.exp(rng.uniform(*map(math.log, op.ratio)))
        h, w = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if h < height and w < width:
            return rng.integers(0, height - h + 1), rng.integers(0, width - w + 1), h, w
    return 0, 0, 0, 0


@pytest.mark.parametrize(
    ("op", "size"),
    [
        (RandomErasing(), (40, 50)),
        (RandomErasing(1.0, scale=(0.3, 0.9), ratio=(0.1, 9.0)), (20, 60)),
        (RandomErasing(1.0, scale=(0.9, 1.0), ratio=(5.0, 9.0)), (20, 20)),
    ],
)
def test_erased_windows_are_as_torchvision_draws(op, size):
    got = drawn(op, height=size[0], width=size[1])
    ours = np.concatenate([got["anchor"], got["shape"]], axis=1)
    rng = np.random.default_rng(5)
    theirs = np.array([erased_by_torchvision(rng, op, *size) for _ in range(len(ours))])
    assert (ours[:, :2] + ours[:, 2:] <= size).all()
    for k in range(4):
        levels = np.arange(max(size))[:, None]
        gap = (ours[:, k] <= levels).mean(axis=1) - (theirs[:, k] <= levels).mean(axis=1)
        assert np.abs(gap).max() < 0.022  # both are samples: 4.5 times the standard error of a gap
