"""Define the types that a field of a sample can have: frozen values without I/O.

Names follow Hugging Face's `Features` and torchvision's `tv_tensors` where those have one.
"""

from __future__ import annotations

import re
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal, get_args

import numpy as np

from penstock.cache import ConfigError, explain_arguments

BoxFormat = Literal["xyxy", "xywh", "cxcywh", "xyxy_norm", "xywh_norm", "cxcywh_norm"]

AUTO_DTYPE = "auto"
"""Stands for the dtype that the data have, until an index has seen them all."""

DTYPES = frozenset(
    (
        "bool",
        "int8",
        "int16",
        "int32",
        "int64",
        "uint8",
        "uint16",
        "uint32",
        "uint64",
        "float16",
        "float32",
        "float64",
        "complex64",
        "complex128",
    )
)
_MAX_NAMES, _MAX_NAME_LENGTH, _MAX_DIMENSIONS, _MAX_LENGTH = 2**24, 4096, 32, 2**40
_NAME = re.compile(r"[^\x00-\x1f\x7f/]{1,128}")

ID, SAMPLE_ID, NUMBER = "id", "sample_id", "penstock/id"
"""The names of a sample's number in the dataset. A field of the dataset's own that has one of the
first two hides it; none can have the third."""

PRESENT = ".present"
"""Behind a field's name: the field of bools that says which samples have it."""


@explain_arguments(ConfigError)
@dataclass(frozen=True, slots=True)
class Image:
    """An encoded image (JPEG, PNG, …) that is decoded to pixels, turned upright."""

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
    """UTF-8 text, handed out as str."""

    kind: ClassVar[str] = "text"


@explain_arguments(ConfigError)
@dataclass(frozen=True, slots=True)
class Bytes:
    """Bytes as they are, handed out as bytes."""

    kind: ClassVar[str] = "bytes"


@explain_arguments(ConfigError)
@dataclass(frozen=True, slots=True)
class Array:
    """Numbers in one or more dimensions.

    dtype: numpy's name, such as "float32"; "auto": as stored. shape: of one sample; None in it is a
    length that differs between samples, and None for it all is as stored. of: the boxes that these
    belong to, a row each: what drops a box drops its row.
    """

    dtype: str = AUTO_DTYPE
    shape: tuple[int | None, ...] | None = None
    of: str | None = None

    kind: ClassVar[str] = "array"

    def __post_init__(self) -> None:
        if self.dtype != AUTO_DTYPE:
            object.__setattr__(self, "dtype", _dtype("Array", self.dtype))
        if self.shape is not None:
            object.__setattr__(self, "shape", _shape(self.shape))
        if self.of is not None:
            _of("Array", self.of)

    @property
    def is_ragged(self) -> bool:
        """Whether samples differ in shape, or may."""
        return self.shape is None or None in self.shape

    @property
    def is_settled(self) -> bool:
        """Whether dtype and number of dimensions are known."""
        return self.dtype != AUTO_DTYPE and self.shape is not None


@explain_arguments(ConfigError)
@dataclass(frozen=True, slots=True)
class Value:
    """One number a sample. dtype: numpy's name, such as "float32"."""

    dtype: str

    kind: ClassVar[str] = "value"

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", _dtype("Value", self.dtype))
        if np.dtype(self.dtype).itemsize > 8:
            raise ConfigError(f"Value: got {self.dtype!r}, wanted a number of 8 bytes at most.")


@explain_arguments(ConfigError)
@dataclass(frozen=True, slots=True)
class ClassLabel:
    """A class by its number, int64. names: by number; empty where nobody named them."""

    names: tuple[str, ...] = ()

    kind: ClassVar[str] = "class_label"

    def __post_init__(self) -> None:
        object.__setattr__(self, "names", _names("ClassLabel", self.names))


@explain_arguments(ConfigError)
@dataclass(frozen=True, slots=True)
class MultiLabel:
    """Any number of classes a sample, handed out as float32 of shape (len(names),), 1 where the
    class holds. names: of the classes, at least one."""

    names: tuple[str, ...]

    kind: ClassVar[str] = "multi_label"

    def __post_init__(self) -> None:
        object.__setattr__(self, "names", _names("MultiLabel", self.names))
        if not self.names:
            raise ConfigError("MultiLabel: got no names, wanted the classes' names.")


@explain_arguments(ConfigError)
@dataclass(frozen=True, slots=True)
class Mask:
    """A class number for each pixel of an image, in an image file without loss or an .npy file.

    of: the image's field. It follows the image through a recipe, by nearest neighbours. dtype: it
    is handed out as, "uint8" or "int32"; "auto": uint8 where that holds all that the files can.
    """

    of: str
    dtype: str = AUTO_DTYPE

    kind: ClassVar[str] = "mask"

    def __post_init__(self) -> None:
        _of("Mask", self.of)
        if self.dtype not in (AUTO_DTYPE, "uint8", "int32"):
            raise ConfigError(f'Mask: got dtype={self.dtype!r}, wanted "uint8" or "int32".')

    @property
    def is_settled(self) -> bool:
        """Whether the dtype is known."""
        return self.dtype != AUTO_DTYPE


