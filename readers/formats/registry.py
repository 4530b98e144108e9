"""Every format that is read, by name, in the order in which `format="auto"` asks them.

To add a format, write a folder here whose `format.py` ends with its `FORMAT` (`format.Format` says
what that holds), name it in `_MODULES` below, and have it run the tests of
tests/readers/formats/test_conformance.py.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING

from penstock.cache.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.readers.formats.format import Format, Indexing

AUTO = "auto"
"""Whichever format recognises the dataset first."""

# A module's FORMAT is loaded when it is first asked for: who reads a pack needs no tar files. The
# folder comes last, as it takes whatever no other does.
_MODULES = {
    "pack": "penstock.readers.formats.pack.format",
    "tar": "penstock.readers.formats.tar.format",
    "folder": "penstock.readers.formats.folder.format",
}


def format_names() -> tuple[str, ...]:
    """The names that `format=` takes."""
    return (AUTO, *_MODULES)


def is_format(name: str) -> bool:
    """Whether a format has this name, as a manifest notes it."""
    return name in _MODULES


@cache
def format_named(name: str) -> Format:
    """The format of a name that was checked: a manifest's, or an argument."""
    found: Format = import_module(_MODULES[name]).FORMAT
    return found


def formats() -> Iterator[Format]:
    """All formats, in the order in which they are asked."""
    return map(format_named, _MODULES)


def check_format(format: str) -> None:
    """Raise ConfigError for a name that `format=` doesn't take."""
    if format not in format_names():
        raise ConfigError(f"format: got {format!r}, wanted one of {list(format_names())}.")


def indexing_of(format: Format) -> Indexing:
    """How a dataset of a format that doesn't carry its index gets one."""
    if format.indexing is None:
        raise TypeError(f"{format.name}: such a dataset carries its index")
    return format.indexing
