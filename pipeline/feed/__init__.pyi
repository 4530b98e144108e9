from . import batch_pipeline as batch_pipeline
from . import resident_images as resident_images
from . import runner as runner
from .bad_samples import BadCount as BadCount
from .batch import Batch as Batch
from .batch_pipeline import BatchPipeline as BatchPipeline
from .batch_reader import BatchReader as BatchReader
from .device_augment import DeviceBatch as DeviceBatch
from .frozen_order import warn_of_late_parts as warn_of_late_parts
from .image_decoding import ImageDecoding as ImageDecoding, thread_shares as thread_shares
from .map_calls import Mapper as Mapper
from .checked_recipes import mapped_fields as mapped_fields
from .native_engine import NativeEngine as NativeEngine
from .peer_links import PeerLinks as PeerLinks
from .position import Position as Position
from .prefetch import FillQueue as FillQueue, Filler as Filler, wanted_share as wanted_share
from .resident_images import ASKED_SHARE as ASKED_SHARE, AUTO_MAX_BYTES_CPU as AUTO_MAX_BYTES_CPU
from .resident_images import AUTO_SHARE_CPU as AUTO_SHARE_CPU, KeptColumns as KeptColumns
from .resident_images import MemoryBudget as MemoryBudget, ResidentImages as ResidentImages
from .resident_images import SAMPLE_BYTES_CPU as SAMPLE_BYTES_CPU
from .resident_images import SAMPLE_BYTES_CUDA as SAMPLE_BYTES_CUDA
from .resident_images import dali_needs_bytes as dali_needs_bytes, decoded_bytes as decoded_bytes
from .resident_images import memory_budget as memory_budget, resident_bytes as resident_bytes
from .resident_images import share_of_rank as share_of_rank
from .runner import MAPPED_READ_THREADS as MAPPED_READ_THREADS, PipelineRunner as PipelineRunner
from .runner import READ_AHEAD as READ_AHEAD, READ_THREADS as READ_THREADS, ReadAhead as ReadAhead
from .runner import ReadScale as ReadScale, sample_bytes_of as sample_bytes_of
from .tensors import Finisher as Finisher, PageLocked as PageLocked, Ragged as Ragged
from .tensors import in_storage as in_storage, tensor_of as tensor_of, to_device as to_device
from .warm_up import WarmResult as WarmResult, WarmState as WarmState
from .warm_up import worker_per_host as worker_per_host, node_world as node_world, warm as warm
