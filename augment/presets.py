"""Recipes that are used so often that they have a name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.augment.geometric_ops import (
    CenterCrop,
    RandomCrop,
    RandomHorizontalFlip,
    RandomResizedCrop,
    Resize,
)
from penstock.augment.ops import Decode, Normalize
from penstock.cache.errors import RecipeError, explain_arguments

CIFAR_MEAN = (0.4914, 0.4822, 0.4465)
"""Mean of CIFAR-10's training images, R, G, B, in units of 0..1."""

CIFAR_STD = (0.2470, 0.2435, 0.2616)
"""Standard deviation of CIFAR-10's training images, R, G, B, in units of 0..1."""

if TYPE_CHECKING:
    from penstock.augment.geometric_ops import Size
    from penstock.augment.ops import Operation


@explain_arguments(RecipeError)
def imagenet_train(size: Size = 224) -> tuple[Operation, ...]:
    """The usual training recipe: decode, random window to `size`, flip, normalise. float32, CHW."""
    return (Decode(), RandomResizedCrop(size), RandomHorizontalFlip(), Normalize())


@explain_arguments(RecipeError)
def imagenet_eval(size: Size = 224, resize: Size = 256) -> tuple[Operation, ...]:
    """The usual evaluation recipe: decode, short side to `resize`, middle `size`, normalise."""
    return (Decode(), Resize(resize), CenterCrop(size), Normalize())


@explain_arguments(RecipeError)
def cifar_train(size: Size = 32, *, padding: int = 4) -> tuple[Operation, ...]:
    """The usual recipe for CIFAR: decode, random window of the padded image, flip, normalise."""
    crop = RandomCrop(size, padding=padding)
    return (Decode(), crop, RandomHorizontalFlip(), Normalize(CIFAR_MEAN, CIFAR_STD))
