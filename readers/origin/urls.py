"""What the URL of a dataset says by itself: whether it is a local path, how it is shown, what lies
beside it."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING

from penstock.cache.errors import ConfigError
from penstock.cache.secrets import redact
from penstock.readers.files.names import INDEX_SUFFIX
from penstock.readers.origin.url_patterns import MAX_NAMES

if TYPE_CHECKING:
    from penstock.readers.origin.url_patterns import Selection

OneUrl = str | bytes | os.PathLike[str] | os.PathLike[bytes]
Url = OneUrl | list[OneUrl] | tuple[OneUrl, ...]
"""A folder, a file, a pattern of files, or a list of files and patterns of one store."""

_SUFFIX = os.fsdecode(INDEX_SUFFIX)
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.\-]*)://")


def check_url(url: Url) -> None:
    """Raise ConfigError for a list that can't be one of files."""
    if not isinstance(url, list | tuple):
        return
    if not 1 <= len(url) <= MAX_NAMES:
        raise ConfigError(f"url: got a list of {len(url):,}, wanted 1 to {MAX_NAMES:,} files.")
    for each in url:
        if not isinstance(each, str | bytes | os.PathLike):
            raise ConfigError(f"url: got {each!r} in a list, wanted paths or URLs of files.")


def local_path(url: OneUrl) -> bytes | None:
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
    if isinstance(url, list | tuple):
        more = f" and {len(url) - 1:,} more" if len(url) > 1 else ""
        return f"{show(url[0])}{more}" if url else "[]"
    return redact(url) if isinstance(url, str) else os.fsdecode(os.fspath(url))


def options_scope(url: str) -> str:
    """What `storage_options` are for: a scheme, and with http the host too."""
    scheme, _, rest = url.partition("://")
    host = rest.partition("/")[0].rpartition("@")[2]
    return f"{scheme.lower()}://{host}" if scheme.lower() in ("http", "https") else scheme.lower()


def index_url(
    url: str, selection: Selection | None, *, is_path: bool = False, variant: str = ""
) -> str | None:
    """The URL of the folder for a remote dataset's index: `s3://bucket/photos.penstock`.

    None where no place lies beside the data: a bucket's, host's or repository's root (another
    bucket of that name may be anybody's), a chain of file systems. is_path: of a file system
    object, not a URL. variant: the key of an arrangement.
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
