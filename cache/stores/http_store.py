"""Open and read web servers: http and https, hubs that redirect to a CDN, presigned URLs.

`web_client` makes the requests, so that no redirect sends a login to another origin, no answer is
longer than requested, and a hanging request can be aborted. Options have the names of fsspec, of
aiohttp inside them, and of obstore's client options.

Folders are listed from the links of index pages: obstore lists http only by WebDAV, which few
servers support. nginx's autoindex, Apache's and Python's http.server all answer a folder with a
page of links.
"""

from __future__ import annotations

import mmap
import os
from html.parser import HTMLParser
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import quote, unquote, urljoin, urlsplit, urlunsplit

from penstock.cache.base import FORKED, Answer, ObjectInfo, RequestError
from penstock.cache.errors import ConfigError
from penstock.cache.secrets import plain_query, redact
from penstock.cache.stores.storage_options import (
    COMMON_OPTIONS,
    client_options,
    header_texts,
    option_mapping,
    parse_seconds,
    read_options,
    scope_of,
    set_verify,
    split_words,
    unknown_option_error,
)
from penstock.cache.stores.tls import tls_context
from penstock.cache.stores.web_address import Proxies, basic_auth, origin_of
from penstock.cache.stores.web_client import WebClient
from penstock.cache.stores.web_objects import WebObjects
from penstock.cache.threads import ordered

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from penstock.cache.base import FetchPolicy, Store
    from penstock.cache.stores.storage_options import StoreAddress, StoreOptions

_CLIENT_NAMES = split_words(
    "allow_http allow_invalid_certificates connect_timeout default_content_type default_headers "
    "http1_only http2_keep_alive_interval http2_keep_alive_timeout http2_keep_alive_while_idle "
    "http2_only pool_idle_timeout pool_max_idle_per_host proxy_ca_certificate proxy_excludes "
    "proxy_url randomize_addresses read_timeout root_certificate timeout user_agent"
)


def _headers(found: StoreOptions, value: Any) -> None:
    found.client.setdefault("default_headers", {}).update(option_mapping(value, "headers"))


def _client_kwargs(found: StoreOptions, value: Any) -> None:
    """Read aiohttp's arguments of a session: its headers and its login."""
    for name, inner in option_mapping(value, "client_kwargs").items():
        if name == "headers":
            _headers(found, inner)
        elif name == "auth" and inner is not None:
            _headers(found, {"Authorization": basic_auth(inner)})
        elif name == "verify" or (name == "ssl" and isinstance(inner, bool)):
            set_verify(found, inner)
        elif name not in ("auth", "timeout", "connector", "trust_env", "raise_for_status"):
            raise unknown_option_error("client_kwargs", name, "headers, auth, verify")


def _client_options(found: StoreOptions, value: Any) -> None:
    """Read the client_options of obstore that concern a web request."""
    given = option_mapping(value, "client_options")
    for name in given:
        if name not in _CLIENT_NAMES:
            raise unknown_option_error("client_options", name, ", ".join(sorted(_CLIENT_NAMES)))
    headers = given.get("default_headers")
    client_options(found, {n: v for n, v in given.items() if n != "default_headers"})
    _headers(found, headers)


_HTTP_SPECIAL = {
    **COMMON_OPTIONS,
    "client_options": _client_options,
    "headers": _headers,
    "client_kwargs": _client_kwargs,
    "auth": lambda found, value: _client_kwargs(found, {"auth": value}),
}


def http_options(options: Mapping[str, Any]) -> StoreOptions:
    """Read the options of fsspec's http: headers, client_kwargs. Raises ConfigError."""
    return read_options("http", options, frozenset(), {}, _HTTP_SPECIAL, strip="")


_PAGE_BYTES = 128 * 2**20
"""The longest index page; one of a million links has about 100 MB."""
_HEADS = 16
"""Concurrent requests for the sizes of a page's files, because pages show only rounded sizes."""


class _Page(Protocol):
    def __call__(self, url: str, *, most_bytes: int) -> bytes: ...


