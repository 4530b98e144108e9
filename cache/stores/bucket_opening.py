"""Opening buckets of s3, gs and az: obstore's stores, and URLs that they sign."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

from penstock.cache.errors import ConfigError
from penstock.cache.secrets import clean_message, redact
from penstock.cache.stores.address import header_texts, scope_of
from penstock.cache.stores.http_opening import web_client
from penstock.cache.stores.obstore_process import rust_errors
from penstock.cache.stores.obstore_store import ObstoreStore
from penstock.cache.stores.options import OURS, StoreOptions
from penstock.cache.stores.signing import Signer
from penstock.cache.stores.web_objects import WebObjects

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.cache.base.store import Store
    from penstock.cache.stores.address import StoreAddress
    from penstock.cache.stores.web_client import WebClient

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

    from penstock.cache.stores.aws_login import add_aws_login
    from penstock.cache.stores.s3_options import s3_options

    options = s3_options(address.options)
    scope = scope_of("s3", _endpoint(options, "endpoint"), "")
    add_aws_login(options)
    bucket = address.url.partition("://")[2].partition("/")[0]
    return _open(address, options, S3Store, bucket, scope=scope, is_s3=True)


def open_gcs(address: StoreAddress) -> Store:
    """Open the store of gs://<bucket>/<folder>. Raises ConfigError."""
    from obstore.store import GCSStore

    from penstock.cache.stores.gcs_options import gcs_options

    options = gcs_options(address.options)
    scope = scope_of("gs", _endpoint(options, "base_url"), "")
    bucket = address.url.partition("://")[2].partition("/")[0]
    return _open(address, options, GCSStore, bucket, scope=scope)


def open_azure(address: StoreAddress) -> Store:
    """Open the store of az://<container>/<folder>, or abfs://<container>@<account>…/<folder>.

    Raises ConfigError.
    """
    from obstore.store import AzureStore

    from penstock.cache.stores.azure_options import azure_options

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
            "in storage_options and not in the URL."
        )
    store = _obstore(kind, bucket, options, address, retries=0)
    client = web_client(options, address.policy)
    signer = _signer(kind, store, bucket, options, address, is_s3=is_s3)
    headers = header_texts(options.client.get("default_headers") or {}) if signer else {}
    return ObstoreStore(
        store,
        listing=_obstore(kind, bucket, options, address, retries=_LISTING_RETRIES),
        root=address.url.partition("://")[2].partition("/")[2].strip("/"),
        url=address.display_url,
        scope=scope,
        secrets=address.secrets,
        bucket=bucket,
        client=client,
        web=_signed_objects(client, signer, headers, address, bucket),
        web_first=is_s3,
    )


def _signed_objects(
    client: WebClient,
    signer: Signer | None,
    headers: dict[str, str],
    address: StoreAddress,
    bucket: str,
) -> WebObjects | None:
    if signer is None:
        return None
    return WebObjects(client, signer, headers=headers, secrets=address.secrets, bucket=bucket)


def _signer(
    kind: Callable[..., Any],
    store: Any,
    bucket: str,
    options: StoreOptions,
    address: StoreAddress,
    *,
    is_s3: bool,
) -> Signer | None:
    """What signs URLs of a bucket's objects; None where a URL says too little (headers of
    encryption, of who pays) or can't be signed here."""
    config = options.config
    headers = options.client.get("default_headers") or {}
    if any(config.get(name) for name in _NEEDS_HEADERS) or any(
        str(name).lower().startswith("x-amz-") for name in headers
    ):
        return None
    if config.get("skip_signature"):
        if not is_s3:
            return None
        # Only its URLs are wanted: nothing is looked up for a login, and the signature is left out.
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
    """One of obstore's stores."""
    policy = address.policy
    ours = {
        # Allows http, doesn't choose it: what the URL or the endpoint says holds.
        "allow_http": True,
        "connect_timeout": timedelta(seconds=policy.connect_timeout_s),
        "read_timeout": timedelta(seconds=policy.read_timeout_s),
        # obstore's own limit for a whole request is 30 s.
        "timeout": timedelta(seconds=policy.retry_timeout_s),
    }
    given = {name: value for name, value in options.client.items() if name not in OURS}
    retry_s = policy.retry_timeout_s if retries else 0.0
    try:
        with rust_errors():
            return kind(
                bucket,
                client_options={**ours, **given},
                retry_config={"max_retries": retries, "retry_timeout": timedelta(seconds=retry_s)},
                **options.config,
            )
    # obstore raises errors of its own tree, TypeError and ValueError for what it doesn't know.
    except Exception as error:
        reason = clean_message(error, address.secrets).partition("\n")[0]
        raise ConfigError(
            f"{address.display_url}: obstore refused the storage_options ({reason}). Check their "
            "names and values."
        ) from None
