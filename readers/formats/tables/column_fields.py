"""Find which columns of a table's files are fields, and their types.

A column's Arrow type and name decide. Hugging Face's `Features` in a schema's metadata take
precedence over them, and the user's `schema=` over both.
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from penstock.cache import ConfigError, DatasetError, PenstockWarning, log
from penstock.readers.fieldtypes import (
    LABEL,
    MAX_FIELDS,
    PRESENT,
    Array,
    Audio,
    Bytes,
    ClassLabel,
    FieldType,
    FieldTypes,
    Image,
    Text,
    Tokens,
    Value,
    Video,
    is_field_name,
)
from penstock.readers.files import printable

if TYPE_CHECKING:
    from penstock.readers.origin import Arrangement, Entry


FILES_BY_PATHS = (
    "list them in a CSV or JSONL table and give the folder that the paths are relative to: "
    'Dataset(folder, manifest="list.csv") (docs/howto/class-folders.md)'
)
PATHS_ALONE = f"it holds paths of files without bytes: write these into it, or {FILES_BY_PATHS}"
"""The reason why a struct of bytes and path is refused if no row has bytes."""

# Arrow types.

BINARY = (pa.binary(), pa.large_binary(), pa.binary_view())
TEXT = (pa.string(), pa.large_string(), pa.string_view())
_LISTS = {
    pa.lib.Type_LIST: pa.list_,
    pa.lib.Type_LARGE_LIST: pa.large_list,
    pa.lib.Type_LIST_VIEW: pa.list_view,
    pa.lib.Type_LARGE_LIST_VIEW: pa.large_list_view,
}
_MAX_DEPTH = 8

Tensor = tuple[tuple[int, ...], tuple[int, ...]]
"""The shape of each fixed-shape tensor that a column stores as a flat list, and the axes of that
shape in the order of a sample's axes."""


def tensor_of(arrow: Any) -> Tensor | None:
    """Return how a type of fixed-shape tensors stores them, None for other types."""
    if not isinstance(arrow, pa.FixedShapeTensorType) or not arrow.shape:
        return None
    axes = arrow.permutation
    return tuple(arrow.shape), tuple(range(len(arrow.shape)) if axes is None else axes)


def tensor_of_json(notes: Any) -> Tensor:
    """Read how a column stores its tensors, and check it. Raises ValueError, TypeError."""
    shape, axes = (tuple(map(int, each)) for each in notes)
    if sorted(axes) != list(range(len(shape))) or not shape or min(shape) < 0:
        raise ValueError("its tensors have axes that don't exist")
    return shape, axes


def without_extension(arrow: Any) -> Any:
    """Return the type that stores an extension type, any other type unchanged."""
    while isinstance(arrow, pa.BaseExtensionType):
        arrow = arrow.storage_type
    return arrow


def _is_encoded(arrow: Any) -> bool:
    return bool(pa.types.is_dictionary(arrow) or pa.types.is_run_end_encoded(arrow))


def value_type(arrow: Any) -> Any:
    """Return the type under extensions, dictionaries and run-end encoding; for tensors, nested
    lists in the shape of a sample."""
    if (tensor := tensor_of(arrow)) is not None:
        shape, axes = tensor
        arrow = value_type(arrow.value_type)
        for axis in reversed(axes):
            arrow = pa.list_(arrow, shape[axis])
        return arrow
    arrow = without_extension(arrow)
    return value_type(arrow.value_type) if _is_encoded(arrow) else arrow


def with_types_inside(arrow: Any, change: Callable[[Any], Any]) -> Any:
    """Return a type, with the types inside it as a function returns them."""
    types = pa.types
    if types.is_struct(arrow):
        return pa.struct([field.with_type(change(field.type)) for field in arrow])
    if types.is_fixed_size_list(arrow):
        return pa.list_(change(arrow.value_type), arrow.list_size)
    if types.is_run_end_encoded(arrow):
        return pa.run_end_encoded(arrow.run_end_type, change(arrow.value_type))
    if types.is_dictionary(arrow):
        return pa.dictionary(arrow.index_type, change(arrow.value_type))
    return _LISTS[arrow.id](change(arrow.value_type)) if arrow.id in _LISTS else arrow


def without_dictionaries(arrow: Any, *, in_list: bool = False) -> Any:
    """Return a type as Parquet stores it: Parquet has no dictionaries inside lists, even if the
    Arrow schema in a file's metadata has them."""
    if pa.types.is_dictionary(arrow):
        return arrow.value_type if in_list else arrow
    return with_types_inside(arrow, partial(without_dictionaries, in_list=is_listed(arrow)))


