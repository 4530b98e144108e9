"""Parse the argument that names a dataset: a URL, a path, a pattern or a list of them.

The result is a folder, or files below one. No file is read; only the status of local paths is
looked up, to tell a file from a folder.
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import unquote

from penstock.cache import ConfigError, redact
from penstock.readers.files import INDEX_SUFFIX
from penstock.readers.origin.file_selection import (
    by_pattern,
    is_file_name,
    is_pattern,
    is_tar_name,
    of_names,
    one_file,
)
from penstock.readers.origin.urls import SCHEME, check_url, local_path, status_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.readers.origin.file_selection import FileSelection
    from penstock.readers.origin.urls import OneUrl, Url

_SUFFIX = os.fsdecode(INDEX_SUFFIX)


def options_scope(url: str) -> str:
    """Return the part of a URL that `storage_options` apply to: its scheme, and for http its host
    too."""
    scheme, _, rest = url.partition("://")
    host = rest.partition("/")[0].rpartition("@")[2]
    return f"{scheme.lower()}://{host}" if scheme.lower() in ("http", "https") else scheme.lower()


def index_url(
    url: str, selection: FileSelection | None, *, is_path: bool = False, variant: str = ""
) -> str | None:
    """Return the URL of the folder for a remote dataset's index, such as
    `s3://bucket/photos.penstock`.

    Return None if there is no place next to the data: for the root of a bucket, host or repository
    (another bucket of that name may belong to anyone), and for a chain of file systems. is_path:
    True for a path of a file system object. variant: the key of an arrangement.
    """
    if "::" in url:
        return None
    scheme, mark, rest = ("", "", url) if is_path else url.partition("://")
    path, question, query = rest.partition("?") if scheme in ("http", "https") else (rest, "", "")
    path = path.rstrip("/")
    ending = f"{f'-{variant}' * bool(variant)}{_SUFFIX}{question}{query}"
    if selection is not None:
        name = os.fsdecode(selection.index_name).removesuffix(_SUFFIX)
        return f"{scheme}{mark}{path}{'/' * bool(path)}{name}{ending}"
    roots = 0 if scheme == "memory" else 1
    if scheme == "hf":
        roots = 3 if path.startswith(("datasets/", "spaces/", "buckets/")) else 2
    if not path or path.count("/") < roots:
        return None
    return f"{scheme}{mark}{path}{ending}"


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetPlace:
    """The root and the selected files of a dataset.

    root: a local path as bytes, else a URL or a path of a file system object. selection: files
    below it; None means all files. folder: the URL read as a folder's, if only the store can tell
    whether it is a folder or the file in `selection`; else None.
    """

    root: bytes | str
    selection: FileSelection | None = None
    folder: str | None = None


@dataclass(frozen=True, slots=True)
class _Address:
    """The parts of a remote URL. start: its scheme, and for http its host."""

    start: str
    path: str
    query: str

    @classmethod
    def of(cls, url: str, *, is_path: bool) -> _Address:
        found = None if is_path else SCHEME.match(url)
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
        """Return the number of leading path parts that are a bucket or the like. No file lies above
        them."""
        is_rooted = self.is_web or self.start.lower() in ("", "memory://")
        return 0 if is_rooted else 1

    @property
    def store(self) -> tuple[str, ...]:
        """Return what is equal for all files of one bucket or server."""
        return self.start, self.query, *self.path.split("/")[: self.least_parts]

    def folder(self, path: str) -> str:
        """Return the URL of a folder of the same store."""
        if not path and self.path.startswith("/"):
            path = "/"
        start = self.start.rstrip("/") if self.is_web and not path else self.start
        return f"{start}{path}{self.query}"


def place_of(url: Url, *, is_path: bool = False) -> DatasetPlace:
    """Parse a URL into its root and its selection. is_path: True for a path of a file system
    object. Raises ConfigError."""
    check_url(url)
    if isinstance(url, list | tuple):
        return _of_list(url, is_path=is_path)
    local = None if is_path else local_path(url)
    if local is not None:
        return _local(local, url)
    text = os.fsdecode(url)
    return DatasetPlace(root=text) if "::" in text else _remote(text, is_path=is_path)


def _local(path: bytes, url: OneUrl) -> DatasetPlace:
    if not path or b"\0" in path:
        raise ConfigError(f"url: got {url!r}, wanted a folder or a URL such as s3://bucket/set.")
    text = os.fsdecode(path)
    found = status_of(path)
    if found is not None and stat.S_ISDIR(found.st_mode):
        return DatasetPlace(root=path)
    name = os.path.basename(text)
    is_file = found is not None and stat.S_ISREG(found.st_mode)
    if name and (is_file or (is_tar_name(name) and not is_pattern(text))):
        return DatasetPlace(root=os.path.dirname(path) or b".", selection=one_file(name))
    if not is_pattern(text):
        return DatasetPlace(root=path)
    folder, selection = by_pattern(os.path.abspath(text))
    return DatasetPlace(root=os.fsencode(folder or "/"), selection=selection)


def _remote(url: str, *, is_path: bool) -> DatasetPlace:
    address = _Address.of(url, is_path=is_path)
    parts = address.path.split("/")
    name = parts[-1]
    if not name or len(parts) <= address.least_parts:
        return DatasetPlace(root=url)
    # In an http URL a question mark begins the query.
    if is_pattern(address.path):
        folder, selection = by_pattern(address.path)
        if folder.count("/") + bool(folder) < address.least_parts:
            raise ConfigError(
                f"url: {redact(url)}: the bucket's name can't be a pattern. Name one bucket, and a "
                "pattern of the files in it."
            )
        return DatasetPlace(root=address.folder(folder), selection=selection)
    if is_tar_name(name) or is_file_name(name):
        root = address.folder("/".join(parts[:-1]))
        named = one_file(unquote(name) if address.is_web else name)
        return DatasetPlace(root=root, selection=named, folder=None if is_tar_name(name) else url)
    return DatasetPlace(root=url)


def _of_list(urls: Sequence[OneUrl], *, is_path: bool) -> DatasetPlace:
    paths = [] if is_path else [path for path in map(local_path, urls) if path is not None]
    is_local, texts = len(paths) == len(urls), [os.fsdecode(url) for url in urls]
    are_files = not any(not path or b"\0" in path or os.path.isdir(path) for path in paths)
    if is_local:
        texts = [os.path.abspath(os.fsdecode(path)) for path in paths]
    addresses = [_Address.of(text, is_path=is_path or is_local) for text in texts]
    first = addresses[0]
    strange = (text for text, a in zip(texts, addresses, strict=True) if a.store != first.store)
    other = next(strange, None if is_local else next((t for t in texts if "::" in t), None))
    if other is not None or (paths and not is_local):
        raise ConfigError(
            f"url: {redact(texts[0])} and {redact(other or texts[-1])} aren't in one store. "
            "Give files of one bucket or server, or join datasets: "
            "concat([Dataset(…), Dataset(…)])."
        )
    folder, names = _common([address.path for address in addresses])
    if not are_files or folder.count("/") + bool(folder) < first.least_parts or not all(names):
        shown = next((t for t in texts if is_local and os.path.isdir(t)), texts[0])
        raise ConfigError(
            f"url: got {redact(shown)} in a list, wanted files. To join folders, use "
            "concat([Dataset(…), Dataset(…)])."
        )
    if is_local:
        return DatasetPlace(root=os.fsencode(folder or "/"), selection=of_names(names))
    if first.is_web:
        names = [unquote(name) for name in names]
    return DatasetPlace(root=first.folder(folder), selection=of_names(names))


def _common(paths: list[str]) -> tuple[str, list[str]]:
    """Return the folder that contains all paths, and their names below it. No part of the folder is
    a pattern."""
    split = [path.split("/") for path in paths]
    shared = 0
    while all(len(parts) > shared + 1 for parts in split):
        part = split[0][shared]
        if is_pattern(part) or any(parts[shared] != part for parts in split):
            break
        shared += 1
    return "/".join(split[0][:shared]), ["/".join(parts[shared:]) for parts in split]
