"""Penstock keeps GPUs fed: the public names, each loaded from its floor when it is first used.

`import penstock` loads neither torch nor DALI.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING

try:
    if sys.platform != "linux":
        raise ImportError
    import fcntl  # noqa: F401
except ImportError:
    raise ImportError(
        f"Penstock runs on Linux alone, and this Python is for {sys.platform}, or lacks fcntl: run "
        "it in a Linux container or virtual machine, or on Windows inside of WSL2."
    ) from None

from penstock.version import __version__ as __version__

if TYPE_CHECKING:
    from penstock import errors as errors
    from penstock.augment.geometric_ops import CenterCrop as CenterCrop
    from penstock.augment.geometric_ops import RandomCrop as RandomCrop
    from penstock.augment.geometric_ops import RandomHorizontalFlip as RandomHorizontalFlip
    from penstock.augment.geometric_ops import RandomResizedCrop as RandomResizedCrop
    from penstock.augment.geometric_ops import RandomVerticalFlip as RandomVerticalFlip
    from penstock.augment.geometric_ops import Resize as Resize
    from penstock.augment.map import Map as Map
    from penstock.augment.ops import IMAGENET_MEAN as IMAGENET_MEAN
    from penstock.augment.ops import IMAGENET_STD as IMAGENET_STD
    from penstock.augment.ops import Apply as Apply
    from penstock.augment.ops import AutoAugment as AutoAugment
    from penstock.augment.ops import Cast as Cast
    from penstock.augment.ops import ColorJitter as ColorJitter
    from penstock.augment.ops import CutMix as CutMix
    from penstock.augment.ops import Decode as Decode
    from penstock.augment.ops import GaussianBlur as GaussianBlur
    from penstock.augment.ops import MixUp as MixUp
    from penstock.augment.ops import Normalize as Normalize
    from penstock.augment.ops import Operation as Operation
    from penstock.augment.ops import RandAugment as RandAugment
    from penstock.augment.ops import RandomErasing as RandomErasing
    from penstock.augment.ops import RandomGrayscale as RandomGrayscale
    from penstock.augment.ops import RandomRotation as RandomRotation
    from penstock.augment.ops import TrivialAugmentWide as TrivialAugmentWide
    from penstock.augment.pad import Pad as Pad
    from penstock.augment.presets import CIFAR_MEAN as CIFAR_MEAN
    from penstock.augment.presets import CIFAR_STD as CIFAR_STD
    from penstock.augment.presets import cifar_train as cifar_train
    from penstock.augment.presets import imagenet_eval as imagenet_eval
    from penstock.augment.presets import imagenet_train as imagenet_train
    from penstock.augment.sanitize import SanitizeBoxes as SanitizeBoxes
    from penstock.augment.unpack import Unpack as Unpack
    from penstock.cache.base.peer_settings import Peers as Peers
    from penstock.cache.base.peer_settings import TlsFiles as TlsFiles
    from penstock.cache.disk.disk_cache import DiskCache as DiskCache
    from penstock.cache.errors import BadSampleError as BadSampleError
    from penstock.cache.errors import PenstockError as PenstockError
    from penstock.pipeline.feed.ragged import Ragged as Ragged
    from penstock.pipeline.feed.warm import warm as warm
    from penstock.pipeline.loader import DataLoader as DataLoader
    from penstock.pipeline.options.order_options import Order as Order
    from penstock.pipeline.plan.world import World as World
    from penstock.pipeline.report.statistics import Statistics as Statistics
    from penstock.readers.concatenation import concat as concat
    from penstock.readers.dataset import Dataset as Dataset
    from penstock.readers.fields.field_types import Array as Array
    from penstock.readers.fields.field_types import Boxes as Boxes
    from penstock.readers.fields.field_types import Bytes as Bytes
    from penstock.readers.fields.field_types import ClassLabel as ClassLabel
    from penstock.readers.fields.field_types import Image as Image
    from penstock.readers.fields.field_types import Keypoints as Keypoints
    from penstock.readers.fields.field_types import Mask as Mask
    from penstock.readers.fields.field_types import MultiLabel as MultiLabel
    from penstock.readers.fields.field_types import Text as Text
    from penstock.readers.fields.field_types import Tokens as Tokens
    from penstock.readers.fields.field_types import Value as Value
    from penstock.readers.index.opening import index as index
    from penstock.readers.packing.packing import pack as pack

__all__ = [
    "CIFAR_MEAN",
    "CIFAR_STD",
    "IMAGENET_MEAN",
    "IMAGENET_STD",
    "Apply",
    "Array",
    "AutoAugment",
    "BadSampleError",
    "Boxes",
    "Bytes",
    "Cast",
    "CenterCrop",
    "ClassLabel",
    "ColorJitter",
    "CutMix",
    "DataLoader",
    "Dataset",
    "Decode",
    "DiskCache",
    "GaussianBlur",
    "Image",
    "Keypoints",
    "Map",
    "Mask",
    "MixUp",
    "MultiLabel",
    "Normalize",
    "Operation",
    "Order",
    "Pad",
    "Peers",
    "PenstockError",
    "Ragged",
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
    "Statistics",
    "Text",
    "TlsFiles",
    "Tokens",
    "TrivialAugmentWide",
    "Unpack",
    "Value",
    "World",
    "cifar_train",
    "concat",
    "errors",
    "imagenet_eval",
    "imagenet_train",
    "index",
    "pack",
    "warm",
]

# Each name's module. It is imported at first use, so that a name costs nobody who doesn't use it.
_HOME = {
    "CIFAR_MEAN": "penstock.augment.presets",
    "CIFAR_STD": "penstock.augment.presets",
    "IMAGENET_MEAN": "penstock.augment.ops",
    "IMAGENET_STD": "penstock.augment.ops",
    "Apply": "penstock.augment.ops",
    "Array": "penstock.readers.fields.field_types",
    "AutoAugment": "penstock.augment.ops",
    "BadSampleError": "penstock.cache.errors",
    "Boxes": "penstock.readers.fields.field_types",
    "Bytes": "penstock.readers.fields.field_types",
    "Cast": "penstock.augment.ops",
    "CenterCrop": "penstock.augment.geometric_ops",
    "ClassLabel": "penstock.readers.fields.field_types",
    "ColorJitter": "penstock.augment.ops",
    "CutMix": "penstock.augment.ops",
    "DataLoader": "penstock.pipeline.loader",
    "Dataset": "penstock.readers.dataset",
    "Decode": "penstock.augment.ops",
    "DiskCache": "penstock.cache.disk.disk_cache",
    "GaussianBlur": "penstock.augment.ops",
    "Image": "penstock.readers.fields.field_types",
    "Keypoints": "penstock.readers.fields.field_types",
    "Map": "penstock.augment.map",
    "Mask": "penstock.readers.fields.field_types",
    "MixUp": "penstock.augment.ops",
    "MultiLabel": "penstock.readers.fields.field_types",
    "Normalize": "penstock.augment.ops",
    "Operation": "penstock.augment.ops",
    "Order": "penstock.pipeline.options.order_options",
    "Pad": "penstock.augment.pad",
    "Peers": "penstock.cache.base.peer_settings",
    "PenstockError": "penstock.cache.errors",
    "Ragged": "penstock.pipeline.feed.ragged",
    "RandAugment": "penstock.augment.ops",
    "RandomCrop": "penstock.augment.geometric_ops",
    "RandomErasing": "penstock.augment.ops",
    "RandomGrayscale": "penstock.augment.ops",
    "RandomHorizontalFlip": "penstock.augment.geometric_ops",
    "RandomResizedCrop": "penstock.augment.geometric_ops",
    "RandomRotation": "penstock.augment.ops",
    "RandomVerticalFlip": "penstock.augment.geometric_ops",
    "Resize": "penstock.augment.geometric_ops",
    "SanitizeBoxes": "penstock.augment.sanitize",
    "Statistics": "penstock.pipeline.report.statistics",
    "TlsFiles": "penstock.cache.base.peer_settings",
    "Text": "penstock.readers.fields.field_types",
    "Tokens": "penstock.readers.fields.field_types",
    "TrivialAugmentWide": "penstock.augment.ops",
    "Unpack": "penstock.augment.unpack",
    "Value": "penstock.readers.fields.field_types",
    "World": "penstock.pipeline.plan.world",
    "cifar_train": "penstock.augment.presets",
    "concat": "penstock.readers.concatenation",
    "imagenet_eval": "penstock.augment.presets",
    "imagenet_train": "penstock.augment.presets",
    "index": "penstock.readers.index.opening",
    "pack": "penstock.readers.packing.packing",
    "warm": "penstock.pipeline.feed.warm",
}


def __getattr__(name: str) -> object:
    if name == "errors":
        return importlib.import_module("penstock.errors")
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
