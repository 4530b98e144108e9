"""Read samples that a table lists: Hugging Face's metadata files, and the user's own manifests.

A row is a sample. Some of its columns name files; the others are values.
"""

from __future__ import annotations

import posixpath
from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from penstock.cache import ConfigError, DatasetError, DatasetNotFoundError
from penstock.readers.fields import (
    COLUMN_TYPES,
    LABEL,
    LABELS,
    Array,
    Audio,
    ClassLabel,
    Image,
    MultiLabel,
    Text,
    TextTable,
    Value,
    Video,
    csv_table,
    fields_of,
    jsonl_table,
)
from penstock.readers.files import encoded_name, extension, printable
from penstock.readers.formats.candidates import MISSING
from penstock.readers.formats.folder.folder_files import IMAGES, stem, type_by_name
from penstock.readers.formats.folder.folder_samples import FolderSamples
from penstock.readers.origin import QuarantineEntry, left_out_for

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from penstock.readers.fields import FieldType, TableFields
    from penstock.readers.origin import Entry

METADATA = (b"metadata.csv", b"metadata.jsonl")
"""Hugging Face's names of a table beside the files that it describes."""

UNREAD_METADATA = b"metadata.parquet"
_PATHS = ("path", "file_name", "filename", "file", "image")
_SUFFIX = "_file_name"
_OWN = {Image: "image", Array: "array", Text: "text", Audio: "audio", Video: "video"}
_SHOWN = 8
_MANIFESTS = ("csv", "tsv", "jsonl", "ndjson")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ListedTable:
    """A table of samples.

    folders: of each row, the folder that its names are relative to. paths: names that the column of
    the sample's own file may have. files: the columns that name files, where the user says what the
    fields are: the table's columns have the fields' names then. is_whole: it is meant to list all
    images that are there. labels: columns that hold classes, if nothing else is said of them.
    """

    table: TextTable
    folders: Sequence[bytes]
    paths: tuple[str, ...]
    files: tuple[str, ...] | None = None
    is_whole: bool = False
    labels: tuple[str, ...] = ()


def read_table(data: bytes, *, name: str) -> TextTable:
    """A table by its extension. Raises DatasetError."""
    found = name.rpartition(".")[2].lower()
    if found not in _MANIFESTS:
        raise DatasetError(
            f"{name}: got a .{found} file, wanted a table: .csv, .tsv or .jsonl. Save it as one of "
            "those."
        )
    read = csv_table if found in ("csv", "tsv") else jsonl_table
    return read(data, source=name)


def manifest_table(
    data: bytes,
    *,
    name: str,
    places: Sequence[tuple[str, str]] = (),
    schema: Mapping[str, FieldType] | None = None,
) -> ListedTable:
    """A user's own list of samples: one of its columns is the path. places: the fields and their
    columns, where the user says so. Raises ConfigError, DatasetError."""
    table = read_table(data, name=name)
    folders = [b""] * len(table)
    if not places:
        return ListedTable(table=table, folders=folders, paths=_PATHS)
    places = [(field, _column_of(told, table)) for field, told in places]
    unknown = [column for _, column in places if column not in table.columns]
    if unknown:
        raise ConfigError(
            f'fields: got the column "{unknown[0]}", and {name} has {list(table.columns)[:_SHOWN]}.'
        )
    types = schema or {}
    files = [
        field
        for field, column in places
        if field == "image"
        or column in _PATHS
        or column.endswith(_SUFFIX)
        or (field in types and _is_of_files(table.columns[column], types[field]))
    ]
    if not files:
        raise ConfigError(
            f"fields: got {dict(places)}, and none of these columns names files: "
            f"{', '.join(_PATHS)}, or names that end in {_SUFFIX}. Call the field of the files "
            f'"image", or say which it is: schema={{"{places[0][0]}": Image()}}.'
        )
    renamed = replace(table, columns={field: table.columns[column] for field, column in places})
    # Models of Hugging Face take the labels of "label" as "labels".
    labels = tuple(f for f, column in places if column == LABEL and f in LABELS)
    return ListedTable(
        table=renamed, folders=folders, paths=_PATHS, files=tuple(files), labels=labels
    )


