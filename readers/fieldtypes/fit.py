"""Compare stored numbers with their types, and settle the types that a schema leaves open.

Numbers that are stored in another dtype than the schema's are cast if they keep their value. A
value that doesn't fit makes its sample bad; it never becomes another number. A type is settled
after all samples were seen. Lengths that differ make it ragged. A dtype or a number of dimensions
that differs is an error, as no batch could hold both.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.cache import DatasetError
from penstock.readers.fieldtypes.schema import Schema
from penstock.readers.types import UNFIT, Facts, array_codec

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from penstock.readers.fieldtypes.field_type import FieldType

_NOTHING = Facts(0, 0, 0, (0,), "<f4")  # the sample of a field that no sample has


def put_fitting(
    field: str,
    type: FieldType,
    found: NDArray[Any],
    out: NDArray[Any],
    places: NDArray[np.int64] | slice,
) -> dict[int, str]:
    """Write rows of stored numbers to out[places], with zeros for a row that doesn't fit its type.
    Returns the reasons by row."""
    unfit = type.unfit(found, out.dtype)
    rows = unfit.reshape(len(found), -1).any(axis=1)
    wrong = {}
    for row in np.flatnonzero(rows).tolist():
        value = found[row][unfit[row]].reshape(-1)[0].item()
        wrong[row] = f"{field}: {value!r} {type.mismatch()}. {UNFIT}"
    with np.errstate(all="ignore"):
        if wrong:
            found = found.copy()
            found[rows] = 0
        out[places] = found
    return wrong


class Settling:
    """Settles the types of a schema from the facts of all good samples."""

    def __init__(self, schema: Schema) -> None:
        self._schema = schema
        self._open = schema.unsettled
        self._found: dict[str, FieldType] = {}
        self._first: dict[str, str] = {}

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
            each, type = facts[name], self._schema[name]
            try:
                self._found[name] = type.settled(self._found.get(name), each, field=name)
            except ValueError as error:
                raise DatasetError(
                    f'The field "{name}" is {self._first[name]}, and {_described(each, sample)}: '
                    "wanted one dtype and number of dimensions. Convert the others, or choose one "
                    f"type and quarantine the others: {error}."
                ) from None
            if name not in self._first:
                self._first[name] = _described(each, sample)

    def schema(self) -> Schema:
        """Return the settled schema. A field that no sample has becomes an empty float32 array, or
        a uint8 mask."""
        return Schema(
            {
                name: self._found.get(name) or type.settled(None, _NOTHING, field=name)
                for name, type in self._schema.items()
            }
        )


def _described(facts: Facts, sample: str) -> str:
    codec = array_codec(facts.codec)
    return f"{facts.codec if codec is None else codec.name} of shape {facts.shape} in {sample}"
