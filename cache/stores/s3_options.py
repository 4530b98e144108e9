"""storage_options of s3: s3fs's names, botocore's inside them, and obstore's own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from penstock.cache.stores.options import (
    COMMON,
    give,
    mapping,
    read_options,
    seconds,
    unknown,
    verify,
    words,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from penstock.cache.stores.options import StoreOptions

_NAMES = words(
    "access_key_id bucket_name checksum_algorithm conditional_put "
    "container_authorization_token_file "
    "container_credentials_full_uri container_credentials_relative_uri copy_if_not_exists "
    "default_region disable_tagging disable_bulk_delete endpoint imdsv1_fallback "
    "metadata_endpoint region request_payer role_arn role_session_name s3_express "
    "secret_access_key server_side_encryption session_token skip_signature "
    "sse_bucket_key_enabled sse_customer_key_base64 sse_kms_key_id sts_endpoint "
    "unsigned_payload virtual_hosted_style_request web_identity_token_file"
)
_ALIASES = {
    "key": "access_key_id",
    "username": "access_key_id",
    "secret": "secret_access_key",
    "password": "secret_access_key",
    "token": "session_token",
    "anon": "skip_signature",
    "endpoint_url": "endpoint",
    "region_name": "region",
    "requester_pays": "request_payer",
}


def _client_kwargs(found: StoreOptions, value: Any) -> None:
    """botocore's arguments of a client, as s3fs passes them on."""
    for name, inner in mapping(value, "client_kwargs").items():
        bare = _ALIASES.get(name, name.removeprefix("aws_"))
        if name == "verify":
            verify(found, inner)
        elif name == "use_ssl":
            _use_ssl(found, inner)
        elif bare in _NAMES:
            give(found, bare, inner)
        elif name not in ("config", "api_version", "service_name"):
            raise unknown("client_kwargs", name, "endpoint_url, region_name, verify, use_ssl")


def _config_kwargs(found: StoreOptions, value: Any) -> None:
    """botocore's Config, as s3fs passes it on: addressing, timeouts, no signature."""
    for name, inner in mapping(value, "config_kwargs").items():
        if name == "s3":
            style = mapping(inner, "config_kwargs['s3']").get("addressing_style")
            if style == "virtual":
                found.config["virtual_hosted_style_request"] = True
        elif name in ("connect_timeout", "read_timeout"):
            found.client[name] = f"{seconds(inner, name)}s"
        elif name == "proxies":
            proxies = mapping(inner, "config_kwargs['proxies']")
            if proxy := proxies.get("https") or proxies.get("http"):
                found.client["proxy_url"] = proxy
        elif name == "signature_version":
            # botocore.UNSIGNED is a class; the names of versions are texts.
            if not isinstance(inner, str):
                found.config["skip_signature"] = True
        elif name not in ("retries", "max_pool_connections", "region_name", "tcp_keepalive"):
            raise unknown(
                "config_kwargs",
                name,
                "s3, connect_timeout, read_timeout, proxies, "
                "signature_version, retries, max_pool_connections",
            )
        elif name == "region_name":
            give(found, "region", inner)


def _use_ssl(found: StoreOptions, value: Any) -> None:
    """s3fs's way to ask for http of an endpoint: the endpoint's own scheme says it here."""
    del found, value


def _profile(found: StoreOptions, value: Any) -> None:
    found.profile = value


_SPECIAL = {
    **COMMON,
    "client_kwargs": _client_kwargs,
    "config_kwargs": _config_kwargs,
    "use_ssl": _use_ssl,
    "profile": _profile,
}


def s3_options(options: Mapping[str, Any]) -> StoreOptions:
    """Read s3fs's options or obstore's S3 ones with or without "aws_". Raises ConfigError."""
    return read_options("s3", options, _NAMES, _ALIASES, _SPECIAL, strip="aws_")