def _column_of(told: str, table: TextTable) -> str:
    """The column that a user names, by its own name or by that of the field that it is."""
    if told in table.columns:
        return told
    if told + _SUFFIX in table.columns:
        return told + _SUFFIX
    paths = [name for name in _PATHS if name in table.columns]
    return paths[0] if len(paths) == 1 and told in _OWN.values() else told


def metadata_table(files: Sequence[tuple[bytes, bytes]]) -> ListedTable:
    """Hugging Face's metadata files, as one table. files: names and bytes, in order. Raises
    DatasetError for files of two kinds, and in one folder."""
    kinds = {extension(name) for name, _ in files}
    if len(kinds) > 1:
        raise DatasetError(
            f"{printable(files[0][0])} and {printable(files[-1][0])}: metadata is either .csv or "
            ".jsonl in all folders. Remove one, or convert it."
        )
    tables = [read_table(data, name=printable(name)) for name, data in files]
    folders = [
        name.rpartition(b"/")[0]
        for (name, _), table in zip(files, tables, strict=True)
        for _ in range(len(table))
    ]
    return ListedTable(table=_joined(tables), folders=folders, paths=("file_name",), is_whole=True)


def _joined(tables: Sequence[TextTable]) -> TextTable:
    if len(tables) == 1:
        return tables[0]
    names = dict.fromkeys(name for table in tables for name in table.columns)
    return TextTable(
        source="metadata",
        columns={
            name: [
                value for table in tables for value in table.columns.get(name, [None] * len(table))
            ]
            for name in names
        },
        places=[f"{table.source}:{place}" for table in tables for place in table.places],
        unit="row",
        is_text=tables[0].is_text,
    )


def listed_samples(
    url: str,
    found: Mapping[bytes, Entry],
    listed: ListedTable,
    schema: Mapping[str, FieldType],
    *,
    root: bytes = b"",
) -> FolderSamples:
    """The rows as samples, in their order. found: all files by name. A row whose file isn't there
    is quarantined by name. root: of a local dataset, which paths may begin with.

    Raises DatasetError: no column of paths, a path that leaves the dataset, no file is there.
    """
    table = listed.table
    if listed.files is None:
        columns = _file_columns(table, listed.paths, schema)
    else:
        columns = {field: field for field in listed.files}
    names = {column: _names(table, column, listed.folders, root) for column in columns}
    main = next(iter(columns))
    if main in listed.paths and listed.files is None:
        columns[main] = _OWN.get(type(_type([n for n in names[main] if n is not None])), "file")
    if not len(table):
        raise DatasetNotFoundError(f"{url}: {table.source} has no rows, and lists no samples.")
    missing = _missing(table, names, columns, main, found)
    if len(missing) == len(table):
        first = next(iter(missing.values()), None)
        told = (
            f" ({printable(first.name)}: {first.reason}{_near(first.name, found)})" if first else ""
        )
        raise DatasetError(
            f"{url}: of {len(table):,} rows of {table.source} none names a file that is there"
            f'{told}. Paths in "{main}" are relative to the dataset\'s root; of a metadata file, '
            f"to its folder.{_meaning_of(first.name, found, url) if first else ''}"
        )
    kept = [row for row in range(len(table)) if row not in missing]
    files, places = _places(names, kept, found)
    shown = {columns[column]: [n for n in names[column] if n is not None] for column in columns}
    types = {field: _type(shown[field]) for field in shown}
    types |= {name: schema[name] for name in types if name in schema}
    given = {**dict.fromkeys(listed.labels, ClassLabel()), **schema}
    values = fields_of(
        table.without(*columns).take(kept), {n: t for n, t in given.items() if n not in types}
    )
    unlisted = _unlisted(files, found) if listed.is_whole else []
    samples = FolderSamples(
        names=[name for row in kept if (name := names[main][row]) is not None],
        files=files,
        places={columns[column]: numbers for column, numbers in places.items()},
        types=types,
        quarantined=list(missing.values()),
        left_out=[
            *_missing_message(table, missing),
            *values.doubts,
            *_hints(table, values.types, found, listed.folders),
            *_unlisted_message(table, unlisted),
            *_unread(table, values),
        ],
        unnamed=left_out_for("no row of the metadata names it", dict.fromkeys(unlisted, 1)),
    ).with_table(values)
    return replace(samples, types=_ordered(samples.types, table, columns))


