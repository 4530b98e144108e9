"""Turn a folder's files into candidates, by their layout or by the layout that the user describes.

Tables and other small files of the folder are read completely for this.
"""

from __future__ import annotations

import os
import warnings
from dataclasses import replace
from functools import cached_property, partial
from typing import TYPE_CHECKING

from penstock.cache import ConfigError, DatasetError, PenstockWarning
from penstock.readers.fieldtypes import MAX_TABLE_BYTES
from penstock.readers.files import extension, is_passed_over, printable, unsafe_reason
from penstock.readers.formats.dataset_arguments import given_types
from penstock.readers.formats.folder.folder_files import ARRAYS, AUDIO, TEXTS, VIDEO
from penstock.readers.formats.folder.folder_samples import candidates_of, hints_of_names
from penstock.readers.formats.folder.listed_samples import (
    METADATA,
    UNREAD_METADATA,
    ListedTable,
    listed_samples,
    manifest_table,
    metadata_table,
)
from penstock.readers.formats.folder.named_samples import class_folder_samples, paired_samples
from penstock.readers.formats.format import Snapshot
from penstock.readers.formats.local_files import changed_file_error, unreadable_file_error
from penstock.readers.origin import (
    NO_TABLE,
    LocalFolder,
    RemoteFolder,
    check_layout,
    check_splits,
    check_store,
    warn_of_left_out,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from penstock.readers.fieldtypes import FieldType
    from penstock.readers.formats.candidates import Candidates
    from penstock.readers.formats.folder.folder_files import FolderListing
    from penstock.readers.formats.folder.folder_samples import FolderSamples
    from penstock.readers.origin import Entry, Origin

_BATCH_FILES = 4096
# An index records the modification times of at most this many tables, JSON files and texts. They
# are compared each time the index is opened, to detect changes.
_MAX_TIMED_FILES = 2**14
_EXTENSIONS = {"array": ARRAYS, "text": TEXTS, "audio": AUDIO, "video": VIDEO}
_EDITED = (b".json", b".JSON", b".txt", b".TXT", b".caption")


def read_whole(origin: Origin, files: Sequence[Entry]) -> list[bytes]:
    """Return the bytes of listed files. Remote files are read in parallel and not kept.

    Raises IndexChangedError (a file's size has changed since it was listed), DatasetError,
    FetchError.
    """
    if isinstance(origin, RemoteFolder):
        found: list[bytes] = []
        for first in range(0, len(files), _BATCH_FILES):
            some = files[first : first + _BATCH_FILES]
            found += (bytes(data) for data in origin.read([(f, f.size_bytes) for f in some]))
        return found
    if isinstance(origin, LocalFolder):
        return [_read(os.path.join(origin.root, file.name), file) for file in files]
    raise TypeError(f"unknown origin {origin!r}")


def manifest_entry(origin: Origin) -> Entry:
    """Return the listing's entry of the user's table.

    Its name is an absolute path if it is a file of this machine outside of the dataset's root.
    Raises ConfigError, FetchError.
    """
    manifest = origin.arrangement.manifest
    assert manifest
    path = origin.arrangement.local_manifest()
    name = os.fsencode(manifest)
    if path is None and (reason := unsafe_reason(name)) is not None:
        raise ConfigError(f"manifest: got {manifest!r}: {reason}. Give a name below {origin.url}.")
    entry = (origin if path is None else LocalFolder(b"/")).entry(name)
    if entry is None:
        place = (
            "" if path else f" below {origin.url}. For a file of this machine give its full path"
        )
        raise ConfigError(f"manifest: there is no file {printable(name)}{place}.")
    if entry.size_bytes > MAX_TABLE_BYTES:
        raise ConfigError(
            f"manifest: {printable(name)} has {entry.size_bytes:,} bytes, wanted at most "
            f"{MAX_TABLE_BYTES:,}. Split the dataset, or put the values into tar files."
        )
    return entry


def read_manifest(origin: Origin, entry: Entry) -> bytes:
    """Return the bytes of the user's table. Raises as `read_whole` does."""
    if os.path.isabs(entry.name):
        return _read(entry.name, entry)
    return read_whole(origin, [entry])[0]


def _read(path: bytes, file: Entry) -> bytes:
    try:
        with open(path, "rb") as opened:
            data = opened.read(file.size_bytes + 1)
    except FileNotFoundError:
        raise changed_file_error(file.name, "it is gone") from None
    except OSError as error:
        raise unreadable_file_error(path, error) from error
    if len(data) != file.size_bytes:
        raise changed_file_error(file.name, f"its size is no longer {file.size_bytes} bytes")
    return data


class FolderFiles:
    """The listed files of a folder."""

    def __init__(self, origin: Origin, listing: FolderListing) -> None:
        """Find the user's table. Raises ConfigError (it doesn't exist), FetchError."""
        self._origin, self._listing = origin, listing
        self._manifest = manifest_entry(origin) if origin.arrangement.manifest else None

    def snapshot(self) -> Snapshot:
        """Return the facts of the files, and the times of directories and tables, for the index."""
        files, directories = self._listing.files, dict(self._listing.directories)
        if self._manifest is not None and self._manifest not in files:
            files = [*files, self._manifest]
        if directories:
            directories |= {table.name: table.mtime_ns for table in self._tables()}
        return Snapshot.of(files, directories)

    def candidates(self, *, workers: int) -> Candidates:
        """Return what may be samples, and warn of what is left out. Reads tables and JSON files."""
        del workers
        return self._candidates

    def counterparts(
        self, number: int, name: bytes, *, total: int, workers: int
    ) -> Iterator[tuple[Candidates, int]]:
        """Yield the shard of that number, then those that it may correspond to today.

        An index omits virtual shards in which no file decodes, so its numbers may be smaller.
        """
        del name, workers
        candidates = self._candidates
        without_samples = candidates.shards.shards - total
        for candidate in range(number, number + without_samples + 1):
            yield candidates, candidate

    @cached_property
    def _candidates(self) -> Candidates:
        schema = given_types(self._origin.arrangement)
        samples = self._samples(schema).without_rejected()
        url = self._origin.url
        if samples.left_out:
            warnings.warn(f"{url}: {' '.join(samples.left_out)}", PenstockWarning, stacklevel=9)
        quarantined = [*self._listing.quarantined, *samples.quarantined]
        return candidates_of(replace(samples, quarantined=quarantined), schema, url=url)

    def _tables(self) -> list[Entry]:
        """Return the files that are read for the index, and texts, which people edit in place."""
        if self._manifest is not None:
            return [self._manifest]
        arrangement = self._origin.arrangement
        if arrangement.places:
            return []
        if arrangement.manifest is None and (found := self._metadata()):
            return found
        edited = [file for file in self._listing.files if file.name.endswith(_EDITED)]
        return edited[:_MAX_TIMED_FILES]

    def _metadata(self) -> list[Entry]:
        some = (file for file in self._listing.files if file.name.endswith(METADATA))
        return [file for file in some if file.name.rpartition(b"/")[2] in METADATA]

    def _samples(self, schema: Mapping[str, FieldType]) -> FolderSamples:
        origin, files, url = self._origin, self._listing.files, self._origin.url
        arrangement = origin.arrangement
        if self._manifest is not None:
            data = read_manifest(origin, self._manifest)
            name = printable(self._manifest.name)
            table = manifest_table(data, name=name, places=arrangement.places, schema=schema)
            return self._listed(table, schema)
        if arrangement.places:
            return paired_samples(url, files, arrangement.places, schema)
        names = [file.name for file in files]
        check_store(url, names)
        if arrangement.manifest != NO_TABLE:
            found = self._metadata()
            unread = next((n for n in names if n.rpartition(b"/")[2] == UNREAD_METADATA), None)
            if unread is not None:
                raise DatasetError(
                    f"{url}: {printable(unread)} isn't supported yet. Convert it to metadata.csv "
                    "or metadata.jsonl; or pass manifest=False to read only the images."
                )
            if found:
                if all(b"/" in file.name for file in found):
                    check_splits(url, names)
                read = read_whole(origin, found)
                pairs = [(file.name, data) for file, data in zip(found, read, strict=True)]
                return self._listed(metadata_table(pairs), schema)
        if "label" not in schema:
            check_layout(url, names)
        samples = class_folder_samples(
            files,
            partial(read_whole, origin),
            schema,
            folders=self._folders(),
            allow_empty=arrangement.allow_empty,
            url=url,
        )
        own = _EXTENSIONS.get(next(iter(samples.types)), frozenset())
        considered = (*samples.names, *(each.name for each in samples.quarantined))
        others = [name for name in considered if extension(name) not in own]
        passed_over = warn_of_left_out(url, others, labelled="label" in samples.types)
        hints = hints_of_names(url, samples.names, samples.types, has_labels="label" in schema)
        left_out = [*samples.left_out, *hints]
        return replace(samples, passed_over=passed_over, left_out=left_out, has_stray_files=True)

    def _folders(self) -> list[bytes]:
        """Return the folders directly below the root, empty ones too; none if a URL names files."""
        if self._origin.selection is not None:
            return []
        if isinstance(self._origin, LocalFolder):
            return [name for name in self._listing.directories if name and b"/" not in name]
        return [name for name in self._origin.names().folders if not is_passed_over(name)]

    def _listed(self, table: ListedTable, schema: Mapping[str, FieldType]) -> FolderSamples:
        by_name = {file.name: file for file in self._listing.files}
        origin = self._origin
        root = origin.root if isinstance(origin, LocalFolder) else b""
        return listed_samples(origin.url, by_name, table, schema, root=root)
