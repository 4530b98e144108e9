"""Turn a folder's files into samples, by their layout or by the layout that the user describes.

Tables and other small files of the folder are read completely for this. If file names suggest
another meaning than the one that was chosen, a warning reports it, so that wrong labels are
noticed.
"""

from __future__ import annotations

import itertools
import os
from dataclasses import replace
from typing import TYPE_CHECKING

from penstock.cache import ConfigError, DatasetError
from penstock.readers.fieldtypes import MAX_TABLE_BYTES, FieldTypes, Schema, masks_by_name
from penstock.readers.files import (
    IMAGES,
    extension,
    is_passed_over,
    kind_of,
    printable,
    stem,
    unsafe_reason,
)
from penstock.readers.formats.folder.listed_samples import (
    METADATA,
    UNREAD_METADATA,
    listed_samples,
    manifest_table,
    metadata_table,
)
from penstock.readers.formats.folder.named_samples import class_folder_samples, paired_samples
from penstock.readers.formats.open_shard import MISSING
from penstock.readers.formats.span_listing import SpanListing
from penstock.readers.formats.unindexed_files import read_file_parts
from penstock.readers.origin import (
    NO_TABLE,
    LocalFolder,
    check_layout,
    check_splits,
    check_store,
    field_of,
    role_of,
    unread_files,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from penstock.readers.formats.candidates import Candidates
    from penstock.readers.formats.folder.listed_samples import ListedTable
    from penstock.readers.formats.format import DatasetFiles
    from penstock.readers.origin import Entry, Origin

MAX_TIMED_FILES = 2**14
"""An index records the modification times of at most this many tables, JSON files, texts and
annotations. They are compared each time the index is opened, to detect changes."""

_EDITED = (b".json", b".JSON", b".txt", b".TXT", b".caption")


class FolderFiles(SpanListing):
    """The listed files of a folder."""

    def __init__(self, origin: Origin, found: DatasetFiles) -> None:
        """Find the user's table. Raises ConfigError (it doesn't exist), FetchError."""
        files = found.entries
        self._found_folders = found.directories
        self._place = origin
        self._manifest: Entry | None = None
        if origin.arrangement.manifest:
            self._place, self._manifest = manifest_entry(origin)
        some = (file for file in files if file.name.endswith(METADATA))
        self._metadata = [file for file in some if file.name.rpartition(b"/")[2] in METADATA]
        if found.directories:
            times = {table.name: table.mtime_ns for table in self._tables(origin, files)}
            found = replace(found, directories={**found.directories, **times})
        apart = [] if self._manifest is None or self._manifest in files else [self._manifest]
        super().__init__(origin, found, listed=[*files, *apart])

    def _tables(self, origin: Origin, files: Sequence[Entry]) -> Sequence[Entry]:
        """Return the files that are read for the index, and texts, which people edit in place."""
        if self._manifest is not None or origin.arrangement.places:
            return [] if self._manifest is None else [self._manifest]
        if origin.arrangement.manifest is None and self._metadata:
            return self._metadata
        edited = (file for file in files if file.name.endswith(_EDITED))
        return list(itertools.islice(edited, MAX_TIMED_FILES))

    def samples(self, files: Sequence[Entry], *, workers: int) -> Candidates:
        """Return all samples. Reads tables and JSON files."""
        arrangement, schema, url = self.origin.arrangement, self.given, self.origin.url
        table = self._table(files, workers=workers)
        if table is not None:
            by_name = {file.name: file for file in files}
            samples = listed_samples(url, by_name, table, schema, root=self.origin.folder or b"")
        elif arrangement.places:
            samples = paired_samples(url, files, arrangement.places, schema)
        else:
            samples = self._by_folders(files, workers=workers)
        return with_masks(samples, schema)

    def _table(self, files: Sequence[Entry], *, workers: int) -> ListedTable | None:
        """Read the tables that list the samples; None if there are none."""
        origin, manifest = self.origin, self._manifest
        arrangement, url = origin.arrangement, origin.url
        if manifest is not None:
            (data,) = read_whole(self._place, [manifest], workers=1)
            name = printable(manifest.name)
            return manifest_table(data, name=name, places=arrangement.places, schema=self.given)
        if arrangement.places:
            return None
        names = [file.name for file in files]
        check_store(url, names)
        if arrangement.manifest == NO_TABLE:
            return None
        unread = next((n for n in names if n.rpartition(b"/")[2] == UNREAD_METADATA), None)
        if unread is not None:
            raise DatasetError(
                f"{url}: {printable(unread)} isn't supported yet. Convert it to metadata.csv or "
                "metadata.jsonl; or pass manifest=False to read only the images."
            )
        if not self._metadata:
            return None
        if all(b"/" in file.name for file in self._metadata):
            check_splits(url, names)
        read = read_whole(origin, self._metadata, workers=workers)
        tables = [(file.name, data) for file, data in zip(self._metadata, read, strict=True)]
        return metadata_table(tables, self.given)

    def _by_folders(self, files: Sequence[Entry], *, workers: int) -> Candidates:
        """Return the samples by their names; the folders below the root are their classes."""
        origin, schema, url, folders = self.origin, self.given, self.origin.url, list[bytes]()
        if "label" not in schema:
            check_layout(url, [file.name for file in files])
        if origin.selection is None:  # empty ones too
            # A local listing has no links that lead back.
            listed = self._found_folders if origin.is_local else origin.names().folders
            folders = [n for n in listed if n and b"/" not in n and not is_passed_over(n)]
        samples = class_folder_samples(
            files,
            lambda some: read_whole(origin, some, workers=workers),
            schema,
            folders=folders,
            allow_empty=origin.arrangement.allow_empty,
            url=url,
        )
        types, names = samples.schema, samples.names
        main, classes = next(iter(types)), types["label"].class_names if "label" in types else ()
        considered = (*names, *(each.name for each in samples.quarantined))
        others = [name for name in considered if kind_of(name) != main]
        passed_over, left_out = unread_files(others, labelled="label" in types)
        hints = [] if classes else _pairing_hints(names)
        if len(classes) == 1 and "label" not in schema and role_of(classes[0]) is not None:
            hints = [
                f"{classes[0]!r} is the only folder, and is read as the only class: every label is "
                f"0. If it isn't a class, give {url.rstrip('/')}/{classes[0]} as the URL; if it is "
                'one, pass schema={"label": ClassLabel()}.'
            ]
        unread = [*left_out, *samples.unread, *hints]
        return replace(samples, passed_over=passed_over, unread=unread)


def read_whole(origin: Origin, files: Sequence[Entry], *, workers: int) -> list[bytes]:
    """Return the content of small files. Raises DatasetError, IndexChangedError, FetchError."""
    return read_file_parts(origin, [(f, 0, f.size_bytes) for f in files], workers=workers)


def manifest_entry(origin: Origin, *, max_bytes: int = MAX_TABLE_BYTES) -> tuple[Origin, Entry]:
    """Return the file that lists the samples, and the origin that reads it. max_bytes: of the file.

    It lies below the dataset's root, else next to the root, or it is any file of this machine,
    whose name is then its absolute path. Raises ConfigError, FetchError.
    """
    manifest, path = origin.arrangement.manifest, origin.arrangement.local_manifest()
    assert manifest
    name, place = os.fsencode(manifest), origin if path is None else LocalFolder(b"/")
    if path is None and (reason := unsafe_reason(name)) is not None:
        raise ConfigError(f"manifest: got {manifest!r}: {reason}. Give a name below {origin.url}.")
    entry = place.entry(name)
    if entry is None and path is None and (above := origin.beside(name)) is not None:
        place, name = above
        entry = place.entry(name)
    if entry is None:
        near = f" in or next to {origin.url}. For a file of this machine give its full path"
        where = "" if path else near
        raise ConfigError(f"manifest: there is no file {printable(os.fsencode(manifest))}{where}.")
    if entry.size_bytes > max_bytes:
        raise ConfigError(
            f"manifest: {printable(name)} has {entry.size_bytes:,} bytes, wanted at most "
            f"{max_bytes:,}. Split the dataset, or put the values into tar files."
        )
    return place, entry


def with_masks(samples: Candidates, given: FieldTypes) -> Candidates:
    """Return the samples with the masks among their fields in files, by the names of these."""
    types = {name: samples.schema[name] for name in samples.spans}
    extensions = {
        name: {extension(samples.files[n].name) for n in set(spans.files.tolist()) - {MISSING}}
        for name, spans in samples.spans.items()
        if name not in given
    }
    masks, notes, doubts = masks_by_name(types, extensions, given=given)
    return replace(
        samples,
        schema=Schema({**samples.schema, **types, **masks}),
        notes=[*samples.notes, *notes],
        unread=[*samples.unread, *doubts],
    )


def _pairing_hints(names: Iterable[bytes]) -> list[str]:
    """Return a warning if images are named like others plus a suffix: 1_mask.png next to 1.jpg."""
    by_stem = {stem(name): name for name in names if extension(name) in IMAGES}
    found: dict[tuple[bytes, bytes], list[tuple[bytes, bytes]]] = {}
    for own, name in by_stem.items():
        base, mark, suffix = own.rpartition(b"_")
        other = by_stem.get(base)
        if mark and other is not None and role_of(printable(suffix)) == "companion":
            found.setdefault((other[len(base) :], name[len(base) :]), []).append((other, name))
    if not found:
        return []
    endings, pairs = max(found.items(), key=lambda each: len(each[1]))
    image, companion = map(printable, endings)
    field = field_of(companion.rpartition(".")[0].lstrip("_"))
    return [
        f"{len(pairs):,} images seem to belong to others, such as {printable(pairs[0][1])} to "
        f"{printable(pairs[0][0])}, but each is read as a sample of its own. To pair them by name "
        f'pass fields={{"image": "*{image}", "{field}": "*{companion}"}}.'
    ]
