"""s3, gs, az and http(s) through obstore: one request a call, from any thread.

Synchronous calls in threads, not async: 0.55 CPU-s/GB for 8 MiB ranges and 1.2 for 100 kB, where
async takes twice that for the small ones. Retries are `cache.fetch`'s, so obstore's are off,
but for listings, whose pages only obstore can fetch again. obstore doesn't show answers' headers,
so what follows a throttled request goes through `cache.plain_get`, which sees Retry-After.

obstore's own threads don't survive a fork: after it was used, a forked child would hang, so
stores refuse there.
"""

from __future__ import annotations

import math
import os
import re
import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from cache.secrets import hide
from cache.store import Answer, Failure, ObjectInfo, RequestError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from obstore import GetOptions

    from cache.http_listing import HttpListing
    from cache.plain_get import PlainGet

_STATUS = re.compile(r"status(?: code)?: (\d{3})")
_PATIENT_S = 10.0
"""So long after a throttled request others go where Retry-After is seen."""
_NO_TIME = datetime.fromtimestamp(0, UTC)
_RANGES_UNSUPPORTED = 4
"""Whole answers to ranges in a row, with no right one ever, after which a server is believed not
to know ranges at all."""

FORKED = (
    "obstore was used before this process was forked, and would hang here. Use "
    'multiprocessing_context="forkserver" (or "spawn"), and make the dataset inside the worker'
)


class _Process:
    """Whether obstore runs in this process, or ran in the one that this was forked from."""

    is_used = False
    is_forked = False

    @classmethod
    def forked(cls) -> None:
        cls.is_forked = cls.is_forked or cls.is_used
        cls.is_used = False


os.register_at_fork(after_in_child=_Process.forked)


class ObstoreStore:
    """Objects below a root. root: of obstore's keys, "" or without slashes around it.

    store, listing: obstore's stores, without retries and with; lister: of a web server's index
    pages, made with this store's info(); plain: reads ranges of keys while the store throttles.
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
        lister: Callable[[Callable[[str], ObjectInfo | None]], HttpListing] | None = None,
        plain: PlainGet | None = None,
    ) -> None:
        self.url = url
        self.scope = scope
        self.secrets = secrets
        self._store = store
        self._listing = listing
        self._lister = lister(self.info) if lister is not None else None
        self._root = root
        self._plain = plain
        self._throttled_s = -math.inf  # when it was last throttled
        self._pid = os.getpid()
        self._ranges_answered = False
        self._wholes = 0

    def __repr__(self) -> str:
        return f"ObstoreStore({self.url!r})"

    def walk(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """All objects below a folder. Raises RequestError."""
        import obstore

        self._begin()
        if self._lister is not None:
            yield from self._lister.walk(prefix)
            return
        found: Iterator[Any] = iter(())
        try:
            found = iter(obstore.list(self._listing, self._key(prefix) or None, chunk_size=1000))
        except Exception as error:  # obstore's tree: `_failed` sorts it
            raise self._failed(error) from None
        while True:
            try:
                page = next(found, None)
            except Exception as error:  # as above
                raise self._failed(error) from None
            if page is None:
                return
            infos = [self._info(meta) for meta in page]
            yield from _without_markers(infos, prefix)

    def top(self, prefix: str = "") -> tuple[list[ObjectInfo], list[str]]:
        """Objects directly in a folder, and names of its folders. Raises RequestError."""
        import obstore

        self._begin()
        if self._lister is not None:
            return self._lister.top(prefix)
        try:
            found = obstore.list_with_delimiter(self._listing, self._key(prefix) or None)
        except Exception as error:  # as above
            raise self._failed(error) from None
        folders = [path.rstrip("/").rpartition("/")[2] for path in found["common_prefixes"]]
        markers = {prefix, *(f"{prefix}/{name}".lstrip("/") for name in folders)}
        infos = [self._info(meta) for meta in found["objects"]]
        return [info for info in infos if info.size_bytes or info.path not in markers], folders

    def info(self, path: str) -> ObjectInfo | None:
        """What is known of an object; None if it isn't there. Raises RequestError."""
        import obstore

        self._begin()
        if not self._key(path):  # a bucket, or a web server's folder: its page is no object
            return None
        try:
            meta = obstore.head(self._store, self._key(path))
        except FileNotFoundError:
            return None
        except Exception as error:  # as above
            raise self._failed(error) from None
        return ObjectInfo(path=path, size_bytes=int(meta["size"]), version=_version(meta))

    def read(
        self, path: str, span: tuple[int, int] | None = None, *, version: str | None = None
    ) -> Answer:
        """Bytes of an object. Raises RequestError."""
        import obstore

        self._begin()
        if span is not None and span[0] >= span[1]:
            raise RequestError("refused", f"an empty range {span}")
        if_match = version if version is not None and _is_strong(version) else None
        throttled = time.monotonic() < self._throttled_s + _PATIENT_S
        if throttled and self._plain is not None and span is not None:
            answer = self._plainly(self._plain, path, span, if_match)
            if answer is not None:
                if version is not None and answer.version != version:
                    raise RequestError("changed", f"its version is {answer.version!r}")
                return answer
        options: GetOptions = {"range": span} if span is not None else {}
        if if_match is not None:
            options["if_match"] = f'"{if_match}"'
        try:
            result = obstore.get(self._store, self._key(path), options=options)
            meta, got = result.meta, tuple(result.range)
            data = result.bytes()
        except Exception as error:  # as above
            raise self._failed(error) from None
        self._ranges_answered = self._ranges_answered or span is not None
        now = _version(meta)
        if version is not None and now != version:
            raise RequestError("changed", f"its version is {now!r}, wanted {version!r}")
        wanted = span or (0, int(meta["size"]))
        if wanted[1] > int(meta["size"]):
            raise RequestError(
                "changed", f"it has {meta['size']} bytes, wanted {wanted[0]}-{wanted[1]}"
            )
        if got != wanted or len(data) != wanted[1] - wanted[0]:
            raise RequestError(
                "transient", f"{len(data)} bytes from {got[0]} came, wanted {wanted[0]}-{wanted[1]}"
            )
        return Answer(data=data, version=now, object_bytes=int(meta["size"]))

    def _plainly(
        self, plain: PlainGet, path: str, span: tuple[int, int], if_match: str | None
    ) -> Answer | None:
        """Bytes by a plain request; None where this store's login can't sign one."""
        try:
            return plain.read(self._key(path), span, if_match=if_match)
        except RequestError as error:
            if error.kind == "throttled":
                self._throttled_s = time.monotonic()
            raise
        except Exception:  # of obstore's signing: its own reads go on
            self._plain = None
            return None

    def put(self, local: str, path: str) -> None:
        """Upload a local file. Raises RequestError."""
        import obstore

        self._begin()
        try:
            with open(os.fsencode(local), "rb") as file:
                obstore.put(self._store, self._key(path), file)
        except Exception as error:  # as above
            raise self._failed(error) from None

    def close(self) -> None:
        """Nothing to do: obstore's connections go with it."""

    def _begin(self) -> None:
        if _Process.is_forked or os.getpid() != self._pid:
            raise RequestError("refused", FORKED)
        _Process.is_used = True

    def _key(self, path: str) -> str:
        key = "/".join(part for part in (self._root, path) if part)
        try:
            key.encode()
        except UnicodeEncodeError:
            raise RequestError("refused", "its name isn't UTF-8: rename it") from None
        return key

    def _info(self, meta: Any) -> ObjectInfo:
        path = str(meta["path"])
        if self._root:
            path = path.removeprefix(self._root).lstrip("/")
        return ObjectInfo(path=path, size_bytes=int(meta["size"]), version=_version(meta))

    def _failed(self, error: Exception) -> RequestError:
        """What an exception of obstore's means. Its text holds URLs and a dump: both are cut."""
        text = str(error).partition("\n\nDebug source")[0].partition("\n")[0]
        kind = _failure(error, str(error))
        if kind == "throttled":
            self._throttled_s = time.monotonic()
        if kind == "transient" and _is_whole_answer(error):
            self._wholes += 1
            text = "the server answered a range with the whole object"
            if not self._ranges_answered and self._wholes >= _RANGES_UNSUPPORTED:
                kind = "refused"
                text += "; it doesn't know ranges: serve the files with one that does (nginx)"
        if "169.254.169.254" in text:
            kind = "denied"
            text = "no credentials were found, neither in storage_options nor in the environment"
        if isinstance(error, OSError) and error.filename and kind == "refused":
            text = f"{error.strerror}: {os.fsdecode(error.filename)}"
        return RequestError(kind, hide(text, self.secrets))


