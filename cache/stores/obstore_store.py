"""Read objects of s3, gs and az: by signed URLs where possible, by obstore otherwise.

The web client fetches an s3 object's bytes by a URL that obstore signs (9 us). It shows every
header, follows no redirect with a login, can be aborted, and takes less CPU time a byte. obstore
itself makes the requests that a signed URL can't express, and those to gs and az, which sign by
request headers. For gs and az, signed URLs serve only the requests after a throttled one, because
obstore doesn't show Retry-After.

Calls are synchronous, in threads: 0.55 CPU-s/GB for 8 MiB ranges and 1.2 for 100 kB, for which
async takes twice as long. `cache.fetch` retries, so obstore's retries are off, except for a
listing's later pages.

obstore's threads don't survive a fork: after it was used, a forked child would hang, so stores
refuse requests there. Its panics are BaseExceptions, which this module raises as RustPanicError.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import threading
import time
from collections import OrderedDict
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from penstock.cache.base import Answer, Failure, ObjectInfo, RequestError
from penstock.cache.secrets import hide
from penstock.cache.stores.tls import CERTIFICATE_REMEDY, certificate_fault_of
from penstock.cache.stores.web_answers import RangeSupport, bucket_failure, is_strong

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from obstore import GetOptions

    from penstock.cache.stores.web_client import WebClient
    from penstock.cache.stores.web_objects import WebObjects

_FORKED = (
    "obstore was used before this process was forked, and would hang in it. Use "
    'multiprocessing_context="forkserver" (or "spawn"), and create the dataset inside the worker'
)


class _Process:
    """The use of obstore by this process (is_used) and by those that it was forked from
    (is_forked)."""

    is_used = False
    is_forked = False

    @classmethod
    def forked(cls) -> None:
        cls.is_forked = cls.is_forked or cls.is_used
        cls.is_used = False


os.register_at_fork(after_in_child=_Process.forked)


def check_process(pid: int) -> None:
    """Record that this process uses obstore; raise RequestError if obstore would hang.

    It would hang in any process except the one with this pid, and in a forked child of a process
    that used it.
    """
    if _Process.is_forked or os.getpid() != pid:
        raise RequestError("refused", _FORKED)
    _Process.is_used = True


class RustPanicError(RuntimeError):
    """A panic of obstore as an Exception."""


@contextlib.contextmanager
def rust_errors() -> Iterator[None]:
    """Convert a Rust panic, a BaseException that would pass every handler, to an Exception."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise RustPanicError(str(error)) from None


_SIGNED_FOR = timedelta(hours=1)
_USED_S, _MOST_KEPT = 60.0, 4096


class UnsignableError(Exception):
    """obstore can't sign a URL, because it has no key of its own."""


class Signer:
    """The signed URLs of keys, each of which is reused for a minute. anonymous: True omits the
    signature."""

    def __init__(self, store: Any, *, anonymous: bool) -> None:
        self._store = store
        self._anonymous = anonymous
        self._lock = threading.Lock()
        self._signed: OrderedDict[tuple[str, str], tuple[str, float]] = OrderedDict()

    def __call__(self, method: str, key: str) -> str:
        """Return the URL of a key for a method. Raises UnsignableError."""
        now_s = time.monotonic()
        with self._lock:
            url, until_s = self._signed.get((method, key), ("", 0.0))
        if now_s < until_s:
            return url
        url = self._sign(method, key)
        with self._lock:
            self._signed[method, key] = url, now_s + _USED_S
            while len(self._signed) > _MOST_KEPT:
                self._signed.popitem(last=False)
        return url

    def _sign(self, method: str, key: str) -> str:
        import obstore

        try:
            with rust_errors():
                url = str(obstore.sign(self._store, method, key, _SIGNED_FOR))  # type: ignore[call-overload]
        except Exception as error:  # any error of obstore, whose own requests will explain it
            raise UnsignableError(type(error).__name__) from None
        return url.partition("?")[0] if self._anonymous else url


_STATUS = re.compile(r"status(?: code)?: (\d{3})")
_UNREACHABLE = re.compile(
    r"connection refused|dns error|no route to host|network is unreachable", re.IGNORECASE
)
_PATIENT_S = 10.0
"""How long after a throttled request others use signed URLs, whose answers show Retry-After."""


class Throttling:
    """The time at which a store last throttled a request."""

    def __init__(self) -> None:
        self._last_s = -math.inf

    def note(self) -> None:
        """Record that a request was throttled now."""
        self._last_s = time.monotonic()

    @property
    def is_recent(self) -> bool:
        """True if a request was throttled so recently that others may be too."""
        return time.monotonic() < self._last_s + _PATIENT_S


