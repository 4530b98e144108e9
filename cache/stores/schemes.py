"""Choose and open the store behind a URL by its scheme.

To add a store: write a module with a subclass of Store and a function that opens it from a
StoreAddress, add its schemes to STORES, and add a subclass of StoreTests to
tests/cache/stores/test_stores.py. fsspec serves all other schemes. The module of a store is
imported when such a store is opened.
"""

from __future__ import annotations

import pkgutil
import re
from typing import TYPE_CHECKING, Any

from penstock.cache.errors import MissingDependencyError
from penstock.cache.secrets import find_secrets, redact, url_secrets
from penstock.cache.stores.storage_options import BUCKET_OPTIONS, StoreAddress, fetch_policy

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from penstock.cache.base import Store

STORES: Mapping[str, str] = {
    **dict.fromkeys(("http", "https"), "http_store:open_http"),
    **dict.fromkeys(BUCKET_OPTIONS, "obstore_store:ObstoreStore"),
}
"""The module, and the function or class, that open the URLs of a scheme."""
_OTHERS = "fsspec_store:open_by_fsspec"

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
    address = StoreAddress(url=url, options=options, policy=fetch_policy(options), secrets=secrets)
    scheme = url.partition("://")[0].lower()
    opener = _OTHERS if _CHAIN.search(url) else STORES.get(scheme, _OTHERS)
    try:
        opens: Callable[[StoreAddress], Store] = pkgutil.resolve_name(f"{__package__}.{opener}")
        return opens(address)
    except ImportError as error:
        raise MissingDependencyError(
            f"{redact(url)}: this kind of URL needs another package ({error}). Install it in "
            "Penstock's environment."
        ) from error
