"""Classify failed requests by status, by the XML of a bucket's store, and by exceptions.

The exceptions are those of obstore and of all back ends of fsspec: botocore, aiohttp, the disk. The
table of statuses and that of codes are the same for all stores.
"""

from __future__ import annotations

import email.utils
import errno
import os
import re
import socket
import ssl
import time
from http.client import responses
from typing import TYPE_CHECKING, Any

from penstock.cache.base import Failure, RequestError
from penstock.cache.secrets import clean_message, hide

if TYPE_CHECKING:
    from collections.abc import Mapping

    from penstock.cache.stores.web_address import WebOrigin

_STATUSES: dict[Failure, tuple[int, ...]] = {
    "denied": (401, 403),
    "missing": (404, 410),
    "changed": (412, 416),
    "throttled": (429, 503),
    "transient": (408, 425),
}
_KINDS = {status: kind for kind, statuses in _STATUSES.items() for status in statuses}


def kind_of_status(status: int) -> Failure | None:
    """Return the failure that a status states; None for a success and for 0, no status."""
    if status < 300:
        return None
    return _KINDS.get(status, "transient" if status >= 500 else "refused")


def retry_after_s(headers: Mapping[str, Any]) -> float | None:
    """Return the seconds of a Retry-After header, a number or a date (RFC 9110, 10.2.3)."""
    text = next((str(v) for k, v in headers.items() if str(k).lower() == "retry-after"), "")
    if text.strip().isdigit():
        return float(text)
    try:
        return max(0.0, email.utils.parsedate_to_datetime(text).timestamp() - time.time())
    except (TypeError, ValueError):
        return None


def too_long(wanted: int, sent: int | None = None) -> RequestError:
    """Return the error for an answer with more than the requested bytes."""
    more = "more" if sent is None else f"{sent} bytes, more"
    return RequestError(
        "refused",
        f"the server sends {more} than the {wanted} requested bytes: this is a fault of the server "
        "or a proxy, and the answer was discarded",
    )


WHOLE = "the server answered a range with the whole object"

# -- answers of web servers and buckets

_XML = re.compile(r"<(Code|Message|Region|BucketName)>([^<]{0,300})</")
_LOG_IN = "log in again, and use the new one."
_EXPIRED = f"The session's token has expired: {_LOG_IN}"
_REMEDIES = {
    "AccessDenied": "These credentials lack permission: check the bucket's policy, or use others. "
    "Without permission to list, a missing object gives the same answer: check the path, too.",
    "ExpiredToken": _EXPIRED,
    "TokenRefreshRequired": _EXPIRED,
    "InvalidToken": f"The session token isn't accepted: {_LOG_IN}",
    "InvalidAccessKeyId": "The store doesn't know this access key: check key= and endpoint_url= in "
    "storage_options.",
    "SignatureDoesNotMatch": "The secret doesn't belong to the access key: check secret= in "
    "storage_options.",
    "RequestTimeTooSkewed": "This machine's clock is wrong: correct it.",
}
"""The remedies for the codes of a bucket's store that deny a request."""
_NO_BUCKET = "Check the bucket's name, and endpoint_url= and region= in storage_options."
_CODES: dict[str, Failure] = {
    **{code: "denied" for code in _REMEDIES},
    "RequestTimeout": "transient",
    "SlowDown": "throttled",
}
"""The failure that a code of a bucket's store states."""


def xml_fields(text: str) -> dict[str, str]:
    """Return Code, Message, Region … of a store's answer in XML; {} for another answer."""
    found: dict[str, str] = {}
    for name, value in _XML.findall(text):
        found.setdefault(name, printable(value))
    return found if "Code" in found else {}


def bucket_failure(text: str, bucket: str | None) -> tuple[Failure | None, str, str | None]:
    """Return (kind, text, remedy) of a text that has a store's XML; else (None, "", None)."""
    fields = xml_fields(text)
    if not fields:
        return None, "", None
    code = fields["Code"]
    if code == "NoSuchBucket":
        return "missing", f"there is no bucket {bucket!r} at this endpoint", _NO_BUCKET
    if region := fields.get("Region"):
        return "refused", *other_region(region)
    text = f"{code}: {fields.get('Message', '')}".rstrip(": ")
    return _CODES.get(code), text, _REMEDIES.get(code)


def other_region(region: str) -> tuple[str, str]:
    """Return the text and the remedy for a bucket that is in another region than the request's."""
    remedy = f"Give region={region!r} in storage_options."
    return f"the bucket is in the region {region!r}", remedy


_LOGIN = (
    "Check the URL, and the login in storage_options: headers={'Authorization': ...}, or "
    "client_kwargs={'auth': ...}."
)
_REGION = (
    "Check region= and endpoint_url= in storage_options, and whether the session's token is still "
    "valid."
)


