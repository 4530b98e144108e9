"""Objects that have URLs: what a web server's or a bucket's answers mean for one request.

Redirects are followed and remembered for a while, an object each: a hub that sends to a CDN by a
signed URL is asked once in some minutes and not once a range. What a remembered URL says when it
has expired is no answer: the origin is asked again at once.
"""

from __future__ import annotations

import contextlib
import email.utils
import re
import threading
import time
from collections import OrderedDict
from http import HTTPStatus
from typing import TYPE_CHECKING, NamedTuple

from penstock.cache.base.store import Answer, Failure, RequestError
from penstock.cache.secrets import hide
from penstock.cache.stores.fsspec_store import retry_after_s
from penstock.cache.stores.web_address import Hop

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from penstock.cache.stores.web_client import WebClient
    from penstock.cache.stores.web_reply import Reply

_RANGES_UNSUPPORTED = 4
"""Whole answers to ranges in a row, with no right one ever, after which a server is believed not
to know ranges at all."""
_LARGEST_WHOLE = 2**31
"""Of an object whose size neither the caller nor the server tells."""
_ROUTE_S = 240.0
"""Signed URLs of hubs and CDNs live for at least five minutes, most of them for an hour."""
_ROUTES = 4096
_STALE = (400, 401, 403, 404, 410)
_DISTRUSTED = 3
"""So many remembered redirects that were of no use, and they are for one request each here."""

_CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+)")
_ALL_OF = re.compile(r"bytes \*/(\d+)")
_SIZE_AND_TIME = re.compile(r"\d+-\d+\.\d{6}")
_XML = re.compile(rb"<(Code|Message|Region|BucketName)>([^<]{0,300})</")
_DENIED_CODES = frozenset(
    {
        "AccessDenied",
        "ExpiredToken",
        "InvalidAccessKeyId",
        "InvalidToken",
        "RequestTimeTooSkewed",
        "SignatureDoesNotMatch",
        "TokenRefreshRequired",
    }
)
_REMEDIES = {
    "AccessDenied": "These credentials may not do this: check the bucket's policy, or use others.",
    "ExpiredToken": "The session's token has expired: log in again, and use the new one.",
    "TokenRefreshRequired": "The session's token has expired: log in again, and use the new one.",
    "InvalidToken": "The session token isn't accepted: log in again, and use the new one.",
    "InvalidAccessKeyId": "The store doesn't know this access key: check key= and endpoint_url= in "
    "storage_options.",
    "SignatureDoesNotMatch": "The secret doesn't fit the access key: check secret= in "
    "storage_options.",
    "RequestTimeTooSkewed": "This machine's clock is wrong: set it.",
    "NoSuchBucket": "Check the bucket's name, and endpoint_url= and region= in storage_options.",
}
_KINDS: dict[int, Failure] = {
    401: "denied",
    403: "denied",
    404: "missing",
    408: "transient",
    410: "missing",
    412: "changed",
    416: "changed",
    425: "transient",
    429: "throttled",
    503: "throttled",
}


class Object(NamedTuple):
    """What a server tells of an object."""

    size_bytes: int
    version: str


