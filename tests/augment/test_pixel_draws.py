"""What pixel operations draw: torchvision's distributions.

Of 20,000 samples 4.5 standard errors of a share are below 0.016.
"""

from __future__ import annotations

import math

import numpy as np
import pytest

from penstock.augment import (
    Apply,
    ColorJitter,
    GaussianBlur,
    RandomErasing,
    RandomGrayscale,
    RandomRotation,
    Resize,
    check_recipe,
    draw,
)
from penstock.readers import ImageRange

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
    uniform_from(drawn(RandomRotation((-5, 90)))["angle"], -5, 90)
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
