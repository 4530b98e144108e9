from . import shard_writing as shard_writing
from .pack_sources import cut_evenly as cut_evenly, plan_samples as plan_samples
from .pack_sources import shuffled as shuffled
from .packing import pack as pack
from .shard_writing import write_task as write_task
from .transcode import Transcode as Transcode, baseline_twin as baseline_twin