def answer_failure(
    status: int,
    headers: Mapping[str, str],
    body: str,
    span: tuple[int, int] | None,
    *,
    bucket: str | None,
    secrets: tuple[str, ...],
) -> RequestError:
    """Return the error of a web server's answer without success.

    headers: by lower-case name. span: the requested range, if any. bucket: the name of the object's
    bucket, or None.
    """
    kind = kind_of_status(status) or "refused"
    text, remedy, code = f"status {status} {responses.get(status, '')}".rstrip(), None, ""
    is_redirect = 300 <= status < 400
    if bucket is not None:
        code = xml_fields(body).get("Code", "")
        stated, shown, remedy = bucket_failure(body, bucket)
        kind, text = stated or kind, shown or text
    elif kind == "denied":
        remedy = _LOGIN
    if remedy is None and (is_redirect or (status == 400 and bucket is not None)):
        # The answer to a HEAD has no text, but S3 names the region in a header.
        if (region := headers.get("x-amz-bucket-region")) is not None:
            text, remedy = other_region(printable(region))
        else:
            remedy = "Give the object's current URL." if bucket is None else _REGION
            if is_redirect:
                text = f"the server redirects ({text}) without a target"
    if status == 416 and span is not None:
        size = headers.get("content-range", "").removeprefix("bytes */")
        has = size if size.isdecimal() else "fewer"
        text = f"it has {has} bytes, wanted {span[0]}-{span[1]}"
    return RequestError(
        kind,
        hide(text, secrets),
        retry_after_s=retry_after_s(headers) if kind in ("throttled", "transient") else None,
        remedy=remedy,
        code=code or ("" if body else "none"),
    )


def printable(text: str) -> str:
    """Return a remote's text for a message: one line of 200 characters, without control codes."""
    kept = "".join(each if each.isprintable() else " " for each in text)
    return " ".join(kept.split())[:200]


# -- errors of sockets and of TLS

# Another attempt doesn't repair a certificate, so its faults are final.
CERTIFICATE_REMEDY = (
    "Give the authority that signed it in storage_options, as "
    'root_certificate="/path/ca.crt" (or verify=), and use the host name of the certificate in the '
    "URL or endpoint_url; verify=False trusts any server."
)
# rustls's words, as obstore passes them on.
_RUSTLS = re.compile(
    r"(?:invalid peer certificate: (?:certificate )?|InvalidCertificate\(\s*)([A-Za-z ]+)|"
    r"(certificate (?:expired|not valid)[^,;()]*)"
)
_UNREACHABLE = frozenset(
    {errno.ECONNREFUSED, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.ENETDOWN}
)


def request_failure(
    error: Exception, origin: WebOrigin | None, *, read_timeout_s: float
) -> RequestError:
    """Convert a socket's error to a RequestError. origin: named if it couldn't be reached."""
    is_late = isinstance(error, TimeoutError) and error.errno is None
    if is_late or isinstance(error, BlockingIOError):  # the kernel's own limit
        return RequestError("transient", f"nothing came for {read_timeout_s:.3g} s")
    if (fault := certificate_fault(error)) is not None:
        return RequestError("refused", fault, remedy=CERTIFICATE_REMEDY)
    if isinstance(error, UnicodeEncodeError):
        return RequestError("refused", "a header holds characters that HTTP can't send")
    reason = getattr(error, "strerror", None) or type(error).__name__
    if origin is not None:
        reason = f"{reason}: {origin.url}"
    code = getattr(error, "errno", None)
    if isinstance(error, socket.gaierror):
        return RequestError("unreachable", f"the host's name isn't known: {reason}")
    return RequestError("unreachable" if code in _UNREACHABLE else "transient", reason)


