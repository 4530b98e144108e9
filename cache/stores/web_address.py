"""Decide where a web request may go: origins, public addresses, redirects, proxies and logins.

A redirect comes from the server and isn't trusted: another origin receives no login, no cookie and
none of the user's headers; a redirect from https to http is refused; and a public server can't
redirect to an address of this machine or network (a metadata service, another machine's console).
"""

from __future__ import annotations

import base64
import ipaddress
import re
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import quote, urljoin, urlsplit, urlunsplit

from penstock.cache.base import RequestError

if TYPE_CHECKING:
    from collections.abc import Mapping

_PORTS = {"http": 80, "https": 443}
_UNSAFE = re.compile(r"[\x00-\x20\x7f]")
_NAT64 = ipaddress.ip_network("64:ff9b::/96")


class WebOrigin(NamedTuple):
    """A server, identified by scheme, host (in lower case) and port."""

    scheme: str
    host: str
    port: int

    @property
    def url(self) -> str:
        """The origin as the beginning of a URL."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}"

    @property
    def host_header(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == _PORTS[self.scheme] else f"{host}:{self.port}"


class Hop(NamedTuple):
    """One request of a chain of redirects.

    is_origin: True if it may have the user's headers. from_public: True if a public server
    redirected to it, so that its address must be public.
    """

    url: str
    is_origin: bool = True
    from_public: bool = False

    def redirected(self, location: str, *, is_public: bool) -> Hop:
        """Return the request to which an answer with this Location redirects. is_public: the
        answer's server is public. Raises RequestError."""
        url = redirect_target(self.url, location)
        is_origin = self.is_origin and origin_of(url) == origin_of(self.url)
        return Hop(url, is_origin, self.from_public or is_public)


def origin_of(url: str) -> WebOrigin:
    """Return the origin of an http(s) URL. Raises ValueError."""
    parts = urlsplit(url)
    scheme, host = parts.scheme.lower(), parts.hostname
    if scheme not in _PORTS or not host or _UNSAFE.search(host):
        raise ValueError("not an http or https URL with a host")
    if not host.isascii():
        host = host.encode("idna").decode()
    return WebOrigin(scheme, host.lower().rstrip("."), parts.port or _PORTS[scheme])


@lru_cache(maxsize=1024)
def request_origin(url: str) -> WebOrigin:
    """Return the origin of a request's URL. Raises RequestError."""
    try:
        return origin_of(url)
    except (ValueError, UnicodeError):
        raise RequestError("refused", "not an http or https URL with a host") from None


@lru_cache(maxsize=1024)
def target_of(url: str) -> str:
    """Return the target of a request line: path and query, with other characters quoted."""
    parts = urlsplit(url)
    text = parts.path or "/"
    if parts.query:
        text = f"{text}?{parts.query}"
    is_plain = text.isascii() and not _UNSAFE.search(text)
    return text if is_plain else quote(text, safe="/?#[]@!$&'()*+,;=:%~-._")


def redirect_target(url: str, location: str) -> str:
    """Return the URL to which an answer of `url` with this Location redirects.

    Raises RequestError for a redirect that is never followed. Its message names only origins,
    because paths and queries may be signed."""
    try:
        found = urljoin(url, location.strip())
        parts = urlsplit(found)
        # A login in a Location is removed: it comes from the server.
        found = urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], *parts[2:4], ""))
        target = origin_of(found)
    except (ValueError, UnicodeError):
        scheme = location.partition(":")[0][:20] if ":" in location[:20] else ""
        kind = f" ({scheme!r}:)" if scheme.isalnum() else ""
        raise RequestError(
            "refused", f"the server redirects to a URL that isn't http or https{kind}"
        ) from None
    if origin_of(url).scheme == "https" and target.scheme != "https":
        raise RequestError(
            "refused", f"the server redirects from https to {target.url}, without TLS"
        )
    return found


def is_public(address: str) -> bool:
    """Return True if an IP address is public: not of this machine, a private network or reserved.

    An IPv6 address that contains an IPv4 address is public if the IPv4 address is."""
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return False
    if isinstance(found, ipaddress.IPv6Address):
        inner = found.ipv4_mapped or found.sixtofour or (found.teredo and found.teredo[1])
        if inner is None and found in _NAT64:
            inner = ipaddress.IPv4Address(int(found) & 0xFFFFFFFF)
        if inner is None and int(found) >> 32 == 0:  # ::a.b.c.d, which is obsolete
            inner = ipaddress.IPv4Address(int(found))
        if inner:
            return is_public(str(inner))
    return found.is_global and not found.is_multicast and not found.is_reserved


def basic_auth(login: Any) -> str:
    """Return the Authorization header of (user, password), a tuple or aiohttp's BasicAuth."""
    text = base64.b64encode(f"{login[0]}:{login[1]}".encode()).decode()
    return f"Basic {text}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Proxies:
    """The proxies through which origins are reached.

    by_scheme: http://[user:password@]host:port for "http", "https" or "all". excludes: the hosts
    that are reached directly, in the syntax of NO_PROXY.
    """

    by_scheme: Mapping[str, str] = field(default_factory=dict)
    excludes: str = ""

    @classmethod
    def of_environment(cls) -> Proxies:
        """Read the proxies from the environment, as urllib does."""
        from urllib.request import getproxies_environment

        found = dict(getproxies_environment())
        return cls(excludes=found.pop("no", ""), by_scheme=found)

    def of(self, origin: WebOrigin) -> str | None:
        """Return the proxy for an origin; None if it is reached directly."""
        found = self.by_scheme.get(origin.scheme) or self.by_scheme.get("all")
        if not found:
            return None
        from urllib.request import proxy_bypass_environment  # type: ignore[attr-defined]

        host = f"{origin.host}:{origin.port}"
        if proxy_bypass_environment(host, {"no": self.excludes, **self.by_scheme}):
            return None
        return found if "://" in found else f"http://{found}"
