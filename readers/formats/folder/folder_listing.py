"""Turn a folder's files into samples, by their layout or by the layout that the user describes.

Tables and other small files of the folder are read completely for this. If file names suggest
another meaning than the one that was chosen, a warning reports it, so that wrong labels are
noticed.
"""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

from penstock.cache import ConfigError, DatasetError
from penstock.readers.fieldtypes import MAX_TABLE_BYTES, is_mask_name, masks_by_name
from penstock.readers.files import (
    IMAGES,
    extension,
    is_passed_over,
    kind_of,
    printable,
    stem,
    unsafe_reason,
)
from penstock.readers.formats.candidates import MISSING
from penstock.readers.formats.folder.listed_samples import (
    METADATA,
    UNREAD_METADATA,
    listed_samples,
    manifest_table,
    metadata_table,
)
from penstock.readers.formats.folder.named_samples import class_folder_samples, paired_samples
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
    warn_of_left_out,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from penstock.readers.fieldtypes import FieldType
    from penstock.readers.formats.folder.listed_samples import ListedTable
    from penstock.readers.formats.format import DatasetFiles
    from penstock.readers.formats.span_samples import SpanSamples
    from penstock.readers.origin import Entry, Origin

# An index records the modification times of at most this many tables, JSON files and texts. They
# are compared each time the index is opened, to detect changes.
_MAX_TIMED_FILES = 2**14
_EDITED = (b".json", b".JSON", b".txt", b".TXT", b".caption")
_NUMBERS = ("depth", "depths", "disp", "disparity", "disparities")


class FolderFiles(SpanListing):
    """The listed files of a folder."""

    def __init__(self, origin: Origin, found: DatasetFiles) -> None:
        """Find the user's table. Raises ConfigError (it doesn't exist), FetchError."""
        files = found.entries
        self._found_folders = found.directories
        self._manifest = _manifest_entry(origin) if origin.arrangement.manifest else None
        some = (file for file in files if file.name.endswith(METADATA))
        self._metadata = [file for file in some if file.name.rpartition(b"/")[2] in METADATA]
        if found.directories:
            times = {table.name: table.mtime_ns for table in self._tables(origin, files)}
            found = replace(found, directories={**found.directories, **times})
        is_apart = self._manifest is not None and self._manifest not in files
        listed = [*files, self._manifest] if is_apart and self._manifest else files
        super().__init__(origin, found, listed=listed)

    def samples(self, files: Sequence[Entry], *, workers: int) -> SpanSamples:
        """Return all samples. Reads tables and JSON files."""
        return with_masks(self._samples(files, workers=workers), self.given)

    def _tables(self, origin: Origin, files: Sequence[Entry]) -> list[Entry]:
        """Return the files that are read for the index, and texts, which people edit in place."""
        if self._manifest is not None:
            return [self._manifest]
        if origin.arrangement.places:
            return []
        if origin.arrangement.manifest is None and self._metadata:
            return self._metadata
        edited = [file for file in files if file.name.endswith(_EDITED)]
        return edited[:_MAX_TIMED_FILES]

    def _samples(self, files: Sequence[Entry], *, workers: int) -> SpanSamples:
        origin, schema, url = self.origin, self.given, self.origin.url
        arrangement, manifest = origin.arrangement, self._manifest

        def read(some: Sequence[Entry]) -> list[bytes]:
            parts = [(file, 0, file.size_bytes) for file in some]
            return read_file_parts(origin, parts, workers=workers)

        def listed(table: ListedTable) -> SpanSamples:
            by_name = {file.name: file for file in files}
            root = origin.root if isinstance(origin, LocalFolder) else b""
            return listed_samples(url, by_name, table, schema, root=root)

        if manifest is not None:
            place = LocalFolder(b"/") if os.path.isabs(manifest.name) else origin
            (data,) = read_file_parts(place, [(manifest, 0, manifest.size_bytes)], workers=1)
            name = printable(manifest.name)
            return listed(manifest_table(data, name=name, places=arrangement.places, schema=schema))
        if arrangement.places:
            return paired_samples(url, files, arrangement.places, schema)
        names = [file.name for file in files]
        check_store(url, names)
        if arrangement.manifest != NO_TABLE:
            unread = next((n for n in names if n.rpartition(b"/")[2] == UNREAD_METADATA), None)
            if unread is not None:
                raise DatasetError(
                    f"{url}: {printable(unread)} isn't supported yet. Convert it to metadata.csv "
                    "or metadata.jsonl; or pass manifest=False to read only the images."
                )
            if self._metadata:
                if all(b"/" in file.name for file in self._metadata):
                    check_splits(url, names)
                tables = zip(self._metadata, read(self._metadata), strict=True)
                return listed(metadata_table([(f.name, data) for f, data in tables], schema))
        if "label" not in schema:
            check_layout(url, names)
        samples = class_folder_samples(
            files,
            read,
            schema,
            folders=self._folders(),
            allow_empty=arrangement.allow_empty,
            url=url,
        )
        main = next(iter(samples.types))
        considered = (*samples.names, *(each.name for each in samples.quarantined))
        others = [name for name in considered if kind_of(name) != main]
        passed_over = warn_of_left_out(url, others, labelled="label" in samples.types)
        hints = hints_of_names(url, samples.names, samples.types, has_labels="label" in schema)
        left_out = [*samples.left_out, *hints]
        return replace(samples, passed_over=passed_over, left_out=left_out, has_stray_files=True)

    def _folders(self) -> list[bytes]:
        """Return the folders directly below the root, empty ones too; none if a URL names files."""
        if self.origin.selection is not None:
            return []
        if self.origin.is_local:  # without links that lead back
            return [name for name in self._found_folders if name and b"/" not in name]
        return [name for name in self.origin.names().folders if not is_passed_over(name)]


