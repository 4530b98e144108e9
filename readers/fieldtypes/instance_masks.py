"""Instance masks: one segmentation for each box of an image, as polygons or run-length codes.

They stay in COCO's own form until the moves of their image are known, and are then drawn at the
size of the result (`mask_kernels`). So they are stored without loss, and a mask that a recipe crops
away or that `SanitizeBoxes` drops costs nothing.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

import numpy as np

from penstock.cache import ConfigError, DatasetError, MissingDependencyError
from penstock.readers.fieldtypes.cells import shorten
from penstock.readers.fieldtypes.columns import Column, DenseColumn, RaggedColumn
from penstock.readers.fieldtypes.field_type import FieldType, check_reference, frozen_type
from penstock.readers.fieldtypes.masks import nearest
from penstock.readers.types import MAX_PIXELS, Facts, Rejection, offsets_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from penstock.readers.fieldtypes.field_type import Moves, Size
    from penstock.readers.types import Bools, Encoded, Floats, Ints, Numbers


_POLYGON, _COUNTS, _TEXT = 0, 1, 2  # as in `mask_kernels`, which needs numba
_LEAST_NUMBERS = 6
_MOST = 2.0**26  # of a coordinate, in pixels, or of a run
TOLERANCE = 0.01  # as for boxes: normalised numbers are rounded
_WANTED = (
    "wanted a list with one COCO segmentation for each box: polygons, [[x1, y1, x2, y2, …], …],"
    ' or runs, {"size": [height, width], "counts": …}, or null'
)


def _compiled(module: str) -> Any:
    """Return a module of functions that numba compiles."""
    try:
        return import_module(f"{__package__}.{module}")
    except ImportError as error:
        raise MissingDependencyError(
            f"Instance masks are drawn by functions that numba compiles, and it can't be imported "
            f"({error}): pip install 'penstock[coco]'."
        ) from error


@dataclass(frozen=True, slots=True, eq=False)
class Segmentations(Sequence[Any]):
    """The segmentations of a sample, one for each box: a sequence of COCO's values.

    numbers: coordinates of polygons and lengths of runs, end to end, float64. texts: compressed
    lengths of runs, end to end, ASCII, uint8. parts: int64, shape (parts, 4): the box of each
    polygon or list of runs, ascending; its begin and end in numbers or in texts; its kind. boxes:
    their number. size: height and width of the image, which runs record; None without any.

    An item is a list of polygons, a dict of runs, or None.
    """

    numbers: Floats
    texts: NDArray[np.uint8]
    parts: Ints
    boxes: int
    size: tuple[int, int] | None = None

    @classmethod
    def of(cls, values: Iterable[Any], *, max_pixels: int = MAX_PIXELS) -> Segmentations:
        """Convert COCO's values. Raises ValueError, whose message names the box, for anything
        else. max_pixels: of a mask."""
        numbers, texts, parts = list[float](), list[bytes](), list[tuple[int, int, int, int]]()
        sizes: dict[tuple[int, int], None] = {}
        length = box = 0
        for box, value in enumerate(values, 1):
            if isinstance(value, list):
                if not value:
                    raise ValueError(f"box {box - 1} has no polygon; null stands for no mask")
                for polygon in value:
                    begin = len(numbers)
                    numbers += _polygon(polygon, box - 1)
                    parts.append((box - 1, begin, len(numbers), _POLYGON))
            elif isinstance(value, Mapping):
                size, counts = _runs(value, box - 1, max_pixels)
                sizes[size] = None
                if isinstance(counts, bytes):
                    texts.append(counts)
                    parts.append((box - 1, length, length := length + len(counts), _TEXT))
                else:
                    begin = len(numbers)
                    numbers += counts
                    parts.append((box - 1, begin, len(numbers), _COUNTS))
            elif value is not None:
                raise ValueError(f"{shorten(value)} of box {box - 1} isn't a mask: {_WANTED}")
        if not {*map(type, numbers)} <= {int, float}:
            wrong = next(each for each in numbers if type(each) not in (int, float))
            raise ValueError(f"{shorten(wrong)} isn't a number: {_WANTED}")
        if len(sizes) > 1:
            shown = " and ".join(f"{h} x {w}" for h, w in [*sizes][:2])
            raise ValueError(f"runs of several sizes ({shown}, height x width) for one image")
        try:
            flat = np.array(numbers, np.float64)
        except OverflowError:
            raise ValueError(f"a number of more than {_MOST:.0f}: {_WANTED}") from None
        found = cls(
            flat,
            np.frombuffer(bytearray().join(texts), np.uint8),  # writable, as numba expects
            np.array(parts, np.int64).reshape(-1, 4),
            box,
            next(iter(sizes), None),
        )
        found._check()
        return found

    def _check(self) -> None:
        """Raise ValueError for coordinates that aren't finite, and for runs that don't fill the
        mask."""
        usual = np.abs(self.numbers) <= _MOST
        if not usual.all():
            place = int(usual.argmin())
            kinds, begins, ends = self.parts[:, 3], self.parts[:, 1], self.parts[:, 2]
            at = (kinds != _TEXT) & (begins <= place) & (place < ends)
            raise ValueError(
                f"box {int(self.parts[at][0, 0])} has the number {self.numbers[place]:g}, wanted "
                f"finite pixels of at most {_MOST:.0f}"
            )
        if self.size is None:
            return
        height, width = self.size
        row = _compiled("mask_kernels").first_wrong(
            self.numbers, self.texts, self.parts, height * width
        )
        if row >= 0:
            raise ValueError(
                f"the runs of box {int(self.parts[row, 0])} don't sum to their size, {height} x "
                f"{width} (height x width), or can't be read"
            )

    def __len__(self) -> int:
        return self.boxes

    def __getitem__(self, index: int | slice | Bools) -> Any:
        """Return the segmentation of one box, or a list of several, as COCO writes them; or, for
        bools of shape (boxes,), the segmentations of some boxes."""
        if isinstance(index, np.ndarray):
            parts = self.parts[index[self.parts[:, 0]]]
            parts[:, 0] = (np.cumsum(index) - 1)[parts[:, 0]]
            return replace(self, parts=parts, boxes=int(index.sum()))
        if isinstance(index, slice):
            return [self[each] for each in range(self.boxes)[index]]
        box = range(self.boxes)[index]
        begin, stop = np.searchsorted(self.parts[:, 0], [box, box + 1]).tolist()
        found = [
            self.texts[a:b].tobytes().decode("ascii") if kind == _TEXT else self._numbers(a, b)
            for _, a, b, kind in self.parts[begin:stop].tolist()
        ]
        if not found:
            return None
        if self.parts[begin, 3] == _POLYGON:
            return found
        return {"size": [*(self.size or ())], "counts": found[0]}

    def _numbers(self, begin: int, end: int) -> list[float]:
        numbers = self.numbers[begin:end].tolist()
        return [int(each) if each.is_integer() else each for each in numbers]

    def in_pixels(self, size: Size) -> Self:
        """Return polygons in fractions of the image's height and width as polygons in pixels."""
        numbers = (self.numbers.reshape(-1, 2) * size[::-1]).reshape(-1)
        return replace(self, numbers=numbers)

    def draw(self, size: Size, rows: Ints, columns: Ints, out: Numbers) -> None:
        """Draw the masks where a move shows them, into zeros.

        size: height and width of the image. rows, columns: of the image for each row and column of
        the result, int64, negative outside, ascending or descending. out: bit masks, uint8, (boxes,
        rows, columns); or a map of numbers, int32, (1, rows, columns): the place of the box + 1, of
        the last one where several overlap. Raises DatasetError for runs of another size.
        """
        if self.size not in (None, size):
            raise DatasetError(f"Instance masks: {misfit(self.size, size)}. Index the data again.")
        is_bits = out.dtype == np.uint8
        bits = out if is_bits else np.zeros((0, 0, 0), np.uint8)
        ids = np.zeros((0, 0), np.int32) if is_bits else out[0]
        maps = np.ascontiguousarray(rows), np.ascontiguousarray(columns)
        _compiled("mask_kernels").draw(
            self.numbers, self.texts, self.parts, *size, *maps, bits, ids
        )


