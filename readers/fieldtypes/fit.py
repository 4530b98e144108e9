"""Compare values with their types, and choose the types that a schema leaves open.

A message against an array names both sides and the remedy. Numbers that are stored in another dtype
than the schema's are cast if they keep their value. A value that doesn't fit makes its sample bad;
it never becomes another number. A type is settled after all samples were seen. Lengths that differ
make it ragged. A dtype or a number of dimensions that differs is an error, as no batch could hold
both.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.cache import DatasetError
from penstock.readers.fieldtypes.array_forms import array_form, number_dtype
from penstock.readers.fieldtypes.field_types import AUTO_DTYPE, Array, ClassLabel, Image, Mask, Text
from penstock.readers.fieldtypes.masks import mask_dtype
from penstock.readers.fieldtypes.schema import Schema
from penstock.readers.types import UNFIT, Rejection, array_codec

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from numpy.typing import NDArray

    from penstock.readers.fieldtypes.field_types import FieldType
    from penstock.readers.types import Facts

_NAMES_SHOWN = 5


def may_not_fit(type: FieldType, stored: np.dtype[Any]) -> bool:
    """Return True if some numbers of the stored dtype may not fit the type."""
    if isinstance(type, ClassLabel) and type.names:
        return True
    form = array_form(type)
    dtype = number_dtype(type) if form is None else form.dtype
    if dtype is None or dtype.kind not in "iuf" or stored.kind not in "iuf":
        return False
    return not np.can_cast(stored, dtype)


def unfit_numbers(dtype: np.dtype[Any], found: NDArray[Any]) -> NDArray[np.bool_]:
    """Mark the numbers that a dtype can't hold: integers out of range, and fractions that would
    become infinite. Returns bools of found's shape."""
    unfit: NDArray[np.bool_]
    if dtype.kind in "iu":
        limits = np.iinfo(dtype)
        unfit = (found < int(limits.min)) | (found > int(limits.max))
    else:
        with np.errstate(all="ignore"):
            unfit = np.isinf(found.astype(dtype)) & np.isfinite(found)
    return unfit


def put_fitting(
    field: str,
    type: FieldType,
    found: NDArray[Any],
    out: NDArray[Any],
    places: NDArray[np.int64] | slice,
) -> dict[int, str]:
    """Write rows of stored numbers to out[places], with zeros for a row that doesn't fit its type.
    Returns the reasons by row."""
    unfit = unfit_numbers(out.dtype, found)
    if isinstance(type, ClassLabel) and type.names:
        unfit |= (found < 0) | (found >= len(type.names))
    rows = unfit.reshape(len(found), -1).any(axis=1)
    wrong = {}
    for row in np.flatnonzero(rows).tolist():
        value = found[row][unfit[row]].reshape(-1)[0].item()
        wrong[row] = f"{field}: {value!r} {mismatch(type)}. {UNFIT}"
    with np.errstate(all="ignore"):
        if wrong:
            found = found.copy()
            found[rows] = 0
        out[places] = found
    return wrong


def mismatch(type: FieldType) -> str:
    """Describe why a value isn't one of a type, as the end of a sentence."""
    if not isinstance(type, ClassLabel):
        return f"doesn't fit {type!r}"
    if not type.names:
        return "is no class number: classes are numbered from 0"
    shown = ", ".join(map(repr, type.names[:_NAMES_SHOWN]))
    more = ", …" if len(type.names) > _NAMES_SHOWN else ""
    return f"is none of the {len(type.names):,} classes ({shown}{more}), numbered from 0"


def array_misfit(dtype: str, shape: Sequence[int], type: Array, *, field: str) -> Rejection | None:
    """Return why an array doesn't fit its field's type, or None. dtype: the dtype's name in native
    byte order."""
    if type.dtype not in (AUTO_DTYPE, dtype):
        remedy = Array(dtype, type.shape)
        return Rejection(
            f"its numbers are {dtype}, but the schema wants {type.dtype}, and files aren't cast: "
            f"convert them, or {advice(field, remedy)}"
        )
    if type.shape is None:
        return None
    reason = f"its shape is {tuple(shape)}, but the schema wants {type.shape}"
    if len(shape) != len(type.shape):
        return Rejection(reason)
    if all(want in (None, got) for got, want in zip(shape, type.shape, strict=True)):
        return None
    ragged = widened(type.shape, shape)
    return Rejection(f"{reason}: if lengths differ, {advice(field, Array(type.dtype, ragged))}")


def widened(a: Sequence[int | None], b: Sequence[int | None]) -> tuple[int | None, ...]:
    """Return the lengths that two shapes share, with None for those that differ."""
    return tuple(x if x == y else None for x, y in zip(a, b, strict=True))


def advice(field: str, type: Array) -> str:
    """Return what to pass to `Dataset` for this type, as an instruction."""
    shape = "" if type.shape is None else f", {type.shape}"
    of = "" if type.of is None else f', of="{type.of}"'
    return f'pass schema={{"{field}": Array("{type.dtype}"{shape}{of})}}'


@dataclass(frozen=True, slots=True)
class _Example:
    """An array of one sample, for the message about another that differs."""

    sample: str
    dtype: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.dtype} of shape {self.shape} in {self.sample}"