def _manifest_entry(origin: Origin) -> Entry:
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


def with_masks(samples: SpanSamples, given: Mapping[str, FieldType]) -> SpanSamples:
    """Return the samples with the types of fields in files settled: given ones, and masks by their
    names."""
    types = {name: given.get(name, samples.types[name]) for name in samples.spans}
    extensions = {
        name: {extension(samples.files[n].name) for n in set(spans.files.tolist()) - {MISSING}}
        for name, spans in samples.spans.items()
        if name not in given
    }
    masks, notes = masks_by_name(types, extensions, given=given)
    types = {**samples.types, **types, **masks}
    return replace(
        samples,
        types=types,
        notes=[*samples.notes, *(f"{note}." for note in notes)],
        hints=pictures_of_numbers(types, extensions),
    )


def hints_of_names(
    url: str, names: Sequence[bytes], types: Mapping[str, FieldType], *, has_labels: bool
) -> list[str]:
    """Return warnings about samples of one file each.

    names: of the samples. has_labels: the user's schema contains labels.
    """
    label = types.get("label")
    classes = label.class_names if label is not None else ()
    if not classes:
        return _pairing_hints(names)
    if has_labels or len(classes) != 1 or role_of(classes[0]) is None:
        return []
    return [
        f"{classes[0]!r} is the only folder, and is read as the only class: every label is 0. If "
        f"it isn't a class, give {url.rstrip('/')}/{classes[0]} as the URL; if it is one, pass "
        'schema={"label": ClassLabel()}.'
    ]


def _pairing_hints(names: Iterable[bytes]) -> list[str]:
    """Return a warning if images are named like others plus a suffix: 1_mask.png next to 1.jpg."""
    by_stem = {stem(name): name for name in names if extension(name) in IMAGES}
    found: Counter[tuple[bytes, bytes]] = Counter()
    example: dict[tuple[bytes, bytes], tuple[bytes, bytes]] = {}
    for own, name in by_stem.items():
        base, mark, suffix = own.rpartition(b"_")
        other = by_stem.get(base)
        if mark and other is not None and role_of(printable(suffix)) == "companion":
            kind = (other[len(base) :], name[len(base) :])
            found[kind] += 1
            example.setdefault(kind, (other, name))
    if not found:
        return []
    kind, count = found.most_common(1)[0]
    first, second = map(printable, example[kind])
    field = field_of(printable(kind[1].rpartition(b".")[0].lstrip(b"_")))
    return [
        f"{count:,} images seem to belong to others, such as {second} to {first}, but each is read "
        f'as a sample of its own. To pair them by name pass fields={{"image": '
        f'"*{printable(kind[0])}", "{field}": "*{printable(kind[1])}"}}.'
    ]


def pictures_of_numbers(
    types: Mapping[str, FieldType], extensions: Mapping[str, Iterable[str]]
) -> list[str]:
    """Return warnings about image fields whose names suggest numbers.

    extensions: of the fields whose types weren't given.
    """
    images = [name for name, type in types.items() if type.is_image]
    hints = []
    for name in images if len(images) > 1 else ():
        found = {*extensions.get(name, ())}
        other = next(each for each in images if each != name)
        if found and is_mask_name(name, ()) and not is_mask_name(name, found):
            hints.append(
                f'"{name}" is read as pictures: only PNG, TIFF and BMP preserve class numbers, and '
                f"its files are {', '.join(f'.{each}' for each in sorted(found))}. To read masks, "
                f'convert them and pass schema={{"{name}": Mask(of="{other}")}}.'
            )
        elif found and name.rpartition("_")[2] in _NUMBERS and not {"jpg", "jpeg"} & found:
            hints.append(
                f'"{name}" is read as pictures, which are decoded to 8 bits. To read the stored '
                f'numbers pass schema={{"{name}": Mask(of="{other}")}}.'
            )
    return hints