@explain_arguments(ConfigError)
@dataclass(frozen=True, slots=True)
class Boxes:
    """Boxes in an image, float32, (boxes, 4) a sample, delivered as x1, y1, x2, y2 in pixels.

    of: the image's field. format: in storage, in pixels of the upright image, or, where it ends in
    "_norm", in shares of its width and height.
    """

    of: str
    format: BoxFormat = "xyxy"

    kind: ClassVar[str] = "boxes"

    def __post_init__(self) -> None:
        _of("Boxes", self.of)
        if self.format not in get_args(BoxFormat):
            wanted = ", ".join(get_args(BoxFormat))
            raise ConfigError(f"Boxes: got format={self.format!r}, wanted one of {wanted}.")

    @property
    def is_normalised(self) -> bool:
        """Return True if the stored numbers are shares of the image's width and height."""
        return self.format.endswith("_norm")


@explain_arguments(ConfigError)
@dataclass(frozen=True, slots=True)
class Keypoints:
    """Points in an image, float32, (points, 2) a sample: x, y in pixels of the upright image. of:
    the image's field."""

    of: str

    kind: ClassVar[str] = "keypoints"

    def __post_init__(self) -> None:
        _of("Keypoints", self.of)


@explain_arguments(ConfigError)
@dataclass(frozen=True, slots=True)
class Tokens:
    """A sequence of integers whose length differs between samples. dtype: numpy's name."""

    dtype: str = "int64"

    kind: ClassVar[str] = "tokens"

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", _dtype("Tokens", self.dtype))
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
"""The types by the names that a manifest has for them."""


def is_encoded(type: FieldType) -> bool:
    """Whether samples are bytes that somebody has to decode, text included."""
    return isinstance(type, Image | Audio | Video | Text | Bytes | Mask)


def has_values(type: FieldType) -> bool:
    """Whether samples are values, which a table can hold: not what is decoded or kept as bytes."""
    return not isinstance(type, Image | Audio | Video | Mask | Bytes)


def to_json(type: FieldType) -> dict[str, Any]:
    """A type as a manifest has it."""
    values = {each.name: getattr(type, each.name) for each in fields(type)}
    return {"kind": type.kind, **{k: v for k, v in values.items() if v is not None}}


def from_json(value: Any) -> FieldType:
    """The type that a manifest names; it may come from anybody. Raises ValueError."""
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
    """Whether a field can have this name."""
    return isinstance(name, str) and bool(_NAME.fullmatch(name)) and _is_utf8(name)


def _is_utf8(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:  # half of a character
        return False
    return True


def check_field_name(name: object, *, what: str) -> str:
    """Returns a field's name, or raises ConfigError. what: the argument, for the message."""
    if not isinstance(name, str) or not is_field_name(name):
        raise ConfigError(
            f"{what}: got {name!r}, wanted a field's name: 1 to 128 characters without a slash."
        )
    if name.endswith(PRESENT):
        raise ConfigError(
            f'{what}: got {name!r}: names that end in "{PRESENT}" are given by Penstock. Choose '
            "another name."
        )
    return name


def number_name(fields: Container[str]) -> str:
    """The first name that stands for the sample's number. fields: of the dataset."""
    return next(name for name in (ID, SAMPLE_ID, NUMBER) if name not in fields)


def is_number(name: str, fields: Container[str]) -> bool:
    """Return True if a name stands for the sample's number. fields: of the dataset."""
    return name in (ID, SAMPLE_ID, NUMBER) and name not in fields


def _dtype(what: str, dtype: object) -> str:
    try:  # of None numpy makes float64
        name = "" if dtype is None else np.dtype(dtype).newbyteorder("=").name  # type: ignore[call-overload]
    except (TypeError, ValueError):
        name = ""
    if name not in DTYPES:
        raise ConfigError(
            f"{what}: got dtype={dtype!r}, wanted one of {', '.join(sorted(DTYPES))}."
        )
    return str(name)


def _shape(shape: object) -> tuple[int | None, ...]:
    def is_length(one: object) -> bool:
        return one is None or (type(one) is int and 0 <= one <= _MAX_LENGTH)

    if (
        not isinstance(shape, Sequence)
        or isinstance(shape, str)
        or len(shape) > _MAX_DIMENSIONS
        or not all(map(is_length, shape))
    ):
        raise ConfigError(f"Array: got shape={shape!r}, wanted a tuple of lengths, None for any.")
    return tuple(shape)


def _of(what: str, of: object) -> None:
    if not is_field_name(of):
        raise ConfigError(f"{what}: got of={of!r:.80}, wanted the name of a field.")


def _names(what: str, names: object) -> tuple[str, ...]:
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
