"""What a column of an Arrow type is as a field, by its type and its name alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from penstock.cache.errors import ConfigError
from penstock.readers.fields.arrays import array_form, number_dtype
from penstock.readers.fields.field_types import (
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
    is_encoded,
)
from penstock.readers.fields.selection import LABEL

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from penstock.readers.formats.arrow.features import Feature

TOKEN_NAMES = frozenset(("input_ids", "token_ids", "tokens"))
"""Lists of integers of these names are tokens; others are arrays of any length."""

_MAX_DEPTH = 8
_MEDIA_PARTS = frozenset(("bytes", "path"))


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrowColumn:
    """A column, or a part of one of structs, that may be a field.

    name: "a.b" of the part b of a; path: its names from the top; arrow: its type there. type: it is
    as a field, None where a look at its first values has to tell (binary: pictures, sound, or
    bytes); refusal: why it can't be a field.
    """

    name: str
    path: tuple[str, ...]
    arrow: Any
    type: FieldType | None = None
    refusal: str | None = None


def arrow_columns(schema: Any, features: Mapping[str, Feature]) -> Iterator[ArrowColumn]:
    """What may be fields, in order."""
    for field in schema:
        yield from _columns(field.name, (field.name,), field.type, features.get(field.name))


def _columns(
    name: str, path: tuple[str, ...], arrow: Any, feature: Feature | None, depth: int = 0
) -> Iterator[ArrowColumn]:
    arrow = stored(arrow)
    if feature is not None and feature.refusal is not None:
        yield ArrowColumn(name=name, path=path, arrow=arrow, refusal=feature.refusal)
    elif pa.types.is_struct(arrow):
        yield from _parts(name, path, arrow, feature, depth)
    else:
        yield _column(name, path, arrow, feature)


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
            why = "it holds paths without bytes: write the files' bytes into it"
            yield ArrowColumn(name=name, path=path, arrow=arrow, refusal=why)
    elif depth >= _MAX_DEPTH or len(parts) < arrow.num_fields or not parts:
        why = "it holds structs that nest too deep, or whose parts have no names of their own"
        yield ArrowColumn(name=name, path=path, arrow=arrow, refusal=why)
    else:
        for part, type in parts.items():
            yield from _columns(f"{name}.{part}", (*path, part), type, None, depth + 1)


def _column(name: str, path: tuple[str, ...], arrow: Any, feature: Feature | None) -> ArrowColumn:
    told = None if feature is None else feature.type
    if told is None:
        found = inferred(arrow, name=path[-1])
    else:
        found = told if misfit(told, arrow) is None else str(misfit(told, arrow))
    if isinstance(found, str):
        return ArrowColumn(name=name, path=path, arrow=arrow, refusal=found)
    return ArrowColumn(name=name, path=path, arrow=arrow, type=found)


def stored(arrow: Any) -> Any:
    """The type under extensions and dictionaries."""
    while True:
        if isinstance(arrow, pa.FixedShapeTensorType):
            return _nested(stored(arrow.value_type), arrow.shape)
        if isinstance(arrow, pa.BaseExtensionType):
            arrow = arrow.storage_type
        elif pa.types.is_dictionary(arrow) or pa.types.is_run_end_encoded(arrow):
            arrow = arrow.value_type
        else:
            return arrow


def _nested(arrow: Any, shape: list[int]) -> Any:
    for length in reversed(shape):
        arrow = pa.list_(arrow, length)
    return arrow


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


def inferred(arrow: Any, *, name: str) -> FieldType | str | None:
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
    if pa.types.is_fixed_size_binary(arrow) and not pa.types.is_decimal(arrow):
        return Array("uint8", (arrow.byte_width,))
    if is_listed(arrow):
        return _array(arrow, name)
    if pa.types.is_null(arrow):
        return "it has no value anywhere"
    if pa.types.is_decimal(arrow):
        return f"it holds decimals ({arrow}): write it as float64, or as integers"
    return f"it holds {arrow}, which no tensor can be"


def _array(arrow: Any, name: str) -> FieldType | str:
    shape, inner = shape_of(arrow)
    dtype = number_of(inner)
    if dtype is None:
        return f"it holds lists of {inner}, which no tensor can be"
    if len(shape) > _MAX_DEPTH:
        return f"its lists nest {len(shape)} deep"
    if name in TOKEN_NAMES and shape == (None,) and dtype.kind in "iu":
        return Tokens(dtype.name)
    return Array(dtype.name, shape)


def shape_of(arrow: Any) -> tuple[tuple[int | None, ...], Any]:
    """Lengths of lists by depth, None where any, and the type inside of them."""
    shape: list[int | None] = []
    while is_listed(arrow) and len(shape) <= _MAX_DEPTH:
        shape.append(arrow.list_size if pa.types.is_fixed_size_list(arrow) else None)
        arrow = stored(arrow.value_type)
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
        found = number_of(arrow)
        return wanted if found is None or not _holds(type, found) else None
    form = array_form(type)
    if pa.types.is_fixed_size_binary(arrow) and not pa.types.is_decimal(arrow):
        return None if form is None or form.shape in ((None,), (arrow.byte_width,)) else wanted
    shape, inner = shape_of(arrow)
    dtype = number_of(inner)
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
        wanted.kind != "b" and found.kind != "b" and not (found.kind == "f" and wanted.kind in "iu")
    )


def settled(type: FieldType, arrow: Any) -> FieldType:
    """A given type, with what it leaves open taken from the column."""
    if not isinstance(type, Array) or type.is_settled:
        return type
    found = inferred(arrow, name="")
    if not isinstance(found, Array):
        raise ConfigError(f"got {type!r}, and it holds {arrow}.")
    dtype = found.dtype if type.dtype == "auto" else type.dtype
    return Array(dtype, found.shape if type.shape is None else type.shape, type.of)
