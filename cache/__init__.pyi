from . import errors as errors
from . import threads as threads
from .disk.disk_cache import DiskCache as DiskCache
from .errors import BadSampleError as BadSampleError, ClosedError as ClosedError
from .errors import ConfigError as ConfigError, CorruptSampleError as CorruptSampleError
from .errors import CorruptShardError as CorruptShardError, DatasetError as DatasetError
from .errors import DatasetNotFoundError as DatasetNotFoundError
from .errors import DestinationError as DestinationError, DeviceError as DeviceError
from .errors import FetchError as FetchError, ForkedError as ForkedError
from .errors import IndexChangedError as IndexChangedError, JobStoreError as JobStoreError
from .errors import MapError as MapError, MissingDependencyError as MissingDependencyError
from .errors import NotPicklableError as NotPicklableError, ObjectChangedError as ObjectChangedError
from .errors import OtherVersionError as OtherVersionError, PenstockError as PenstockError
from .errors import PenstockWarning as PenstockWarning, PlanError as PlanError
from .errors import RankFailedError as RankFailedError, ReadError as ReadError
from .errors import RecipeError as RecipeError, ResumeError as ResumeError
from .errors import StalledError as StalledError, TooManyBadSamplesError as TooManyBadSamplesError
from .errors import WorkerError as WorkerError, WriteError as WriteError
from .errors import error_of_kind as error_of_kind, explain_arguments as explain_arguments
from .errors import log as log, warn as warn
from .executors import RayExecutor as RayExecutor, OpenResources as OpenResources
from .executors import check_executor as check_executor
from .executors import dask_client as dask_client, keep_open as keep_open, run_tasks as run_tasks
from .executors import worker_name as worker_name
from .forks import check_process as check_process, keep_forever as keep_forever
from .forks import leave_to_parent as leave_to_parent, watch as watch
from .channel import BARRIER_TIMEOUT_S as BARRIER_TIMEOUT_S, Barrier as Barrier
from .channel import JobStore as JobStore, format_ranks as format_ranks
from .channel import group_store as group_store
from .processes import WorkerProcesses as WorkerProcesses, describe_exit as describe_exit
from .processes import pickle_for_worker as pickle_for_worker
from .secrets import clean_message as clean_message, escape as escape, find_secrets as find_secrets
from .secrets import hide as hide, plain_query as plain_query, redact as redact
from .secrets import store_scope as store_scope, url_secrets as url_secrets
from .threads import LEAVE_TIMEOUT_S as LEAVE_TIMEOUT_S, NAME_PREFIX as NAME_PREFIX
from .threads import Ordered as Ordered, Outcome as Outcome, STALL_TIMEOUT_S as STALL_TIMEOUT_S
from .threads import Workers as Workers, close_at_exit as close_at_exit, end_at_exit as end_at_exit
from .threads import end_interrupted as end_interrupted, end_with_parent as end_with_parent
from .threads import is_exiting as is_exiting, is_impatient as is_impatient
from .threads import not_at_exit as not_at_exit, ordered as ordered