class Settling:
    """Settles the types of a schema from the facts of all good samples."""

    def __init__(self, schema: Schema) -> None:
        self._schema = schema
        self._open = schema.unsettled
        self._found: dict[str, FieldType] = {}
        self._first: dict[str, _Example] = {}

    @property
    def is_done(self) -> bool:
        """Return True if the schema is settled already, so that no facts are needed."""
        return not self._open

    def add(self, facts: Mapping[str, Facts], *, sample: str) -> None:
        """Add the facts of one good sample. sample: its name in messages. Raises DatasetError if a
        field has two dtypes or numbers of dimensions."""
        for name in self._open:
            if name not in facts:
                continue
            if isinstance(type := self._schema[name], Mask):
                dtype = mask_dtype(facts[name].codec)
                if name not in self._found or dtype == "int32":
                    self._found[name] = replace(type, dtype=dtype)
                continue
            codec = array_codec(facts[name].codec)
            assert codec is not None
            assert isinstance(type, Array)
            self._see_array(name, type, _Example(sample, codec.name, facts[name].shape))

    def _see_array(self, name: str, type: Array, seen: _Example) -> None:
        found, first = self._found.get(name), self._first.setdefault(name, seen)
        if found is None:
            self._found[name] = replace(
                type,
                dtype=seen.dtype if type.dtype == AUTO_DTYPE else type.dtype,
                shape=seen.shape if type.shape is None else type.shape,
            )
            return
        assert isinstance(found, Array)
        assert found.shape is not None
        if found.dtype != seen.dtype or len(found.shape) != len(seen.shape):
            wanted = advice(name, replace(type, dtype=found.dtype, shape=found.shape))
            raise DatasetError(
                f'The field "{name}" is {first}, and {seen}: wanted one dtype and number of '
                f"dimensions. Convert the others, or choose one type and quarantine the others: "
                f"{wanted}."
            )
        if type.shape is None and found.shape != seen.shape:
            self._found[name] = replace(found, shape=widened(found.shape, seen.shape))

    def schema(self) -> Schema:
        """Return the settled schema. A field that no sample has becomes an empty float32 array, or
        a uint8 mask."""
        none: dict[str, FieldType] = {
            name: _default_type(type) for name, type in self._schema.items() if name in self._open
        }
        fields = {**dict(self._schema), **none, **self._found}
        return Schema({name: fields[name] for name in self._schema})


def _default_type(type: FieldType) -> FieldType:
    if isinstance(type, Mask):
        return replace(type, dtype="uint8")
    assert isinstance(type, Array)
    return replace(
        type,
        dtype="float32" if type.dtype == AUTO_DTYPE else type.dtype,
        shape=(0,) if type.shape is None else type.shape,
    )


_LOSSLESS = frozenset(("png", "bmp", "tif", "tiff", "pgm"))
_NAMES = ("mask", "seg")


def masks_by_name(
    types: Mapping[str, FieldType],
    extensions: Mapping[str, Iterable[str]],
    *,
    given: Collection[str] = (),
) -> tuple[dict[str, Mask], list[str]]:
    """Choose the fields that are masks by their names, and note each decision as a sentence.

    A mask's name is or ends in "mask" or "seg", it has lossless files, and it belongs to the only
    other image. With several other images no mask is chosen. One lossless file suffices: lossy
    files can't hold class numbers, so checking leaves them out, whereas all of them would pass as
    pictures.

    extensions: of each field's files, in lower case. given: fields whose types the user passed.
    """
    images = [name for name, type in types.items() if isinstance(type, Image)]
    likely = [name for name in images if name not in given and is_mask_name(name, extensions[name])]
    others = [name for name in images if name not in likely]
    if len(others) == 1:
        notes = [
            f'"{name}" is read as masks of "{others[0]}", by its name: a class number for each '
            f'pixel{_lossy(extensions[name])}. For pictures pass schema={{"{name}": Image()}}'
            for name in likely
        ]
        return {name: Mask(of=others[0]) for name in likely}, notes
    notes = [
        f'"{name}" is read as pictures, as there are several images: for masks name the image, '
        f'schema={{"{name}": Mask(of="{others[0]}")}}'
        for name in likely
        if others
    ]
    return {}, notes


def is_mask_name(name: str, extensions: Iterable[str]) -> bool:
    """Return True if a field's name and its files' extensions allow masks. extensions: none to
    judge by the name alone."""
    found = {*extensions}
    return name.rpartition("_")[2] in _NAMES and (not found or not found.isdisjoint(_LOSSLESS))


def _lossy(extensions: Iterable[str]) -> str:
    others = sorted({*extensions} - _LOSSLESS)
    return f", which {', '.join(f'.{each}' for each in others)} files can't hold" if others else ""


_LAST_WORDS = frozenset(
    ("box", "boxes", "bbox", "bboxes", "xyxy", "xywh", "cxcywh", "keypoints", "kpts", "landmarks")
)


def untyped_places(types: Mapping[str, FieldType]) -> list[str]:
    """Return the fields whose names suggest boxes or points but whose types don't, so that they
    don't follow their image through a recipe."""
    return [
        name
        for name, type in types.items()
        if isinstance(type, Array | Text)
        and getattr(type, "of", None) is None
        and re.split(r"[._]", name.lower())[-1] in _LAST_WORDS
    ]