class HttpListing:
    """The folders of a web server, which are listed from the links of their pages.

    url: the quoted URL of the root. info: returns the size and version of an object. page: reads
    the page of a URL.
    """

    def __init__(self, url: str, info: Callable[[str], ObjectInfo | None], page: _Page) -> None:
        self._url = urlsplit(url)
        self._base = unquote(self._url.path, errors="surrogateescape").rstrip("/")
        self._info = info
        self._read_page = page

    def walk(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """Yield all objects below a folder. Raises RequestError."""
        waiting = [prefix]
        while waiting:
            folder = waiting.pop()
            files, folders = self._names(folder)
            yield from self._measured(folder, files)
            waiting += [_join(folder, name) for name in folders]

    def list_folder(self, prefix: str = "") -> tuple[list[ObjectInfo], list[str]]:
        """Return the objects directly in a folder, and the names of its subfolders. Raises
        RequestError."""
        files, folders = self._names(prefix)
        return list(self._measured(prefix, files)), folders

    def _measured(self, folder: str, names: list[str]) -> Iterator[ObjectInfo]:
        paths = [_join(folder, name) for name in names]
        found = ordered(self._info, paths, workers=_HEADS, ahead=2 * _HEADS, name="list")
        yield from (info for info in found if info is not None)

    def _names(self, folder: str) -> tuple[list[str], list[str]]:
        path = _quoted(f"{_join(self._base, folder)}/")
        url = urlunsplit((self._url.scheme, self._url.netloc, path, self._url.query, ""))
        try:
            page = self._read_page(url, most_bytes=_PAGE_BYTES).decode("utf-8", "replace")
        except RequestError as error:
            if error.kind == "missing":
                return [], []
            if error.kind == "denied":
                raise RequestError(
                    "denied",
                    f"{error}: the server doesn't list this folder. Enable its index pages "
                    "(nginx: autoindex on), or use a pack with its manifest",
                ) from None
            raise
        return page_links(page, _join(self._base, folder))


def page_links(page: str, folder: str) -> tuple[list[str], list[str]]:
    """Return the names of the files and folders that an index page links to, each once, in the
    page's order. folder: the page's path on the server, not quoted."""
    parser = _Links()
    parser.feed(page)
    base = folder.strip("/") + "/" if folder.strip("/") else ""
    files: dict[str, None] = {}
    folders: dict[str, None] = {}
    for link in parser.found:
        # A link with a query sorts the page; one with a host leads to another server.
        parts = urlsplit(link)
        if parts.query or parts.netloc or parts.scheme or not parts.path:
            continue
        path = urljoin("/" + _quoted(base), parts.path)
        name = unquote(path, errors="surrogateescape").lstrip("/")
        if not name.startswith(base) or name == base:
            continue
        first, slash, rest = name.removeprefix(base).partition("/")
        if first not in ("", ".", "..") and not rest:
            (folders if slash else files)[first] = None
    return list(files), list(folders)


def _quoted(text: str) -> str:
    return quote(text, errors="surrogateescape")


def _join(folder: str, name: str) -> str:
    return f"{folder}/{name}" if folder and name else folder or name


class _Links(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "a":
            self.found += [value for name, value in attrs if name == "href" and value]


class HttpStore:
    """The objects below a URL of a web server. It owns the client."""

    def __init__(
        self,
        client: WebClient,
        objects: WebObjects,
        *,
        base: str,
        url: str,
        scope: str,
        secrets: tuple[str, ...] = (),
    ) -> None:
        self.url = url
        self.scope = scope
        self.secrets = secrets
        self._client = client
        self._objects = objects
        self._listing = HttpListing(base, self.info, objects.page)
        self._pid = os.getpid()

    def __repr__(self) -> str:
        return f"HttpStore({self.url!r})"

    def walk(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """Yield all objects below a folder. Raises RequestError."""
        self._begin(prefix)
        yield from self._listing.walk(prefix)

    def list_folder(self, prefix: str = "") -> tuple[list[ObjectInfo], list[str]]:
        """Return the objects directly in a folder, and the names of its subfolders. Raises
        RequestError."""
        self._begin(prefix)
        return self._listing.list_folder(prefix)

    def info(self, path: str) -> ObjectInfo | None:
        """Return the size and version of an object; None if it is missing. Raises RequestError."""
        self._begin(path)
        if not path:  # the page of a folder is no object
            return None
        found = self._objects.info(path)
        if found is None:
            return None
        return ObjectInfo(path=path, size_bytes=found.size_bytes, version=found.version)

    def read(
        self,
        path: str,
        span: tuple[int, int] | None = None,
        *,
        version: str | None = None,
        most_bytes: int | None = None,
    ) -> Answer:
        """Read bytes of an object. Raises RequestError."""
        self._begin(path)
        if span is not None and span[0] >= span[1]:
            raise RequestError("refused", f"an empty range {span}")
        return self._objects.read(path, span, version=version, most_bytes=most_bytes)

    def put(self, local: str, path: str) -> None:
        """Upload a local file. Raises RequestError."""
        self._begin(path)
        with open(os.fsencode(local), "rb") as file:
            if not os.fstat(file.fileno()).st_size:
                return self._objects.put(path, memoryview(b""))
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                view = memoryview(data)
                try:
                    return self._objects.put(path, view)
                finally:
                    view.release()

    def abort(self) -> None:
        """End all requests at once."""
        if os.getpid() == self._pid:
            self._client.abort()

    def close(self) -> None:
        """Close the connections. Safe to call twice."""
        self.abort()

    def _begin(self, path: str) -> None:
        if os.getpid() != self._pid:
            raise RequestError("refused", FORKED)
        try:
            path.encode()
        except UnicodeEncodeError:
            raise RequestError("refused", "its name isn't UTF-8: rename it") from None


def open_http(address: StoreAddress) -> Store:
    """Open the store of an http(s) URL. Raises ConfigError."""
    options, secrets, url = http_options(address.options), address.secrets, address.url
    try:
        parts = urlsplit(url)
        origin_of(url)
    except (ValueError, UnicodeError):
        raise ConfigError(
            f"{redact(url)}: not a URL, wanted {url.partition(':')[0]}://<host>/…."
        ) from None
    if parts.username is not None:
        # As a header: in the URL it would appear in the messages of other libraries.
        login = unquote(parts.username), unquote(parts.password or "")
        headers = options.client.setdefault("default_headers", {})
        headers.setdefault("Authorization", basic_auth(login))
        secrets = (headers["Authorization"], *secrets)
    base = urlunsplit(
        (parts.scheme, parts.netloc.rpartition("@")[2], parts.path.rstrip("/"), parts.query, "")
    )
    client = web_client(options, address.policy)

    def object_url(_method: str, key: str) -> str:
        root = urlsplit(base)
        path = f"{root.path.rstrip('/')}/{quote(key)}"
        return urlunsplit((root.scheme, root.netloc, path, root.query, ""))

    objects = WebObjects(
        client,
        object_url,
        headers=header_texts(options.client.get("default_headers") or {}),
        secrets=secrets,
    )
    return HttpStore(
        client,
        objects,
        base=base,
        url=redact(base),
        scope=scope_of("http", repr(plain_query(url))),
        secrets=secrets,
    )


def web_client(options: StoreOptions, policy: FetchPolicy) -> WebClient:
    """Create a client with the same certificates, timeouts and proxies as obstore's.

    Raises ConfigError.
    """
    given = options.client
    proxies = None
    if proxy := given.get("proxy_url"):
        excludes = str(given.get("proxy_excludes") or "")
        proxies = Proxies(by_scheme={"all": str(proxy)}, excludes=excludes)
    own, anybody = given.get("root_certificate"), bool(given.get("allow_invalid_certificates"))
    total = given.get("timeout")
    return WebClient(
        connect_timeout_s=policy.connect_timeout_s,
        read_timeout_s=policy.read_timeout_s,
        timeout_s=policy.retry_timeout_s if total is None else parse_seconds(total, "timeout"),
        tls=lambda: tls_context(own=own, anybody=anybody),
        proxies=proxies,
        agent=str(given.get("user_agent") or "penstock"),
    )