class ObstoreFailures:
    """The conversion of obstore's errors to RequestErrors. bucket: its name in messages."""

    def __init__(
        self, *, bucket: str, secrets: tuple[str, ...], ranges: RangeSupport, throttling: Throttling
    ) -> None:
        self._bucket, self._secrets = bucket, secrets
        self._ranges, self._throttling = ranges, throttling

    @contextlib.contextmanager
    def explaining(self) -> Iterator[None]:
        """Raise the errors of obstore inside the with statement as RequestErrors."""
        try:
            with rust_errors():
                yield
        except RequestError:
            raise
        except Exception as error:  # any error of obstore
            raise self._failure(error) from None

    def _failure(self, error: Exception) -> RequestError:
        """Classify an exception, and remove the URLs and the dump from its text."""
        whole = str(error)
        text = whole.partition("\n\nDebug source")[0].partition("\n")[0]
        if (fault := certificate_fault_of(whole)) is not None:
            return RequestError("refused", fault, remedy=CERTIFICATE_REMEDY)
        kind = _kind(error, whole)
        stated, shown, remedy = bucket_failure(whole, self._bucket)
        if shown:
            kind, text = stated or kind, shown
        elif kind == "unreachable" and (cause := _UNREACHABLE.search(whole)) is not None:
            text = cause[0]
        elif "without LOCATION" in whole:
            text = "the bucket is in another region than the request's"
            remedy = "Give the bucket's region= in storage_options."
        if kind == "throttled":
            self._throttling.note()
        if kind == "transient" and _is_whole_answer(error):
            found = self._ranges.failure()
            kind, text = found.kind, str(found)
        if "169.254.169.254" in text:
            kind = "denied"
            text = "no credentials were found, neither in storage_options nor in the environment"
        if isinstance(error, OSError) and error.filename and kind == "refused":
            text = f"{error.strerror}: {os.fsdecode(error.filename)}"
        return RequestError(kind, hide(text, self._secrets), remedy=remedy)


def _kind(error: Exception, text: str) -> Failure:
    from obstore import exceptions

    if isinstance(error, exceptions.PreconditionError | exceptions.NotModifiedError):
        return "changed"
    if isinstance(error, exceptions.PermissionDeniedError | exceptions.UnauthenticatedError):
        return "denied"
    if isinstance(error, FileNotFoundError):
        return "missing"
    if isinstance(error, RustPanicError):
        return "refused"
    if _is_whole_answer(error):
        return "transient"
    if not isinstance(error, exceptions.GenericError | TimeoutError):
        return "refused"
    status = int(found[1]) if (found := _STATUS.search(text)) else 0
    if status in (429, 503):
        return "throttled"
    if status in (401, 403):
        return "denied"
    if status == 404:  # of a listing: the bucket doesn't exist
        return "missing"
    if status == 416:
        return "changed"
    # An impossible redirect: the bucket is in another region, as the text says.
    if (
        "builder error" in text
        or "without LOCATION" in text
        or (300 <= status < 500 and status not in (408, 425))
    ):
        return "refused"
    if _UNREACHABLE.search(text):
        return "unreachable"
    return "transient"


def _is_whole_answer(error: Exception) -> bool:
    return type(error).__name__ == "NotSupportedError" and "RangeNotSupported" in str(error)


_PAGE = 1000
_NO_TIME = datetime.fromtimestamp(0, UTC)


class ObstoreListing:
    """The listing of the objects of a bucket below a root.

    store, retrying: obstore's stores without and with retries. Only obstore can repeat one of the
    later pages, which are too many to start again. root: the beginning of obstore's keys.
    """

    def __init__(self, store: Any, retrying: Any, *, root: str, failures: ObstoreFailures) -> None:
        self._store, self._retrying = store, retrying
        self._root = root
        self._failures = failures

    def walk(self, key: str, folder: str) -> Iterator[ObjectInfo]:
        """Yield all objects below a key. folder: its path below the root. Raises RequestError."""
        import obstore

        # Without retries: the first page shows errors at once.
        page = self._page(iter(obstore.list(self._store, key or None, chunk_size=_PAGE)))
        yield from without_markers([self._info(meta) for meta in page], folder)
        if len(page) < _PAGE:
            return
        after = str(page[-1]["path"])
        rest = iter(obstore.list(self._retrying, key or None, offset=after, chunk_size=_PAGE))
        while page := self._page(rest):
            yield from without_markers([self._info(meta) for meta in page], folder)

    def _page(self, listing: Iterator[Any]) -> list[Any]:
        with self._failures.explaining():
            return list(next(listing, ()))

    def list_folder(self, key: str, folder: str) -> tuple[list[ObjectInfo], list[str]]:
        """Return the objects directly in a key's folder, and its subfolders' names. Raises
        RequestError."""
        import obstore

        with self._failures.explaining():
            found = obstore.list_with_delimiter(self._store, key or None)
        folders = [path.rstrip("/").rpartition("/")[2] for path in found["common_prefixes"]]
        markers = {folder, *(f"{folder}/{name}".lstrip("/") for name in folders)}
        infos = [self._info(meta) for meta in found["objects"]]
        return [info for info in infos if info.size_bytes or info.path not in markers], folders

    def _info(self, meta: Any) -> ObjectInfo:
        path = str(meta["path"])
        if self._root:
            path = path.removeprefix(self._root).lstrip("/")
        return ObjectInfo(path=path, size_bytes=int(meta["size"]), version=meta_version(meta))


