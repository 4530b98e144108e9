"""Boxes and points in images: convert boxes from their storage formats, and check both.

All arithmetic is float32, as are the delivered boxes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args

import numpy as np

from penstock.cache import ConfigError, DatasetError
from penstock.readers.fieldtypes.array_forms import ArrayForm, check_array
from penstock.readers.fieldtypes.columns import ArrayColumn, Column, DenseColumn, RaggedColumn
from penstock.readers.fieldtypes.field_type import FieldType, check_reference, frozen_type
from penstock.readers.types import CODECS, MAX_PIXELS, Rejection, accepted

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from penstock.readers.fieldtypes.field_type import FieldTypes, Moves, Size, Sizes
    from penstock.readers.types import Encoded, Facts, Ints, Numbers

BoxFormat = Literal["xyxy", "xywh", "cxcywh", "xyxy_norm", "xywh_norm", "cxcywh_norm"]

# Normalised numbers may exceed 0..1 by this much, as annotations are rounded.
_TOLERANCE = 0.01
_MOST_POINTS = 4096
_CORNERS = np.array([1, 0, 1, 0])  # width, height, width, height of (height, width)


class _Points(FieldType):
    """Rows of `_width` numbers that are places in an image."""

    __slots__ = ()

    refers_to: ClassVar[str | None] = "image"
    _width: ClassVar[int]
    _noun: ClassVar[str] = "point"

    of: str

    def __post_init__(self) -> None:
        check_reference(type(self).__name__, self.of)

    @property
    def form(self) -> ArrayForm:
        return ArrayForm.of("float32", (None, self._width))

    def resized(self, value: Numbers, before: Size, after: Size) -> Numbers:
        return value if self.needs_size else scaled(value, before, after)

    def _rows(self, column: Column) -> tuple[Numbers, Ints, Ints]:
        """Return the rows of all samples, shape (k, width), the sample of each, int64, (k,), and
        the offsets of the samples, int64, (n + 1,)."""
        assert isinstance(column, ArrayColumn), column
        values = column.values.reshape(-1, self._width)
        if isinstance(column, DenseColumn):
            offsets = np.arange(len(column) + 1) * (column.values[:1].size // self._width)
        else:
            offsets = column.offsets // (self._width if column.values.ndim == 1 else 1)
        return values, np.repeat(np.arange(len(column)), np.diff(offsets)), offsets

    def check(self, data: Encoded, *, field: str = "", max_pixels: int = MAX_PIXELS) -> Facts:
        """Check the header of an .npy file; `check_values` checks the numbers."""
        facts = check_array(data, (None, None), field=field)
        accepted(self._check_form(CODECS[facts.codec].dtype, facts.shape))
        return replace(facts, shape=(*facts.shape, self._width)[:2])

    def _check_form(self, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Rejection | None:
        """Return why an array isn't one row of numbers per place, or None. numpy has the shape (0,)
        for an empty list."""
        if dtype.kind in "iuf" and (shape == (0,) or (len(shape) == 2 and shape[1] == self._width)):
            return None
        return Rejection(
            f"wanted numbers of shape (k, {self._width}), one row for each {self._noun}, got "
            f"{dtype.name} of shape {shape}"
        )

    def check_values(self, values: Numbers, size: Sizes | None = None) -> Rejection | None:
        """Return why a sample's rows are invalid, or None. size: also of each row's own image,
        shape (k, 2); 0 x 0 if unknown."""
        if (refusal := self._check_form(values.dtype, values.shape)) is not None:
            return refusal
        stored = np.asarray(values).reshape(-1, self._width)
        for wrong, what, more in self._faults(stored, size) if len(stored) else ():
            if wrong.any():
                row = int(wrong.argmax())
                return Rejection(f"{self._noun} {row} {what}: {_shown(stored[row])}{more}")
        return None

    def _faults(self, stored: Numbers, size: Any) -> Iterator[tuple[Any, str, str]]:
        """Yield which of the rows have a fault, bool, (k,), what it is, and what is wanted. Points
        outside the image are normal: hidden ones are often written as 0, 0 or -1, -1."""
        with np.errstate(over="ignore"):
            places = stored.astype(np.float32)
        yield ~np.isfinite(places).all(axis=1), "isn't finite", ""


@frozen_type
class Boxes(_Points):
    """Boxes in an image, float32, (boxes, 4) per sample, delivered as x1, y1, x2, y2 in pixels.

    ```python
    from penstock import Boxes, Dataset

    street = Dataset(
        "street.tar", fields=("image", "boxes"), schema={"boxes": Boxes(of="image", format="xywh")}
    )
    print(street[0]["boxes"])  # tensor([[30., 20., 70., 60.]])
    ```

    of: the image's field. format: in storage, in pixels of the upright image, or, if it ends in
    "_norm", as fractions of the image's width and height.
    """

    of: str
    format: BoxFormat = "xyxy"

    kind: ClassVar[str] = "boxes"
    is_boxes: ClassVar[bool] = True
    _width: ClassVar[int] = 4
    _noun: ClassVar[str] = "box"

    def __post_init__(self) -> None:
        _Points.__post_init__(self)
        if self.format not in get_args(BoxFormat):
            wanted = ", ".join(get_args(BoxFormat))
            raise ConfigError(f"Boxes: got format={self.format!r}, wanted one of {wanted}.")

    @property
    def is_normalised(self) -> bool:
        """Return True if the stored numbers are fractions of the image's width and height."""
        return self.format.endswith("_norm")

    @property
    def needs_size(self) -> bool:
        return self.is_normalised

    def follow(self, column: Column, moves: Moves | None, *, size: Size | None) -> RaggedColumn:
        """Return boxes as x1, y1, x2, y2 in pixels, float32."""
        _, _, offsets = self._rows(column)
        boxes, owner = self.in_pixels(column, size if moves is None else moves.size)
        if moves is not None:
            boxes = moves.move_boxes(boxes, owner)
        return RaggedColumn(boxes, offsets)

    def in_pixels(self, column: Column, sizes: Any) -> tuple[NDArray[np.float32], Ints]:
        """Return stored boxes as x1, y1, x2, y2 in pixels, (k, 4), and the row of each one's image.
        sizes: heights and widths of the images, (2, n), or of all, (2,), if they are needed."""
        stored, owner, _ = self._rows(column)
        boxes = to_xyxy(stored, self.format)
        if self.is_normalised:
            sides = np.array(sizes, np.float32).T[..., _CORNERS]
            boxes *= sides if sides.ndim == 1 else sides[owner]
        return boxes, owner

    def _faults(self, stored: Numbers, size: Any) -> Iterator[tuple[Any, str, str]]:
        """Yield what is wrong with boxes: not finite, not normalised, inverted, or wholly outside
        an image of known size. A box that lies partly outside is normal."""
        format = self.format
        with np.errstate(over="ignore", invalid="ignore"):  # the results aren't finite
            corners = to_xyxy(stored, format)
        yield ~np.isfinite(corners).all(axis=1), "isn't finite", ""
        if self.is_normalised:
            beyond = (stored < -_TOLERANCE) | (stored > 1 + _TOLERANCE)
            wanted = f"; {format} wants fractions of the image, 0 to 1"
            yield beyond.any(axis=1), "isn't normalised", wanted
        # Checked as stored: x + w may round to x.
        is_xyxy = format.startswith("xyxy")
        sides = corners[:, 2:] - corners[:, :2] if is_xyxy else stored[:, 2:]
        wanted = "x1 <= x2 and y1 <= y2" if is_xyxy else "a width and height of 0 or more"
        yield (sides < 0).any(axis=1), "is inverted", f"; {format} wants {wanted}"
        if size is not None:
            sizes = np.broadcast_to(np.asarray(size, np.int32), (len(corners), 2))
            limits = np.ones_like(sizes) if self.is_normalised else sizes[:, ::-1]
            far = ((corners[:, 2:] < 0) | (corners[:, :2] > limits)).any(axis=1) & sizes.all(axis=1)
            height, width = sizes[int(far.argmax())].tolist()
            more = f" ({format}), but the image is {width} wide and {height} high"
            yield far, "lies outside its image", more


