"""Define the operations on fields, which need no image.

Map calls a user's function on the stored values, before anything is decoded or resized. So it must
precede all other operations: after a crop it would seem to get the crop. Pad turns fields whose
samples differ in length into one dense tensor. PackTokens joins them to sequences of one length,
and Unpack cuts packed sequences into their documents. SanitizeBoxes drops boxes of which a recipe
leaves too little.

A job on arrays or tokens loads this module and none of the operations on images.
"""

from __future__ import annotations

import contextlib
import inspect
import math
from abc import ABCMeta, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from penstock.augment import argument_checks as arg
from penstock.augment.argument_checks import argument
from penstock.augment.operation import FieldOperation, Operation, Stage, operation
from penstock.cache import ConfigError, RecipeError
from penstock.readers.fieldtypes import (
    PRESENT,
    DenseColumn,
    FieldType,
    FieldTypes,
    InstanceMasks,
    RaggedColumn,
    Schema,
    Value,
    is_number,
    number_name,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from penstock.readers import Bools, Ints, Numbers
    from penstock.readers.fieldtypes import SampleBatch

    Names = Callable[[list[int]], list[str]]

MAX_PROCESSES = 1024


_map_returns = arg.optional(
    arg.expect_that(
        lambda value: isinstance(value, Mapping) and value,
        'the type of each field that fn returns, such as {"tokens": Tokens("int64")}',
    )
)


@operation
class Map(Operation):
    """Apply a function of yours to fields of each sample. It precedes all other operations.

    ```python
    from penstock import DataLoader, Dataset, Map

    captions = Dataset("street.tar", fields=("caption",))
    with DataLoader(captions, 4, augment=[Map(str.lower, fields="caption")]) as loader:
        (texts,) = next(iter(loader))
        print(texts[0])  # a street with 0 cars.
    ```

    fn: gets one positional argument for each field: a str for Text; bytes for Bytes and encoded
    images; a read-only array for Array, Mask, Boxes (as stored), Keypoints, MultiLabel and Tokens;
    a numpy scalar for Value, ClassLabel and "id". It returns the values that replace them: the
    value of one field, or a tuple in their order or a dict by name for several. With a parameter
    `rng` it also gets the sample's own numpy.random.Generator, keyed by (seed, epoch, sample id,
    place among the Maps); other random numbers differ after a resume. If it raises
    `BadSampleError`, the sample is a bad one; any other error stops the loader.
    fields: one name or several; None, for a Map in the list of one field: that field. A field that
    some samples lack is empty there; "<name>.present" tells which samples have it.
    returns: {name: type} of the returned fields, if fields are new or change their type; None:
    the types of `fields`. Other fields aren't changed; new ones come last in a batch.
    batched: fn gets all samples of a batch at once, as a list or a stacked array for each argument
    (`rngs`: a list), and returns as many. It must treat each sample alone, or resuming isn't exact.
    processes: number of this loader's processes that call fn, which must be picklable; 0: the
    reading threads call it.

    Raises RecipeError for invalid arguments.
    """

    fn: Callable[..., Any] = argument(arg.function)
    fields: str | Sequence[str] | None = argument(arg.field_names, default=None)
    _: KW_ONLY
    returns: FieldTypes | None = argument(_map_returns, default=None, hash=False)
    batched: bool = argument(arg.boolean, default=False)
    processes: int = argument(arg.whole_number(0, MAX_PROCESSES), default=0)

    stage = Stage.MAP

    @property
    def name(self) -> str:
        """The name of the operation in messages, with that of its function."""
        return f"Map({getattr(self.fn, '__name__', type(self.fn).__name__)})"

    @property
    def takes_rng(self) -> bool:
        """True if fn has a parameter for random numbers: `rng`, or `rngs` if it is batched."""
        try:
            parameters = inspect.signature(self.fn).parameters
        except (TypeError, ValueError):  # a compiled function has no signature
            return False
        found = parameters.get("rngs" if self.batched else "rng")
        return found is not None and found.kind in (found.KEYWORD_ONLY, found.POSITIONAL_OR_KEYWORD)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedMap:
    """A Map with the types of its fields.

    index: its place among a recipe's Maps, which keys its random numbers. takes: types of the
    fields that fn gets, in order. returns: types of the fields that it returns.
    """

    op: Map
    index: int
    takes: FieldTypes
    returns: FieldTypes


IsEarly = Callable[[Any, str | None], bool]
"""Returns True if an operation, in the list of a field, runs before samples are read."""


def split_maps(recipe: Any, is_early: IsEarly = lambda *_: False) -> tuple[tuple[Map, ...], Any]:
    """Return the Maps of a recipe with their fields, and the recipe without them.

    recipe: a list of operations, or a mapping from field to list. Lists that have only Maps are
    removed from the mapping; None remains if nothing is left. Any other value is returned as it is,
    since `check_recipes` checks it. is_early: True for operations that may precede Maps, and must
    precede a Map of the same fields. Raises RecipeError for a Map after another operation, or
    without fields.
    """
    lists = recipe if isinstance(recipe, Mapping) else {None: recipe}
    found: list[Map] = []
    rest: dict[Any, Any] = {}
    for of, operations in lists.items():
        ops = (operations,) if isinstance(operations, Map) else operations
        if not isinstance(ops, Sequence) or not any(isinstance(each, Map) for each in ops):
            rest[of] = operations
            continue
        late = None  # an operation that no Map may follow
        maps: list[Map] = []
        for each in ops:
            if not isinstance(each, Map):
                if not is_early(each, of):
                    late = late or each
                elif clash := [op.name for op in maps if _share_fields(each, of, op)]:
                    raise RecipeError(
                        f"{each} comes after {clash[0]}, and arrays are cropped before they are "
                        "read. Put it in front of the Map, or crop the array in the Map's function."
                    )
            elif late is not None:
                raise RecipeError(
                    f"{each.name} comes after {late}: a Map works on stored values, before images "
                    "are decoded. Put it in front of all other operations. To change pixels, use "
                    "Apply, or change the batch in your own code."
                )
            else:
                maps.append(_with_fields(each, of))
        found += maps
        if others := [each for each in ops if not isinstance(each, Map)]:
            rest[of] = others
    return tuple(found), (rest or None) if isinstance(recipe, Mapping) else rest.get(None)


def _share_fields(crop: Any, of: str | None, op: Map) -> bool:
    """Return True if a crop in the list of a field (None: of all) and a Map have a common field."""
    mine = crop.fields or (of,)
    return None in mine or bool({*mine} & {*(op.fields or ()), *(op.returns or ())})


def _with_fields(op: Map, of: str | None) -> Map:
    names = op.fields or (() if of is None else (of,))
    if not names or of not in (None, *names):
        where = "" if of is None else f' in the list of "{of}"'
        raise RecipeError(
            f"{op.name}: got fields={op.fields!r}{where}, wanted those that its function gets, "
            'such as fields="caption". In the list of a field, leave them out or name it, too.'
        )
    return replace(op, fields=names)


def check_maps(maps: Sequence[Map], schema: Schema) -> tuple[tuple[PlacedMap, ...], Schema]:
    """Return the Maps of `split_maps` with the types of their fields, and the types of the samples
    after all of them.

    schema: types of the dataset's fields. Raises RecipeError for unknown fields and for types that
    a function can't return; ConfigError for masks or boxes of a field that is no longer an image.
    """
    placed: list[PlacedMap] = []
    for index, op in enumerate(maps):
        names = op.fields
        assert names is not None
        takes = {name: _type_of(name, op, schema) for name in names}
        returns = takes if op.returns is None else op.returns
        after = Schema({**schema, **returns})  # refuses what is no type
        for name, type in returns.items():
            _check_returned(op, name, type, schema)
        placed.append(PlacedMap(op=op, index=index, takes=takes, returns=returns))
        schema = after
    return tuple(placed), schema


def _type_of(name: str, op: Map, schema: Schema) -> FieldType:
    if is_number(name, schema):
        return Value("int64")
    if name.endswith(PRESENT) and name.removesuffix(PRESENT) in schema:
        return Value("bool")
    if name not in schema:
        raise RecipeError(
            f'{op.name}: got the unknown field "{name}", wanted one of '
            f"{', '.join([*schema, number_name(schema)])}."
        )
    return schema[name]


def _check_returned(op: Map, name: str, type: FieldType, schema: Schema) -> None:
    if is_number(name, schema) or name.endswith(PRESENT):
        why = "Penstock sets it"
    elif not type.can_return:
        why = "only stored bytes were checked when the dataset was indexed"
    elif not type.is_settled and not type.has_sides:
        why = "its dtype or shape isn't known (None stands for lengths that differ)"
    else:
        return
    raise RecipeError(
        f'{op.name} can\'t return "{name}" as {type}: {why}. Name another field or type in '
        f'returns=, such as {{"pixels": Array("uint8", (None, None, 3))}}.'
    )


MAX_PADDED_LENGTH = 2**31


class ColumnOperation(FieldOperation, metaclass=ABCMeta):
    """Base class of operations that change the form of fields' columns, on any thread.

    adds: fields that batches have because of it.
    """

    __slots__ = ()

    adds: ClassVar[tuple[str, ...]] = ()

    @property
    @abstractmethod
    def changes(self) -> tuple[str, ...]:
        """The fields whose columns it changes."""

    def fits_field(self, name: str, _type: FieldType) -> bool:
        """Return True for the list of one of its fields."""
        return name in self.changes

    @abstractmethod
    def check_types(self, selected: FieldTypes, /) -> None:
        """Raise RecipeError for fields of other types than it needs."""

    @abstractmethod
    def columns(
        self, content: SampleBatch, names: Names, /
    ) -> dict[str, DenseColumn | RaggedColumn]:
        """Return the changed and the added columns of a batch. names: returns names of samples by
        id."""


class OneColumnOperation(ColumnOperation):
    """Base class of operations that change the form of one field's column."""

    __slots__ = ()

    def columns(self, content: SampleBatch, names: Names) -> dict[str, DenseColumn | RaggedColumn]:
        """Return the changed column."""
        return {name: self.column(content, names) for name in self.changes}

    @abstractmethod
    def column(self, content: SampleBatch, names: Names, /) -> DenseColumn | RaggedColumn:
        """Return the changed column of a batch. names: returns names of samples by id."""


def _length(value: Any) -> int | None:
    return None if value is None else arg.whole(value, 1, MAX_PADDED_LENGTH)


_field_name = arg.expect_that(lambda value: isinstance(value, str) and value, "a field's name")
_padding_value = arg.expect_that(
    lambda value: isinstance(value, bool) or arg.is_finite_number(value), "a number"
)
_padded_lengths = arg.expect(
    lambda value: tuple(map(_length, arg.as_tuple(value))) or _length(value),
    "a length of 1 or more, None for the longest of each batch, or a tuple of these",
)


@operation
class Pad(OneColumnOperation):
    """Pad each image, or each sample of a field, at its end, so that a batch is one tensor.

    field: a field whose samples differ in length, such as boxes or tokens, or an image; None: all
    images. to: the first length of every padded sample, or its full shape as a tuple; None, also in
    a tuple: the longest of the batch. Of images it is the height and width, or the side of a
    square. A longer sample is an error that names it; nothing is cut off. to_multiple: in place of
    to, the longest of the batch, rounded up to a multiple, such as 32 pixels. value: the padding
    value, in units of the batch: after Normalize, 0 is the mean colour. mask_fill: the padding
    value of the masks of images.

    A field then has the shape (n, to, ...) in a batch, and images (n, channels, height, width).
    Images are padded last, at their right and lower edges; boxes and points stay where they are.
    Pad may be anywhere in the recipe of the loader or of the field.
    """

    field: str | None = argument(arg.optional(_field_name), default=None)
    _: KW_ONLY
    to: int | tuple[int | None, ...] | None = argument(_padded_lengths, default=None)
    to_multiple: int | None = argument(arg.optional(arg.whole_number(1, 65_535)), default=None)
    value: float = argument(_padding_value, default=0)
    mask_fill: int = 0

    def __post_init__(self) -> None:
        OneColumnOperation.__post_init__(self)
        if self.field is None and self.to is None and self.to_multiple is None:
            raise RecipeError(
                "Pad: got no field, to= or to_multiple=, wanted Pad(to_multiple=32) for images, or "
                'the field to pad, such as Pad("boxes").'
            )
        if self.to is not None and self.to_multiple is not None:
            raise RecipeError(
                f"Pad: got to={self.to} and to_multiple={self.to_multiple}, wanted one of them."
            )

    @property
    def changes(self) -> tuple[str, ...]:
        return () if self.field is None else (self.field,)

    def pads_image(self, name: str | None) -> bool:
        """Return True if it pads the images of this field."""
        return self.field in (None, name)

    def largest(self, sides: tuple[int, int]) -> tuple[int, int]:
        """Return the height and width of the largest padded image. sides: of the largest one.
        Raises RecipeError if that is larger than `to`."""
        if self.to is None:
            return self.canvas(np.array(sides))
        to = self.to if isinstance(self.to, tuple) else (self.to,) * 2
        if len(to) != 2 or None in to:
            raise RecipeError(f"{self}: wanted the height and width of images in to=.")
        height, width = to
        assert height is not None
        assert width is not None
        if sides[0] > height or sides[1] > width:
            raise RecipeError(
                f"{self}: images may be up to {sides[0]} x {sides[1]} (height x width), and "
                "nothing is cut off. Put LongestSide or a crop in front of it, or pass a larger "
                "to=."
            )
        return height, width

    def canvas(self, most: Ints) -> tuple[int, int]:
        """Return the height and width of a batch's images, without `to`. most: the largest
        ones."""
        step = self.to_multiple or 1
        height, width = (-(-most // step) * step).tolist()
        return height, width

    def check_types(self, selected: FieldTypes) -> None:
        """Raise RecipeError unless it is for images, or samples of the field differ in length."""
        images = [name for name, type in selected.items() if type.is_image]
        if self.field is None and not images:
            raise RecipeError(f"{self} pads images, and no field is one. Name the field to pad.")
        if self.field in (None, *images):
            return
        type = selected[self.changes[0]]
        if not type.is_ragged:
            raise RecipeError(
                f'{self}: samples of "{self.field}" ({type.__class__.__name__}) don\'t differ in '
                "length. Leave Pad out."
            )

    def column(self, content: SampleBatch, names: Names) -> DenseColumn:
        """Return the padded column. Raises ConfigError for a sample that is too long."""
        (field,) = self.changes
        column = content.columns[field]
        assert isinstance(column, RaggedColumn), field
        several = column.shapes
        shapes = np.diff(column.offsets)[:, None] if several is None else several
        longest = shapes.max(axis=0, initial=0).tolist()
        wanted = self.shape(shapes.shape[1])
        step = self.to_multiple or 1
        longest = [-(-long // step) * step for long in longest]
        to = [long if each is None else each for each, long in zip(wanted, longest, strict=True)]
        if len(longer := np.flatnonzero((shapes > to).any(axis=1))):
            row = int(longer[0])
            raise ConfigError(
                f"{self}: {_sample(content, row, names)} is longer: its shape is "
                f"{column.sample(row).shape}. Nothing is cut off: pass a larger to=, or to=None "
                "for the longest of each batch."
            )
        dtype = column.values.dtype
        fill = _fill(self, field, self.value, dtype)
        out = np.full((len(column), *to, *column.values.shape[1:]), fill, dtype)
        if several is not None:
            for row, shape in enumerate(shapes.tolist()):
                out[row][tuple(map(slice, shape))] = column.sample(row)
            return DenseColumn(out)
        lengths = shapes[:, 0]
        rows = np.repeat(np.arange(len(column)), lengths)
        out[rows, np.arange(len(rows)) - np.repeat(column.offsets[:-1], lengths)] = column.values
        return DenseColumn(out)

    def shape(self, dimensions: int) -> tuple[int | None, ...]:
        """Return each sample's padded lengths; None: the longest length of the batch.

        dimensions: number of a sample's lengths that differ. Raises RecipeError if `to` has another
        number of lengths.
        """
        if self.to is None:
            return (None,) * dimensions
        lengths = self.to if isinstance(self.to, tuple) else (self.to,)
        if len(lengths) != dimensions:
            raise RecipeError(
                f"{self}: got to={self.to!r}, wanted {dimensions} lengths, as many as differ in "
                f'samples of "{self.field}".'
            )
        return lengths


@operation
class Unpack(OneColumnOperation):
    """Cut the sequences of a batch into their documents, for attention that doesn't cross them.

    field: a field of sequences of one length, such as "tokens" or "position". by: the field of the
    same shape that numbers the document of each token, -1 for padding. Both must be selected.

    The field is then a `Ragged` in a batch, with a sample for each document of each sequence:
    `values` without padding, and the `cu_seqlens` and `max_length` that attention kernels for
    variable lengths expect. It doesn't change other fields.
    """

    field: str = argument(_field_name)
    _: KW_ONLY
    by: str = argument(_field_name, default="document")

    def __post_init__(self) -> None:
        Operation.__post_init__(self)
        if self.field == self.by:
            raise RecipeError(f'Unpack("{self.field}"): got by="{self.by}", the field itself.')

    @property
    def changes(self) -> tuple[str, ...]:
        """Its field."""
        return (self.field,)

    def check_types(self, selected: FieldTypes) -> None:
        """Raise RecipeError unless both fields are sequences of the same length."""
        types = [selected[self.field], selected.get(self.by)]
        forms = [None if each is None else each.form for each in types]
        shapes = [None if form is None or form.is_ragged else form.shape for form in forms]
        if shapes[0] is None or shapes[0] != shapes[1] or len(shapes[0]) != 1:
            raise RecipeError(
                f"{self}: got {types[0]!r} and {types[1]!r}, wanted two selected fields of "
                'sequences of one length, as a dataset of tokens with documents="pack" has.'
            )

    def column(self, content: SampleBatch, _names: Names) -> RaggedColumn:
        """Return the documents. The tokens of a document are contiguous."""
        column, documents = content.columns[self.field], content.columns[self.by]
        assert isinstance(column, DenseColumn)
        assert isinstance(documents, DenseColumn)
        numbers = documents.values
        begins = np.ones(numbers.shape, np.bool_)
        np.not_equal(numbers[:, 1:], numbers[:, :-1], out=begins[:, 1:])
        is_token = numbers >= 0
        firsts = np.flatnonzero(begins[is_token])
        return RaggedColumn(column.values[is_token], np.append(firsts, int(is_token.sum())))


DOCUMENT, POSITION = "document", "position"


@operation
class PackTokens(ColumnOperation):
    """Pack the samples of each batch, one after another, into sequences of one length.

    ```python
    from penstock import DataLoader, Dataset, PackTokens

    texts = Dataset("tokenised-*.parquet")
    with DataLoader(texts, 32, augment=[PackTokens("tokens", to=256)]) as loader:
        tokens, document, position = next(iter(loader))  # (sequences, 256) each
    ```

    fields: one or several fields of the same lengths in each sample, such as tokens and their loss
    mask, which are packed alike. to: the length of a sequence. A longer sample is an error that
    names it; nothing is cut off. value: pads the ends of sequences.

    The fields then have the shape (sequences, to) in a batch, and two more fields come last:
    "document", the number in the batch of each token's sample, int64, -1 in the padding; and
    "position", the place of each token in its sample, int64, 0 in the padding. Samples are placed
    in descending order of length, each in the first sequence that has room for it. With
    `batch_tokens=` of at most `to`, a batch is one sequence. Other fields keep one value for each
    sample: `values[document]` has one for each token.
    """

    fields: str | Sequence[str] = argument(arg.field_names)
    _: KW_ONLY
    to: int = argument(arg.whole_number(1, MAX_PADDED_LENGTH))
    value: float = argument(_padding_value, default=0)

    adds = (DOCUMENT, POSITION)

    @property
    def changes(self) -> tuple[str, ...]:
        """Its fields."""
        return (self.fields,) if isinstance(self.fields, str) else tuple(self.fields)

    def check_types(self, selected: FieldTypes) -> None:
        """Raise RecipeError unless all fields are lists of numbers that differ in length."""
        for name in self.changes:
            form = selected[name].form
            if form is None or form.shape != (None,):
                raise RecipeError(
                    f'{self}: got {selected[name]!r} for "{name}", wanted lists of numbers that '
                    'differ in length, such as Tokens() or Array("uint8", (None,)).'
                )

    def columns(self, content: SampleBatch, names: Names) -> dict[str, DenseColumn | RaggedColumn]:
        """Return the packed columns, and whose tokens they are. Raises ConfigError for a sample
        that is too long, or whose fields differ in length."""
        from penstock.readers.formats.tokens import pack_pieces  # no other operation needs it

        lengths = self._lengths(content, names)
        pieces = np.flatnonzero(lengths)
        order, bounds = pack_pieces(lengths[pieces], room=self.to)
        order = pieces[order]
        counts = lengths[order]
        before = np.cumsum(counts) - counts
        sequence = np.repeat(np.arange(len(bounds) - 1), np.diff(bounds))
        place = before - before[bounds[:-1]][sequence]  # of a piece, in its sequence
        position = np.arange(int(counts.sum())) - np.repeat(before, counts)
        to = np.repeat(sequence * self.to + place, counts) + position
        shape = len(bounds) - 1, self.to
        packed: dict[str, DenseColumn | RaggedColumn] = {}
        for name in self.changes:
            column = content.columns[name]
            assert isinstance(column, RaggedColumn), name
            values = column.values[np.repeat(column.offsets[order], counts) + position]
            packed[name] = _filled(shape, to, values, _fill(self, name, self.value, values.dtype))
        packed[DOCUMENT] = _filled(shape, to, np.repeat(order, counts), -1)
        packed[POSITION] = _filled(shape, to, position, 0)
        return packed

    def _lengths(self, content: SampleBatch, names: Names) -> Ints:
        """Return the tokens of each sample, int64, shape (n,)."""
        first, *others = self.changes
        found = {name: np.diff(content.columns[name].offsets) for name in self.changes}  # type: ignore[union-attr]
        lengths = found[first].astype(np.int64, copy=False)
        for name in others:
            if len(rows := np.flatnonzero(found[name] != lengths)):
                row = int(rows[0])
                raise ConfigError(
                    f"{self}: {_sample(content, row, names)} has {lengths[row]:,} "
                    f'values of "{first}" and {found[name][row]:,} of "{name}". Wanted as many of '
                    "each: fields that are packed together have one value a token."
                )
        if len(longer := np.flatnonzero(lengths > self.to)):
            row = int(longer[0])
            raise ConfigError(
                f"{self}: {_sample(content, row, names)} is longer: it has {lengths[row]:,} "
                "tokens. Nothing is cut off: pass a larger to=, or cut it in a Map."
            )
        return lengths


def _sample(content: SampleBatch, row: int, names: Names) -> str:
    """Return a sample of a batch for messages."""
    sample_id = int(content.ids[row])
    return f"sample {sample_id} ({names([sample_id])[0]})"


def _filled(shape: tuple[int, int], places: Ints, values: Numbers, fill: Any) -> DenseColumn:
    out = np.full(shape, fill, values.dtype)
    out.reshape(-1)[places] = values
    return DenseColumn(out)


def _fill(op: Operation, field: str, value: float, dtype: np.dtype[Any]) -> Any:
    """Return a padding value in a column's dtype. Raises RecipeError if it can't hold it."""
    with np.errstate(all="ignore"), contextlib.suppress(OverflowError):
        found = np.array(value).astype(dtype)
        if dtype.kind not in "biu" or found == value:
            return found
    raise RecipeError(
        f"{op}: {dtype} can't hold value={value!r}. Choose another value, or store "
        f"{field!r} in a wider type."
    )


_least_pixels = arg.expect(lambda value: arg.real(value, 0, math.inf), "pixels, 0 or more")


@operation
class SanitizeBoxes(FieldOperation):
    """Drop boxes of which too little is left, and their rows of fields `of` them.

    It comes anywhere after crops, resizes and flips, and checks the final boxes, clipped to their
    image, as torchvision's SanitizeBoundingBoxes does after ClampBoundingBoxes. min_size: minimum
    width and height of a box in pixels of the result. min_area: minimum area in pixels. fields:
    names of the fields of boxes; None: all that follow an image of the recipe. Without this
    operation boxes are only clipped, and keep their number.
    """

    min_size: float = argument(_least_pixels, default=1.0)
    min_area: float = argument(_least_pixels, default=1.0)
    _: KW_ONLY
    fields: str | Sequence[str] | None = None

    needs_final_boxes = True

    def fits_field(self, _name: str, type: FieldType) -> bool:
        """Return True for the list of boxes."""
        return type.is_boxes

    def keeps(self, boxes: NDArray[np.float32]) -> Bools:
        """Return True for each box to keep, bool, (k,). boxes: x1, y1, x2, y2, clipped, shape
        (k, 4)."""
        width, height = boxes[:, 2] - boxes[:, 0], boxes[:, 3] - boxes[:, 1]
        large = (width >= self.min_size) & (height >= self.min_size)
        return large & (width * height >= self.min_area)


@operation
class InstanceIds(FieldOperation):
    """Deliver instance masks as one map of numbers instead of a bit mask for each box.

    field: of `InstanceMasks`. The field then is int32, (n, height, width), in a batch: 0 where no
    instance is, else 1 + the place of its box among the sample's boxes in the batch (after
    SanitizeBoxes). Where instances overlap, the last one counts.
    """

    field: str = argument(_field_name, default="masks")

    def fits_field(self, name: str, _type: FieldType) -> bool:
        """Return True for the list of its field."""
        return name == self.field

    def applied(self, type: FieldType) -> FieldType:
        """Return the type of the field as it is delivered. Raises RecipeError for another type than
        InstanceMasks."""
        if isinstance(type, InstanceMasks):
            return type.numbered
        raise RecipeError(f'{self}: "{self.field}" is {type!r}, wanted InstanceMasks.')
