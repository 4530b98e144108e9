"""Proxies of web requests: which one an origin is reached through."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from penstock.cache.stores.web_address import WebOrigin


@dataclass(frozen=True, slots=True, kw_only=True)
class Proxies:
    """Proxies tell which proxy an origin is reached through.

    by_scheme: of "http", "https" or "all": http://[user:password@]host:port; excludes: hosts that
    are reached without (NO_PROXY's syntax).
    """

    by_scheme: Mapping[str, str] = field(default_factory=dict)
    excludes: str = ""

    @classmethod
    def of_environment(cls) -> Proxies:
        """What the environment says, as urllib understands it."""
        from urllib.request import getproxies_environment

        found = dict(getproxies_environment())
        return cls(excludes=found.pop("no", ""), by_scheme=found)

    def of(self, origin: WebOrigin) -> str | None:
        """The proxy for an origin; None: it is reached directly."""
        found = self.by_scheme.get(origin.scheme) or self.by_scheme.get("all")
        if not found:
            return None
        from urllib.request import proxy_bypass_environment  # type: ignore[attr-defined]

        host = f"{origin.host}:{origin.port}"
        if proxy_bypass_environment(host, {"no": self.excludes, **self.by_scheme}):
            return None
        return found if "://" in found else f"http://{found}"
