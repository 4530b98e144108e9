"""Define the operations on whole fields, which need no image: Map, Pad, Unpack, SanitizeBoxes.

Map calls a user's function on what storage holds, before anything is decoded or resized. So it
stands in front of all other operations: behind a crop it would look as if it saw the crop. Pad
makes fields whose samples differ in length one dense tensor. Unpack cuts packed sequences of tokens
into their documents. SanitizeBoxes drops boxes of which a recipe leaves too little.

A job on arrays or tokens loads this module and none of the operations on images.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING, Any

from penstock.augment.argument_checks import (
    as_tuple,
    check_bool,
    field_names,
    integer,
    is_finite_number,
    whole_number,
)
from penstock.cache import RecipeError, explain_arguments
from penstock.readers.fields import (
    PRESENT,
    Array,
    Audio,
    FieldType,
    Image,
    Schema,
    Value,
    Video,
    is_number,
    number_name,
)

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

MAX_PROCESSES = 1024
_ENCODED = (Image, Audio, Video)


@explain_arguments(RecipeError)
@dataclass(frozen=True, slots=True)
class Map:
    """A function of yours on fields of each sample; it stands in front of all other operations.

    fn: gets a positional argument a field: str of Text; bytes of Bytes and of encoded images; a
    read-only array of Array, Mask, Boxes (as stored), Keypoints, MultiLabel and Tokens; a numpy
    scalar of Value, ClassLabel and "id". What it returns takes their place: the value, or of
    several fields a tuple in their order or a dict by name. With a parameter `rng` it also gets the
    sample's own numpy.random.Generator, keyed by (seed, epoch, sample id, place among the Maps):
    random numbers from elsewhere differ after a resume. A `BadSampleError` from it makes the sample
    a bad one; anything else that it raises stops the loader.
    fields: a name or several; None in the list of a field stands for that field. A field that some
    samples lack is empty there; "<name>.present" says which.
    returns: {name: type} of what it returns, where fields are new or change their type; None keeps
    the types of `fields`. Other fields stay as they are; new ones come last in a batch.
    batched: it gets all samples of a batch at once, a list or a stacked array an argument (`rngs`:
    a list), and returns as many; it must treat each sample alone, else resuming isn't exact.
    processes: that call it, for this loader alone; 0: the reading threads do. fn must be picklable.

    Raises RecipeError for arguments that can't be.
    """

    fn: Callable[..., Any]
    fields: str | Sequence[str] | None = None
    _: KW_ONLY
    returns: Mapping[str, FieldType] | None = field(default=None, hash=False)
    batched: bool = False
    processes: int = 0

    def __post_init__(self) -> None:
        if not callable(self.fn):
            raise RecipeError(f"Map(fn=...): got {self.fn!r}, wanted a function.")
        if self.fields is not None:
            object.__setattr__(self, "fields", _map_fields(self.fields))
        check_bool("Map(batched=...)", self.batched)
        processes = whole_number("Map(processes=...)", self.processes, low=0, high=MAX_PROCESSES)
        object.__setattr__(self, "processes", processes)
        if self.returns is not None:
            if not isinstance(self.returns, Mapping) or not self.returns:
                raise RecipeError(
                    f"Map(returns=...): got {self.returns!r}, wanted the type of each "
                    'field that fn returns: {"tokens": Tokens("int64")}, say.'
                )
            object.__setattr__(self, "returns", dict(self.returns))

    @property
    def name(self) -> str:
        """The operation in messages, by its function's name."""
        return f"Map({getattr(self.fn, '__name__', type(self.fn).__name__)})"

    @property
    def takes_rng(self) -> bool:
        """Return True if fn has a parameter for random numbers: `rng`, or `rngs` if it is
        batched."""
        try:
            parameters = inspect.signature(self.fn).parameters
        except (TypeError, ValueError):  # compiled: it has no signature to look at
            return False
        found = parameters.get("rngs" if self.batched else "rng")
        return found is not None and found.kind in (found.KEYWORD_ONLY, found.POSITIONAL_OR_KEYWORD)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedMap:
    """A Map whose fields are known. index: its place among a recipe's Maps, which keys its random
    numbers. takes: what fn gets, in order, each with its type; returns: what comes back."""

    op: Map
    index: int
    takes: Mapping[str, FieldType]
    returns: Mapping[str, FieldType]


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedMaps:
    """A recipe's Maps, in order, that fit their dataset. schema: of samples behind all of them."""

    maps: tuple[PlacedMap, ...]
    schema: Schema


IsEarly = Callable[[Any, str | None], bool]
"""Returns True if an operation, in the list of a field, runs before samples are read."""


def split_maps(recipe: Any, is_early: IsEarly = lambda *_: False) -> tuple[tuple[Map, ...], Any]:
    """The Maps of a recipe with their fields, and the recipe without them.

    recipe: a list of operations, or a mapping from field to list, in which lists of Maps alone are
    left out of what remains; None where nothing does. What is neither comes back as it is: others
    judge it. is_early: of operations that may stand before Maps, and mustn't behind one that has
    their fields. Raises RecipeError for a Map behind another operation, or without fields.
    """
    if isinstance(recipe, Map):
        recipe = (recipe,)
    if isinstance(recipe, Mapping):
        found: list[Map] = []
        rest: dict[Any, Any] = {}
        for name, operations in recipe.items():
            maps, others = _leading_maps(operations, name, is_early)
            found += maps
            if others or not maps:
                rest[name] = others
        return tuple(found), rest or None
    maps, others = _leading_maps(recipe, None, is_early)
    return tuple(maps), others