@frozen_type
class Keypoints(_Points):
    """Points in an image, float32, (points, 2) per sample: x, y in pixels of the upright image. of:
    the image's field."""

    of: str

    kind: ClassVar[str] = "keypoints"
    _width: ClassVar[int] = 2

    def follow(self, column: Column, moves: Moves | None, *, size: Size | None) -> ArrayColumn:
        """Return points as x, y in pixels, float32."""
        stored, owner, offsets = self._rows(column)
        points = stored.astype(np.float32) if moves is None else moves.move_points(stored, owner)
        if isinstance(column, DenseColumn):
            return DenseColumn(points.reshape(column.values.shape))
        return RaggedColumn(points, offsets)


@frozen_type
class InstanceKeypoints(FieldType):
    """The keypoints of each box, float32, (boxes, points, 3) per sample: x and y in pixels, and the
    visibility: 0 not labelled, 1 hidden, 2 visible, as in COCO.

    They follow the image of their boxes, and are dropped together with their box. of: the field of
    the boxes. points: of each box. names: of the points, or none. mirrored: for each point, the
    number of the point that it becomes if the image is mirrored, such as the right eye for the left
    one; empty if none changes. format: of x and y in storage, in pixels of the upright image, or as
    fractions of its width and height ("xy_norm").
    """

    of: str
    points: int
    names: tuple[str, ...] = ()
    mirrored: tuple[int, ...] = ()
    format: Literal["xy", "xy_norm"] = "xy"

    kind: ClassVar[str] = "instance_keypoints"
    is_target: ClassVar[bool] = True
    refers_to: ClassVar[str | None] = "boxes"
    in_files: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_reference("InstanceKeypoints", self.of)
        points: Any = self.points
        if type(points) is not int or not 1 <= points <= _MOST_POINTS:
            raise ConfigError(
                f"InstanceKeypoints: got points={points!r}, wanted 1 to {_MOST_POINTS:,}."
            )
        for name in ("names", "mirrored"):
            given: Any = getattr(self, name)
            is_list = isinstance(given, Sequence) and not isinstance(given, str)
            if not is_list or len(given) not in (0, points):
                raise ConfigError(
                    f"InstanceKeypoints: got {name}={str(given)[:80]}, wanted one for each of the "
                    f"{points} points."
                )
            object.__setattr__(self, name, tuple(given))
        if self.mirrored and sorted(map(str, self.mirrored)) != sorted(map(str, range(points))):
            raise ConfigError(
                f"InstanceKeypoints: got mirrored={self.mirrored}, wanted each number from 0 to "
                f"{points - 1} once."
            )
        if not all(isinstance(name, str) for name in self.names):
            raise ConfigError(f"InstanceKeypoints: got names={self.names!r:.80}, wanted texts.")
        if self.format not in ("xy", "xy_norm"):
            raise ConfigError(
                f'InstanceKeypoints: got format={self.format!r}, wanted "xy" or "xy_norm".'
            )

    @property
    def form(self) -> ArrayForm:
        return ArrayForm.of("float32", (None, self.points, 3))

    @property
    def needs_size(self) -> bool:
        return self.format == "xy_norm"

    def check_values(self, values: Numbers, size: Sizes | None = None) -> Rejection | None:
        """Return why the numbers aren't keypoints, or None. Points outside the image are normal."""
        if np.isfinite(values).all():
            return None
        row = int((~np.isfinite(values)).reshape(len(values), -1).any(axis=1).argmax())
        return Rejection(f"box {row} has a keypoint that isn't finite")

    def resized(self, value: Numbers, before: Size, after: Size) -> Numbers:
        if self.needs_size:
            return value
        by = after[1] / before[1], after[0] / before[0], 1
        found: NDArray[np.float32] = (value * np.array(by)).astype(np.float32)
        return found

    def follow(self, column: Column, moves: Moves | None, *, size: Size | None) -> RaggedColumn:
        """Return the keypoints as x, y in pixels and the visibility, float32."""
        assert isinstance(column, ArrayColumn), column
        offsets = column.offsets if isinstance(column, RaggedColumn) else np.arange(len(column) + 1)
        found = np.array(column.values, np.float32).reshape(-1, self.points, 3)
        owner = np.repeat(np.arange(len(column)), np.diff(offsets))
        places = found[..., :2]
        if self.needs_size:
            sides = np.array(size if moves is None else moves.size, np.float32).T[..., ::-1]
            places *= sides if moves is None else sides[owner, None]
        if moves is None:
            return RaggedColumn(found, offsets)
        every = np.repeat(owner, self.points)
        places[:] = moves.move_points(places.reshape(-1, 2), every).reshape(places.shape)
        if self.mirrored and (mirror := moves.mirrored[owner]).any():
            found[mirror] = found[mirror][:, self.mirrored]
        return RaggedColumn(found, offsets)


