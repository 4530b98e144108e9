"""What a store is opened from: a URL, its storage_options, and what must never be shown of them."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from penstock.cache.errors import ConfigError
from penstock.cache.secrets import redact

if TYPE_CHECKING:
    from collections.abc import Mapping

    from penstock.cache.base.fetch_policy import FetchPolicy


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreAddress:
    """A StoreAddress is what a store is opened from: a URL and its storage_options.

    scheme: in lower case; policy: timeouts that the options give; secrets: texts of both that must
    not be shown.
    """

    url: str
    scheme: str
    options: Mapping[str, Any]
    policy: FetchPolicy
    secrets: tuple[str, ...]

    @property
    def display_url(self) -> str:
        """The URL for people, without credentials."""
        return redact(self.url).rstrip("/")


def scope_of(*parts: str) -> str:
    """Hash what a store is made of, so that two stores of one URL are told apart."""
    return hashlib.sha256("\0".join(parts).encode("utf-8", "surrogatepass")).hexdigest()[:16]


def header_texts(headers: Mapping[Any, Any]) -> dict[str, str]:
    """Make text of headers' names and values. Raises ConfigError for what no header can hold."""
    found = {}
    for name, value in headers.items():
        texts = [
            each.decode("latin-1") if isinstance(each, bytes) else str(each)
            for each in (name, value)
        ]
        if any(mark in text for text in texts for mark in "\r\n\0") or ":" in texts[0]:
            raise ConfigError(
                f"storage_options: headers: {texts[0][:40]!r} can't be sent as a header: wanted "
                "a name without a colon, and no line breaks in its value."
            )
        found[texts[0]] = texts[1]
    return found
