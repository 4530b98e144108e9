"""s3, gs and az: objects of a bucket, by signed URLs where they will do and by obstore elsewhere.

An s3 object's bytes come by a URL that obstore signs (9 us) and the web client fetches: that
shows every header, follows no redirect with a login and can be ended, for less CPU time a byte.
obstore itself asks where a signed URL won't do, and for gs and az, which sign by request headers;
there the other way is for what follows a throttled request: obstore doesn't show Retry-After.

Synchronous calls in threads, not async: 0.55 CPU-s/GB for 8 MiB ranges and 1.2 for 100 kB, where
async takes twice that for the small ones. Retries are `cache.fetch`'s, so obstore's are off, but
for a listing's later pages.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from penstock.cache.base.store import Answer, ObjectInfo, RequestError
from penstock.cache.stores.answer_headers import is_strong
from penstock.cache.stores.obstore_failures import ObstoreFailures, Throttling
from penstock.cache.stores.obstore_listing import ObstoreListing, meta_version
from penstock.cache.stores.obstore_process import check_process
from penstock.cache.stores.range_support import RangeSupport
from penstock.cache.stores.signing import UnsignableError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from obstore import GetOptions

    from penstock.cache.stores.web_client import WebClient
    from penstock.cache.stores.web_objects import WebObjects

T = TypeVar("T")
_MAYBE_THE_URL = ("none", "AccessDenied", "ExpiredToken", "InvalidToken")
"""Codes of a refusal that a request with signed headers may not meet; none of an empty answer."""
_UNSIGNED_AFTER = 2
"""So many requests in a row that were refused by a signed URL and granted by a signed request."""
_STEP_BYTES = 2**20


class ObstoreStore:
    """An ObstoreStore has the objects of a bucket below a root.

    root: of obstore's keys, "" or without slashes around it. store, listing: obstore's stores,
    without retries and with; bucket: its name, for people; client: of web; web: the same objects by
    signed URLs, None where there are none; web_first: always, else only while the store throttles.
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
        """All objects below a folder. Raises RequestError."""
        check_process(self._pid)
        yield from self._listing.walk(self._key(prefix), prefix)

    def top(self, prefix: str = "") -> tuple[list[ObjectInfo], list[str]]:
        """Objects directly in a folder, and names of its folders. Raises RequestError."""
        check_process(self._pid)
        return self._listing.top(self._key(prefix), prefix)

    def info(self, path: str) -> ObjectInfo | None:
        """What is known of an object; None if it isn't there. Raises RequestError."""
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
        """Bytes of an object. Raises RequestError."""
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
        """An answer by a signed URL, else by obstore's own request."""
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
                # Some buckets' policies allow no signed URLs, or the login was just renewed.
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
        self,
        key: str,
        span: tuple[int, int] | None,
        version: str | None,
        most_bytes: int | None,
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
        """End what is under way by signed URLs; obstore's own requests end by their timeouts."""
        if self._client is not None and os.getpid() == self._pid:
            self._client.abort()

    def close(self) -> None:
        """Let connections go; obstore's go with it."""
        self.abort()

    def _key(self, path: str) -> str:
        key = "/".join(part for part in (self._root, path) if part)
        try:
            key.encode()
        except UnicodeEncodeError:
            raise RequestError("refused", "its name isn't UTF-8: rename it") from None
        return key


def _read_at_most(result: Any, wanted: int) -> memoryview:
    """The bytes of an answer. Raises RequestError if there are more, having read few of those."""
    room = np.empty(wanted, np.uint8)
    view = room.data
    at = 0
    for part in result.stream(min_chunk_size=min(_STEP_BYTES, max(1, wanted))):
        if at + len(part) > wanted:
            raise RequestError(
                "refused",
                f"the server sends more than the {wanted} bytes that were asked for: that is the "
                "server's fault (or a proxy's), and nothing of it was used",
            )
        view[at : at + len(part)] = memoryview(part)
        at += len(part)
    return view[:at]
