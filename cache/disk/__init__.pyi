from . import admin as admin
from .admin import BlobRecord as BlobRecord, CacheSummary as CacheSummary
from .admin import Verification as Verification
from .cache_folder import CacheFolder as CacheFolder, ReadableFolder as ReadableFolder
from .catalogue import BlobRow as BlobRow, Catalogue as Catalogue
from .catalogue import BLOCK_BYTES as BLOCK_BYTES, crcs_of as crcs_of, crcs_of_file as crcs_of_file
from .catalogue import JobRow as JobRow, State as State
from .catalogue import UncountedError as UncountedError, as_database_errors as as_database_errors
from .catalogue import is_damage as is_damage, open_read_only as open_read_only
from .catalogue import read_crcs as read_crcs
from .disk_cache import DISK_ERRORS as DISK_ERRORS, DiskCache as DiskCache
from .fill_files import Fill as Fill, discard_fill as discard_fill
from .folder_layout import map_name as map_name, part_name as part_name
from .folder_layout import FolderLayout as FolderLayout, format_text as format_text
from .folder_layout import boot_id as boot_id, disk_bytes as disk_bytes
from .pieces import BlobPieces as BlobPieces, OBJECTS_AT_ONCE as OBJECTS_AT_ONCE
from .pieces import PIECE_BYTES as PIECE_BYTES, PieceSpan as PieceSpan, Segments as Segments
from .pieces import Stretch as Stretch
from .pieces import bridge_gaps as bridge_gaps, merge_spans as merge_spans
from .pinning import ALL_KEYS as ALL_KEYS, PinnedShare as PinnedShare, ReadSet as ReadSet
from .pinning import fair_shares as fair_shares, guess_threshold as guess_threshold
from .private_files import MOST_SHARE as MOST_SHARE, PrivateFiles as PrivateFiles
from .space import SLACK_BYTES as SLACK_BYTES
from .space import live_and_dead_jobs as live_and_dead_jobs
