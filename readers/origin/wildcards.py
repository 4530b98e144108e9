"""Expand the wildcards of a URL to file names, listing only folders that can hold a match."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

from penstock.cache import ConfigError, DatasetNotFoundError, ordered
from penstock.readers.files import is_passed_over, printable, unsafe_reason
from penstock.readers.origin.file_selection import EVERYTHING, MAX_NAMES, has_star, has_wildcard

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from penstock.readers.origin.file_selection import FileSelection

File = TypeVar("File")
_SET = re.compile(r"\[[^\]]+\]")
Key = TypeVar("Key")
Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tree(Generic[File]):
    """How a folder's files are looked up; names are joined by "/", below one root.

    top: (files with their names, names of folders) directly in a folder; walk: all files below
    one; find: one file, None where it isn't there. at_once: how many are asked at a time.
    """

    top: Callable[[str], tuple[list[tuple[str, File]], list[str]]]
    walk: Callable[[str], Iterable[tuple[str, File]]]
    find: Callable[[str], File | None]
    at_once: int = 16


def selected(tree: Tree[File], selection: FileSelection, *, url: str) -> list[tuple[str, File]]:
    """The files that a selection names, in its order; those that fit a pattern sorted by name.

    *, ? and [a-z] stand for a part of a name between two slashes, ** for any number of folders.
    What is hidden or an index is passed over, unless the pattern says so. Raises
    DatasetNotFoundError (nothing fits, or one isn't there), ConfigError (a file is named twice, or
    there are too many), and what the tree raises.
    """
    is_listed = selection.is_listed
    # What looks like a set of characters may be a name all the same.
    named = [part for part in selection.parts if not (is_listed and has_star(part))]
    there = dict(zip(named, _each(tree, tree.find, named), strict=True))
    plain = [part for part in named if not (is_listed and has_wildcard(part))]
    missing = [part for part in plain if there[part] is None]
    if missing:
        raise DatasetNotFoundError(
            f"{url}: {len(missing):,} of {len(plain):,} files aren't there ({_shown(missing)}). "
            "Fetch them, or name those that are there; datasets that are folders of their own are "
            "joined by concat([…])."
        )
    found: list[tuple[str, File]] = []
    for part in selection.parts:
        if (file := there.get(part)) is not None:
            found.append((part, file))
            continue
        fitting = _matches(tree, part)
        if not fitting:
            raise DatasetNotFoundError(
                f"{url}: no file's name fits {part!r}. Check the pattern: * stands for a part of a "
                "name within one folder, ** for any number of folders; folders alone are no match."
            )
        found += fitting
    if len({name for name, _ in found}) < len(found):
        names = [name for name, _ in found]
        twice = next(name for name in names if names.count(name) > 1)
        raise ConfigError(f"url: {url} names {twice!r} twice. Give each file once.")
    return found


def _each(tree: Tree[File], ask: Callable[[Key], Answer], keys: Sequence[Key]) -> list[Answer]:
    if tree.at_once < 2 or len(keys) < 2:
        return [ask(key) for key in keys]
    return list(ordered(ask, keys, workers=tree.at_once, ahead=2 * tree.at_once, name="list"))


def _shown(names: list[str]) -> str:
    few = ", ".join(printable(name.encode("utf-8", "surrogateescape")) for name in names[:3])
    return f"{few}, …" if len(names) > 3 else few


def _matches(tree: Tree[File], pattern: str) -> list[tuple[str, File]]:
    parts = pattern.split("/")
    here = [""]
    while parts[0] != EVERYTHING and len(parts) > 1:
        here = _folders(tree, here, parts.pop(0))
    found = list(_files(tree, here, parts))
    if len(found) > MAX_NAMES:
        raise ConfigError(f"url: {pattern!r} fits {len(found):,} files, wanted {MAX_NAMES:,} most.")
    return sorted(found, key=lambda each: each[0].encode("utf-8", "surrogateescape"))


def _folders(tree: Tree[File], above: list[str], part: str) -> list[str]:
    if not _is_magic(part):
        return [_below(folder, part) for folder in above]
    fits = _fitting(part)
    return [
        _below(folder, name)
        for folder, (_, names) in zip(above, _each(tree, tree.top, above), strict=True)
        for name in names
        if fits(name)
    ]


def _files(tree: Tree[File], above: list[str], parts: list[str]) -> Iterator[tuple[str, File]]:
    if parts[0] == EVERYTHING:
        for folder in above:
            yield from _deep(tree, folder, parts)
    elif not _is_magic(parts[0]):
        names = [_below(folder, parts[0]) for folder in above]
        found = zip(names, _each(tree, tree.find, names), strict=True)
        yield from ((name, file) for name, file in found if file is not None)
    else:
        fits = _fitting(parts[0])
        for files, _ in _each(tree, tree.top, above):
            yield from (
                (n, file) for n, file in files if fits(n.rpartition("/")[2]) and _is_safe(n)
            )


def _deep(tree: Tree[File], folder: str, parts: list[str]) -> Iterator[tuple[str, File]]:
    regex = _compiled(_regex(parts), parts)
    skip = len(folder) + 1 if folder else 0
    for name, file in tree.walk(folder):
        rest = name[skip:]
        hidden = map(is_passed_over, rest.encode("utf-8", "surrogateescape").split(b"/"))
        if regex.fullmatch(rest) and _is_safe(name) and not any(hidden):
            yield name, file


def _regex(parts: list[str]) -> str:
    """Of what follows the first **."""
    text = ""
    for at, part in enumerate(parts):
        is_last = at == len(parts) - 1
        if part == EVERYTHING:
            text += "(?s:.+)" if is_last else "(?:(?s:.+)/)?"
        else:
            text += _part_regex(part) + ("" if is_last else "/")
    return text


def _compiled(regex: str, parts: list[str]) -> re.Pattern[str]:
    try:
        return re.compile(regex)
    except re.error:
        raise ConfigError(
            f"url: {'/'.join(parts)!r} isn't a pattern. Wanted a set such as [0-9] in brackets."
        ) from None


def _part_regex(part: str) -> str:
    """As fnmatch's, but nothing stands for a slash."""
    return "".join(map(_piece, re.split(r"(\*+|\?|\[[^\]]+\])", part)))


def _piece(piece: str) -> str:
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
    """Whether one part of a pattern stands for several names."""
    return has_star(part) or bool(_SET.search(part))


def _fitting(part: str) -> Callable[[str], bool]:
    regex = _compiled(_part_regex(part), [part])

    def fits(name: str) -> bool:
        hidden = is_passed_over(name.encode("utf-8", "surrogateescape"))
        is_named = not hidden or (part[:1] == "." and name[:1] == ".")
        return bool(is_named and regex.fullmatch(name))

    return fits


def _below(folder: str, name: str) -> str:
    return f"{folder}/{name}" if folder else name


def _is_safe(name: str) -> bool:
    return unsafe_reason(name.encode("utf-8", "surrogateescape")) is None
