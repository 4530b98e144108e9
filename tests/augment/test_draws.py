"""Test that draws are a pure function of each sample, and that windows lie inside their image."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from penstock.augment import (
    RESIZED_CROP_ATTEMPTS,
    CenterCrop,
    Normalize,
    RandomHorizontalFlip,
    RandomResizedCrop,
    Resize,
    check_recipe,
    draw,
    imagenet_eval,
    imagenet_train,
    input_kinds,
)
from penstock.cache.base import keyed_hash, unit
from penstock.readers import ImageRange
from tests.properties import examples

ANY = ImageRange(min_height=1, max_height=65_535, min_width=1, max_width=65_535)
RECIPES = [
    imagenet_train(),
    imagenet_eval(),
    (Resize(64), RandomResizedCrop(32), RandomHorizontalFlip(), CenterCrop(20), Resize((9, 7))),
    (RandomHorizontalFlip(), RandomResizedCrop((30, 40), antialias=False), Normalize()),
    (Resize((40, 50)),),
]
sides = st.one_of(st.integers(1, 65_535), st.integers(1, 8))
images = st.lists(st.tuples(sides, sides), min_size=1, max_size=40)


def drawn(recipe, dims, *, ids=None, seed=3, epoch=5, images=ANY):
    dims = np.asarray(dims, np.int32).reshape(-1, 2)
    ids = np.arange(len(dims)) if ids is None else np.asarray(ids)
    checked = check_recipe(recipe, images=images)
    return draw(checked, ids=ids, dims=dims, seed=seed, epoch=epoch)


@pytest.mark.parametrize("recipe", RECIPES)
@given(dims=images, seed=st.integers(0, 2**63), epoch=st.integers(0, 1000))
@example(dims=[(1, 1), (1, 65_535), (65_535, 1), (65_535, 65_535), (2, 3)], seed=0, epoch=0)
@examples(60)
def test_windows_lie_inside_the_image(recipe, dims, seed, epoch):
    inputs = drawn(recipe, dims, seed=seed, epoch=epoch)
    assert sorted(inputs) == sorted(input_kinds(check_recipe(recipe, images=ANY)))
    if "start" in inputs:
        start, shape = inputs["start"], inputs["shape"]
        assert (start >= 0).all()
        assert (shape >= 1).all()
        assert (start.astype(np.int64) + shape <= np.asarray(dims)).all()
    if "low0" in inputs:
        assert (inputs["low0"] >= 0).all()
        assert (inputs["high0"] > inputs["low0"]).all()
        # a float32 this side of an image's edge may be the edge itself, half a step further
        assert (inputs["high0"] <= inputs["shape"] * (1 + 2**-22)).all()


@pytest.mark.parametrize("recipe", RECIPES)
@given(data=st.data(), dims=images)
@examples(40)
def test_a_sample_draws_the_same_in_any_batch(recipe, data, dims):
    ids = np.array(
        data.draw(st.lists(st.integers(0, 2**62), min_size=len(dims), max_size=len(dims)))
    )
    order = np.array(data.draw(st.permutations(range(len(dims)))))
    keep = order[: data.draw(st.integers(1, len(dims)))]
    whole = drawn(recipe, dims, ids=ids)
    part = drawn(recipe, np.asarray(dims)[keep], ids=ids[keep])
    for name, values in whole.items():
        assert values.flags.c_contiguous
        np.testing.assert_array_equal(values[keep], part[name])


def test_seed_epoch_and_id_all_count():
    dims, ids = [(400, 500)] * 64, np.arange(64)
    first = drawn(imagenet_train(), dims, ids=ids)
    for changed in ({"seed": 4}, {"epoch": 6}, {"ids": ids + 64}):
        other = drawn(imagenet_train(), dims, **{"ids": ids, **changed})
        assert (first["start"] != other["start"]).any(axis=1).mean() > 0.9
        assert 10 < (first["mirror"] != other["mirror"]).sum() < 54


def test_evaluation_draws_nothing():
    first = drawn(imagenet_eval(), [(400, 500)], ids=[1], seed=1, epoch=1)
    second = drawn(imagenet_eval(), [(400, 500)], ids=[2], seed=2, epoch=2)
    for name, values in first.items():
        np.testing.assert_array_equal(values, second[name])


def scalar_window(op, height, width, sample, *, seed, epoch, index):
    """torchvision's RandomResizedCrop, one sample at a time, straight from its description."""

    def number(k):
        return float(unit(keyed_hash(seed, epoch, sample, (index << 32) + k)))

    for attempt in range(RESIZED_CROP_ATTEMPTS):
        low, high = op.scale
        area = height * width * (low + (high - low) * number(2 * attempt))
        low, high = math.log(op.ratio[0]), math.log(op.ratio[1])
        ratio = math.exp(low + (high - low) * number(2 * attempt + 1))
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            top = int(number(2 * RESIZED_CROP_ATTEMPTS) * (height - h + 1))
            left = int(number(2 * RESIZED_CROP_ATTEMPTS + 1) * (width - w + 1))
            return top, left, h, w
    w, h = width, height
    if width / height < op.ratio[0]:
        h = round(width / op.ratio[0])
    elif width / height > op.ratio[1]:
        w = round(height * op.ratio[1])
    return (height - h) // 2, (width - w) // 2, h, w


