"""The store behind a URL: http(s) by `web_client`, s3, gs and az by obstore and, where a URL
can be signed, by the same client; every other one by fsspec."""

from __future__ import annotations

import hashlib
import re
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, unquote, urlsplit, urlunsplit

from penstock.cache.errors import ConfigError, FetchError, MissingDependencyError
from penstock.cache.secrets import (
    clean_message,
    find_secrets,
    plain_query,
    redact,
    store_scope,
    url_secrets,
)
from penstock.cache.stores.fsspec_store import FsspecStore
from penstock.cache.stores.http_store import HttpStore
from penstock.cache.stores.logins import basic_auth
from penstock.cache.stores.obstore_store import ObstoreStore, Signer, rust_errors
from penstock.cache.stores.options import (
    OURS,
    Settings,
    azure_settings,
    fetch_policy,
    gcs_settings,
    http_settings,
    s3_settings,
    seconds,
)
from penstock.cache.stores.proxies import Proxies
from penstock.cache.stores.tls import tls_context
from penstock.cache.stores.web_address import origin_of
from penstock.cache.stores.web_client import WebClient
from penstock.cache.stores.web_objects import WebObjects

if TYPE_CHECKING:
    from collections.abc import Mapping

    from penstock.cache.base.fetch_policy import FetchPolicy
    from penstock.cache.base.store import Store

__all__ = ["fetch_policy", "open_store"]

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.\-]*)://")
_CHAIN = re.compile(r"^[A-Za-z][\w+.\-]*::|::[A-Za-z][\w+.\-]*://")
"""fsspec's chains, such as zip://x::s3://…; not the colons of http://[::1]."""
_S3 = ("s3", "s3a")
_GCS = ("gs", "gcs")
_AZURE = ("az", "abfs", "abfss")
_HTTP = ("http", "https")
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


def open_store(url: str, options: Mapping[str, Any], *, filesystem: Any | None = None) -> Store:
    """The store whose root is `url`. options: storage_options; filesystem: an fsspec file system
    to use instead. Makes no request to a bucket. Raises ConfigError, MissingDependencyError,
    FetchError."""
    secrets = tuple(sorted({*find_secrets(options), *url_secrets(url)}, key=len, reverse=True))
    if filesystem is not None:
        return _passed(url, filesystem, secrets)
    policy = fetch_policy(options)
    found = _SCHEME.match(url)
    scheme = found[1].lower() if found else ""
    try:
        if _CHAIN.search(url) or scheme not in (*_S3, *_GCS, *_AZURE, *_HTTP):
            return _by_fsspec(url, options, policy, secrets)
        if scheme in _HTTP:
            return _http(url, options, policy, secrets)
        return _bucket(url, scheme, options, policy, secrets)
    except ImportError as error:
        raise MissingDependencyError(
            f"{redact(url)}: this kind of URL needs another package ({error}). Install it beside "
            "penstock."
        ) from error


def _bucket(
    url: str,
    scheme: str,
    options: Mapping[str, Any],
    policy: FetchPolicy,
    secrets: tuple[str, ...],
) -> Store:
    from obstore import store as obstores

    place, _, root = url.partition("://")[2].partition("/")
    root = root.strip("/")
    if scheme in _AZURE:
        settings = azure_settings(options)
        place, account = _azure_place(place, settings)
        make: Any = obstores.AzureStore
        scope = ("az", account, settings.config.get("endpoint", ""))
    elif scheme in _GCS:
        settings = gcs_settings(options)
        make, scope = obstores.GCSStore, ("gs", settings.config.get("base_url", ""), "")
    else:
        settings = s3_settings(options)
        make, scope = obstores.S3Store, ("s3", settings.config.get("endpoint", ""), "")
        _add_aws_login(settings)
    if not place or "@" in place:
        raise ConfigError(
            f"{redact(url)}: wanted {scheme}://<bucket>/<folder>, with credentials in "
            "storage_options and not in the URL."
        )
    shown = redact(url).rstrip("/")
    store = _made(make, place, settings, policy, shown, secrets, retries=0)
    client = _client(settings, policy)
    return ObstoreStore(
        store,
        listing=_made(make, place, settings, policy, shown, secrets, retries=_LISTING_RETRIES),
        root=root,
        url=shown,
        scope=_scope(*(str(part).rstrip("/") for part in scope)),
        secrets=secrets,
        bucket=place,
        client=client,
        web=_signed(make, store, place, settings, policy, shown, secrets, client),
        web_first=scheme in _S3,
    )


