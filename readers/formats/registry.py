"""Every format that is read, by name, in the order in which `format="auto"` asks them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.cache.errors import ConfigError
from penstock.readers.formats.folder.format import FolderFormat
from penstock.readers.formats.pack.format import PackFormat
from penstock.readers.formats.tar.format import TarFormat

if TYPE_CHECKING:
    from penstock.readers.formats.format import Format, Indexing

AUTO = "auto"
"""Whichever format recognises the dataset first."""

# The folder last: it takes whatever no other does.
FORMATS: tuple[Format, ...] = (PackFormat(), TarFormat(), FolderFormat())

_BY_NAME = {each.name: each for each in FORMATS}


def format_names() -> tuple[str, ...]:
    """The names that `format=` takes."""
    return (AUTO, *_BY_NAME)


def is_format(name: str) -> bool:
    """Whether a format has this name, as a manifest notes it."""
    return name in _BY_NAME


def format_named(name: str) -> Format:
    """The format of a name that was checked: a manifest's, or an argument."""
    return _BY_NAME[name]


def check_format(format: str) -> None:
    """Raise ConfigError for a name that `format=` doesn't take."""
    if format not in format_names():
        raise ConfigError(f"format: got {format!r}, wanted one of {list(format_names())}.")


def indexing_of(format: Format) -> Indexing:
    """How a dataset of a format that doesn't carry its index gets one."""
    if format.indexing is None:
        raise TypeError(f"{format.name}: such a dataset carries its index")
    return format.indexing
