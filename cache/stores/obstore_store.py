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
from itertools import chain, pairwise
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from penstock.cache.base import Answer, ObjectInfo, RequestError, is_strong, version_text
from penstock.cache.errors import ConfigError, MissingDependencyError
from penstock.cache.secrets import clean_message, redact
from penstock.cache.stores.request_failures import obstore_failure, too_long
from penstock.cache.stores.storage_options import BUCKET_OPTIONS, StoreAddress, StoreOptions
from penstock.cache.stores.web_client import open_client
from penstock.cache.stores.web_objects import MOST_KEPT, WebObjects

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from obstore import GetOptions


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


def without_markers(infos: Iterable[ObjectInfo], folder: str) -> Iterator[ObjectInfo]:
    """Yield the listed objects without the empty objects by which some tools mark folders. Pure.

    obstore removes the "/" from the end of their names, and a listing has a folder's marker right
    before the folder's objects.
    """
    for info, after in pairwise(chain(infos, [None])):
        assert info is not None
        is_folder = after is not None and after.path.startswith(f"{info.path}/")
        if info.size_bytes or not (is_folder or info.path in ("", folder)):
            yield info


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


class ObstoreStore(WebObjects):
    """The objects of a bucket below a root.

    address: s3://<bucket>/<folder>, gs:// or az://, or abfs://<container>@<account>…/<folder>.
    Raises ConfigError, MissingDependencyError.
    """

    def __init__(self, address: StoreAddress) -> None:
        scheme, _, rest = address.url.partition("://")
        table = BUCKET_OPTIONS[scheme.lower()]
        options = table.read(address.options)
        bucket, _, folder = rest.partition("/")
        if table.scheme == "az":
            bucket, _, host = bucket.partition("@")
            if host:
                options.config.setdefault("account_name", host.partition(".")[0])
        elif table.scheme == "s3":
            add_aws_login(options)
        if not bucket or "@" in bucket:
            raise ConfigError(
                f"{redact(address.url)}: wanted {scheme}://<bucket>/<folder>, with credentials in "
                "storage_options instead of the URL."
            )
        headers, scope = options.client.get("default_headers", {}), table.scope(options)
        client = open_client(options, address.policy)
        super().__init__(address, client, headers=headers, scope=scope, bucket=bucket)
        self._root = folder.strip("/")
        make = partial(_obstore, table.kind, bucket, address)
        self._store = make(options)
        # With retries, because only obstore can repeat one of a listing's later pages, which are
        # too many to start again.
        self._retrying = make(options, retries=_LISTING_RETRIES)
        # Objects are requested by signed URLs as long as the bucket accepts them.
        self._signs, self._unsigned = table.scheme == "s3" and not _needs_headers(options), 0
        signing = self._store
        if self._signs and options.config.get("skip_signature"):
            # This store only forms URLs: it looks up no login.
            login = {"access_key_id": "none", "secret_access_key": "none", "skip_signature": False}
            signing = make(StoreOptions(config=options.config | login, client=options.client))
        self._sign = signer(signing, anonymous=signing is not self._store)

    def _url(self, method: str, path: str) -> str:
        return self._sign(method, self._key(path))

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
        return without_markers(self._walk(prefix), prefix)

    def _walk(self, prefix: str) -> Iterator[ObjectInfo]:
        import obstore

        key = self._key(prefix) or None
        # Without retries: the first page shows errors at once.
        pages, is_first = iter(obstore.list(self._store, key, chunk_size=_PAGE)), True
        while True:
            with self._explaining():
                page = list(next(pages, ()))
            yield from map(self._listed, page)
            if len(page) < _PAGE:
                return
            if is_first:
                after, is_first = str(page[-1]["path"]), False
                pages = iter(obstore.list(self._retrying, key, offset=after, chunk_size=_PAGE))

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
        if not self._key(path):
            raise RequestError("missing", "a bucket is no object")
        return self._either(super()._info, self._info_by_obstore, path)

    def _info_by_obstore(self, path: str) -> ObjectInfo:
        import obstore

        with self._explaining():
            return _info(path, obstore.head(self._store, self._key(path)))

    # -- bytes

    def _read(
        self, path: str, span: tuple[int, int] | None, version: str | None, most_bytes: int | None
    ) -> Answer:
        wanted = path, span, version, most_bytes
        return self._either(super()._read, self._read_by_obstore, *wanted)

    def _either(self, by_url: Callable[..., T], by_obstore: Callable[..., T], *wanted: Any) -> T:
        """Return the answer to a request by a signed URL, or by obstore itself if that is
        impossible. wanted: the arguments of both."""
        if not self._signs:
            return by_obstore(*wanted)
        try:
            answer = by_url(*wanted)
        except RequestError as refused:
            # Some buckets' policies refuse signed URLs, or the login was just renewed.
            if refused.kind != "denied" or refused.code not in _MAYBE_THE_URL:
                raise
        else:
            self._unsigned = 0
            return answer
        answer = by_obstore(*wanted)
        self._unsigned += 1
        self._signs = self._unsigned < _UNSIGNED_AFTER
        return answer

    def _read_by_obstore(
        self, path: str, span: tuple[int, int] | None, version: str | None, most_bytes: int | None
    ) -> Answer:
        import obstore

        options: GetOptions = {"range": span} if span is not None else {}
        if is_strong(version):
            options["if_match"] = f'"{version}"'
        with self._explaining():
            result = obstore.get(self._store, self._key(path), options=options)
            meta, (start, end) = result.meta, result.range
            size_bytes = int(meta["size"])
            self._check_size(size_bytes, most_bytes)
            self._check_range((start, end), span or (0, size_bytes), size_bytes)
            data = _read_at_most(result, end - start)
        return Answer(data=data, version=_info(path, meta).version, object_bytes=size_bytes)

    def put(self, local: str, path: str) -> None:
        """Upload a local file by obstore, in parts if it is large."""
        import obstore

        with self._explaining(), open(os.fsencode(local), "rb") as file:
            obstore.put(self._store, self._key(path), file)


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
    "request_payer", "s3_express", "server_side_encryption", "sse_customer_key_base64",
    "sse_kms_key_id",
)  # fmt: skip


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
    names = [name.lower() for name in options.client.get("default_headers", {})]
    is_amazons = any(name.startswith("x-amz-") for name in names)
    return is_amazons or any(map(options.config.get, _NEEDS_HEADERS))


def _obstore(
    kind: str, bucket: str, address: StoreAddress, options: StoreOptions, retries: int = 0
) -> Any:
    """Create one of obstore's stores. kind: the name of its class."""
    import obstore.store

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
    retry_config = {"max_retries": retries, "retry_timeout": timedelta(seconds=retry_s)}
    try:
        with rust_errors():
            return getattr(obstore.store, kind)(
                bucket, client_options=client_options, retry_config=retry_config, **options.config
            )
    # obstore raises its own errors, and TypeError and ValueError for unknown options.
    except Exception as error:
        reason = clean_message(error, address.secrets).partition("\n")[0]
        raise ConfigError(
            f"{address.display_url}: obstore refused the storage_options ({reason}). Check their "
            "names and values."
        ) from None
