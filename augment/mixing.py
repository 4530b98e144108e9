"""Define MixUp and CutMix, and mix the images and class numbers of a batch into soft targets.

The order chooses the partners (`penstock.pipeline.plan.job_order`): they are neighbours in it, so
that a rank reads at most two samples in addition to its own. (With a reversed batch, as in
torchvision, every rank would read twice as much.) The shares are keyed by (seed, epoch, sample id),
so a sample's mixed pixels are the same at any world size, and after any restart, for the same
global batches.

The draws are made in numpy; torch is imported where pixels are mixed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from penstock.augment import argument_checks as arg
from penstock.augment.argument_checks import argument
from penstock.augment.draw_keys import Uniform, draw_base
from penstock.augment.operation import DType, ImageShape, Operation, Stage, operation
from penstock.cache import ConfigError, RecipeError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from numpy.typing import NDArray

    from penstock.augment.recipe import CheckedRecipe
    from penstock.readers import Bools, Floats, Ints, Numbers

MIX_DRAWS = 5
"""Uniform draws of a sample: one for the operation, two for the share, row and column of a box."""

MAX_CLASSES = 2**24


_alpha = arg.expect(
    lambda value: arg.real(value, math.ulp(0.0), 1e4), "a number above 0, up to 10,000"
)
_classes = arg.optional(arg.whole_number(1, MAX_CLASSES))


@operation
class MixingOperation(Operation):
    """Base class of operations that mix each sample with its partner. boxed: by a window of it,
    else by blending all pixels."""

    alpha: float = argument(_alpha, default=1.0)
    num_classes: int | None = argument(_classes, default=None)

    stage = Stage.MIX
    is_single = True
    boxed: ClassVar[bool] = False

    def check(self, _shape: ImageShape, dtype: DType) -> None:
        """Raise RecipeError for whole numbers."""
        if dtype == "uint8":
            raise RecipeError(
                f"{self} blends numbers and labels, and the recipe's result is uint8. Add "
                'Normalize() or Cast("float32") in front of it.'
            )


@operation
class MixUp(MixingOperation):
    """Blend each image and label with a partner's (Zhang et al. 2017). It comes last in a recipe.

    alpha: parameter of the distribution of the shares, Beta(alpha, alpha). num_classes: number of
    classes, for labels that are class numbers, which become float32 shares, (n, num_classes); None:
    the dataset's number.
    """


@operation
class CutMix(MixingOperation):
    """Replace a window of each image by its partner's, and blend labels by area (Yun et al. 2019).

    It comes last in a recipe. alpha, num_classes: as in `MixUp`.
    """

    boxed = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Mix:
    """The parameters with which one rank's n samples are mixed.

    partner: row of each sample's partner, int64, (n,); rows from n on are read only as partners.
    share: the sample's own share in its target, float32, (n,); the partner's is 1 - share. box:
    top, left, bottom, right of the window from the partner, int64, (n, 4). boxed: True for CutMix,
    bool, (n,); False: all pixels are blended by `share`.
    """

    partner: Ints
    share: NDArray[np.float32]
    box: Ints
    boxed: Bools


def draw_mix(
    recipe: CheckedRecipe,
    ids: Ints,
    partner: Ints,
    *,
    seed: int,
    epoch: int | Ints,
    occurrences: Ints | None = None,
) -> Mix:
    """Return shares and boxes for one rank's samples; a pure function of each sample.

    recipe: has MixUp, CutMix or both; with both, each sample gets one with probability 1/2.
    partner: the row of each sample's partner. epoch, occurrences: as in `draw_base`.
    """
    ops, (_, height, width) = recipe.mixing, recipe.shape
    base = draw_base(seed, epoch, ids, salt=recipe.salt, occurrences=occurrences)
    which, *rest = Uniform(base, recipe.ops.index(ops[0]))(MIX_DRAWS)
    chosen = (which * len(ops)).astype(np.int64)
    alpha = np.array([op.alpha for op in ops])[chosen]
    boxed = np.array([op.boxed for op in ops])[chosen]
    share = symmetric_beta(alpha, rest[0], rest[1])
    box = np.where(boxed[:, None], cutmix_boxes(share, rest[2], rest[3], height, width), 0)
    area = (box[:, 2] - box[:, 0]) * (box[:, 3] - box[:, 1])
    share = np.where(boxed, 1 - area / (height * width), share)
    return Mix(partner=partner, share=share.astype(np.float32), box=box, boxed=boxed)


def symmetric_beta(alpha: Floats, first: Floats, second: Floats) -> Floats:
    """Return Beta(alpha, alpha) from two uniforms in [0, 1), elementwise; exact for any alpha > 0.

    If T is Student's t with 2 alpha degrees of freedom, then (1 + T / sqrt(2 alpha + T^2)) / 2 is
    Beta(alpha, alpha) (Devroye: "Random variate generation in one line of code", 1996), and T =
    sqrt(2 alpha (U^(-1/alpha) - 1)) cos(2 pi V) (Bailey: "Polar generation of random variates with
    the t-distribution", 1994). No attempt is ever rejected, so two draws are always enough.
    """
    # U^(-1/alpha) overflows for small alpha; then T is infinite and the share 0 or 1.
    with np.errstate(over="ignore", divide="ignore"):
        cosine = np.cos(2 * np.pi * second)
        squared = np.expm1(-np.log1p(-first) / alpha) * cosine**2  # T^2 / (2 alpha)
        return np.asarray((1 + np.sign(cosine) / np.sqrt(1 + 1 / squared)) / 2)


def cutmix_boxes(share: Floats, row: Floats, column: Floats, height: int, width: int) -> Ints:
    """Return CutMix's windows: top, left, bottom, right, int64, (n, 4); some may be empty.

    The middle is uniform over the pixels, the sides are those of the image times sqrt(1 - share),
    and windows are clipped to the image (Yun et al. 2019; torchvision's CutMix). row, column: draws
    in [0, 1).
    """
    sides = np.array([[height], [width]])
    half = (0.5 * np.sqrt(1 - share) * sides).astype(np.int64)
    middle = (np.stack([row, column]) * sides).astype(np.int64)
    low, high = np.maximum(middle - half, 0), np.minimum(middle + half, sides)
    return np.ascontiguousarray(np.concatenate([low, high]).T)


def class_count(ops: Sequence[MixingOperation], known: int | None) -> int:
    """Return the number of classes of the soft targets: an operation's, else the dataset's.

    Raises ConfigError if it is unknown, or if two operations disagree.
    """
    given = sorted({op.num_classes for op in ops if op.num_classes is not None})
    count = given[0] if given else known
    if count is None or len(given) > 1:
        names = " and ".join(type(op).__name__ for op in ops)
        raise ConfigError(
            f"{names}: soft targets need one number of classes, and it is "
            f"{' or '.join(map(str, given)) or 'unknown'}. Pass the same num_classes= to all."
        )
    return count


def mix_images(images: torch.Tensor, mix: Mix) -> torch.Tensor:
    """Return the mixed images of the n own samples, (n, channels, height, width), on the device of
    `images`.

    images: the n own samples, then samples that are only partners. It may be overwritten. Blends
    are computed in float32 and rounded to the type of the batch (uint8: half to even).
    """
    if not len(mix.partner):
        return images[:0]
    if images.device.type != "cpu":
        return mix_in_kernels(images, mix)
    _mix_in_place(images.numpy(), mix)
    return images[: len(mix.partner)]


def _mix_in_place(images: Numbers, mix: Mix) -> None:
    """Mix images in place, one by one, so that they fit into a core's cache: half the time of whole
    batches on the CPU.

    It uses numpy, since torch would divide each of these small steps among threads that wait for
    one another in a busy loop, while others decode (9 ms of CPU time an image instead of 0.3).
    """
    last_use = {partner: row for row, partner in enumerate(mix.partner.tolist())}
    unmixed: dict[int, Numbers] = {}  # mixed rows that are partners of later ones
    room = np.empty((2, *images.shape[1:]), np.float32)
    for row, partner in enumerate(mix.partner.tolist()):
        own, other = images[row], unmixed.get(partner, images[partner])
        if last_use.get(row, row) > row:
            unmixed[row] = own.copy()
        if mix.boxed[row]:
            top, left, bottom, right = mix.box[row].tolist()
            own[:, top:bottom, left:right] = other[:, top:bottom, left:right]
        else:
            _blend(own, other, mix.share[row], room)
        if last_use[partner] == row:
            unmixed.pop(partner, None)


def _blend(own: Numbers, other: Numbers, share: np.float32, room: NDArray[np.float32]) -> None:
    """Set own to share * own + (1 - share) * other. room: memory for two images."""
    # Products and a sum are rounded separately. Fused, a vector loop and its remainder differ in
    # the last bit, so a sample's pixels might differ on another machine.
    rest = np.multiply(other, np.float32(1) - share, out=room[1], dtype=np.float32)
    # An image may be its own partner, so it is written after all of it was read.
    mixed = np.multiply(own, share, out=room[0], dtype=np.float32)
    mixed += rest
    own[...] = mixed if own.dtype.kind == "f" else np.rint(mixed, out=mixed)


def mix_in_kernels(images: torch.Tensor, mix: Mix) -> torch.Tensor:
    """Return the mixed images, computed in a few kernels for the whole batch."""
    import torch

    def on_device(values: Numbers) -> torch.Tensor:
        return torch.from_numpy(values).to(images.device)

    weight = on_device(mix.share)[:, None, None, None]
    if mix.boxed.any():
        y = torch.arange(images.shape[2], device=images.device)[None, :, None]
        x = torch.arange(images.shape[3], device=images.device)[None, None, :]
        top, left, bottom, right = on_device(mix.box)[:, :, None, None].unbind(1)
        outside = (y < top) | (y >= bottom) | (x < left) | (x >= right)
        boxed = on_device(mix.boxed)[:, None, None, None]
        weight = torch.where(boxed, outside[:, None].float(), weight)
    own, other = images[: len(mix.partner)], images[on_device(mix.partner)]
    mixed = (own.float() * weight).add_(other.float() * (1 - weight))
    return (mixed if images.dtype.is_floating_point else mixed.round_()).to(images.dtype)


def soft_targets(labels: Ints, mix: Mix, *, classes: int) -> NDArray[np.float32]:
    """Return the target of each own sample, shape (n, classes): its share at its class and the rest
    at its partner's.

    labels: class numbers of the own samples, then of samples that are only partners. Raises
    ConfigError for a label outside [0, classes).
    """
    if len(labels) and not 0 <= labels.min() <= labels.max() < classes:
        wrong = labels.min() if labels.min() < 0 else labels.max()
        raise ConfigError(
            f"MixUp and CutMix: a sample's label is {wrong}, wanted 0 to {classes - 1}. Pass "
            "num_classes=, one more than the largest label."
        )
    targets = np.zeros((len(mix.partner), classes), np.float32)
    row = np.arange(len(mix.partner))
    targets[row, labels[: len(row)]] = mix.share
    targets[row, labels[mix.partner]] += 1 - mix.share
    return targets
