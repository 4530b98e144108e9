"""Choose and open the store behind a URL by its scheme.

To add a store: write a module with a class that implements the protocol `cache.base.Store` and a
function that opens it from a StoreAddress, add its schemes to STORES, and add a subclass of
StoreTests to tests/cache/stores/test_stores.py. fsspec serves all other schemes. The module of a
store is imported when such a store is opened.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from penstock.cache.errors import MissingDependencyError
from penstock.cache.secrets import find_secrets, redact, url_secrets
from penstock.cache.stores.storage_options import StoreAddress, fetch_policy

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from penstock.cache.base import Store

__all__ = ["STORES", "fetch_policy", "open_store"]


def _http(address: StoreAddress) -> Store:
    from penstock.cache.stores.http_store import open_http

    return open_http(address)


def _bucket(address: StoreAddress) -> Store:
    from penstock.cache.stores import bucket_stores

    if address.scheme in ("s3", "s3a"):
        return bucket_stores.open_s3(address)
    is_gcs = address.scheme in ("gs", "gcs")
    return bucket_stores.open_gcs(address) if is_gcs else bucket_stores.open_azure(address)


def _by_fsspec(address: StoreAddress) -> Store:
    from penstock.cache.stores.fsspec_store import open_by_fsspec

    return open_by_fsspec(address)


STORES: Mapping[str, Callable[[StoreAddress], Store]] = {
    **dict.fromkeys(("http", "https"), _http),
    **dict.fromkeys(("s3", "s3a", "gs", "gcs", "az", "abfs", "abfss"), _bucket),
}
"""The function that opens the URLs of a scheme."""

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.\-]*)://")
_CHAIN = re.compile(r"^[A-Za-z][\w+.\-]*::|::[A-Za-z][\w+.\-]*://")
"""Matches fsspec's chained URLs, such as zip://x::s3://…, but not the colons of http://[::1]."""


def open_store(url: str, options: Mapping[str, Any], *, filesystem: Any | None = None) -> Store:
    """Open the store whose root is `url`. Makes no request to a bucket.

    options: storage_options; filesystem: an fsspec file system to use instead. Raises ConfigError,
    MissingDependencyError, FetchError.
    """
    secrets = tuple(sorted({*find_secrets(options), *url_secrets(url)}, key=len, reverse=True))
    if filesystem is not None:
        from penstock.cache.stores.fsspec_store import open_filesystem

        return open_filesystem(url, filesystem, secrets)
    found = _SCHEME.match(url)
    address = StoreAddress(
        url=url,
        scheme=found[1].lower() if found else "",
        options=options,
        policy=fetch_policy(options),
        secrets=secrets,
    )
    opener = _by_fsspec if _CHAIN.search(url) else STORES.get(address.scheme, _by_fsspec)
    try:
        return opener(address)
    except ImportError as error:
        raise MissingDependencyError(
            f"{redact(url)}: this kind of URL needs another package ({error}). Install it in "
            "Penstock's environment."
        ) from error