@frozen_type
class ImageSize(FieldType):
    """The height and width of an image in the dataset from which it comes, upright, int64, (2,).
    Neither operations on the image nor packing change it. of: the image's field."""

    of: str

    kind: ClassVar[str] = "image_size"
    refers_to: ClassVar[str | None] = "image"
    is_measured: ClassVar[bool] = True
    in_files: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_reference("ImageSize", self.of)

    @property
    def form(self) -> ArrayForm:
        return ArrayForm.of("int64", (2,))

    def resized(self, value: Numbers, before: Size, after: Size) -> Numbers:
        return value

    def follow(self, column: Column, moves: Moves | None, *, size: Size | None) -> ArrayColumn:
        """Return the sizes unchanged."""
        assert isinstance(column, ArrayColumn), column
        return column


def scaled(places: Numbers, before: Size, after: Size) -> NDArray[np.float32]:
    """Scale boxes (in any form in pixels), shape (k, 4), or points, (..., 2), to an image of
    another size. A point at (-1, -1) marks an invisible point and isn't scaled."""
    by = np.array([after[1] / before[1], after[0] / before[0]])
    found = places.astype(np.float64) * np.tile(by, places.shape[-1] // 2)
    if places.shape[-1] == 2:
        found[(places == -1).all(axis=-1)] = -1
    numbers: NDArray[np.float32] = found.astype(np.float32)
    return numbers


def to_xyxy(boxes: Numbers, format: BoxFormat) -> NDArray[np.float32]:
    """Convert boxes to x1, y1, x2, y2: float32, shape (k, 4), a copy, in the unit of the format.
    boxes: shape (k, 4)."""
    found = np.array(boxes, np.float32).reshape(-1, 4)
    form = format.removesuffix("_norm")
    if form == "xywh":
        found[:, 2:] += found[:, :2]
    elif form == "cxcywh":
        half = found[:, 2:] / 2
        found[:, 2:] = found[:, :2] + half
        found[:, :2] -= half
    return found


class BoxUnits:
    """Detects boxes whose unit isn't that of the schema.

    Pixel boxes that all lie within the first pixel, with fractions, are normalised, and normalised
    boxes that all exceed 0..1 are in pixels. One box of the right unit settles that the format is
    right; empty boxes and integers from 0 to 1 prove nothing. enough: the number of boxes of the
    wrong unit that are an error if none is of the right one.
    """

    def __init__(self, *, enough: int = 8) -> None:
        self._enough = enough
        self._wrong: dict[str, int] = {}
        self._settled: set[str] = set()

    def add(self, name: str, type: FieldType, boxes: Numbers) -> None:
        """Add boxes of a field; fields of other types have no unit. Raises DatasetError once enough
        were added and all have the wrong unit.

        boxes: as stored, of any shape that holds four numbers each.
        """
        if name in self._settled or not isinstance(type, Boxes) or not len(boxes):
            return
        shown = stored = np.asarray(boxes).reshape(-1, 4)
        if not type.is_normalised:
            corners = to_xyxy(stored, type.format)
            shown = corners[(corners[:, 2:] > corners[:, :2]).all(axis=1)]
        exceeds = ((shown < -_TOLERANCE) | (shown > 1 + _TOLERANCE)).any(axis=1)
        right, wrong = exceeds, ~exceeds & (shown != np.rint(shown)).any(axis=1)
        if type.is_normalised:
            right, wrong = ~exceeds & (stored > 0).any(axis=1), exceeds
        seen = self._wrong[name] = self._wrong.get(name, 0) + int(wrong.sum())
        if right.any():
            self._settled.add(name)
        elif seen >= self._enough:
            plain = type.format.removesuffix("_norm")
            other = plain if type.is_normalised else f"{plain}_norm"
            raise DatasetError(
                f'"{name}": the first {seen} boxes, such as {_shown(shown[int(wrong.argmax())])}, '
                f"don't have the unit of format={type.format!r}. Pass "
                f'schema={{"{name}": Boxes(of="{type.of}", format="{other}")}}.'
            )


def _shown(row: Numbers) -> str:
    return f"({', '.join(f'{value:.6g}' for value in row)})"


_LAST_WORDS = frozenset(
    ("box", "boxes", "bbox", "bboxes", "xyxy", "xywh", "cxcywh", "keypoints", "kpts", "landmarks")
)


def untyped_places(types: FieldTypes) -> list[str]:
    """Return the fields whose names suggest boxes or points but whose types don't, so that they
    don't follow their image through a recipe."""
    return [
        name
        for name, type in types.items()
        if type.reference is None
        and (type.form is not None or type.in_tables or not type.is_settled)
        and re.split(r"[._]", name.lower())[-1] in _LAST_WORDS
    ]
