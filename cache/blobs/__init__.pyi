from .blob_fills import FillStoppedError as FillStoppedError, PieceRequests as PieceRequests
from .upstream import BlobRequest as BlobRequest, FillFailures as FillFailures
from .upstream import Requester as Requester
from .dataset_cache import BlockSums as BlockSums, CachedBlob as CachedBlob
from .dataset_cache import DatasetCache as DatasetCache
from .remote_objects import Remote as Remote
from .upstream import BlobRange as BlobRange, Upstream as Upstream
