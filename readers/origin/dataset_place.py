"""Parse the argument that names a dataset: a URL, a path, a pattern or a list of them.

The result is a folder, or files below one. No file is read; only the status of local paths is
looked up, to tell a file from a folder.
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from urllib.parse import unquote

from penstock.cache import ConfigError, redact
from penstock.readers.files import INDEX_SUFFIX
from penstock.readers.origin.file_selection import (
    FileSelection,
    is_file_name,
    is_pattern,
    is_tar_name,
    of_names,
    one_file,
)
from penstock.readers.origin.origin import SCHEME, OneUrl, Url, check_url, local_path, status_of

_SUFFIX = os.fsdecode(INDEX_SUFFIX)


def options_scope(url: str) -> str:
    """Return the part of a URL that `storage_options` apply to: its scheme, and for http its host
    too."""
    scheme, _, rest = url.partition("://")
    host = rest.partition("/")[0].rpartition("@")[2]
    return f"{scheme.lower()}://{host}" if scheme.lower() in ("http", "https") else scheme.lower()


@dataclass(frozen=True, slots=True)
class _Address:
    """The parts of a URL, or of a path, which has no start. start: its scheme, and for http its
    host. top: the number of leading parts of the path that are a bucket, a repository or the like;
    no file lies above them."""

    start: str
    path: str
    query: str = ""
    top: int = 0

    @classmethod
    def of(cls, url: str, *, is_path: bool) -> _Address:
        found = None if is_path else SCHEME.match(url)
        if found is None:
            return cls("", url)
        scheme, rest = found[1].lower(), url[found.end() :]
        if scheme not in ("http", "https"):
            return cls(found[0], rest, top=scheme != "memory")
        host, slash, rest = rest.partition("/")
        path, mark, tail = rest.partition("?")
        return cls(found[0] + host + slash, path, mark + tail)

    @property
    def is_web(self) -> bool:
        return self.start.lower().startswith(("http://", "https://"))

    @property
    def store(self) -> tuple[str, ...]:
        """Return what is equal for all files of one bucket or server."""
        return self.start, self.query, *self.path.split("/")[: self.top]

    def at(self, path: str) -> str:
        """Return the URL of another path in the same store."""
        if not path and self.path.startswith("/"):
            path = "/"
        start = self.start.rstrip("/") + "/" * bool(path) if self.is_web else self.start
        return f"{start}{path}{self.query}"


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
    address = _Address.of(url, is_path=is_path)
    path, ending = address.path.rstrip("/"), f"{f'-{variant}' * bool(variant)}{_SUFFIX}"
    if selection is not None:
        name = os.fsdecode(selection.index_name).removesuffix(_SUFFIX)
        return address.at(f"{path}{'/' * bool(path)}{name}{ending}")
    least = 1 if is_path else address.top
    if address.start.lower() == "hf://":
        least = 3 if path.startswith(("datasets/", "spaces/", "buckets/")) else 2
    return address.at(path + ending) if path and path.count("/") >= least else None


def described_folder(url: OneUrl, *, is_path: bool = False) -> tuple[str, str] | None:
    """Return the folder of a file that describes a dataset in it, and the file as `manifest=`; None
    for a folder and a chain of file systems. is_path: as for `index_url`."""
    path = None if is_path else local_path(url)
    text = os.fsdecode(url if path is None else path)
    if path is not None:
        found = os.path.dirname(text) or ".", os.path.abspath(text)
        return None if os.path.isdir(text) else found
    address = _Address.of(text, is_path=is_path)
    folder, _, name = address.path.rpartition("/")
    if "::" in text:
        return None
    return address.at(folder), unquote(name) if address.is_web else name


def parent_url(url: str, *, is_path: bool = False) -> str | None:
    """Return the URL of the folder that contains a remote folder; None for the root of a bucket,
    host or repository, and for a chain of file systems."""
    if "::" in url:
        return None
    address = _Address.of(url, is_path=is_path)
    path = address.path.rstrip("/")
    return address.at(path.rpartition("/")[0]) if path.count("/") >= max(1, address.top) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetPlace:
    """The root and the selected files of a dataset.

    root: a local path as bytes, else a URL or a path of a file system object. selection: files
    below it; None means all files. may_be_folder: True if only the store can tell whether the URL
    is that of a folder or of the file in `selection`.
    """

    root: bytes | str
    selection: FileSelection | None = None
    may_be_folder: bool = False


def place_of(url: Url, *, is_path: bool = False) -> DatasetPlace:
    """Parse a URL into its root and its selection. is_path: True for a path of a file system
    object. Raises ConfigError."""
    check_url(url)
    urls = url if isinstance(url, list | tuple) else [url]
    local = [] if is_path else [path for path in map(local_path, urls) if path is not None]
    texts = [os.fsdecode(each) for each in urls]
    if urls is not url:
        place = _of_path(local[0], url) if local else _of_url(texts[0], is_path=is_path)
        if place is not None:
            return place
    return _of_files(texts, local, is_path=is_path)


def _of_path(path: bytes, url: object) -> DatasetPlace | None:
    """Return the place of a local folder or file, or None for a pattern."""
    if not path or b"\0" in path:
        raise ConfigError(f"url: got {url!r}, wanted a folder or a URL such as s3://bucket/set.")
    text, found = os.fsdecode(path), status_of(path)
    if found is None or not stat.S_ISDIR(found.st_mode):
        name, pattern = os.path.basename(text), is_pattern(text)
        is_file = found is not None and stat.S_ISREG(found.st_mode)
        if name and (is_file or (is_tar_name(name) and not pattern)):
            return DatasetPlace(root=os.path.dirname(path) or b".", selection=one_file(name))
        if pattern:
            return None
    return DatasetPlace(root=path)


def _of_url(url: str, *, is_path: bool) -> DatasetPlace | None:
    """Return the place of a remote folder or file, or None for a pattern."""
    address = _Address.of(url, is_path=is_path)
    folder, _, name = address.path.rpartition("/")
    if "::" in url or not name or address.path.count("/") < address.top:
        return DatasetPlace(root=url)
    # In an http URL a question mark begins the query.
    if is_pattern(address.path):
        return None
    if is_tar_name(name) or is_file_name(name):
        named = one_file(unquote(name) if address.is_web else name)
        root, may_be_folder = address.at(folder), not is_tar_name(name)
        return DatasetPlace(root=root, selection=named, may_be_folder=may_be_folder)
    return DatasetPlace(root=url)


def _of_files(texts: list[str], local: list[bytes], *, is_path: bool) -> DatasetPlace:
    """Return the folder that contains all of some files and patterns. local: their paths."""
    is_local = len(local) == len(texts)
    if is_local:
        texts = [os.path.abspath(os.fsdecode(path)) for path in local]
    addresses = [_Address.of(text, is_path=is_path or is_local) for text in texts]
    first = addresses[0]
    strange = (text for text, a in zip(texts, addresses, strict=True) if a.store != first.store)
    other = next(strange, None if is_local else next((t for t in texts if "::" in t), None))
    if other is not None or (local and not is_local):
        raise ConfigError(
            f"url: {redact(texts[0])} and {redact(other or texts[-1])} aren't in one store. Give "
            "files of one bucket or server, or join datasets: concat([Dataset(…), Dataset(…)])."
        )
    folder, names = _common([address.path for address in addresses])
    folders = [path for path in local if not path or b"\0" in path or os.path.isdir(path)]
    if folders or folder.count("/") + bool(folder) < first.top or not all(names):
        shown = redact(os.fsdecode(folders[0]) if folders else texts[0])
        raise ConfigError(
            f"url: got {shown}, wanted files, or patterns of files in one bucket. To join "
            "folders, use concat([Dataset(…), Dataset(…)])."
        )
    if first.is_web:
        names = [unquote(name) for name in names]
    root = os.fsencode(folder or "/") if is_local else first.at(folder)
    return DatasetPlace(root=root, selection=of_names(names))


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
