"""Define the types that a field of a sample can have, as frozen values without I/O.

Names follow Hugging Face's `Features` and torchvision's `tv_tensors` if those have one.
"""

from __future__ import annotations

import re
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal, get_args

import numpy as np

from penstock.cache import ConfigError, explain_arguments
from penstock.readers.types import NUMBER_SIZES

BoxFormat = Literal["xyxy", "xywh", "cxcywh", "xyxy_norm", "xywh_norm", "cxcywh_norm"]

AUTO_DTYPE = "auto"
"""Stands for the dtype of the stored data, until the index has settled it."""

DTYPES = frozenset(
    np.dtype(f"{kind}{size}").name for kind, sizes in NUMBER_SIZES.items() for size in sizes
)
"""The names of the supported dtypes."""

_MAX_NAMES, _MAX_NAME_LENGTH, _MAX_DIMENSIONS, _MAX_LENGTH = 2**24, 4096, 32, 2**40
_NAME = re.compile(r"[^\x00-\x1f\x7f/]{1,128}")

ID, SAMPLE_ID, NUMBER = "id", "sample_id", "penstock/id"
"""The names of a sample's number in the dataset. A field of the dataset that has one of the first
two names hides it; no field can have the third."""

PRESENT = ".present"
"""The suffix of the field of bools that marks the samples that have a field."""


@explain_arguments(ConfigError)
@dataclass(frozen=True, slots=True)
class Image:
    """An encoded image (JPEG, PNG, …), which is decoded to upright pixels."""

    kind: ClassVar[str] = "image"


@explain_arguments(ConfigError)
@dataclass(frozen=True, slots=True)
class Audio:
    """An encoded piece of sound."""

    kind: ClassVar[str] = "audio"


@explain_arguments(ConfigError)
@dataclass(frozen=True, slots=True)
class Video:
    """An encoded video."""

    kind: ClassVar[str] = "video"


@explain_arguments(ConfigError)
@dataclass(frozen=True, slots=True)
class Text:
    """UTF-8 text, delivered as str."""

    kind: ClassVar[str] = "text"


@explain_arguments(ConfigError)
@dataclass(frozen=True, slots=True)
class Bytes:
    """Bytes that are delivered unchanged."""

    kind: ClassVar[str] = "bytes"


@explain_arguments(ConfigError)
@dataclass(frozen=True, slots=True)
class Array:
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

    def __post_init__(self) -> None:
        if self.dtype != AUTO_DTYPE:
            object.__setattr__(self, "dtype", _check_dtype("Array", self.dtype))
        if self.shape is not None:
            object.__setattr__(self, "shape", _check_shape(self.shape))
        if self.of is not None:
            _check_reference("Array", self.of)

    @property
    def is_ragged(self) -> bool:
        """Return True if samples differ in shape, or may differ."""
        return self.shape is None or None in self.shape

    @property
    def is_settled(self) -> bool:
        """Return True if the dtype and the number of dimensions are known."""
        return self.dtype != AUTO_DTYPE and self.shape is not None


@explain_arguments(ConfigError)
@dataclass(frozen=True, slots=True)
class Value:
    """One number per sample. dtype: numpy's name, such as "float32"."""

    dtype: str

    kind: ClassVar[str] = "value"

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", _check_dtype("Value", self.dtype))
        if np.dtype(self.dtype).itemsize > 8:
            raise ConfigError(f"Value: got {self.dtype!r}, wanted a number of 8 bytes at most.")


@explain_arguments(ConfigError)
@dataclass(frozen=True, slots=True)
class ClassLabel:
    """A class by its number, int64. names: by number; empty if the classes have no names."""

    names: tuple[str, ...] = ()

    kind: ClassVar[str] = "class_label"

    def __post_init__(self) -> None:
        object.__setattr__(self, "names", _check_names("ClassLabel", self.names))