class WebObjects:
    """Requests for objects. Safe for several threads; not across fork.

    url_of: the URL of a key for a method, signed where that is wanted; headers: the user's, for the
    origin only; bucket: its name, where these are of one.
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
        self._lock = threading.Lock()
        self._routes: OrderedDict[str, tuple[Hop, float]] = OrderedDict()
        self._useless = 0
        self._ranges_answered = False
        self._wholes = 0

    def info(self, key: str) -> Object | None:
        """What is told of an object; None if it isn't there. Raises RequestError."""
        self._forget(key)
        with self._asked("HEAD", key, {}) as reply:
            if reply.status == 404:
                return None
            if reply.status == 200 and reply.length is not None and not _encoding(reply):
                return Object(reply.length, version_of(reply.headers, reply.length))
            # A URL that was signed for GET, a server without HEAD, one that packs what it sends.
            by_range = not reply.hop.is_origin or reply.status in (200, 405, 501)
            if not by_range:
                raise self._failure(reply, None)
        return self._info_by_range(key)

    def _info_by_range(self, key: str) -> Object | None:
        with self._asked("GET", key, {"Range": "bytes=0-0"}) as reply:
            if reply.status == 404:
                return None
            told = reply.headers.get("content-range", "")
            found = _CONTENT_RANGE.fullmatch(told) if reply.status == 206 else None
            if found is not None:
                size_bytes = int(found[3])
            elif reply.status == 416 and (empty := _ALL_OF.fullmatch(told)):
                size_bytes = int(empty[1])
            elif reply.status == 200 and reply.length is not None and not _encoding(reply):
                size_bytes = reply.length
            elif reply.status == 200:
                raise self._packed(reply) or RequestError(
                    "refused", "the server doesn't tell how long the object is"
                )
            else:
                raise self._failure(reply, None)
            return Object(size_bytes, version_of(reply.headers, size_bytes))

    def read(
        self,
        key: str,
        span: tuple[int, int] | None,
        *,
        version: str | None,
        most_bytes: int | None = None,
    ) -> Answer:
        """Bytes [start, end) of an object, or all of it. Raises RequestError."""
        own: dict[str, str] = {}
        if span is not None:
            own["Range"] = f"bytes={span[0]}-{span[1] - 1}"
        if version is not None and is_strong(version):
            own["If-Match"] = f'"{version}"'
        with self._asked("GET", key, own) as reply:
            if reply.status not in (200, 206):
                raise self._failure(reply, span)
            answer = self._range(reply, span) if span else self._whole(reply, most_bytes)
        if version is not None and answer.version != version:
            raise RequestError("changed", f"its version is {answer.version!r}, wanted {version!r}")
        return answer

    def page(self, url: str, *, most_bytes: int) -> bytes:
        """What a URL of the origin shows. Raises RequestError."""
        with contextlib.closing(self._client.ask(Hop(url), headers=self._headers, own={})) as reply:
            if reply.status != 200:
                raise self._failure(reply, None)
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
                raise self._failure(reply, None)

    # -- answers ---------------------------------------------------------------------------------

    def _range(self, reply: Reply, span: tuple[int, int]) -> Answer:
        wanted = span[1] - span[0]
        if reply.status == 200:
            if (packed := self._packed(reply)) is not None:
                raise packed
            if span[0] or reply.length != wanted:
                raise self._not_a_range()
            data, size_bytes = reply.read(wanted), wanted
        else:
            found = _CONTENT_RANGE.fullmatch(reply.headers.get("content-range", ""))
            if found is None:
                raise RequestError("transient", "the server answered a range without saying which")
            start, end, size_bytes = int(found[1]), int(found[2]) + 1, int(found[3])
            if start == span[0] and end == size_bytes < span[1]:
                raise RequestError(
                    "changed", f"it has {size_bytes} bytes, wanted {span[0]}-{span[1]}"
                )
            if (start, end) != span:
                raise RequestError(
                    "transient", f"bytes {start}-{end} came, wanted {span[0]}-{span[1]}"
                )
            # Of an object that is stored packed the packed bytes are what was asked for.
            if reply.length != wanted and (packed := self._packed(reply)) is not None:
                raise packed
            data = reply.read(wanted)
            if len(data) != wanted:
                raise RequestError("transient", f"{len(data)} bytes came, wanted {wanted}")
        self._ranges_answered = True
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
            most_bytes = _LARGEST_WHOLE if length is None else length
        data = reply.read(most_bytes)
        return Answer(
            data=data, version=version_of(reply.headers, len(data)), object_bytes=len(data)
        )

    def _packed(self, reply: Reply) -> RequestError | None:
        """The error for an answer whose bytes aren't the object's."""
        coding = _encoding(reply)
        if not coding:
            return None
        return RequestError(
            "refused",
            f"the server packs what it sends (Content-Encoding: {_shown(coding)}), though it was "
            "asked not to: the bytes of such an answer aren't the object's",
            remedy="Switch compression off for these files (nginx: gzip off; a proxy or CDN: its "
            "rule for them).",
        )

    def _not_a_range(self) -> RequestError:
        self._wholes += 1
        text = "the server answered a range with the whole object"
        if self._ranges_answered or self._wholes < _RANGES_UNSUPPORTED:
            return RequestError("transient", text)
        return RequestError(
            "refused",
            f"{text}; it doesn't know ranges: serve the files with one that does (nginx)",
        )

    def _failure(self, reply: Reply, span: tuple[int, int] | None) -> RequestError:
        """What an answer that is no success means."""
        status, headers = reply.status, reply.headers
        body = reply.error_body()
        told = told_by(body) if self._bucket is not None else {}
        code = told.get("Code", "")
        kind = _KINDS.get(status, "transient" if status >= 500 else "refused")
        text = _status_text(status)
        remedy = _REMEDIES.get(code)
        if told:
            text = f"{text}: {code}: {told.get('Message', '')}".rstrip(": ")
        region = headers.get("x-amz-bucket-region") or told.get("Region")
        if region and (300 <= status < 400 or status == 400):
            text = f"the bucket is in the region {_shown(region)!r}"
            remedy = f"Give region={_shown(region)!r} in storage_options."
        elif 300 <= status < 400:
            text = f"the server redirects ({text}) without saying where to"
        if code == "NoSuchBucket":
            text = f"there is no bucket {self._bucket!r} at this endpoint"
        if code in _DENIED_CODES:
            kind = "denied"
        elif code in ("RequestTimeout", "SlowDown"):
            kind = "throttled" if code == "SlowDown" else "transient"
        if status == 416 and span is not None:
            size = _ALL_OF.fullmatch(headers.get("content-range", ""))
            text = f"it has {size[1] if size else 'fewer'} bytes, wanted {span[0]}-{span[1]}"
        after_s = retry_after_s(headers) if kind in ("throttled", "transient") else None
        return RequestError(
            kind,
            hide(text, self._secrets),
            retry_after_s=after_s,
            remedy=remedy,
            code=code or ("" if body else "none"),
        )

    # -- redirects -------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _asked(self, method: str, key: str, own: Mapping[str, str]) -> Iterator[Reply]:
        reply = self._on_route(method, key, own) or self._from_origin(method, key, own)
        try:
            yield reply
        finally:
            reply.close()

    def _on_route(self, method: str, key: str, own: Mapping[str, str]) -> Reply | None:
        """The answer of where the last redirect led; None: ask the origin."""
        if not self._routes or method != "GET":
            return None
        with self._lock:
            hop, until_s = self._routes.get(key, (None, 0.0))
        if hop is None or time.monotonic() > until_s:
            return None
        try:
            reply = self._client.ask(hop, headers={}, own=own)
        except RequestError:
            self._forget(key)
            raise
        if reply.status not in _STALE:
            return reply
        reply.close()
        self._forget(key)
        with self._lock:
            self._useless += 1
        return None

    def _from_origin(self, method: str, key: str, own: Mapping[str, str]) -> Reply:
        hop = Hop(self._url_of(method, key))
        reply = self._client.ask(hop, method=method, headers=self._headers, own=own)
        is_elsewhere = reply.hop.url != hop.url
        if is_elsewhere and method == "GET" and reply.status in (200, 206):
            with self._lock:
                if self._useless < _DISTRUSTED:
                    self._routes[key] = reply.hop, time.monotonic() + _ROUTE_S
                    self._routes.move_to_end(key)
                    while len(self._routes) > _ROUTES:
                        self._routes.popitem(last=False)
        return reply

    def _forget(self, key: str) -> None:
        with self._lock:
            self._routes.pop(key, None)


