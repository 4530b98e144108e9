"""Recognise folders of files that hold one sample each, grouped into virtual shards.

The code that turns files into candidates is imported only when a folder is indexed.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, ClassVar

from penstock.readers.files import kind_of
from penstock.readers.formats.folder.folder_files import list_folder
from penstock.readers.formats.format import Format
from penstock.readers.origin import LocalFolder

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.readers.formats.folder.folder_listing import FolderFiles
    from penstock.readers.formats.format import Listing, Snapshot
    from penstock.readers.origin import Origin


class FolderFormat(Format):
    """The format of folders of images, in one sub-folder for each class or directly in the root.

    The modification times of a local folder's directories show whether files were added or removed,
    so it isn't listed each time it is opened. A file that changed in place is found when it is
    read, by its size and CRC-32C.
    """

    name: ClassVar[str] = "folder"
    is_file_per_sample: ClassVar[bool] = True
    keeps_facts: ClassVar[bool] = True

    def list(self, origin: Origin) -> FolderFiles:
        """List all files. Raises as `list_folder` does."""
        # Opening an existing index doesn't need this module.
        from penstock.readers.formats.folder.folder_listing import FolderFiles

        return FolderFiles(origin, list_folder(origin))

    def is_current(
        self, origin: Origin, snapshot: Snapshot, listing: Callable[[], Listing]
    ) -> bool:
        """Return True if no directory's time has changed, or for a remote dataset no file."""
        if isinstance(origin, LocalFolder) and origin.selection is None:
            return not origin.changed_directories(snapshot.directories)
        return listing().snapshot().fingerprint == snapshot.fingerprint

    def recognises(self, origin: Origin) -> bool:
        """Return True for a folder, and for images that a URL names.

        This is the last format that is tried. If a folder isn't one of images, listing it raises an
        error that explains what is wrong.
        """
        if origin.selection is None:
            return True
        names = origin.names().files
        return not origin.selection.is_one and all(kind_of(name) == "image" for name in names)

    def has_default_names(self, origin: Origin) -> bool:
        """Return True if the places of fields are none of the folder's folders and patterns, so
        that they can only be names of fields."""
        arrangement = origin.arrangement
        if arrangement.manifest or origin.selection is not None:
            return False
        folders = {os.fsdecode(name) for name in origin.names().folders}
        places = [place for _, place in arrangement.places]
        tops = [place.removeprefix("./").partition("/")[0] for place in places]
        return not any("*" in place for place in places) and folders.isdisjoint(tops)


FORMAT = FolderFormat()
