"""Infer the type of a field from a column's Arrow type and name.

Hugging Face's `Features` in a schema's metadata take precedence over the Arrow type.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
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

KEY = b"huggingface"
_MAX_FEATURES_BYTES = 2**26
_MEDIA: Mapping[str, FieldType] = {"Image": Image(), "Audio": Audio(), "Video": Video()}
_ARRAYS = {f"Array{n}D": n for n in (2, 3, 4, 5)}


@dataclass(frozen=True, slots=True)
class Feature:
    """A column's entry in Hugging Face's `Features`.

    type: the field's type, None if the entry adds nothing to the Arrow type. refusal: the reason
    why the column can't be a field.
    """

    type: FieldType | None = None
    refusal: str | None = None


def features_of(metadata: Mapping[bytes, bytes] | None) -> dict[str, Feature]:
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
    if not isinstance(entry, Mapping):  # a list of something, or a dict of columns
        return Feature()
    kind = str(entry.get("_type"))
    if kind in _MEDIA:
        return Feature(_MEDIA[kind])
    if kind == "ClassLabel":
        return Feature(ClassLabel(tuple(entry.get("names") or ())))
    if kind in _ARRAYS:
        shape = tuple(entry["shape"])
        if len(shape) != _ARRAYS[kind]:
            raise ValueError(f"{kind} of shape {shape}")
        return Feature(Array(entry["dtype"], shape))
    if kind in ("Translation", "TranslationVariableLanguages"):
        return Feature(refusal="it holds translations: texts by language")
    return Feature()


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


def arrow_columns(schema: Any, features: Mapping[str, Feature]) -> Iterator[ArrowColumn]:
    """Yield the columns and parts of structs that may be fields, in order. If a column is named
    "a.b", the part b of a struct a is named "a['b']"; if that is taken too, "['a']['b']"."""
    known = set(schema.names)
    for field in schema:
        for column in _columns(field.name, (field.name,), field.type, features.get(field.name)):
            if len(column.path) > 1 and column.name != field.name:
                if column.name in known:
                    first, *parts = column.path
                    inside = "".join(f"[{part!r}]" for part in parts)
                    name = f"{first}{inside}"
                    name = f"[{first!r}]{inside}" if name in known else name
                    column = replace(column, name=name)
                known.add(column.name)
            yield column


def _columns(
    name: str, path: tuple[str, ...], arrow: Any, feature: Feature | None, depth: int = 0
) -> Iterator[ArrowColumn]:
    tensor, outer, arrow = tensor_of(arrow), _without_extension(arrow), value_type(arrow)
    if feature is not None and feature.refusal is not None:
        yield ArrowColumn(name=name, path=path, arrow=arrow, refusal=feature.refusal)
    elif tensor is not None:
        yield replace(_column(name, path, arrow, feature), tensor=tensor)
    elif _is_encoded(outer) and (
        pa.types.is_struct(arrow) or _is_encoded(_without_extension(outer.value_type))
    ):
        reason = f"it holds {outer}, encoded twice or encoded structs: write the values themselves"
        yield ArrowColumn(name=name, path=path, arrow=arrow, refusal=reason)
    elif pa.types.is_struct(arrow):
        yield from _parts(name, path, arrow, feature, depth)
    else:
        found = _column(name, path, arrow, feature)
        yield replace(found, in_dictionary=pa.types.is_dictionary(outer))


def _parts(
    name: str, path: tuple[str, ...], arrow: Any, feature: Feature | None, depth: int
) -> Iterator[ArrowColumn]:
    parts = {arrow.field(i).name: arrow.field(i).type for i in range(arrow.num_fields)}
    type = None if feature is None else feature.type
    if (type is not None and type.head_bytes) or (
        parts.keys() <= _MEDIA_PARTS and is_binary(parts.get("bytes"))
    ):
        if is_binary(parts.get("bytes")):
            yield ArrowColumn(name=name, path=(*path, "bytes"), arrow=parts["bytes"], type=type)
        else:
            yield ArrowColumn(name=name, path=path, arrow=arrow, refusal=PATHS_ALONE)
    elif depth >= _MAX_DEPTH or len(parts) < arrow.num_fields or not parts:
        reason = "it holds structs that nest too deep, are empty, or have two parts of one name"
        yield ArrowColumn(name=name, path=path, arrow=arrow, refusal=reason)
    else:
        for part, kind in parts.items():
            yield from _columns(f"{name}.{part}", (*path, part), kind, None, depth + 1)


def _column(name: str, path: tuple[str, ...], arrow: Any, feature: Feature | None) -> ArrowColumn:
    found: FieldType | str | None
    if feature is None or feature.type is None:
        found = inferred_type(arrow, name=path[-1])
    else:
        found = misfit(feature.type, arrow) or feature.type
    if isinstance(found, str):
        return ArrowColumn(name=name, path=path, arrow=arrow, refusal=found)
    return ArrowColumn(name=name, path=path, arrow=arrow, type=found)


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


def _is_encoded(arrow: Any) -> bool:
    return bool(pa.types.is_dictionary(arrow) or pa.types.is_run_end_encoded(arrow))


def _without_extension(arrow: Any) -> Any:
    while isinstance(arrow, pa.BaseExtensionType):
        arrow = arrow.storage_type
    return arrow


def without_dictionaries(arrow: Any) -> Any:
    """Return a type as Parquet stores it: Parquet has no dictionaries inside lists, even if the
    Arrow schema in a file's metadata has them."""
    if pa.types.is_struct(arrow):
        parts = [arrow.field(i) for i in range(arrow.num_fields)]
        return pa.struct([part.with_type(without_dictionaries(part.type)) for part in parts])
    if not is_listed(arrow):
        return arrow
    inner = arrow.value_type
    plain = inner.value_type if pa.types.is_dictionary(inner) else without_dictionaries(inner)
    size = (arrow.list_size,) if pa.types.is_fixed_size_list(arrow) else ()
    return arrow if plain == inner else pa.list_(plain, *size)


