"""What an exception means for one request: botocore's, aiohttp's, the disk's, any back end's."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING, Any

from penstock.cache.base.store import Failure, RequestError
from penstock.cache.secrets import clean_message
from penstock.cache.stores.answer_headers import retry_after_s

if TYPE_CHECKING:
    from collections.abc import Mapping

_REFUSED = frozenset(
    {errno.ELOOP, errno.ENAMETOOLONG, errno.EISDIR, errno.ENOTSUP, errno.EROFS, errno.EINVAL}
)
_UNREACHABLE = frozenset({errno.ECONNREFUSED, errno.EHOSTUNREACH, errno.ENETUNREACH})
_FILE_REMEDIES: dict[Failure, str] = {
    "denied": "Give this user the right to read it (and the folders above it).",
    "transient": "Check the disk or the mount (`ls`, `dmesg`), or mount it again.",
}


def failed_request(error: Exception, secrets: tuple[str, ...]) -> RequestError:
    """Make a RequestError of what any fsspec back end raised for one request."""
    chain = _causes(error)
    status = next((found for cause in chain if (found := _status(cause))), 0)
    headers = next((seen for cause in chain if (seen := _headers(cause))), {})
    kind = _kind(error, status)
    after_s = retry_after_s(headers) if kind in ("throttled", "transient") else None
    text = clean_message(error, secrets)
    # No status and an errno: of a file on a mount, where there are no credentials to check.
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
    """The exception and what it was raised from, outermost first."""
    chain = [error]
    while (inner := chain[-1].__cause__ or chain[-1].__context__) and inner not in chain:
        chain.append(inner)
    return chain


def _status(error: BaseException) -> int:
    """An HTTP status: of aiohttp, botocore, requests/httpx, azure, gcsfs; 0 if there is none."""
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
