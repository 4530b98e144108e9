"""What is done to each sample on its way to a tensor, as plain values. Light: no DALI, no torch."""

from __future__ import annotations

from penstock.augment.geometric_ops import (
    CenterCrop,
    RandomCrop,
    RandomHorizontalFlip,
    RandomResizedCrop,
    RandomVerticalFlip,
    Resize,
)
from penstock.augment.map import Map
from penstock.augment.ops import (
    IMAGENET_MEAN,
    IMAGENET_STD,
    Apply,
    AutoAugment,
    Cast,
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
    RandomRotation,
    TrivialAugmentWide,
)
from penstock.augment.pad import Pad
from penstock.augment.presets import (
    CIFAR_MEAN,
    CIFAR_STD,
    cifar_train,
    imagenet_eval,
    imagenet_train,
)
from penstock.augment.sanitize import SanitizeBoxes
from penstock.augment.unpack import Unpack

__all__ = [
    "CIFAR_MEAN",
    "CIFAR_STD",
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
    "RandomCrop",
    "RandomErasing",
    "RandomGrayscale",
    "RandomHorizontalFlip",
    "RandomResizedCrop",
    "RandomRotation",
    "RandomVerticalFlip",
    "Resize",
    "SanitizeBoxes",
    "TrivialAugmentWide",
    "Unpack",
    "cifar_train",
    "imagenet_eval",
    "imagenet_train",
]
