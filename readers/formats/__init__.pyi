from . import candidates as candidates
from . import chunk_cache as chunk_cache
from . import chunk_files as chunk_files
from . import format_registry as format_registry
from .array_windows import ArrayWindows as ArrayWindows, ChunkGrid as ChunkGrid
from .array_reader import ArrayReader as ArrayReader, ChunkDecoder as ChunkDecoder
from .array_windows import (
    PartCopier as PartCopier,
    place_numbers as place_numbers,
    unit_rows as unit_rows,
)
from .array_windows import windows_of as windows_of
from .block_format import Block as Block, BlockFormat as BlockFormat
from .candidates import Candidates as Candidates, cut_at as cut_at
from .candidates import Spans as Spans, part_bounds as part_bounds
from .candidates import virtual_shards as virtual_shards
from .chunk_cache import ChunkMemory as ChunkMemory
from .chunk_cache import DecodedChunks as DecodedChunks, FREE_BYTES as FREE_BYTES
from .chunk_cache import LEAST_LENT_BYTES as LEAST_LENT_BYTES
from .chunk_files import ChunkFiles as ChunkFiles
from .chunk_data import ShardData as ShardData
from .chunked import ChunkFormat as ChunkFormat, ChunkReader as ChunkReader
from .chunked import ChunkShard as ChunkShard, ChunkedDataset as ChunkedDataset
from .chunked import ChunkedShardFacts as ChunkedShardFacts
from .dataset_arguments import DEFAULT_SAMPLING as DEFAULT_SAMPLING, DocumentMode as DocumentMode
from .dataset_arguments import ManifestFile as ManifestFile, Sampling as Sampling, Unit as Unit
from .dataset_arguments import WindowArgument as WindowArgument
from .dataset_arguments import check_sampling as check_sampling
from .extents import BlobExtents as BlobExtents, ChunkedShard as ChunkedShard, Extents as Extents
from .extents import ShardFiles as ShardFiles
from .sidecar import Parts as Parts, ShardPlace as ShardPlace
from .format import Format as Format, Listing as Listing
from .format import ShardEntry as ShardEntry, Snapshot as Snapshot
from .format_registry import AUTO as AUTO, FALLBACK as FALLBACK
from .format_registry import check_format as check_format, format_named as format_named
from .format_registry import format_of_manifest as format_of_manifest
from .format_registry import format_names as format_names, formats as formats
from .format_registry import is_format as is_format
from .format_registry import recognised_format as recognised_format
from .format_registry import shows_own_index as shows_own_index
from .kept_chunks import DecodedCounts as DecodedCounts
from .kept_chunks import KeptChunk as KeptChunk, KeptChunks as KeptChunks
from .open_shard import MISSING as MISSING, NO_SPAN as NO_SPAN
from .open_shard import OpenShard as OpenShard, Places as Places, STORAGES as STORAGES
from .open_shard import SampleLayout as SampleLayout, SpanPlace as SpanPlace
from .open_shard import RowRequest as RowRequest, RowsOut as RowsOut
from .open_shard import StridedRows as StridedRows
from .record_format import RecordFormat as RecordFormat, RecordSpans as RecordSpans
from .record_format import Records as Records
from .shard_summary import FieldNotes as FieldNotes, FieldSummary as FieldSummary
from .shard_summary import MAX_BYTES as MAX_BYTES, MAX_SAMPLES as MAX_SAMPLES
from .shard_summary import MAX_SHARD_BYTES as MAX_SHARD_BYTES
from .shard_summary import MAX_SHARD_SAMPLES as MAX_SHARD_SAMPLES, MAX_SIDE as MAX_SIDE
from .shard_summary import ShardSummary as ShardSummary, Sums as Sums, VERSION as VERSION
from .shard_summary import join_ranges as join_ranges, sample_table as sample_table
from .files_format import FilesFormat as FilesFormat
from .format import DatasetFiles as DatasetFiles
from .sidecar import Sidecar as Sidecar
from .sidecar import make_chunked_sidecar as make_chunked_sidecar, make_sidecar as make_sidecar
from .sidecar import read_sidecar as read_sidecar, sidecar_etag as sidecar_etag
from .span_listing import SpanListing as SpanListing
from .unindexed_files import Contents as Contents, DataFile as DataFile
from .unindexed_files import open_data_file as open_data_file, read_candidates as read_candidates
