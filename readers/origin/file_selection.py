"""Select files of a folder by a URL: one file, a list, or a pattern.

A pattern has braces as in WebDataset, or wildcards.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import re
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar, Protocol, TypeVar

from penstock.cache import ConfigError, DatasetNotFoundError, ordered
from penstock.readers.files import INDEX_SUFFIX, is_passed_over, printable, unsafe_reason

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from penstock.readers.origin.listed_files import Entry

MAX_NAMES = 1_000_000
"""A pattern that stands for more files than this is taken for a typing error."""

_AT_ONCE = 16  # concurrent requests to a store
_LONGEST_NAME = 255
_LONGEST_STEM = 128

_GROUP = re.compile(r"\{([^{}]*)\}")
_RANGE = re.compile(r"([0-9]{1,18})\.\.([0-9]{1,18})")
_CHOICE = re.compile(r"\{[^{}]*(,|\.\.)[^{}]*\}")
# Compressed tars and parts are included: opening them raises an error with advice.
_TAR = re.compile(r".\.(tar(\.(gz|bz2|xz|zst|lz4))?|tgz|tbz2?|txz|tzst)$", re.I)
_ONE_FILE = re.compile(r".\.(npy|npz|parquet|parq|pq|arrow|feather|ipc|bin|idx)$", re.I)
_WILDCARD = re.compile(r"[*?]")
_SET_IN_NAME = re.compile(r"\[[^\]/]+\][^/]*\.\w+$")
_SET_IN_PART = re.compile(r"\[[^\]]+\]")
_EVERYTHING = "**"

Key = TypeVar("Key")
Answer = TypeVar("Answer")
Listed = tuple[str, "Entry | None"]
"""The name of a file, and its entry if the listing contains it."""


@dataclass(frozen=True, kw_only=True)
class FileSelection:
    """The files of a folder that a URL names.

    pattern: the part of the URL below the folder, for messages. parts: names or wildcard patterns
    below the folder, in order, without duplicates. is_one: True if the URL is the path of one file.
    """

    pattern: str
    parts: tuple[str, ...]
    is_one: bool = False

    @cached_property
    def is_listed(self) -> bool:
        """Return True if a part has wildcards, so that the folder must be listed."""
        return not self.is_one and any(map(has_wildcard, self.parts))

    @property
    def key(self) -> str:
        """Return 16 hex digits that identify this selection in its folder."""
        kind = b"like\0" if self.is_listed else b""
        names = b"\0".join(map(os.fsencode, self.parts))
        return hashlib.sha256(kind + names).hexdigest()[:16]

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
    return bool(_WILDCARD.search(pattern) or _SET_IN_NAME.search(pattern))


def has_star(pattern: str) -> bool:
    """Return True if a pattern has * or ?, which file names rarely contain."""
    return bool(_WILDCARD.search(pattern))


def is_tar_name(name: str) -> bool:
    """Return True for the name of a tar file, compressed or not. No folder is called so."""
    return bool(_TAR.search(name))


def is_file_name(name: str) -> bool:
    """Return True for a name that is usually a data file's. It may be a folder's too (Spark's
    x.parquet)."""
    return bool(_ONE_FILE.search(name))


def is_pattern(text: str) -> bool:
    """Return True if the path of a URL is a pattern of files, not a folder."""
    return has_wildcard(text) or bool(_CHOICE.search(text) or ("{" in text and is_tar_name(text)))


def one_file(name: str) -> FileSelection:
    """Return the selection of one file."""
    return FileSelection(pattern=name, parts=(name,), is_one=True)


def by_pattern(text: str) -> tuple[str, FileSelection]:
    """Split a pattern into its folder and the selection below it. The folder ends before the first
    part with braces or a wildcard, without a trailing slash.

    `train-{000000..000009}.tar` counts with the width of its first bound, `{train,val}.tar` lists,
    and several groups multiply. Raises ConfigError for a malformed pattern.
    """
    parts = text.split("/")
    odd = (i for i, part in enumerate(parts) if set(part) & {"{", "}"} or has_wildcard(part))
    first = next(odd, len(parts) - 1)
    pattern = "/".join(parts[first:])
    return "/".join(parts[:first]), _checked(pattern, _expand(pattern))


def of_names(parts: list[str]) -> FileSelection:
    """Return the selection of a list of names and patterns below one folder. Raises ConfigError."""
    first = parts[0]
    shown = first if len(parts) == 1 else f"{first} and {len(parts) - 1:,} more"
    return _checked(shown, [each for part in parts for each in _expand(part)])


def _checked(shown: str, parts: list[str]) -> FileSelection:
    if len(set(parts)) < len(parts):
        raise ConfigError(f"url: {shown!r} names a file twice. Give each file once.")
    for part in parts:
        if any(_EVERYTHING in each and each != _EVERYTHING for each in part.split("/")):
            raise ConfigError(
                f"url: got {part!r}, but ** stands for whole folders only. Wanted "
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


class Tree(Protocol):
    """The part of an Origin that lists its folders. Names are joined by "/", below its root."""

    url: str
    is_local: ClassVar[bool]

    def list_one(self, folder: str) -> tuple[list[Listed], list[str]]: ...
    def list_below(self, folder: str) -> Iterable[Listed]: ...
    def entry(self, name: bytes) -> Entry | None: ...


def select_files(tree: Tree, selection: FileSelection) -> list[Listed]:
    """List the files that a selection names, in its order. The files that match one pattern are
    sorted by name.

    *, ? and [a-z] stand for a part of a name between two slashes, ** for any number of folders.
    Hidden files and indexes are skipped unless the pattern names them. Raises DatasetNotFoundError
    if nothing matches or a file doesn't exist, ConfigError if a file is named twice or existing are
    too many, and the errors of the listing.
    """
    url, is_listed = tree.url, selection.is_listed
    # A name may contain brackets too.
    named = [part for part in selection.parts if not (is_listed and has_star(part))]
    existing = dict(zip(named, _each(tree, _find(tree), named), strict=True))
    plain = [part for part in named if not (is_listed and has_wildcard(part))]
    missing = [part for part in plain if existing[part] is None]
    if missing:
        raise DatasetNotFoundError(
            f"{url}: {len(missing):,} of {len(plain):,} files don't exist ({_shown(missing)}). "
            "Fetch them, or list only files that exist. To join datasets that are folders, use "
            "concat([…])."
        )
    found: list[Listed] = []
    for part in selection.parts:
        if (file := existing.get(part)) is not None:
            found.append((part, file))
            continue
        fitting = _matches(tree, part)
        if not fitting:
            raise DatasetNotFoundError(
                f"{url}: no file matches {part!r}. Check the pattern: * stands for a part of a "
                "name within one folder, ** for any number of folders. Folders don't match."
            )
        found += fitting
    if len({name for name, _ in found}) < len(found):
        names = [name for name, _ in found]
        twice = next(name for name in names if names.count(name) > 1)
        raise ConfigError(f"url: {url} names {twice!r} twice. Give each file once.")
    return found


def _each(tree: Tree, ask: Callable[[Key], Answer], keys: Sequence[Key]) -> list[Answer]:
    if tree.is_local or len(keys) < 2:
        return [ask(key) for key in keys]
    return list(ordered(ask, keys, workers=_AT_ONCE, ahead=2 * _AT_ONCE, name="list"))


def _find(tree: Tree) -> Callable[[str], Entry | None]:
    return lambda name: tree.entry(os.fsencode(name))


def _shown(names: list[str]) -> str:
    few = ", ".join(printable(os.fsencode(name)) for name in names[:3])
    return f"{few}, …" if len(names) > 3 else few


def _matches(tree: Tree, pattern: str) -> list[Listed]:
    parts, folders, depth = pattern.split("/"), [""], 0
    while parts[depth] != _EVERYTHING and depth < len(parts) - 1:
        depth += 1
        folders = _subfolders(tree, folders, parts[:depth])
    part, listed = parts[depth], list[Listed]()
    if part == _EVERYTHING:
        listed += (file for folder in folders for file in tree.list_below(folder))
    elif _is_magic(part):
        listed += (file for files, _ in _each(tree, tree.list_one, folders) for file in files)
    else:
        names = [_below(folder, part) for folder in folders]
        found = zip(names, _each(tree, _find(tree), names), strict=True)
        listed += ((name, entry) for name, entry in found if entry is not None)
    fits = _matcher(parts)
    matching = [each for each in listed if fits(each[0])]
    if len(matching) > MAX_NAMES:
        raise ConfigError(
            f"url: {pattern!r} matches {len(matching):,} files, wanted {MAX_NAMES:,} at most."
        )
    return sorted(matching, key=lambda each: os.fsencode(each[0]))


def _subfolders(tree: Tree, above: list[str], parts: list[str]) -> list[str]:
    """Return the folders inside others that match the last part of a pattern."""
    if not _is_magic(parts[-1]):
        return [_below(folder, parts[-1]) for folder in above]
    fits = _matcher(parts)
    listed = zip(above, _each(tree, tree.list_one, above), strict=True)
    below = (_below(folder, name) for folder, (_, names) in listed for name in names)
    return [folder for folder in below if fits(folder)]


def _matcher(parts: list[str]) -> Callable[[str], bool]:
    """Return a function that tells whether a name matches a pattern, may be used as a path, and has
    no hidden part that the pattern doesn't name."""
    try:
        regex = re.compile(_regex(parts))
    except re.error:
        raise ConfigError(
            f"url: {'/'.join(parts)!r} isn't a pattern. Wanted a set such as [0-9] in brackets."
        ) from None
    named = parts[: parts.index(_EVERYTHING)] if _EVERYTHING in parts else parts

    def is_shown(inside: str, part: str) -> bool:
        may_be_hidden = not _is_magic(part) or (part[:1] == "." and inside[:1] == ".")
        return may_be_hidden or not is_passed_over(os.fsencode(inside))

    def fits(name: str) -> bool:
        if regex.fullmatch(name) is None or unsafe_reason(os.fsencode(name)) is not None:
            return False
        pairs = itertools.zip_longest(name.split("/"), named, fillvalue="*")
        return all(is_shown(inside, part) for inside, part in pairs)

    return fits


