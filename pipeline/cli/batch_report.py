"""What `penstock inspect --batch` tells of a batch: its fields' shapes and values, its samples."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.readers.fields.field_types import PRESENT, ClassLabel, number_name

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from penstock.readers.fields.schema import Schema

_TEXT_CHARACTERS = 60
_NUMBERS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchField:
    """One field of the batch that is shown.

    shape: of the tensor; of what has no common shape the first sample's, None in place of the
    lengths that differ. dtype: "str" and "bytes" of what isn't numbers. present: samples that have
    it.
    """

    name: str
    type: str
    shape: list[int | None]
    dtype: str
    present: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueRange:
    """Values of a field, or of one channel of an image field, over the whole batch, as the model
    gets them."""

    name: str
    min: float
    max: float
    mean: float
    std: float


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSample:
    """Which sample stands where in the batch. values: of its other fields, for people."""

    id: int
    name: str
    values: dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchReport:
    """What a batch holds."""

    seed: int
    epoch: int
    augment: str
    fields: list[BatchField]
    values: list[ValueRange]
    samples: list[BatchSample]


def batch_fields(batch: Mapping[str, Any], schema: Schema) -> list[BatchField]:
    """The fields of a batch by name: tensors, Ragged, or lists."""
    return [
        _field(name, column, batch.get(name + PRESENT), schema)
        for name, column in batch.items()
        if not name.endswith(PRESENT)
    ]


def _field(name: str, column: Any, present: Any, schema: Schema) -> BatchField:
    kind = type(schema[name]).__name__ if name in schema else "Value"
    shape: list[int | None]
    if hasattr(column, "shape"):
        shape, dtype = list(map(int, column.shape)), column.dtype
    elif isinstance(column, list):
        shape, dtype = [len(column)], type(column[0]).__name__ if column else "-"
    else:
        shape = [len(column), *_lengths([each.shape for each in column])]
        dtype = column.values.dtype
    return BatchField(
        name=name,
        type=kind,
        shape=shape,
        dtype=str(dtype).split(".")[-1],
        present=len(column) if present is None else int(present.sum()),
    )


def _lengths(shapes: Sequence[tuple[int, ...]]) -> list[int | None]:
    """The lengths that all samples share; None for the others."""
    return [
        one.pop() if len(one := set(lengths)) == 1 else None
        for lengths in zip(*shapes, strict=False)
    ]


def value_ranges(
    batch: Mapping[str, Any], image_fields: Sequence[str], *, number: str
) -> list[ValueRange]:
    """Ranges of all that are numbers, of images a channel at a time; without the samples' own,
    which the batch has under the name `number`."""
    ranges: list[ValueRange] = []
    for name, column in batch.items():
        if name == number or name.endswith(PRESENT) or isinstance(column, list):
            continue
        values = (column if hasattr(column, "shape") else column.values).cpu().numpy()
        if name in image_fields:
            ranges += [
                _range(f"{name} {channel}", values[:, channel])
                for channel in range(values.shape[1])
            ]
        elif values.size:
            ranges.append(_range(name, values))
    return ranges


def _range(name: str, values: NDArray[Any]) -> ValueRange:
    return ValueRange(
        name=name,
        min=float(values.min()),
        max=float(values.max()),
        mean=float(values.mean(dtype=np.float64)),
        std=float(values.std(dtype=np.float64)),
    )


def batch_samples(
    batch: Mapping[str, Any], names: Sequence[str], schema: Schema, shown: Sequence[str]
) -> list[BatchSample]:
    """The samples with what their other fields hold. names: of the samples; shown: the fields."""
    ids = batch[number_name(schema)].tolist()
    return [
        BatchSample(
            id=int(number),
            name=name,
            values={field: _value(batch, schema, field, row) for field in shown},
        )
        for row, (number, name) in enumerate(zip(ids, names, strict=True))
    ]


def _value(batch: Mapping[str, Any], schema: Schema, field: str, row: int) -> str:
    """One value for people: a class by name, text and numbers cut short, else its shape."""
    present = batch.get(field + PRESENT)
    if present is not None and not present[row]:
        return "-"
    value, type = batch[field][row], schema.get(field)
    if isinstance(value, bytes):
        return f"{len(value):,} bytes"
    if isinstance(value, str):
        line = " ".join(value.split())
        return line if len(line) <= _TEXT_CHARACTERS else line[: _TEXT_CHARACTERS - 1] + "…"
    if isinstance(type, ClassLabel) and not value.dim():
        number = int(value)
        return type.names[number] if 0 <= number < len(type.names) else str(number)
    if value.numel() <= _NUMBERS and value.dim() <= 1:
        return " ".join(f"{each:.4g}" for each in value.reshape(-1).tolist()) or "empty"
    return " x ".join(map(str, value.shape))
