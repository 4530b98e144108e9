"""What the URL of a dataset says by itself: whether it is a local path, how it is shown, what lies
beside it."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING

from penstock.cache.secrets import redact
from penstock.readers.files.names import INDEX_SUFFIX

if TYPE_CHECKING:
    from penstock.readers.origin.tar_urls import TarSelection

Url = str | bytes | os.PathLike[str] | os.PathLike[bytes]

_SUFFIX = os.fsdecode(INDEX_SUFFIX)
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.\-]*)://")


def local_path(url: Url) -> bytes | None:
    """The path, if `url` is one of this machine: no scheme, or file://."""
    if not isinstance(url, str):
        return os.fsencode(url)
    scheme = _SCHEME.match(url)
    if scheme is None and not ("::" in url and "://" in url):
        return os.fsencode(url)
    if scheme and scheme[1].lower() in ("file", "local") and "::" not in url:
        return os.fsencode(url[scheme.end() :])
    return None


def show(url: Url) -> str:
    """A URL for people, without credentials."""
    return redact(url) if isinstance(url, str) else os.fsdecode(os.fspath(url))


def options_scope(url: str) -> str:
    """What `storage_options` are for: a scheme, and with http the host too."""
    scheme, _, rest = url.partition("://")
    host = rest.partition("/")[0].rpartition("@")[2]
    return f"{scheme.lower()}://{host}" if scheme.lower() in ("http", "https") else scheme.lower()


def index_url(
    url: str, selection: TarSelection | None, *, is_path: bool = False, variant: str = ""
) -> str | None:
    """The URL of the folder for a remote dataset's index: `s3://bucket/photos.penstock`.

    None where no place lies beside the data: a bucket's, host's or repository's root (another
    bucket of that name may be anybody's), a chain of file systems. is_path: of a file system
    object, not a URL. variant: the key of an arrangement.
    """
    if selection is not None:
        name = os.fsdecode(selection.index_name).removesuffix(_SUFFIX)
        return f"{url.rstrip('/')}/{name}{f'-{variant}' * bool(variant)}{_SUFFIX}"
    if "::" in url:
        return None
    scheme, mark, rest = ("", "", url) if is_path else url.partition("://")
    path, question, query = rest.partition("?") if scheme in ("http", "https") else (rest, "", "")
    path = path.rstrip("/")
    roots = 0 if scheme == "memory" else 1
    if scheme == "hf":
        roots = 3 if path.startswith(("datasets/", "spaces/", "buckets/")) else 2
    if not path or path.count("/") < roots:
        return None
    return f"{scheme}{mark}{path}{f'-{variant}' * bool(variant)}{_SUFFIX}{question}{query}"
