"""http and https: web servers, hubs that send to a CDN, presigned URLs.

Requests are `web_client`'s, so that a redirect never carries a login to another origin, no
answer is longer than what was asked for, and a request that hangs can be ended.
"""

from __future__ import annotations

import mmap
import os
from typing import TYPE_CHECKING

from penstock.cache.base.store import Answer, ObjectInfo, RequestError
from penstock.cache.stores.http_listing import HttpListing

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.cache.stores.web_client import WebClient
    from penstock.cache.stores.web_objects import WebObjects

FORKED = (
    "its connections were opened before this process was forked. Use "
    'multiprocessing_context="forkserver" (or "spawn"), and make the dataset inside the worker'
)


class HttpStore:
    """An HttpStore has the objects below a URL of a web server. It owns the client."""

    def __init__(
        self,
        client: WebClient,
        objects: WebObjects,
        *,
        base: str,
        url: str,
        scope: str,
        secrets: tuple[str, ...] = (),
    ) -> None:
        self.url = url
        self.scope = scope
        self.secrets = secrets
        self._client = client
        self._objects = objects
        self._listing = HttpListing(base, self.info, objects.page)
        self._pid = os.getpid()

    def __repr__(self) -> str:
        return f"HttpStore({self.url!r})"

    def walk(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """All objects below a folder. Raises RequestError."""
        self._begin(prefix)
        yield from self._listing.walk(prefix)

    def top(self, prefix: str = "") -> tuple[list[ObjectInfo], list[str]]:
        """Objects directly in a folder, and names of its folders. Raises RequestError."""
        self._begin(prefix)
        return self._listing.top(prefix)

    def info(self, path: str) -> ObjectInfo | None:
        """What is known of an object; None if it isn't there. Raises RequestError."""
        self._begin(path)
        if not path:  # a folder: its page is no object
            return None
        found = self._objects.info(path)
        if found is None:
            return None
        return ObjectInfo(path=path, size_bytes=found.size_bytes, version=found.version)

    def read(
        self,
        path: str,
        span: tuple[int, int] | None = None,
        *,
        version: str | None = None,
        most_bytes: int | None = None,
    ) -> Answer:
        """Bytes of an object. Raises RequestError."""
        self._begin(path)
        if span is not None and span[0] >= span[1]:
            raise RequestError("refused", f"an empty range {span}")
        return self._objects.read(path, span, version=version, most_bytes=most_bytes)

    def put(self, local: str, path: str) -> None:
        """Upload a local file. Raises RequestError."""
        self._begin(path)
        with open(os.fsencode(local), "rb") as file:
            if not os.fstat(file.fileno()).st_size:
                return self._objects.put(path, memoryview(b""))
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                view = memoryview(data)
                try:
                    return self._objects.put(path, view)
                finally:
                    view.release()

    def abort(self) -> None:
        """End what is under way, at once."""
        if os.getpid() == self._pid:
            self._client.abort()

    def close(self) -> None:
        """Let connections go. Safe to call twice."""
        self.abort()

    def _begin(self, path: str) -> None:
        if os.getpid() != self._pid:
            raise RequestError("refused", FORKED)
        try:
            path.encode()
        except UnicodeEncodeError:
            raise RequestError("refused", "its name isn't UTF-8: rename it") from None
