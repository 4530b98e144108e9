"""storage_options as people know them, for obstore.

fsspec's names (s3fs, gcsfs, adlfs, fsspec's http) and obstore's own are both understood; a name
that neither knows is an error, because a misspelt option that is ignored shows up as a 403 or a
hang much later. Names that only tune fsspec's own buffers are accepted and mean nothing here.
The usual environment (AWS_*, GOOGLE_*, AZURE_*) is read by obstore itself.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from penstock.cache.base.fetch_policy import FetchPolicy
from penstock.cache.errors import ConfigError
from penstock.cache.secrets import redact
from penstock.cache.stores.logins import basic_auth
from penstock.cache.stores.tls import certificates

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


OURS = ("connect_timeout", "read_timeout", "retry_timeout")
"""Seconds: to make a connection; without a byte on one; for all attempts of a range."""

_NO_MEANING = _words(
    "access asynchronous batch_size block_size cache_options cache_regions cache_size_limit "
    "cache_timeout cache_type check_connection consistency default_block_size default_cache_type "
    "default_fill_cache default_intelligent_cache encoded fill_cache fixed_upload_size "
    "listings_expiry_time loop max_concurrency max_paths project same_names "
    "secure_serialize simple_links skip_instance_cache use_listings_cache version_aware"
)
_CLIENT_NAMES = _words(
    "allow_http allow_invalid_certificates connect_timeout default_content_type default_headers "
    "http1_only http2_keep_alive_interval http2_keep_alive_timeout http2_keep_alive_while_idle "
    "http2_only pool_idle_timeout pool_max_idle_per_host proxy_ca_certificate proxy_excludes "
    "proxy_url randomize_addresses read_timeout root_certificate timeout user_agent"
)
_S3_NAMES = _words(
    "access_key_id bucket_name checksum_algorithm conditional_put "
    "container_authorization_token_file "
    "container_credentials_full_uri container_credentials_relative_uri copy_if_not_exists "
    "default_region disable_tagging disable_bulk_delete endpoint imdsv1_fallback "
    "metadata_endpoint region request_payer role_arn role_session_name s3_express "
    "secret_access_key server_side_encryption session_token skip_signature "
    "sse_bucket_key_enabled sse_customer_key_base64 sse_kms_key_id sts_endpoint "
    "unsigned_payload virtual_hosted_style_request web_identity_token_file"
)
_S3_ALIASES = {
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
_GCS_NAMES = _words(
    "service_account service_account_path service_account_key base_url bearer_token "
    "application_credentials skip_signature"
)
_GCS_ALIASES = {"anon": "skip_signature", "endpoint_url": "base_url", "endpoint": "base_url"}
_AZURE_NAMES = _words(
    "account_name account_key client_id client_secret credential_type tenant_id authority_host "
    "authority_id sas_key sas_token token bearer_token use_emulator use_fabric_endpoint endpoint "
    "msi_endpoint object_id msi_resource_id federated_token_file use_azure_cli skip_signature "
    "disable_tagging"
)
_AZURE_ALIASES = {
    "anon": "skip_signature",
    "sas_token": "sas_key",
    "bearer_token": "token",
    "endpoint_url": "endpoint",
}
_ENDPOINTS = ("endpoint", "base_url")
_CONNECTION_STRING = {
    "accountname": "account_name",
    "accountkey": "account_key",
    "sharedaccesssignature": "sas_key",
    "blobendpoint": "endpoint",
}


@dataclass(slots=True)
class Settings:
    """What obstore is to be told. config: of the store; client: its client_options; profile: of
    ~/.aws; retries: what was said of them."""

    config: dict[str, Any] = field(default_factory=dict)
    client: dict[str, Any] = field(default_factory=dict)
    profile: str | None = None
    retries: dict[str, Any] = field(default_factory=dict)


def s3_settings(options: Mapping[str, Any]) -> Settings:
    """Of s3fs's options, or obstore's S3 ones with or without "aws_". Raises ConfigError."""
    return _settings("s3", options, _S3_NAMES, _S3_ALIASES, _S3_SPECIAL, strip="aws_")


def gcs_settings(options: Mapping[str, Any]) -> Settings:
    """Of gcsfs's options, or obstore's with or without "google_". Raises ConfigError."""
    return _settings("gs", options, _GCS_NAMES, _GCS_ALIASES, _GCS_SPECIAL, strip="google_")


def azure_settings(options: Mapping[str, Any]) -> Settings:
    """Of adlfs's options, or obstore's with or without "azure_". Raises ConfigError."""
    return _settings(
        "az", options, _AZURE_NAMES, _AZURE_ALIASES, _AZURE_SPECIAL, strip="azure_storage_"
    )


def http_settings(options: Mapping[str, Any]) -> Settings:
    """Of fsspec's http options: headers, client_kwargs. Raises ConfigError."""
    return _settings("http", options, frozenset(), {}, _HTTP_SPECIAL, strip="")


