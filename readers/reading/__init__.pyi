from . import direct_arrays as direct_arrays
from . import open_shards as open_shards
from . import parallel_copies as parallel_copies
from . import plain_rows as plain_rows
from . import row_reading as row_reading
from .batch_plan import BatchRows as BatchRows
from .joined_reader import JoinedReader as JoinedReader
from .open_shards import OPENERS as OPENERS, OpenShards as OpenShards
from .parallel_copies import CopyThreads as CopyThreads, MOST_COPY_THREADS as MOST_COPY_THREADS
from .sample_reader import SampleReader as SampleReader
from .plain_rows import FoundRows as FoundRows, PlainRows as PlainRows
