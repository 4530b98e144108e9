"""Open and read through fsspec all URLs that no other store serves, and users' file systems.

fsspec has no conditional reads, so this store checks the object's version after each read. One
check is enough if the caller passes the version: the object had it before the read and has it after
the read, and objects don't return to an older version.
"""

from __future__ import annotations

import contextlib
import threading
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, unquote

from penstock.cache.base import Answer, FetchPolicy, ObjectInfo, RequestError, Store, version_text
from penstock.cache.errors import ConfigError, FetchError
from penstock.cache.secrets import clean_message, find_secrets, redact, store_scope
from penstock.cache.stores.request_failures import failed_request
from penstock.cache.stores.storage_options import FETCH_OPTIONS, StoreAddress, fetch_policy

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_VERSION_KEYS = ("ETag", "etag", "e_tag", "md5Hash", "content_md5", "Content-MD5", "checksum")
_TIME_KEYS = (
    "LastModified", "last_modified", "Last-Modified", "mtime", "updated", "modified", "created",
)  # fmt: skip
_ONE_AT_A_TIME = frozenset({"ftp", "libarchive", "smb", "tar", "zip"})
"""Protocols whose file systems share one connection or open file without a lock."""


def object_version(info: Mapping[str, Any]) -> str:
    """Return an object's version: its etag, else its size and time; "" with neither."""
    etag, time = (
        next((info[key] for key in keys if info.get(key)), None)
        for keys in (_VERSION_KEYS, _TIME_KEYS)
    )
    return version_text(etag, info.get("size"), time)


