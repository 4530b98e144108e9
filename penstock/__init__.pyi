from . import errors as errors
from .augment.draw_keys import keyed_uniform as keyed_uniform
from .augment.field_operations import (
    InstanceIds as InstanceIds,
    Map as Map,
    PackTokens as PackTokens,
    Pad as Pad,
    SanitizeBoxes as SanitizeBoxes,
    Unpack as Unpack,
)
from .augment.geometric_operations import (
    CenterCrop as CenterCrop,
    RandomCrop as RandomCrop,
    RandomHorizontalFlip as RandomHorizontalFlip,
    RandomIoUCrop as RandomIoUCrop,
    Letterbox as Letterbox,
    LongestSide as LongestSide,
    RandomResizedCrop as RandomResizedCrop,
    RandomVerticalFlip as RandomVerticalFlip,
    Resize as Resize,
    ScaleJitter as ScaleJitter,
)
from .augment.mixing import CutMix as CutMix, MixUp as MixUp
from .augment.operation import Operation as Operation
from .augment.pixel_operations import (
    Apply as Apply,
    Cast as Cast,
    ColorJitter as ColorJitter,
    Decode as Decode,
    GaussianBlur as GaussianBlur,
    IMAGENET_MEAN as IMAGENET_MEAN,
    IMAGENET_STD as IMAGENET_STD,
    Normalize as Normalize,
    RandomAutocontrast as RandomAutocontrast,
    RandomEqualize as RandomEqualize,
    RandomErasing as RandomErasing,
    RandomGrayscale as RandomGrayscale,
    RandomPosterize as RandomPosterize,
    Solarize as Solarize,
)
from .augment.policies import (
    AutoAugment as AutoAugment,
    RandAugment as RandAugment,
    TrivialAugmentWide as TrivialAugmentWide,
)
from .augment.recipe import (
    CIFAR_MEAN as CIFAR_MEAN,
    CIFAR_STD as CIFAR_STD,
    cifar_train as cifar_train,
    imagenet_eval as imagenet_eval,
    imagenet_train as imagenet_train,
)
from .augment.pixel_operations import (
    RandomAffine as RandomAffine,
    RandomPerspective as RandomPerspective,
    RandomRotation as RandomRotation,
)
from .augment.views import Views as Views
from .cache.base.peer_settings import Peers as Peers
from .cache.disk.disk_cache import DiskCache as DiskCache
from .cache.errors import BadSampleError as BadSampleError, PenstockError as PenstockError
from .pipeline.feed.tensors import Ragged as Ragged
from .pipeline.feed.warm_up import warm as warm
from .pipeline.loader import DataLoader as DataLoader
from .pipeline.options import Order as Order
from .pipeline.plan.world import World as World
from .pipeline.report.statistics import Statistics as Statistics
from .pipeline.showing import show as show
from .readers.concatenation import concat as concat
from .readers.dataset import Dataset as Dataset
from .readers.fieldtypes.number_types import Array as Array, Tokens as Tokens
from .readers.fieldtypes.boxes import Boxes as Boxes, ImageSize as ImageSize
from .readers.fieldtypes.boxes import InstanceKeypoints as InstanceKeypoints
from .readers.fieldtypes.boxes import Keypoints as Keypoints
from .readers.fieldtypes.number_types import ClassLabel as ClassLabel, ClassLabels as ClassLabels
from .readers.fieldtypes.number_types import MultiLabel as MultiLabel
from .readers.fieldtypes.number_types import Value as Value
from .readers.fieldtypes.instance_masks import InstanceMasks as InstanceMasks
from .readers.fieldtypes.masks import Mask as Mask
from .readers.fieldtypes.media import Image as Image
from .readers.fieldtypes.media import Bytes as Bytes, Text as Text, Texts as Texts
from .readers.index.opening import index as index
from .readers.mixture import mix as mix
from .readers.mixture_file import mix_file as mix_file
from .readers.packing.packing import pack as pack

__version__: str
