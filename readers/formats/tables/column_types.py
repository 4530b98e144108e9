"""Infer the type of a field from a column's Arrow type and name alone.

Hugging Face's `Features`, which a schema's metadata may hold, count for more than the Arrow type.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from penstock.cache import ConfigError
from penstock.readers.fields import (
    LABEL,
    Array,
    Audio,
    Bytes,
    ClassLabel,
    FieldType,
    Image,
    MultiLabel,
    Text,
    Tokens,
    Value,
    Video,
    array_form,
    is_encoded,
    number_dtype,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

KEY = b"huggingface"
_MAX_FEATURES_BYTES = 2**26
_MEDIA: Mapping[str, FieldType] = {"Image": Image(), "Audio": Audio(), "Video": Video()}
_ARRAYS = {f"Array{n}D": n for n in (2, 3, 4, 5)}


@dataclass(frozen=True, slots=True)
class Feature:
    """What the features say of one column. type: where they tell; refusal: why it can't be a
    field."""

    type: FieldType | None = None
    refusal: str | None = None


def features_of(metadata: Mapping[bytes, bytes] | None) -> dict[str, Feature]:
    """The features by column, those that say more than the column's own type. Raises ValueError for
    what isn't `Features`."""
    told = (metadata or {}).get(KEY)
    if told is None:
        return {}
    if len(told) > _MAX_FEATURES_BYTES:
        raise ValueError(f"its features take {len(told):,} bytes")
    try:
        columns = json.loads(told)["info"]["features"]
        return {name: _feature(each) for name, each in columns.items()}
    except (KeyError, TypeError, AttributeError, RecursionError, ConfigError) as error:
        raise ValueError(f"its features can't be understood ({error})") from error


def _feature(told: Any) -> Feature:
    if not isinstance(told, Mapping):  # a list of something, or a dict of columns
        return Feature()
    kind = str(told.get("_type"))
    if kind in _MEDIA:
        return Feature(_MEDIA[kind])
    if kind == "ClassLabel":
        return Feature(ClassLabel(tuple(told.get("names") or ())))
    if kind in _ARRAYS:
        shape = tuple(told["shape"])
        if len(shape) != _ARRAYS[kind]:
            raise ValueError(f"{kind} of shape {shape}")
        return Feature(Array(told["dtype"], shape))
    if kind in ("Translation", "TranslationVariableLanguages"):
        return Feature(refusal="it holds translations: texts by language")
    return Feature()


TOKEN_NAMES = frozenset(("input_ids", "token_ids", "tokens"))
"""Lists of integers of these names are tokens; others are arrays of any length."""

_MAX_DEPTH = 8
_MEDIA_PARTS = frozenset(("bytes", "path"))

FILES_BY_PATHS = (
    "list them in a CSV or JSONL table and give the folder that the paths are relative to: "
    'Dataset(folder, manifest="list.csv") (docs/datasets.md)'
)
PATHS_ALONE = (
    f"it holds paths of files without their bytes: write the bytes into it, or {FILES_BY_PATHS}"
)
"""Why a struct of bytes and path is refused where no row has bytes."""

Tensor = tuple[tuple[int, ...], tuple[int, ...]]
"""The shape in which a column of fixed-shape tensors stores each of them in one flat list, and the
axes of that shape in the order in which a sample has them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrowColumn:
    """A column, or a part of one of structs, that may be a field.

    name: "a.b" of the part b of a; path: its names from the top; arrow: its type there. type: it is
    as a field, None where a look at its first values has to tell (binary: pictures, sound, or
    bytes); refusal: why it can't be a field. tensor: how its tensors are stored, None of others.
    in_dictionary: its values are those of a dictionary.
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
        """Whether its values are the bytes of structs of bytes and path."""
        return len(self.path) > 1 and self.path[-1] == "bytes" and not self.name.endswith("bytes")


