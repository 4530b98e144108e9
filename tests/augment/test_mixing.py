"""Test MixUp and CutMix: partners, shares, boxes, pixels and targets."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.augment import (
    Cast,
    CheckedRecipe,
    CutMix,
    Mix,
    MixUp,
    Resize,
    check_recipe,
    class_count,
    cutmix_boxes,
    draw_mix,
    mix_images,
    mix_in_kernels,
    soft_targets,
    symmetric_beta,
)
from penstock.cache import ConfigError
from penstock.cache.base import keyed_hash, unit
from penstock.pipeline.plan import partners, with_partners
from penstock.readers import ANY_SIZE
from tests.properties import examples

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

RECIPES = [(MixUp(),), (CutMix(),), (MixUp(), CutMix())]


def keyed(ids: NDArray[np.int64]) -> Callable[[int], NDArray[np.float64]]:
    return lambda count: unit(keyed_hash(7, 0, ids, np.arange(count)[:, None]))


# -- shares and boxes


@pytest.mark.parametrize("alpha", [0.01, 0.2, 0.5, 1.0, 2.0, 30.0])
def test_shares_are_beta_distributed(alpha: float) -> None:
    first, second = keyed(np.arange(50_000))(2)
    share = symmetric_beta(np.full(50_000, alpha), first, second)
    assert ((share >= 0) & (share <= 1)).all()
    # Moments of Beta(a, a): mean 1/2, variance 1 / (4 (2a + 1)), kurtosis 3 (2a + 1) / (2a + 3).
    variance = 1 / (4 * (2 * alpha + 1))
    centred = share - 0.5
    assert centred.mean() == pytest.approx(0, abs=0.006)
    assert (centred**2).mean() == pytest.approx(variance, rel=0.03)
    wanted = 3 * (2 * alpha + 1) / (2 * alpha + 3) * variance**2
    assert (centred**4).mean() == pytest.approx(wanted, rel=0.06)


@pytest.mark.parametrize("alpha", [0.2, 0.5, 1.0, 3.0])
def test_shares_lie_as_often_below_each_value_as_numpys(alpha: float) -> None:
    first, second = keyed(np.arange(40_000))(2)
    share = np.sort(symmetric_beta(np.full(40_000, alpha), first, second))
    wanted = np.sort(np.random.default_rng(0).beta(alpha, alpha, 200_000))
    points = np.linspace(0.001, 0.999, 200)
    ours = np.searchsorted(share, points) / len(share)
    theirs = np.searchsorted(wanted, points) / len(wanted)
    # Kolmogorov and Smirnov's distance: above 0.0107 once in a thousand.
    assert np.abs(ours - theirs).max() < 0.0107


@given(
    alpha=st.floats(1e-4, 1e4),
    first=st.sampled_from([0.0, 2.0**-53, 0.5, 1 - 2.0**-53]),
    second=st.sampled_from([0.0, 0.25, 0.5, 0.75, 1 - 2.0**-53]),
)
@examples(200)
def test_the_ends_of_the_draws_give_shares(alpha: float, first: float, second: float) -> None:
    share = symmetric_beta(np.array([alpha]), np.array([first]), np.array([second]))
    assert 0 <= share[0] <= 1


@given(
    share=st.floats(0, 1),
    row=st.floats(0, 1, exclude_max=True),
    column=st.floats(0, 1, exclude_max=True),
    height=st.integers(1, 300),
    width=st.integers(1, 300),
)
@examples(200)
def test_boxes_are_the_papers(
    share: float, row: float, column: float, height: int, width: int
) -> None:
    found = cutmix_boxes(np.array([share]), np.array([row]), np.array([column]), height, width)
    top, left, bottom, right = found[0].tolist()
    y, x, half = int(row * height), int(column * width), 0.5 * (1 - share) ** 0.5
    assert (top, left) == (max(y - int(half * height), 0), max(x - int(half * width), 0))
    assert bottom == min(y + int(half * height), height)
    assert right == min(x + int(half * width), width)
    assert 0 <= top <= bottom <= height
    assert 0 <= left <= right <= width


def test_shares_of_boxes_are_their_areas() -> None:
    mix = mixed(np.arange(200), (CutMix(),), height=30, width=40)
    area = (mix.box[:, 2] - mix.box[:, 0]) * (mix.box[:, 3] - mix.box[:, 1])
    np.testing.assert_allclose(mix.share, 1 - area / 1200, rtol=1e-6)
    assert mix.boxed.all()
    assert mix.share.min() < 0.3
    assert mix.share.max() > 0.9


def test_of_two_operations_each_sample_gets_one_of_them_half_of_the_time() -> None:
    both = mixed(np.arange(10_000), (MixUp(), CutMix()))
    assert both.boxed.mean() == pytest.approx(0.5, abs=0.02)
    assert (both.box[~both.boxed] == 0).all()


# -- pixels and targets


def recipe_of(ops: Any, height: int = 12, width: int = 17) -> CheckedRecipe:
    recipe = (Resize((height, width)), Cast("float32"), *ops)
    return check_recipe(recipe, images=ANY_SIZE)


def mixed(ids: NDArray[np.int64], ops: Any, *, height: int = 12, width: int = 17) -> Mix:
    partner = partners(np.arange(len(ids)), position=0, size=len(ids), lanes=1)
    return draw_mix(recipe_of(ops, height, width), ids, partner, seed=7, epoch=0)


def batch(count: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (count, 3, 12, 17), generator=generator)
    return pixels.to(dtype) if dtype == torch.uint8 else ((pixels - 128) / 64).to(dtype)


def reference(images: torch.Tensor, mix: Mix) -> torch.Tensor:
    """Sample by sample, as torchvision's v2 MixUp and CutMix write it."""
    done = []
    for row, partner in enumerate(mix.partner.tolist()):
        image, other = images[row], images[partner]
        if mix.boxed[row]:
            top, left, bottom, right = mix.box[row].tolist()
            image = image.clone()
            image[:, top:bottom, left:right] = other[:, top:bottom, left:right]
            done.append(image)
        else:
            share = torch.tensor(mix.share[row])
            blended = image.float() * share + other.float() * (1 - share)
            done.append(
                blended.round().to(image.dtype)
                if image.dtype == torch.uint8
                else blended.to(image.dtype)
            )
    return torch.stack(done)