def _leading_maps(operations: Any, of: str | None, is_early: IsEarly) -> tuple[list[Map], Any]:
    """The Maps at the front of a list of operations, and the others. of: the list's field."""
    if isinstance(operations, Map):
        operations = (operations,)
    if not isinstance(operations, Sequence) or isinstance(operations, str):
        return [], operations
    early = 0
    while early < len(operations) and is_early(operations[early], of):
        early += 1
    count = early
    while count < len(operations) and isinstance(operations[count], Map):
        count += 1
    for place, late in enumerate(operations[count:], start=count):
        if isinstance(late, Map):
            raise RecipeError(
                f"{late.name} stands after {operations[place - 1]}: a Map works on what storage "
                "holds, before images are decoded. Put it in front of all other operations; what "
                "works on pixels is Apply, or code of yours on the batch."
            )
    maps = [_with_fields(each, of) for each in operations[early:count]]
    for late in operations[count:]:
        if is_early(late, of):
            _check_untouched(late, of, maps)
    others = operations[count:] if not early else (*operations[:early], *operations[count:])
    return maps, (others or None) if maps else operations


def _check_untouched(op: Any, of: str | None, maps: Sequence[Map]) -> None:
    """An early operation behind Maps, which it is done before."""
    mine = None if op.fields is None and of is None else {*(op.fields or (of,))}
    for each in maps:
        theirs = {*(each.fields or ()), *(each.returns or ())}
        if mine is None or theirs & mine:
            raise RecipeError(
                f"{op} stands after {each.name}, and arrays are cropped before they are read: put "
                "it in front of all else. What a Map returns its function can crop."
            )


def _with_fields(op: Map, of: str | None) -> Map:
    if op.fields is None:
        if of is None:
            raise RecipeError(
                f'{op.name}: got no fields, wanted fields="caption", say: what its function gets.'
            )
        return Map(op.fn, (of,), returns=op.returns, batched=op.batched, processes=op.processes)
    if of is not None and of not in op.fields:
        raise RecipeError(
            f'{op.name} has fields={list(op.fields)} and stands in the list of "{of}". Leave its '
            "fields out, or put it into a list of its own fields."
        )
    return op


def check_maps(maps: Sequence[Map], schema: Schema) -> CheckedMaps:
    """Give each Map of `split_maps` the types of its fields.

    schema: of the dataset. Raises RecipeError for fields that aren't there and types that no
    function can return; ConfigError for masks or boxes of what is no image any more.
    """
    placed: list[PlacedMap] = []
    for index, op in enumerate(maps):
        names = op.fields
        assert names is not None
        takes = {name: _type_of(name, op, schema) for name in names}
        returns = takes if op.returns is None else op.returns
        for name, type in returns.items():
            _check_returned(op, name, type, schema)
        placed.append(PlacedMap(op=op, index=index, takes=takes, returns=returns))
        schema = Schema({**schema, **returns})
    return CheckedMaps(maps=tuple(placed), schema=schema)


def _type_of(name: str, op: Map, schema: Schema) -> FieldType:
    if is_number(name, schema):
        return Value("int64")
    if name.endswith(PRESENT) and name.removesuffix(PRESENT) in schema:
        return Value("bool")
    if name not in schema:
        raise RecipeError(
            f'{op.name} wants the field "{name}", and there is {", ".join(schema) or "none"} (and '
            f'"{number_name(schema)}"). Name one of these.'
        )
    return schema[name]


def _check_returned(op: Map, name: str, type: FieldType, schema: Schema) -> None:
    if is_number(name, schema) or name.endswith(PRESENT):
        raise RecipeError(
            f'{op.name} would replace "{name}", which Penstock gives. Say what it returns: '
            'returns={"tokens": Tokens("int64")}, for instance.'
        )
    if isinstance(type, _ENCODED):
        kind = type.__class__.__name__
        raise RecipeError(
            f'{op.name} would put other {kind} bytes into "{name}", and those of storage were '
            "checked and measured when the dataset was indexed. Say what else it returns, such as "
            f'returns={{"{name}": Array("uint8", (None, None, 3))}} for pixels.'
        )
    if isinstance(type, Array) and not type.is_settled:
        raise RecipeError(
            f'{op.name} returns "{name}" as {type}, wanted an Array with dtype and shape (None in '
            'it for lengths that differ): Array("float32", (None, 3)), say.'
        )


def _map_fields(fields: Any) -> tuple[str, ...]:
    names = (fields,) if isinstance(fields, str) else fields
    if not isinstance(names, Sequence) or not names or not all(isinstance(n, str) for n in names):
        raise RecipeError(f"Map(fields=...): got {fields!r}, wanted a field's name, or several.")
    if len(set(names)) < len(names):
        raise RecipeError(f"Map(fields=...): got {list(names)}, wanted each field once.")
    return tuple(names)