class FsspecStore(Store):
    """The objects below `root` of an fsspec file system, which fsspec keeps and shares.

    Requests of an asynchronous file system have a time limit; other file systems need their own.
    """

    def __init__(self, fs: Any, root: str, address: StoreAddress, *, scope: str) -> None:
        super().__init__(url=address.display_url, scope=scope, secrets=address.secrets)
        self._fs, self._root, policy = fs, root.rstrip("/"), address.policy
        self._timeout_s = min(policy.retry_timeout_s, 3 * policy.read_timeout_s)
        names = {fs.protocol} if isinstance(fs.protocol, str) else set(fs.protocol)
        self._is_http = bool({"http", "https"} & names)
        self._is_local = bool({"file", "local"} & names)
        self._lock: Any = threading.Lock() if _ONE_AT_A_TIME & names else contextlib.nullcontext()

    def walk(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """List all objects by one call of fsspec if possible."""
        if self._is_local:  # fsspec's own walk ignores folders that it can't list (stale, denied)
            yield from super().walk(prefix)
            return
        for path, info in self._entries("find", prefix):
            if info.get("type") != "directory":
                yield self._measured(path, info)

    def list_folder(self, prefix: str = "") -> tuple[list[ObjectInfo], list[str]]:
        """List a folder by fsspec."""
        objects: list[ObjectInfo] = []
        folders: list[str] = []
        for path, info in self._entries("ls", prefix):
            if info.get("type") == "directory":
                folders.append(path.rpartition("/")[2])
            else:
                objects.append(self._measured(path, info))
        return objects, folders

    def _entries(self, method: str, prefix: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """List a folder by a method of the file system: yield paths and fsspec's infos; none if the
        folder is missing."""
        try:
            found = self._call(method, self._full(prefix), detail=True)
        except RequestError as error:
            if error.kind == "missing":
                return
            raise
        named = found.items() if isinstance(found, dict) else ((one["name"], one) for one in found)
        for name, info in named:
            name = str(name).rstrip("/")
            path = self._path(name)
            # A folder's own marker, and an index page's sorting links, are no objects.
            if path not in ("", prefix) and not (self._is_http and "?" in name):
                yield path, info

    def _info(self, path: str) -> ObjectInfo:
        # fsspec's cached listings would hide that an object changed.
        self._forget(path)
        info = self._call("info", self._full(path))
        if info.get("type") == "directory":
            raise RequestError("missing", "it doesn't exist")
        return self._measured(path, {**info, "size": info.get("size") or 0})

    def _read(
        self, path: str, span: tuple[int, int] | None, version: str | None, most_bytes: int | None
    ) -> Answer:
        if version is None or most_bytes is not None:
            seen = self._info(path)
            self._check_size(seen.size_bytes, most_bytes)
            version = seen.version if version is None else version
        start, end = span or (None, None)
        try:
            data = self._call("cat_file", self._full(path), start=start, end=end)
        except RequestError as error:
            # Some back ends refuse a range beyond the object's new end.
            if error.kind != "missing":
                self._check_version(self._info(path).version, version)
            raise
        after = self._info(path)
        self._check_version(after.version, version)
        return Answer(data=data, version=after.version, object_bytes=after.size_bytes)

    def put(self, local: str, path: str) -> None:
        """Upload a local file, and create its folder."""
        full = self._full(path)
        self._call("makedirs", full.rpartition("/")[0], exist_ok=True)
        self._call("put_file", local, full)
        self._forget(path)

    def _measured(self, path: str, info: Mapping[str, Any]) -> ObjectInfo:
        """Return a listed object's info; request it if the listing has no sizes."""
        if info.get("size") is None:
            return self._info(path)
        return ObjectInfo(path=path, size_bytes=int(info["size"]), version=object_version(info))

    def _full(self, path: str) -> str:
        if self._is_http:
            path = quote(path, errors="surrogateescape")
        return f"{self._root}/{path}" if path else self._root

    def _path(self, name: str) -> str:
        path = name.removeprefix(self._root).lstrip("/")
        return unquote(path, errors="surrogateescape") if self._is_http else path

    def close(self) -> None:
        """Do nothing, because fsspec keeps and shares the file system."""

    def _forget(self, path: str) -> None:
        """Drop fsspec's cached listings."""
        if getattr(self._fs, "dircache", None):
            self._fs.invalidate_cache(self._full(path))

    def _call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of the file system, with a time limit if fsspec supports one."""
        own = getattr(self._fs, f"_{name}", None)
        try:
            with self._lock:
                if own is None or not getattr(self._fs, "async_impl", False):
                    return getattr(self._fs, name)(*args, **kwargs)
                from fsspec.asyn import sync

                return sync(self._fs.loop, own, *args, timeout=self._timeout_s, **kwargs)
        # Each back end has its own exceptions (botocore, aiohttp, …), whose texts may hold
        # credentials: so `from None`.
        except Exception as error:
            raise failed_request(error, self.secrets) from None


def open_by_fsspec(address: StoreAddress) -> Store:
    """Open the store of any URL that fsspec understands.

    Raises ConfigError, FetchError, ImportError.
    """
    import fsspec

    shown = address.display_url
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
        reason = clean_message(error, address.secrets)
        if isinstance(error, TypeError) and "target_" in reason:  # arguments for another URL's
            raise ConfigError(
                f"{shown}: {shown.partition(':')[0]}:// can't hold another URL. Pass one URL; only "
                "archives and caches precede another, as in zip://part::s3://bucket/a.zip."
            ) from None
        text = f"{shown}: could not be opened ({reason}). Check storage_options."
        raise FetchError(text, uri=shown) from None
    fs, root = _inside(fs, str(root))
    return FsspecStore(fs, root, address, scope=store_scope(theirs))


def open_filesystem(url: str, fs: Any, secrets: tuple[str, ...]) -> Store:
    """Open the store of a user's own file system object. url: of the root."""
    fs, url = _inside(fs, url)
    options = dict(getattr(fs, "storage_options", None) or {})
    secrets = tuple(sorted({*secrets, *find_secrets(options)}, key=len, reverse=True))
    address = StoreAddress(url=url, options=options, policy=FetchPolicy(), secrets=secrets)
    kind = type(fs)
    is_http = (kind.__module__, kind.__name__) == ("fsspec.implementations.http", "HTTPFileSystem")
    if is_http and not getattr(fs, "encoded", False):
        from penstock.cache.stores.http_store import open_http

        # HttpStore limits answers and sends no login to redirects. ConfigError: the file system has
        # options that only fsspec supports (a session, cookies, request arguments).
        with contextlib.suppress(ConfigError):
            return open_http(replace(address, policy=fetch_policy(options)))
    return FsspecStore(fs, str(fs._strip_protocol(url)), address, scope=store_scope(options))


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