@pytest.mark.parametrize("ops", RECIPES, ids=str)
@pytest.mark.parametrize("count", [1, 2, 7, 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.uint8], ids=str)
def test_images_are_mixed_as_one_by_one(ops: Any, count: int, dtype: torch.dtype) -> None:
    images, mix = batch(count, dtype), mixed(np.arange(count), ops)
    wanted = reference(images, mix)
    done = mix_images(images.clone(), mix)
    assert done.dtype == dtype
    assert torch.equal(done, wanted)


@pytest.mark.parametrize("ops", RECIPES, ids=str)
def test_the_partners_own_mix_is_not_mixed_in(ops: Any) -> None:
    """A partner that is overwritten before it is read would show up as a third image."""
    values = torch.tensor([0.0, 1.0]).repeat(8)[:, None, None, None].expand(16, 3, 12, 17)
    done = mix_images(values.clone(), mixed(np.arange(16), ops))
    mix = mixed(np.arange(16), ops)
    means = done.mean(dim=(1, 2, 3)).numpy()
    own = values[:, 0, 0, 0].numpy()
    wanted = own * mix.share + own[mix.partner] * (1 - mix.share)
    np.testing.assert_allclose(means, wanted, atol=1e-5)


def test_any_partners_are_read_unmixed() -> None:
    """Not pairs only: rows that several others need, themselves, and rows that come later."""
    images = batch(9, torch.float32)
    rng = np.random.default_rng(0)
    for _ in range(20):
        mix = mixed(rng.integers(0, 10**6, 6), (MixUp(alpha=1.0), CutMix()))
        mix = replace(mix, partner=rng.integers(0, 9, 6))
        assert torch.equal(mix_images(images.clone(), mix), reference(images, mix))


