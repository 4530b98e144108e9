"""Open and read buckets of s3, gs and az: by signed URLs where possible, by obstore otherwise.

The web client fetches an s3 object's bytes by a URL that obstore signs (9 us). It shows every
header (Retry-After, too), follows no redirect with a login, can be aborted, and takes less CPU time
a byte. obstore itself makes the requests that a signed URL can't express, and those to gs and az,
which sign by request headers. boto3, if it is installed, finds a login for s3: a profile of ~/.aws,
single sign-on, or an instance's role.

Calls are synchronous, in threads: 0.55 CPU-s/GB for 8 MiB ranges and 1.2 for 100 kB, for which
async takes twice as long. `cache.fetch` retries, so obstore's retries are off, except for a
listing's later pages.

obstore's threads don't survive a fork: after it was used, a forked child would hang, so stores
refuse requests there. Its panics are BaseExceptions, which this module raises as RuntimeErrors.
"""

from __future__ import annotations

import contextlib
import os
import time
from datetime import UTC, datetime, timedelta
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from penstock.cache.base import (
    Answer,
    ObjectInfo,
    RequestError,
    Store,
    check_size,
    is_strong,
    version_text,
)
from penstock.cache.errors import ConfigError, MissingDependencyError
from penstock.cache.secrets import clean_message, redact
from penstock.cache.stores.request_failures import obstore_failure, too_long
from penstock.cache.stores.storage_options import (
    AZURE_OPTIONS,
    GCS_OPTIONS,
    S3_OPTIONS,
    OptionTable,
    StoreOptions,
    scope_of,
)
from penstock.cache.stores.web_client import open_client
from penstock.cache.stores.web_objects import MOST_KEPT, WebObjects

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from obstore import GetOptions

    from penstock.cache.stores.storage_options import StoreAddress
    from penstock.cache.stores.web_client import WebClient

_FORKED = (
    "obstore was used before this process was forked, and would hang in it. Use "
    'multiprocessing_context="forkserver" (or "spawn"), and create the dataset inside the worker'
)


_user: dict[None, int] = {}
"""The process that used obstore first: this one, or one that it was forked from."""


@contextlib.contextmanager
def requesting() -> Iterator[None]:
    """Record that this process uses obstore for the calls inside the with statement. Raises
    RequestError in a forked child of a process that used it, in which obstore would hang."""
    if _user.setdefault(None, os.getpid()) != os.getpid():
        raise RequestError("refused", _FORKED)
    with rust_errors():
        yield


