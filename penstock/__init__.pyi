from . import errors as errors
from .augment.field_operations import (
    Map as Map,
    Pad as Pad,
    SanitizeBoxes as SanitizeBoxes,
    Unpack as Unpack,
)
from .augment.operations import (
    Apply as Apply,
    AutoAugment as AutoAugment,
    CIFAR_MEAN as CIFAR_MEAN,
    CIFAR_STD as CIFAR_STD,
    Cast as Cast,
    CenterCrop as CenterCrop,
    ColorJitter as ColorJitter,
    CutMix as CutMix,
    Decode as Decode,
    GaussianBlur as GaussianBlur,
    IMAGENET_MEAN as IMAGENET_MEAN,
    IMAGENET_STD as IMAGENET_STD,
    MixUp as MixUp,
    Normalize as Normalize,
    Operation as Operation,
    RandAugment as RandAugment,
    RandomCrop as RandomCrop,
    RandomErasing as RandomErasing,
    RandomGrayscale as RandomGrayscale,
    RandomHorizontalFlip as RandomHorizontalFlip,
    RandomResizedCrop as RandomResizedCrop,
    RandomRotation as RandomRotation,
    RandomVerticalFlip as RandomVerticalFlip,
    Resize as Resize,
    TrivialAugmentWide as TrivialAugmentWide,
    cifar_train as cifar_train,
    imagenet_eval as imagenet_eval,
    imagenet_train as imagenet_train,
)
from .cache.base.peer_settings import Peers as Peers, TlsFiles as TlsFiles
from .cache.disk.disk_cache import DiskCache as DiskCache
from .cache.errors import BadSampleError as BadSampleError, PenstockError as PenstockError
from .pipeline.feed.ragged import Ragged as Ragged
from .pipeline.feed.warm_up import warm as warm
from .pipeline.loader import DataLoader as DataLoader
from .pipeline.options import Order as Order
from .pipeline.plan.world import World as World
from .pipeline.report.statistics import Statistics as Statistics
from .readers.concatenation import concat as concat
from .readers.dataset import Dataset as Dataset
from .readers.fieldtypes.field_types import (
    Array as Array,
    Boxes as Boxes,
    Bytes as Bytes,
    ClassLabel as ClassLabel,
    Image as Image,
    Keypoints as Keypoints,
    Mask as Mask,
    MultiLabel as MultiLabel,
    Text as Text,
    Tokens as Tokens,
    Value as Value,
)
from .readers.index.index_functions import index as index
from .readers.packing.packing import pack as pack

__version__: str