def _failure(error: Exception, text: str) -> Failure:
    from obstore import exceptions

    if isinstance(error, exceptions.PreconditionError | exceptions.NotModifiedError):
        return "changed"
    if isinstance(error, exceptions.PermissionDeniedError | exceptions.UnauthenticatedError):
        return "denied"
    if isinstance(error, FileNotFoundError):
        return "missing"
    if _is_whole_answer(error):
        return "transient"
    if not isinstance(error, exceptions.GenericError | TimeoutError):
        return "refused"
    status = int(found[1]) if (found := _STATUS.search(text)) else 0
    if status in (429, 503):
        return "throttled"
    if status in (401, 403):
        return "denied"
    if status == 404:  # of a listing: there is no such bucket
        return "missing"
    if status == 416:
        return "changed"
    # A redirect that can't be followed: the bucket is in another region, as the text says.
    if (
        "builder error" in text
        or "without LOCATION" in text
        or (300 <= status < 500 and status not in (408, 425))
    ):
        return "refused"
    return "transient"


def _is_whole_answer(error: Exception) -> bool:
    return type(error).__name__ == "NotSupportedError" and "RangeNotSupported" in str(error)


def _version(meta: Any) -> str:
    """Its etag without quotes, weak ones with their W/; else size and time; else ""."""
    if tag := meta.get("e_tag"):
        return str(tag).replace('"', "")
    when = meta.get("last_modified")
    return f"{meta['size']}-{when.timestamp():.6f}" if when and when != _NO_TIME else ""


def _is_strong(version: str) -> bool:
    """Whether a version is an etag that may be sent as If-Match (RFC 9110, 13.1.1: strong only)."""
    return bool(version) and not version.startswith("W/") and not _SIZE_AND_TIME.fullmatch(version)


_SIZE_AND_TIME = re.compile(r"\d+-\d+\.\d{6}")


def _without_markers(infos: list[ObjectInfo], folder: str) -> list[ObjectInfo]:
    """Without the empty objects that some tools put in a folder's place.

    obstore cuts the "/" off their names, and a store's listing has a folder's marker right
    before what is in it.
    """
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
