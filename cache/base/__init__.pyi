from . import file_map as file_map
from .blob import Blob as Blob, BlobSource as BlobSource, BlobSpans as BlobSpans
from .blob import READ_MODE as READ_MODE, ReadMode as ReadMode, Segment as Segment
from .blob import blob_key as blob_key
from .counters import Traffic as Traffic, TrafficMeter as TrafficMeter, counter as counter
from .counters import gauge as gauge, growth as growth, summed as summed
from .store import FetchPolicy as FetchPolicy
from .file_map import FileMap as FileMap, map_file as map_file
from .folders import Folder as Folder, OTHERS_WRITE as OTHERS_WRITE
from .folders import StrangeFileError as StrangeFileError, file_system as file_system
from .folders import is_network as is_network, make_private_folder as make_private_folder
from .folders import refuse_network as refuse_network, remove_own_folder as remove_own_folder
from .folders import user_cache as user_cache
from .hashing import keyed_hash as keyed_hash, splitmix64 as splitmix64, unit as unit
from .hashing import splitmix64_tensor as splitmix64_tensor, unit_tensor as unit_tensor
from .locks import ByteLocks as ByteLocks, ReaderLocks as ReaderLocks, wait_for as wait_for
from .machine_errors import is_shortage as is_shortage, machine_remedy as machine_remedy
from .machine_errors import read_error as read_error, refuse_shortage as refuse_shortage
from .peer_settings import Peers as Peers, check_address as check_address
from .resources import allowed_cores as allowed_cores
from .resources import available_memory_bytes as available_memory_bytes
from .resources import machine_cores as machine_cores, machine_memory_bytes as machine_memory_bytes
from .resources import trim_heap as trim_heap, usable_cores as usable_cores
from .sizes import format_size as format_size, parse_rate as parse_rate, parse_size as parse_size
from .store import Answer as Answer, Deliver as Deliver, FORKED as FORKED, Failure as Failure
from .store import is_strong as is_strong, version_text as version_text
from .store import ObjectInfo as ObjectInfo, ObjectRange as ObjectRange
from .store import RequestError as RequestError, Store as Store