_NONE = Segmentations(np.zeros(0), np.zeros(0, np.uint8), np.zeros((0, 4), np.int64), 0)


def misfit(own: Size, size: Size) -> str:
    """Return the reason against masks of another size, (height, width), than their image."""
    shown = " and its image ".join(f"{width} wide and {rows} high" for rows, width in (own, size))
    return f"it is {shown}"


def _polygon(value: Any, box: int) -> list[float]:
    if not isinstance(value, list) or len(value) < _LEAST_NUMBERS or len(value) % 2:
        raise ValueError(
            f"{shorten(value)} of box {box} isn't a polygon: wanted x1, y1, x2, y2, x3, y3, …, at "
            "least three points"
        )
    return value


def _runs(
    value: Mapping[Any, Any], box: int, max_pixels: int
) -> tuple[tuple[int, int], bytes | list[int]]:
    """Return the size and the lengths of runs, compressed or not."""
    size, counts = value.get("size"), value.get("counts")
    is_size = isinstance(size, list | tuple) and len(size) == 2
    if not is_size or not all(_is_whole(each) and each > 0 for each in size or ()):
        raise ValueError(f"the runs of box {box} have the size {shorten(size)}: {_WANTED}")
    height, width = map(int, size)  # type: ignore[arg-type]
    if height * width > max_pixels:
        raise ValueError(
            f"the runs of box {box} have the size {height} x {width}: wanted at most "
            f"{max_pixels:,} pixels (for larger masks pass max_pixels=)"
        )
    if isinstance(counts, str):
        counts = counts.encode("ascii", "replace")
    is_list = isinstance(counts, list) and all(map(_is_whole, counts))
    if not isinstance(counts, bytes) and not is_list:
        raise ValueError(f"the runs of box {box} are {shorten(counts)}: {_WANTED}")
    return (height, width), counts  # type: ignore[return-value]


