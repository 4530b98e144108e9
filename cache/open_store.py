"""The store behind a URL: obstore for s3, gs, az and http(s), fsspec for every other one."""

from __future__ import annotations

import hashlib
import re
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, unquote, urlsplit, urlunsplit

from cache.errors import ConfigError, FetchError, MissingDependencyError
from cache.fsspec_store import FsspecStore
from cache.http_listing import HttpListing
from cache.obstore_store import ObstoreStore
from cache.plain_get import PlainGet
from cache.secrets import clean_message, find_secrets, plain_query, redact, store_scope, url_secrets
from cache.store_options import (
    OURS,
    Settings,
    azure_settings,
    fetch_policy,
    gcs_settings,
    http_settings,
    s3_settings,
)

if TYPE_CHECKING:
    import ssl
    from collections.abc import Mapping

    from cache.fetch_policy import FetchPolicy
    from cache.store import Store

__all__ = ["fetch_policy", "open_store"]

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.\-]*)://")
_CHAIN = re.compile(r"^[A-Za-z][\w+.\-]*::|::[A-Za-z][\w+.\-]*://")
"""fsspec's chains, such as zip://x::s3://…; not the colons of http://[::1]."""
_S3 = ("s3", "s3a")
_GCS = ("gs", "gcs")
_AZURE = ("az", "abfs", "abfss")
_HTTP = ("http", "https")
_LISTING_RETRIES = 5


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
    return ObstoreStore(
        store,
        listing=_made(make, place, settings, policy, shown, secrets, retries=_LISTING_RETRIES),
        root=root,
        url=shown,
        scope=_scope(*(str(part).rstrip("/") for part in scope)),
        secrets=secrets,
        plain=_signed_get(store, settings, policy, secrets),
    )


def _signed_get(
    store: Any, settings: Settings, policy: FetchPolicy, secrets: tuple[str, ...]
) -> PlainGet | None:
    """Ranges of a bucket by signed URLs; None where requests aren't signed, or wait for a login."""
    import obstore

    if settings.config.get("skip_signature") or "credential_provider" in settings.config:
        return None
    lasts = timedelta(seconds=policy.retry_timeout_s)
    return PlainGet(
        lambda key: obstore.sign(store, "GET", key, lasts),
        headers={},
        timeout_s=policy.read_timeout_s,
        secrets=secrets,
        tls=_tls(settings),
    )


def _http(
    url: str, options: Mapping[str, Any], policy: FetchPolicy, secrets: tuple[str, ...]
) -> Store:
    from obstore.store import HTTPStore

    settings = http_settings(options)
    try:
        parts = urlsplit(url)
        host = parts.hostname
    except ValueError:
        host = None
    if not host:
        raise ConfigError(f"{redact(url)}: not a URL, wanted {url.partition(':')[0]}://<host>/….")
    if parts.username is not None:
        # As a header: in the URL it would be in every message of every library below.
        from cache.store_options import basic_auth

        login = unquote(parts.username), unquote(parts.password or "")
        headers = settings.client.setdefault("default_headers", {})
        headers.setdefault("Authorization", basic_auth(login))
        secrets = (headers["Authorization"], *secrets)
    base = urlunsplit(
        (parts.scheme, parts.netloc.rpartition("@")[2], parts.path.rstrip("/"), parts.query, "")
    )
    shown = redact(base)
    headers = settings.client.get("default_headers", {})
    tls = _tls(settings) if parts.scheme == "https" else None
    store = _made(HTTPStore, base, settings, policy, shown, secrets, retries=0)
    return ObstoreStore(
        store,
        listing=store,
        root="",
        url=shown,
        scope=_scope("http", repr(plain_query(url))),
        secrets=secrets,
        lister=partial(
            HttpListing,
            base,
            headers=headers,
            timeout_s=policy.read_timeout_s,
            secrets=secrets,
            tls=tls,
        ),
        plain=PlainGet(
            partial(_object_url, base),
            headers=headers,
            timeout_s=policy.read_timeout_s,
            secrets=secrets,
            tls=tls,
        ),
    )


def _object_url(base: str, key: str) -> str:
    parts = urlsplit(base)
    path = f"{parts.path.rstrip('/')}/{quote(key)}"
    return urlunsplit((parts.scheme, parts.netloc, path, parts.query, ""))


def _tls(settings: Settings) -> ssl.SSLContext:
    """What obstore is told of certificates, for urllib."""
    import ssl

    own = settings.client.get("root_certificate")
    context = ssl.create_default_context()
    if own is not None:
        context.load_verify_locations(cadata=own.decode() if isinstance(own, bytes) else own)
    if settings.client.get("allow_invalid_certificates"):
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


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


def _passed(url: str, fs: Any, secrets: tuple[str, ...]) -> Store:
    """A user's own file system object."""
    options = dict(getattr(fs, "storage_options", None) or {})
    secrets = tuple(sorted({*secrets, *find_secrets(options)}, key=len, reverse=True))
    return FsspecStore(
        fs,
        root=str(fs._strip_protocol(url)),
        url=redact(url).rstrip("/"),
        scope=store_scope(options),
        secrets=secrets,
    )
