"""URLs that name tar files: one, or many by a brace pattern as WebDataset writes them."""

from __future__ import annotations

import hashlib
import itertools
import os
import re
from dataclasses import dataclass

from penstock.cache.errors import ConfigError
from penstock.readers.files.names import INDEX_SUFFIX

MAX_NAMES = 1_000_000
"""More tar files than this are a typing error in a pattern."""

_LONGEST_NAME = 255
_LONGEST_STEM = 128

_GROUP = re.compile(r"\{([^{}]*)\}")
_RANGE = re.compile(r"([0-9]{1,18})\.\.([0-9]{1,18})")
# Of compressed tars and of parts too: opening them says what to do about them.
_TAR = re.compile(r".\.(tar(\.(gz|bz2|xz|zst|lz4))?|tgz|tbz2?|txz|tzst)$", re.I)


@dataclass(frozen=True, slots=True, kw_only=True)
class TarSelection:
    """The tar files of a folder that a URL names. pattern: of the URL; names: below the folder, in
    order."""

    pattern: str
    names: tuple[bytes, ...]

    @property
    def key(self) -> str:
        """Names this selection in its folder: hex, 16 characters."""
        return hashlib.sha256(b"\0".join(self.names)).hexdigest()[:16]

    @property
    def index_name(self) -> bytes:
        """The name of the folder for their index, beside the files: "a.tar.penstock" for one file,
        "train-<key>.penstock" for "train-{000..009}.tar"."""
        if len(self.names) == 1 and len(self.names[0]) + len(INDEX_SUFFIX) <= _LONGEST_NAME:
            return self.names[0] + INDEX_SUFFIX
        stem = os.fsencode(self.pattern.partition("{")[0])[:_LONGEST_STEM].rstrip(b"-_.")
        return (stem or b"tars") + b"-" + self.key.encode() + INDEX_SUFFIX


def select_tars(url: str) -> tuple[str, TarSelection] | None:
    """(folder, selection) if `url` names tar files, else None.

    `train-{000000..000009}.tar` counts with the width of its first bound, `{train,val}.tar` lists;
    several groups multiply. Raises ConfigError for a pattern that means nothing.
    """
    if not _TAR.search(url) or "::" in url:
        return None
    plain = url[: url.index("{")] if "{" in url else url
    folder, slash, _ = plain.rpartition("/")
    pattern = url[len(folder) + len(slash) :]
    names = tuple(os.fsencode(name) for name in _expand(pattern))
    if len(set(names)) < len(names):
        raise ConfigError(f"url: {pattern!r} names a file twice. Give each tar file once.")
    return folder or slash, TarSelection(pattern=pattern, names=names)


def _expand(pattern: str) -> list[str]:
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
