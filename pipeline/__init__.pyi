from . import torch_private as torch_private
from .loader import DataLoader as DataLoader
from .options import LateWorld as LateWorld, LoaderOptions as LoaderOptions, Order as Order
from .options import WORKER_ARGUMENTS as WORKER_ARGUMENTS, batch_schedule as batch_schedule
from .options import check_shuffles as check_shuffles, fresh_seed as fresh_seed
from .options import parse_device as parse_device
from .options import shuffle_settings as shuffle_settings
from .plan.world import World as World
from .report.statistics import Statistics as Statistics
