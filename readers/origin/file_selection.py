"""Select files of a folder by a URL: one file, a list, or a pattern.

A pattern has braces as in WebDataset, or wildcards.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import os
import re
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property

from penstock.cache import ConfigError
from penstock.readers.files import INDEX_SUFFIX, is_passed_over, unsafe_reason

MAX_NAMES = 1_000_000
"""A pattern that stands for more files than this is taken for a typing error."""

_LONGEST_NAME = 255
_LONGEST_STEM = 128

_GROUP = re.compile(r"\{([^{}]*)\}")
_RANGE = re.compile(r"([0-9]{1,18})\.\.([0-9]{1,18})")
_CHOICE = re.compile(r"\{[^{}]*(,|\.\.)[^{}]*\}")
# Compressed tars and parts are included: opening them raises an error with advice.
_TAR = re.compile(r".\.(tar(\.(gz|bz2|xz|zst|lz4))?|tgz|tbz2?|txz|tzst)$", re.I)
_ONE_FILE = re.compile(r".\.(npy|npz|parquet|parq|pq|arrow|feather|ipc|bin|idx)$", re.I)
WILDCARD = re.compile(r"[*?]")
_SET_IN_NAME = re.compile(r"\[[^\]/]+\][^/]*\.\w+$")
_SET_IN_PART = re.compile(r"\[[^\]]+\]")
EVERYTHING = "**"


@dataclass(frozen=True, kw_only=True)
class FileSelection:
    """The files of a folder that a URL names.

    pattern: the part of the URL below the folder, for messages. parts: names or wildcard patterns
    below the folder, in order, without duplicates. is_one: True if the URL is the path of one file.
    is_list: True for a list of URLs, which `pattern` doesn't contain completely.
    """

    pattern: str
    parts: tuple[str, ...]
    is_one: bool = False
    is_list: bool = False

    @cached_property
    def is_listed(self) -> bool:
        """Return True if a part has wildcards, so that the folder must be listed."""
        return not self.is_one and any(map(has_wildcard, self.parts))

    @property
    def key(self) -> str:
        """Return 16 hex digits that identify this selection in its folder."""
        kind = b"like\0" if self.is_listed else b""
        return hashlib.sha256(kind + b"\0".join(map(os.fsencode, self.parts))).hexdigest()[:16]

    @property
    def index_name(self) -> bytes:
        """Return the name of the index's folder next to the files: "a.npy.penstock" for one file,
        "train-<key>.penstock" for "train-{000..009}.tar" and "train-*.parquet"."""
        if len(self.parts) == 1 and not self.is_listed:
            name = os.fsencode(self.parts[0])
            if len(name) + len(INDEX_SUFFIX) <= _LONGEST_NAME:
                return name + INDEX_SUFFIX
        stem = os.fsencode(re.split(r"[{*?\[/]", self.pattern)[0])[:_LONGEST_STEM].rstrip(b"-_. ")
        return (stem or self._kind) + b"-" + self.key.encode() + INDEX_SUFFIX

    @property
    def _kind(self) -> bytes:
        if is_tar_name(self.parts[0]):
            return b"tars"
        ending = self.parts[0].rpartition("/")[2].rpartition(".")[2]
        return ending.encode() if ending.isascii() and ending.isalnum() else b"files"


def has_wildcard(pattern: str) -> bool:
    """Return True if a pattern must be matched against listed names: it has * or ?, or [a-z] in a
    file's name."""
    return bool(WILDCARD.search(pattern) or _SET_IN_NAME.search(pattern))


def is_magic(part: str) -> bool:
    """Return True if one part of a pattern can match several names."""
    return bool(WILDCARD.search(part) or _SET_IN_PART.search(part))


def is_tar_name(name: str) -> bool:
    """Return True for the name of a tar file, compressed or not. No folder is called so."""
    return bool(_TAR.search(name))


def is_file_name(name: str) -> bool:
    """Return True for a name that is usually a data file's. It may be a folder's too (Spark's
    x.parquet)."""
    return bool(_ONE_FILE.search(name))