def meta_version(meta: Any) -> str:
    """Return an object's version: its etag without quotes (weak ones with W/), else its size and
    time; "" with neither."""
    if tag := meta.get("e_tag"):
        return str(tag).replace('"', "")
    when = meta.get("last_modified")
    return f"{meta['size']}-{when.timestamp():.6f}" if when and when != _NO_TIME else ""


def without_markers(infos: list[ObjectInfo], folder: str) -> list[ObjectInfo]:
    """Return the listed objects without the empty objects by which some tools mark folders. Pure.

    obstore removes the "/" from the end of their names, and a listing has a folder's marker right
    before the folder's objects.
    """
    if not infos:
        return []
    following = [*infos[1:], None]
    return [
        info
        for info, after in zip(infos, following, strict=True)
        if info.size_bytes
        or not (
            info.path in ("", folder)
            or (after is not None and after.path.startswith(f"{info.path}/"))
        )
    ]


T = TypeVar("T")
_MAYBE_THE_URL = ("none", "AccessDenied", "ExpiredToken", "InvalidToken")
"""Codes of a signed URL's refusal after which a request with signed headers may succeed; "none" is
that of an empty answer."""
_UNSIGNED_AFTER = 2
"""After so many consecutive requests that only signed headers could make, URLs aren't signed any
more."""
_STEP_BYTES = 2**20


