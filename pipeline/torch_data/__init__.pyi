from .epoch_pass import Bookmark as Bookmark, DatasetEpoch as DatasetEpoch
from .image_split import reject_rebuilt_loader as reject_rebuilt_loader
from .mark import Mark as Mark, WorkerPosition as WorkerPosition
from .pass_setup import PassSetup as PassSetup
from .sample_faults import Substitutes as Substitutes, is_sample_fault as is_sample_fault
from .torch_engine import TorchEngine as TorchEngine
from .torch_options import TorchDataOptions as TorchDataOptions, check_dataset as check_dataset
from .torch_options import check_torch_dataset as check_torch_dataset
from .torch_options import check_unplanned as check_unplanned, draw_seed as draw_seed
from .torch_options import planned_batch_size as planned_batch_size
from .worker import fresh_seed as fresh_seed, seed_worker as seed_worker
