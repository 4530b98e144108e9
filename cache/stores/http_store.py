"""Open and read web servers: http and https, hubs that redirect to a CDN, presigned URLs.

`web_client` makes the requests, so that no redirect sends a login to another origin, no answer is
longer than requested, and a hanging request can be aborted. Options have the names of fsspec, of
aiohttp inside them, and of obstore's client options.

Folders are listed from the links of index pages: obstore lists http only by WebDAV, which few
servers support. nginx's autoindex, Apache's and Python's http.server all answer a folder with a
page of links.
"""

from __future__ import annotations

from dataclasses import replace
from html.parser import HTMLParser
from typing import TYPE_CHECKING
from urllib.parse import quote, unquote, urljoin, urlsplit

from penstock.cache.base import ObjectInfo, RequestError, Store
from penstock.cache.errors import ConfigError
from penstock.cache.secrets import plain_query, redact
from penstock.cache.stores.storage_options import HTTP_OPTIONS, StoreAddress, scope_of
from penstock.cache.stores.web_address import basic_auth, origin_of
from penstock.cache.stores.web_client import WebClient, open_client
from penstock.cache.stores.web_objects import WebObjects
from penstock.cache.threads import ordered

if TYPE_CHECKING:
    from collections.abc import Mapping


_PAGE_BYTES = 128 * 2**20
"""The longest index page; one of a million links has about 100 MB."""
_HEADS = 16
"""Concurrent requests for the sizes of a page's files, because pages show only rounded sizes."""


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


class _Links(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "a":
            self.found += [value for name, value in attrs if name == "href" and value]


class HttpStore(WebObjects):
    """The objects below a URL of a web server.

    address: its URL is quoted and has no login. headers: the user's, for the origin only.
    """

    def __init__(
        self, address: StoreAddress, client: WebClient, *, headers: Mapping[str, str], scope: str
    ) -> None:
        super().__init__(address, client, headers=headers, scope=scope)
        root = urlsplit(address.url)
        self._folder_path = unquote(root.path, errors="surrogateescape")
        self._begin = root._replace(query="").geturl().rstrip("/")
        self._query = f"?{root.query}" if root.query else ""

    def _url(self, method: str, path: str) -> str:
        return f"{self._begin}/{_quoted(path)}{self._query}"

    def list_folder(self, prefix: str = "") -> tuple[list[ObjectInfo], list[str]]:
        """List a folder by the links of its index page, and request the sizes of its files."""
        try:
            url = self._url("GET", _join(prefix, ""))
            page = self.page(url, most_bytes=_PAGE_BYTES)
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
        folder = f"{self._folder_path}/{prefix}"
        files, folders = page_links(page.decode("utf-8", "replace"), folder)
        paths = [_join(prefix, name) for name in files]
        found = ordered(self.info, paths, workers=_HEADS, ahead=2 * _HEADS, name="list")
        return [info for info in found if info is not None], folders

    def _info(self, path: str) -> ObjectInfo:
        if not path:
            raise RequestError("missing", "a folder's page is no object")
        return super()._info(path)


def _join(folder: str, name: str) -> str:
    return f"{folder}/{name}" if folder else name


def open_http(address: StoreAddress) -> Store:
    """Open the store of an http(s) URL. Raises ConfigError."""
    options, secrets, url = HTTP_OPTIONS.read(address.options), address.secrets, address.url
    try:
        parts = urlsplit(url)
        origin_of(url)
    except (ValueError, UnicodeError):
        raise ConfigError(f"{redact(url)}: not a URL, wanted https://<host>/….") from None
    headers = options.client.get("default_headers", {})
    if parts.username is not None:
        # As a header: in the URL it would appear in the messages of other libraries.
        login = unquote(parts.username), unquote(parts.password or "")
        headers.setdefault("Authorization", basic_auth(login))
        secrets = (headers["Authorization"], *secrets)
    parts = parts._replace(
        netloc=parts.netloc.rpartition("@")[2], path=parts.path.rstrip("/"), fragment=""
    )
    address = replace(address, url=parts.geturl(), secrets=secrets)
    client, scope = open_client(options, address.policy), scope_of("http", repr(plain_query(url)))
    return HttpStore(address, client, headers=headers, scope=scope)