def _signed(
    make: Any,
    store: Any,
    bucket: str,
    settings: Settings,
    policy: FetchPolicy,
    shown: str,
    secrets: tuple[str, ...],
    client: WebClient,
) -> WebObjects | None:
    """A bucket's objects by URLs that obstore signs; None where a URL says too little (headers of
    encryption, of who pays) or can't be signed here."""
    is_s3 = make.__name__ == "S3Store"
    config = settings.config
    headers = settings.client.get("default_headers") or {}
    if any(config.get(name) for name in _NEEDS_HEADERS) or any(
        str(name).lower().startswith("x-amz-") for name in headers
    ):
        return None
    if config.get("skip_signature"):
        if not is_s3:
            return None
        # Only its URLs are wanted: nothing is looked up for a login, and the signature is cut off.
        bare = {"access_key_id": "none", "secret_access_key": "none", "skip_signature": False}
        plain = {name: value for name, value in config.items() if name not in _LOGIN}
        anonymous = Settings(config={**plain, **bare}, client=settings.client)
        store = _made(make, bucket, anonymous, policy, shown, secrets, retries=0)
    elif not is_s3 and "credential_provider" in config:
        return None
    return WebObjects(
        client,
        Signer(store, anonymous=bool(config.get("skip_signature"))),
        headers=_texts(headers),
        secrets=secrets,
        bucket=bucket,
    )


def _http(
    url: str, options: Mapping[str, Any], policy: FetchPolicy, secrets: tuple[str, ...]
) -> Store:
    settings = http_settings(options)
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
        headers = settings.client.setdefault("default_headers", {})
        headers.setdefault("Authorization", basic_auth(login))
        secrets = (headers["Authorization"], *secrets)
    base = urlunsplit(
        (parts.scheme, parts.netloc.rpartition("@")[2], parts.path.rstrip("/"), parts.query, "")
    )
    client = _client(settings, policy)
    objects = WebObjects(
        client,
        lambda _method, key: _object_url(base, key),
        headers=_texts(settings.client.get("default_headers") or {}),
        secrets=secrets,
    )
    return HttpStore(
        client,
        objects,
        base=base,
        url=redact(base),
        scope=_scope("http", repr(plain_query(url))),
        secrets=secrets,
    )


def _object_url(base: str, key: str) -> str:
    parts = urlsplit(base)
    path = f"{parts.path.rstrip('/')}/{quote(key)}"
    return urlunsplit((parts.scheme, parts.netloc, path, parts.query, ""))


def _texts(headers: Mapping[Any, Any]) -> dict[str, str]:
    """Headers as text. Raises ConfigError for what no header can hold."""
    found = {}
    for name, value in headers.items():
        texts = [
            each.decode("latin-1") if isinstance(each, bytes) else str(each)
            for each in (name, value)
        ]
        if any(mark in text for text in texts for mark in "\r\n\0") or ":" in texts[0]:
            raise ConfigError(f"storage_options: headers: {texts[0][:40]!r} isn't a header.")
        found[texts[0]] = texts[1]
    return found


def _client(settings: Settings, policy: FetchPolicy) -> WebClient:
    """Connections with the same trust, timeouts and proxies that obstore is told."""
    given = settings.client
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


