"""Read samples that a table lists: Hugging Face's metadata files, and users' own manifests.

A row is a sample. Some of its columns name files; the others are values.
"""

from __future__ import annotations

import posixpath
from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from penstock.cache import ConfigError, DatasetError, DatasetNotFoundError
from penstock.readers.fieldtypes import LABEL, LABELS, ClassLabel, csv_table, fields_of, jsonl_table
from penstock.readers.files import KINDS, encoded_name, extension, kind_of, printable
from penstock.readers.formats.candidates import Candidates, left_out_sentences
from penstock.readers.formats.file_kinds import TYPES, type_by_names
from penstock.readers.origin import QuarantineEntry, left_out_for

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from penstock.readers.fieldtypes import FieldType, FieldTypes, TextTable
    from penstock.readers.origin import Entry

METADATA = (b"metadata.csv", b"metadata.jsonl")
"""Hugging Face's names for a table that describes the files in its folder."""

UNREAD_METADATA = b"metadata.parquet"
_PATHS = ("path", "file_name", "filename", "file", "image")
_SUFFIX = "_file_name"
_FIELDS = {type(TYPES[kind]): kind for kind in KINDS.values() if kind != "json"}
_OWN_FILE = ""  # the field of the sample's own file, until the files' names decide it
_SHOWN = 8
_MANIFESTS = ("csv", "tsv", "jsonl", "ndjson")


@dataclass(frozen=True, slots=True, eq=False)
class ListedTable:
    """A table of samples.

    folders: for each row, the folder to which its names are relative. files: the field of each
    column that names files; the sample's own file comes first. is_whole: the table is supposed to
    list all images of the dataset. labels: columns that are classes unless the schema gives another
    type.
    """

    table: TextTable
    folders: Sequence[bytes]
    files: Mapping[str, str]
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
    data: bytes, name: str, places: Sequence[tuple[str, str]] = (), schema: FieldTypes | None = None
) -> ListedTable:
    """Read a user's own list of samples: one of its columns is the path.

    places: the fields and their columns, if the user named them. Raises ConfigError, DatasetError.
    """
    table, types = read_table(data, name=name), schema or {}
    folders = [b""] * len(table)
    if not places:
        return ListedTable(table, folders, _file_columns(table, types, paths=_PATHS))
    columns = {field: _column_of(column, table) for field, column in places}
    unknown = [column for column in columns.values() if column not in table.columns]
    if unknown:
        raise ConfigError(
            f'fields: got the column "{unknown[0]}", but {name} has {list(table.columns)[:_SHOWN]}.'
        )
    table = replace(table, columns={f: table.columns[column] for f, column in columns.items()})
    named = [
        field
        for field, column in columns.items()
        if field == "image" or column in _PATHS or column.endswith(_SUFFIX)
    ]
    # Hugging Face's models take the column "label" under the name "labels".
    labels = tuple(f for f, column in columns.items() if column == LABEL and f in LABELS)
    return ListedTable(table, folders, _file_columns(table, types, named=named), labels=labels)


def _column_of(name: str, table: TextTable) -> str:
    """Return the column that a user names, by its own name or by that of its field."""
    paths = [path for path in _PATHS if path in table.columns]
    if name in table.columns:
        return name
    if name + _SUFFIX in table.columns:
        return name + _SUFFIX
    return paths[0] if len(paths) == 1 and name in _FIELDS.values() else name


def metadata_table(files: Sequence[tuple[bytes, bytes]], schema: FieldTypes) -> ListedTable:
    """Read Hugging Face's metadata files as one table. files: names and bytes, in order.

    Raises DatasetError if there are files of both kinds, or no column of paths.
    """
    if len({extension(name) for name, _ in files}) > 1:
        raise DatasetError(
            f"{printable(files[0][0])} and {printable(files[-1][0])}: metadata must be .csv in "
            "all folders, or .jsonl in all folders. Remove one file, or convert it."
        )
    tables = [read_table(data, name=printable(name)) for name, data in files]
    table = tables[0]
    if len(tables) > 1:
        names = dict.fromkeys(name for each in tables for name in each.columns)
        columns: dict[str, list[Any]] = {name: [] for name in names}
        for each in tables:
            for name, values in columns.items():
                values += each.columns.get(name, [None] * len(each))
        places = [f"{t.source}, {t.place(row)}" for t in tables for row in range(len(t))]
        table = replace(table, source="metadata", columns=columns, places=places, unit="row")
    lengths = zip(files, tables, strict=True)
    folders = [n.rpartition(b"/")[0] for (n, _), t in lengths for _ in range(len(t))]
    named = _file_columns(table, schema, paths=("file_name",))
    return ListedTable(table, folders, named, is_whole=True)


def _file_columns(
    table: TextTable, schema: FieldTypes, *, paths: Sequence[str] = (), named: Sequence[str] = ()
) -> dict[str, str]:
    """Return the field of each column that names files, the sample's own file first.

    paths: columns of which one may name the sample's own file. named: columns that name the files
    of the fields of the same names. Raises DatasetError.
    """
    mains = [name for name in paths if name in table.columns]
    if len(mains) > 1:
        raise DatasetError(
            f"{table.source}: got the columns {mains}, and each could be the path. Keep one of "
            "them, or rename the others."
        )
    columns = dict.fromkeys(mains, _OWN_FILE)
    for name, values in table.columns.items():
        if paths and name.endswith(_SUFFIX) and name != _SUFFIX:
            columns[name] = name.removesuffix(_SUFFIX)
        elif name in named or (name in schema and _is_of_files(values, schema[name])):
            columns.setdefault(name, name)
    if not columns:
        raise DatasetError(
            f"{table.source}: got the columns {list(table.columns)[:_SHOWN]}, wanted one that "
            f"names each row's file: {', '.join(paths or _PATHS)}, or a name that ends in "
            f'{_SUFFIX}. For a manifest, you can name it with fields={{"image": "its column", …}}.'
        )
    fields = ["image" if field == _OWN_FILE else field for field in columns.values()]
    fields += [name for name in table.columns if name not in columns]
    repeated = [field for field, count in Counter(fields).items() if count > 1]
    if repeated:
        raise DatasetError(
            f'{table.source}: the field "{repeated[0]}" comes from two columns. Rename one.'
        )
    return columns


