from .image_split import reject_rebuilt_loader as reject_rebuilt_loader
from .mark import Mark as Mark, WorkerPosition as WorkerPosition
from .pass_order import StreamOrder as StreamOrder, check_dataset as check_dataset
from .samplers import sampler_lists as sampler_lists
from .torch_engine import Bookmark as Bookmark, DatasetEpoch as DatasetEpoch
from .torch_engine import TorchEngine as TorchEngine
from .torch_sources import is_sample_fault as is_sample_fault
from .random_states import seed_worker as seed_worker