@pytest.mark.parametrize("area", [(0.08, 1.0), (0.9, 1.0)])
@pytest.mark.parametrize(
    "dims", [(400, 500), (500, 333), (90, 700), (1, 1), (1, 30), (30, 1), (3, 4)]
)
def test_windows_are_those_of_the_scalar_algorithm(dims, area):
    op = RandomResizedCrop(224, scale=area)
    ids = np.arange(150)
    inputs = drawn((op,), [dims] * len(ids), ids=ids, seed=11, epoch=2)
    got = np.concatenate([inputs["start"], inputs["shape"]], axis=1)
    wanted = [scalar_window(op, *dims, i, seed=11, epoch=2, index=1) for i in ids.tolist()]
    np.testing.assert_array_equal(got, wanted)


def largest_gap(first, second):
    """Kolmogorov and Smirnov's distance between two samples."""
    points = np.sort(np.concatenate([first, second]))
    below = [np.searchsorted(np.sort(x), points, side="right") / len(x) for x in (first, second)]
    return np.abs(below[0] - below[1]).max()


def test_area_ratio_and_place_are_distributed_as_in_torchvision():
    op, (height, width), n = RandomResizedCrop(224), (375, 500), 6000
    inputs = drawn((op,), [(height, width)] * n, seed=0, epoch=0)
    ours = np.concatenate([inputs["start"], inputs["shape"]], axis=1).astype(float)
    rng = np.random.default_rng(0)
    kept: list[tuple[int, int, int, int]] = []
    while len(kept) < n:
        area = rng.uniform(0.08, 1) * height * width
        ratio = math.exp(rng.uniform(math.log(3 / 4), math.log(4 / 3)))
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if w <= width and h <= height:  # ten failures in a row: one in 10^6 at these sizes
            top, left = rng.integers(height - h + 1), rng.integers(width - w + 1)
            kept.append((int(top), int(left), h, w))
    theirs = np.array(kept, float)
    limit = 1.95 * math.sqrt(2 / n)  # 0.1 % level
    for of in (
        lambda t: t[:, 2] * t[:, 3],
        lambda t: t[:, 3] / t[:, 2],
        lambda t: t[:, 0] / (height - t[:, 2] + 1),
        lambda t: t[:, 1] / (width - t[:, 3] + 1),
    ):
        assert largest_gap(of(ours), of(theirs)) < limit


@pytest.mark.parametrize(("p", "share"), [(0.0, 0.0), (1.0, 1.0), (0.25, 0.25)])
def test_flips_have_their_probability(p, share):
    mirror = drawn((Resize((8, 8)), RandomHorizontalFlip(p)), [(9, 9)] * 4000)["mirror"]
    assert abs(mirror.mean() - share) < 0.03


def test_a_crop_after_a_flip_is_cut_from_the_mirrored_image():
    even = ImageRange(min_height=20, max_height=20, min_width=30, max_width=30)
    inputs = drawn((RandomHorizontalFlip(1), CenterCrop((9, 7))), [(20, 30)], images=even)
    # rint((30 - 7) / 2) = 12 columns from the right edge, so 30 - 12 - 7 from the left
    assert inputs["start"].tolist() == [[6, 11]]
    assert inputs["mirror"].tolist() == [1]