def _file_columns(
    table: TextTable, paths: Sequence[str], schema: Mapping[str, FieldType]
) -> dict[str, str]:
    """The columns that name files, the sample's own first, each with its field."""
    mains = [name for name in paths if name in table.columns]
    others = [name for name in table.columns if name.endswith(_SUFFIX) and name != _SUFFIX]
    others += [
        name
        for name, type in schema.items()
        if name in table.columns
        and name not in (*mains, *others)
        and _is_of_files(table.columns[name], type)
    ]
    if len(mains) > 1:
        raise DatasetError(
            f"{table.source}: got the columns {mains}, and each could be the path. Keep one of "
            "them, or rename the others."
        )
    if not mains and not others:
        raise DatasetError(
            f"{table.source}: got the columns {list(table.columns)[:_SHOWN]}, wanted one that "
            f"names each row's file: {', '.join(paths)}, or names that end in {_SUFFIX}. Of a "
            'manifest fields={"image": "its column", …} says which it is.'
        )
    columns = {name: "image" for name in mains}  # or what the files are
    columns |= {name: name.removesuffix(_SUFFIX) for name in others}
    twice = [f for f, count in Counter(columns.values()).items() if count > 1]
    taken = [f for c, f in columns.items() if f != c and f in table.columns and f not in columns]
    if twice or taken:
        raise DatasetError(
            f'{table.source}: the field "{(twice or taken)[0]}" comes from two columns. Rename one.'
        )
    return columns


def _is_of_files(values: Sequence[object], type: FieldType) -> bool:
    """Whether a column that has this type names files; arrays may be either."""
    if not isinstance(type, COLUMN_TYPES):
        return True
    first = next((value for value in values if value is not None), None)
    is_array = not isinstance(type, Value | ClassLabel | MultiLabel | Text)
    return is_array and isinstance(first, str) and first.endswith(".npy")


def _names(
    table: TextTable, column: str, folders: Sequence[bytes], root: bytes
) -> list[bytes | None]:
    """The file that each row names, below the dataset's root."""
    names: list[bytes | None] = []
    for row, value in enumerate(table.columns[column]):
        if value is None:
            names.append(None)
            continue
        if not isinstance(value, str):
            raise DatasetError(
                f'{table.source}, {table.place(row)}: "{column}" is {value!r}, wanted the name of '
                "a file."
            )
        told, folder = encoded_name(value), folders[row]
        if told is None:
            raise DatasetError(
                f'{table.source}, {table.place(row)}: got "{column}" = {value!r}, wanted the name '
                "of a file: this holds half of a character (a lone surrogate). Mend the table."
            )
        if root and told.startswith(root + b"/"):
            told, folder = told[len(root) + 1 :], b""
        path = posixpath.normpath(posixpath.join(folder, told))
        if (
            told.startswith(b"/")
            or path.startswith(b"../")
            or path in (b"..", b".")
            or b"\0" in told
        ):
            raise DatasetError(
                f'{table.source}, {table.place(row)}: got "{column}" = {value!r}, wanted '
                "a path relative to the dataset's root that stays below it. Give the root that all "
                "files share as the URL, and paths below it."
            )
        names.append(path)
    return names


def _missing(
    table: TextTable,
    names: Mapping[str, Sequence[bytes | None]],
    columns: Mapping[str, str],
    main: str,
    found: Mapping[bytes, Entry],
) -> dict[int, QuarantineEntry]:
    """The rows that can't be samples: a file isn't there, or the sample's own isn't named."""
    missing: dict[int, QuarantineEntry] = {}
    for column, field in columns.items():
        for row, name in enumerate(names[column]):
            where = f"{table.source}, {table.place(row)}"
            if name is not None and name not in found:
                reason = f"{field}: the file isn't there ({where})"
            elif name is None and column == main:
                name, reason = where.encode(), f"the row names no file ({where})"
            else:
                continue
            missing.setdefault(row, QuarantineEntry(name=name, reason=reason))
    return missing