def arrow_columns(schema: Any, features: Mapping[str, Feature]) -> Iterator[ArrowColumn]:
    """What may be fields, in order. Where a column is called "a.b", the part b of a struct a is
    called "a['b']", and where one is called that too, "['a']['b']"."""
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
        why = f"it holds {outer}, encoded twice or encoded structs: write the values themselves"
        yield ArrowColumn(name=name, path=path, arrow=arrow, refusal=why)
    elif pa.types.is_struct(arrow):
        yield from _parts(name, path, arrow, feature, depth)
    else:
        found = _column(name, path, arrow, feature)
        yield replace(found, in_dictionary=pa.types.is_dictionary(outer))


def _parts(
    name: str, path: tuple[str, ...], arrow: Any, feature: Feature | None, depth: int
) -> Iterator[ArrowColumn]:
    parts = {arrow.field(i).name: arrow.field(i).type for i in range(arrow.num_fields)}
    told = None if feature is None else feature.type
    media = isinstance(told, Image | Audio | Video)
    if media or (parts.keys() <= _MEDIA_PARTS and is_binary(parts.get("bytes"))):
        if is_binary(parts.get("bytes")):
            yield ArrowColumn(name=name, path=(*path, "bytes"), arrow=parts["bytes"], type=told)
        else:
            yield ArrowColumn(name=name, path=path, arrow=arrow, refusal=PATHS_ALONE)
    elif depth >= _MAX_DEPTH or len(parts) < arrow.num_fields or not parts:
        why = "it holds structs that nest too deep, or whose parts have no names of their own"
        yield ArrowColumn(name=name, path=path, arrow=arrow, refusal=why)
    else:
        for part, type in parts.items():
            yield from _columns(f"{name}.{part}", (*path, part), type, None, depth + 1)


def _column(name: str, path: tuple[str, ...], arrow: Any, feature: Feature | None) -> ArrowColumn:
    told = None if feature is None else feature.type
    if told is None:
        found = inferred_type(arrow, name=path[-1])
    else:
        found = told if misfit(told, arrow) is None else str(misfit(told, arrow))
    if isinstance(found, str):
        return ArrowColumn(name=name, path=path, arrow=arrow, refusal=found)
    return ArrowColumn(name=name, path=path, arrow=arrow, type=found)


def value_type(arrow: Any) -> Any:
    """The type under extensions, dictionaries and run-end encoding; of tensors nested lists in the
    shape of a sample."""
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
    """How a type of fixed-shape tensors stores them; None of others."""
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
    """A type as Parquet stores it: values inside of lists as they are, even where Arrow's schema
    says that they are of a dictionary."""
    if pa.types.is_struct(arrow):
        parts = [arrow.field(i) for i in range(arrow.num_fields)]
        return pa.struct([part.with_type(without_dictionaries(part.type)) for part in parts])
    if not is_listed(arrow):
        return arrow
    inner = arrow.value_type
    is_apart = pa.types.is_dictionary(inner)
    plain = inner.value_type if is_apart else without_dictionaries(inner)
    size = (arrow.list_size,) if pa.types.is_fixed_size_list(arrow) else ()
    return arrow if plain == inner else pa.list_(plain, *size)


def is_binary(arrow: Any) -> bool:
    """Whether values are bytes of any length."""
    return arrow is not None and bool(
        pa.types.is_binary(arrow) or pa.types.is_large_binary(arrow) or arrow == pa.binary_view()
    )


def is_text(arrow: Any) -> bool:
    """Whether values are texts."""
    return bool(
        pa.types.is_string(arrow) or pa.types.is_large_string(arrow) or arrow == pa.string_view()
    )


def is_listed(arrow: Any) -> bool:
    """Whether values are lists, of one length or any."""
    types = pa.types
    return bool(
        types.is_list(arrow)
        or types.is_large_list(arrow)
        or types.is_fixed_size_list(arrow)
        or types.is_list_view(arrow)
        or types.is_large_list_view(arrow)
    )


def number_of(arrow: Any) -> np.dtype[Any] | None:
    """numpy's dtype of a type of numbers; None of others. Times, dates and durations are int64."""
    types = pa.types
    if types.is_boolean(arrow) or types.is_integer(arrow) or types.is_floating(arrow):
        found: np.dtype[Any] = np.dtype(arrow.to_pandas_dtype())
        return found
    return np.dtype(np.int64) if types.is_temporal(arrow) and not types.is_interval(arrow) else None


