"""Recognise folders of files, one file a sample, grouped into virtual shards.

What makes candidates of the files is loaded when a folder is indexed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from penstock.readers.files import extension
from penstock.readers.formats.folder.folder_files import IMAGES, changed_directories, list_folder
from penstock.readers.formats.format import SpanFormat
from penstock.readers.origin import LocalFolder

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.readers.formats.folder.folder_candidates import FolderFiles
    from penstock.readers.formats.format import Format, Indexing, Listing, Snapshot
    from penstock.readers.origin import Origin


@dataclass(frozen=True, slots=True)
class FolderIndexing:
    """How a folder gets an index: by the times of its folders it is known whether files came or
    went, so a local one isn't listed at each opening. A file that changed in place is found when it
    is read, by its size and CRC-32C."""

    keeps_facts: ClassVar[bool] = True

    def list(self, origin: Origin) -> FolderFiles:
        """List all files; raises as `list_folder` does."""
        from penstock.readers.formats.folder.folder_candidates import (
            FolderFiles,  # an index needs none
        )

        return FolderFiles(origin, list_folder(origin))

    def is_current(
        self, origin: Origin, snapshot: Snapshot, listing: Callable[[], Listing]
    ) -> bool:
        """Whether no folder's time has changed, or of a remote dataset no file."""
        if isinstance(origin, LocalFolder) and origin.selection is None:
            return not changed_directories(origin, snapshot.directories)
        return listing().snapshot().fingerprint == snapshot.fingerprint


@dataclass(frozen=True, slots=True)
class FolderFormat(SpanFormat):
    """A folder of images, in one sub-folder a class or directly."""

    name: ClassVar[str] = "folder"
    is_file_per_sample: ClassVar[bool] = True
    indexing: ClassVar[Indexing | None] = FolderIndexing()

    def recognises(self, origin: Origin) -> bool:
        """Whether it is a folder, or images of one were named: of a folder that no other format
        takes, listing says what is wrong."""
        if origin.selection is None:
            return True
        names = origin.names().files
        return not origin.selection.is_one and all(extension(name) in IMAGES for name in names)


FORMAT: Format = FolderFormat()