def _made(
    make: Any,
    place: str,
    settings: Settings,
    policy: FetchPolicy,
    shown: str,
    secrets: tuple[str, ...],
    *,
    retries: int,
) -> Any:
    """One of obstore's stores."""
    ours = {
        # Allows http, doesn't choose it: what the URL or the endpoint says holds.
        "allow_http": True,
        "connect_timeout": timedelta(seconds=policy.connect_timeout_s),
        "read_timeout": timedelta(seconds=policy.read_timeout_s),
        # obstore's own limit for a whole request is 30 s.
        "timeout": timedelta(seconds=policy.retry_timeout_s),
    }
    given = {name: value for name, value in settings.client.items() if name not in OURS}
    retry_s = policy.retry_timeout_s if retries else 0.0
    try:
        with rust_errors():
            return make(
                place,
                client_options={**ours, **given},
                retry_config={"max_retries": retries, "retry_timeout": timedelta(seconds=retry_s)},
                **settings.config,
            )
    # obstore raises errors of its own tree, TypeError and ValueError for what it doesn't know.
    except Exception as error:
        reason = clean_message(error, secrets).partition("\n")[0]
        raise ConfigError(
            f"{shown}: storage_options don't fit ({reason}). Check their names and values."
        ) from None


def _add_aws_login(settings: Settings) -> None:
    """Let boto3, if it is there, find a profile of ~/.aws, a login or an instance's role: obstore
    itself knows the environment and instances only."""
    config = settings.config
    if config.get("skip_signature") or config.get("access_key_id"):
        return
    try:
        import boto3
        import botocore.exceptions
        from obstore.auth.boto3 import Boto3CredentialProvider
    except ImportError:
        if settings.profile is None:
            return
        raise MissingDependencyError(
            "storage_options: profile= needs boto3: `pip install 'penstock[aws]'`."
        ) from None
    try:
        session = boto3.Session(profile_name=settings.profile)
        found = session.get_credentials()
    except botocore.exceptions.BotoCoreError as error:
        raise ConfigError(f"storage_options: the AWS profile can't be used ({error}).") from None
    if session.region_name and "region" not in config:
        config["region"] = session.region_name
    if found is not None and found.method != "env":
        config["credential_provider"] = Boto3CredentialProvider(session)


def _azure_place(place: str, settings: Settings) -> tuple[str, str]:
    """(container, account) of container or container@account.dfs.core.windows.net."""
    container, _, host = place.partition("@")
    if host:
        settings.config.setdefault("account_name", host.partition(".")[0])
    return container, str(settings.config.get("account_name", ""))


def _scope(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode("utf-8", "surrogatepass")).hexdigest()[:16]


def _by_fsspec(
    url: str, options: Mapping[str, Any], policy: FetchPolicy, secrets: tuple[str, ...]
) -> Store:
    import fsspec

    shown = redact(url).rstrip("/")
    theirs = {name: value for name, value in options.items() if name not in OURS}
    try:
        fs, root = fsspec.url_to_fs(url, **theirs)
    except ImportError:
        raise
    except ValueError as error:
        raise ConfigError(
            f"{shown}: not a URL that can be opened ({clean_message(error, secrets)}). Wanted a "
            "local path, file://, s3://, gs://, https:// or another scheme that fsspec knows."
        ) from None
    # Opening may reach for credentials or the network; each backend has its own exception tree.
    except Exception as error:
        raise FetchError(
            f"{shown}: could not be opened ({clean_message(error, secrets)}). Check "
            "storage_options.",
            uri=shown,
        ) from None
    return FsspecStore(
        fs,
        root=str(root),
        url=shown,
        scope=store_scope(theirs),
        secrets=secrets,
        timeout_s=min(policy.retry_timeout_s, 3 * policy.read_timeout_s),
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
    secrets = tuple(sorted({*secrets, *find_secrets(options)}, key=len, reverse=True))
    try:
        return _http(url, options, fetch_policy(options), secrets)
    except ConfigError:
        return None


def _passed(url: str, fs: Any, secrets: tuple[str, ...]) -> Store:
    """A user's own file system object."""
    options = dict(getattr(fs, "storage_options", None) or {})
    if (web := _plain_web(url, fs, options, secrets)) is not None:
        return web
    secrets = tuple(sorted({*secrets, *find_secrets(options)}, key=len, reverse=True))
    return FsspecStore(
        fs,
        root=str(fs._strip_protocol(url)),
        url=redact(url).rstrip("/"),
        scope=store_scope(options),
        secrets=secrets,
    )
