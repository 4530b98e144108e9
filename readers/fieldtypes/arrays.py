"""Arrays of numbers, and sequences of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from penstock.cache import ConfigError, explain_arguments
from penstock.readers.fieldtypes.array_forms import AUTO_DTYPE, ArrayForm, advice, is_shape, widened
from penstock.readers.fieldtypes.field_type import FieldType, check_dtype, check_reference
from penstock.readers.types import CODECS, Facts


@explain_arguments(ConfigError)
@dataclass(frozen=True, slots=True)
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
            raise ConfigError(
                f"Array: got shape={shape!r}, wanted a tuple of lengths, None for any."
            )
        if self.of is not None:
            check_reference("Array", self.of)

    @property
    def form(self) -> ArrayForm | None:
        if self.dtype == AUTO_DTYPE or self.shape is None:
            return None
        return ArrayForm.of(self.dtype, self.shape)

    @property
    def is_ragged(self) -> bool:
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
        if so_far is None:
            return self.completed(found.name, facts.shape)
        assert isinstance(so_far, Array), so_far
        dtype, shape = so_far.known
        assert shape is not None, so_far
        if dtype != found or len(shape) != len(facts.shape):
            raise ValueError(advice(field, so_far.dtype, shape, of=so_far.of))
        if self.shape is not None:
            return so_far
        return replace(so_far, shape=widened(shape, facts.shape))

    @property
    def known(self) -> tuple[np.dtype[Any] | None, tuple[int | None, ...] | None]:
        return None if self.dtype == AUTO_DTYPE else np.dtype(self.dtype), self.shape


@explain_arguments(ConfigError)
@dataclass(frozen=True, slots=True)
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