@explain_arguments(ConfigError)
@dataclass(frozen=True, slots=True)
class MultiLabel:
    """Any number of classes per sample, delivered as float32 of shape (len(names),), with 1 for
    each class that applies. names: of the classes, at least one."""

    names: tuple[str, ...]

    kind: ClassVar[str] = "multi_label"

    def __post_init__(self) -> None:
        object.__setattr__(self, "names", _check_names("MultiLabel", self.names))
        if not self.names:
            raise ConfigError("MultiLabel: got no names, wanted the classes' names.")


@explain_arguments(ConfigError)
@dataclass(frozen=True, slots=True)
class Mask:
    """A class number for each pixel of an image, in a lossless image file or an .npy file.

    of: the image's field. The mask follows the image through a recipe, by nearest neighbours.
    dtype: of the delivered mask, "uint8" or "int32"; "auto" is uint8 if all files fit it.
    """

    of: str
    dtype: str = AUTO_DTYPE

    kind: ClassVar[str] = "mask"

    def __post_init__(self) -> None:
        _check_reference("Mask", self.of)
        if self.dtype not in (AUTO_DTYPE, "uint8", "int32"):
            raise ConfigError(f'Mask: got dtype={self.dtype!r}, wanted "uint8" or "int32".')

    @property
    def is_settled(self) -> bool:
        """Return True if the dtype is known."""
        return self.dtype != AUTO_DTYPE


@explain_arguments(ConfigError)
@dataclass(frozen=True, slots=True)
class Boxes:
    """Boxes in an image, float32, (boxes, 4) per sample, delivered as x1, y1, x2, y2 in pixels.

    of: the image's field. format: in storage, in pixels of the upright image, or, if it ends in
    "_norm", as fractions of the image's width and height.
    """

    of: str
    format: BoxFormat = "xyxy"

    kind: ClassVar[str] = "boxes"

    def __post_init__(self) -> None:
        _check_reference("Boxes", self.of)
        if self.format not in get_args(BoxFormat):
            wanted = ", ".join(get_args(BoxFormat))
            raise ConfigError(f"Boxes: got format={self.format!r}, wanted one of {wanted}.")

    @property
    def is_normalised(self) -> bool:
        """Return True if the stored numbers are fractions of the image's width and height."""
        return self.format.endswith("_norm")


@explain_arguments(ConfigError)
@dataclass(frozen=True, slots=True)
class Keypoints:
    """Points in an image, float32, (points, 2) per sample: x, y in pixels of the upright image. of:
    the image's field."""

    of: str

    kind: ClassVar[str] = "keypoints"

    def __post_init__(self) -> None:
        _check_reference("Keypoints", self.of)


@explain_arguments(ConfigError)
@dataclass(frozen=True, slots=True)
class Tokens:
    """A sequence of integers whose length differs between samples. dtype: numpy's name."""

    dtype: str = "int64"

    kind: ClassVar[str] = "tokens"

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", _check_dtype("Tokens", self.dtype))
        if np.dtype(self.dtype).kind not in "iu":
            raise ConfigError(f"Tokens: got dtype={self.dtype!r}, wanted integers.")


FieldType = (
    Image
    | Audio
    | Video
    | Text
    | Bytes
    | Array
    | Value
    | ClassLabel
    | MultiLabel
    | Mask
    | Boxes
    | Keypoints
    | Tokens
)

FIELD_TYPES: Mapping[str, type[Any]] = {kind.kind: kind for kind in get_args(FieldType)}
"""The types by their names in manifests."""


def is_encoded(type: FieldType) -> bool:
    """Return True if samples are encoded bytes, text included."""
    return isinstance(type, Image | Audio | Video | Text | Bytes | Mask)


def has_values(type: FieldType) -> bool:
    """Return True if samples are values that a table can hold: not encoded media, and not raw
    bytes."""
    return not isinstance(type, Image | Audio | Video | Mask | Bytes)


