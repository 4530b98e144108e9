"""Open and read through fsspec all URLs that no other store serves, and users' file systems.

fsspec has no conditional reads, so this store checks the object's version after each read. One
check is enough if the caller passes the version: the object had it before the read and has it after
the read, and objects don't return to an older version.

`failed_request` classifies the exceptions of any back end: of botocore, aiohttp and the disk.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, unquote

from penstock.cache.base import FORKED, Answer, Failure, ObjectInfo, RequestError
from penstock.cache.errors import ConfigError, FetchError
from penstock.cache.secrets import clean_message, find_secrets, redact, store_scope
from penstock.cache.stores.storage_options import FETCH_OPTIONS, StoreAddress, fetch_policy
from penstock.cache.stores.web_answers import retry_after_s

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from penstock.cache.base import Store

_REFUSED = frozenset(
    {errno.ELOOP, errno.ENAMETOOLONG, errno.EISDIR, errno.ENOTSUP, errno.EROFS, errno.EINVAL}
)
_UNREACHABLE = frozenset({errno.ECONNREFUSED, errno.EHOSTUNREACH, errno.ENETUNREACH})
_FILE_REMEDIES: dict[Failure, str] = {
    "denied": "Give this user permission to read it and its parent folders.",
    "transient": "Check the disk or the mount (`ls`, `dmesg`), or mount it again.",
}


def failed_request(error: Exception, secrets: tuple[str, ...]) -> RequestError:
    """Convert the exception of any fsspec back end to a RequestError."""
    chain = _causes(error)
    status = next((found for cause in chain if (found := _status(cause))), 0)
    headers = next((seen for cause in chain if (seen := _headers(cause))), {})
    kind = _kind(error, status)
    after_s = retry_after_s(headers) if kind in ("throttled", "transient") else None
    text = clean_message(error, secrets)
    # An errno without a status comes from a file on a mount, which needs no credentials.
    is_of_a_file = not status and isinstance(error, OSError) and bool(error.errno)
    remedy = _FILE_REMEDIES.get(kind) if is_of_a_file else None
    return RequestError(kind, text, retry_after_s=after_s, remedy=remedy)


def _kind(error: Exception, status: int) -> Failure:
    if isinstance(error, FileNotFoundError | NotADirectoryError) or status == 404:
        return "missing"
    if isinstance(error, PermissionError) or status in (401, 403):
        return "denied"
    if status in (412, 416):
        return "changed"
    if status in (429, 503):
        return "throttled"
    if status >= 500 or status in (408, 425):
        return "transient"
    if isinstance(error, OSError) and error.errno in _UNREACHABLE:
        return "unreachable"
    if (
        status >= 300
        or getattr(error, "errno", None) in _REFUSED
        or isinstance(
            error,
            TypeError
            | ValueError
            | LookupError
            | AttributeError
            | NotImplementedError
            | ImportError
            | IsADirectoryError,
        )
    ):
        return "refused"
    return "transient"


def _causes(error: BaseException) -> list[BaseException]:
    """Return the exception and its causes, outermost first."""
    chain = [error]
    while (inner := chain[-1].__cause__ or chain[-1].__context__) and inner not in chain:
        chain.append(inner)
    return chain


def _status(error: BaseException) -> int:
    """Return an error's HTTP status (aiohttp, botocore, requests/httpx, azure, gcsfs); else 0."""
    response = getattr(error, "response", None)
    if isinstance(response, dict):
        found: Any = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    else:
        found = getattr(response, "status_code", None) or getattr(error, "status_code", None)
    found = found or getattr(error, "status", None) or getattr(error, "code", None)
    return int(found) if str(found).isdigit() else 0


def _headers(error: BaseException) -> Mapping[str, Any]:
    response = getattr(error, "response", None)
    if isinstance(response, dict):
        found: Any = response.get("ResponseMetadata", {}).get("HTTPHeaders")
    else:
        found = getattr(response, "headers", None) or getattr(error, "headers", None)
    return found if hasattr(found, "items") else {}


_VERSION_KEYS = ("ETag", "etag", "e_tag", "md5Hash", "content_md5", "Content-MD5", "checksum")
_TIME_KEYS = (
    "LastModified",
    "last_modified",
    "Last-Modified",
    "mtime",
    "updated",
    "modified",
    "created",
)
_ONE_AT_A_TIME = frozenset({"ftp", "libarchive", "smb", "tar", "zip"})
"""Protocols whose file systems share one connection or open file without a lock."""


def object_version(info: Mapping[str, Any]) -> str:
    """Return an object's version: its etag, else its size and time; "" with neither."""
    for key in _VERSION_KEYS:
        if info.get(key):
            return str(info[key]).replace('"', "")
    when = next((_time(info[key]) for key in _TIME_KEYS if info.get(key)), "")
    return f"{info.get('size')}-{when}" if when else ""


def _time(value: Any) -> str:
    """Return the same text for a time given as a datetime or as seconds."""
    if hasattr(value, "timestamp"):
        value = value.timestamp()
    return f"{value:.6f}" if isinstance(value, int | float) else str(value)