def _meaning_of(name: bytes, found: Mapping[bytes, Entry], url: str) -> str:
    """What a name that isn't there seems to stand for."""
    if name.replace(b"\\", b"/") in found:
        return " Write / where the table has \\."
    for each in found:
        if stem(each) == name:
            return f" {printable(each)} is there: write names with their extension."
        folder, _, base = each.rpartition(b"/")
        if base == name:
            return (
                f" {printable(each)} is there: give {url.rstrip('/')}/{printable(folder)} as the "
                "URL, and the table's full path as manifest=."
            )
    return ""


def _missing_message(table: TextTable, missing: Mapping[int, QuarantineEntry]) -> list[str]:
    if not missing:
        return []
    first = missing[min(missing)]
    return [
        f"{len(missing):,} of {len(table):,} rows of {table.source} are left out, such as "
        f"{printable(first.name)}: {first.reason}. All are in the index's quarantine.jsonl."
    ]


def _near(name: bytes, found: Mapping[bytes, Entry]) -> str:
    """A file that may be meant by a name that isn't there."""
    base = name.rpartition(b"/")[2]
    same = next(
        (n for n in found if base in (n.rpartition(b"/")[2], stem(n.rpartition(b"/")[2]))), b""
    )
    return f"; {printable(same)} is" if same else ""


def _unread(table: TextTable, values: TableFields) -> list[str]:
    return [
        f'the column "{name}" of {table.source} is left out: {why}.'
        for name, why in values.left_out.items()
    ]


def _unlisted(files: Sequence[Entry], found: Mapping[bytes, Entry]) -> list[bytes]:
    named = {file.name for file in files}
    return [name for name in found if extension(name) in IMAGES and name not in named]


def _unlisted_message(table: TextTable, others: Sequence[bytes]) -> list[str]:
    if not others:
        return []
    return [
        f"{len(others):,} images are no samples, as no row of {table.source} names them, such as "
        f"{printable(others[0])}."
    ]


def _places(
    names: Mapping[str, Sequence[bytes | None]], kept: Sequence[int], found: Mapping[bytes, Entry]
) -> tuple[list[Entry], dict[str, NDArray[np.int64]]]:
    """The files that are named, each once, and their numbers in each kept row."""
    number_of: dict[bytes, int] = {}
    places = {}
    for column, all_names in names.items():
        numbers = np.full(len(kept), MISSING, np.int64)
        for i, row in enumerate(kept):
            name = all_names[row]
            if name is not None:
                numbers[i] = number_of.setdefault(name, len(number_of))
        places[column] = numbers
    return [found[name] for name in number_of], places


def _type(names: Sequence[bytes]) -> FieldType:
    """What most files are; checking the others says what is wrong with them."""
    return next((type for type, _ in Counter(map(type_by_name, names)).most_common(1)), Image())


def _hints(
    table: TextTable,
    types: Mapping[str, FieldType],
    found: Mapping[bytes, Entry],
    folders: Sequence[bytes],
) -> list[str]:
    """Columns of text that name images too: nothing is read of them unasked."""
    hints = []
    for name in types:
        row = next((i for i, v in enumerate(table.columns[name]) if isinstance(v, str)), None)
        if row is None:
            continue
        told = encoded_name(str(table.columns[name][row])) or b""
        path = posixpath.normpath(posixpath.join(folders[row], told))
        if extension(told) in IMAGES and path in found:
            hints.append(
                f'the column "{name}" of {table.source} is text, and names files: to read them '
                f'say schema={{"{name}": Image()}}, or Mask(of="image").'
            )
    return hints


def _ordered(
    types: Mapping[str, FieldType], table: TextTable, columns: Mapping[str, str]
) -> dict[str, FieldType]:
    """The fields as the table has its columns, the sample's own file first."""
    order = [columns[next(iter(columns))], *(columns.get(name, name) for name in table.columns)]
    return {name: types[name] for name in dict.fromkeys(order) if name in types}