class ObstoreStore:
    """The objects of a bucket below a root.

    store, listing: obstore's stores without and with retries. root: the beginning of obstore's
    keys, without leading and trailing slashes. bucket: its name in messages. web: the same objects
    by signed URLs, or None. client: the client of `web`, or None. web_first: True always uses
    signed URLs, False only while the store throttles.
    """

    def __init__(
        self,
        store: Any,
        *,
        listing: Any,
        root: str,
        url: str,
        scope: str,
        secrets: tuple[str, ...] = (),
        bucket: str = "",
        client: WebClient | None = None,
        web: WebObjects | None = None,
        web_first: bool = False,
    ) -> None:
        self.url = url
        self.scope = scope
        self.secrets = secrets
        self._store = store
        self._root = root
        self._client = client
        self._web = web
        self._web_first = web_first
        self._unsigned = 0
        self._pid = os.getpid()
        self._ranges = RangeSupport()
        self._throttling = Throttling()
        self._failures = ObstoreFailures(
            bucket=bucket, secrets=secrets, ranges=self._ranges, throttling=self._throttling
        )
        self._listing = ObstoreListing(store, listing, root=root, failures=self._failures)

    def __repr__(self) -> str:
        return f"ObstoreStore({self.url!r})"

    def walk(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """Yield all objects below a folder. Raises RequestError."""
        check_process(self._pid)
        yield from self._listing.walk(self._key(prefix), prefix)

    def list_folder(self, prefix: str = "") -> tuple[list[ObjectInfo], list[str]]:
        """Return the objects directly in a folder, and the names of its subfolders. Raises
        RequestError."""
        check_process(self._pid)
        return self._listing.list_folder(self._key(prefix), prefix)

    def info(self, path: str) -> ObjectInfo | None:
        """Return the size and version of an object; None if it is missing. Raises RequestError."""
        check_process(self._pid)
        key = self._key(path)
        if not key:  # a bucket is no object
            return None

        def ask(web: WebObjects) -> ObjectInfo | None:
            found = web.info(key)
            if found is None:
                return None
            return ObjectInfo(path=path, size_bytes=found.size_bytes, version=found.version)

        return self._either(ask, lambda: self._info_by_obstore(path, key), first=self._web_first)

    def _info_by_obstore(self, path: str, key: str) -> ObjectInfo | None:
        import obstore

        try:
            with self._failures.explaining():
                meta = obstore.head(self._store, key)
        except RequestError as error:
            if error.kind == "missing":
                return None
            raise
        return ObjectInfo(path=path, size_bytes=int(meta["size"]), version=meta_version(meta))

    def read(
        self,
        path: str,
        span: tuple[int, int] | None = None,
        *,
        version: str | None = None,
        most_bytes: int | None = None,
    ) -> Answer:
        """Read bytes of an object. Raises RequestError."""
        check_process(self._pid)
        if span is not None and span[0] >= span[1]:
            raise RequestError("refused", f"an empty range {span}")
        key = self._key(path)
        return self._either(
            lambda web: web.read(key, span, version=version, most_bytes=most_bytes),
            lambda: self._read_by_obstore(key, span, version, most_bytes),
            first=self._web_first or (self._throttling.is_recent and span is not None),
        )

    def _either(
        self, by_web: Callable[[WebObjects], T], by_obstore: Callable[[], T], *, first: bool
    ) -> T:
        """Return the answer to a request by a signed URL, or by obstore itself if that is
        impossible. first: True tries the signed URL first."""
        refused: RequestError | None = None
        web = self._web
        if web is not None and first:
            try:
                answer = by_web(web)
            except UnsignableError:
                self._web = None
            except RequestError as error:
                if error.kind == "throttled":
                    self._throttling.note()
                # Some buckets' policies refuse signed URLs, or the login was just renewed.
                if error.kind != "denied" or error.code not in _MAYBE_THE_URL:
                    raise
                refused = error
            else:
                self._unsigned = 0
                return answer
        try:
            answer = by_obstore()
        except RequestError as error:
            raise refused or error from None
        if refused is not None:
            self._unsigned += 1
            if self._unsigned >= _UNSIGNED_AFTER:
                self._web = None
        return answer

    def _read_by_obstore(
        self, key: str, span: tuple[int, int] | None, version: str | None, most_bytes: int | None
    ) -> Answer:
        import obstore

        options: GetOptions = {"range": span} if span is not None else {}
        if version is not None and is_strong(version):
            options["if_match"] = f'"{version}"'
        with self._failures.explaining():
            result = obstore.get(self._store, key, options=options)
            meta, got = result.meta, tuple(result.range)
            size_bytes = int(meta["size"])
            wanted = span or (0, size_bytes)
            if got == wanted and wanted[1] <= size_bytes <= (most_bytes or size_bytes):
                data = _read_at_most(result, wanted[1] - wanted[0])
        if span is not None:
            self._ranges.note_range()
        now = meta_version(meta)
        if version is not None and now != version:
            raise RequestError("changed", f"its version is {now!r}, wanted {version!r}")
        if most_bytes is not None and size_bytes > most_bytes:
            raise RequestError("changed", f"it has {size_bytes} bytes, wanted {most_bytes}")
        if wanted[1] > size_bytes:
            raise RequestError(
                "changed", f"it has {size_bytes} bytes, wanted {wanted[0]}-{wanted[1]}"
            )
        if got != wanted or len(data) != wanted[1] - wanted[0]:
            raise RequestError(
                "transient", f"bytes {got[0]}-{got[1]} came, wanted {wanted[0]}-{wanted[1]}"
            )
        return Answer(data=data, version=now, object_bytes=size_bytes)

    def put(self, local: str, path: str) -> None:
        """Upload a local file. Raises RequestError."""
        import obstore

        check_process(self._pid)
        with self._failures.explaining(), open(os.fsencode(local), "rb") as file:
            obstore.put(self._store, self._key(path), file)

    def abort(self) -> None:
        """End the requests by signed URLs at once; obstore's own end by their timeouts."""
        if self._client is not None and os.getpid() == self._pid:
            self._client.abort()

    def close(self) -> None:
        """Close the web client's connections; obstore closes its own when it is destroyed."""
        self.abort()

    def _key(self, path: str) -> str:
        key = "/".join(part for part in (self._root, path) if part)
        try:
            key.encode()
        except UnicodeEncodeError:
            raise RequestError("refused", "its name isn't UTF-8: rename it") from None
        return key


def _read_at_most(result: Any, wanted: int) -> memoryview:
    """Return the bytes of an answer. Raises RequestError soon after the first byte too many."""
    view = np.empty(wanted, np.uint8).data
    at = 0
    for part in result.stream(min_chunk_size=min(_STEP_BYTES, max(1, wanted))):
        if at + len(part) > wanted:
            raise RequestError(
                "refused",
                f"the server sends more than the {wanted} requested bytes: this is a fault of the "
                "server or a proxy, and the answer was discarded",
            )
        view[at : at + len(part)] = memoryview(part)
        at += len(part)
    return view[:at]
