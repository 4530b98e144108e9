"""Recognise datasets of tar files by name, and list the files or reject them with a reason.

A sample is a group of members with one key, as in WebDataset. Members are read in place.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, ClassVar

from penstock.cache import ConfigError, DatasetError
from penstock.readers.files import FIELDS_BY_KIND, IMAGES, is_passed_over, printable
from penstock.readers.formats.files_format import FilesFormat
from penstock.readers.formats.tar.member_fields import split_key
from penstock.readers.formats.tar.tar_headers import COMPRESSED, compressed_archive_error

if TYPE_CHECKING:
    from penstock.readers.formats.tar.tar_listing import TarListing
    from penstock.readers.origin import Origin

_COMPRESSED = tuple(suffix for _, suffixes, _, _ in COMPRESSED for suffix in suffixes)
_PART = re.compile(rb".*\.tar\.?(?:part)?[-_.]?(?:[0-9]{1,5}|[a-z]{2})")


def is_archive_name(name: bytes) -> bool:
    """Return True if a name is that of a tar file.

    Compressed archives and parts of split ones count too, because none of them may be skipped
    silently.
    """
    own = name.rpartition(b"/")[2].lower()
    return not is_passed_over(own) and bool(
        own.endswith((b".tar", *_COMPRESSED)) or _PART.fullmatch(own)
    )


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
        archives = [name for name in names.files if is_archive_name(name)]
        others = [name for name in names.files if not is_archive_name(name)]
        if origin.selection is not None or not archives:
            return bool(archives) and not others
        if not any(name.lower().endswith(b".tar") for name in archives):
            return not names.folders and not others
        odd = [name for name in names.folders if not is_passed_over(name)]
        odd += [n for n in others if (found := split_key(n)) is not None and found[1] in IMAGES]
        if odd:
            raise ConfigError(
                f"{origin.url}: holds tar files, and also {printable(odd[0])}. Choose the dataset "
                'by format="tar" or format="folder" (--format); or give the tar files as a '
                "pattern, such as train-{000000..000009}.tar."
            )
        return True

    def is_file(self, name: bytes) -> bool:
        """Return True for tar files, compressed ones and parts of split ones."""
        return is_archive_name(name)

    def list(self, origin: Origin) -> TarListing:
        """List all archives.

        Raises as `files` does, and DatasetError (a file is compressed, or a part of one).
        """
        from penstock.readers.formats.tar.tar_listing import TarListing  # not for recognising

        archives = self.files(origin)
        for entry in archives.entries:
            name, shown = entry.name.lower(), printable(entry.name)
            for _, suffixes, kind, command in COMPRESSED:
                if name.endswith(suffixes):
                    raise compressed_archive_error(shown, kind, command)
            if not name.endswith(b".tar"):
                raise DatasetError(
                    f"{shown}: looks like one part of a split tar file. Join the parts (cat "
                    "NAME.tar.* > NAME.tar), or rename it to end in .tar if it is whole."
                )
        return TarListing(origin, archives)

    def has_default_names(self, origin: Origin) -> bool:
        """Return True if the places of fields are names that members have by default."""
        return all(
            place and place in FIELDS_BY_KIND.values() for _, place in origin.arrangement.places
        )


FORMAT = TarFormat()
