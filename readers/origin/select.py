"""What a URL, a path or a list of them names: a folder, or files below one. Pure but for local
paths, which are looked at."""

from __future__ import annotations

import os
import re
import stat
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import unquote

from penstock.cache.errors import ConfigError
from penstock.cache.secrets import redact
from penstock.readers.origin.absent import status_of
from penstock.readers.origin.url_patterns import (
    Selection,
    by_pattern,
    is_file_name,
    is_pattern,
    is_tar_name,
    of_names,
    one_file,
)
from penstock.readers.origin.urls import check_url, local_path

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.readers.origin.urls import OneUrl, Url

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.\-]*)://")


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a dataset lies.

    root: a local path as bytes, else a URL or a path of a file system object. selection: of files
    below it; None: all that is there. folder: the URL as a folder's, where only the store can say
    whether it is one or the file that `selection` names; None where it is known.
    """

    root: bytes | str
    selection: Selection | None = None
    folder: str | None = None

    @property
    def local(self) -> bytes | None:
        """The root, if it is a path of this machine."""
        return self.root if isinstance(self.root, bytes) else None


@dataclass(frozen=True, slots=True)
class _Address:
    """The parts of a remote URL; start: its scheme, and with http its host."""

    start: str
    path: str
    query: str

    @classmethod
    def of(cls, url: str, *, is_path: bool) -> _Address:
        found = None if is_path else _SCHEME.match(url)
        if found is None:
            return cls("", url, "")
        start, rest, query = found[0], url[found.end() :], ""
        if found[1].lower() in ("http", "https"):
            host, slash, rest = rest.partition("/")
            rest, mark, tail = rest.partition("?")
            start, query = start + host + slash, mark + tail
        return cls(start, rest, query)

    @property
    def is_web(self) -> bool:
        return self.start.lower().startswith(("http://", "https://"))

    @property
    def least_parts(self) -> int:
        """Parts of the path that are a bucket or the like: no file lies above them."""
        is_rooted = self.is_web or self.start.lower() in ("", "memory://")
        return 0 if is_rooted else 1

    def folder(self, path: str) -> str:
        """The URL of a folder of the same store."""
        if not path and self.path.startswith("/"):
            path = "/"
        start = self.start.rstrip("/") if self.is_web and not path else self.start
        return f"{start}{path}{self.query}"


def place_of(url: Url, *, is_path: bool = False) -> Place:
    """What `url` names. is_path: it is of a file system object. Raises ConfigError."""
    check_url(url)
    if isinstance(url, list | tuple):
        return _of_list(url, is_path=is_path)
    local = None if is_path else local_path(url)
    if local is not None:
        return _local(local, url)
    text = os.fsdecode(url)
    return Place(root=text) if "::" in text else _remote(text, is_path=is_path)


def _local(path: bytes, url: OneUrl) -> Place:
    if not path or b"\0" in path:
        raise ConfigError(f"url: got {url!r}, wanted a folder or a URL such as s3://bucket/set.")
    text = os.fsdecode(path)
    found = status_of(path)
    if found is not None and stat.S_ISDIR(found.st_mode):
        return Place(root=path)
    name = os.path.basename(text)
    is_file = found is not None and stat.S_ISREG(found.st_mode)
    if name and (is_file or (is_tar_name(name) and not is_pattern(text))):
        return Place(root=os.path.dirname(path) or b".", selection=one_file(name))
    if not is_pattern(text):
        return Place(root=path)
    folder, selection = by_pattern(os.path.abspath(text))
    return Place(root=os.fsencode(folder or "/"), selection=selection)


def _remote(url: str, *, is_path: bool) -> Place:
    address = _Address.of(url, is_path=is_path)
    parts = address.path.split("/")
    name = parts[-1]
    if not name or len(parts) <= address.least_parts:
        return Place(root=url)
    # A question mark begins the query of a web server's URL.
    if is_pattern(address.path):
        folder, selection = by_pattern(address.path)
        if folder.count("/") + bool(folder) < address.least_parts:
            raise ConfigError(f"url: {redact(url)}: a pattern stands for files below a bucket.")
        return Place(root=address.folder(folder), selection=selection)
    if is_tar_name(name) or is_file_name(name):
        root = address.folder("/".join(parts[:-1]))
        named = one_file(unquote(name) if address.is_web else name)
        return Place(root=root, selection=named, folder=None if is_tar_name(name) else url)
    return Place(root=url)


def _of_list(urls: Sequence[OneUrl], *, is_path: bool) -> Place:
    paths = [None if is_path else local_path(url) for url in urls]
    if all(path is not None for path in paths):
        return _local_list([path for path in paths if path is not None])
    texts = [os.fsdecode(url) for url in urls]
    addresses = [_Address.of(text, is_path=is_path) for text in texts]
    least = addresses[0].least_parts
    roots = {(a.start, a.query, *a.path.split("/")[:least]) for a in addresses}
    if len(roots) > 1 or any("::" in text for text in texts) or None not in paths:
        told = " and ".join(redact(text) for text in _differing(texts, addresses, least))
        raise ConfigError(
            f"url: {told} don't lie in one store. Give files of one bucket or server, or join "
            "datasets: concat([Dataset(…), Dataset(…)])."
        )
    folder, names = _common([address.path for address in addresses])
    if folder.count("/") + bool(folder) < least or not all(names):
        raise ConfigError(
            f"url: got {redact(texts[0])} in a list, wanted files. Folders are joined by "
            "concat([Dataset(…), Dataset(…)])."
        )
    if addresses[0].is_web:
        names = [unquote(name) for name in names]
    return Place(root=addresses[0].folder(folder), selection=of_names(names))


def _differing(texts: list[str], addresses: list[_Address], least: int) -> list[str]:
    """Two URLs that lie in different stores, else the first ones."""

    def root(address: _Address) -> tuple[str, ...]:
        return address.start, address.query, *address.path.split("/")[:least]

    others = (
        text for text, a in zip(texts, addresses, strict=True) if root(a) != root(addresses[0])
    )
    return [texts[0], next(others, texts[-1])]


def _local_list(paths: list[bytes]) -> Place:
    texts = [os.path.abspath(os.fsdecode(path)) for path in paths]
    for path, text in zip(paths, texts, strict=True):
        if not path or b"\0" in path or os.path.isdir(text):
            raise ConfigError(
                f"url: got {os.fsdecode(path)!r} in a list, wanted files. Folders are joined by "
                "concat([Dataset(…), Dataset(…)])."
            )
    folder, names = _common(texts)
    return Place(root=os.fsencode(folder or "/"), selection=of_names(names))


def _common(paths: list[str]) -> tuple[str, list[str]]:
    """The folder that all lie in, and their names below it; no part of it is a pattern."""
    split = [path.split("/") for path in paths]
    shared = 0
    while all(len(parts) > shared + 1 for parts in split):
        part = split[0][shared]
        if is_pattern(part) or any(parts[shared] != part for parts in split):
            break
        shared += 1
    return "/".join(split[0][:shared]), ["/".join(parts[shared:]) for parts in split]
