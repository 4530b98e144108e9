"""The store behind a URL, chosen by its scheme.

To add a store: write a module with a class that keeps the protocol `cache.base.store.Store` and a
function that opens it from a StoreAddress, enter its schemes into STORES, and add a subclass of
StoreTests to tests/cache/stores/test_stores.py. What isn't in the table is fsspec's.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from penstock.cache.errors import MissingDependencyError
from penstock.cache.secrets import find_secrets, redact, url_secrets
from penstock.cache.stores.address import StoreAddress
from penstock.cache.stores.bucket_opening import open_azure, open_gcs, open_s3
from penstock.cache.stores.fsspec_opening import open_by_fsspec, open_filesystem
from penstock.cache.stores.http_opening import open_http
from penstock.cache.stores.options import fetch_policy

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from penstock.cache.base.store import Store

__all__ = ["STORES", "fetch_policy", "open_store"]

STORES: Mapping[str, Callable[[StoreAddress], Store]] = {
    **dict.fromkeys(("http", "https"), open_http),
    **dict.fromkeys(("s3", "s3a"), open_s3),
    **dict.fromkeys(("gs", "gcs"), open_gcs),
    **dict.fromkeys(("az", "abfs", "abfss"), open_azure),
}
"""What opens the URLs of a scheme."""

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.\-]*)://")
_CHAIN = re.compile(r"^[A-Za-z][\w+.\-]*::|::[A-Za-z][\w+.\-]*://")
"""fsspec's chains, such as zip://x::s3://…; not the colons of http://[::1]."""


def open_store(url: str, options: Mapping[str, Any], *, filesystem: Any | None = None) -> Store:
    """Open the store whose root is `url`. Makes no request to a bucket.

    options: storage_options; filesystem: an fsspec file system to use instead. Raises ConfigError,
    MissingDependencyError, FetchError.
    """
    secrets = tuple(sorted({*find_secrets(options), *url_secrets(url)}, key=len, reverse=True))
    if filesystem is not None:
        return open_filesystem(url, filesystem, secrets)
    found = _SCHEME.match(url)
    address = StoreAddress(
        url=url,
        scheme=found[1].lower() if found else "",
        options=options,
        policy=fetch_policy(options),
        secrets=secrets,
    )
    opener = open_by_fsspec if _CHAIN.search(url) else STORES.get(address.scheme, open_by_fsspec)
    try:
        return opener(address)
    except ImportError as error:
        raise MissingDependencyError(
            f"{redact(url)}: this kind of URL needs another package ({error}). Install it beside "
            "penstock."
        ) from error
