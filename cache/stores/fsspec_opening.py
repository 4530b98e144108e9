"""Opening what fsspec serves: URLs that no store of ours knows, and users' file system objects."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from penstock.cache.errors import ConfigError, FetchError
from penstock.cache.secrets import clean_message, find_secrets, redact, store_scope
from penstock.cache.stores.address import StoreAddress
from penstock.cache.stores.fsspec_store import FsspecStore
from penstock.cache.stores.options import OURS, fetch_policy

if TYPE_CHECKING:
    from collections.abc import Mapping

    from penstock.cache.base.store import Store


def open_by_fsspec(address: StoreAddress) -> Store:
    """Open the store of any URL that fsspec understands.

    Raises ConfigError, FetchError, ImportError.
    """
    import fsspec

    shown, policy = address.display_url, address.policy
    theirs = {name: value for name, value in address.options.items() if name not in OURS}
    try:
        fs, root = fsspec.url_to_fs(address.url, **theirs)
    except ImportError:
        raise
    except ValueError as error:
        raise ConfigError(
            f"{shown}: not a URL that can be opened ({clean_message(error, address.secrets)}). "
            "Wanted a local path, file://, s3://, gs://, https:// or another scheme that fsspec "
            "knows."
        ) from None
    # Opening may reach for credentials or the network; each backend has its own exception tree.
    except Exception as error:
        raise FetchError(
            f"{shown}: could not be opened ({clean_message(error, address.secrets)}). Check "
            "storage_options.",
            uri=shown,
        ) from None
    return FsspecStore(
        fs,
        root=str(root),
        url=shown,
        scope=store_scope(theirs),
        secrets=address.secrets,
        timeout_s=min(policy.retry_timeout_s, 3 * policy.read_timeout_s),
    )


def open_filesystem(url: str, fs: Any, secrets: tuple[str, ...]) -> Store:
    """Open the store of a user's own file system object. url: of the root."""
    options = dict(getattr(fs, "storage_options", None) or {})
    secrets = tuple(sorted({*secrets, *find_secrets(options)}, key=len, reverse=True))
    if (web := _plain_web(url, fs, options, secrets)) is not None:
        return web
    return FsspecStore(
        fs,
        root=str(fs._strip_protocol(url)),
        url=redact(url).rstrip("/"),
        scope=store_scope(options),
        secrets=secrets,
    )


def _plain_web(
    url: str, fs: Any, options: Mapping[str, Any], secrets: tuple[str, ...]
) -> Store | None:
    """fsspec's http as our own, which bounds answers and gives redirects no login; None where it
    holds what only it understands (a session, cookies, request arguments)."""
    if (
        type(fs).__module__ != "fsspec.implementations.http"
        or type(fs).__name__ != "HTTPFileSystem"
    ):
        return None
    if getattr(fs, "encoded", False):
        return None
    from penstock.cache.stores.http_opening import open_http

    try:
        policy = fetch_policy(options)
        return open_http(
            StoreAddress(url=url, scheme="http", options=options, policy=policy, secrets=secrets)
        )
    except ConfigError:
        return None