def is_binary(arrow: Any) -> bool:
    """Return True for bytes of any length."""
    return arrow is not None and bool(
        pa.types.is_binary(arrow) or pa.types.is_large_binary(arrow) or arrow == pa.binary_view()
    )


def is_text(arrow: Any) -> bool:
    """Return True for texts."""
    return bool(
        pa.types.is_string(arrow) or pa.types.is_large_string(arrow) or arrow == pa.string_view()
    )


def is_listed(arrow: Any) -> bool:
    """Return True for lists, of one length or any."""
    types = pa.types
    return bool(
        types.is_list(arrow)
        or types.is_large_list(arrow)
        or types.is_fixed_size_list(arrow)
        or types.is_list_view(arrow)
        or types.is_large_list_view(arrow)
    )


def number_of(arrow: Any) -> np.dtype[Any] | None:
    """Return the NumPy dtype of a type of numbers, None for other types. Times, dates and durations
    are int64."""
    types = pa.types
    if types.is_boolean(arrow) or types.is_integer(arrow) or types.is_floating(arrow):
        found: np.dtype[Any] = np.dtype(arrow.to_pandas_dtype())
        return found
    return np.dtype(np.int64) if types.is_temporal(arrow) and not types.is_interval(arrow) else None


def inferred_type(arrow: Any, *, name: str) -> FieldType | str | None:
    """Return the type of a column that neither features nor the user describe, or the reason why it
    can't be a field, or None if its first values decide."""
    dtype = number_of(arrow)
    if dtype is not None:
        is_class = name == LABEL and dtype.kind in "iu" and pa.types.is_integer(arrow)
        return ClassLabel() if is_class else Value(dtype.name)
    if is_text(arrow):
        return Text()
    if is_binary(arrow):
        return None
    if _is_void(arrow):
        return f"it holds {arrow}, values of no length: leave it out of the file"
    if pa.types.is_fixed_size_binary(arrow) and not pa.types.is_decimal(arrow):
        return Array("uint8", (arrow.byte_width,))
    if is_listed(arrow):
        return _array(arrow, name)
    if pa.types.is_null(arrow):
        return "it has no value anywhere: leave it out of the file"
    if pa.types.is_decimal(arrow):
        as_floats = f'schema={{"{name}": Value("float64")}}'
        return f"it holds decimals ({arrow}): read it as {as_floats}, or write it as integers"
    return f"it holds {arrow}, which can't become a tensor: {_advice(arrow)}"


