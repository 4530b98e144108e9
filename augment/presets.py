"""Recipes that are used so often that they have a name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.augment.ops import (
    CenterCrop,
    Decode,
    Normalize,
    RandomHorizontalFlip,
    RandomResizedCrop,
    Resize,
)

if TYPE_CHECKING:
    from penstock.augment.ops import Operation, Size


def imagenet_train(size: Size = 224) -> tuple[Operation, ...]:
    """The usual training recipe: decode, random window to `size`, flip, normalise. float32, CHW."""
    return (Decode(), RandomResizedCrop(size), RandomHorizontalFlip(), Normalize())


def imagenet_eval(size: Size = 224, resize: Size = 256) -> tuple[Operation, ...]:
    """The usual evaluation recipe: decode, short side to `resize`, middle `size`, normalise."""
    return (Decode(), Resize(resize), CenterCrop(size), Normalize())
