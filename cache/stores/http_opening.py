"""Opening web servers: the client, the login and the headers that a URL and its options give."""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import quote, unquote, urlsplit, urlunsplit

from penstock.cache.errors import ConfigError
from penstock.cache.secrets import plain_query, redact
from penstock.cache.stores.address import header_texts, scope_of
from penstock.cache.stores.http_options import http_options
from penstock.cache.stores.http_store import HttpStore
from penstock.cache.stores.logins import basic_auth
from penstock.cache.stores.options import seconds
from penstock.cache.stores.proxies import Proxies
from penstock.cache.stores.tls import tls_context
from penstock.cache.stores.web_address import origin_of
from penstock.cache.stores.web_client import WebClient
from penstock.cache.stores.web_objects import WebObjects

if TYPE_CHECKING:
    from penstock.cache.base.fetch_policy import FetchPolicy
    from penstock.cache.base.store import Store
    from penstock.cache.stores.address import StoreAddress
    from penstock.cache.stores.options import StoreOptions


def open_http(address: StoreAddress) -> Store:
    """Open the store of an http(s) URL. Raises ConfigError."""
    options, secrets, url = http_options(address.options), address.secrets, address.url
    try:
        parts = urlsplit(url)
        origin_of(url)
    except (ValueError, UnicodeError):
        raise ConfigError(
            f"{redact(url)}: not a URL, wanted {url.partition(':')[0]}://<host>/…."
        ) from None
    if parts.username is not None:
        # As a header: in the URL it would be in every message of every library below.
        login = unquote(parts.username), unquote(parts.password or "")
        headers = options.client.setdefault("default_headers", {})
        headers.setdefault("Authorization", basic_auth(login))
        secrets = (headers["Authorization"], *secrets)
    base = urlunsplit(
        (parts.scheme, parts.netloc.rpartition("@")[2], parts.path.rstrip("/"), parts.query, "")
    )
    client = web_client(options, address.policy)
    objects = WebObjects(
        client,
        lambda _method, key: _object_url(base, key),
        headers=header_texts(options.client.get("default_headers") or {}),
        secrets=secrets,
    )
    return HttpStore(
        client,
        objects,
        base=base,
        url=redact(base),
        scope=scope_of("http", repr(plain_query(url))),
        secrets=secrets,
    )


def _object_url(base: str, key: str) -> str:
    parts = urlsplit(base)
    path = f"{parts.path.rstrip('/')}/{quote(key)}"
    return urlunsplit((parts.scheme, parts.netloc, path, parts.query, ""))


def web_client(options: StoreOptions, policy: FetchPolicy) -> WebClient:
    """Make a client with the same trust, timeouts and proxies that obstore is given.

    Raises ConfigError.
    """
    given = options.client
    proxies = None
    if proxy := given.get("proxy_url"):
        excludes = str(given.get("proxy_excludes") or "")
        proxies = Proxies(by_scheme={"all": str(proxy)}, excludes=excludes)
    own, anybody = given.get("root_certificate"), bool(given.get("allow_invalid_certificates"))
    total = given.get("timeout")
    return WebClient(
        connect_timeout_s=policy.connect_timeout_s,
        read_timeout_s=policy.read_timeout_s,
        timeout_s=policy.retry_timeout_s if total is None else seconds(total, "timeout"),
        tls=lambda: tls_context(own=own, anybody=anybody),
        proxies=proxies,
        agent=str(given.get("user_agent") or "penstock"),
    )