def told_by(body: bytes) -> dict[str, str]:
    """Code, Message, Region … of a store's answer in XML; {} if it is none."""
    found: dict[str, str] = {}
    for name, value in _XML.findall(body):
        found.setdefault(name.decode(), _shown(value.decode("utf-8", "replace")))
    return found if "Code" in found else {}


def bucket_failure(text: str, bucket: str | None) -> tuple[Failure | None, str, str | None]:
    """(kind, text, remedy) of a message with a store's XML in it; (None, "", None) without."""
    told = told_by(text.encode("utf-8", "replace"))
    code = told.get("Code", "")
    if not code:
        return None, "", None
    shown = f"{code}: {told.get('Message', '')}".rstrip(": ")
    if code == "NoSuchBucket":
        return "missing", f"there is no bucket {bucket!r} at this endpoint", _REMEDIES[code]
    if region := told.get("Region"):
        remedy = f"Give region={region!r} in storage_options."
        return "refused", f"the bucket is in the region {region!r}", remedy
    return ("denied" if code in _DENIED_CODES else None), shown, _REMEDIES.get(code)


def version_of(headers: Mapping[str, str], size_bytes: int) -> str:
    """What changes when an object does: its etag without quotes; else size and time; else ""."""
    if tag := headers.get("etag"):
        return tag.replace('"', "")
    try:
        time_s = email.utils.parsedate_to_datetime(headers.get("last-modified", "")).timestamp()
    except (TypeError, ValueError):
        return ""
    return f"{size_bytes}-{time_s:.6f}"


def is_strong(version: str) -> bool:
    """Whether a version is an etag that may be sent as If-Match (RFC 9110, 13.1.1: strong only)."""
    if not version or version.startswith("W/") or not version.isascii():
        return False
    return version.isprintable() and not _SIZE_AND_TIME.fullmatch(version)


def _encoding(reply: Reply) -> str:
    coding = reply.headers.get("content-encoding", "").strip().lower()
    return "" if coding == "identity" else coding


def _shown(text: str) -> str:
    """A remote's text for a message: one line, nothing that moves a terminal's cursor."""
    kept = "".join(each if each.isprintable() else " " for each in text)
    return " ".join(kept.split())[:200]


def _status_text(status: int) -> str:
    with contextlib.suppress(ValueError):
        return f"status {status} {HTTPStatus(status).phrase}"
    return f"status {status}"
