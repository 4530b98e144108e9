"""Open buckets of s3, gs and az: read their storage_options, find a login, sign URLs.

The options have the names of s3fs (and of botocore inside them), gcsfs, adlfs and obstore. boto3,
if it is installed, finds a login for s3: a profile of ~/.aws, single sign-on, or an instance's
role. The bytes are read by obstore, or by the web client with URLs that obstore signs.
"""

from __future__ import annotations

import json
import os
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from penstock.cache.errors import ConfigError, MissingDependencyError
from penstock.cache.secrets import clean_message, redact
from penstock.cache.stores.http_store import web_client
from penstock.cache.stores.obstore_store import ObstoreStore, Signer, rust_errors
from penstock.cache.stores.storage_options import (
    COMMON_OPTIONS,
    FETCH_OPTIONS,
    StoreOptions,
    header_texts,
    option_mapping,
    parse_seconds,
    read_options,
    scope_of,
    set_option,
    set_verify,
    split_words,
    unknown_option_error,
)
from penstock.cache.stores.web_objects import WebObjects

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from penstock.cache.base import Store
    from penstock.cache.stores.storage_options import StoreAddress

_S3_NAMES = split_words(
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


def _client_kwargs(found: StoreOptions, value: Any) -> None:
    """Read botocore's arguments of a client, which s3fs passes on."""
    for name, inner in option_mapping(value, "client_kwargs").items():
        bare = _S3_ALIASES.get(name, name.removeprefix("aws_"))
        if name == "verify":
            set_verify(found, inner)
        elif bare in _S3_NAMES:
            set_option(found, bare, inner)
        # The endpoint's scheme decides between http and https, not use_ssl.
        elif name not in ("use_ssl", "config", "api_version", "service_name"):
            raise unknown_option_error(
                "client_kwargs", name, "endpoint_url, region_name, verify, use_ssl"
            )


def _config_kwargs(found: StoreOptions, value: Any) -> None:
    """Read botocore's Config, which s3fs passes on: addressing, timeouts, no signature."""
    for name, inner in option_mapping(value, "config_kwargs").items():
        if name == "s3":
            style = option_mapping(inner, "config_kwargs['s3']").get("addressing_style")
            if style == "virtual":
                found.config["virtual_hosted_style_request"] = True
        elif name in ("connect_timeout", "read_timeout"):
            found.client[name] = f"{parse_seconds(inner, name)}s"
        elif name == "proxies":
            proxies = option_mapping(inner, "config_kwargs['proxies']")
            if proxy := proxies.get("https") or proxies.get("http"):
                found.client["proxy_url"] = proxy
        elif name == "signature_version":
            # botocore.UNSIGNED is a class; the names of versions are texts.
            if not isinstance(inner, str):
                found.config["skip_signature"] = True
        elif name not in ("retries", "max_pool_connections", "region_name", "tcp_keepalive"):
            raise unknown_option_error(
                "config_kwargs",
                name,
                "s3, connect_timeout, read_timeout, proxies, "
                "signature_version, retries, max_pool_connections",
            )
        elif name == "region_name":
            set_option(found, "region", inner)


def _profile(found: StoreOptions, value: Any) -> None:
    found.profile = value


_S3_SPECIAL = {
    **COMMON_OPTIONS,
    "client_kwargs": _client_kwargs,
    "config_kwargs": _config_kwargs,
    "use_ssl": lambda found, value: None,  # noqa: ARG005  # the endpoint's scheme decides
    "profile": _profile,
}


def s3_options(options: Mapping[str, Any]) -> StoreOptions:
    """Read the options of s3fs or of obstore's S3, with or without "aws_". Raises ConfigError."""
    return read_options("s3", options, _S3_NAMES, _S3_ALIASES, _S3_SPECIAL, strip="aws_")


_GCS_NAMES = split_words(
    "service_account service_account_path service_account_key base_url bearer_token "
    "application_credentials skip_signature"
)
_GCS_ALIASES = {"anon": "skip_signature", "endpoint_url": "base_url", "endpoint": "base_url"}


def _token(found: StoreOptions, value: Any) -> None:
    """Read gcsfs's token: a method's name, a credentials file, its content, or an access token."""
    if value in (None, "google_default", "cloud", "cache"):
        return
    if value == "anon":
        found.config["skip_signature"] = True
    elif isinstance(value, dict):
        found.config["service_account_key"] = json.dumps(value)
    elif isinstance(value, str) and (os.path.sep in value or value.endswith(".json")):
        found.config["application_credentials"] = os.path.expanduser(value)
    elif isinstance(value, str) and value != "browser":
        found.config["bearer_token"] = value
    elif isinstance(token := getattr(value, "token", None), str):
        found.config["bearer_token"] = token
    else:
        raise ConfigError(
            'storage_options: token: wanted "anon", "google_default", a file of credentials, '
            f"its content as a dictionary, or an access token; got {type(value).__name__}. For "
            "other logins pass a gcsfs file system object."
        )


_GCS_SPECIAL = {**COMMON_OPTIONS, "token": _token}


def gcs_options(options: Mapping[str, Any]) -> StoreOptions:
    """Read the options of gcsfs or of obstore, with or without "google_". Raises ConfigError."""
    return read_options("gs", options, _GCS_NAMES, _GCS_ALIASES, _GCS_SPECIAL, strip="google_")


_AZURE_NAMES = split_words(
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
_CONNECTION_STRING = {
    "accountname": "account_name",
    "accountkey": "account_key",
    "sharedaccesssignature": "sas_key",
    "blobendpoint": "endpoint",
}


def _connection_string(found: StoreOptions, value: Any) -> None:
    pairs = (part.partition("=") for part in str(value or "").split(";"))
    for name, _, inner in pairs:
        if (known := _CONNECTION_STRING.get(name.strip().lower())) and inner:
            found.config[known] = inner


def _credential(found: StoreOptions, value: Any) -> None:
    """Read adlfs's credential: an account key or a SAS token."""
    if value is None:
        return
    if not isinstance(value, str):
        raise ConfigError(
            "storage_options: credential: wanted an account key or a SAS token as text, got "
            f"{type(value).__name__}. Use client_id, client_secret and tenant_id, or pass an "
            "adlfs file system object."
        )
    is_sas = value.startswith("?") or "sig=" in value
    found.config["sas_key" if is_sas else "account_key"] = value.removeprefix("?")


def _sas_token(found: StoreOptions, value: Any) -> None:
    if value is not None:
        found.config["sas_key"] = str(value).removeprefix("?")


_AZURE_SPECIAL = {
    **COMMON_OPTIONS,
    "connection_string": _connection_string,
    "credential": _credential,
    "sas_token": _sas_token,
}


def azure_options(options: Mapping[str, Any]) -> StoreOptions:
    """Read the options of adlfs or of obstore, with or without "azure_". Raises ConfigError."""
    return read_options(
        "az", options, _AZURE_NAMES, _AZURE_ALIASES, _AZURE_SPECIAL, strip="azure_storage_"
    )


def add_aws_login(options: StoreOptions) -> None:
    """Let boto3, if it is installed, find the login and the region: obstore itself reads only the
    environment and instance roles. Raises ConfigError, MissingDependencyError."""
    config = options.config
    if config.get("skip_signature") or config.get("access_key_id"):
        return
    try:
        import boto3
        import botocore.exceptions
        from obstore.auth.boto3 import Boto3CredentialProvider
    except ImportError:
        if options.profile is None:
            return
        raise MissingDependencyError(
            "storage_options: profile= needs boto3: `pip install 'penstock[aws]'`."
        ) from None
    try:
        session = boto3.Session(profile_name=options.profile)
        found = session.get_credentials()
    except botocore.exceptions.BotoCoreError as error:
        raise ConfigError(f"storage_options: the AWS profile can't be used ({error}).") from None
    if session.region_name and "region" not in config:
        config["region"] = session.region_name
    if found is not None and found.method != "env":
        config["credential_provider"] = Boto3CredentialProvider(session)


_LISTING_RETRIES = 5
_NEEDS_HEADERS = (
    "request_payer",
    "s3_express",
    "server_side_encryption",
    "sse_customer_key_base64",
    "sse_kms_key_id",
)
_LOGIN = (
    "access_key_id",
    "secret_access_key",
    "session_token",
    "skip_signature",
    "credential_provider",
)


def open_s3(address: StoreAddress) -> Store:
    """Open the store of s3://<bucket>/<folder>. Raises ConfigError, MissingDependencyError."""
    from obstore.store import S3Store

    options = s3_options(address.options)
    scope = scope_of("s3", _endpoint(options, "endpoint"), "")
    add_aws_login(options)
    bucket = address.url.partition("://")[2].partition("/")[0]
    return _open(address, options, S3Store, bucket, scope=scope, is_s3=True)


def open_gcs(address: StoreAddress) -> Store:
    """Open the store of gs://<bucket>/<folder>. Raises ConfigError."""
    from obstore.store import GCSStore

    options = gcs_options(address.options)
    scope = scope_of("gs", _endpoint(options, "base_url"), "")
    bucket = address.url.partition("://")[2].partition("/")[0]
    return _open(address, options, GCSStore, bucket, scope=scope)


def open_azure(address: StoreAddress) -> Store:
    """Open the store of az://<container>/<folder>, or abfs://<container>@<account>…/<folder>.

    Raises ConfigError.
    """
    from obstore.store import AzureStore

    options = azure_options(address.options)
    place = address.url.partition("://")[2].partition("/")[0]
    container, _, host = place.partition("@")
    if host:
        options.config.setdefault("account_name", host.partition(".")[0])
    account = str(options.config.get("account_name", "")).rstrip("/")
    scope = scope_of("az", account, _endpoint(options, "endpoint"))
    return _open(address, options, AzureStore, container, scope=scope)


def _endpoint(options: StoreOptions, name: str) -> str:
    return str(options.config.get(name, "")).rstrip("/")


def _open(
    address: StoreAddress,
    options: StoreOptions,
    kind: Callable[..., Any],
    bucket: str,
    *,
    scope: str,
    is_s3: bool = False,
) -> Store:
    if not bucket or "@" in bucket:
        raise ConfigError(
            f"{redact(address.url)}: wanted {address.scheme}://<bucket>/<folder>, with credentials "
            "in storage_options instead of the URL."
        )
    store = _obstore(kind, bucket, options, address, retries=0)
    client = web_client(options, address.policy)
    signer = _signer(kind, store, bucket, options, address, is_s3=is_s3)
    web = None
    if signer is not None:
        headers = header_texts(options.client.get("default_headers") or {})
        web = WebObjects(client, signer, headers=headers, secrets=address.secrets, bucket=bucket)
    return ObstoreStore(
        store,
        listing=_obstore(kind, bucket, options, address, retries=_LISTING_RETRIES),
        root=address.url.partition("://")[2].partition("/")[2].strip("/"),
        url=address.display_url,
        scope=scope,
        secrets=address.secrets,
        bucket=bucket,
        client=client,
        web=web,
        web_first=is_s3,
    )


def _signer(
    kind: Callable[..., Any],
    store: Any,
    bucket: str,
    options: StoreOptions,
    address: StoreAddress,
    *,
    is_s3: bool,
) -> Signer | None:
    """Return the signer of a bucket's URLs; None if requests need more headers (encryption,
    requester pays) or the URLs can't be signed."""
    config = options.config
    headers = options.client.get("default_headers") or {}
    if any(config.get(name) for name in _NEEDS_HEADERS) or any(
        str(name).lower().startswith("x-amz-") for name in headers
    ):
        return None
    if config.get("skip_signature"):
        if not is_s3:
            return None
        # This store only forms URLs: it looks up no login and omits the signature.
        bare = {"access_key_id": "none", "secret_access_key": "none", "skip_signature": False}
        plain = {name: value for name, value in config.items() if name not in _LOGIN}
        anonymous = StoreOptions(config={**plain, **bare}, client=options.client)
        return Signer(_obstore(kind, bucket, anonymous, address, retries=0), anonymous=True)
    if not is_s3 and "credential_provider" in config:
        return None
    return Signer(store, anonymous=False)


def _obstore(
    kind: Callable[..., Any],
    bucket: str,
    options: StoreOptions,
    address: StoreAddress,
    *,
    retries: int,
) -> Any:
    """Create one of obstore's stores."""
    policy = address.policy
    ours = {
        # This allows http; the scheme of the URL or the endpoint chooses it.
        "allow_http": True,
        "connect_timeout": timedelta(seconds=policy.connect_timeout_s),
        "read_timeout": timedelta(seconds=policy.read_timeout_s),
        # obstore's own limit for a whole request is 30 s.
        "timeout": timedelta(seconds=policy.retry_timeout_s),
    }
    given = {name: value for name, value in options.client.items() if name not in FETCH_OPTIONS}
    retry_s = policy.retry_timeout_s if retries else 0.0
    try:
        with rust_errors():
            return kind(
                bucket,
                client_options={**ours, **given},
                retry_config={"max_retries": retries, "retry_timeout": timedelta(seconds=retry_s)},
                **options.config,
            )
    # obstore raises its own errors, and TypeError and ValueError for unknown options.
    except Exception as error:
        reason = clean_message(error, address.secrets).partition("\n")[0]
        raise ConfigError(
            f"{address.display_url}: obstore refused the storage_options ({reason}). Check their "
            "names and values."
        ) from None
