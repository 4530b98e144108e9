from . import torch_private as torch_private
from .loader import DataLoader as DataLoader, WORKER_OPTIONS as WORKER_OPTIONS
from .loader_arguments import LateWorld as LateWorld
from .options import LoaderSeed as LoaderSeed, NativeOptions as NativeOptions, Order as Order
from .options import PenstockOptions as PenstockOptions
from .options import TorchOptions as TorchOptions, WorkerOptions as WorkerOptions
from .options import batch_schedule as batch_schedule, check_shuffles as check_shuffles
from .options import parse_device as parse_device
from .options import shuffle_settings as shuffle_settings
from .plan.world import World as World
from .report.statistics import Statistics as Statistics
