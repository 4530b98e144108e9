from . import loader_registry as loader_registry, torch_loader as torch_loader
from .adapter import AREA as AREA, Adapter as Adapter, Batches as Batches, DEVIATION as DEVIATION
from .adapter import Files as Files, IMAGE_FOLDER as IMAGE_FOLDER, IMAGE_MODULES as IMAGE_MODULES
from .adapter import MEAN as MEAN, PlayedLoader as PlayedLoader
from .adapter import RATIO as RATIO, Work as Work, converted as converted
from .adapter import list_files as list_files
from .dali import SMALL_CROP as SMALL_CROP
from .torch_loader import RandomCropTransform as RandomCropTransform
from .torch_loader import TorchWorkerTransform as TorchWorkerTransform, crop_window as crop_window
from .torch_loader import (
    normalised as normalised,
    one_thread as one_thread,
    read_bytes as read_bytes,
)
from .loader_registry import ADAPTERS as ADAPTERS, LOADERS as LOADERS, OURS as OURS
from .loader_registry import TITLES as TITLES, find_adapter as find_adapter
from .loader_registry import split_installed as split_installed
from .torch_loader import FolderImages as FolderImages, TorchDataLoader as TorchDataLoader