def test_no_samples_are_no_samples() -> None:
    empty = mixed(np.arange(0), (MixUp(),))
    assert mix_images(batch(0, torch.float32), empty).shape == (0, 3, 12, 17)
    assert soft_targets(np.arange(0), empty, classes=3).shape == (0, 3)


@pytest.mark.parametrize("ops", RECIPES, ids=str)
@pytest.mark.parametrize(("size", "lanes"), [(6, 1), (9, 4), (13, 3), (12, 6), (13, 13)])
def test_every_world_gives_the_same_pixels_and_targets(ops: Any, size: int, lanes: int) -> None:
    images, ids, labels = batch(size, torch.float32), np.arange(size) * 3, np.arange(size) % 5

    def rank_of(low: int, high: int) -> tuple[torch.Tensor, NDArray[np.float32]]:
        slots, partner = with_partners(
            low, partners(np.arange(low, high), position=0, size=size, lanes=lanes)
        )
        mix = draw_mix(recipe_of(ops), ids[low:high], partner, seed=7, epoch=0)
        return mix_images(images[slots], mix), soft_targets(labels[slots], mix, classes=5)

    whole, targets = rank_of(0, size)
    for world in (2, 3, 5):
        parts = [rank_of(r * size // world, (r + 1) * size // world) for r in range(world)]
        assert torch.equal(torch.cat([part for part, _ in parts]), whole)
        np.testing.assert_array_equal(np.concatenate([part for _, part in parts]), targets)


def test_targets_are_shares_of_both_classes() -> None:
    mix = Mix(
        partner=np.array([1, 0, 0]),
        share=np.array([0.75, 0.25, 0.5], np.float32),
        box=np.zeros((3, 4), np.int64),
        boxed=np.zeros(3, np.bool_),
    )
    targets = soft_targets(np.array([2, 0, 2]), mix, classes=3)
    np.testing.assert_array_equal(targets, [[0.25, 0, 0.75], [0.25, 0, 0.75], [0, 0, 1]])
    assert targets.dtype == np.float32


def test_targets_sum_to_one() -> None:
    mix = mixed(np.arange(64), (MixUp(), CutMix()))
    targets = soft_targets(np.arange(64) % 4, mix, classes=10)
    np.testing.assert_allclose(targets.sum(axis=1), 1, rtol=1e-6)


@pytest.mark.parametrize("label", [-1, 3, 2**40])
def test_a_label_outside_the_classes_is_refused(label: int) -> None:
    mix = mixed(np.arange(2), (MixUp(),))
    with pytest.raises(ConfigError, match=f"label is {label}, wanted 0 to 2"):
        soft_targets(np.array([0, label]), mix, classes=3)


def test_classes_are_given_or_known() -> None:
    assert class_count([MixUp(num_classes=7)], None) == 7
    assert class_count([MixUp(), CutMix(num_classes=7)], 10) == 7
    assert class_count([MixUp()], 10) == 10
    with pytest.raises(ConfigError, match=r"CutMix: .*is unknown\. Pass"):
        class_count([CutMix()], None)
    with pytest.raises(ConfigError, match=r"it is 7 or 8\. Pass the same"):
        class_count([MixUp(num_classes=7), CutMix(num_classes=8)], None)


def mix_on_cuda(images: torch.Tensor, mix: Any) -> torch.Tensor:
    return mix_images(images.cuda(), mix).cpu()


@pytest.mark.parametrize("way", [mix_in_kernels, pytest.param(mix_on_cuda, marks=pytest.mark.gpu)])
@pytest.mark.parametrize("ops", RECIPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.uint8], ids=str)
def test_cuda_mixes_as_the_cpu(ops: Any, dtype: torch.dtype, way: Any) -> None:
    images, mix = batch(17, dtype), mixed(np.arange(17), ops)
    assert torch.equal(way(images, mix), reference(images, mix))
