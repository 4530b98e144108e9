"""Policies: the published tables, what is drawn, and pixels against Pillow's own operations.

The reference is Pillow, called as torchvision calls it for Pillow images.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageEnhance, ImageOps

from penstock.augment import (
    KINDS,
    AutoAugment,
    ImageShape,
    RandAugment,
    TrivialAugmentWide,
    dali_nodes,
    learnt_pairs,
    rotation,
    strengths,
)
from penstock.cache.base import keyed_hash, unit
from tests.properties import examples

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from penstock.augment import Policy

HEIGHT, WIDTH = 61, 80
FILL = 7
POLICIES: list[Policy] = [
    RandAugment(fill=FILL),
    RandAugment(num_ops=3, magnitude=30, fill=FILL),
    TrivialAugmentWide(fill=FILL),
    AutoAugment("imagenet", fill=FILL),
    AutoAugment("cifar10", fill=FILL),
    AutoAugment("svhn", fill=FILL),
]


SHAPE = ImageShape(HEIGHT, WIDTH, 3)


def kinds(draws: dict[str, NDArray[Any]]) -> dict[str, tuple[str, int]]:
    return {name: (values.dtype.name, values.ndim - 1) for name, values in draws.items()}


class Keyed:
    """Draws of these samples, as the recipe hands them to a policy."""

    def __init__(self, samples: NDArray[np.int64]) -> None:
        self.samples = samples

    def __call__(self, count: int, /) -> NDArray[np.float64]:
        return unit(keyed_hash(7, np.arange(count)[:, None], self.samples))


def photographs(count: int, *, height: int = HEIGHT, width: int = WIDTH) -> list[Any]:
    """Smooth shapes and some noise."""
    rng = np.random.default_rng(3)
    made = []
    for _ in range(count):
        coarse = Image.fromarray(rng.integers(0, 256, (6, 8, 3), dtype=np.uint8))
        smooth = np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC)).astype(int)
        noisy = smooth + rng.integers(-9, 10, smooth.shape)
        made.append(np.clip(noisy, 0, 255).astype(np.uint8))
    return made


def run(
    op: Policy, images: list[Any], draws: dict[str, NDArray[Any]], *, device: str = "cpu"
) -> Any:
    """The images after a policy; (n, h, w, 3)."""
    from nvidia.dali import Pipeline, fn, types

    dtypes = {"int32": types.INT32, "float32": types.FLOAT}
    pipe = Pipeline(
        batch_size=len(images),
        num_threads=1,
        device_id=None if device == "cpu" else 0,
        prefetch_queue_depth=1,
        exec_dynamic=True,
    )
    with pipe:
        pixels = fn.external_source(name="images", layout="HWC", dtype=types.UINT8, ndim=3)
        nodes = {
            name: fn.external_source(name=name, dtype=dtypes[dtype], ndim=dimensions)
            for name, (dtype, dimensions) in kinds(draws).items()
        }
        done = op.node(pixels if device == "cpu" else pixels.gpu(), nodes, SHAPE)
        pipe.set_outputs(done if device == "cpu" else done.cpu())
    pipe.build()
    pipe.feed_input("images", images)
    for name, values in draws.items():
        pipe.feed_input(name, values)
    pipe.schedule_run()
    return np.stack([np.array(image) for image in pipe.outputs()[0]])


def one(kind: str, *, value: float = 0.0, matrix: Any = None) -> dict[str, NDArray[Any]]:
    """Arguments of one round for one sample."""
    unmoved = np.eye(3) if matrix is None else matrix
    return {
        "kind0": np.array([KINDS.index(kind)], np.int32),
        "value0": np.array([value], np.float32),
        "matrix0": np.asarray(unmoved, np.float32)[None],
    }


def pillow(pixels: Any, name: str, strength: float) -> Any:
    """One operation as torchvision does it to a Pillow image."""
    image = Image.fromarray(pixels)
    size, fill = image.size, (FILL,) * 3

    def warp(*matrix: float) -> Image.Image:
        return image.transform(
            size, Image.Transform.AFFINE, matrix, Image.Resampling.NEAREST, fillcolor=fill
        )

    enhance = {
        "Brightness": ImageEnhance.Brightness,
        "Color": ImageEnhance.Color,
        "Contrast": ImageEnhance.Contrast,
        "Sharpness": ImageEnhance.Sharpness,
    }
    if name in enhance:
        return np.asarray(enhance[name](image).enhance(1 + strength))
    done = {
        "Identity": lambda: image,
        "ShearX": lambda: warp(1, strength, 0, 0, 1, 0),
        "ShearY": lambda: warp(1, 0, 0, strength, 1, 0),
        "TranslateX": lambda: warp(1, 0, -int(strength), 0, 1, 0),
        "TranslateY": lambda: warp(1, 0, 0, 0, 1, -int(strength)),
        "Rotate": lambda: image.rotate(strength, Image.Resampling.NEAREST, fillcolor=fill),
        "Posterize": lambda: ImageOps.posterize(image, int(strength)),
        "Solarize": lambda: ImageOps.solarize(image, strength),  # type: ignore[arg-type]
        "AutoContrast": lambda: ImageOps.autocontrast(image),
        "Invert": lambda: ImageOps.invert(image),
    }[name]()
    return np.asarray(done)


def equalized(pixels: Any) -> Any:
    """OpenCV's equalizeHist, channel by channel."""
    done = pixels.copy()
    for channel in range(pixels.shape[2]):
        count = np.bincount(pixels[..., channel].ravel(), minlength=256)
        first = count[count.nonzero()[0][0]]
        if first < pixels[..., channel].size:
            levels = (count.cumsum() - first) * 255 / (pixels[..., channel].size - first)
            done[..., channel] = np.rint(levels.clip(0)).astype(np.uint8)[pixels[..., channel]]
    return done