def fetch_policy(options: Mapping[str, Any]) -> FetchPolicy:
    """Timeouts (in seconds) and attempts that storage options give. Raises ConfigError."""
    retry = options.get("retry_config")
    retry = retry if isinstance(retry, dict) else {}
    client = options.get("client_options")
    client = client if isinstance(client, dict) else {}
    given: dict[str, Any] = {}
    for name, other in (
        ("connect_timeout", client.get("connect_timeout")),
        ("read_timeout", client.get("read_timeout")),
        ("retry_timeout", retry.get("retry_timeout")),
    ):
        value = options.get(name, other)
        if value is not None:
            given[f"{name}_s"] = seconds(value, name)
    if (retries := retry.get("max_retries")) is not None:
        if not isinstance(retries, int) or retries < 0:
            raise ConfigError(f"max_retries: got {retries!r}, wanted a whole number from 0.")
        given["max_attempts"] = retries + 1
    return FetchPolicy(**given)


def seconds(value: Any, name: str) -> float:
    """Seconds of a number, a timedelta, or a text of a number and "s", "ms", "m" or "min"."""
    if hasattr(value, "total_seconds"):
        value = value.total_seconds()
    elif isinstance(value, str):
        number = value.strip().rstrip("abcdefghijklmnopqrstuvwxyz ")
        unit = value.strip()[len(number) :].strip() or "s"
        factor = {"s": 1, "sec": 1, "seconds": 1, "ms": 1e-3, "m": 60, "min": 60}.get(unit)
        try:
            value = float(number) * factor if factor else None
        except ValueError:
            value = None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e9:
        raise ConfigError(f"{name}: wanted a number of seconds above 0, such as 20 or 0.5.")
    return float(value)


def _settings(
    scheme: str,
    options: Mapping[str, Any],
    names: frozenset[str],
    aliases: Mapping[str, str],
    special: Mapping[str, Callable[[Settings, Any], None]],
    *,
    strip: str,
) -> Settings:
    settings = Settings()
    # Nested ones first: what is said at the top level counts more.
    for name in sorted(options, key=lambda name: name not in special):
        value = options[name]
        bare = _bare(name, strip)
        if name in special:
            special[name](settings, value)
        elif name in aliases:
            _give(settings, aliases[name], value)
        elif bare in names:
            _give(settings, bare, value)
        elif name not in _NO_MEANING and name not in OURS:
            known = sorted({*special, *aliases, *names, *OURS})
            raise ConfigError(
                f"storage_options: {name!r} is unknown for {scheme}://. Known are "
                f"{', '.join(known)}."
            )
    for name in _ENDPOINTS:
        if settings.config.get(name) is not None:
            _check_endpoint(settings.config[name])
    return settings


def _check_endpoint(value: Any) -> None:
    """obstore panics at some that aren't URLs, and misunderstands others."""
    from penstock.cache.stores.web_address import origin_of

    try:
        origin_of(str(value))
    except (ValueError, UnicodeError):
        shown = redact(str(value)).partition("?")[0]
        raise ConfigError(
            f"storage_options: endpoint_url: got {shown!r}, wanted a URL such as "
            '"https://minio.example:9000" or "http://127.0.0.1:9000", with its scheme.'
        ) from None


