"""Read samples that a table lists: Hugging Face's metadata files, and users' own manifests.

A row is a sample. Some of its columns name files; the others are values.
"""

from __future__ import annotations

import posixpath
from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from penstock.cache import ConfigError, DatasetError, DatasetNotFoundError
from penstock.readers.fieldtypes import (
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
from penstock.readers.formats.file_kinds import kind_of, stem, type_by_names
from penstock.readers.formats.span_samples import SpanSamples, left_out_sentences, whole_files
from penstock.readers.origin import QuarantineEntry, left_out_for

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from penstock.readers.fieldtypes import FieldType
    from penstock.readers.origin import Entry

METADATA = (b"metadata.csv", b"metadata.jsonl")
"""Hugging Face's names for a table that describes the files in its folder."""

UNREAD_METADATA = b"metadata.parquet"
_PATHS = ("path", "file_name", "filename", "file", "image")
_SUFFIX = "_file_name"
_FIELDS = {Image: "image", Array: "array", Text: "text", Audio: "audio", Video: "video"}
_SHOWN = 8
_MANIFESTS = ("csv", "tsv", "jsonl", "ndjson")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ListedTable:
    """A table of samples.

    folders: for each row, the folder to which its names are relative. paths: possible names of the
    column of the sample's own file. files: the columns that name files if the user named the
    fields; the table's columns then have the fields' names. is_whole: the table is supposed to list
    all images of the dataset. labels: columns that are classes unless the schema gives another
    type.
    """

    table: TextTable
    folders: Sequence[bytes]
    paths: tuple[str, ...]
    files: tuple[str, ...] | None = None
    is_whole: bool = False
    labels: tuple[str, ...] = ()


def read_table(data: bytes, *, name: str) -> TextTable:
    """Parse a table according to its extension. Raises DatasetError."""
    found = name.rpartition(".")[2].lower()
    if found not in _MANIFESTS:
        raise DatasetError(
            f"{name}: got a .{found} file, wanted a table: .csv, .tsv or .jsonl. Convert it to one "
            "of these."
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
    """Read a user's own list of samples: one of its columns is the path.

    places: the fields and their columns, if the user named them. Raises ConfigError, DatasetError.
    """
    table = read_table(data, name=name)
    folders = [b""] * len(table)
    if not places:
        return ListedTable(table=table, folders=folders, paths=_PATHS)
    places = [(field, _column_of(column, table)) for field, column in places]
    unknown = [column for _, column in places if column not in table.columns]
    if unknown:
        raise ConfigError(
            f'fields: got the column "{unknown[0]}", but {name} has {list(table.columns)[:_SHOWN]}.'
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
            f"fields: got {dict(places)}, and none of these columns names files. Columns of files "
            f"are called {', '.join(_PATHS)}, or end in {_SUFFIX}. Call the field of the files "
            f'"image", or give its type: schema={{"{places[0][0]}": Image()}}.'
        )
    renamed = replace(table, columns={field: table.columns[column] for field, column in places})
    # Hugging Face's models take the column "label" under the name "labels".
    labels = tuple(f for f, column in places if column == LABEL and f in LABELS)
    return ListedTable(
        table=renamed, folders=folders, paths=_PATHS, files=tuple(files), labels=labels
    )


def _column_of(name: str, table: TextTable) -> str:
    """Return the column that a user names, by its own name or by that of its field."""
    if name in table.columns:
        return name
    if name + _SUFFIX in table.columns:
        return name + _SUFFIX
    paths = [path for path in _PATHS if path in table.columns]
    return paths[0] if len(paths) == 1 and name in _FIELDS.values() else name


def metadata_table(files: Sequence[tuple[bytes, bytes]]) -> ListedTable:
    """Read Hugging Face's metadata files as one table. files: names and bytes, in order.

    Raises DatasetError if there are files of both kinds.
    """
    kinds = {extension(name) for name, _ in files}
    if len(kinds) > 1:
        raise DatasetError(
            f"{printable(files[0][0])} and {printable(files[-1][0])}: metadata must be .csv in "
            "all folders, or .jsonl in all folders. Remove one file, or convert it."
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
        places=[f"{t.source}, {t.place(row)}" for t in tables for row in range(len(t))],
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
) -> SpanSamples:
    """Return the rows as samples, in their order. Rows whose file doesn't exist are quarantined.

    found: all files by name. root: of a local dataset; paths may start with it.

    Raises DatasetNotFoundError (the table has no rows), DatasetError (no column of paths, a path
    outside of the dataset, or none of the files exists).
    """
    table = listed.table
    if listed.files is None:
        columns = _file_columns(table, listed.paths, schema)
    else:
        columns = {field: field for field in listed.files}
    names = {column: _names(table, column, listed.folders, root) for column in columns}
    types = {column: type_by_names(filter(None, each)) for column, each in names.items()}
    main = next(iter(columns))
    if main in listed.paths and listed.files is None:
        columns[main] = _FIELDS.get(type(types[main]), "file")
    if not len(table):
        raise DatasetNotFoundError(f"{url}: {table.source} has no rows, so it lists no samples.")
    missing = _missing(table, names, columns, main, found)
    if len(missing) == len(table):
        raise DatasetError(
            f"{url}: none of the {len(table):,} rows of {table.source} names an existing file"
            f'{_example(missing[0], found)}. Paths in "{main}" are relative to the dataset\'s '
            "root; those of a metadata file, to its folder."
            + _remedy_for(missing[0].name, found, url)
        )
    kept = [row for row in range(len(table)) if row not in missing]
    files, places = _places(names, kept, found)
    in_files = {field: schema.get(field, types[column]) for column, field in columns.items()}
    given = {**dict.fromkeys(listed.labels, ClassLabel()), **schema}
    values = fields_of(
        table.without(*columns).take(kept), {n: t for n, t in given.items() if n not in in_files}
    )
    unlisted = []
    if listed.is_whole:
        named = {file.name for file in files}
        unlisted = [n for n in found if kind_of(n) == "image" and n not in named]
    samples = SpanSamples(
        names=[name for row in kept if (name := names[main][row]) is not None],
        files=files,
        spans={columns[column]: whole_files(each, files) for column, each in places.items()},
        types=in_files,
        quarantined=list(missing.values()),
        left_out=[
            *left_out_sentences(
                f"of {len(table):,} rows of {table.source}",
                [missing[row] for row in sorted(missing)],
            ),
            *values.doubts,
            *_hints(table, values.types, found, listed.folders),
            *(
                f"{len(unlisted):,} images are left out because no row of {table.source} names "
                f"them, such as {printable(name)}."
                for name in unlisted[:1]
            ),
            *(
                f'the column "{name}" of {table.source} is left out: {why}.'
                for name, why in values.left_out.items()
            ),
        ],
        unnamed=left_out_for("no row of the metadata names it", dict.fromkeys(unlisted, 1)),
    ).with_table(values)
    # In the order of the table's columns, the sample's own file first.
    order = [columns[main], *(columns.get(name, name) for name in table.columns)]
    return replace(samples, types={n: samples.types[n] for n in order if n in samples.types})


def _file_columns(
    table: TextTable, paths: Sequence[str], schema: Mapping[str, FieldType]
) -> dict[str, str]:
    """Return the field of each column that names files, the sample's own file first."""
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
            f"names each row's file: {', '.join(paths)}, or a name that ends in {_SUFFIX}. For a "
            'manifest, you can name it with fields={"image": "its column", …}.'
        )
    columns = {name: "image" for name in mains}  # `listed_samples` adapts it to the files
    columns |= {name: name.removesuffix(_SUFFIX) for name in others}
    repeated = [f for f, count in Counter(columns.values()).items() if count > 1]
    repeated += [
        f for c, f in columns.items() if f != c and f in table.columns and f not in columns
    ]
    if repeated:
        raise DatasetError(
            f'{table.source}: the field "{repeated[0]}" comes from two columns. Rename one.'
        )
    return columns


def _is_of_files(values: Sequence[object], type: FieldType) -> bool:
    """Return True if a column of this type names files. Arrays may be files or values."""
    if not isinstance(type, COLUMN_TYPES):
        return True
    first = next((value for value in values if value is not None), None)
    is_array = not isinstance(type, Value | ClassLabel | MultiLabel | Text)
    return is_array and isinstance(first, str) and first.endswith(".npy")


def _names(
    table: TextTable, column: str, folders: Sequence[bytes], root: bytes
) -> list[bytes | None]:
    """Return the file that each row names, below the dataset's root."""

    def below(row: int, value: object) -> bytes:
        wanted, encoded = "the name of a file.", None
        if isinstance(value, str):
            wanted = "the name of a file, without half of a character (a lone surrogate)."
            encoded = encoded_name(value)
        if encoded is not None:
            folder = folders[row]
            if root and encoded.startswith(root + b"/"):
                encoded, folder = encoded[len(root) + 1 :], b""
            path = posixpath.normpath(posixpath.join(folder, encoded))
            leaves = encoded.startswith(b"/") or path.startswith(b"../") or path in (b"..", b".")
            if not leaves and b"\0" not in encoded:
                return path
            wanted = (
                "a path relative to the dataset's root that stays below it. Give the folder that "
                "holds all files as the URL, and paths below it in the table."
            )
        where = f"{table.source}, {table.place(row)}"
        raise DatasetError(f'{where}: got "{column}" = {value!r}, wanted {wanted}')

    return [
        None if value is None else below(row, value)
        for row, value in enumerate(table.columns[column])
    ]


def _missing(
    table: TextTable,
    names: Mapping[str, Sequence[bytes | None]],
    columns: Mapping[str, str],
    main: str,
    found: Mapping[bytes, Entry],
) -> dict[int, QuarantineEntry]:
    """Return a quarantine entry for each row that can't be a sample.

    Either a file that it names doesn't exist, or it doesn't name the sample's own file.
    """
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


def _example(missing: QuarantineEntry, found: Mapping[bytes, Entry]) -> str:
    """Return a missing file, and a file of the same name in another folder if there is one."""
    base = missing.name.rpartition(b"/")[2]
    bases = ((name, name.rpartition(b"/")[2]) for name in found)
    same = next((name for name, own in bases if base in (own, stem(own))), None)
    exists = "" if same is None else f"; {printable(same)} exists"
    return f" ({printable(missing.name)}: {missing.reason}{exists})"


def _remedy_for(name: bytes, found: Mapping[bytes, Entry], url: str) -> str:
    """Return a remedy if an existing file resembles a missing one, else ""."""
    if name.replace(b"\\", b"/") in found:
        return " Write / instead of \\ in the table."
    for each in found:
        if stem(each) == name:
            return f" {printable(each)} exists: write names with their extension."
        folder, _, base = each.rpartition(b"/")
        if base == name:
            return (
                f" {printable(each)} exists: give {url.rstrip('/')}/{printable(folder)} as the "
                "URL, and the table's full path as manifest=."
            )
    return ""


def _places(
    names: Mapping[str, Sequence[bytes | None]], kept: Sequence[int], found: Mapping[bytes, Entry]
) -> tuple[list[Entry], dict[str, NDArray[np.int64]]]:
    """Return the named files, each once, and their numbers in each kept row."""
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


def _hints(
    table: TextTable,
    types: Mapping[str, FieldType],
    found: Mapping[bytes, Entry],
    folders: Sequence[bytes],
) -> list[str]:
    """Return warnings about columns of text that name images: they aren't read unless asked for."""
    hints = []
    for name in types:
        row = next((i for i, v in enumerate(table.columns[name]) if isinstance(v, str)), None)
        if row is None:
            continue
        value = encoded_name(str(table.columns[name][row])) or b""
        path = posixpath.normpath(posixpath.join(folders[row], value))
        if kind_of(value) == "image" and path in found:
            hints.append(
                f'the column "{name}" of {table.source} is text, and names files: to read them '
                f'pass schema={{"{name}": Image()}}, or Mask(of="image").'
            )
    return hints
