"""Read and upload objects by their URLs, on a web server or in a bucket.

Redirects are followed and remembered for a few minutes for each object, so that a hub that
redirects to a CDN by signed URLs isn't asked for each range. If a remembered URL has expired, its
answer is ignored and the origin is asked again at once.
"""

from __future__ import annotations

import contextlib
import email.utils
import os
import re
import time
from abc import abstractmethod
from typing import TYPE_CHECKING

from penstock.cache.base import Answer, ObjectInfo, RequestError, Store, is_strong, version_text
from penstock.cache.stores.request_failures import WHOLE, answer_failure, printable
from penstock.cache.stores.web_address import Hop
from penstock.cache.stores.web_client import Reply, WebClient, WebRequest

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from penstock.cache.stores.storage_options import StoreAddress

MOST_KEPT = 4096
"""The number of URLs that are kept."""
_KEPT_S = 240.0
"""Signed URLs of hubs and CDNs live for at least five minutes, most of them for an hour."""
_DISTRUSTED = 3
"""After this many expired redirects, a server's redirects aren't remembered any more."""
_LARGEST_OBJECT = 2**31
"""The limit for an object whose size neither the caller nor the server states."""
_STALE = (400, 401, 403, 404, 410)

_RANGES_UNSUPPORTED = 4
"""After this many consecutive answers with the entire object, and none with a range, a server
counts as one that doesn't support ranges."""

_CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+)")
_ALL_OF = re.compile(r"bytes \*/(\d+)")
"""The Content-Range of an answer that has only the object's length."""


