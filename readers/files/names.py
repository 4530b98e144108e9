"""Check, display and join file names, which are bytes and may hold anything but NUL.

The extension of a name tells what the file holds.
"""

from __future__ import annotations

import os
import re
import stat
from typing import TYPE_CHECKING, Literal

from penstock.cache import CorruptShardError, escape

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

OWN_FOLDER = b"_penstock"
"""The folder inside a pack that holds the pack's own files."""

INDEX_SUFFIX = b".penstock"
"""The suffix of the name of a folder that holds an index of foreign data."""

_LONGEST_NAME = 4096
_UNSAFE = re.compile(rb"(?:^|[\0/])\.{0,2}(?:[\0/]|$)")


def printable(name: bytes) -> str:
    """Return a name as valid text on one line: control characters, backslashes and bytes that
    aren't UTF-8 become backslash escapes."""
    return escape(name.decode("utf-8", "surrogateescape").replace("\\", "\\\\"))


def extension(name: bytes) -> str:
    """Return the extension of a file in lower case without its dot, or "" if it has none."""
    base = name.rpartition(b"/")[2]
    return base.rpartition(b".")[2].decode("utf-8", "replace").lower() if b"." in base else ""


Kind = Literal["image", "text", "array", "audio", "video", "json", "class", "given"]
"""The kind of content of a file. class: a label in a tar file. given: an unknown kind that the user
asked for."""

# Images include those that Penstock can't decode: they are rejected with a remedy, not skipped.
_EXTENSIONS: Mapping[Kind, str] = {
    "image": "avif bmp gif heic heif j2c j2k jp2 jpe jfif jpeg jpg jxl pbm pgm png pnm ppm tif "
    "tiff webp",
    "audio": "wav flac mp3 ogg oga opus m4a aac aif aiff au wma",
    "video": "mp4 m4v webm mkv mov avi mpg mpeg flv wmv ogv",
    "text": "txt caption",
    "array": "npy",
    "json": "json",
}
KINDS: Mapping[str, Kind] = {
    each: kind for kind, listed in _EXTENSIONS.items() for each in listed.split()
}
"""The kinds of files by their extensions, in lower case."""

FIELDS_BY_KIND: Mapping[Kind, str] = {
    **{kind: kind for kind in KINDS.values()},
    "text": "caption",
    "class": "label",
    "json": "",
}
"""The name of a field whose file, next to others of a sample, has no name of its own; JSON has a
field for each key."""

IMAGES = frozenset(each for each, kind in KINDS.items() if kind == "image")
"""Extensions of images."""


def kind_of(name: bytes) -> Kind | None:
    """Return the kind of a file by its name; None if its extension is of no known kind."""
    return KINDS.get(extension(name))


def stem(name: bytes) -> bytes:
    """Return a file's name without its extension, folders included."""
    return name.rpartition(b".")[0] if b"." in name.rpartition(b"/")[2] else name


def encoded_name(name: str) -> bytes | None:
    """Encode a name as Python's os module does; None for text that no file name can be (a lone
    surrogate, as in JSON)."""
    try:
        return name.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return None


def unsafe_reason(name: bytes) -> str | None:
    """Return why a remote name must not be used, or None. A name from a store must not leave its
    dataset."""
    if b"\0" in name:
        return "the name holds a NUL byte"
    if name.startswith(b"/"):
        return "the name is absolute"
    if any(part in (b"..", b".") for part in name.split(b"/")):
        return "the name leaves the dataset (a '.' or '..' component)"
    return None


def are_unsafe(names: Sequence[bytes]) -> bool:
    """Return True if any name from a manifest or a sidecar is no plain path below a folder: empty,
    absolute, very long, or with a NUL or an empty, "." or ".." part."""
    joined = b"\0".join(names)
    return bool(
        joined.count(b"\0") != len(names) - 1
        or _UNSAFE.search(joined)
        or max(map(len, names)) > _LONGEST_NAME
    )


_OF_SYSTEMS = frozenset((OWN_FOLDER, b"__MACOSX", b"lost+found"))


def is_passed_over(part: bytes) -> bool:
    """Return True for names that are no part of a dataset: dot-files, dot-folders, our own folder,
    indexes, and the folders that macOS and ext4 add."""
    return part.startswith(b".") or part in _OF_SYSTEMS or part.endswith(INDEX_SUFFIX)


def below(root: bytes, name: bytes) -> bytes:
    """Return the path of a file that a manifest names. Raises CorruptShardError if a linked folder
    on the way leads out of root; the file itself may be a link, as in the Hugging Face cache."""
    path = os.path.join(root, name)
    if not _has_links(root, name):  # a tenth of the time that the resolution of two paths takes
        return path
    folder, real = os.path.realpath(os.path.dirname(path)), os.path.realpath(root)
    if folder != real and not folder.startswith(os.path.join(real, b"")):
        raise CorruptShardError(
            f"{printable(path)}: leads out of the dataset by a symbolic link. Put the files at the "
            "paths in the manifest, or make the dataset again."
        )
    return path


def _has_links(root: bytes, name: bytes) -> bool:
    """Return True if a folder between root and the file may lead elsewhere."""
    if b".." in name or name.startswith(b"/"):
        return True
    folder, at = os.path.join(root, b""), name.find(b"/")
    try:
        while at >= 0:
            if stat.S_ISLNK(os.lstat(folder + name[:at]).st_mode):
                return True
            at = name.find(b"/", at + 1)
    except OSError:  # reading the file says why
        return True
    return False
