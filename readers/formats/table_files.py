"""Whether a dataset is a set of files of tables, by the names at its root."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.cache.errors import DatasetError
from penstock.readers.files.names import is_passed_over
from penstock.readers.origin.unread import extension

if TYPE_CHECKING:
    from collections.abc import Collection

    from penstock.readers.origin.origin import Origin


def are_tables(origin: Origin, extensions: Collection[str]) -> bool:
    """Whether files with these extensions lie at the root, and neither pictures, of which they may
    be the table, nor folders; or whether all files that were named have them. Raises DatasetError
    for a table whose folder holds files of older versions too."""
    from penstock.readers.formats.folder.kinds import IMAGES

    top = origin.top(lambda name: extension(name) in extensions and not is_passed_over(name))
    if origin.selection is not None:
        return bool(top.entries) and not top.others
    if b".hoodie" in top.folders:
        raise DatasetError(
            f"{origin.url}: this is a Hudi table (.hoodie), whose folder holds files of older "
            "versions too. Give the Parquet files of its current version as a list."
        )
    folders = [name for name in top.folders if not is_passed_over(name)]
    pictures = [name for name in top.others if extension(name) in IMAGES]
    return bool(top.entries) and not folders and not pictures
