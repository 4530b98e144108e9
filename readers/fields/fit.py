"""Whether an array is what a schema says: the words against it name both, and the way out.

Numbers that are stored as another dtype than the schema's are cast where they keep their value;
what doesn't fit is a bad sample, never another number.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.readers.fields.arrays import array_form, number_dtype
from penstock.readers.fields.field_types import AUTO_DTYPE, Array, ClassLabel
from penstock.readers.types import UNFIT, Rejection

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from penstock.readers.fields.field_types import FieldType

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
        wrong[row] = f"{field}: {value!r} {unlike(type)}. {UNFIT}"
    with np.errstate(all="ignore"):
        if wrong:
            found = found.copy()
            found[rows] = 0
        out[places] = found
    return wrong


def unlike(type: FieldType) -> str:
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
