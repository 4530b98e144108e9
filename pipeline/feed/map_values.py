"""Convert columns to the arguments of a user's function, and its results back to columns.

Arguments are Python and numpy values. Each result is checked against the type that the `Map`
declares, and copied at once, because the function may change it later. Python numbers are converted
to the declared dtype if that loses nothing; arrays must have it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.readers.fieldtypes import (
    ArrayForm,
    DenseColumn,
    EncodedColumn,
    ListColumn,
    RaggedColumn,
    patched_column,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from penstock.readers.fieldtypes import Column, FieldType


def without_views(column: Column, type: FieldType) -> Column:
    """Return a column without views on files; samples that aren't decoded become bytes."""
    if not isinstance(column, EncodedColumn):
        return column
    if type.is_image:
        return ListColumn([sample.tobytes() for sample in column.samples])
    return type.column(list(map(type.decoder(), column.samples)))


def samples_of(column: Column) -> Sequence[Any]:
    """Return each sample as a str, bytes, a read-only array, or a numpy scalar."""
    if isinstance(column, DenseColumn):
        values = _private(column.values)
        return [values[row] for row in range(len(values))]
    if isinstance(column, RaggedColumn):
        own = replace(column, values=_private(column.values))
        return [own.sample(row) for row in range(len(own))]
    return [_private(each) if isinstance(each, np.ndarray) else each for each in column.samples]


def stacked(column: Column) -> Any:
    """Return all samples at once: a read-only array if they share a shape, else a list."""
    return _private(column.values) if isinstance(column, DenseColumn) else samples_of(column)


def _private(values: NDArray[Any]) -> NDArray[Any]:
    """Return a read-only copy.

    The flag alone isn't enough, because a tensor over the array could still be written to, and the
    original belongs to the dataset: a mapped file, or memory that is kept for the next epoch.
    """
    copy = values.copy()
    copy.flags.writeable = False
    return copy


_SHOWN = 80


class MisfitError(Exception):
    """A value doesn't have its declared type. got, wanted: descriptions; row: of several values."""

    def __init__(self, got: str, wanted: str, *, row: int | None = None) -> None:
        super().__init__(got, wanted)
        self.got, self.wanted, self.row = got, wanted, row


class Collector:
    """Collects the values of one field, sample by sample; a row without a value is empty or 0."""

    def __init__(self, type: FieldType, count: int) -> None:
        self._type = type
        form = type.stored or type.decoded
        self._returned = type.returned if form is None or type.is_class else form.returned
        self._is_ragged = form is not None and form.is_ragged
        self._values: Any  # an array, else a list
        if form is not None and not self._is_ragged:
            self._values = np.zeros((count, *form.fixed_shape), form.dtype)
        else:
            self._values = [type.empty if form is None else form.empty] * count

    def put(self, row: int, value: Any) -> None:
        """Set the value of a row. Raises MisfitError."""
        try:
            found = self._returned(value)
        except ValueError as error:
            raise _misfit(error, value) from None
        self._values[row] = found.copy() if self._is_ragged else found

    def put_all(self, values: Any) -> None:
        """Set the values of all rows at once. Raises MisfitError."""
        own = self._values
        if isinstance(own, np.ndarray) and hasattr(values, "dtype") and not self._type.is_class:
            try:
                own[:] = ArrayForm(own.dtype, own.shape).returned(values)
            except ValueError as error:
                raise _misfit(error, values) from None
            return
        for row, value in enumerate(values):
            try:
                self.put(row, value)
            except MisfitError as error:
                error.row = row
                raise

    def column(self) -> Column:
        """Return the values as a column."""
        own = self._values
        return DenseColumn(own) if isinstance(own, np.ndarray) else self._type.column(own)


def _misfit(error: ValueError, value: Any) -> MisfitError:
    got, wanted = error.args
    return MisfitError(got or _shown(value), wanted)


def _shown(value: Any) -> str:
    text = repr(value)
    text = text if len(text) <= _SHOWN else text[:_SHOWN] + "…"
    return "None" if value is None else f"{text} ({type(value).__name__})"


def scattered(column: Column, type: FieldType, rows: Sequence[int], count: int) -> Column:
    """Return a column of `count` samples: the given ones in `rows`, and empty ones elsewhere."""
    nothing = Collector(type, count).column()
    return patched_column(nothing, rows, column) if rows else nothing