def to_json(type: FieldType) -> dict[str, Any]:
    """Return a type as manifests store it."""
    values = {each.name: getattr(type, each.name) for each in fields(type)}
    return {"kind": type.kind, **{k: v for k, v in values.items() if v is not None}}


def from_json(value: Any) -> FieldType:
    """Return the type that a manifest stores. The value is untrusted. Raises ValueError."""
    kind = value.get("kind") if isinstance(value, Mapping) else None
    if not isinstance(kind, str) or kind not in FIELD_TYPES:
        raise ValueError(f"{str(value)[:80]!r} isn't a field's type")
    values = {k: tuple(v) if isinstance(v, list) else v for k, v in value.items() if k != "kind"}
    try:
        found: FieldType = FIELD_TYPES[kind](**values)
    except (ConfigError, TypeError) as error:
        raise ValueError(str(error)) from error
    return found


def is_field_name(name: object) -> bool:
    """Return True if a field can have this name."""
    return isinstance(name, str) and bool(_NAME.fullmatch(name)) and is_utf8(name)


def is_utf8(text: str) -> bool:
    """Return True if a text can be encoded as UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:  # a lone surrogate
        return False
    return True


def check_field_name(name: object, *, what: str) -> str:
    """Return a field's name, or raise ConfigError. what: the argument, for the message."""
    if not isinstance(name, str) or not is_field_name(name):
        raise ConfigError(
            f"{what}: got {name!r}, wanted a field's name: 1 to 128 characters without a slash."
        )
    if name.endswith(PRESENT):
        raise ConfigError(
            f'{what}: got {name!r}: names that end in "{PRESENT}" are reserved. Choose another '
            "name."
        )
    return name


def number_name(fields: Container[str]) -> str:
    """Return the first free name for the sample's number. fields: of the dataset."""
    return next(name for name in (ID, SAMPLE_ID, NUMBER) if name not in fields)


def is_number(name: str, fields: Container[str]) -> bool:
    """Return True if a name stands for the sample's number. fields: of the dataset."""
    return name in (ID, SAMPLE_ID, NUMBER) and name not in fields


def _check_dtype(what: str, dtype: object) -> str:
    try:  # numpy would read None as float64
        name = "" if dtype is None else np.dtype(dtype).newbyteorder("=").name  # type: ignore[call-overload]
    except (TypeError, ValueError):
        name = ""
    if name not in DTYPES:
        raise ConfigError(
            f"{what}: got dtype={dtype!r}, wanted one of {', '.join(sorted(DTYPES))}."
        )
    return str(name)


def _check_shape(shape: object) -> tuple[int | None, ...]:
    if (
        not isinstance(shape, Sequence)
        or isinstance(shape, str)
        or len(shape) > _MAX_DIMENSIONS
        or not all(n is None or (type(n) is int and 0 <= n <= _MAX_LENGTH) for n in shape)
    ):
        raise ConfigError(f"Array: got shape={shape!r}, wanted a tuple of lengths, None for any.")
    return tuple(shape)


def _check_reference(what: str, of: object) -> None:
    if not is_field_name(of):
        raise ConfigError(f"{what}: got of={of!r:.80}, wanted the name of a field.")


def _check_names(what: str, names: object) -> tuple[str, ...]:
    if not isinstance(names, Sequence) or isinstance(names, str):
        raise ConfigError(f"{what}: got names={names!r}, wanted a list of class names.")
    if not all(isinstance(name, str) and len(name) <= _MAX_NAME_LENGTH for name in names):
        raise ConfigError(f"{what}: got names={str(names)[:80]}, wanted strings.")
    if len(set(names)) < len(names):
        seen: set[str] = set()
        twice = next(name for name in names if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise ConfigError(f"{what}: got {twice!r} twice, wanted each class once.")
    if len(names) > _MAX_NAMES:
        raise ConfigError(f"{what}: got {len(names):,} names, wanted at most {_MAX_NAMES:,}.")
    return tuple(names)
