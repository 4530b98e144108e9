"""storage_options of http(s): fsspec's names, aiohttp's inside them, obstore's client options."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from penstock.cache.stores.logins import basic_auth
from penstock.cache.stores.options import (
    COMMON,
    client_options,
    mapping,
    read_options,
    unknown,
    verify,
    words,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from penstock.cache.stores.options import StoreOptions

_CLIENT_NAMES = words(
    "allow_http allow_invalid_certificates connect_timeout default_content_type default_headers "
    "http1_only http2_keep_alive_interval http2_keep_alive_timeout http2_keep_alive_while_idle "
    "http2_only pool_idle_timeout pool_max_idle_per_host proxy_ca_certificate proxy_excludes "
    "proxy_url randomize_addresses read_timeout root_certificate timeout user_agent"
)


def _headers(found: StoreOptions, value: Any) -> None:
    found.client.setdefault("default_headers", {}).update(mapping(value, "headers"))


def _client_kwargs(found: StoreOptions, value: Any) -> None:
    """aiohttp's arguments of a session: its headers and its user."""
    for name, inner in mapping(value, "client_kwargs").items():
        if name == "headers":
            _headers(found, inner)
        elif name == "auth" and inner is not None:
            _headers(found, {"Authorization": basic_auth(inner)})
        elif name == "verify" or (name == "ssl" and isinstance(inner, bool)):
            verify(found, inner)
        elif name not in ("auth", "timeout", "connector", "trust_env", "raise_for_status"):
            raise unknown("client_kwargs", name, "headers, auth, verify")


def _client_options(found: StoreOptions, value: Any) -> None:
    """obstore's client_options, as far as they mean something to a web request."""
    given = mapping(value, "client_options")
    for name in given:
        if name not in _CLIENT_NAMES:
            raise unknown("client_options", name, ", ".join(sorted(_CLIENT_NAMES)))
    headers = given.get("default_headers")
    client_options(found, {n: v for n, v in given.items() if n != "default_headers"})
    _headers(found, headers)


_SPECIAL = {
    **COMMON,
    "client_options": _client_options,
    "headers": _headers,
    "client_kwargs": _client_kwargs,
    "auth": lambda found, value: _client_kwargs(found, {"auth": value}),
}


def http_options(options: Mapping[str, Any]) -> StoreOptions:
    """Read the options of fsspec's http: headers, client_kwargs. Raises ConfigError."""
    return read_options("http", options, frozenset(), {}, _SPECIAL, strip="")
