"""Define what all stores share: the checks of requests and answers, sizes and versions."""

from __future__ import annotations

import re
from abc import abstractmethod
from typing import TYPE_CHECKING, Any

from penstock.cache.base import RequestError, Store

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.cache.base import Answer, ObjectInfo
    from penstock.cache.stores.storage_options import StoreAddress
    from penstock.cache.stores.web_client import WebClient


class RemoteStore(Store):
    """The parts of a store that don't depend on its kind; see `cache.base.Store`.

    A subclass makes the requests. `_read` reads at most the requested range, as far as the object
    has it, and this class compares the answer with the request. client: the store's connections,
    which it owns, or None.
    """

    def __init__(
        self, address: StoreAddress, *, scope: str, client: WebClient | None = None
    ) -> None:
        self.url = address.display_url
        self.scope = scope
        self.secrets = address.secrets
        self._client = client

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r})"

    def walk(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """List folder by folder."""
        waiting = [prefix]
        while waiting:
            folder = waiting.pop()
            objects, folders = self.list_folder(folder)
            yield from objects
            waiting += [f"{folder}/{name}" if folder else name for name in folders]

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
        answer = self._read(path, span, version, most_bytes)
        check_version(answer.version, version)
        start, end = span or (0, answer.object_bytes)
        if end > answer.object_bytes:
            raise RequestError(
                "changed", f"it has {answer.object_bytes} bytes, wanted {start}-{end}"
            )
        if answer.size_bytes != end - start:
            raise RequestError("transient", f"{answer.size_bytes} bytes came, wanted {start}-{end}")
        return answer

    def info(self, path: str) -> ObjectInfo | None:
        """Return the size and version of an object; None if it is missing. Raises RequestError."""
        try:
            return self._info(path)
        except RequestError as error:
            if error.kind == "missing":
                return None
            raise

    @abstractmethod
    def _info(self, path: str) -> ObjectInfo:
        """Return the size and version of an object. Raises RequestError, also if it is missing."""

    @abstractmethod
    def _read(
        self, path: str, span: tuple[int, int] | None, version: str | None, most_bytes: int | None
    ) -> Answer:
        """Return what is there of the span, and the object's size and version."""

    def close(self) -> None:
        """End the client's requests at once; others end by their timeouts. Safe to call twice."""
        if self._client is not None:
            self._client.abort()


# -- sizes and versions

_SIZE_AND_TIME = re.compile(r"\d+-\d+\.\d{6}")


def check_version(version: str, wanted: str | None) -> None:
    """Raise RequestError if an object doesn't have the wanted version; None wants any."""
    if wanted is not None and version != wanted:
        raise RequestError("changed", f"its version is {version!r}, wanted {wanted!r}")


def check_size(size_bytes: int, most_bytes: int | None) -> None:
    """Raise RequestError if an object is larger than expected; None expects any size."""
    if most_bytes is not None and size_bytes > most_bytes:
        raise RequestError("changed", f"it has {size_bytes} bytes, wanted {most_bytes}")


def version_text(etag: Any, size_bytes: Any, time: Any) -> str:
    """Return an object's version: its etag without quotes, else its size and time; "" with neither.

    time: a datetime, seconds, a text, or None."""
    if etag:
        return str(etag).replace('"', "")
    if hasattr(time, "timestamp"):
        time = time.timestamp()
    if isinstance(time, int | float):
        time = f"{time:.6f}"
    return f"{size_bytes}-{time}" if time else ""


def is_strong(version: str | None) -> bool:
    """Return True if a version is a strong etag, as If-Match requires (RFC 9110, 13.1.1)."""
    if not version or version.startswith("W/") or not version.isascii():
        return False
    return version.isprintable() and not _SIZE_AND_TIME.fullmatch(version)