def _is_whole(value: Any) -> bool:
    """Return True for a number of pixels; some writers add a decimal."""
    return type(value) in (int, float) and value >= 0 and value % 1 == 0


def _lengths(bits: NDArray[np.uint8]) -> list[int]:
    """Return the lengths of the runs of a bit mask, column by column."""
    flat = bits.T.reshape(-1)
    edges = np.flatnonzero(np.diff(flat, prepend=np.uint8(0)))
    lengths: list[int] = np.diff(edges, prepend=0, append=len(flat)).tolist()
    return lengths


@frozen_type
class InstanceMasks(FieldType):
    """A mask for each box of an image: polygons or run-length codes, as COCO's annotations have
    them.

    of: the field of the boxes. format: of the polygons in storage, in pixels of the upright image,
    or "norm", as fractions of its width and height. A sample is a JSON list with the segmentation
    of each box, in their order. In a batch it is one bit mask per box, uint8, (boxes, height,
    width), which follows the image of the boxes, and is dropped with its box. `InstanceIds`
    delivers one map of numbers instead.
    """

    of: str
    format: Literal["pixels", "norm"] = "pixels"

    kind: ClassVar[str] = "instance_masks"
    refers_to: ClassVar[str | None] = "boxes"
    is_encoded: ClassVar[bool] = True
    is_slow: ClassVar[bool] = True
    missing: ClassVar[Any] = _NONE
    codec: ClassVar[str] = "utf-8"
    is_ragged: ClassVar[bool] = True
    column_kinds: ClassVar[Set[str]] = frozenset({"text", "binary", "nested"})
    needs_size: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_reference("InstanceMasks", self.of)
        if self.format not in ("pixels", "norm"):
            raise ConfigError(
                f'InstanceMasks: got format={self.format!r}, wanted "pixels" or "norm".'
            )

    @property
    def numbered(self) -> FieldType:
        """The type of the same masks, delivered as one map of numbers."""
        return _InstanceIds(self.of, self.format)

    def check(self, data: Encoded, *, field: str = "", max_pixels: int = MAX_PIXELS) -> Facts:
        """Check all segmentations, and return the facts: the number of boxes, and the height and
        width of the image if runs record them, else 0."""
        found = self.decode(data, max_pixels=max_pixels)
        return Facts.of(data, shape=(len(found), *(found.size or (0, 0))), codec=self.codec)

    @staticmethod
    def encode(values: Any) -> bytes:
        """Encode COCO's segmentations, a list of one for each box."""
        return json.dumps(values, separators=(",", ":")).encode("ascii")

    def decode(self, payload: Encoded, *, max_pixels: int = MAX_PIXELS) -> Segmentations:
        """Decode the segmentations of a sample. Raises ValueError if they are wrong."""
        try:
            values = json.loads(payload.tobytes())
        except (ValueError, RecursionError) as error:
            raise ValueError(f"isn't JSON ({str(error)[:80]}): {_WANTED}") from None
        if not isinstance(values, list):
            raise ValueError(f"{shorten(values)} isn't a list: {_WANTED}")
        return self._checked(Segmentations.of(values, max_pixels=max_pixels))

    def _checked(self, found: Segmentations) -> Segmentations:
        """Return segmentations of this format. Raises ValueError for others."""
        if self.format == "norm":
            numbers = found.numbers
            if found.size is not None:
                raise ValueError('run-length codes and format="norm": wanted only polygons')
            if len(numbers) and not -TOLERANCE <= numbers.min() <= numbers.max() <= 1 + TOLERANCE:
                raise ValueError(
                    f"coordinates {numbers.min():g} to {numbers.max():g} aren't normalised: wanted "
                    'fractions of the image, 0 to 1, or format="pixels"'
                )
        return found

    def sides_of(self, shape: tuple[int, ...]) -> Size | None:
        return (shape[1], shape[2]) if shape[1] else None

    def rows_of(self, payload: Encoded) -> int:
        """Return the number of boxes that a sample has masks for."""
        return len(self.decode(payload))

    def check_values(self, values: Numbers, size: Any = None) -> Rejection | None:
        """Return why the bytes of a sample aren't masks of an image of this size, or None. size:
        height and width; None if they are unknown."""
        try:
            own = self.decode(values).size
        except ValueError as error:
            return Rejection(str(error))
        if size is None or own is None or own == tuple(size):
            return None
        return Rejection(misfit(own, tuple(size)))

    def resized(self, value: Encoded, before: Size, after: Size) -> Encoded:
        """Scale polygons, and draw runs by their nearest pixels."""
        if self.format == "norm":
            return value
        found = self.decode(value)
        by = np.array([after[1] / before[1], after[0] / before[0]])
        bits = np.zeros((len(found), *after), np.uint8)
        if found.size is not None:
            rows, columns = (nearest(*sides) for sides in zip(before, after, strict=True))
            found.draw(before, rows, columns, bits)
        values = [
            [(np.reshape(polygon, (-1, 2)) * by).reshape(-1).tolist() for polygon in each]
            if isinstance(each, list)
            else each and {"size": [*after], "counts": _lengths(bits[box])}
            for box, each in enumerate(found[:])
        ]
        return np.frombuffer(self.encode(values), np.uint8)

    def decoder(self, *, max_pixels: int = MAX_PIXELS) -> Callable[[Encoded], Any]:
        return partial(self.decode, max_pixels=max_pixels)

    def cell(self, value: Any, *, is_text: bool) -> bytes:
        """Convert a list, or a text with one as JSON."""
        try:
            data = value.encode() if isinstance(value, str) else self.encode(value)
        except (TypeError, UnicodeEncodeError):
            raise ValueError(f"{shorten(value)} isn't a list of segmentations: {_WANTED}") from None
        self.decode(np.frombuffer(data, np.uint8))
        return data

    def returned(self, value: Any) -> Segmentations:
        if isinstance(value, Segmentations):
            return value
        try:
            return self._checked(Segmentations.of(value))
        except (TypeError, ValueError) as error:
            raise ValueError(str(error), "a list with a COCO segmentation for each box") from None

    def follow(
        self, column: Column, moves: Moves | None, *, size: Size | None
    ) -> DenseColumn | RaggedColumn:
        """Return the masks of each sample as they lie in the moved image: bit masks, uint8, (boxes,
        height, width), 0 outside of the image. They are flat, with shapes, if images differ in
        size."""
        masks: list[Any] = [column.sample(row) for row in range(len(column))]
        rows: Any
        columns: Any
        sizes: list[Any]
        if moves is None:
            assert size is not None, self
            sizes = [size] * len(masks)
            rows, columns = (np.arange(side)[None].repeat(len(masks), axis=0) for side in size)
        else:
            sizes = list(zip(*(side.tolist() for side in moves.size), strict=True))
            rows, columns = moves.index_maps()
        shapes = [
            (*self._leading(mask), len(rows[row]), len(columns[row]))
            for row, mask in enumerate(masks)
        ]
        offsets = offsets_of([math.prod(shape) for shape in shapes])
        values = np.zeros(int(offsets[-1]), self._dtype)
        for row, mask in enumerate(masks):
            out = values[offsets[row] : offsets[row + 1]].reshape(-1, *shapes[row][-2:])
            if len(mask) and out.size:
                mask = mask.in_pixels(sizes[row]) if self.format == "norm" else mask
                mask.draw(sizes[row], rows[row], columns[row], out)
                if moves is not None:
                    moves.warp(row, out)
        if not isinstance(rows, np.ndarray):
            return RaggedColumn(values, offsets, np.array(shapes, np.int64))
        return self._of_one_size(values.reshape(-1, rows.shape[1], columns.shape[1]), masks)

    _dtype: ClassVar[Any] = np.uint8

    def _leading(self, masks: Segmentations) -> tuple[int, ...]:
        """Return the shape of a sample before its height and width."""
        return (len(masks),)

    def _of_one_size(
        self, values: Numbers, masks: Sequence[Segmentations]
    ) -> DenseColumn | RaggedColumn:
        """Return the column of samples of one height and width, from what they hold end to end."""
        return RaggedColumn(values, offsets_of([len(each) for each in masks]))


class _InstanceIds(InstanceMasks):
    """Instance masks that are delivered as one map of numbers: int32, (height, width) a sample. A
    pixel is 0 without an instance, else 1 + the row of its box: the last one if several overlap."""

    __slots__ = ()

    _dtype: ClassVar[Any] = np.int32
    is_ragged: ClassVar[bool] = False

    def _leading(self, masks: Segmentations) -> tuple[int, ...]:
        return ()

    def _of_one_size(
        self, values: Numbers, masks: Sequence[Segmentations]
    ) -> DenseColumn | RaggedColumn:
        return DenseColumn(values)
