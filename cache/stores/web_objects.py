"""Read and upload objects by their URLs, on a web server or in a bucket.

Redirects are followed and remembered for a few minutes for each object, so that a hub that
redirects to a CDN by signed URLs isn't asked for each range. If a remembered URL has expired, its
answer is ignored and the origin is asked again at once.
"""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections import OrderedDict
from typing import TYPE_CHECKING, NamedTuple

from penstock.cache.base import Answer, RequestError
from penstock.cache.stores.web_address import Hop
from penstock.cache.stores.web_answers import (
    ALL_OF,
    RangeSupport,
    encoding_of,
    is_strong,
    printable,
    reply_failure,
    version_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from penstock.cache.stores.web_client import Reply, WebClient

_KEPT_S = 240.0
"""Signed URLs of hubs and CDNs live for at least five minutes, most of them for an hour."""
_MOST_KEPT = 4096
_DISTRUSTED = 3
"""After this many expired redirects, a server's redirects aren't remembered any more."""


class RedirectMemory:
    """The last hop of each object, which is kept for a while. Safe for several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._hops: OrderedDict[str, tuple[Hop, float]] = OrderedDict()
        self._useless = 0

    def recall(self, key: str) -> Hop | None:
        """Return the last hop of an object; None to ask the origin."""
        if not self._hops:
            return None
        with self._lock:
            hop, until_s = self._hops.get(key, (None, 0.0))
        return hop if time.monotonic() <= until_s else None

    def keep(self, key: str, hop: Hop) -> None:
        """Remember the last hop of an object."""
        with self._lock:
            if self._useless < _DISTRUSTED:
                self._hops[key] = hop, time.monotonic() + _KEPT_S
                self._hops.move_to_end(key)
                while len(self._hops) > _MOST_KEPT:
                    self._hops.popitem(last=False)

    def forget(self, key: str, *, useless: bool = False) -> None:
        """Forget an object's last hop. useless: the remembered hop had expired."""
        with self._lock:
            self._hops.pop(key, None)
            self._useless += useless


_LARGEST_OBJECT = 2**31
"""The limit for an object whose size neither the caller nor the server states."""
_STALE = (400, 401, 403, 404, 410)

_CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+)")


class ObjectFacts(NamedTuple):
    """The size and version that a server states for an object."""

    size_bytes: int
    version: str