def is_listed(arrow: Any) -> bool:
    """Return True for lists, of one length or any."""
    return arrow.id in _LISTS or bool(pa.types.is_fixed_size_list(arrow))


def _is_json(arrow: Any) -> bool:
    """Return True if JSON can express values of a type: texts, numbers, bools, and lists and
    structs of these."""
    types, inside = pa.types, [arrow.field(i).type for i in range(arrow.num_fields)]
    if is_listed(arrow) or types.is_struct(arrow):
        return all(map(_is_json, inside))
    is_number = types.is_boolean(arrow) or types.is_integer(arrow) or types.is_floating(arrow)
    return arrow in TEXT or bool(is_number)


def _number_of(arrow: Any) -> np.dtype[Any] | None:
    """Return the NumPy dtype of a type of numbers, None for other types. Times, dates and durations
    are int64."""
    types = pa.types
    if types.is_boolean(arrow) or types.is_integer(arrow) or types.is_floating(arrow):
        found: np.dtype[Any] = np.dtype(arrow.to_pandas_dtype())
        return found
    return np.dtype(np.int64) if types.is_temporal(arrow) and not types.is_interval(arrow) else None


def _shape_of(arrow: Any) -> tuple[tuple[int | None, ...], Any]:
    """Return the lengths of nested lists, None for any length, and the type inside them. Binary
    values of a fixed size are lists of bytes."""
    if pa.types.is_fixed_size_binary(arrow) and not pa.types.is_decimal(arrow):
        return (arrow.byte_width,), pa.uint8()
    shape: list[int | None] = []
    while is_listed(arrow) and len(shape) <= _MAX_DEPTH:
        shape.append(arrow.list_size if pa.types.is_fixed_size_list(arrow) else None)
        inner = arrow.value_type  # neither tensors nor dictionaries are read inside lists
        arrow = inner if tensor_of(inner) is not None else without_extension(inner)
    return tuple(shape), arrow


# Types of fields.

Feature = FieldType | str | None
"""A column's entry in Hugging Face's `Features`: the field's type, the reason why the column can't
be a field, or None if the entry adds nothing to the Arrow type."""

KEY = b"huggingface"
_MEDIA: FieldTypes = {"Image": Image(), "Audio": Audio(), "Video": Video()}
_MEDIA_PARTS = frozenset(("bytes", "path"))
_ARRAYS = frozenset(f"Array{n}D" for n in (2, 3, 4, 5))
_UNREADABLE = (ValueError, KeyError, TypeError, AttributeError, RecursionError, ConfigError)

TOKEN_NAMES = frozenset(("input_ids", "token_ids", "tokens"))
"""Columns of these names that hold lists of integers are tokens; others are ragged arrays."""


def _features_of(schema: Any, file: str) -> Mapping[str, Feature]:
    """Return the features in a schema's metadata, by column; log if they are invalid."""
    text = (schema.metadata or {}).get(KEY)
    if text is None:
        return {}
    try:
        return {name: _feature(each) for name, each in json.loads(text)["info"]["features"].items()}
    except _UNREADABLE as error:
        log.warning("%s: Hugging Face's features in its metadata are ignored: %s", file, error)
        return {}


def _feature(entry: Any) -> Feature:
    # It may also be a list of something, or a dict of columns.
    kind = str(entry.get("_type")) if isinstance(entry, Mapping) else ""
    if kind == "ClassLabel":
        return ClassLabel(tuple(entry.get("names") or ()))
    if kind in _ARRAYS:
        return Array(entry["dtype"], tuple(entry["shape"]))
    if kind in ("Translation", "TranslationVariableLanguages"):
        return "it holds translations: texts by language"
    return _MEDIA.get(kind)


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrowColumn:
    """A column, or a part of a column of structs, that may be a field.

    name: "a.b" for the part b of a; path: its names from the top; arrow: its Arrow type. type: its
    type as a field, None if its first values decide (binary: images or other bytes);
    refusal: the reason why it can't be a field. tensor: how its tensors are stored, None for other
    columns. in_dictionary: its values are those of a dictionary.
    """

    name: str
    path: tuple[str, ...]
    arrow: Any
    type: FieldType | None = None
    refusal: str | None = None
    tensor: Tensor | None = None
    in_dictionary: bool = False

    @property
    def is_media(self) -> bool:
        """True if its values are the bytes of structs of bytes and path."""
        return len(self.path) > 1 and self.path[-1] == "bytes" and not self.name.endswith("bytes")