def _is_of_files(values: Sequence[object], type: FieldType) -> bool:
    """Return True if a column of this type names files. Arrays may be files or values."""
    if not type.in_tables:
        return True
    first = next((value for value in values if value is not None), None)
    is_array = type.in_files and not type.is_encoded
    return is_array and isinstance(first, str) and first.endswith(".npy")


def listed_samples(
    url: str, found: Mapping[bytes, Entry], rows: ListedTable, schema: FieldTypes, root: bytes = b""
) -> Candidates:
    """Return the rows as samples, in their order. Rows whose file doesn't exist are quarantined.

    found: all files by name. root: of a local dataset; paths may start with it.

    Raises DatasetNotFoundError (the table has no rows), DatasetError (a path outside of the
    dataset, or none of the files exists).
    """
    table, columns, shown = rows.table, dict(rows.files), rows.table.source
    if not len(table):
        raise DatasetNotFoundError(f"{url}: {shown} has no rows, so it lists no samples.")
    names = {column: _names(rows, column, root) for column in columns}
    types = {column: type_by_names(filter(None, each)) for column, each in names.items()}
    main = next(iter(columns))
    if columns[main] == _OWN_FILE:
        columns[main] = _FIELDS.get(type(types[main]), "file")
    missing: dict[int, QuarantineEntry] = {}
    for row in range(len(table)):
        for column, field in columns.items():
            name = names[column][row]
            if name not in found and (name is not None or column == main):
                where = f"{shown}, {table.place(row)}"
                what = "the row names no file" if name is None else f"{field}: the file isn't there"
                entry = QuarantineEntry(name=name or where.encode(), reason=f"{what} ({where})")
                missing.setdefault(row, entry)
    if len(missing) == len(table):
        raise DatasetError(
            f"{url}: none of the {len(table):,} rows of {shown} names an existing file "
            f'({printable(missing[0].name)}: {missing[0].reason}). Paths in "{main}" have / and an '
            "extension, and are relative to the dataset's root; those of a metadata file, to its "
            "folder."
        )
    kept = [row for row in range(len(table)) if row not in missing]
    in_files = {field: schema.get(field, types[column]) for column, field in columns.items()}
    given = {**dict.fromkeys(rows.labels, ClassLabel()), **schema}
    others = {name: type for name, type in given.items() if name not in in_files}
    values = fields_of(table.take(kept, without=columns), others)
    unlisted: list[bytes] = []
    if rows.is_whole:
        named = {name for each in names.values() for name in each}
        unlisted = [n for n in found if kind_of(n) == "image" and n not in named]
    absent = list(missing.values())
    samples = Candidates.of_files(
        {
            field: [found.get(names[column][row] or b"") for row in kept]
            for column, field in columns.items()
        },
        in_files,
        quarantined=absent,
        unnamed=left_out_for("no row of the metadata names it", dict.fromkeys(unlisted, 1)),
        unread=left_out_sentences(f"of {len(table):,} rows of {shown}", absent),
    ).with_table(values, of=f"columns of {shown}")
    # In the order of the table's columns, the sample's own file first.
    order = dict.fromkeys([columns[main], *(columns.get(name, name) for name in table.columns)])
    kept_names = tuple(name for name in order if name in samples.schema)
    hints = [
        f"{len(unlisted):,} images are left out because no row of {shown} names them, such as "
        f"{printable(name)}."
        for name in unlisted[:1]
    ]
    schema = samples.schema.only(kept_names)
    return replace(samples, schema=schema, unread=[*samples.unread, *hints])


def _names(listed: ListedTable, column: str, root: bytes) -> list[bytes | None]:
    """Return the file that each row names, below the dataset's root. Raises DatasetError."""
    table, found = listed.table, list[bytes | None]()
    for row, value in enumerate(table.columns[column]):
        name = None if value is None else _below(listed.folders[row], value, root)
        if name is None and value is not None:
            raise DatasetError(
                f'{table.source}, {table.place(row)}: got "{column}" = {value!r}, wanted a path '
                "relative to the dataset's root that stays below it, without half of a character "
                "(a lone surrogate). Give the folder that holds all files as the URL, and paths "
                "below it in the table."
            )
        found.append(name)
    return found


def _below(folder: bytes, value: object, root: bytes) -> bytes | None:
    """Return the name of a file that a cell names, None if it isn't below the dataset's root."""
    name = encoded_name(value) if isinstance(value, str) else None
    if name is None or b"\0" in name:
        return None
    if root and name.startswith(root + b"/"):
        name, folder = name[len(root) + 1 :], b""
    path = posixpath.normpath(posixpath.join(folder, name))
    is_outside = name[:1] == b"/" or path.startswith(b"../") or path in (b"..", b".")
    return None if is_outside else path