class WebObjects:
    """The objects of a web server or a bucket, which are requested by their URLs.

    url_of: returns the URL of a method and a key, signed if necessary. headers: the user's headers,
    which are sent only to the origin. bucket: the name of the objects' bucket, or None. Safe for
    several threads; not across fork.
    """

    def __init__(
        self,
        client: WebClient,
        url_of: Callable[[str, str], str],
        *,
        headers: Mapping[str, str],
        secrets: tuple[str, ...] = (),
        bucket: str | None = None,
    ) -> None:
        self._client = client
        self._url_of = url_of
        self._headers = dict(headers)
        self._secrets = secrets
        self._bucket = bucket
        self._redirects = RedirectMemory()
        self._ranges = RangeSupport()

    def info(self, key: str) -> ObjectFacts | None:
        """Return the size and version of an object; None if it is missing. Raises RequestError."""
        self._redirects.forget(key)
        with self._reply("HEAD", key, {}) as reply:
            if reply.status == 404:
                return None
            if reply.status == 200 and reply.length is not None and not encoding_of(reply.headers):
                return ObjectFacts(reply.length, version_of(reply.headers, reply.length))
            # For a URL signed for GET, a server without HEAD, or one that compresses.
            by_range = not reply.hop.is_origin or reply.status in (200, 405, 501)
            if not by_range:
                raise self._failure(reply)
        return self._info_by_range(key)

    def _info_by_range(self, key: str) -> ObjectFacts | None:
        with self._reply("GET", key, {"Range": "bytes=0-0"}) as reply:
            if reply.status == 404:
                return None
            content_range = reply.headers.get("content-range", "")
            found = _CONTENT_RANGE.fullmatch(content_range) if reply.status == 206 else None
            if found is not None:
                size_bytes = int(found[3])
            elif reply.status == 416 and (empty := ALL_OF.fullmatch(content_range)):
                size_bytes = int(empty[1])
            elif reply.status == 200:
                if (packed := self._packed(reply)) is not None:
                    raise packed
                if reply.length is None:
                    raise RequestError("refused", "the server doesn't state the object's length")
                size_bytes = reply.length
            else:
                raise self._failure(reply)
            return ObjectFacts(size_bytes, version_of(reply.headers, size_bytes))

    def read(
        self,
        key: str,
        span: tuple[int, int] | None,
        *,
        version: str | None,
        most_bytes: int | None = None,
    ) -> Answer:
        """Read bytes [start, end) of an object, or all of it. Raises RequestError."""
        own: dict[str, str] = {}
        if span is not None:
            own["Range"] = f"bytes={span[0]}-{span[1] - 1}"
        if version is not None and is_strong(version):
            own["If-Match"] = f'"{version}"'
        with self._reply("GET", key, own) as reply:
            if reply.status not in (200, 206):
                raise self._failure(reply, span)
            answer = self._range(reply, span) if span else self._whole(reply, most_bytes)
        if version is not None and answer.version != version:
            raise RequestError("changed", f"its version is {answer.version!r}, wanted {version!r}")
        return answer

    def page(self, url: str, *, most_bytes: int) -> bytes:
        """Read the page at a URL of the origin. Raises RequestError."""
        with contextlib.closing(self._client.ask(Hop(url), headers=self._headers, own={})) as reply:
            if reply.status != 200:
                raise self._failure(reply)
            if (packed := self._packed(reply)) is not None:
                raise packed
            return bytes(reply.read(most_bytes))

    def put(self, key: str, data: memoryview) -> None:
        """Upload an object. Raises RequestError."""
        hop = Hop(self._url_of("PUT", key))
        with contextlib.closing(
            self._client.ask(hop, method="PUT", headers=self._headers, own={}, body=data)
        ) as reply:
            if not 200 <= reply.status < 300:
                raise self._failure(reply)

    # -- answers ---------------------------------------------------------------------------------

    def _range(self, reply: Reply, span: tuple[int, int]) -> Answer:
        wanted = span[1] - span[0]
        if reply.status == 200:
            if (packed := self._packed(reply)) is not None:
                raise packed
            if span[0] or reply.length != wanted:
                raise self._ranges.failure()
            data, size_bytes = reply.read(wanted), wanted
        else:
            found = _CONTENT_RANGE.fullmatch(reply.headers.get("content-range", ""))
            if found is None:
                raise RequestError(
                    "transient", "the server answered with a range, but didn't state which"
                )
            start, end, size_bytes = int(found[1]), int(found[2]) + 1, int(found[3])
            if start == span[0] and end == size_bytes < span[1]:
                raise RequestError(
                    "changed", f"it has {size_bytes} bytes, wanted {span[0]}-{span[1]}"
                )
            if (start, end) != span:
                raise RequestError(
                    "transient", f"bytes {start}-{end} came, wanted {span[0]}-{span[1]}"
                )
            # If the object is stored compressed, its compressed bytes are the requested ones.
            if reply.length != wanted and (packed := self._packed(reply)) is not None:
                raise packed
            data = reply.read(wanted)
            if len(data) != wanted:
                raise RequestError("transient", f"{len(data)} bytes came, wanted {wanted}")
        self._ranges.note_range()
        return Answer(
            data=data, version=version_of(reply.headers, size_bytes), object_bytes=size_bytes
        )

    def _whole(self, reply: Reply, most_bytes: int | None) -> Answer:
        if reply.status != 200:
            raise RequestError("transient", "the server answered with a part of the object")
        stored = self._bucket is not None and reply.length is not None
        if not stored and (packed := self._packed(reply)) is not None:
            raise packed
        length = reply.length
        if most_bytes is not None and length is not None and length > most_bytes:
            raise RequestError("changed", f"it has {length} bytes, wanted {most_bytes}")
        if most_bytes is None:
            most_bytes = _LARGEST_OBJECT if length is None else length
        data = reply.read(most_bytes)
        return Answer(
            data=data, version=version_of(reply.headers, len(data)), object_bytes=len(data)
        )

    def _packed(self, reply: Reply) -> RequestError | None:
        """Return the error for an answer whose bytes aren't the object's; None for others."""
        coding = encoding_of(reply.headers)
        if not coding:
            return None
        return RequestError(
            "refused",
            f"the server compresses its answers (Content-Encoding: {printable(coding)}) although "
            "the request forbids it, so their bytes aren't the object's",
            remedy="Disable compression for these files (nginx: gzip off; a proxy or CDN: its "
            "rule for them).",
        )

    def _failure(self, reply: Reply, span: tuple[int, int] | None = None) -> RequestError:
        return reply_failure(reply, span, bucket=self._bucket, secrets=self._secrets)

    # -- redirects -------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _reply(self, method: str, key: str, own: Mapping[str, str]) -> Iterator[Reply]:
        reply = self._from_last_hop(method, key, own) or self._from_origin(method, key, own)
        try:
            yield reply
        finally:
            reply.close()

    def _from_last_hop(self, method: str, key: str, own: Mapping[str, str]) -> Reply | None:
        """Request an object from the end of its last redirect; None to ask the origin."""
        hop = self._redirects.recall(key) if method == "GET" else None
        if hop is None:
            return None
        try:
            reply = self._client.ask(hop, headers={}, own=own)
        except RequestError:
            self._redirects.forget(key)
            raise
        if reply.status not in _STALE:
            return reply
        reply.close()
        self._redirects.forget(key, useless=True)
        return None

    def _from_origin(self, method: str, key: str, own: Mapping[str, str]) -> Reply:
        hop = Hop(self._url_of(method, key))
        reply = self._client.ask(hop, method=method, headers=self._headers, own=own)
        is_elsewhere = reply.hop.url != hop.url
        if is_elsewhere and method == "GET" and reply.status in (200, 206):
            self._redirects.keep(key, reply.hop)
        return reply
