"""Recognise datasets of tar files by name, and list the files or reject them with a reason.

A sample is a group of members with one key, as in WebDataset. Members are read in place.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, ClassVar

from penstock.cache import ConfigError, DatasetError
from penstock.readers.files import FIELDS_BY_KIND, is_passed_over, kind_of, printable
from penstock.readers.formats.files_format import FilesFormat

if TYPE_CHECKING:
    from penstock.readers.formats.tar.tar_listing import TarListing
    from penstock.readers.origin import Origin

_COMPRESSED = re.compile(rb".*\.(tgz|tbz2?|txz|tzst|tar\.(gz|bz2|xz|zst|lz4))", re.S)
_PART = re.compile(rb".*\.tar\.?(?:part)?[-_.]?(?:[0-9]{1,5}|[a-z]{2})")


class TarFormat(FilesFormat):
    """The format of tar files: all those of a folder, or those that a URL names.

    If one of the files changes, the whole set is indexed again, because one more or fewer label may
    affect every sample.
    """

    name: ClassVar[str] = "tar"
    extensions: ClassVar[frozenset[str]] = frozenset(("tar",))
    least_sample_bytes: ClassVar[int] = 1024  # a header and a block

    def recognises(self, origin: Origin) -> bool:
        """Return True if a folder is a set of tar files, or if a URL names tar files.

        Raises ConfigError if the folder also holds images or sub-folders.
        """
        names = origin.names()
        archives = [name for name in names.files if self.is_file(name)]
        others = [name for name in names.files if not self.is_file(name)]
        if origin.selection is not None or not archives:
            return bool(archives) and not others
        if not any(name.lower().endswith(b".tar") for name in archives):
            return not names.folders and not others
        odd = [name for name in names.folders if not is_passed_over(name)]
        odd += [name for name in others if kind_of(name) == "image"]
        if odd:
            raise ConfigError(
                f"{origin.url}: holds tar files, and also {printable(odd[0])}. Choose the dataset "
                'by format="tar" or format="folder" (--format); or give the tar files as a '
                "pattern, such as train-{000000..000009}.tar."
            )
        return True

    def is_file(self, name: bytes) -> bool:
        """Return True for tar files, and for compressed archives and parts of split ones, because
        none of them may be skipped silently."""
        own = name.rpartition(b"/")[2].lower()
        is_archive = own.endswith(b".tar") or _COMPRESSED.fullmatch(own) or _PART.fullmatch(own)
        return bool(is_archive) and not is_passed_over(own)

    def list(self, origin: Origin) -> TarListing:
        """List all archives.

        Raises as `files` does, and DatasetError (a file is compressed, or a part of one).
        """
        # Other datasets don't need these modules.
        from penstock.readers.formats.tar.tar_headers import compressed_archive_error
        from penstock.readers.formats.tar.tar_listing import TarListing

        archives = self.files(origin)
        for entry in archives.entries:
            name, shown = entry.name.lower(), printable(entry.name)
            if _COMPRESSED.fullmatch(name):
                raise compressed_archive_error(shown)
            if not name.endswith(b".tar"):
                raise DatasetError(
                    f"{shown}: looks like one part of a split tar file. Join the parts (cat "
                    "NAME.tar.* > NAME.tar), or rename it to end in .tar if it is whole."
                )
        return TarListing(origin, archives)

    def has_default_names(self, origin: Origin) -> bool:
        """Return True if the places of fields are names that members have by default."""
        return all(at and at in FIELDS_BY_KIND.values() for _, at in origin.arrangement.places)


FORMAT = TarFormat()
