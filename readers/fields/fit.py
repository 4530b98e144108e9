"""Compare arrays and masks with their types, and settle the types that a schema leaves open.

A message against an array names both, and the remedy. Numbers that are stored as another dtype than
the schema's are cast where they keep their value; what doesn't fit is a bad sample, never another
number. A type is settled once all samples were seen: lengths that differ are ragged; a dtype or a
number of dimensions that differs is an error, as no batch could hold both, and nothing is cast
unasked.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.cache import DatasetError
from penstock.readers.fields.array_forms import array_form, number_dtype
from penstock.readers.fields.field_types import AUTO_DTYPE, Array, ClassLabel, Mask
from penstock.readers.fields.masks import mask_dtype
from penstock.readers.fields.schema import Schema
from penstock.readers.types import UNFIT, Rejection, array_codec

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from numpy.typing import NDArray

    from penstock.readers.fields.field_types import FieldType
    from penstock.readers.types import Facts

_NAMES_SHOWN = 5


def may_not_fit(type: FieldType, stored: np.dtype[Any]) -> bool:
    """Return True if a type may have no room for some number of a dtype."""
    if isinstance(type, ClassLabel) and type.names:
        return True
    form = array_form(type)
    dtype = number_dtype(type) if form is None else form.dtype
    if dtype is None or dtype.kind not in "iuf" or stored.kind not in "iuf":
        return False
    return not np.can_cast(stored, dtype)


def unfit_numbers(dtype: np.dtype[Any], found: NDArray[Any]) -> NDArray[np.bool_]:
    """Which numbers a dtype has no room for: integers beyond it, fractions that would be infinite.
    Of found's shape."""
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
    """Put rows of stored numbers into out[places], zeros where a row doesn't fit its type. Returns
    why, by row."""
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
    """Say that a value isn't one of a type."""
    if not isinstance(type, ClassLabel):
        return f"doesn't fit {type!r}"
    if not type.names:
        return "is no class: classes are numbered from 0"
    shown = ", ".join(map(repr, type.names[:_NAMES_SHOWN]))
    more = ", …" if len(type.names) > _NAMES_SHOWN else ""
    return f"is none of the {len(type.names):,} classes ({shown}{more}), numbered from 0"


def array_misfit(dtype: str, shape: Sequence[int], type: Array, *, field: str) -> Rejection | None:
    """Why an array doesn't fit its field's type, or None. dtype: its name in native byte order."""
    if type.dtype not in (AUTO_DTYPE, dtype):
        remedy = Array(dtype, type.shape)
        return Rejection(
            f"its numbers are {dtype}, and the schema says {type.dtype}, which nothing is cast to: "
            f"convert them, or {advice(field, remedy)}"
        )
    if type.shape is None or _fits(shape, type.shape):
        return None
    reason = f"its shape is {tuple(shape)}, and the schema says {type.shape}"
    if len(shape) != len(type.shape):
        return Rejection(reason)
    ragged = widened(type.shape, shape)
    return Rejection(f"{reason}: where lengths differ, {advice(field, Array(type.dtype, ragged))}")


def widened(a: Sequence[int | None], b: Sequence[int | None]) -> tuple[int | None, ...]:
    """Lengths that two shapes share, None for those that differ."""
    return tuple(x if x == y else None for x, y in zip(a, b, strict=True))


def advice(field: str, type: Array) -> str:
    """What to pass to `Dataset` for this type."""
    shape = "" if type.shape is None else f", {type.shape}"
    of = "" if type.of is None else f', of="{type.of}"'
    return f'pass schema={{"{field}": Array("{type.dtype}"{shape}{of})}}'


def _fits(shape: Sequence[int], wanted: Sequence[int | None]) -> bool:
    return len(shape) == len(wanted) and all(
        want is None or got == want for got, want in zip(shape, wanted, strict=True)
    )


@dataclass(frozen=True, slots=True)
class _First:
    """An array that was seen first, for the message."""

    sample: str
    dtype: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.dtype} of shape {self.shape} in {self.sample}"


class Settling:
    """Sees the facts of all good samples, one after another, and knows the schema then."""

    def __init__(self, schema: Schema) -> None:
        self._schema = schema
        self._open = schema.unsettled
        self._found: dict[str, FieldType] = {}
        self._first: dict[str, _First] = {}

    @property
    def is_done(self) -> bool:
        """Whether nothing has to be seen, as the schema is settled already."""
        return not self._open

    def see(self, facts: Mapping[str, Facts], *, sample: str) -> None:
        """Take one good sample into account. sample: its name for people. Raises DatasetError
        (schema drift)."""
        for name in self._open:
            if name not in facts:
                continue
            if isinstance(type := self._schema[name], Mask):
                self._see_mask(name, type, mask_dtype(facts[name].codec))
                continue
            codec = array_codec(facts[name].codec)
            assert codec is not None
            assert isinstance(type, Array)
            self._see_array(name, type, _First(sample, codec.name, facts[name].shape))

    def _see_mask(self, name: str, type: Mask, dtype: str) -> None:
        found = self._found.get(name)
        if found is None or dtype == "int32":
            self._found[name] = replace(type, dtype=dtype)

    def _see_array(self, name: str, type: Array, seen: _First) -> None:
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
                f'The field "{name}" is {first}, and {seen}: a field has one dtype and number of '
                f"dimensions. Convert the others, or say which is meant and quarantine the others: "
                f"{wanted}."
            )
        if type.shape is None and found.shape != seen.shape:
            self._found[name] = replace(found, shape=widened(found.shape, seen.shape))

    def schema(self) -> Schema:
        """The settled schema. What no sample has is taken for empty float32, masks for uint8."""
        none: dict[str, FieldType] = {
            name: _of_none(type) for name, type in self._schema.items() if name in self._open
        }
        fields = {**dict(self._schema), **none, **self._found}
        return Schema({name: fields[name] for name in self._schema})


def settle(schema: Schema, samples: Iterable[tuple[str, Mapping[str, Facts]]]) -> Schema:
    """Settle a schema by all good samples: their names for people, and facts. Raises
    DatasetError (schema drift)."""
    settling = Settling(schema)
    if not settling.is_done:
        for name, facts in samples:
            settling.see(facts, sample=name)
    return settling.schema()


def _of_none(type: FieldType) -> FieldType:
    if isinstance(type, Mask):
        return replace(type, dtype="uint8")
    assert isinstance(type, Array)
    return replace(
        type,
        dtype="float32" if type.dtype == AUTO_DTYPE else type.dtype,
        shape=(0,) if type.shape is None else type.shape,
    )
