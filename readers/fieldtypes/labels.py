"""Numbers and classes: one number, one class, or several classes per sample."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from penstock.cache import ConfigError, explain_arguments
from penstock.readers.fieldtypes.array_forms import ArrayForm, unfit_numbers
from penstock.readers.fieldtypes.field_type import FieldType, check_dtype

if TYPE_CHECKING:
    from collections.abc import Callable, Set

    from numpy.typing import NDArray

_MAX_NAMES, _MAX_NAME_LENGTH, _NAMES_SHOWN = 2**24, 4096, 5
_INT64 = np.dtype(np.int64)


@explain_arguments(ConfigError)
@dataclass(frozen=True, slots=True)
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
        if not isinstance(names, Sequence) or isinstance(names, str):
            raise ConfigError(f"{what}: got names={names!r}, wanted a list of class names.")
        if not all(isinstance(name, str) and len(name) <= _MAX_NAME_LENGTH for name in names):
            raise ConfigError(f"{what}: got names={str(names)[:80]}, wanted strings.")
        if len(set(names)) < len(names):
            ((twice, _),) = Counter(names).most_common(1)
            raise ConfigError(f"{what}: got {twice!r} twice, wanted each class once.")
        if len(names) > _MAX_NAMES:
            raise ConfigError(f"{what}: got {len(names):,} names, wanted at most {_MAX_NAMES:,}.")
        if self._is_listed and not names:
            raise ConfigError(f"{what}: got no names, wanted the classes' names.")
        object.__setattr__(self, "names", tuple(names))

    @property
    def class_names(self) -> tuple[str, ...]:
        return self.names

    def cell_reader(self, *, is_text: bool) -> Callable[[Any], Any]:
        from penstock.readers.fieldtypes.cells import ClassNumbers, class_cell, classes_cell

        read = classes_cell if self._is_listed else class_cell
        return partial(read, numbers=ClassNumbers(self.names), is_text=is_text)


@explain_arguments(ConfigError)
@dataclass(frozen=True, slots=True)
class ClassLabel(_Classes):
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

    def may_not_fit(self, stored: np.dtype[Any]) -> bool:
        return bool(self.names) or (stored.kind in "iuf" and not np.can_cast(stored, _INT64))

    def unfit(self, numbers: NDArray[Any], dtype: np.dtype[Any]) -> NDArray[np.bool_]:
        unfit = unfit_numbers(dtype, numbers)
        return unfit | (numbers < 0) | (numbers >= len(self.names)) if self.names else unfit

    def mismatch(self) -> str:
        if not self.names:
            return "isn't a class number: classes are numbered from 0"
        shown = ", ".join(map(repr, self.names[:_NAMES_SHOWN]))
        more = ", …" if len(self.names) > _NAMES_SHOWN else ""
        return f"is none of the {len(self.names):,} classes ({shown}{more}), numbered from 0"

    def returned(self, value: Any) -> NDArray[Any]:
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


@explain_arguments(ConfigError)
@dataclass(frozen=True, slots=True)
class MultiLabel(_Classes):
    """Any number of classes per sample, delivered as float32 of shape (len(names),), with 1 for
    each class that applies. names: of the classes, at least one."""

    names: tuple[str, ...]

    kind: ClassVar[str] = "multi_label"
    is_bits: ClassVar[bool] = True
    _is_listed: ClassVar[bool] = True

    @property
    def form(self) -> ArrayForm:
        return ArrayForm.of("float32", (len(self.names),))

    @property
    def in_files(self) -> bool:
        return False

    @property
    def column_kinds(self) -> Set[str]:
        return set()
