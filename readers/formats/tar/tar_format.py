"""Recognise datasets of tar files by name, and list the files or reject them with a reason.

A sample is a group of members with one key, as in WebDataset. Members are read in place.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from penstock.cache import ConfigError, DatasetError, DatasetNotFoundError
from penstock.readers.files import is_passed_over, printable
from penstock.readers.formats.file_kinds import IMAGES
from penstock.readers.formats.format import Indexing, SpanFormat
from penstock.readers.formats.tar.member_fields import USUAL_NAMES, split_key
from penstock.readers.formats.tar.tar_headers import COMPRESSED, compressed_archive_error

if TYPE_CHECKING:
    from penstock.readers.formats.format import Format
    from penstock.readers.formats.tar.tar_listing import TarListing
    from penstock.readers.origin import Entry, Origin

_COMPRESSED = re.compile(rb".*(?:\.tar(\.(?:gz|bz2|xz|zst|lz4))|(\.(?:tgz|tbz2?|txz|tzst)))", re.I)
_PART = re.compile(rb".*\.tar\.?(?:part)?[-_.]?(?:[0-9]{1,5}|[a-z]{2})", re.I)


def is_archive_name(name: bytes) -> bool:
    """Return True if a name is that of a tar file.

    Compressed archives and parts of split ones count too, because none of them may be skipped
    silently.
    """
    return not is_passed_over(name) and bool(
        name.lower().endswith(b".tar") or _COMPRESSED.fullmatch(name) or _PART.fullmatch(name)
    )


def holds_tars(origin: Origin) -> bool:
    """Return True if a folder is a set of tar files, or if a URL names tar files.

    Raises ConfigError if the folder also holds images or sub-folders.
    """
    names = origin.names()
    archives = [name for name in names.files if is_archive_name(name.rpartition(b"/")[2])]
    if origin.selection is not None or not archives:
        return bool(archives) and len(archives) == len(names.files)
    top = origin.top(is_archive_name)
    if not any(entry.name.lower().endswith(b".tar") for entry in top.entries):
        return bool(top.entries) and not top.folders and not top.others
    folders = [name for name in top.folders if not is_passed_over(name)]
    images = [n for n in top.others if (found := split_key(n)) is not None and found[1] in IMAGES]
    if folders or images:
        other = printable((folders + images)[0])
        raise ConfigError(
            f"{origin.url}: holds tar files, and also {other}. Choose the dataset by "
            'format="tar" or format="folder" (--format); or give the tar files as a pattern, such '
            "as train-{000000..000009}.tar."
        )
    return True


def list_archives(origin: Origin) -> list[Entry]:
    """Return the tar files of a dataset, in the order of the selection or sorted by name.

    Raises DatasetNotFoundError (there is none, or one of a selection is missing), DatasetError (a
    file is compressed, a part, or not a tar file by its name), FetchError.
    """
    top = origin.top(is_archive_name if origin.selection is None else bool)
    found, missing = top.entries, top.missing
    if not found and not missing:
        raise DatasetNotFoundError(
            f"{origin.url}: found no *.tar file. Pass a folder that holds some, the path of one "
            "or a pattern such as train-{000000..000009}.tar."
        )
    if missing:
        raise DatasetNotFoundError(
            f"{origin.url}: {len(missing)} of {len(found) + len(missing)} tar files are missing "
            f"({', '.join(map(printable, missing[:3]))}{', …' if len(missing) > 3 else ''}). Fetch "
            "them, or name only those that exist."
        )
    for entry in found:
        _check_name(entry.name)
    return found


def _check_name(name: bytes) -> None:
    compressed = _COMPRESSED.fullmatch(name)
    if compressed:
        suffix = (compressed[1] or compressed[2]).lower()
        for _, suffixes, kind, command in COMPRESSED:
            if suffix in suffixes:
                raise compressed_archive_error(printable(name), kind, command)
    if not is_archive_name(name.rpartition(b"/")[2]):
        raise DatasetError(f"{printable(name)}: the name isn't that of a tar file. Wanted *.tar.")
    if not name.lower().endswith(b".tar"):
        raise DatasetError(
            f"{printable(name)}: looks like one part of a split tar file. Join the parts (cat "
            "NAME.tar.* > NAME.tar), or rename it to end in .tar if it is whole."
        )


@dataclass(frozen=True, slots=True)
class TarIndexing(Indexing):
    """How tar files are listed and indexed.

    Each time a dataset is opened, its local files are compared with the index by name, size and
    time. If any differs, the whole set is indexed again, because one more or fewer label may affect
    every sample.
    """

    keeps_facts: ClassVar[bool] = False

    def list(self, origin: Origin) -> TarListing:
        """List all archives. Raises as `list_archives` does."""
        from penstock.readers.formats.tar.tar_listing import TarListing  # not for recognising

        return TarListing(origin, list_archives(origin))


@dataclass(frozen=True, slots=True)
class TarFormat(SpanFormat):
    """The format of tar files: all those of a folder, or those that a URL names."""

    name: ClassVar[str] = "tar"
    least_sample_bytes: ClassVar[int] = 1024  # a header and a block
    indexing: ClassVar[Indexing | None] = TarIndexing()

    def recognises(self, origin: Origin) -> bool:
        """Return True if a URL names tar files, or the root holds some; see `holds_tars`."""
        return holds_tars(origin)

    def has_default_names(self, origin: Origin) -> bool:
        """Return True if the places of fields are names that members have by default."""
        return all(place in USUAL_NAMES for _, place in origin.arrangement.places)


FORMAT: Format = TarFormat()
