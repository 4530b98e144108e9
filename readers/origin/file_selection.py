"""Describe the files of a folder that a URL names: one file, a list, or a pattern.

A pattern has braces as WebDataset writes them, or wildcards.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import re
from dataclasses import dataclass
from functools import cached_property

from penstock.cache import ConfigError
from penstock.readers.files import INDEX_SUFFIX

MAX_NAMES = 1_000_000
"""More files than this are a typing error in a pattern."""

_LONGEST_NAME = 255
_LONGEST_STEM = 128

_GROUP = re.compile(r"\{([^{}]*)\}")
_RANGE = re.compile(r"([0-9]{1,18})\.\.([0-9]{1,18})")
_CHOICE = re.compile(r"\{[^{}]*(,|\.\.)[^{}]*\}")
# Of compressed tars and of parts too: opening them says what to do about them.
_TAR = re.compile(r".\.(tar(\.(gz|bz2|xz|zst|lz4))?|tgz|tbz2?|txz|tzst)$", re.I)
_ONE_FILE = re.compile(r".\.(npy|npz|parquet|parq|pq|arrow|feather|ipc|bin|idx)$", re.I)
_WILDCARD = re.compile(r"[*?]")
_SET = re.compile(r"\[[^\]/]+\][^/]*\.\w+$")
EVERYTHING = "**"


@dataclass(frozen=True, kw_only=True)
class FileSelection:
    """The files of a folder that a URL names.

    pattern: what the URL says below the folder, for people. parts: names below it or patterns with
    wildcards, in order, each told once. is_one: the URL is the path of one file.
    """

    pattern: str
    parts: tuple[str, ...]
    is_one: bool = False

    @cached_property
    def is_listed(self) -> bool:
        """Whether names have to be looked up: there are wildcards."""
        return not self.is_one and any(map(has_wildcard, self.parts))

    @property
    def key(self) -> str:
        """Names this selection in its folder: hex, 16 characters."""
        kind = b"like\0" if self.is_listed else b""
        told = b"\0".join(map(os.fsencode, self.parts))
        return hashlib.sha256(kind + told).hexdigest()[:16]

    @property
    def index_name(self) -> bytes:
        """The name of the folder for their index, beside the files: "a.npy.penstock" for one file,
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
    """Whether a pattern stands for names that have to be looked up: * and ? anywhere, [a-z] in a
    file's name."""
    return bool(_WILDCARD.search(pattern) or _SET.search(pattern))


def has_star(pattern: str) -> bool:
    """Whether it has * or ?, which no name is expected to have."""
    return bool(_WILDCARD.search(pattern))


def is_tar_name(name: str) -> bool:
    """Whether a name is a tar file's, of compressed ones too: no folder is called so."""
    return bool(_TAR.search(name))


def is_file_name(name: str) -> bool:
    """Whether a name is a data file's as a rule; folders may be called so too (x.parquet of
    Spark)."""
    return bool(_ONE_FILE.search(name))


def is_pattern(text: str) -> bool:
    """Whether a URL's path names files by a pattern, not a folder."""
    return has_wildcard(text) or bool(_CHOICE.search(text) or ("{" in text and is_tar_name(text)))


def one_file(name: str) -> FileSelection:
    """The selection of one file."""
    return FileSelection(pattern=name, parts=(name,), is_one=True)


def by_pattern(text: str) -> tuple[str, FileSelection]:
    """(folder, selection) of a pattern below it; folder: up to the first part that isn't plain,
    without its slash.

    `train-{000000..000009}.tar` counts with the width of its first bound, `{train,val}.tar` lists;
    several groups multiply. Raises ConfigError for a pattern that means nothing.
    """
    parts = text.split("/")
    odd = (i for i, part in enumerate(parts) if set(part) & {"{", "}"} or has_wildcard(part))
    first = next(odd, len(parts) - 1)
    pattern = "/".join(parts[first:])
    return "/".join(parts[:first]), _checked(pattern, _expand(pattern))


def of_names(parts: list[str]) -> FileSelection:
    """The files of a list of names and patterns below one folder. Raises ConfigError."""
    first = parts[0]
    shown = first if len(parts) == 1 else f"{first} and {len(parts) - 1:,} more"
    return _checked(shown, [each for part in parts for each in _expand(part)])


def _checked(shown: str, parts: list[str]) -> FileSelection:
    if len(set(parts)) < len(parts):
        raise ConfigError(f"url: {shown!r} names a file twice. Give each file once.")
    for part in parts:
        if any(EVERYTHING in each and each != EVERYTHING for each in part.split("/")):
            raise ConfigError(
                f"url: got {part!r}: ** stands for folders and for nothing else. Wanted "
                "data/**/*.parquet, or data/*.parquet for one folder."
            )
    return FileSelection(pattern=shown, parts=tuple(parts))


def _expand(pattern: str) -> list[str]:
    if not (_CHOICE.search(pattern) or ("{" in pattern and is_tar_name(pattern))):
        return [pattern]
    pieces = _GROUP.split(pattern)  # text, group, text, group, …, text
    if any(c in text for text in pieces[::2] for c in "{}"):
        raise ConfigError(
            f"url: the braces in {pattern!r} don't match. Wanted name-{{000000..000009}}.tar."
        )
    choices = [_choices(piece, pattern) if i % 2 else [piece] for i, piece in enumerate(pieces)]
    count = 1
    for choice in choices:
        count *= len(choice)
    if count > MAX_NAMES:
        raise ConfigError(f"url: {pattern!r} names {count} files, wanted {MAX_NAMES} at most.")
    return ["".join(parts) for parts in itertools.product(*choices)]


def _choices(group: str, pattern: str) -> list[str]:
    counted = _RANGE.fullmatch(group)
    if counted is None and "," in group:
        return group.split(",")
    if counted is None:
        raise ConfigError(
            f"url: got {{{group}}} in {pattern!r}, wanted a range such as {{000000..000009}} or a "
            "list such as {train,val}."
        )
    first, last = int(counted[1]), int(counted[2])
    if last < first or last - first >= MAX_NAMES:
        raise ConfigError(
            f"url: {{{group}}} in {pattern!r} counts from {first} to {last}, wanted an ascending "
            f"range of {MAX_NAMES} files at most."
        )
    return [str(number).zfill(len(counted[1])) for number in range(first, last + 1)]
