"""A folder's files as candidates, by the layout that they have or that the user says."""

from __future__ import annotations

import warnings
from dataclasses import replace
from functools import cached_property, partial
from typing import TYPE_CHECKING

from penstock.cache.errors import DatasetError, PenstockWarning
from penstock.readers.files.names import is_passed_over, printable
from penstock.readers.formats.arranging import given_types
from penstock.readers.formats.folder.beside import beside
from penstock.readers.formats.folder.hints import hints_of_names
from penstock.readers.formats.folder.kinds import ARRAYS, AUDIO, TEXTS, VIDEO
from penstock.readers.formats.folder.listed import (
    METADATA,
    UNREAD_METADATA,
    Listed,
    listed_samples,
    manifest,
    metadata,
)
from penstock.readers.formats.folder.paired import paired
from penstock.readers.formats.folder.reading import manifest_entry, read_manifest, read_whole
from penstock.readers.formats.folder.samples import candidates_of
from penstock.readers.formats.format import Snapshot
from penstock.readers.origin.arrangement import NO_TABLE
from penstock.readers.origin.local import LocalFolder
from penstock.readers.origin.unread import (
    check_layout,
    check_splits,
    check_store,
    extension,
    warn_of_left_out,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from penstock.readers.fields.field_types import FieldType
    from penstock.readers.formats.candidates import Candidates
    from penstock.readers.formats.folder.listing import FolderListing
    from penstock.readers.formats.folder.samples import Samples
    from penstock.readers.origin.origin import Entry, Origin

MAX_NOTED_FILES = 2**14
"""Of so many tables, JSON files and texts an index notes the times, to see by itself that one
changed: each is looked at when it is opened."""

_OWN = {"array": ARRAYS, "text": TEXTS, "audio": AUDIO, "video": VIDEO}
_EDITED = (b".json", b".JSON", b".txt", b".TXT", b".caption")


class FolderFiles:
    """The files of a folder, listed."""

    def __init__(self, origin: Origin, listing: FolderListing) -> None:
        """Raises ConfigError (a manifest that isn't there), FetchError."""
        self._origin, self._listing = origin, listing
        self._manifest = manifest_entry(origin) if origin.arrangement.manifest else None

    def snapshot(self) -> Snapshot:
        """What an index notes of the files, and of the times of folders and tables."""
        files, directories = self._listing.files, dict(self._listing.directories)
        if self._manifest is not None and self._manifest not in files:
            files = [*files, self._manifest]
        if directories:
            directories |= {table.name: table.mtime_ns for table in self._tables()}
        return Snapshot.of(files, directories)

    def candidates(self, *, workers: int) -> Candidates:
        """What may be samples; tables and JSON files are read for that."""
        del workers
        return self._candidates

    def counterparts(
        self, number: int, name: bytes, *, total: int, workers: int
    ) -> Iterator[tuple[Candidates, int]]:
        """The shard of that number, and those that it can be instead: virtual shards of which no
        file decodes aren't in the index."""
        del name, workers
        candidates = self._candidates
        without_samples = candidates.shards.shards - total
        for here in range(number, number + without_samples + 1):
            yield candidates, here

    @cached_property
    def _candidates(self) -> Candidates:
        schema = given_types(self._origin.arrangement)
        samples = self._samples(schema).good()
        url = self._origin.url
        if samples.left_out:
            warnings.warn(f"{url}: {' '.join(samples.left_out)}", PenstockWarning, stacklevel=9)
        quarantined = [*self._listing.quarantined, *samples.quarantined]
        return candidates_of(replace(samples, quarantined=quarantined), schema, url=url)

    def _tables(self) -> list[Entry]:
        """The files that are read for the index, and texts, which people edit in place."""
        if self._manifest is not None:
            return [self._manifest]
        arrangement = self._origin.arrangement
        if arrangement.places:
            return []
        if arrangement.manifest is None and (found := self._metadata()):
            return found
        edited = [file for file in self._listing.files if file.name.endswith(_EDITED)]
        return edited[:MAX_NOTED_FILES]

    def _metadata(self) -> list[Entry]:
        some = (file for file in self._listing.files if file.name.endswith(METADATA))
        return [file for file in some if file.name.rpartition(b"/")[2] in METADATA]

    def _samples(self, schema: Mapping[str, FieldType]) -> Samples:
        origin, files, url = self._origin, self._listing.files, self._origin.url
        arrangement = origin.arrangement
        if self._manifest is not None:
            data = read_manifest(origin, self._manifest)
            name = printable(self._manifest.name)
            told = manifest(data, name=name, places=arrangement.places, schema=schema)
            return self._listed(told, schema)
        if arrangement.places:
            return paired(url, files, arrangement.places, schema)
        names = [file.name for file in files]
        check_store(url, names)
        if arrangement.manifest != NO_TABLE:
            found = self._metadata()
            self._refuse_parquet(names)
            if found:
                if all(b"/" in file.name for file in found):
                    check_splits(url, names)
                read = read_whole(origin, found)
                pairs = [(file.name, data) for file, data in zip(found, read, strict=True)]
                return self._listed(metadata(pairs), schema)
        if "label" not in schema:
            check_layout(url, names)
        samples = beside(
            files,
            partial(read_whole, origin),
            schema,
            folders=self._folders(),
            allow_empty=arrangement.allow_empty,
            url=url,
        )
        own = _OWN.get(next(iter(samples.types)), frozenset())
        mine = (*samples.names, *(each.name for each in samples.quarantined))
        others = [name for name in mine if extension(name) not in own]
        passed_over = warn_of_left_out(url, others, labelled="label" in samples.types)
        hints = hints_of_names(url, samples.names, samples.types, asked="label" in schema)
        left_out = [*samples.left_out, *hints]
        return replace(samples, passed_over=passed_over, left_out=left_out, has_papers=True)

    def _folders(self) -> list[bytes]:
        """The folders directly below the root, empty ones too; none where the URL names files."""
        if self._origin.selection is not None:
            return []
        if isinstance(self._origin, LocalFolder):
            return [name for name in self._listing.directories if name and b"/" not in name]
        return [name for name in self._origin.names().folders if not is_passed_over(name)]

    def _listed(self, told: Listed, schema: Mapping[str, FieldType]) -> Samples:
        by_name = {file.name: file for file in self._listing.files}
        origin = self._origin
        root = origin.root if isinstance(origin, LocalFolder) else b""
        return listed_samples(origin.url, by_name, told, schema, root=root)

    def _refuse_parquet(self, names: list[bytes]) -> None:
        found = next((n for n in names if n.rpartition(b"/")[2] == UNREAD_METADATA), None)
        if found is not None:
            raise DatasetError(
                f"{self._origin.url}: {printable(found)} isn't read yet. Write it as metadata.csv "
                "or metadata.jsonl; or pass manifest=False, for the folders' images alone."
            )
