"""The books' small tables: numbers of the folder, names of groups, and what stores said."""

from __future__ import annotations

import sqlite3
from typing import TYPE_CHECKING, Any

from penstock.cache.disk.damage import reading, row_checksum, with_checksum

if TYPE_CHECKING:
    from penstock.cache.disk.books import Books

Known = tuple[bool, tuple[int, str] | None]
"""(whether a store was ever asked for a name, (bytes, version) that it said; None: not there)."""


class NumberTable:
    """A NumberTable has numbers of the folder as a whole: its limit, and what is used of it."""

    def __init__(self, books: Books) -> None:
        self._books = books

    def get(self, name: str) -> int | None:
        """A number that was set. Raises sqlite3.DatabaseError for one that isn't what was set."""
        found = self._books.row("SELECT value FROM facts WHERE name = ?", (name,))
        if found is None:
            return None
        number, _, _ = str(found[0]).partition(" ")
        if found[0] != with_checksum(name, number) or not number.isdecimal():
            raise sqlite3.DatabaseError(f"the number {name!r} isn't what was written")
        return int(number)

    def has(self, name: str) -> bool:
        """Whether a number was set, whatever became of it."""
        return self._books.row("SELECT 1 FROM facts WHERE name = ?", (name,)) is not None

    def set(self, name: str, value: int) -> None:
        """Write a number down."""
        row = (name, with_checksum(name, str(value)))
        self._books.change("INSERT OR REPLACE INTO facts VALUES (?, ?)", row)


class LabelTable:
    """A LabelTable has what groups of blobs are called for people."""

    def __init__(self, books: Books) -> None:
        self._books = books

    def set(self, group: str, text: str) -> None:
        """Name a group."""
        self._books.change("INSERT OR REPLACE INTO labels VALUES (?, ?)", (group, text))

    def all(self) -> dict[str, str]:
        """The label of each group."""
        found = self._books.rows("SELECT grp, label FROM labels")
        return {str(group): str(label) for group, label in found}


class NameTable:
    """A NameTable has what stores said of names, for the time when they can't be asked."""

    def __init__(self, books: Books) -> None:
        self._books = books

    def remember(self, path: str, found: tuple[int, str] | None) -> None:
        """Write down what a store said: (bytes, version), None if it isn't there."""
        size, version = found or (-1, "")
        row = (path, size, version)
        self._books.change(
            "INSERT OR REPLACE INTO names VALUES (?, ?, ?, ?)", (*row, row_checksum(row))
        )

    def recall(self, path: str) -> Known:
        """What a store said last."""
        return read_name_row(self._books.row(NAME_QUERY, (path,)), path)


NAME_QUERY = "SELECT size, version, sum FROM names WHERE path = ?"


@reading()
def read_name_row(found: tuple[Any, ...] | None, path: str) -> Known:
    """Read a row of NAME_QUERY. One that isn't what was written says nothing."""
    if found is None or found[2] != row_checksum((path, *found[:2])):
        return False, None
    return True, None if found[0] < 0 else (int(found[0]), str(found[1]))