def _has_braces(text: str) -> bool:
    return bool(_CHOICE.search(text)) or ("{" in text and is_tar_name(text))


def is_pattern(text: str) -> bool:
    """Return True if the path of a URL is a pattern of files, not a folder."""
    return has_wildcard(text) or _has_braces(text)


def one_file(name: str) -> FileSelection:
    """Return the selection of one file."""
    return FileSelection(pattern=name, parts=(name,), is_one=True)


def of_names(names: list[str]) -> FileSelection:
    """Return the selection of names and patterns below one folder.

    `train-{000000..000009}.tar` counts with the width of its first bound, `{train,val}.tar` lists,
    and several groups multiply. Raises ConfigError for a malformed pattern.
    """
    shown = names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1:,} more"
    parts = [each for name in names for each in _expand(name)]
    if len(set(parts)) < len(parts):
        raise ConfigError(f"url: {shown!r} names a file twice. Give each file once.")
    for part in parts:
        if any(EVERYTHING in each and each != EVERYTHING for each in part.split("/")):
            raise ConfigError(
                f"url: got {part!r}, but ** stands for whole folders only. Wanted "
                "data/**/*.parquet, or data/*.parquet for one folder."
            )
    return FileSelection(pattern=shown, parts=tuple(parts), is_list=len(names) > 1)


def _expand(pattern: str) -> list[str]:
    """Return the names and patterns without braces that a pattern stands for."""
    if not _has_braces(pattern):
        return [pattern]
    pieces = _GROUP.split(pattern)  # text, group, text, group, …, text
    if any(c in text for text in pieces[::2] for c in "{}"):
        raise ConfigError(
            f"url: the braces in {pattern!r} don't match. Wanted name-{{000000..000009}}.tar."
        )
    choices = [_choices(piece, pattern) if i % 2 else [piece] for i, piece in enumerate(pieces)]
    if math.prod(map(len, choices)) > MAX_NAMES:
        raise ConfigError(f"url: {pattern!r} names more than {MAX_NAMES} files.")
    return ["".join(parts) for parts in itertools.product(*choices)]


def _choices(group: str, pattern: str) -> list[str]:
    counted = _RANGE.fullmatch(group)
    if counted is None and "," in group:
        return group.split(",")
    first, last = (int(counted[1]), int(counted[2])) if counted else (0, -1)
    if not 0 <= last - first < MAX_NAMES or counted is None:
        raise ConfigError(
            f"url: got {{{group}}} in {pattern!r}, wanted an ascending range of at most "
            f"{MAX_NAMES} numbers such as {{000000..000009}}, or a list such as {{train,val}}."
        )
    return [str(number).zfill(len(counted[1])) for number in range(first, last + 1)]


def is_match(name: str, parts: list[str]) -> bool:
    """Return True if the name of a file matches a pattern, which is given by its parts between
    slashes. *, ? and [a-z] stand for a part of a name between two slashes, ** for any number of
    folders. Hidden files and indexes only match if the pattern names them."""
    return _fits(name.split("/"), parts) and unsafe_reason(os.fsencode(name)) is None


def _is_hidden(part: str) -> bool:
    return is_passed_over(os.fsencode(part))


def _fits(name: list[str], pattern: list[str]) -> bool:
    """Return True if a name matches a pattern and has no hidden part that the pattern doesn't name.
    Both are given by their parts between slashes."""
    if not (name and pattern):
        return not (name or pattern)
    if pattern[0] == EVERYTHING:
        rest = pattern[1:] or ["*"]
        firsts = range(len(name)) if EVERYTHING in rest else range(len(name) - len(rest) + 1)[-1:]
        return any(
            _fits(name[first:], rest) and not any(map(_is_hidden, name[:first])) for first in firsts
        )
    first, part = name[0], pattern[0]
    may_be_hidden = part.startswith(".") or not is_magic(part)
    is_shown = may_be_hidden or not _is_hidden(first)
    return fnmatchcase(first, part) and is_shown and _fits(name[1:], pattern[1:])
