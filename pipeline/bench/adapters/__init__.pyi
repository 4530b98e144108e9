from . import loader_registry as loader_registry
from .adapter import AREA as AREA, Batches as Batches, DEVIATION as DEVIATION, MEAN as MEAN
from .adapter import RATIO as RATIO, Work as Work, converted as converted, endless as endless
from .adapter import list_files as list_files
from .dali import SMALL_CROP as SMALL_CROP
from .images import RandomCropTransform as RandomCropTransform, crop_window as crop_window
from .images import fastest as fastest, has_opencv as has_opencv, normalised as normalised
from .images import one_thread as one_thread
from .loader_registry import ADAPTERS as ADAPTERS, LOADERS as LOADERS, OURS as OURS
from .loader_registry import TITLES as TITLES, build as build, find_adapter as find_adapter
from .loader_registry import imports as imports, prepare as prepare
from .loader_registry import split_installed as split_installed
from .torch_loader import FolderImages as FolderImages