@cache
def trivial() -> tuple[list[str], NDArray[Any], list[Any], Any]:
    """Names, strengths, images and results of TrivialAugmentWide, which has all operations."""
    op = TrivialAugmentWide(fill=FILL)
    images, draws = photographs(320), Keyed(np.arange(320))
    choice = op.choose(draws, SHAPE)[0]
    entries = [*op.space(HEIGHT, WIDTH)]
    names = [entries[number] for number in choice[0]]
    done = run(op, images, op.draw(draws, SHAPE))
    return names, strength_of(op, choice, HEIGHT, WIDTH), images, done


def strength_of(op: Policy, choice: Any, height: int, width: int) -> Any:
    last = op.space(height, width)
    bins = op.num_magnitude_bins
    return np.array([strengths(name, most, bins) for name, most in last.items()])[choice]


EXACT = ["Identity", "TranslateX", "TranslateY", "Posterize", "Solarize"]
ROUNDED = ["Brightness", "Contrast", "AutoContrast", "Color"]


@pytest.mark.parametrize("name", EXACT)
def test_whole_number_operations_give_pillows_pixels(name: str) -> None:
    for difference in differences(name):
        assert difference.max() == 0


@pytest.mark.parametrize("name", ["ShearX", "ShearY", "Rotate"])
def test_at_most_one_percent_of_warped_pixels_come_from_a_neighbour(name: str) -> None:
    for difference in differences(name):
        assert (difference > 0).any(axis=-1).mean() <= 0.01


@pytest.mark.parametrize("name", ROUNDED)
def test_blends_are_pillows_but_for_rounding(name: str) -> None:
    most = 2 if name == "Color" else 1  # both the grey image and the blend are rounded
    for difference in differences(name):
        assert difference.max() <= most


def test_sharpness_is_pillows_but_for_rounding_inside_the_outermost_pixels() -> None:
    for difference in differences("Sharpness"):
        assert difference[1:-1, 1:-1].max() <= 1
        assert difference.max() <= 128


def differences(name: str) -> list[Any]:
    names, strength, images, done = trivial()
    rows = [row for row, found in enumerate(names) if found == name]
    assert len(rows) >= 5
    return [
        np.abs(done[row].astype(int) - pillow(images[row], name, strength[row])) for row in rows
    ]


def test_equalize_is_opencvs() -> None:
    names, _, images, done = trivial()
    for row in (row for row, name in enumerate(names) if name == "Equalize"):
        assert np.abs(done[row].astype(int) - equalized(images[row])).max() <= 1


def test_equalize_of_a_photograph_is_near_pillows() -> None:
    images = photographs(4, height=224, width=224)
    for image in images:
        done = run(TrivialAugmentWide(), [image], one("equalize"))[0]
        wanted = np.asarray(ImageOps.equalize(Image.fromarray(image)))
        assert np.abs(done.astype(int) - wanted).mean() <= 2


def test_invert_is_exact() -> None:
    image = photographs(1)[0]
    done = run(TrivialAugmentWide(), [image], one("solarize", value=0))[0]
    np.testing.assert_array_equal(done, pillow(image, "Invert", 0))


