"""What is done to each sample on its way to a tensor, as plain values. Light: no DALI, no torch."""

from __future__ import annotations

from penstock.augment.map import Map
from penstock.augment.ops import (
    IMAGENET_MEAN,
    IMAGENET_STD,
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
    Operation,
    RandAugment,
    RandomErasing,
    RandomGrayscale,
    RandomHorizontalFlip,
    RandomResizedCrop,
    RandomRotation,
    Resize,
    TrivialAugmentWide,
)
from penstock.augment.pad import Pad
from penstock.augment.presets import imagenet_eval, imagenet_train
from penstock.augment.sanitize import SanitizeBoxes

__all__ = [
    "IMAGENET_MEAN",
    "IMAGENET_STD",
    "Apply",
    "AutoAugment",
    "Cast",
    "CenterCrop",
    "ColorJitter",
    "CutMix",
    "Decode",
    "GaussianBlur",
    "Map",
    "MixUp",
    "Normalize",
    "Operation",
    "Pad",
    "RandAugment",
    "RandomErasing",
    "RandomGrayscale",
    "RandomHorizontalFlip",
    "RandomResizedCrop",
    "RandomRotation",
    "Resize",
    "SanitizeBoxes",
    "TrivialAugmentWide",
    "imagenet_eval",
    "imagenet_train",
]
