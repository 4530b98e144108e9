from .fsspec_store import FsspecStore as FsspecStore, object_version as object_version
from .http_store import HttpStore as HttpStore, page_links as page_links
from .obstore_store import ObstoreStore as ObstoreStore, without_markers as without_markers
from .request_failures import bucket_failure as bucket_failure
from .request_failures import failed_request as failed_request, retry_after_s as retry_after_s
from .request_failures import request_failure as request_failure, xml_fields as xml_fields
from .schemes import STORES as STORES, open_store as open_store
from .storage_options import AZURE_OPTIONS as AZURE_OPTIONS, GCS_OPTIONS as GCS_OPTIONS
from .storage_options import HTTP_OPTIONS as HTTP_OPTIONS, S3_OPTIONS as S3_OPTIONS
from .storage_options import StoreAddress as StoreAddress
from .storage_options import fetch_policy as fetch_policy, parse_seconds as parse_seconds
from .web_address import Hop as Hop, Proxies as Proxies, WebOrigin as WebOrigin
from .web_address import is_public as is_public, origin_of as origin_of
from .web_address import redirect_target as redirect_target, request_origin as request_origin
from .web_address import target_of as target_of
from .web_client import Reply as Reply, WebClient as WebClient, WebRequest as WebRequest
from .web_connection import Connection as Connection, ConnectionPool as ConnectionPool
from .web_connection import StaleError as StaleError, Timeouts as Timeouts
from .web_connection import parse_head as parse_head
