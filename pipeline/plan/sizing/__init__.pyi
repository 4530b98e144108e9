from .cluster import CONNECTIONS_A_RANK as CONNECTIONS_A_RANK, MARGIN_SHARE as MARGIN_SHARE
from .cluster import READ_S_PER_GB as READ_S_PER_GB, REQUEST_BYTES as REQUEST_BYTES
from .cluster import PEER_S_PER_GB as PEER_S_PER_GB, RAM_SHARE as RAM_SHARE
from .cluster import ClusterSetup as ClusterSetup, fetch_cpu_s as fetch_cpu_s
from .cluster import TAIL as TAIL, check_count as check_count
from .cluster import check_figure as check_figure
from .forecast import EpochForecast as EpochForecast, Forecast as Forecast, changes as changes
from .forecast import (
    duration as duration,
    forecast as forecast,
    unmet_utilisation as unmet_utilisation,
)
from .shard_geometry import mixture_reads as mixture_reads
from .shard_geometry import LEAST_SHARD_BYTES as LEAST_SHARD_BYTES, MOST_READERS as MOST_READERS
from .shard_geometry import SHARD_BYTES as SHARD_BYTES, readers_warning as readers_warning
from .shard_geometry import geometry_of as geometry_of, shard_bytes_for as shard_bytes_for
from .shard_geometry import shards_for as shards_for
from .shard_geometry import small_cache_warning as small_cache_warning
from .shard_geometry import ShardGeometry as ShardGeometry
from .forecast import EARLY_BATCHES as EARLY_BATCHES, block_samples as block_samples
from .forecast import TIER_NAMES as TIER_NAMES, memory_share as memory_share
from .forecast import reshuffled_share as reshuffled_share, single_share as single_share
from .cluster import au_percent as au_percent
