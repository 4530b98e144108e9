from . import loader_registry as loader_registry
from .adapter import AREA as AREA, Adapter as Adapter, Batches as Batches, DEVIATION as DEVIATION
from .adapter import Files as Files, IMAGE_FOLDER as IMAGE_FOLDER, IMAGE_MODULES as IMAGE_MODULES
from .adapter import IMAGE_PACKAGES as IMAGE_PACKAGES, MEAN as MEAN, PlayedLoader as PlayedLoader
from .adapter import RATIO as RATIO, Work as Work, converted as converted
from .adapter import list_files as list_files
from .dali import SMALL_CROP as SMALL_CROP
from .images import RandomCropTransform as RandomCropTransform
from .images import TorchWorkerTransform as TorchWorkerTransform, crop_window as crop_window
from .images import fastest as fastest, has_opencv as has_opencv, normalised as normalised
from .images import one_thread as one_thread, quiet_opencv as quiet_opencv
from .images import read_bytes as read_bytes
from .loader_registry import ADAPTERS as ADAPTERS, LOADERS as LOADERS, OURS as OURS
from .loader_registry import TITLES as TITLES, find_adapter as find_adapter
from .loader_registry import split_installed as split_installed
from .torch_loader import FolderImages as FolderImages, TorchDataLoader as TorchDataLoader