def _advice(arrow: Any) -> str:
    """Return the advice for a type that isn't read, alone or in lists."""
    types = pa.types
    if types.is_struct(arrow):
        return "write a column for each part, each of lists of numbers"
    if types.is_map(arrow):
        return "write a column for each key, or one text a row, as JSON"
    if is_text(arrow) or is_binary(arrow):
        return "write one text a row, joined or as JSON, or numbers"
    if _is_encoded(arrow):
        return "write the values themselves"
    return "write it as numbers or texts"


def _array(arrow: Any, name: str) -> FieldType | str:
    shape, inner = shape_of(arrow)
    dtype = number_of(inner)
    if dtype is None and pa.types.is_decimal(inner):
        as_floats = f'schema={{"{name}": Array("float64", {(None,) * len(shape)})}}'
        return f"it holds lists of decimals ({inner}): read it as {as_floats}"
    if dtype is None:
        return f"it holds lists of {inner}, which can't become a tensor: {_advice(inner)}"
    if len(shape) > _MAX_DEPTH:
        return f"its lists nest {len(shape)} deep"
    if name in TOKEN_NAMES and shape == (None,) and dtype.kind in "iu":
        return Tokens(dtype.name)
    return Array(dtype.name, shape)


def _is_void(arrow: Any) -> bool:
    """Return True if all values have the length 0."""
    if pa.types.is_fixed_size_binary(arrow) and not pa.types.is_decimal(arrow):
        return not arrow.byte_width
    return 0 in shape_of(arrow)[0]


def shape_of(arrow: Any) -> tuple[tuple[int | None, ...], Any]:
    """Return the lengths of nested lists, None for any length, and the type inside them."""
    shape: list[int | None] = []
    while is_listed(arrow) and len(shape) <= _MAX_DEPTH:
        shape.append(arrow.list_size if pa.types.is_fixed_size_list(arrow) else None)
        inner = arrow.value_type  # neither tensors nor dictionaries are read inside lists
        arrow = inner if tensor_of(inner) is not None else _without_extension(inner)
    return tuple(shape), arrow


def misfit(type: FieldType, arrow: Any) -> str | None:
    """Return why a column of an Arrow type can't be a field of this type, or None if it can."""
    wanted, kinds = f"{type!r}, and it holds {arrow}", type.column_kinds
    if not kinds:
        return f"{type!r}, which isn't read from a column yet"
    if (is_text(arrow) and "text" in kinds) or (is_binary(arrow) and "binary" in kinds):
        return None
    if type.number is not None:
        found = _number_under(arrow)
        if found is None:
            return wanted
        fits = found.kind in "iu" if type.is_class else _casts(found, type.number)
        return None if fits else wanted
    if type.is_encoded or _is_void(arrow):
        return wanted
    form = type.form
    if pa.types.is_fixed_size_binary(arrow) and not pa.types.is_decimal(arrow):
        return None if form is None or form.shape in ((None,), (arrow.byte_width,)) else wanted
    shape, inner = shape_of(arrow)
    found = _number_under(inner)
    if found is None or not shape:
        return wanted
    if form is None:
        return None
    fits = len(form.shape) == len(shape) and all(
        a is None or b is None or a == b for a, b in zip(shape, form.shape, strict=True)
    )
    return None if fits and _casts(found, form.dtype) else wanted


def _casts(found: np.dtype[Any], wanted: np.dtype[Any]) -> bool:
    """Return True if numbers can be cast: to another size of their kind, or integers to floats."""
    return found == wanted or (
        wanted.kind in "iuf" and found.kind != "b" and (wanted.kind == "f" or found.kind != "f")
    )


def _number_under(arrow: Any) -> np.dtype[Any] | None:
    """Return `number_of` for a type that the user declared, by which decimals become floats."""
    return np.dtype(np.float64) if pa.types.is_decimal(arrow) else number_of(arrow)


def completed_type(type: FieldType, arrow: Any) -> FieldType:
    """Return the user's type; an Array gets the dtype and shape that it leaves open from the
    column. Raises ConfigError if the column holds no arrays."""
    if type.is_settled:
        return type
    found = inferred_type(arrow, name="")
    if found is None or isinstance(found, str) or found.form is None:
        raise ConfigError(f"got {type!r}, and it holds {arrow}.")
    return type.completed(found.form.dtype.name, found.form.shape)