def inferred_type(arrow: Any, *, name: str) -> FieldType | str | None:
    """The type of a column of which nothing is said; why it can't be a field; or None where its
    values have to be looked at."""
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
    return f"it holds {arrow}, which no tensor can be: {_instead(arrow)}"


def _instead(arrow: Any) -> str:
    """What to write in place of a type that isn't read, in lists or alone."""
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
        return f"it holds lists of {inner}, which no tensor can be: {_instead(inner)}"
    if len(shape) > _MAX_DEPTH:
        return f"its lists nest {len(shape)} deep"
    if name in TOKEN_NAMES and shape == (None,) and dtype.kind in "iu":
        return Tokens(dtype.name)
    return Array(dtype.name, shape)


def _is_void(arrow: Any) -> bool:
    """Whether all values have the length 0."""
    if pa.types.is_fixed_size_binary(arrow) and not pa.types.is_decimal(arrow):
        return not arrow.byte_width
    return 0 in shape_of(arrow)[0]


def shape_of(arrow: Any) -> tuple[tuple[int | None, ...], Any]:
    """Lengths of lists by depth, None where any, and the type inside of them."""
    shape: list[int | None] = []
    while is_listed(arrow) and len(shape) <= _MAX_DEPTH:
        shape.append(arrow.list_size if pa.types.is_fixed_size_list(arrow) else None)
        inner = arrow.value_type  # tensors in lists lie flat, and dictionaries apart
        arrow = inner if tensor_of(inner) is not None else _without_extension(inner)
    return tuple(shape), arrow


def misfit(type: FieldType, arrow: Any) -> str | None:
    """Why a column of an Arrow type can't be a field of this type; None where it can."""
    wanted = f"{type!r}, and it holds {arrow}"
    if isinstance(type, Text):
        return None if is_text(arrow) or is_binary(arrow) else wanted
    if is_encoded(type) or isinstance(type, Bytes):
        return None if is_binary(arrow) else wanted
    if isinstance(type, MultiLabel):
        return f"{type!r}, which isn't read from a column yet"
    if isinstance(type, ClassLabel) and type.names and is_text(arrow):
        return None
    if number_dtype(type) is not None:
        found = _number_under(arrow)
        return wanted if found is None or not _holds(type, found) else None
    form = array_form(type)
    if _is_void(arrow):
        return wanted
    if pa.types.is_fixed_size_binary(arrow) and not pa.types.is_decimal(arrow):
        return None if form is None or form.shape in ((None,), (arrow.byte_width,)) else wanted
    shape, inner = shape_of(arrow)
    dtype = _number_under(inner)
    if dtype is None or not shape:
        return wanted
    if form is None:
        return None
    fits = len(form.shape) == len(shape) and all(
        a is None or b is None or a == b for a, b in zip(shape, form.shape, strict=True)
    )
    return None if fits and _casts(dtype, form.dtype) else wanted


def _holds(type: FieldType, found: np.dtype[Any]) -> bool:
    if isinstance(type, ClassLabel):
        return found.kind in "iu"
    dtype = number_dtype(type)
    return dtype is not None and _casts(found, dtype)


def _casts(found: np.dtype[Any], wanted: np.dtype[Any]) -> bool:
    """Numbers become others of their kind, and integers fractions."""
    return found == wanted or (
        wanted.kind in "iuf" and found.kind != "b" and (wanted.kind == "f" or found.kind != "f")
    )


def _number_under(arrow: Any) -> np.dtype[Any] | None:
    """As `number_of`, for a type that the user names: decimals become fractions then."""
    return np.dtype(np.float64) if pa.types.is_decimal(arrow) else number_of(arrow)


def completed_type(type: FieldType, arrow: Any) -> FieldType:
    """A given type, with what it leaves open taken from the column."""
    if not isinstance(type, Array) or type.is_settled:
        return type
    found = inferred_type(arrow, name="")
    if not isinstance(found, Array):
        raise ConfigError(f"got {type!r}, and it holds {arrow}.")
    dtype = found.dtype if type.dtype == "auto" else type.dtype
    return Array(dtype, found.shape if type.shape is None else type.shape, type.of)