def _bare(name: str, strip: str) -> str:
    short = strip.partition("_")[0] + "_" if strip else ""
    return name.removeprefix(strip).removeprefix(short)


def _give(settings: Settings, name: str, value: Any) -> None:
    """None and False of a flag are fsspec's way to say "not given"."""
    if value is not None:
        settings.config[name] = value


def _mapping(value: Any, name: str) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ConfigError(
            f"storage_options: {name}: got a {type(value).__name__}, wanted a dictionary."
        )
    return value


def _unknown(where: str, name: str, known: str) -> ConfigError:
    return ConfigError(f"storage_options: {where}[{name!r}] is unknown. Known are {known}.")


def _client_options(settings: Settings, value: Any) -> None:
    """obstore's client_options as they are: obstore refuses what it doesn't know."""
    given = dict(_mapping(value, "client_options"))
    if (own := given.pop("root_certificate", None)) is not None:
        settings.client["root_certificate"] = certificates(own, "root_certificate")
    settings.client.update(given)


def _retry_config(settings: Settings, value: Any) -> None:
    """obstore's retry_config: its limits become the fetcher's (see `fetch_policy`)."""
    settings.retries.update(_mapping(value, "retry_config"))


def _verify(settings: Settings, value: Any) -> None:
    """requests' and botocore's way: True, False, or the path of certificate authorities."""
    if isinstance(value, bool):
        settings.client["allow_invalid_certificates"] = not value
    elif value is not None:
        settings.client["root_certificate"] = certificates(value, "verify")


def _root_certificate(settings: Settings, value: Any) -> None:
    if value is not None:
        settings.client["root_certificate"] = certificates(value, "root_certificate")


def _s3_client_kwargs(settings: Settings, value: Any) -> None:
    """botocore's arguments of a client, as s3fs passes them on."""
    for name, inner in _mapping(value, "client_kwargs").items():
        bare = _S3_ALIASES.get(name, name.removeprefix("aws_"))
        if name == "verify":
            _verify(settings, inner)
        elif name == "use_ssl":
            _use_ssl(settings, inner)
        elif bare in _S3_NAMES:
            _give(settings, bare, inner)
        elif name not in ("config", "api_version", "service_name"):
            raise _unknown("client_kwargs", name, "endpoint_url, region_name, verify, use_ssl")


def _s3_config_kwargs(settings: Settings, value: Any) -> None:
    """botocore's Config, as s3fs passes it on: addressing, timeouts, no signature."""
    for name, inner in _mapping(value, "config_kwargs").items():
        if name == "s3":
            style = _mapping(inner, "config_kwargs['s3']").get("addressing_style")
            if style == "virtual":
                settings.config["virtual_hosted_style_request"] = True
        elif name in ("connect_timeout", "read_timeout"):
            settings.client[name] = f"{seconds(inner, name)}s"
        elif name == "proxies":
            proxies = _mapping(inner, "config_kwargs['proxies']")
            if proxy := proxies.get("https") or proxies.get("http"):
                settings.client["proxy_url"] = proxy
        elif name == "signature_version":
            # botocore.UNSIGNED is a class; the names of versions are texts.
            if not isinstance(inner, str):
                settings.config["skip_signature"] = True
        elif name not in ("retries", "max_pool_connections", "region_name", "tcp_keepalive"):
            raise _unknown(
                "config_kwargs",
                name,
                "s3, connect_timeout, read_timeout, proxies, "
                "signature_version, retries, max_pool_connections",
            )
        elif name == "region_name":
            _give(settings, "region", inner)


def _use_ssl(settings: Settings, value: Any) -> None:
    """s3fs's way to ask for http of an endpoint: the endpoint's own scheme says it here."""
    del settings, value


def _profile(settings: Settings, value: Any) -> None:
    settings.profile = value


