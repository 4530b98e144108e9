"""Numbers, classes, arrays of numbers, and sequences of tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence, Set
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from penstock.cache import ConfigError
from penstock.readers.fieldtypes.array_forms import (
    AUTO_DTYPE,
    ArrayForm,
    advice,
    is_shape,
    unfit_numbers,
    widened,
)
from penstock.readers.fieldtypes.field_type import FieldType, check_dtype, frozen_type
from penstock.readers.types import CODECS, Bools, Facts, Numbers, Rejection

if TYPE_CHECKING:
    from penstock.readers.fieldtypes.array_forms import Known
    from penstock.readers.fieldtypes.field_type import Sizes


_MAX_NAMES, _MAX_NAME_LENGTH, _NAMES_SHOWN = 2**24, 4096, 5
_INT64 = np.dtype(np.int64)
_IDS = range(-(2**63), 2**63)


def some_names(names: Sequence[str]) -> str:
    """Return the first names as a list for a message."""
    return ", ".join(names[:_NAMES_SHOWN]) + (", …" if len(names) > _NAMES_SHOWN else "")


@frozen_type
class Value(FieldType):
    """One number per sample. dtype: numpy's name, such as "float32"."""

    dtype: str

    kind: ClassVar[str] = "value"

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", check_dtype("Value", self.dtype))
        if np.dtype(self.dtype).itemsize > 8:
            raise ConfigError(f"Value: got {self.dtype!r}, wanted a number of 8 bytes at most.")

    @property
    def number(self) -> np.dtype[Any]:
        return np.dtype(self.dtype)


class _Classes(FieldType):
    """A type whose classes have names."""

    __slots__ = ()

    names: tuple[str, ...]
    _is_listed: ClassVar[bool] = False

    def __post_init__(self) -> None:
        what, names = type(self).__name__, self.names
        is_list = isinstance(names, Sequence) and not isinstance(names, str)
        least = int(self._is_listed)
        if not is_list or not all(
            isinstance(name, str) and len(name) <= _MAX_NAME_LENGTH for name in names
        ):
            raise ConfigError(f"{what}: got names={str(names)[:80]}, wanted a list of strings.")
        if not least <= len(names) <= _MAX_NAMES:
            raise ConfigError(
                f"{what}: got {len(names):,} names, wanted {least} to {_MAX_NAMES:,}."
            )
        if len(set(names)) < len(names):
            ((twice, _),) = Counter(names).most_common(1)
            raise ConfigError(f"{what}: got {twice!r} twice, wanted each class once.")
        object.__setattr__(self, "names", tuple(names))

    @property
    def class_names(self) -> tuple[str, ...]:
        return self.names

    def cell_reader(self, *, is_text: bool) -> Callable[[Any], Any]:
        from penstock.readers.fieldtypes.cells import ClassNumbers, class_cell, classes_cell

        read = classes_cell if self._is_listed else class_cell
        return partial(read, numbers=ClassNumbers(self.names), is_text=is_text)


class _Numbered(_Classes):
    """Classes that are stored by their numbers, int64."""

    __slots__ = ()

    def unfit(self, numbers: Numbers, dtype: np.dtype[Any]) -> Bools:
        unfit = unfit_numbers(dtype, numbers) | (numbers < 0)
        return unfit | (numbers >= len(self.names)) if self.names else unfit

    def mismatch(self) -> str:
        if not self.names:
            return "isn't a class number: classes are numbered from 0"
        shown = some_names([*map(repr, self.names)])
        return f"is none of the {len(self.names):,} classes ({shown}), numbered from 0"


@frozen_type
class ClassLabel(_Numbered):
    """A class by its number, int64. names: by number; empty if the classes have no names."""

    names: tuple[str, ...] = ()

    kind: ClassVar[str] = "class_label"
    is_class: ClassVar[bool] = True

    @property
    def number(self) -> np.dtype[Any]:
        return _INT64

    @property
    def column_kinds(self) -> Set[str]:
        return {"number", "text"} if self.names else {"number"}

    def returned(self, value: Any) -> Numbers:
        """Convert a class number of any integer type."""
        array = np.asarray(value) if hasattr(value, "dtype") else value
        if isinstance(array, np.ndarray) and array.dtype.kind in "iu":
            array = array.astype(np.int64)
        label = ArrayForm(_INT64, ()).returned(array)
        if self.names and not 0 <= label < len(self.names):
            raise ValueError(f"the class {label}", f"one from 0 to {len(self.names) - 1}")
        return label

    def show(self, value: Any) -> str | None:
        if value.dim():
            return None
        number = int(value)
        return self.names[number] if 0 <= number < len(self.names) else str(number)


