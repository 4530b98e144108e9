"""What the headers of an answer say: the object's version, how it is packed, when to ask again."""

from __future__ import annotations

import email.utils
import re
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

_SIZE_AND_TIME = re.compile(r"\d+-\d+\.\d{6}")


def version_of(headers: Mapping[str, str], size_bytes: int) -> str:
    """Tell an object's version: its etag without quotes; else size and time; else ""."""
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


def encoding_of(headers: Mapping[str, str]) -> str:
    """Tell how an answer's bytes are compressed; "" if they are the object's own."""
    coding = headers.get("content-encoding", "").strip().lower()
    return "" if coding == "identity" else coding


def retry_after_s(headers: Mapping[str, Any]) -> float | None:
    """Seconds that a Retry-After header asks for: a number, or a date (RFC 9110, 10.2.3)."""
    text = next((str(v) for k, v in headers.items() if str(k).lower() == "retry-after"), "")
    if text.strip().isdigit():
        return float(text)
    try:
        return max(0.0, email.utils.parsedate_to_datetime(text).timestamp() - time.time())
    except (TypeError, ValueError):
        return None
