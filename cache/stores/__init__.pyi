from .bucket_stores import azure_options as azure_options, gcs_options as gcs_options
from .bucket_stores import s3_options as s3_options
from .fsspec_store import FsspecStore as FsspecStore, failed_request as failed_request
from .fsspec_store import object_version as object_version
from .http_store import HttpStore as HttpStore, http_options as http_options
from .http_store import page_links as page_links
from .obstore_store import ObstoreStore as ObstoreStore, without_markers as without_markers
from .schemes import STORES as STORES, open_store as open_store
from .storage_options import fetch_policy as fetch_policy, parse_seconds as parse_seconds
from .web_address import Hop as Hop, Proxies as Proxies, WebOrigin as WebOrigin
from .web_address import is_public as is_public, origin_of as origin_of
from .web_address import redirect_target as redirect_target, request_origin as request_origin
from .web_address import target_of as target_of
from .web_answers import RangeSupport as RangeSupport, bucket_failure as bucket_failure
from .web_answers import retry_after_s as retry_after_s, xml_fields as xml_fields
from .web_client import Reply as Reply, WebClient as WebClient
from .web_connection import Connection as Connection, ConnectionPool as ConnectionPool
from .web_connection import Dialer as Dialer, StaleError as StaleError, Timeouts as Timeouts
from .web_connection import parse_head as parse_head, request_failure as request_failure
from .web_objects import RedirectMemory as RedirectMemory, WebObjects as WebObjects
