"""Whether an array is what a schema says: the words against it name both, and the way out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.readers.fields.field_types import AUTO_DTYPE, Array
from penstock.readers.types import Rejection

if TYPE_CHECKING:
    from collections.abc import Sequence


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