MAX_PADDED_LENGTH = 2**31


@explain_arguments(RecipeError)
@dataclass(frozen=True, slots=True)
class Pad:
    """Fills each sample of a field up at its end, so that a batch of it is one tensor.

    field: one whose samples differ in length, such as boxes or tokens. to: the first length of
    every sample, or a tuple: its whole shape. None, also in a tuple: as long as the longest of the
    batch. A sample that is longer is an error that names it: nothing is cut off. value: what it is
    filled up with.

    Batches have it in the field's place: shape (n, to, ...), in a recipe that stands for the whole
    loader or for the field, at any place. It touches no image.
    """

    field: str
    _: KW_ONLY
    to: int | tuple[int | None, ...] | None = None
    value: float = 0

    def __post_init__(self) -> None:
        if not isinstance(self.field, str) or not self.field:
            raise RecipeError(
                f'Pad: got field={self.field!r}, wanted a field\'s name: Pad("boxes", to=100).'
            )
        many = as_tuple(self.to)
        lengths = tuple(None if each is None else integer(each) or 0 for each in many or (self.to,))
        if not all(each is None or 1 <= each <= MAX_PADDED_LENGTH for each in lengths):
            raise RecipeError(
                f"Pad({self.field!r}): got to={self.to!r}, wanted a length of 1 or more, None for "
                "the longest of each batch, or a tuple of these."
            )
        object.__setattr__(self, "to", lengths if many else lengths[0])
        if not is_finite_number(self.value) and not isinstance(self.value, bool):
            raise RecipeError(f"Pad({self.field!r}): got value={self.value!r}, wanted a number.")

    def shape(self, dimensions: int) -> tuple[int | None, ...]:
        """Return each sample's padded lengths; None: the longest length of the batch.

        dimensions: of a sample where several of its lengths differ, 1 where the first alone does.
        Raises RecipeError where `to` has other ones.
        """
        if self.to is None:
            return (None,) * dimensions
        lengths = self.to if isinstance(self.to, tuple) else (self.to,)
        if len(lengths) != dimensions:
            wanted = f"a tuple of {dimensions}" if dimensions > 1 else "one number"
            raise RecipeError(
                f"{self}: got to={self.to!r}, and samples of {self.field!r} differ in "
                f"{f'{dimensions} lengths' if dimensions > 1 else 'one length'}: pass {wanted}."
            )
        return lengths


@explain_arguments(RecipeError)
@dataclass(frozen=True, slots=True)
class Unpack:
    """Cuts the sequences of a batch into their documents, for attention that doesn't cross them.

    field: of sequences of one length, such as "tokens" or "position". by: the field of the same
    shape that numbers the document of each token, -1 where none is: what a sequence is filled up
    with. Both have to be selected.

    Batches have a `Ragged` in the field's place, a sample for each document of each sequence:
    `values` without what sequences are filled up with, `cu_seqlens` and `max_length` are what
    kernels of attention over variable lengths take. It touches no other field.
    """

    field: str
    _: KW_ONLY
    by: str = "document"

    def __post_init__(self) -> None:
        for name in (self.field, self.by):
            if not isinstance(name, str) or not name:
                raise RecipeError(
                    f'Unpack: got {name!r}, wanted a field\'s name: Unpack("tokens").'
                )
        if self.field == self.by:
            raise RecipeError(f'Unpack("{self.field}"): got by="{self.by}", the field itself.')


@explain_arguments(RecipeError)
@dataclass(frozen=True, slots=True)
class SanitizeBoxes:
    """Drops boxes of which too little is left, and with them their rows of fields `of` them.

    It stands anywhere behind what crops, resizes and flips, and looks at the boxes in the end,
    clipped to their image, as torchvision's SanitizeBoundingBoxes does behind ClampBoundingBoxes.
    min_size: in pixels of the result; a box of less width or height is dropped. min_area: likewise
    of its area. fields: names of the boxes; None: all that follow an image of the recipe. Without
    this operation boxes are only clipped, and keep their number.
    """

    min_size: float = 1.0
    min_area: float = 1.0
    _: KW_ONLY
    fields: str | Sequence[str] | None = None

    def __post_init__(self) -> None:
        for name in ("min_size", "min_area"):
            value = getattr(self, name)
            if not is_finite_number(value) or value < 0:
                raise RecipeError(
                    f"SanitizeBoxes({name}=...): got {value!r}, wanted pixels, 0 or more."
                )
            object.__setattr__(self, name, float(value))
        object.__setattr__(self, "fields", field_names("SanitizeBoxes(fields=...)", self.fields))

    def keeps(self, boxes: NDArray[np.float32]) -> NDArray[np.bool_]:
        """Which boxes stay, bool, (k,). boxes: x1, y1, x2, y2, clipped, shape (k, 4)."""
        width, height = boxes[:, 2] - boxes[:, 0], boxes[:, 3] - boxes[:, 1]
        large = (width >= self.min_size) & (height >= self.min_size)
        return large & (width * height >= self.min_area)