def certificate_fault(error: BaseException) -> str | None:
    """Return the fault of the server's certificate or TLS; None if the error has another cause."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"the server's certificate isn't accepted: {error.verify_message}"
    if isinstance(error, ssl.SSLError) and not isinstance(error, ssl.SSLEOFError):
        reason = (error.reason or "").replace("_", " ").lower()
        if "wrong version number" in reason or "http request" in reason:
            return "the server doesn't speak TLS at this port: use http://, or another port"
        if "alert" in reason or "unsupported" in reason or "no shared cipher" in reason:
            return f"the TLS handshake failed: {reason}"
    return None


def certificate_fault_of(text: str) -> str | None:
    """Return the certificate fault that a message of obstore contains; None without one."""
    found = _RUSTLS.search(text)
    if found is None:
        if "InvalidContentType" in text or "received corrupt message" in text:
            return "the server doesn't speak TLS at this port: use http://, or another port"
        return None
    # rustls's names of faults, such as UnknownIssuer, as words.
    fault = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", (found[1] or found[2]).strip()).lower()
    return f"the server's certificate isn't accepted: {fault}"


# -- exceptions of obstore

_OBSTORE_KINDS: dict[str, Failure] = {
    "PreconditionError": "changed",
    "NotModifiedError": "changed",
    "PermissionDeniedError": "denied",
    "UnauthenticatedError": "denied",
    "FileNotFoundError": "missing",
}
_STATUS = re.compile(r"status(?: code)?: (\d{3})")
_CANNOT_REACH = re.compile(
    r"connection refused|dns error|no route to host|network is unreachable", re.IGNORECASE
)


def obstore_failure(
    error: Exception, *, bucket: str | None, secrets: tuple[str, ...]
) -> RequestError:
    """Convert an exception of obstore to a RequestError, without the URLs and the dump in its text.

    bucket: its name in messages.
    """
    whole = str(error)
    if (fault := certificate_fault_of(whole)) is not None:
        return RequestError("refused", fault, remedy=CERTIFICATE_REMEDY)
    if "RangeNotSupported" in whole:
        return RequestError("transient", WHOLE)
    kind, text = _obstore_kind(error, whole), whole.partition("\n")[0]
    stated, shown, remedy = bucket_failure(whole, bucket)
    if shown:
        kind, text = stated or kind, shown
    elif kind == "unreachable" and (cause := _CANNOT_REACH.search(whole)) is not None:
        text = cause[0]
    elif "without LOCATION" in whole:
        text = "the bucket is in another region than the request's"
        remedy = "Give the bucket's region= in storage_options."
    if "169.254.169.254" in text:
        kind = "denied"
        text = "no credentials were found, neither in storage_options nor in the environment"
    if isinstance(error, OSError) and error.filename and kind == "refused":
        text = f"{error.strerror}: {os.fsdecode(error.filename)}"
    return RequestError(kind, hide(text, secrets), remedy=remedy)


def _obstore_kind(error: Exception, text: str) -> Failure:
    name = type(error).__name__
    if name != "GenericError" and not isinstance(error, TimeoutError):
        return _OBSTORE_KINDS.get(name, "refused")
    status = int(found[1]) if (found := _STATUS.search(text)) else 0
    if (kind := kind_of_status(status)) is not None:
        return kind
    if "builder error" in text or "without LOCATION" in text:
        return "refused"
    return "unreachable" if _CANNOT_REACH.search(text) else "transient"


# -- exceptions of fsspec's back ends

_REFUSED = frozenset(
    {errno.ELOOP, errno.ENAMETOOLONG, errno.EISDIR, errno.ENOTSUP, errno.EROFS, errno.EINVAL}
)
_REFUSED_TYPES = (
    TypeError, ValueError, LookupError, AttributeError, NotImplementedError, ImportError,
    IsADirectoryError,
)  # fmt: skip
_FILE_REMEDIES: dict[Failure, str] = {
    "denied": "Give this user permission to read it and its parent folders.",
    "transient": "Check the disk or the mount (`ls`, `dmesg`), or mount it again.",
}


def failed_request(error: Exception, secrets: tuple[str, ...]) -> RequestError:
    """Convert the exception of any fsspec back end to a RequestError."""
    chain: list[BaseException] = [error]
    while (inner := chain[-1].__cause__ or chain[-1].__context__) and inner not in chain:
        chain.append(inner)
    facts = [_status_and_headers(each) for each in chain]
    status = next((found for found, _ in facts if found), 0)
    headers = next((found for _, found in facts if found), {})
    kind = _fsspec_kind(error, status)
    # An errno without a status comes from a file on a mount, which needs no credentials.
    is_of_a_file = not status and isinstance(error, OSError) and bool(error.errno)
    return RequestError(
        kind,
        clean_message(error, secrets),
        retry_after_s=retry_after_s(headers) if kind in ("throttled", "transient") else None,
        remedy=_FILE_REMEDIES.get(kind) if is_of_a_file else None,
    )


def _fsspec_kind(error: Exception, status: int) -> Failure:
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        return "missing"
    if isinstance(error, PermissionError):
        return "denied"
    if (kind := kind_of_status(status)) is not None:
        return kind
    code = error.errno if isinstance(error, OSError) else None
    if code in _UNREACHABLE:
        return "unreachable"
    return "refused" if code in _REFUSED or isinstance(error, _REFUSED_TYPES) else "transient"


def _status_and_headers(error: BaseException) -> tuple[int, Mapping[str, Any]]:
    """Return the HTTP status and the headers of an error (aiohttp, botocore, requests/httpx, azure,
    gcsfs); 0 and {} without them."""
    response = getattr(error, "response", None)
    if isinstance(response, dict):
        facts = response.get("ResponseMetadata", {})
        status, headers = facts.get("HTTPStatusCode"), facts.get("HTTPHeaders")
    else:
        status = getattr(response, "status_code", None)
        headers = getattr(response, "headers", None) or getattr(error, "headers", None)
    for name in ("status_code", "status", "code"):
        status = status or getattr(error, name, None)
    is_number = str(status).isdigit()
    return int(status) if is_number else 0, headers if hasattr(headers, "items") else {}