@frozen_type
class ClassLabels(_Numbered):
    """The class of each box of a sample by its number, int64, (boxes,).

    names: by number; empty if the classes have no names. of: the field of the boxes; a class is
    dropped together with its box. ids: the numbers that the classes have in the data's own files,
    such as COCO's category ids, which have gaps; empty if these are the same.
    """

    names: tuple[str, ...] = ()
    of: str | None = None
    ids: tuple[int, ...] = ()

    kind: ClassVar[str] = "class_labels"
    is_target: ClassVar[bool] = True
    refers_to: ClassVar[str | None] = "boxes"

    def __post_init__(self) -> None:
        _Classes.__post_init__(self)
        ids: Any = self.ids
        is_list = isinstance(ids, Sequence) and not isinstance(ids, str)
        if not is_list or not all(type(each) is int and each in _IDS for each in ids):
            raise ConfigError(f"ClassLabels: got ids={str(ids)[:80]}, wanted a list of integers.")
        if ids and (len(ids) != len(self.names) or len({*ids}) < len(ids)):
            raise ConfigError(
                f"ClassLabels: got {len(ids):,} ids for {len(self.names):,} names, wanted a "
                "different id for each class."
            )
        object.__setattr__(self, "ids", tuple(ids))

    @property
    def form(self) -> ArrayForm:
        return ArrayForm(_INT64, (None,))

    def check_values(self, values: Numbers, size: Sizes | None = None) -> Rejection | None:
        """Return why the numbers aren't classes, or None."""
        unfit = self.unfit(values, _INT64)
        if not unfit.any():
            return None
        row = int(unfit.argmax())
        return Rejection(f"box {row} has the class {values[row].item()!r}, which {self.mismatch()}")

    def cell_reader(self, *, is_text: bool) -> Callable[[Any], Any]:
        from penstock.readers.fieldtypes.cells import ClassNumbers, labels_cell

        return partial(labels_cell, numbers=ClassNumbers(self.names), is_text=is_text)


@frozen_type
class MultiLabel(_Classes):
    """Any number of classes per sample, delivered as float32 of shape (len(names),), with 1 for
    each class that applies. names: of the classes, at least one."""

    names: tuple[str, ...]

    kind: ClassVar[str] = "multi_label"
    is_bits: ClassVar[bool] = True
    _is_listed: ClassVar[bool] = True
    in_files: ClassVar[bool] = False
    column_kinds: ClassVar[Set[str]] = frozenset()

    @property
    def form(self) -> ArrayForm:
        return ArrayForm.of("float32", (len(self.names),))


@frozen_type
class Array(FieldType):
    """Numbers in one or more dimensions.

    dtype: numpy's name, such as "float32"; "auto" keeps the stored dtype. shape: of one sample;
    None in it is a length that differs between samples, and None instead of it keeps the stored
    shapes. of: the field of boxes to which these belong, one row per box: a row is dropped together
    with its box.
    """

    dtype: str = AUTO_DTYPE
    shape: tuple[int | None, ...] | None = None
    of: str | None = None

    kind: ClassVar[str] = "array"
    refers_to: ClassVar[str | None] = "boxes"
    can_crop: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.dtype != AUTO_DTYPE:
            object.__setattr__(self, "dtype", check_dtype("Array", self.dtype))
        shape: Any = self.shape
        if isinstance(shape, Sequence) and not isinstance(shape, str) and is_shape(shape):
            object.__setattr__(self, "shape", tuple(shape))
        elif shape is not None:
            raise ConfigError(f"Array: got shape={shape!r}, wanted lengths, None for any.")

    @property
    def form(self) -> ArrayForm | None:
        if self.dtype == AUTO_DTYPE or self.shape is None:
            return None
        return ArrayForm.of(self.dtype, self.shape)

    @property
    def is_ragged(self) -> bool:
        """Return True if samples may differ in shape."""
        return self.shape is None or None in self.shape

    @property
    def is_settled(self) -> bool:
        return self.form is not None

    def completed(self, dtype: str, shape: tuple[int | None, ...]) -> Array:
        return replace(
            self,
            dtype=dtype if self.dtype == AUTO_DTYPE else self.dtype,
            shape=shape if self.shape is None else self.shape,
        )

    def settled(self, so_far: FieldType | None, facts: Facts, *, field: str) -> Array:
        """Return the array that also holds one more sample: lengths that differ become None. Raises
        ValueError for another dtype or number of dimensions."""
        found = CODECS[facts.codec].native
        form = so_far.form if so_far is not None else None
        if form is None:
            return self.completed(found.name, facts.shape)
        if form.dtype != found or len(form.shape) != len(facts.shape):
            raise ValueError(advice(field, form.dtype.name, form.shape, of=self.of))
        shape = widened(form.shape, facts.shape) if self.shape is None else self.shape
        return replace(self, dtype=found.name, shape=shape)

    @property
    def known(self) -> Known:
        return None if self.dtype == AUTO_DTYPE else np.dtype(self.dtype), self.shape


@frozen_type
class Tokens(FieldType):
    """A sequence of integers whose length differs between samples. dtype: numpy's name."""

    dtype: str = "int64"

    kind: ClassVar[str] = "tokens"

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", check_dtype("Tokens", self.dtype))
        if np.dtype(self.dtype).kind not in "iu":
            raise ConfigError(f"Tokens: got dtype={self.dtype!r}, wanted integers.")

    @property
    def form(self) -> ArrayForm:
        return ArrayForm.of(self.dtype, (None,))
