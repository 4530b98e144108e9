"""Infer the type of a field from a column's Arrow type and name.

Hugging Face's `Features` in a schema's metadata take precedence over the Arrow type.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from penstock.cache import ConfigError
from penstock.readers.fieldtypes import (
    LABEL,
    Array,
    Audio,
    ClassLabel,
    FieldType,
    Image,
    Text,
    Tokens,
    Value,
    Video,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

_log = logging.getLogger("penstock")
KEY = b"huggingface"
_MAX_FEATURES_BYTES = 2**26
_MEDIA: Mapping[str, FieldType] = {"Image": Image(), "Audio": Audio(), "Video": Video()}
_ARRAYS = {f"Array{n}D": n for n in (2, 3, 4, 5)}


Feature = FieldType | str | None
"""A column's entry in Hugging Face's `Features`: the field's type, the reason why the column can't
be a field, or None if the entry adds nothing to the Arrow type."""


def _features_of(metadata: Mapping[bytes, bytes] | None) -> dict[str, Feature]:
    """Return the features in a schema's metadata, by column. Raises ValueError if they are
    invalid."""
    text = (metadata or {}).get(KEY)
    if text is None:
        return {}
    if len(text) > _MAX_FEATURES_BYTES:
        raise ValueError(f"its features take {len(text):,} bytes")
    try:
        columns = json.loads(text)["info"]["features"]
        return {name: _feature(each) for name, each in columns.items()}
    except (KeyError, TypeError, AttributeError, RecursionError, ConfigError) as error:
        raise ValueError(f"its features can't be read ({error})") from error


def _feature(entry: Any) -> Feature:
    # It may also be a list of something, or a dict of columns.
    kind = str(entry.get("_type")) if isinstance(entry, Mapping) else ""
    if kind == "ClassLabel":
        return ClassLabel(tuple(entry.get("names") or ()))
    if kind in _ARRAYS:
        shape = tuple(entry["shape"])
        if len(shape) != _ARRAYS[kind]:
            raise ValueError(f"{kind} of shape {shape}")
        return Array(entry["dtype"], shape)
    if kind in ("Translation", "TranslationVariableLanguages"):
        return "it holds translations: texts by language"
    return _MEDIA.get(kind)


TOKEN_NAMES = frozenset(("input_ids", "token_ids", "tokens"))
"""Columns of these names that hold lists of integers are tokens; others are ragged arrays."""

_MAX_DEPTH = 8
_MEDIA_PARTS = frozenset(("bytes", "path"))

FILES_BY_PATHS = (
    "list them in a CSV or JSONL table and give the folder that the paths are relative to: "
    'Dataset(folder, manifest="list.csv") (docs/datasets.md)'
)
PATHS_ALONE = (
    f"it holds paths of files without their bytes: write the bytes into it, or {FILES_BY_PATHS}"
)
"""The reason why a struct of bytes and path is refused if no row has bytes."""

Tensor = tuple[tuple[int, ...], tuple[int, ...]]
"""The shape of each fixed-shape tensor that a column stores as a flat list, and the axes of that
shape in the order of a sample's axes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrowColumn:
    """A column, or a part of a column of structs, that may be a field.

    name: "a.b" for the part b of a; path: its names from the top; arrow: its Arrow type. type: its
    type as a field, None if its first values decide (binary: images, sound or other bytes);
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
    if len(set(schema.names)) < len(schema.names):
        raise ValueError("two of its columns have one name")
    features: Mapping[str, Feature] = {}
    try:
        features = _features_of(schema.metadata)
    except ValueError as error:
        _log.warning("%s: Hugging Face's features in its metadata are ignored: %s", file, error)
    found: dict[str, ArrowColumn] = {}
    known = set(schema.names)
    for field in schema:
        for column in _columns(field.name, (field.name,), field.type, features.get(field.name)):
            name = column.name
            if name in known and name != field.name:
                first, *parts = column.path
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
    stored, values = _without_extension(arrow), value_type(arrow)
    found = feature
    if isinstance(feature, str):
        pass
    elif _is_encoded(stored) and (
        pa.types.is_struct(values) or _is_encoded(_without_extension(stored.value_type))
    ):
        found = f"it holds {stored}, encoded twice or encoded structs: write the values themselves"
    elif pa.types.is_struct(values):
        parts = [values.field(i) for i in range(values.num_fields)]
        names = {part.name for part in parts}
        is_valid = 0 < len(parts) == len(names) and depth < _MAX_DEPTH
        has_bytes = is_valid and "bytes" in names and is_binary(values.field("bytes").type)
        is_media = feature is not None and feature.is_encoded
        if has_bytes and (is_media or names <= _MEDIA_PARTS):
            arrow = values.field("bytes").type
            yield ArrowColumn(name=name, path=(*path, "bytes"), arrow=arrow, type=feature)
            return
        if is_valid and not is_media:
            for part in parts:
                inside = (*path, part.name)
                yield from _columns(f"{name}.{part.name}", inside, part.type, None, depth + 1)
            return
        reason = "it holds structs that nest too deep, are empty, or have two parts of one name"
        found = PATHS_ALONE if is_valid else reason
    elif feature is None:
        found = inferred_type(values, name=path[-1])
    else:
        found = misfit(feature, values) or feature
    yield ArrowColumn(
        name=name,
        path=path,
        arrow=values,
        type=None if isinstance(found, str) else found,
        refusal=found if isinstance(found, str) else None,
        tensor=tensor_of(arrow),
        in_dictionary=bool(pa.types.is_dictionary(stored)),
    )


def value_type(arrow: Any) -> Any:
    """Return the type under extensions, dictionaries and run-end encoding; for tensors, nested
    lists in the shape of a sample."""
    tensor = tensor_of(arrow)
    if tensor is not None:
        shape, axes = tensor
        arrow = value_type(arrow.value_type)
        for axis in reversed(axes):
            arrow = pa.list_(arrow, shape[axis])
        return arrow
    arrow = _without_extension(arrow)
    return value_type(arrow.value_type) if _is_encoded(arrow) else arrow


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


def _is_encoded(arrow: Any) -> bool:
    return bool(pa.types.is_dictionary(arrow) or pa.types.is_run_end_encoded(arrow))


def _without_extension(arrow: Any) -> Any:
    while isinstance(arrow, pa.BaseExtensionType):
        arrow = arrow.storage_type
    return arrow


def with_types_inside(arrow: Any, change: Callable[[Any], Any]) -> Any:
    """Return a type, with the types inside it as a function returns them."""
    types = pa.types
    if types.is_struct(arrow):
        fields = [arrow.field(i) for i in range(arrow.num_fields)]
        return pa.struct([field.with_type(change(field.type)) for field in fields])
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
    inside = partial(without_dictionaries, in_list=is_listed(arrow))
    return with_types_inside(arrow, inside)


_BINARY = (pa.binary(), pa.large_binary(), pa.binary_view())
_TEXT = (pa.string(), pa.large_string(), pa.string_view())
_LISTS = {
    pa.lib.Type_LIST: pa.list_,
    pa.lib.Type_LARGE_LIST: pa.large_list,
    pa.lib.Type_LIST_VIEW: pa.list_view,
    pa.lib.Type_LARGE_LIST_VIEW: pa.large_list_view,
}


def is_binary(arrow: Any) -> bool:
    """Return True for bytes of any length."""
    return any(arrow == each for each in _BINARY)


def is_text(arrow: Any) -> bool:
    """Return True for texts."""
    return any(arrow == each for each in _TEXT)


def is_listed(arrow: Any) -> bool:
    """Return True for lists, of one length or any."""
    return arrow.id in _LISTS or bool(pa.types.is_fixed_size_list(arrow))


def number_of(arrow: Any) -> np.dtype[Any] | None:
    """Return the NumPy dtype of a type of numbers, None for other types. Times, dates and durations
    are int64."""
    types = pa.types
    if types.is_boolean(arrow) or types.is_integer(arrow) or types.is_floating(arrow):
        found: np.dtype[Any] = np.dtype(arrow.to_pandas_dtype())
        return found
    return np.dtype(np.int64) if types.is_temporal(arrow) and not types.is_interval(arrow) else None


def shape_of(arrow: Any) -> tuple[tuple[int | None, ...], Any]:
    """Return the lengths of nested lists, None for any length, and the type inside them. Binary
    values of a fixed size are lists of bytes."""
    if pa.types.is_fixed_size_binary(arrow) and not pa.types.is_decimal(arrow):
        return (arrow.byte_width,), pa.uint8()
    shape: list[int | None] = []
    while is_listed(arrow) and len(shape) <= _MAX_DEPTH:
        shape.append(arrow.list_size if pa.types.is_fixed_size_list(arrow) else None)
        inner = arrow.value_type  # neither tensors nor dictionaries are read inside lists
        arrow = inner if tensor_of(inner) is not None else _without_extension(inner)
    return tuple(shape), arrow


def inferred_type(arrow: Any, *, name: str) -> FieldType | str | None:
    """Return the type of a column that neither features nor the user describe, or the reason why it
    can't be a field, or None if its first values decide."""
    (shape, inner), types = shape_of(arrow), pa.types
    dtype = number_of(inner)
    if 0 in shape:
        return f"it holds {arrow}, values without bytes or numbers: leave it out of the file"
    if types.is_null(arrow):
        return "it has no value anywhere: leave it out of the file"
    if len(shape) > _MAX_DEPTH:
        return f"its lists nest {len(shape)} deep"
    if not shape and (is_text(arrow) or is_binary(arrow)):
        return Text() if is_text(arrow) else None
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
    advice = next(advice for is_so, advice in _ADVICE if is_so(inner))
    return f"it holds {held}, which can't become a tensor: {advice}"