def columns_of(schema: Any, file: str) -> dict[str, ArrowColumn]:
    """Return the columns and parts of structs of a file's schema that may be fields, by name and in
    order. If a column is named "a.b", the part b of a struct a is named "a['b']"; if that is taken
    too, "['a']['b']". A warning names Hugging Face's features if they are invalid. Raises
    ValueError. file: its name."""
    known = set(schema.names)
    if len(known) < len(schema.names):
        raise ValueError("two of its columns have one name")
    features = _features_of(schema, file)
    found: dict[str, ArrowColumn] = {}
    for field in schema:
        for column in _columns(field.name, (field.name,), field.type, features.get(field.name)):
            name, (first, *parts) = column.name, column.path
            if name in known and name != field.name:
                inside = "".join(f"[{part!r}]" for part in parts)
                name = f"{first}{inside}"
                name = f"[{first!r}]{inside}" if name in known else name
            known.add(name)
            found[name] = replace(column, name=name)
    return found


def _columns(
    name: str, path: tuple[str, ...], arrow: Any, feature: Feature, depth: int = 0
) -> Iterator[ArrowColumn]:
    """Yield the column, or the parts of a column of structs. feature: by Hugging Face's features,
    those of a struct are of its bytes."""
    stored, values = without_extension(arrow), value_type(arrow)
    is_struct = pa.types.is_struct(values)
    if isinstance(feature, str):
        found: Feature = feature
    elif _is_encoded(stored) and (is_struct or _is_encoded(without_extension(stored.value_type))):
        found = f"it holds {stored}, encoded twice or encoded structs: write the values themselves"
    elif is_struct:
        names = {part.name for part in values}
        is_valid = 0 < len(names) == values.num_fields and depth < _MAX_DEPTH
        is_media = feature is not None and feature.is_encoded
        has_bytes = is_valid and "bytes" in names and values.field("bytes").type in BINARY
        if has_bytes and (is_media or names <= _MEDIA_PARTS):
            arrow = values.field("bytes").type
            yield ArrowColumn(name=name, path=(*path, "bytes"), arrow=arrow, type=feature)
            return
        if is_valid and not is_media:
            for part in values:
                inside = (*path, part.name)
                yield from _columns(f"{name}.{part.name}", inside, part.type, None, depth + 1)
            return
        reason = "it holds structs that nest too deep, are empty, or have two parts of one name"
        found = PATHS_ALONE if is_valid else reason
    elif feature is None:
        found = _inferred_type(values, name=path[-1])
    else:
        found = _misfit(feature, values) or feature
    yield ArrowColumn(
        name=name,
        path=path,
        arrow=values,
        type=None if isinstance(found, str) else found,
        refusal=found if isinstance(found, str) else None,
        tensor=tensor_of(arrow),
        in_dictionary=bool(pa.types.is_dictionary(stored)),
    )


def _inferred_type(arrow: Any, *, name: str) -> Feature:
    """Return the type of a column that neither features nor the user describe, or the reason why it
    can't be a field, or None if its first values decide."""
    (shape, inner), types = _shape_of(arrow), pa.types
    dtype = _number_of(inner)
    if 0 in shape:
        return f"it holds {arrow}, values without bytes or numbers: leave it out of the file"
    if types.is_null(arrow):
        return "it has no value anywhere: leave it out of the file"
    if len(shape) > _MAX_DEPTH:
        return f"its lists nest {len(shape)} deep"
    if arrow in TEXT or arrow in BINARY:
        return Text() if arrow in TEXT else None
    if dtype is not None:
        is_integer = dtype.kind in "iu" and types.is_integer(inner)
        if not shape:
            return ClassLabel() if name == LABEL and is_integer else Value(dtype.name)
        are_tokens = name in TOKEN_NAMES and shape == (None,) and dtype.kind in "iu"
        return Tokens(dtype.name) if are_tokens else Array(dtype.name, shape)
    held = f"lists of {inner}" if shape else str(inner)
    if types.is_decimal(inner):
        type = f'Array("float64", {(None,) * len(shape)})' if shape else 'Value("float64")'
        return f'it holds {held}: read it as schema={{"{name}": {type}}}, or write it as integers'
    if shape and _is_json(arrow):
        return (
            f"it holds {held}, which can't become a tensor: read it as JSON, "
            f'schema={{"{name}": Text()}}, which a Map parses'
        )
    return (
        f"it holds {held}, which can't become a tensor: write a column of numbers for each part or "
        "key, or one text a row, joined or as JSON"
    )


