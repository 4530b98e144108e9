from .blob_fills import BlockSums as BlockSums, CachedBlob as CachedBlob
from .blob_fills import DatasetCache as DatasetCache
from .blob_fills import PieceRequests as PieceRequests
from .upstream import BlobRequest as BlobRequest, FillFailures as FillFailures
from .remote_objects import Remote as Remote
from .upstream import BlobRange as BlobRange, Upstream as Upstream