def _regex(parts: list[str]) -> str:
    """Return the regular expression of a pattern."""
    text = ""
    for number, part in enumerate(parts, 1):
        is_last = number == len(parts)
        if part == _EVERYTHING:
            text += "(?s:.+)" if is_last else "(?:(?s:.+)/)?"
        else:
            text += _part_regex(part) + ("" if is_last else "/")
    return text


def _part_regex(part: str) -> str:
    """Translate one part as fnmatch does, except that nothing matches a slash."""
    return "".join(map(_piece_regex, re.split(r"(\*+|\?|\[[^\]]+\])", part)))


def _piece_regex(piece: str) -> str:
    if piece.startswith("*"):
        return "[^/]*"
    if piece == "?":
        return "[^/]"
    if piece.startswith("[") and piece.endswith("]") and len(piece) > 2:
        is_other = piece[1] == "!"
        inside = re.sub(r"[\\\[&~|^]", r"\\\g<0>", piece[2 if is_other else 1 : -1])
        return f"(?!/)[{'^' * is_other}{inside}]"
    return re.escape(piece)


def _is_magic(part: str) -> bool:
    """Return True if one part of a pattern can match several names."""
    return has_star(part) or bool(_SET_IN_PART.search(part))


def _below(folder: str, name: str) -> str:
    return f"{folder}/{name}" if folder else name