def _misfit(type: FieldType, arrow: Any) -> str | None:
    """Return why a column of an Arrow type can't be a field of this type, or None if it can."""
    kinds = type.column_kinds
    if not kinds:
        return f"it holds {arrow}, and no column can become {type!r} yet"
    if (arrow in TEXT and "text" in kinds) or (arrow in BINARY and "binary" in kinds):
        return None
    if "nested" in kinds and is_listed(arrow) and _is_json(arrow):
        return None
    shape, inner = _shape_of(arrow)
    # Decimals become floats if the user declares it.
    found = np.dtype(np.float64) if pa.types.is_decimal(inner) else _number_of(inner)
    if found is not None and 0 not in shape and type.can_hold(found, shape):
        return None
    are_paths = type.is_encoded and not type.in_tables and arrow in TEXT
    advice = f": if these are paths of files, {FILES_BY_PATHS}" if are_paths else ""
    return f"it holds {arrow}, which can't become {type!r}{advice}"


def _completed(type: FieldType, arrow: Any) -> FieldType:
    """Return the user's type; it gets the dtype and shape that it leaves open from the column.
    Raises ConfigError if the column holds no arrays."""
    if type.is_settled:
        return type
    found = _inferred_type(arrow, name="")
    if not isinstance(found, FieldType) or found.form is None:
        raise ConfigError(f"got {type!r}, and the column holds {arrow}.")
    return type.completed(found.form.dtype.name, found.form.shape)


def kind_of(values: Sequence[bytes]) -> FieldType:
    """Return the type of binary values: images if the first bytes of all of them are those of
    images, else bytes."""
    image = Image()
    heads = [value[: image.head_bytes] for value in values if value]
    is_image = heads and all(image.check_head(head) is None for head in heads)
    return image if is_image else Bytes()


# The fields of a dataset.


def union_of_columns(
    files: Iterable[tuple[Entry, Mapping[str, ArrowColumn]]], given: FieldTypes
) -> list[ArrowColumn]:
    """Return the columns of all files of a dataset, in the order in which they occur.

    files: the columns of each, by name. given: the types that the user declared. Raises
    DatasetError if a column has another type than in an earlier file, unless the user declared a
    type that both can become.
    """
    found: dict[str, tuple[ArrowColumn, Entry]] = {}
    # Most files share their columns.
    for entry, columns in {id(columns): (entry, columns) for entry, columns in files}.values():
        for name, column in columns.items():
            first, its_entry = found.setdefault(name, (column, entry))
            if pa.types.is_null(first.arrow):
                found[name] = column, entry
            elif not (pa.types.is_null(column.arrow) or _agree(first, column, given.get(name))):
                raise DatasetError(
                    f'{printable(entry.name)}: its column "{name}" holds {column.arrow} at '
                    f"{list(column.path)}, and in {printable(its_entry.name)} it holds "
                    f"{first.arrow} at {list(first.path)}. Write both alike, read them as two "
                    f'datasets, or declare a type that both can become: schema={{"{name}": …}}.'
                )
    return [column for column, _ in found.values()]


def _agree(first: ArrowColumn, other: ArrowColumn, given: FieldType | None) -> bool:
    """Return True if a column of two files is one field. given: the declared type."""
    if first.path != other.path:
        return False
    if given is not None and _misfit(given, other.arrow) is None:
        return True
    if first.tensor != other.tensor or (first.refusal is None) != (other.refusal is None):
        return False
    return first.refusal is not None or first.type == other.type


Fields = Mapping[str, tuple["ArrowColumn", FieldType]]
"""The columns that are fields and their types, by field, in order."""