@contextlib.contextmanager
def rust_errors() -> Iterator[None]:
    """Convert a Rust panic, a BaseException that would pass every handler, to an Exception."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise RuntimeError(str(error)) from None


_SIGNED_FOR = timedelta(hours=1)
_USED_S = 60.0


def signer(store: Any, *, anonymous: bool) -> Callable[[str, str], str]:
    """Return the function that returns the URL of a key for a method, which is reused for at most a
    minute. anonymous: True omits the signature.

    The function raises RequestError if obstore can't sign a URL, because it has no key of its own.
    """

    @lru_cache(maxsize=MOST_KEPT)
    def sign(method: str, key: str, minute: int) -> str:
        del minute
        import obstore

        try:
            with requesting():
                url = str(obstore.sign(store, method, key, _SIGNED_FOR))  # type: ignore[call-overload]
        except Exception as error:  # any error of obstore, whose own requests will explain it
            raise RequestError("denied", type(error).__name__, code="none") from None
        return url.partition("?")[0] if anonymous else url

    return lambda method, key: sign(method, key, int(time.monotonic() / _USED_S))


def without_markers(infos: list[ObjectInfo], folder: str) -> list[ObjectInfo]:
    """Return the listed objects without the empty objects by which some tools mark folders. Pure.

    obstore removes the "/" from the end of their names, and a listing has a folder's marker right
    before the folder's objects.
    """
    following = [*(info.path for info in infos), ""][1:]
    return [
        info
        for info, after in zip(infos, following, strict=True)
        if info.size_bytes
        or (info.path not in ("", folder) and not after.startswith(f"{info.path}/"))
    ]


T = TypeVar("T")
_PAGE = 1000
_NO_TIME = datetime.fromtimestamp(0, UTC)
_MAYBE_THE_URL = ("none", "AccessDenied", "ExpiredToken", "InvalidToken")
"""Codes of a signed URL's refusal after which a request with signed headers may succeed; "none" is
that of an empty answer."""
_UNSIGNED_AFTER = 2
"""After so many consecutive requests that only signed headers could make, URLs aren't signed any
more."""
_STEP_BYTES = 2**20


class ObstoreStore(Store):
    """The objects of a bucket below a root.

    store, retrying: obstore's stores without and with retries: only obstore can repeat one of a
    listing's later pages, which are too many to start again. root: the beginning of obstore's keys,
    without leading and trailing slashes. bucket: its name in messages. web: the same objects by
    signed URLs, or None.
    """

    def __init__(
        self,
        store: Any,
        address: StoreAddress,
        *,
        retrying: Any,
        root: str,
        bucket: str,
        scope: str,
        client: WebClient,
        web: WebObjects | None,
    ) -> None:
        super().__init__(url=address.display_url, scope=scope, secrets=address.secrets)
        self._client = client
        self._store, self._retrying = store, retrying
        self._root = root
        self._bucket = bucket
        self._web = web
        self._unsigned = 0

    @contextlib.contextmanager
    def _explaining(self) -> Iterator[None]:
        """Raise the errors of obstore inside the with statement as RequestErrors."""
        try:
            with requesting():
                yield
        except RequestError:
            raise
        except Exception as error:  # any error of obstore
            raise obstore_failure(error, bucket=self._bucket, secrets=self.secrets) from None

    def _key(self, path: str) -> str:
        key = "/".join(part for part in (self._root, path) if part)
        try:
            key.encode()
        except UnicodeEncodeError:
            raise RequestError("refused", "its name isn't UTF-8: rename it") from None
        return key

    # -- names

    def walk(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """List all objects in pages."""
        import obstore

        key = self._key(prefix) or None
        with self._explaining():
            # Without retries: the first page shows errors at once.
            page = list(next(iter(obstore.list(self._store, key, chunk_size=_PAGE)), ()))
        yield from without_markers([self._listed(meta) for meta in page], prefix)
        if len(page) < _PAGE:
            return
        after = str(page[-1]["path"])
        rest = iter(obstore.list(self._retrying, key, offset=after, chunk_size=_PAGE))
        while page:
            with self._explaining():
                page = list(next(rest, ()))
            yield from without_markers([self._listed(meta) for meta in page], prefix)

    def list_folder(self, prefix: str = "") -> tuple[list[ObjectInfo], list[str]]:
        """List a folder in one request."""
        import obstore

        with self._explaining():
            found = obstore.list_with_delimiter(self._store, self._key(prefix) or None)
        folders = [path.rstrip("/").rpartition("/")[2] for path in found["common_prefixes"]]
        markers = {prefix, *(f"{prefix}/{name}".lstrip("/") for name in folders)}
        infos = [self._listed(meta) for meta in found["objects"]]
        return [info for info in infos if info.size_bytes or info.path not in markers], folders

    def _listed(self, meta: Any) -> ObjectInfo:
        path = str(meta["path"])
        return _info(path.removeprefix(self._root).lstrip("/") if self._root else path, meta)

    def _info(self, path: str) -> ObjectInfo:
        key = self._key(path)
        if not key:
            raise RequestError("missing", "a bucket is no object")
        return self._either(
            lambda web: web.info(key, path), lambda: self._info_by_obstore(path, key)
        )

    def _info_by_obstore(self, path: str, key: str) -> ObjectInfo:
        import obstore

        with self._explaining():
            return _info(path, obstore.head(self._store, key))

    # -- bytes

    def _read(
        self, path: str, span: tuple[int, int] | None, version: str | None, most_bytes: int | None
    ) -> Answer:
        key = self._key(path)
        return self._either(
            lambda web: web.read(key, span, version, most_bytes),
            lambda: self._read_by_obstore(key, span, version, most_bytes),
        )

    def _either(self, by_web: Callable[[WebObjects], T], by_obstore: Callable[[], T]) -> T:
        """Return the answer to a request by a signed URL, or by obstore itself if that is
        impossible."""
        if (web := self._web) is None:
            return by_obstore()
        try:
            answer = by_web(web)
        except RequestError as refused:
            # Some buckets' policies refuse signed URLs, or the login was just renewed.
            if refused.kind != "denied" or refused.code not in _MAYBE_THE_URL:
                raise
        else:
            self._unsigned = 0
            return answer
        answer = by_obstore()
        self._unsigned += 1
        if self._unsigned >= _UNSIGNED_AFTER:
            self._web = None
        return answer

    def _read_by_obstore(
        self, key: str, span: tuple[int, int] | None, version: str | None, most_bytes: int | None
    ) -> Answer:
        import obstore

        options: GetOptions = {"range": span} if span is not None else {}
        if is_strong(version):
            options["if_match"] = f'"{version}"'
        with self._explaining():
            result = obstore.get(self._store, key, options=options)
            meta, (start, end) = result.meta, result.range
            size_bytes = int(meta["size"])
            first, last = span or (0, size_bytes)
            check_size(size_bytes, most_bytes)
            if (start, end) != (first, min(last, size_bytes)):
                raise RequestError("transient", f"bytes {start}-{end} came, wanted {first}-{last}")
            data = _read_at_most(result, end - start)
        return Answer(data=data, version=_info(key, meta).version, object_bytes=size_bytes)

    def put(self, local: str, path: str) -> None:
        """Upload a local file by obstore, in parts if it is large."""
        import obstore

        with self._explaining(), open(os.fsencode(local), "rb") as file:
            obstore.put(self._store, self._key(path), file)

    def close(self) -> None:
        """End the web client's requests at once; obstore's end by their timeouts."""
        self._client.abort()


def _info(path: str, meta: Any) -> ObjectInfo:
    size_bytes, time = int(meta["size"]), meta.get("last_modified")
    version = version_text(meta.get("e_tag"), size_bytes, None if time == _NO_TIME else time)
    return ObjectInfo(path=path, size_bytes=size_bytes, version=version)


def _read_at_most(result: Any, wanted: int) -> memoryview:
    """Return the bytes of an answer. Raises RequestError soon after the first byte too many."""
    view = np.empty(wanted, np.uint8).data
    at = 0
    for part in result.stream(min_chunk_size=min(_STEP_BYTES, max(1, wanted))):
        if at + len(part) > wanted:
            raise too_long(wanted)
        view[at : at + len(part)] = memoryview(part)
        at += len(part)
    return view[:at]


# -- opening

_LISTING_RETRIES = 5
_NEEDS_HEADERS = (
    "request_payer",
    "s3_express",
    "server_side_encryption",
    "sse_customer_key_base64",
    "sse_kms_key_id",
)


_KINDS: dict[str, tuple[OptionTable, str, tuple[str, str]]] = {
    **dict.fromkeys(("s3", "s3a"), (S3_OPTIONS, "S3Store", ("endpoint", ""))),
    **dict.fromkeys(("gs", "gcs"), (GCS_OPTIONS, "GCSStore", ("base_url", ""))),
    **dict.fromkeys(
        ("az", "abfs", "abfss"), (AZURE_OPTIONS, "AzureStore", ("account_name", "endpoint"))
    ),
}
"""By scheme: the options, the name of obstore's class, and the options that distinguish stores of
one URL."""


def open_bucket(address: StoreAddress) -> Store:
    """Open the store of s3://<bucket>/<folder>, gs:// or az://, or of
    abfs://<container>@<account>…/<folder>. Raises ConfigError, MissingDependencyError."""
    import obstore.store

    scheme, _, rest = address.url.partition("://")
    table, kind, places = _KINDS[scheme.lower()]
    options = table.read(address.options)
    bucket, _, folder = rest.partition("/")
    if table is AZURE_OPTIONS:
        bucket, _, host = bucket.partition("@")
        if host:
            options.config.setdefault("account_name", host.partition(".")[0])
    elif table is S3_OPTIONS:
        add_aws_login(options)
    if not bucket or "@" in bucket:
        raise ConfigError(
            f"{redact(address.url)}: wanted {scheme}://<bucket>/<folder>, with credentials in "
            "storage_options instead of the URL."
        )
    scope = scope_of(
        table.scheme, *(str(options.config.get(name, "")).rstrip("/") for name in places)
    )
    make = partial(_obstore, getattr(obstore.store, kind), bucket, address)
    store = make(options)
    client = open_client(options, address.policy)
    web = None
    if table is S3_OPTIONS and not _needs_headers(options):
        url_of = signer(store, anonymous=False)
        if options.config.get("skip_signature"):
            # This store only forms URLs: it looks up no login.
            login = {"access_key_id": "none", "secret_access_key": "none", "skip_signature": False}
            bare = StoreOptions(config={**options.config, **login}, client=options.client)
            url_of = signer(make(bare), anonymous=True)
        headers = options.client.get("default_headers", {})
        web = WebObjects(client, url_of, headers=headers, secrets=address.secrets, bucket=bucket)
    return ObstoreStore(
        store,
        address,
        retrying=make(options, retries=_LISTING_RETRIES),
        root=folder.strip("/"),
        bucket=bucket,
        scope=scope,
        client=client,
        web=web,
    )


