"""Folders of a web server, read from the links of its index pages.

obstore lists http by WebDAV only, which few servers speak. nginx's autoindex, Apache's and
Python's http.server all answer a folder with a page of links.
"""

from __future__ import annotations

from html.parser import HTMLParser
from typing import TYPE_CHECKING, Protocol
from urllib.parse import quote, unquote, urljoin, urlsplit, urlunsplit

from penstock.cache.base.store import RequestError
from penstock.cache.threads import ordered

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from penstock.cache.base.store import ObjectInfo

_PAGE_BYTES = 128 * 2**20
"""A page of a million links is some 100 MB; a server that never ends is cut off."""
_HEADS = 16
"""Pages tell sizes for people only, so each file is asked for its own; so many at a time."""


class _Page(Protocol):
    def __call__(self, url: str, *, most_bytes: int) -> bytes: ...


class HttpListing:
    """An HttpListing lists folders of a web server by the links of their pages.

    url: of the root, quoted; info: of the store; page: what a URL shows.
    """

    def __init__(self, url: str, info: Callable[[str], ObjectInfo | None], page: _Page) -> None:
        self._url = urlsplit(url)
        self._base = unquote(self._url.path, errors="surrogateescape").rstrip("/")
        self._info = info
        self._ask = page

    def walk(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """All objects below a folder. Raises RequestError."""
        waiting = [prefix]
        while waiting:
            folder = waiting.pop()
            files, folders = self._names(folder)
            yield from self._measured(folder, files)
            waiting += [_join(folder, name) for name in folders]

    def top(self, prefix: str = "") -> tuple[list[ObjectInfo], list[str]]:
        """Objects directly in a folder, and names of its folders. Raises RequestError."""
        files, folders = self._names(prefix)
        return list(self._measured(prefix, files)), folders

    def _measured(self, folder: str, names: list[str]) -> Iterator[ObjectInfo]:
        paths = [_join(folder, name) for name in names]
        found = ordered(self._info, paths, workers=_HEADS, ahead=2 * _HEADS, name="list")
        yield from (info for info in found if info is not None)

    def _names(self, folder: str) -> tuple[list[str], list[str]]:
        try:
            page = self._page(folder)
        except RequestError as error:
            if error.kind == "missing":
                return [], []
            if error.kind == "denied":
                raise RequestError(
                    "denied",
                    f"{error}: the server shows no listing of this folder. Turn its index pages "
                    "on (nginx: autoindex on), or use a pack with its manifest",
                ) from None
            raise
        return links(page, _join(self._base, folder))

    def _page(self, folder: str) -> str:
        path = _quoted(f"{_join(self._base, folder)}/")
        url = urlunsplit((self._url.scheme, self._url.netloc, path, self._url.query, ""))
        return self._ask(url, most_bytes=_PAGE_BYTES).decode("utf-8", "replace")


def links(page: str, folder: str) -> tuple[list[str], list[str]]:
    """Names of files and of folders that an index page of `folder` (a path on the server, not
    quoted) links to, each once, in the page's order."""
    parser = _Links()
    parser.feed(page)
    base = folder.strip("/") + "/" if folder.strip("/") else ""
    files: dict[str, None] = {}
    folders: dict[str, None] = {}
    for link in parser.found:
        # A link with a query sorts the page; one with a host leads elsewhere.
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
