"""Whether a dataset is a set of files of one kind, by the names at its root or in its URL."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.readers.files.names import is_passed_over
from penstock.readers.origin.unread import extension

if TYPE_CHECKING:
    from collections.abc import Collection

    from penstock.readers.origin.origin import Origin

TABLES_OF_FILES = frozenset((b"metadata.csv", b"metadata.jsonl", b"metadata.parquet"))
"""Beside them a folder's files are what they list."""


def are_files(origin: Origin, extensions: Collection[str]) -> bool:
    """Whether all files that a URL names have one of these extensions; or whether some at the root
    of a folder have, and there is nothing that they may belong to: images, folders, a table of
    files."""
    names = origin.names()
    some = [name for name in names.files if not is_passed_over(name.rpartition(b"/")[2])]
    ours = [name for name in some if extension(name) in extensions]
    if origin.selection is not None:
        return bool(ours) and len(ours) == len(some)
    if not ours or TABLES_OF_FILES.intersection(some):
        return False
    from penstock.readers.formats.folder.kinds import IMAGES  # most folders hold no such files

    folders = [name for name in names.folders if not is_passed_over(name)]
    return not folders and not any(extension(name) in IMAGES for name in some)