class FsspecStore:
    """The objects below `root` of an fsspec file system.

    timeout_s: the time limit of one request of an asynchronous file system; other file systems need
    their own time limits.
    """

    def __init__(
        self,
        fs: Any,
        *,
        root: str,
        url: str,
        scope: str,
        secrets: tuple[str, ...] = (),
        timeout_s: float = 60.0,
    ) -> None:
        self.url = url
        self.scope = scope
        self.secrets = secrets
        self._fs = fs
        self._root = root.rstrip("/")
        self._timeout_s = timeout_s
        names = (fs.protocol,) if isinstance(fs.protocol, str) else tuple(fs.protocol)
        self._is_http = bool({"http", "https"} & set(names))
        self._is_local = bool({"file", "local"} & set(names))
        self._lock: Any = (
            threading.Lock() if _ONE_AT_A_TIME & set(names) else contextlib.nullcontext()
        )
        self._pid = os.getpid()

    def __repr__(self) -> str:
        return f"FsspecStore({self.url!r})"

    def walk(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """Yield all objects below a folder; none if it is missing. Raises RequestError."""
        if self._is_local:
            yield from self._walk_mount(prefix)
            return
        try:
            found = self._call("find", self._full(prefix), detail=True)
        except RequestError as error:
            if error.kind != "missing":
                raise
            return
        for name, info in found.items():
            path = self._path(name)
            if self._is_object(name, prefix) and info.get("type") != "directory":
                yield self._measured(path, info)

    def _walk_mount(self, prefix: str) -> Iterator[ObjectInfo]:
        """List folder by folder, because fsspec's own walk ignores folders that it can't list, such
        as stale or denied ones."""
        waiting = [prefix]
        while waiting:
            folder = waiting.pop()
            objects, folders = self.list_folder(folder)
            yield from objects
            waiting += [f"{folder}/{name}" if folder else name for name in folders]

    def list_folder(self, prefix: str = "") -> tuple[list[ObjectInfo], list[str]]:
        """Return the objects directly in a folder, and names of subfolders. Raises RequestError."""
        try:
            inside = self._call("ls", self._full(prefix), detail=True)
        except RequestError as error:
            if error.kind != "missing":
                raise
            return [], []
        objects: list[ObjectInfo] = []
        folders: list[str] = []
        for info in inside:
            name = str(info["name"]).rstrip("/")
            if not self._is_object(name, prefix):
                continue
            path = self._path(name)
            if info.get("type") == "directory":
                folders.append(path.rpartition("/")[2])
            else:
                objects.append(self._measured(path, info))
        return objects, folders

    def info(self, path: str) -> ObjectInfo | None:
        """Return an object's size and version; None if it is missing. Raises RequestError."""
        try:
            self._forget(path)
            info = self._call("info", self._full(path))
        except RequestError as error:
            if error.kind == "missing":
                return None
            raise
        if info.get("type") == "directory":
            return None
        return ObjectInfo(
            path=path, size_bytes=int(info.get("size") or 0), version=object_version(info)
        )

    def read(
        self,
        path: str,
        span: tuple[int, int] | None = None,
        *,
        version: str | None = None,
        most_bytes: int | None = None,
    ) -> Answer:
        """Read bytes of an object. Raises RequestError."""
        if span is not None and span[0] >= span[1]:
            raise RequestError("refused", f"an empty range {span}")
        if version is None or most_bytes is not None:
            seen = self._seen(path)
            if most_bytes is not None and seen.size_bytes > most_bytes:
                raise RequestError(
                    "changed", f"it has {seen.size_bytes} bytes, wanted {most_bytes}"
                )
            version = version if version is not None else seen.version
        before = version
        start, end = span or (None, None)
        try:
            data = self._call("cat_file", self._full(path), start=start, end=end)
        except RequestError as error:
            # Some back ends refuse a range beyond the object's new end.
            if error.kind != "missing" and self._seen(path).version != before:
                raise RequestError("changed", str(error)) from None
            raise
        after = self._seen(path)
        if after.version != before:
            raise RequestError("changed", f"its version is {after.version!r}, wanted {before!r}")
        first, last = span or (0, after.size_bytes)
        if last > after.size_bytes:
            raise RequestError("changed", f"it has {after.size_bytes} bytes, wanted {first}-{last}")
        if len(data) != last - first:
            raise RequestError("transient", f"{len(data)} bytes came, wanted {first}-{last}")
        return Answer(data=data, version=after.version, object_bytes=after.size_bytes)

    def put(self, local: str, path: str) -> None:
        """Upload a local file. Raises RequestError."""
        full = self._full(path)
        self._call("makedirs", full.rpartition("/")[0], exist_ok=True)
        self._call("put_file", local, full)
        self._forget(path)

    def close(self) -> None:
        """Do nothing, because fsspec keeps and shares its file systems."""

    def _seen(self, path: str) -> ObjectInfo:
        info = self.info(path)
        if info is None:
            raise RequestError("missing", "it doesn't exist")
        return info

    def _is_object(self, name: str, folder: str) -> bool:
        """Return False for a folder's own marker and for an index page's sorting links."""
        return self._path(name) not in ("", folder) and not (self._is_http and "?" in name)

    def _measured(self, path: str, info: Mapping[str, Any]) -> ObjectInfo:
        """Return a listed object's info; request it if the listing has no sizes."""
        if info.get("size") is None:
            return self._seen(path)
        return ObjectInfo(path=path, size_bytes=int(info["size"]), version=object_version(info))

    def _full(self, path: str) -> str:
        if self._is_http:
            path = quote(path, errors="surrogateescape")
        return f"{self._root}/{path}" if path else self._root

    def _path(self, name: str) -> str:
        path = name.removeprefix(self._root).lstrip("/")
        return unquote(path, errors="surrogateescape") if self._is_http else path

    def _forget(self, path: str) -> None:
        """Drop fsspec's cached listings, which would hide that an object changed."""
        if getattr(self._fs, "dircache", None):
            self._fs.invalidate_cache(self._full(path))

    def _call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        if os.getpid() != self._pid:
            raise RequestError("refused", FORKED)
        try:
            with self._lock:
                return self._method(name)(*args, **kwargs)
        # Each back end has its own exceptions (botocore, aiohttp, …), whose texts may hold
        # credentials: so `from None`.
        except Exception as error:
            raise failed_request(error, self.secrets) from None

    def _method(self, name: str) -> Callable[..., Any]:
        """Return a method of the file system, with a time limit if fsspec supports one."""
        own = getattr(self._fs, f"_{name}", None)
        if not getattr(self._fs, "async_impl", False) or own is None:
            method: Callable[..., Any] = getattr(self._fs, name)
            return method
        from fsspec.asyn import sync

        return lambda *args, **kwargs: sync(
            self._fs.loop, own, *args, timeout=self._timeout_s, **kwargs
        )


def open_by_fsspec(address: StoreAddress) -> Store:
    """Open the store of any URL that fsspec understands.

    Raises ConfigError, FetchError, ImportError.
    """
    import fsspec

    shown, policy = address.display_url, address.policy
    theirs = {name: value for name, value in address.options.items() if name not in FETCH_OPTIONS}
    try:
        fs, root = fsspec.url_to_fs(address.url, **theirs)
    except ImportError:
        raise
    except ValueError as error:
        raise ConfigError(
            f"{shown}: not a URL that can be opened ({clean_message(error, address.secrets)}). "
            "Wanted a local path, file://, s3://, gs://, https:// or another scheme that fsspec "
            "knows."
        ) from None
    # Opening may request credentials or use the network; each back end has its own exceptions.
    except Exception as error:
        raise FetchError(
            f"{shown}: could not be opened ({clean_message(error, address.secrets)}). Check "
            "storage_options.",
            uri=shown,
        ) from None
    fs, root = _inside(fs, str(root))
    return FsspecStore(
        fs,
        root=root,
        url=shown,
        scope=store_scope(theirs),
        secrets=address.secrets,
        timeout_s=min(policy.retry_timeout_s, 3 * policy.read_timeout_s),
    )


def open_filesystem(url: str, fs: Any, secrets: tuple[str, ...]) -> Store:
    """Open the store of a user's own file system object. url: of the root."""
    fs, url = _inside(fs, url)
    options = dict(getattr(fs, "storage_options", None) or {})
    secrets = tuple(sorted({*secrets, *find_secrets(options)}, key=len, reverse=True))
    if (web := _plain_web(url, fs, options, secrets)) is not None:
        return web
    return FsspecStore(
        fs,
        root=str(fs._strip_protocol(url)),
        url=redact(url).rstrip("/"),
        scope=store_scope(options),
        secrets=secrets,
    )


def _inside(fs: Any, url: str) -> tuple[Any, str]:
    """Return the file system and URL of an object in a DirFileSystem, which is a folder of another
    one. Raises ConfigError for a URL outside of the folder.

    The folder has the asynchronous methods, but not the locks, listings and options of its file
    system, and the methods fail if that one isn't asynchronous.
    """
    from fsspec.implementations.dirfs import DirFileSystem

    while isinstance(fs, DirFileSystem):
        try:
            fs, url = fs.fs, fs._join(fs._strip_protocol(url))
        except ValueError as error:
            raise ConfigError(f"{redact(url)}: {error}. Name a place in the folder.") from None
    return fs, url


def _plain_web(
    url: str, fs: Any, options: Mapping[str, Any], secrets: tuple[str, ...]
) -> Store | None:
    """Open fsspec's http by HttpStore, which limits answers and sends no login to redirects; None
    if it has options that only fsspec supports (a session, cookies, request arguments)."""
    if (
        type(fs).__module__ != "fsspec.implementations.http"
        or type(fs).__name__ != "HTTPFileSystem"
    ):
        return None
    if getattr(fs, "encoded", False):
        return None
    from penstock.cache.stores.http_store import open_http

    try:
        policy = fetch_policy(options)
        return open_http(
            StoreAddress(url=url, scheme="http", options=options, policy=policy, secrets=secrets)
        )
    except ConfigError:
        return None