@pytest.mark.parametrize("kind", ["autocontrast", "equalize"])
@pytest.mark.parametrize("level", [0, 100, 255])
def test_a_plain_image_stays_as_it_is(kind: str, level: int) -> None:
    plain = np.full((5, 9, 3), level, np.uint8)
    np.testing.assert_array_equal(run(TrivialAugmentWide(), [plain], one(kind))[0], plain)


@pytest.mark.parametrize("kind", ["brightness", "contrast", "color", "sharpness"])
def test_a_factor_of_one_changes_nothing(kind: str) -> None:
    image = photographs(1)[0]
    np.testing.assert_array_equal(run(TrivialAugmentWide(), [image], one(kind, value=1))[0], image)


def test_a_quarter_turn_goes_counterclockwise() -> None:
    square = photographs(1, height=40, width=40)[0]
    matrix = rotation(np.array([90.0]), 40, 40)[0]
    done = run(TrivialAugmentWide(), [square], one("affine", matrix=matrix))[0]
    assert (done == np.rot90(square)).all(axis=-1).mean() >= 0.95


@pytest.mark.parametrize("op", POLICIES, ids=str)
def test_pixels_depend_on_the_sample_only(op: Policy) -> None:
    """In another order and in smaller batches, every bit is the same."""
    samples = np.arange(40)
    images = photographs(40)

    def done(rows: NDArray[np.int64]) -> Any:
        draws = op.draw(Keyed(samples[rows]), SHAPE)
        return run(op, [images[row] for row in rows], draws)

    whole = done(samples)
    shuffled = np.random.default_rng(1).permutation(40)
    np.testing.assert_array_equal(done(shuffled), whole[shuffled])
    np.testing.assert_array_equal(done(samples[:1]), whole[:1])
    np.testing.assert_array_equal(done(samples[5:12]), whole[5:12])


@pytest.mark.parametrize("op", POLICIES, ids=str)
@given(first=st.integers(0, 10**9), height=st.integers(1, 500), width=st.integers(1, 500))
@examples(30)
def test_draws_are_rows_of_the_declared_types(
    op: Policy, first: int, height: int, width: int
) -> None:
    shape = ImageShape(height, width, 3)
    draws = op.draw(Keyed(np.arange(first, first + 50)), shape)
    types = {"kind": ("int32", 0), "matrix": ("float32", 2), "value": ("float32", 0)}
    rounds = [(f"{name}{k}", kind) for k in range(op.num_ops) for name, kind in types.items()]
    assert kinds(draws) == dict(rounds)
    for values in draws.values():
        assert len(values) == 50
        assert np.isfinite(values).all()
    for number in range(op.num_ops):
        assert ((draws[f"kind{number}"] >= 0) & (draws[f"kind{number}"] < len(KINDS))).all()


def magnitudes(op: Policy, name: str, *, height: int = 200, width: int = 331) -> Any:
    last = op.space(height, width)[name]
    return strengths(name, last, op.num_magnitude_bins)[:, 0]


@pytest.mark.parametrize(
    ("op", "name", "first", "last"),
    [
        (RandAugment(), "ShearY", 0, 0.3),
        (RandAugment(), "TranslateX", 0, 150),
        (RandAugment(), "TranslateY", 0, 150 / 331 * 200),
        (RandAugment(), "Rotate", 0, 30),
        (RandAugment(), "Color", 0, 0.9),
        (RandAugment(), "Posterize", 8, 4),
        (RandAugment(), "Solarize", 255, 0),
        (TrivialAugmentWide(), "ShearX", 0, 0.99),
        (TrivialAugmentWide(), "TranslateX", 0, 32),
        (TrivialAugmentWide(), "Rotate", 0, 135),
        (TrivialAugmentWide(), "Sharpness", 0, 0.99),
        (TrivialAugmentWide(), "Posterize", 8, 2),
        (AutoAugment(), "Rotate", 0, 30),
        (AutoAugment(), "Posterize", 8, 4),
    ],
)
def test_strengths_span_torchvisions_range(
    op: Policy, name: str, first: float, last: float
) -> None:
    found = magnitudes(op, name)
    assert (found[0], found[-1]) == pytest.approx((first, last))
    if name != "Posterize":
        np.testing.assert_allclose(np.diff(found), (last - first) / (len(found) - 1))


