"""Interpret the status, the headers and the error body of a web answer.

They show an object's version, how its bytes are compressed, when to try again, whether the server
supports ranges, and, by the XML of a bucket's store, why it refused.
"""

from __future__ import annotations

import contextlib
import email.utils
import re
import time
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from penstock.cache.base import Failure, RequestError
from penstock.cache.secrets import hide

if TYPE_CHECKING:
    from collections.abc import Mapping

    from penstock.cache.stores.web_client import Reply

_SIZE_AND_TIME = re.compile(r"\d+-\d+\.\d{6}")


def version_of(headers: Mapping[str, str], size_bytes: int) -> str:
    """Return an object's version: its etag without quotes; else its size and time; else ""."""
    if tag := headers.get("etag"):
        return tag.replace('"', "")
    try:
        time_s = email.utils.parsedate_to_datetime(headers.get("last-modified", "")).timestamp()
    except (TypeError, ValueError):
        return ""
    return f"{size_bytes}-{time_s:.6f}"


def is_strong(version: str) -> bool:
    """Return True if a version is a strong etag, as If-Match requires (RFC 9110, 13.1.1)."""
    if not version or version.startswith("W/") or not version.isascii():
        return False
    return version.isprintable() and not _SIZE_AND_TIME.fullmatch(version)


def encoding_of(headers: Mapping[str, str]) -> str:
    """Return the compression of an answer's bytes; "" if they are the object's own."""
    coding = headers.get("content-encoding", "").strip().lower()
    return "" if coding == "identity" else coding


def retry_after_s(headers: Mapping[str, Any]) -> float | None:
    """Return the seconds of a Retry-After header, a number or a date (RFC 9110, 10.2.3)."""
    text = next((str(v) for k, v in headers.items() if str(k).lower() == "retry-after"), "")
    if text.strip().isdigit():
        return float(text)
    try:
        return max(0.0, email.utils.parsedate_to_datetime(text).timestamp() - time.time())
    except (TypeError, ValueError):
        return None


_RANGES_UNSUPPORTED = 4
"""After this many consecutive answers with the entire object, and none with a range, a server
counts as one that doesn't support ranges."""


class RangeSupport:
    """The answers of a server to ranges, which show if it supports ranges."""

    def __init__(self) -> None:
        self._was_answered = False
        self._wholes = 0

    def note_range(self) -> None:
        """Record a correct answer to a range."""
        self._was_answered = True

    def failure(self) -> RequestError:
        """Return the error for an answer with the entire object, which is final if the server never
        sent a range."""
        self._wholes += 1
        text = "the server answered a range with the whole object"
        if self._was_answered or self._wholes < _RANGES_UNSUPPORTED:
            return RequestError("transient", text)
        return RequestError(
            "refused",
            f"{text}; it doesn't support ranges: serve the files with one that does (nginx)",
        )


ALL_OF = re.compile(r"bytes \*/(\d+)")
"""The Content-Range of an answer that has only the object's length."""
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
    "AccessDenied": "These credentials lack permission: check the bucket's policy, or use others. "
    "Without permission to list, a missing object gives the same answer: check the path, too.",
    "ExpiredToken": "The session's token has expired: log in again, and use the new one.",
    "TokenRefreshRequired": "The session's token has expired: log in again, and use the new one.",
    "InvalidToken": "The session token isn't accepted: log in again, and use the new one.",
    "InvalidAccessKeyId": "The store doesn't know this access key: check key= and endpoint_url= in "
    "storage_options.",
    "SignatureDoesNotMatch": "The secret doesn't belong to the access key: check secret= in "
    "storage_options.",
    "RequestTimeTooSkewed": "This machine's clock is wrong: correct it.",
    "NoSuchBucket": "Check the bucket's name, and endpoint_url= and region= in storage_options.",
}
_LOGIN = (
    "Check the URL, and the login in storage_options: headers={'Authorization': ...}, or "
    "client_kwargs={'auth': ...}."
)
_REGION = (
    "Check region= and endpoint_url= in storage_options, and whether the session's token is still "
    "valid."
)
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


def reply_failure(
    reply: Reply,
    span: tuple[int, int] | None = None,
    *,
    bucket: str | None = None,
    secrets: tuple[str, ...] = (),
) -> RequestError:
    """Return the RequestError of an answer without success.

    span: the requested range, if any; bucket: the name of the object's bucket, if any.
    """
    status, headers = reply.status, reply.headers
    body = reply.error_body()
    fields = xml_fields(body) if bucket is not None else {}
    code = fields.get("Code", "")
    kind = _KINDS.get(status, "transient" if status >= 500 else "refused")
    text = _status_text(status)
    remedy = _REMEDIES.get(code)
    if fields:
        text = f"{text}: {code}: {fields.get('Message', '')}".rstrip(": ")
    if bucket is None and kind == "denied":
        remedy = _LOGIN
    region = headers.get("x-amz-bucket-region") or fields.get("Region")
    if region and (300 <= status < 400 or status == 400):
        text = f"the bucket is in the region {printable(region)!r}"
        remedy = f"Give region={printable(region)!r} in storage_options."
    elif 300 <= status < 400:
        text = f"the server redirects ({text}) without a target"
        remedy = _REGION if bucket is not None else "Give the object's current URL."
    elif status == 400 and bucket is not None and remedy is None:
        remedy = _REGION  # the answer to a HEAD has no text
    if code == "NoSuchBucket":
        text = f"there is no bucket {bucket!r} at this endpoint"
    if code in _DENIED_CODES:
        kind = "denied"
    elif code in ("RequestTimeout", "SlowDown"):
        kind = "throttled" if code == "SlowDown" else "transient"
    if status == 416 and span is not None:
        size = ALL_OF.fullmatch(headers.get("content-range", ""))
        text = f"it has {size[1] if size else 'fewer'} bytes, wanted {span[0]}-{span[1]}"
    after_s = retry_after_s(headers) if kind in ("throttled", "transient") else None
    return RequestError(
        kind,
        hide(text, secrets),
        retry_after_s=after_s,
        remedy=remedy,
        code=code or ("" if body else "none"),
    )


def xml_fields(body: bytes) -> dict[str, str]:
    """Return Code, Message, Region … of a store's answer in XML; {} for another answer."""
    found: dict[str, str] = {}
    for name, value in _XML.findall(body):
        found.setdefault(name.decode(), printable(value.decode("utf-8", "replace")))
    return found if "Code" in found else {}


def bucket_failure(text: str, bucket: str | None) -> tuple[Failure | None, str, str | None]:
    """Return (kind, text, remedy) of a message that has a store's XML; else (None, "", None)."""
    fields = xml_fields(text.encode("utf-8", "replace"))
    code = fields.get("Code", "")
    if not code:
        return None, "", None
    shown = f"{code}: {fields.get('Message', '')}".rstrip(": ")
    if code == "NoSuchBucket":
        return "missing", f"there is no bucket {bucket!r} at this endpoint", _REMEDIES[code]
    if region := fields.get("Region"):
        remedy = f"Give region={region!r} in storage_options."
        return "refused", f"the bucket is in the region {region!r}", remedy
    return ("denied" if code in _DENIED_CODES else None), shown, _REMEDIES.get(code)


def printable(text: str) -> str:
    """Return a remote's text for a message: one line of 200 characters, without control codes."""
    kept = "".join(each if each.isprintable() else " " for each in text)
    return " ".join(kept.split())[:200]


def _status_text(status: int) -> str:
    with contextlib.suppress(ValueError):
        return f"status {status} {HTTPStatus(status).phrase}"
    return f"status {status}"