_ADVICE: tuple[tuple[Callable[[Any], bool], str], ...] = (
    (pa.types.is_struct, "write a column for each part, each of lists of numbers"),
    (pa.types.is_map, "write a column for each key, or one text a row, as JSON"),
    (is_text, "write one text a row, joined or as JSON, or numbers"),
    (is_binary, "write one text a row, joined or as JSON, or numbers"),
    (_is_encoded, "write the values themselves"),
    (lambda _: True, "write it as numbers or texts"),
)


def misfit(type: FieldType, arrow: Any) -> str | None:
    """Return why a column of an Arrow type can't be a field of this type, or None if it can."""
    kinds = type.column_kinds
    if not kinds:
        return f"it holds {arrow}, and no column can become {type!r} yet"
    if (is_text(arrow) and "text" in kinds) or (is_binary(arrow) and "binary" in kinds):
        return None
    shape, inner = shape_of(arrow)
    # Decimals become floats if the user declares it.
    found = np.dtype(np.float64) if pa.types.is_decimal(inner) else number_of(inner)
    form = type.form
    if found is None or 0 in shape or type.is_encoded:
        fits = False
    elif type.number is not None:
        fits = not shape and (found.kind in "iu" if type.is_class else _casts(found, type.number))
    elif form is None:
        fits = bool(shape)
    else:
        fits = len(form.shape) == len(shape) and _casts(found, form.dtype)
        fits = fits and all(
            a is None or b is None or a == b for a, b in zip(shape, form.shape, strict=True)
        )
    if fits:
        return None
    are_paths = type.is_encoded and not type.in_tables and is_text(arrow)
    advice = f": if these are paths of files, {FILES_BY_PATHS}" if are_paths else ""
    return f"it holds {arrow}, which can't become {type!r}{advice}"


def _casts(found: np.dtype[Any], wanted: np.dtype[Any]) -> bool:
    """Return True if numbers can be cast: to another size of their kind, or integers to floats."""
    return found == wanted or (
        wanted.kind in "iuf" and found.kind != "b" and (wanted.kind == "f" or found.kind != "f")
    )


def completed_type(type: FieldType, arrow: Any) -> FieldType:
    """Return the user's type; it gets the dtype and shape that it leaves open from the column.
    Raises ConfigError if the column holds no arrays."""
    if type.is_settled:
        return type
    found = inferred_type(arrow, name="")
    if found is None or isinstance(found, str) or found.form is None:
        raise ConfigError(f"got {type!r}, and the column holds {arrow}.")
    return type.completed(found.form.dtype.name, found.form.shape)
