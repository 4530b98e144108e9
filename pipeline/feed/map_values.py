"""Convert columns to the arguments of a user's function, and its results back to columns.

Arguments are Python and numpy values. Each result is checked against the type that the `Map`
declares, and copied at once, because the function may change it later. Python numbers are converted
to the declared dtype if that loses nothing; arrays must have it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.readers.fieldtypes import (
    ArrayForm,
    DenseColumn,
    EncodedColumn,
    ListColumn,
    RaggedColumn,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from penstock.readers.fieldtypes import Column, FieldType

    Shape = tuple[int | None, ...]


def without_views(column: Column, type: FieldType) -> Column:
    """Return a column without views on files; samples that aren't decoded become bytes."""
    if not isinstance(column, EncodedColumn):
        return column
    if type.is_image or not type.is_delivered:
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


def sample_generators(keys: NDArray[np.uint64]) -> list[np.random.Generator]:
    """Return a random generator per sample. keys: shape (n,)."""
    return [np.random.Generator(np.random.Philox(key=int(key))) for key in keys]


_SHOWN = 80


class MisfitError(Exception):
    """A value doesn't have its declared type. got, wanted: descriptions; row: of several values."""

    def __init__(self, got: str, wanted: str, *, row: int | None = None) -> None:
        super().__init__(got, wanted)
        self.got, self.wanted, self.row = got, wanted, row


class Collector(ABC):
    """Collects the values of one field, sample by sample; a row without a value is empty or 0."""

    @abstractmethod
    def put(self, row: int, value: Any) -> None:
        """Set the value of a row. Raises MisfitError."""

    def put_all(self, values: Any) -> None:
        """Set the values of all rows at once. Raises MisfitError."""
        for row, value in enumerate(values):
            try:
                self.put(row, value)
            except MisfitError as error:
                error.row = row
                raise

    @abstractmethod
    def column(self) -> Column:
        """Return the values as a column."""


def collector(type: FieldType, count: int) -> Collector:
    """Return a collector of `count` values of a type."""
    form = type.form if type.number is None else ArrayForm(type.number, ())
    if type.is_class:
        return _LabelCollector(count, names=len(type.class_names))
    form = form or type.decoded
    if form is None:
        return _ListCollector(count, type)
    if form.is_ragged:
        return _RaggedCollector(count, form)
    return _DenseCollector(count, form.dtype, form.fixed_shape)


class _ListCollector(Collector):
    """Values of types that have neither dtype nor shape: texts, bytes, masks."""

    def __init__(self, count: int, type: FieldType) -> None:
        self._type = type
        self._samples: list[Any] = [type.empty] * count

    def put(self, row: int, value: Any) -> None:
        try:
            self._samples[row] = self._type.returned(value)
        except ValueError as error:
            got, wanted = error.args
            raise MisfitError(got or _shown(value), wanted) from None

    def column(self) -> Column:
        return self._type.column(self._samples)


class _DenseCollector(Collector):
    def __init__(self, count: int, dtype: np.dtype[Any], shape: tuple[int, ...]) -> None:
        self._values = np.zeros((count, *shape), dtype)
        self._shape = shape

    def put(self, row: int, value: Any) -> None:
        self._values[row] = as_array(value, self._values.dtype, self._shape)

    def put_all(self, values: Any) -> None:
        if hasattr(values, "dtype"):
            self._values[:] = as_array(values, self._values.dtype, self._values.shape)
        else:
            super().put_all(values)

    def column(self) -> Column:
        return DenseColumn(self._values)


class _LabelCollector(_DenseCollector):
    """Class numbers of any integer type, checked against the number of classes."""

    def __init__(self, count: int, *, names: int) -> None:
        super().__init__(count, np.dtype(np.int64), ())
        self._names = names

    def put(self, row: int, value: Any) -> None:
        array = np.asarray(value) if hasattr(value, "dtype") else value
        if isinstance(array, np.ndarray) and array.dtype.kind in "iu":
            array = array.astype(np.int64)
        super().put(row, array)
        label = self._values[row]
        if self._names and not 0 <= label < self._names:
            raise MisfitError(f"the class {label}", f"one from 0 to {self._names - 1}")

    def put_all(self, values: Any) -> None:
        Collector.put_all(self, values)  # one by one, because each is converted and checked


class _RaggedCollector(Collector):
    """Samples of different shapes."""

    def __init__(self, count: int, form: ArrayForm) -> None:
        self._form = form
        self._samples = [form.empty] * count

    def put(self, row: int, value: Any) -> None:
        self._samples[row] = np.array(as_array(value, self._form.dtype, self._form.shape))

    def column(self) -> Column:
        return self._form.column(self._samples)


def as_array(value: Any, dtype: np.dtype[Any], shape: Shape) -> NDArray[Any]:
    """Return a value as an array of a dtype and a shape, in which None is any length.

    Python numbers and lists are converted; arrays must have the dtype. Raises MisfitError.
    """
    wanted = _describe(dtype, shape)
    if value is None or isinstance(value, str | bytes):
        raise MisfitError(_shown(value), wanted)
    is_typed = hasattr(value, "dtype")
    try:
        array = np.asarray(value)
    except Exception as error:  # an array-like object may raise anything
        raise MisfitError(
            f"{_shown(value)}, which numpy can't convert to an array ({error})", wanted
        ) from None
    if not is_typed and array.size == 0 and len(shape) and shape[0] is None:
        array = np.zeros([length or 0 for length in shape], dtype)
    is_shape = len(shape) == array.ndim and all(
        length in (None, actual) for length, actual in zip(shape, array.shape, strict=True)
    )
    if not is_shape or not (
        array.dtype.newbyteorder("=") == dtype or _is_convertible(array, dtype, is_typed)
    ):
        got = _describe(array.dtype, array.shape) if is_typed else _shown(value)
        raise MisfitError(got, wanted)
    return array.astype(dtype, copy=False)


def _is_convertible(array: NDArray[Any], dtype: np.dtype[Any], is_typed: bool) -> bool:
    """Return True if an array of Python numbers can take a dtype without losing information."""
    if is_typed:
        return False
    if array.dtype.kind in "iu":
        if dtype.kind in "iu" and array.size:
            bounds = np.iinfo(dtype)
            return bool(bounds.min <= int(array.min()) and int(array.max()) <= bounds.max)
        return dtype.kind in "iufc"
    return array.dtype.kind in "fc" and dtype.kind in ("fc" if array.dtype.kind == "f" else "c")


def _describe(dtype: np.dtype[Any], shape: Sequence[int | None]) -> str:
    if not shape:
        return f"one {dtype}"
    lengths = ", ".join("any" if length is None else str(length) for length in shape)
    return f"{dtype} of shape ({lengths}{',' if len(shape) == 1 else ''})"


def _shown(value: Any) -> str:
    text = repr(value)
    text = text if len(text) <= _SHOWN else text[:_SHOWN] + "…"
    return "None" if value is None else f"{text} ({type(value).__name__})"


def scattered(column: Column, type: FieldType, rows: Sequence[int], count: int) -> Column:
    """Return a column of `count` samples: the given ones in `rows`, and empty ones elsewhere."""
    nothing = collector(type, count).column()
    return nothing.patched(rows, column) if rows else nothing
