"""Check, show and join file names, which are bytes and may hold anything but NUL."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING

from penstock.cache import CorruptShardError, escape

if TYPE_CHECKING:
    from collections.abc import Sequence

OWN_FOLDER = b"_penstock"
"""Where a pack keeps its own files, in its folder."""

INDEX_SUFFIX = b".penstock"
"""Ends the name of the folder that holds an index of foreign data."""

_LONGEST_NAME = 4096
_UNSAFE = re.compile(rb"(?:^|[\0/])\.{0,2}(?:[\0/]|$)")


def printable(name: bytes) -> str:
    """A name on one line of valid text: control characters, backslashes and bytes that aren't UTF-8
    become backslash escapes."""
    return escape(name.decode("utf-8", "surrogateescape").replace("\\", "\\\\"))


def extension(name: bytes) -> str:
    """The extension of a file, in lower case without its dot; "" without one."""
    base = name.rpartition(b"/")[2]
    return base.rpartition(b".")[2].decode("utf-8", "replace").lower() if b"." in base else ""


def encoded_name(name: str) -> bytes | None:
    """A name as Python's os has them, in bytes; None for text that no name can be (half of a
    character, as JSON may say)."""
    try:
        return name.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return None


def unsafe_reason(name: bytes) -> str | None:
    """Why a remote name must not be used, or None. A name from a store never leaves its dataset."""
    if b"\0" in name:
        return "the name holds a NUL byte"
    if name.startswith(b"/"):
        return "the name is absolute"
    if any(part in (b"..", b".") for part in name.split(b"/")):
        return "the name leaves the dataset (a '.' or '..' component)"
    return None


def are_unsafe(names: Sequence[bytes]) -> bool:
    """Whether one of some names from a manifest or a sidecar is no plain path below a folder: it is
    empty, absolute, very long, or has a NUL or an empty, "." or ".." part."""
    joined = b"\0".join(names)
    return bool(
        joined.count(b"\0") != len(names) - 1
        or _UNSAFE.search(joined)
        or max(map(len, names)) > _LONGEST_NAME
    )


_OF_SYSTEMS = frozenset((OWN_FOLDER, b"__MACOSX", b"lost+found"))


def is_passed_over(part: bytes) -> bool:
    """Return True for dot-files, dot-folders, our own folder, indexes, and the folders that macOS
    and ext4 add: they are no part of a dataset."""
    return part.startswith(b".") or part in _OF_SYSTEMS or part.endswith(INDEX_SUFFIX)


def below(root: bytes, name: bytes) -> bytes:
    """The path of a file that a manifest names. Raises CorruptShardError where a link of a folder
    on the way leads out of root; the file itself may be one, as the Hugging Face cache has it."""
    path = os.path.join(root, name)
    folder, real = os.path.realpath(os.path.dirname(path)), os.path.realpath(root)
    if folder != real and not folder.startswith(os.path.join(real, b"")):
        raise CorruptShardError(
            f"{printable(path)}: leads out of the dataset by a symbolic link. Put the files where "
            "the manifest says, or make the dataset again."
        )
    return path