def _gcs_token(settings: Settings, value: Any) -> None:
    """gcsfs: a method's name, a file of credentials, their contents, or an access token."""
    if value in (None, "google_default", "cloud", "cache"):
        return
    if value == "anon":
        settings.config["skip_signature"] = True
    elif isinstance(value, dict):
        settings.config["service_account_key"] = json.dumps(value)
    elif isinstance(value, str) and (os.path.sep in value or value.endswith(".json")):
        settings.config["application_credentials"] = os.path.expanduser(value)
    elif isinstance(value, str) and value != "browser":
        settings.config["bearer_token"] = value
    elif isinstance(token := getattr(value, "token", None), str):
        settings.config["bearer_token"] = token
    else:
        raise ConfigError(
            'storage_options: token: wanted "anon", "google_default", a file of credentials, '
            f"their contents as a dictionary, or an access token; got {type(value).__name__}. "
            "For other ways to log in pass a gcsfs file system object."
        )


def _connection_string(settings: Settings, value: Any) -> None:
    pairs = (part.partition("=") for part in str(value or "").split(";"))
    for name, _, inner in pairs:
        if (known := _CONNECTION_STRING.get(name.strip().lower())) and inner:
            settings.config[known] = inner


def _azure_credential(settings: Settings, value: Any) -> None:
    """adlfs: an account key, or a SAS token."""
    if value is None:
        return
    if not isinstance(value, str):
        raise ConfigError(
            "storage_options: credential: wanted an account key or a SAS token as text, got "
            f"{type(value).__name__}. Use client_id, client_secret and tenant_id, or pass an "
            "adlfs file system object."
        )
    is_sas = value.startswith("?") or "sig=" in value
    settings.config["sas_key" if is_sas else "account_key"] = value.removeprefix("?")


def _sas_token(settings: Settings, value: Any) -> None:
    if value is not None:
        settings.config["sas_key"] = str(value).removeprefix("?")


def _headers(settings: Settings, value: Any) -> None:
    settings.client.setdefault("default_headers", {}).update(_mapping(value, "headers"))


def _http_client_kwargs(settings: Settings, value: Any) -> None:
    """aiohttp's arguments of a session: its headers and its user."""
    for name, inner in _mapping(value, "client_kwargs").items():
        if name == "headers":
            _headers(settings, inner)
        elif name == "auth" and inner is not None:
            _headers(settings, {"Authorization": basic_auth(inner)})
        elif name == "verify" or (name == "ssl" and isinstance(inner, bool)):
            _verify(settings, inner)
        elif name not in ("auth", "timeout", "connector", "trust_env", "raise_for_status"):
            raise _unknown("client_kwargs", name, "headers, auth, verify")


def _http_client_options(settings: Settings, value: Any) -> None:
    """obstore's client_options, as far as they mean something to a web request."""
    given = _mapping(value, "client_options")
    for name in given:
        if name not in _CLIENT_NAMES:
            raise _unknown("client_options", name, ", ".join(sorted(_CLIENT_NAMES)))
    headers = given.get("default_headers")
    _client_options(settings, {n: v for n, v in given.items() if n != "default_headers"})
    _headers(settings, headers)


_COMMON: dict[str, Callable[[Settings, Any], None]] = {
    "root_certificate": _root_certificate,
    "verify": _verify,
    "client_options": _client_options,
    "retry_config": _retry_config,
}
_S3_SPECIAL = {
    **_COMMON,
    "client_kwargs": _s3_client_kwargs,
    "config_kwargs": _s3_config_kwargs,
    "use_ssl": _use_ssl,
    "profile": _profile,
}
_GCS_SPECIAL = {**_COMMON, "token": _gcs_token}
_AZURE_SPECIAL = {
    **_COMMON,
    "connection_string": _connection_string,
    "credential": _azure_credential,
    "sas_token": _sas_token,
}
_HTTP_SPECIAL = {
    **_COMMON,
    "client_options": _http_client_options,
    "headers": _headers,
    "client_kwargs": _http_client_kwargs,
    "auth": lambda settings, value: _http_client_kwargs(settings, {"auth": value}),
}