def add_aws_login(options: StoreOptions) -> None:
    """Let boto3, if it is installed, find the login and the region: obstore itself reads only the
    environment and instance roles. Raises ConfigError, MissingDependencyError."""
    config, profile = options.config, options.config.pop("profile", None)
    if config.get("skip_signature") or config.get("access_key_id"):
        return
    try:
        import boto3
        import botocore.exceptions
        from obstore.auth.boto3 import Boto3CredentialProvider
    except ImportError:
        if profile is None:
            return
        raise MissingDependencyError(
            "storage_options: profile= needs boto3: `pip install 'penstock[aws]'`."
        ) from None
    try:
        session = boto3.Session(profile_name=profile)
        found = session.get_credentials()
    except botocore.exceptions.BotoCoreError as error:
        raise ConfigError(f"storage_options: the AWS profile can't be used ({error}).") from None
    if session.region_name and "region" not in config:
        config["region"] = session.region_name
    if found is not None and found.method != "env":
        config["credential_provider"] = Boto3CredentialProvider(session)


def _needs_headers(options: StoreOptions) -> bool:
    """Return True if requests need headers that aren't part of a signed URL (encryption, requester
    pays)."""
    headers = options.client.get("default_headers", {})
    return any(options.config.get(name) for name in _NEEDS_HEADERS) or any(
        name.lower().startswith("x-amz-") for name in headers
    )


def _obstore(
    kind: Callable[..., Any],
    bucket: str,
    address: StoreAddress,
    options: StoreOptions,
    *,
    retries: int = 0,
) -> Any:
    """Create one of obstore's stores."""
    policy = address.policy
    client_options = {
        # This allows http; the scheme of the URL or the endpoint chooses it.
        "allow_http": True,
        "connect_timeout": timedelta(seconds=policy.connect_timeout_s),
        "read_timeout": timedelta(seconds=policy.read_timeout_s),
        # obstore's own limit for a whole request is 30 s.
        "timeout": timedelta(seconds=policy.retry_timeout_s),
        **options.client,
    }
    retry_s = policy.retry_timeout_s if retries else 0.0
    try:
        with rust_errors():
            return kind(
                bucket,
                client_options=client_options,
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