class WebObjects(Store):
    """The objects of a web server or a bucket, which are requested by their URLs.

    headers: the user's headers, which are sent only to the origin. bucket: the name of the objects'
    bucket, or None. Safe for several threads; not across fork.
    """

    def __init__(
        self,
        address: StoreAddress,
        client: WebClient,
        *,
        headers: Mapping[str, str],
        scope: str,
        bucket: str | None = None,
    ) -> None:
        super().__init__(url=address.display_url, scope=scope, secrets=address.secrets)
        self._client, self._headers, self._bucket = client, headers, bucket
        self._redirects: dict[str, tuple[Hop, float]] = {}  # by path, with the ends of their times
        self._useless_redirects = 0
        self._serves_ranges, self._wholes = False, 0  # answers to ranges with entire objects

    @abstractmethod
    def _url(self, method: str, path: str) -> str:
        """Return the URL of an object for a method, signed if necessary. Raises RequestError."""

    def _info(self, path: str) -> ObjectInfo:
        self._redirects.pop(path, None)
        with self._reply("HEAD", path, {}) as reply:
            if reply.status == 200 and reply.length is not None and not _encoding_of(reply):
                return _info(path, reply, reply.length)
            # For a URL signed for GET, a server without HEAD, or one that compresses.
            is_final = reply.hop.is_origin and reply.status not in (200, 405, 501)
            if is_final or reply.status == 404:
                raise self._failure(reply)
        with self._reply("GET", path, {"Range": "bytes=0-0"}) as reply:
            content_range = reply.headers.get("content-range", "")
            if reply.status == 206 and (found := _CONTENT_RANGE.fullmatch(content_range)):
                return _info(path, reply, int(found[3]))
            if reply.status == 416 and (empty := _ALL_OF.fullmatch(content_range)):
                return _info(path, reply, int(empty[1]))
            if reply.status != 200:
                raise self._failure(reply)
            _refuse_compressed(reply)
            if reply.length is None:
                raise RequestError("refused", "the server doesn't state the object's length")
            return _info(path, reply, reply.length)

    def _read(
        self, path: str, span: tuple[int, int] | None, version: str | None, most_bytes: int | None
    ) -> Answer:
        own: dict[str, str] = {}
        if span is not None:
            own["Range"] = f"bytes={span[0]}-{span[1] - 1}"
        if is_strong(version):
            own["If-Match"] = f'"{version}"'
        with self._reply("GET", path, own) as reply:
            if reply.status not in (200, 206):
                raise self._failure(reply, span)
            if span is not None:
                data, size_bytes = self._read_range(reply, span)
            else:
                data = self._read_whole(reply, most_bytes)
                size_bytes = len(data)
            return Answer(data=data, version=_version(reply, size_bytes), object_bytes=size_bytes)

    def page(self, url: str, *, most_bytes: int) -> bytes:
        """Read the page at a URL of the origin. Raises RequestError."""
        with contextlib.closing(self._client.ask(Hop(url), WebRequest({}, self._headers))) as reply:
            if reply.status != 200:
                raise self._failure(reply)
            _refuse_compressed(reply)
            return bytes(reply.read(most_bytes))

    def put(self, local: str, path: str) -> None:
        """Upload a local file by a PUT request."""
        with open(os.fsencode(local), "rb") as file:
            request = WebRequest({}, self._headers, "PUT", file.read())
        with contextlib.closing(self._client.ask(Hop(self._url("PUT", path)), request)) as reply:
            if not 200 <= reply.status < 300:
                raise self._failure(reply)

    def close(self) -> None:
        """End the web client's requests at once."""
        self._client.abort()

    # -- answers

    def _read_range(self, reply: Reply, span: tuple[int, int]) -> tuple[memoryview, int]:
        """Return the bytes of a range, and the object's size."""
        wanted = span[1] - span[0]
        if reply.status == 200:
            _refuse_compressed(reply)
            if span[0] or reply.length != wanted:
                self._wholes += 1
                if self._serves_ranges or self._wholes < _RANGES_UNSUPPORTED:
                    raise RequestError("transient", WHOLE)
                raise RequestError(
                    "refused",
                    f"{WHOLE}; it doesn't support ranges: serve the files with one that does "
                    "(nginx)",
                )
            size_bytes = wanted
        else:
            found = _CONTENT_RANGE.fullmatch(reply.headers.get("content-range", ""))
            if found is None:
                raise RequestError("transient", "the server didn't state which range it sent")
            start, end, size_bytes = int(found[1]), int(found[2]) + 1, int(found[3])
            self._check_range((start, end), span, size_bytes)
            # If the object is stored compressed, its compressed bytes are the requested ones.
            if reply.length != end - start:
                _refuse_compressed(reply)
        data = reply.read(wanted)
        self._serves_ranges = True
        return data, size_bytes

    def _read_whole(self, reply: Reply, most_bytes: int | None) -> memoryview:
        if reply.status != 200:
            raise RequestError("transient", "the server answered with a part of the object")
        length = reply.length
        if self._bucket is None or length is None:
            _refuse_compressed(reply)
        if length is not None:
            self._check_size(length, most_bytes)
            return reply.read(length)
        return reply.read(_LARGEST_OBJECT if most_bytes is None else most_bytes)

    def _failure(self, reply: Reply, span: tuple[int, int] | None = None) -> RequestError:
        """Return the error of an answer without success. span: the requested range, if any."""
        body = reply.error_body().decode("utf-8", "replace")
        return answer_failure(
            reply.status, reply.headers, body, span, bucket=self._bucket, secrets=self.secrets
        )

    # -- redirects

    @contextlib.contextmanager
    def _reply(self, method: str, path: str, own: Mapping[str, str]) -> Iterator[Reply]:
        reply = self._from_last_hop(method, path, own) or self._from_origin(method, path, own)
        try:
            yield reply
        finally:
            reply.close()

    def _from_last_hop(self, method: str, path: str, own: Mapping[str, str]) -> Reply | None:
        """Request an object from the end of its last redirect; None to ask the origin."""
        hop, until_s = self._redirects.get(path, (None, 0.0))
        if hop is None or method != "GET" or time.monotonic() > until_s:
            return None
        try:
            reply = self._client.ask(hop, WebRequest(own))
        except RequestError:
            self._redirects.pop(path, None)
            raise
        if reply.status not in _STALE:
            return reply
        reply.close()
        self._redirects.pop(path, None)
        self._useless_redirects += 1
        return None

    def _from_origin(self, method: str, path: str, own: Mapping[str, str]) -> Reply:
        hop = Hop(self._url(method, path))
        reply = self._client.ask(hop, WebRequest(own, self._headers, method))
        is_useful = method == "GET" and reply.status in (200, 206)
        if is_useful and reply.hop.url != hop.url and self._useless_redirects < _DISTRUSTED:
            if len(self._redirects) >= MOST_KEPT:
                self._redirects.clear()
            self._redirects[path] = reply.hop, time.monotonic() + _KEPT_S
        return reply


def _info(path: str, reply: Reply, size_bytes: int) -> ObjectInfo:
    return ObjectInfo(path=path, size_bytes=size_bytes, version=_version(reply, size_bytes))


def _version(reply: Reply, size_bytes: int) -> str:
    etag, time_s = reply.headers.get("etag"), None
    if not etag:
        with contextlib.suppress(TypeError, ValueError):
            text = reply.headers.get("last-modified", "")
            time_s = email.utils.parsedate_to_datetime(text).timestamp()
    return version_text(etag, size_bytes, time_s)


def _encoding_of(reply: Reply) -> str:
    """Return the compression of an answer's bytes; "" if they are the object's own."""
    coding = reply.headers.get("content-encoding", "").strip().lower()
    return "" if coding == "identity" else coding


def _refuse_compressed(reply: Reply) -> None:
    """Raise RequestError for an answer whose bytes aren't the object's."""
    if coding := _encoding_of(reply):
        raise RequestError(
            "refused",
            f"the server compresses its answers (Content-Encoding: {printable(coding)}) although "
            "the request forbids it, so their bytes aren't the object's",
            remedy="Disable compression for these files (nginx: gzip off; a proxy or CDN: its "
            "rule for them).",
        )