def test_posterize_keeps_the_bits_of_torchvisions_formula() -> None:
    wanted = 8 - np.round(np.arange(31) / (30 / 4)).astype(int)
    np.testing.assert_array_equal(magnitudes(RandAugment(), "Posterize"), wanted)
    wanted = 8 - np.round(np.arange(10) / (9 / 4)).astype(int)
    np.testing.assert_array_equal(magnitudes(AutoAugment(), "Posterize"), wanted)


def shares(values: NDArray[Any], count: int) -> NDArray[np.float64]:
    return np.bincount(values, minlength=count) / len(values)


MANY = 40_000


def test_randaugment_draws_operations_and_signs_evenly() -> None:
    op = RandAugment()
    first, second = op.choose(Keyed(np.arange(MANY)), ImageShape(224, 224, 3))
    for choice in (first, second):
        np.testing.assert_allclose(shares(choice[0], 14), 1 / 14, atol=0.006)
        rotated = strength_of(op, choice, 224, 224)[choice[0] == 5]
        assert set(np.unique(rotated)) == {-9.0, 9.0}
        assert abs((rotated > 0).mean() - 0.5) < 0.03
    together = shares(first[0] * 14 + second[0], 14 * 14)
    np.testing.assert_allclose(together, 1 / 196, atol=0.002)


def test_trivialaugment_draws_operations_and_bins_evenly() -> None:
    op = TrivialAugmentWide()
    choice = op.choose(Keyed(np.arange(MANY)), ImageShape(224, 224, 3))[0]
    np.testing.assert_allclose(shares(choice[0], 14), 1 / 14, atol=0.006)
    angles = np.rint(np.abs(strength_of(op, choice, 224, 224)[choice[0] == 5]) / (135 / 30)).astype(
        int
    )
    np.testing.assert_allclose(shares(angles, 31), 1 / 31, atol=0.015)


@pytest.mark.parametrize("policy", ["imagenet", "cifar10", "svhn"])
def test_autoaugment_uses_each_operation_as_often_as_in_its_table(policy: Any) -> None:
    pairs = learnt_pairs(policy)
    assert len(pairs) == 25
    op = AutoAugment(policy)
    names = [*op.space(32, 32)]
    for number, choice in enumerate(op.choose(Keyed(np.arange(MANY)), ImageShape(32, 32, 3))):
        wanted = dict.fromkeys(names, 0.0)
        for pair in pairs:
            name, probability, at = pair[number]
            assert 0 <= at < 10
            wanted[name] += probability / 25
            wanted["Identity"] += (1 - probability) / 25
        np.testing.assert_allclose(shares(choice[0], len(names)), list(wanted.values()), atol=0.01)


def test_arithmetic_gives_the_pixels_of_the_operators_that_it_replaces_on_cuda() -> None:
    from nvidia.dali import Pipeline, fn, types

    images = [*photographs(8), np.full((9, 5, 3), 77, np.uint8)]
    factors = np.linspace(0.1, 1.9, len(images), dtype=np.float32)
    pipe = Pipeline(batch_size=9, num_threads=1, device_id=None, prefetch_queue_depth=1)
    with pipe:
        pixels = fn.external_source(name="images", layout="HWC", dtype=types.UINT8, ndim=3)
        factor = fn.external_source(name="factor", dtype=types.FLOAT, ndim=0)
        gray = dali_nodes.luma(pixels)
        pipe.set_outputs(
            dali_nodes.contrast(pixels, factor, gray),
            dali_nodes.contrast(pixels, factor, gray, arithmetic=True),
            dali_nodes.autocontrast(pixels),
            dali_nodes.autocontrast(pixels, arithmetic=True),
        )
    pipe.build()
    pipe.feed_input("images", images)
    pipe.feed_input("factor", factors)
    pipe.schedule_run()
    outputs = pipe.outputs()
    for operator, arithmetic in (outputs[:2], outputs[2:]):
        for one_way, other_way in zip(operator, arithmetic, strict=True):
            difference = np.array(one_way).astype(int) - np.array(other_way)
            assert np.abs(difference).max() <= 1


@pytest.mark.gpu
def test_cuda_gives_the_pixels_of_the_cpu_but_for_rounding() -> None:
    op = TrivialAugmentWide(fill=FILL)
    draws = op.draw(Keyed(np.arange(320)), SHAPE)
    names, _, images, cpu = trivial()
    cuda = run(op, images, draws, device="cuda")
    for row, name in enumerate(names):
        difference = np.abs(cuda[row].astype(int) - cpu[row])
        if name.startswith(("Shear", "Rotate")):
            assert (difference > 0).any(axis=-1).mean() <= 0.01, name
        else:
            assert difference.max() <= 1, name
