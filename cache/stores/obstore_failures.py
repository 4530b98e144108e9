"""What obstore's errors mean for one request: its exceptions, and the texts that they carry."""

from __future__ import annotations

import contextlib
import math
import os
import re
import time
from typing import TYPE_CHECKING

from penstock.cache.base.store import Failure, RequestError
from penstock.cache.secrets import hide
from penstock.cache.stores.obstore_process import RustPanicError, rust_errors
from penstock.cache.stores.tls import REMEDY, certificate_fault_of
from penstock.cache.stores.web_failures import bucket_failure

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.cache.stores.range_support import RangeSupport

_STATUS = re.compile(r"status(?: code)?: (\d{3})")
_UNREACHABLE = re.compile(
    r"connection refused|dns error|no route to host|network is unreachable", re.IGNORECASE
)
_PATIENT_S = 10.0
"""So long after a throttled request others go where Retry-After is seen."""


class Throttling:
    """Throttling knows whether a store asked for fewer requests a moment ago."""

    def __init__(self) -> None:
        self._last_s = -math.inf

    def note(self) -> None:
        """Note that a request was throttled now."""
        self._last_s = time.monotonic()

    @property
    def is_recent(self) -> bool:
        """Whether one was, so shortly ago that others may be too."""
        return time.monotonic() < self._last_s + _PATIENT_S


class ObstoreFailures:
    """ObstoreFailures makes RequestErrors of what obstore raises. bucket: its name, for people."""

    def __init__(
        self,
        *,
        bucket: str,
        secrets: tuple[str, ...],
        ranges: RangeSupport,
        throttling: Throttling,
    ) -> None:
        self._bucket, self._secrets = bucket, secrets
        self._ranges, self._throttling = ranges, throttling

    @contextlib.contextmanager
    def explaining(self) -> Iterator[None]:
        """Turn what obstore raises inside into a RequestError."""
        try:
            with rust_errors():
                yield
        except RequestError:
            raise
        except Exception as error:  # obstore's tree: sorted there
            raise self._failure(error) from None

    def _failure(self, error: Exception) -> RequestError:
        """What an exception means. Its text holds URLs and a dump: both are left out."""
        whole = str(error)
        text = whole.partition("\n\nDebug source")[0].partition("\n")[0]
        if (fault := certificate_fault_of(whole)) is not None:
            return RequestError("refused", fault, remedy=REMEDY)
        kind = _kind(error, whole)
        stated, shown, remedy = bucket_failure(whole, self._bucket)
        if shown:
            kind, text = stated or kind, shown
        elif kind == "unreachable" and (cause := _UNREACHABLE.search(whole)) is not None:
            text = cause[0]
        elif "without LOCATION" in whole:
            text = "the bucket is in another region than the one that was asked"
            remedy = "Give the bucket's region= in storage_options."
        if kind == "throttled":
            self._throttling.note()
        if kind == "transient" and _is_whole_answer(error):
            found = self._ranges.failure()
            kind, text = found.kind, str(found)
        if "169.254.169.254" in text:
            kind = "denied"
            text = "no credentials were found, neither in storage_options nor in the environment"
        if isinstance(error, OSError) and error.filename and kind == "refused":
            text = f"{error.strerror}: {os.fsdecode(error.filename)}"
        return RequestError(kind, hide(text, self._secrets), remedy=remedy)


def _kind(error: Exception, text: str) -> Failure:
    from obstore import exceptions

    if isinstance(error, exceptions.PreconditionError | exceptions.NotModifiedError):
        return "changed"
    if isinstance(error, exceptions.PermissionDeniedError | exceptions.UnauthenticatedError):
        return "denied"
    if isinstance(error, FileNotFoundError):
        return "missing"
    if isinstance(error, RustPanicError):
        return "refused"
    if _is_whole_answer(error):
        return "transient"
    if not isinstance(error, exceptions.GenericError | TimeoutError):
        return "refused"
    status = int(found[1]) if (found := _STATUS.search(text)) else 0
    if status in (429, 503):
        return "throttled"
    if status in (401, 403):
        return "denied"
    if status == 404:  # of a listing: there is no such bucket
        return "missing"
    if status == 416:
        return "changed"
    # A redirect that can't be followed: the bucket is in another region, as the text says.
    if (
        "builder error" in text
        or "without LOCATION" in text
        or (300 <= status < 500 and status not in (408, 425))
    ):
        return "refused"
    if _UNREACHABLE.search(text):
        return "unreachable"
    return "transient"


def _is_whole_answer(error: Exception) -> bool:
    return type(error).__name__ == "NotSupportedError" and "RangeNotSupported" in str(error)
