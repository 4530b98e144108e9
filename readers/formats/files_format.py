"""Define formats whose datasets are files of one kind, which their names show.

Recognising such a dataset and listing its files is common code of tar files, tables, records and
chunks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from penstock.cache import ConfigError, DatasetNotFoundError
from penstock.readers.files import extension, is_passed_over, printable
from penstock.readers.formats.format import DatasetFiles, Format, Listing

if TYPE_CHECKING:
    from penstock.readers.origin import Origin


class FilesFormat(Format, ABC):
    """The base of formats whose datasets are files of one kind.

    Its files are listed whenever a dataset is opened, and if a name, size or time changed, all are
    indexed again.

    extensions: of the names of its files, in lower case, without the dot.
    in_folders: True if files in subfolders belong to the dataset.
    """

    extensions: ClassVar[frozenset[str]] = frozenset()
    in_folders: ClassVar[bool] = False

    @abstractmethod
    def list(self, origin: Origin) -> Listing:
        """List the files. Raises as `files` does."""

    def recognises(self, origin: Origin) -> bool:
        """Return True if such files lie at the root, or if the user selected only such files."""
        names = [self.is_file(name) for name in origin.names().files]
        return bool(names) and (any(names) if origin.selection is None else all(names))

    def is_file(self, name: bytes) -> bool:
        """Return True if a name is that of a file of this format."""
        own = name.rpartition(b"/")[2]
        return extension(own) in self.extensions and not is_passed_over(own)

    def names_of_files(self) -> str:
        """Return the pattern of its files' names, for messages."""
        return ", ".join(f"*.{each}" for each in sorted(self.extensions))

    def files(self, origin: Origin) -> DatasetFiles:
        """List the files of a dataset: those with one of the extensions, sorted by name, or those
        that the user selected, in that order.

        Raises DatasetNotFoundError, ConfigError, DatasetError or FetchError.
        """
        if origin.selection is None and (self.in_folders or self.is_file_per_sample):
            from penstock.readers.formats.folder import list_folder

            found = list_folder(origin)
            entries = [entry for entry in found.entries if self.is_file(entry.name)]
            listed = replace(found, entries=entries, directories={})
        else:
            others = [] if origin.selection is None else origin.names().files
            other = next((name for name in others if not self.is_file(name)), None)
            if other is not None:
                raise ConfigError(
                    f"{origin.url}: {printable(other)} isn't a {self.name} file "
                    f"({self.names_of_files()}). Name files of one kind."
                )
            listed = DatasetFiles(entries=origin.entries(self.is_file))
        if not listed.entries:
            raise DatasetNotFoundError(
                f"{origin.url}: there is no file {self.names_of_files()}. Expected {self.name} "
                "files."
            )
        return listed