def choose_columns(
    columns: Sequence[ArrowColumn],
    arrangement: Arrangement,
    *,
    file: str,
    examine: Callable[[ArrowColumn, FieldType | None], tuple[FieldType, str | None]],
) -> tuple[Fields, dict[str, str]]:
    """Return the columns that are fields; and the reasons of the columns that aren't, by name.

    file: its name, for messages. examine: given a column and its type, None if its first values
    decide, returns the type and the reason why its values can't be a field, or None. Raises
    ConfigError if a requested column doesn't exist or doesn't fit its type, DatasetError if it
    can't be a field.
    """
    given, places = arrangement.schema, dict(arrangement.places)
    names = {place: name for name, place in places.items()}
    known = [column.name for column in columns]
    named: dict[str, ArrowColumn] = {}
    for column in columns:
        name = names.get(column.name, column.name)
        if places.get(name, column.name) == column.name:  # no other column has this name now
            named[name] = column
    lacking = [f'fields["{n}"]: got {place!r}' for n, place in places.items() if place not in known]
    lacking += [f'schema["{n}"]: there is no such column' for n in given if n not in named]
    if lacking:
        raise ConfigError(f"{lacking[0]}, and {file} has the columns {_shown(known)}.")
    fields: dict[str, tuple[ArrowColumn, FieldType]] = {}
    left_out: dict[str, str] = {}
    for name, column in named.items():
        if not is_field_name(name) or name.endswith(PRESENT):
            rename = f'fields={{"…": "{column.name}"}} gives it another one'
            left_out[name] = f"no field can have this name; {rename}"
            continue
        type, where = given.get(name), f'{file}: the column "{column.name}"'
        reason = column.refusal if type is None else _misfit(type, column.arrow)
        if reason is None:
            settled = column.type if type is None else _completed(type, column.arrow)
            found, reason = examine(column, settled)
        if reason is None:
            fields[name] = column, found
        elif type is not None:
            raise ConfigError(
                f'schema["{name}"]: {where}: {reason}. Name a type that it can become '
                "(docs/howto/hub-parquet.md), or leave it out of schema=."
            )
        elif name in places:
            raise DatasetError(f'fields["{name}"]: {where}: {reason}.')
        else:
            left_out[name] = reason
    if len(fields) > MAX_FIELDS:
        raise DatasetError(
            f"{file}: more than {MAX_FIELDS:,} of its columns can be fields. Write the wide ones "
            "as lists."
        )
    if not fields:
        raise DatasetError(f"{file}: no column can be a field: {_reasons(left_out)}.")
    return fields, left_out


def _shown(names: Sequence[str], *, most: int = 20, by: str = ", ") -> str:
    more = f" and {len(names) - most:,} more" if len(names) > most else ""
    return by.join(names[:most]) + more


def _reasons(left_out: Mapping[str, str]) -> str:
    return _shown([f'"{name}" ({reason})' for name, reason in left_out.items()], most=5, by="; ")


_NAMES_OF_PATHS = re.compile(
    "image|img|photo|picture|frame|mask|file|path|audio|sound|wav|video|clip|ur[il]", re.IGNORECASE
)
_FILE = re.compile(
    rb"\.(jpe?g|png|webp|bmp|tiff?|jp2|ppm|pgm|gif|avif|npy|wav|flac|mp3|ogg|opus|m4a|mp4|mkv|avi"
    rb"|mov|webm)$",
    re.IGNORECASE,
)


def warn_of_columns(
    url: str,
    fields: Fields,
    left_out: Mapping[str, str],
    files: Iterable[bytes],
    first_values: Callable[[ArrowColumn], Sequence[bytes]],
) -> None:
    """Warn of columns that may not be what the user expects: that aren't fields, whose texts are
    paths of images, sound, video or arrays, or that are only in the names of folders (`label=3/`).

    files: the names of the table's files. first_values: returns some values of a column.
    """
    found: list[str] = []
    for name, (column, type) in fields.items():
        if type.is_encoded and type.in_tables and _NAMES_OF_PATHS.search(name):
            paths = [value for value in first_values(column) if value]
            if paths and all(map(_FILE.search, paths)):
                shown = paths[0].decode(errors="replace")
                found.append(
                    f'the column "{column.name}" holds paths of files ({shown!r:.200}), which '
                    f"are read as text. To read the files, {FILES_BY_PATHS}"
                )
    if left_out:
        log.warning("%s: columns that aren't fields: %s.", url, _reasons(left_out))
    known = {column.name for column, _ in fields.values()} | set(left_out)
    lacking: dict[str, str] = {}
    for folder in dict.fromkeys(part for name in files for part in name.split(b"/")[:-1]):
        text = folder.decode(errors="replace")
        column_name, equals, _ = text.partition("=")
        if equals and column_name not in known:
            lacking.setdefault(column_name, text)
    if lacking:
        found.append(
            f"the table is partitioned ({', '.join(lacking.values()):.200}), and a column that is "
            f"only in the names of folders isn't read: {_shown(list(lacking))}. Write such columns "
            "into the files too, or write the table without partitions"
        )
    for text in found:
        warnings.warn(f"{url}: {text}.", PenstockWarning, stacklevel=11)
