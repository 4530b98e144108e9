"""Define what a type of field is: the base of all types, their names in manifests, and their JSON.

A type is a frozen dataclass without I/O. It owns everything that is specific to its kind: how a
file is checked and decoded, which cells of a table it can be, how its samples are stored and
delivered. Other code asks the type and never tests which kind it is.

The types of Penstock are in the modules beside this one, which are imported when a dataset has
such a field. Another package defines a subclass of `FieldType` and names it in its pyproject.toml,
so that every process finds it by the name in a manifest:

    [project.entry-points."penstock.field_types"]
    depth = "my_package.depth:Depth"
"""

from __future__ import annotations

import contextlib
import inspect
import re
from collections.abc import Callable, Container, Mapping, Sequence, Set
from dataclasses import dataclass, fields, replace
from functools import partial
from importlib import import_module
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self, TypeVar, cast, dataclass_transform

import numpy as np

from penstock.cache import ConfigError, MissingDependencyError, PenstockError, explain_arguments
from penstock.readers.fieldtypes.array_forms import ArrayForm, check_array, unfit_numbers
from penstock.readers.fieldtypes.columns import ArrayColumn, Column, EncodedColumn, ListColumn
from penstock.readers.types import CODECS, MAX_PIXELS, UNFIT, Facts, Rejection, accepted, failure

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from penstock.readers.fieldtypes.array_forms import Known
    from penstock.readers.types import Bools, Encoded, Ints, Numbers

    Size = tuple[int, int]
    Sizes = Size | NDArray[np.int32]

GROUP = "penstock.field_types"
"""The entry points of types that other packages provide."""

DTYPES = frozenset(codec.name for codec in CODECS.values())
"""The names of the supported dtypes."""

ID, SAMPLE_ID, NUMBER = "id", "sample_id", "penstock/id"
"""The names of a sample's number in the dataset. A field of the dataset that has one of the first
two names hides it; no field can have the third."""

PRESENT = ".present"
"""The suffix of the field of bools that marks the samples that have a field."""

SIZE, MASK = ".size", ".mask"
"""The suffixes of fields that batches have in addition to images: the height and width of each, and
which pixels aren't padding. A field of the dataset that has such a name hides it."""

_NAME = re.compile(r"[^\x00-\x1f\x7f/\ud800-\udfff]{1,128}")
_KIND = re.compile(r"[a-z][a-z0-9_.-]{0,63}")


C = TypeVar("C", bound=type)


@dataclass_transform(frozen_default=True)
def frozen_type(cls: C) -> C:
    """Make a class of a type a frozen dataclass, whose calls explain wrong arguments."""
    made: Any = dataclass(frozen=True, slots=True)(cls)
    return cast("C", explain_arguments(ConfigError)(made))


class Moves(Protocol):
    """The moves of the n images of a batch, which `follow` applies to what belongs to them."""

    @property
    def size(self) -> tuple[Ints, Ints]:
        """The heights and widths of the images as stored, int64, (n,) each."""

    @property
    def mirrored(self) -> Bools:
        """Return which images are mirrored, bool, (n,): left and right are exchanged."""

    def move_masks(self, masks: Sequence[Numbers], *, dtype: Any = None) -> Numbers | list[Numbers]:
        """Return one number per pixel by nearest neighbours, shape (n, height, width), or a list if
        the images differ in size. masks: one of each image's size, without pixels if missing.
        dtype: of the result."""

    def index_maps(self) -> tuple[Any, Any]:
        """Return for each image the row and the column of the mask for each row and column of the
        result, before the first warp, negative outside: int64, (n, length) each, or a list of
        arrays if images differ in size."""

    def warp(self, row: int, masks: Numbers) -> None:
        """Move several masks of one image in place by the moves from the first warp on, with 0
        outside. row: of the image. masks: shape (masks, height, width)."""

    def move_boxes(self, boxes: Numbers, owner: Ints) -> NDArray[np.float32]:
        """Return x1, y1, x2, y2 of boxes, clipped, shape (k, 4). owner: row of each one's image."""

    def move_points(self, points: Numbers, owner: Ints) -> NDArray[np.float32]:
        """Return x, y of points, shape (k, 2). owner: row of each one's image."""


class FieldType:
    """The type of a field: everything that is specific to one kind of data.

    A subclass is a frozen dataclass. Its arguments are numbers, strings or tuples of these, because
    manifests store them as JSON. It sets `kind`, and says how samples are stored by one of:

    - `is_encoded = True`: a sample is bytes (of a file, or of a binary column). `decode` turns them
      into the value that batches have, on the reading thread.
    - `form`: a sample is an array (an .npy file, a list of a table, an array of a store).
    - `number`: a sample is one number of a table.

    Everything else has a default. Values are the same on every machine: a type holds no state.

    kind: name in manifests, unique among all packages. refers_to: kind of the field that `of=`
    names, if there is such an argument. has_sides: height and width of each sample are recorded.
    is_image: pixels that a recipe changes and DALI decodes. is_class: a class per sample. is_boxes:
    boxes, which a recipe may drop together with their rows. can_crop: a recipe may read a part of
    each array. can_return: a `Map` may return such values. is_default: False if batches have it
    only if `fields=` names it. is_slow: decoding takes longer than reading. is_bits: packs store
    each number as a bit. is_measured: values are the height and width of the
    image to which they refer, which its check determines. is_target: a model learns to predict
    such values from images, so that batches have them by default. head_bytes: the number of leading
    bytes that `check_head` needs; 0 for types without one. missing: the value of a sample that
    lacks an encoded field whose `decoded` is None. codec: of encoded samples without a header that
    identifies it, in their facts.
    """

    __slots__ = ()

    kind: ClassVar[str]
    refers_to: ClassVar[str | None] = None
    is_encoded: ClassVar[bool] = False
    has_sides: ClassVar[bool] = False
    is_image: ClassVar[bool] = False
    is_class: ClassVar[bool] = False
    is_boxes: ClassVar[bool] = False
    can_crop: ClassVar[bool] = False
    can_return: ClassVar[bool] = True
    is_default: ClassVar[bool] = True
    is_slow: ClassVar[bool] = False
    is_bits: ClassVar[bool] = False
    is_measured: ClassVar[bool] = False
    is_target: ClassVar[bool] = False
    head_bytes: ClassVar[int] = 0
    missing: ClassVar[Any] = b""
    codec: ClassVar[str] = "bytes"

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        kind = cls.__dict__.get("kind")
        if kind is not None:
            is_free = str(kind) not in _MODULES or cls.__module__.startswith(f"{__package__}.")
            if not (_KIND.fullmatch(str(kind)) and is_free):
                raise ConfigError(
                    f"{cls.__name__}: got kind={kind!r}, wanted lower-case letters, digits, _, . "
                    "or -, and none of Penstock's own kinds."
                )
            modules = {cls.__module__, _KNOWN.get(kind, cls).__module__} - _MAIN
            if len(modules) > 1:
                raise ConfigError(
                    f"{cls.__name__}: {' and '.join(sorted(modules))} both define kind={kind!r}, "
                    "so stored data could be read with the wrong one. Rename one of them, such as "
                    "<package>.<kind>."
                )
            _KNOWN[kind] = cls

    # What a sample is.

    @property
    def number(self) -> np.dtype[Any] | None:
        """The dtype if a sample is one number, else None."""
        return None

    @property
    def form(self) -> ArrayForm | None:
        """The form if a sample is stored as an array, else None; also None until it is settled."""
        return None

    @property
    def known(self) -> Known:
        """The dtype and the shape of arrays, None for what is known only after data were seen."""
        assert self.form is not None, self
        return self.form.dtype, self.form.shape

    @property
    def stored(self) -> ArrayForm | None:
        """The form of samples that are stored as numbers, one or an array; None for encoded
        ones."""
        return self.form if self.number is None else ArrayForm(self.number, ())

    @property
    def decoded(self) -> ArrayForm | None:
        """The form of the arrays that `decode` returns: batches have a tensor, or a `Ragged` if it
        is ragged. None for other values, which batches have as a list."""
        return None

    @property
    def is_ragged(self) -> bool:
        """Return True if samples may differ in shape in a batch."""
        form = self.form or self.decoded
        return form is not None and form.is_ragged

    @property
    def in_tables(self) -> bool:
        """Return True if the cells of a table in text can be samples."""
        return not self.is_encoded or "text" in self.column_kinds

    @property
    def in_files(self) -> bool:
        """Return True if a sample can be a file of its own."""
        return self.number is None

    @property
    def class_names(self) -> tuple[str, ...]:
        """The names of the classes, by number; empty if the type has none."""
        return ()

    @property
    def reference(self) -> str | None:
        """The field that `of=` names, or None."""
        return getattr(self, "of", None)

    def renamed(self, names: Mapping[str, str]) -> Self:
        """Return the type with the new name of the field to which it refers. names: new by old."""
        of = self.reference
        return replace(self, of=names[of]) if of in names else self  # type: ignore[type-var, index]

    # How its type is completed from the data.

    @property
    def is_settled(self) -> bool:
        """Return True if the type is known in full before data are seen."""
        return True

    def completed(self, dtype: str, shape: tuple[int | None, ...]) -> FieldType:
        """Return the type with a stored dtype and shape in place of what it leaves open."""
        return self

    def settled(self, so_far: FieldType | None, facts: Facts, *, field: str) -> FieldType:
        """Return the type with what one more sample shows. so_far: the result for the samples
        before it. field: its name, for messages. Raises ValueError if no type fits all of them."""
        return self

    # How samples are checked and decoded.

    def check(self, data: Encoded, *, field: str = "", max_pixels: int = MAX_PIXELS) -> Facts:
        """Check a file that holds one sample completely, and return its facts. Raises ValueError if
        it is bad.

        Encoded samples are decoded; arrays must be .npy files of the type's form. field: its name,
        for messages. max_pixels: of an image or a mask.
        """
        if self.is_encoded:
            self.decoder(max_pixels=max_pixels)(data)
            return Facts.of(data, codec=self.codec)
        return check_array(data, self.known, field=field)

    def check_head(self, head: bytes) -> Rejection | None:
        """Return why bytes that begin so can't be a sample, or None, so that the rest isn't read.
        head: the first `head_bytes` of them."""
        return None

    def check_values(self, values: Numbers, size: Sizes | None = None) -> Rejection | None:
        """Return why the values of one sample are invalid, or None. They have the type's form.

        values: as stored. size: height and width of the image to which they belong, None if it is
        unknown. Types that override this are also checked when tables are read.
        """
        return None

    def sides_of(self, shape: tuple[int, ...]) -> Size | None:
        """Return the height and width that the facts of a sample with this shape record, which are
        those of its image; None if they record none."""
        return (shape[0], shape[1]) if self.has_sides else None

    def rows_of(self, value: Numbers) -> int:
        """Return the rows of a stored sample of a field that has one for each box, of bytes if it
        is encoded."""
        return len(value)

    @property
    def checks_values(self) -> bool:
        """Return True if values of the right form may still be invalid."""
        return type(self).check_values is not FieldType.check_values

    def decode(self, payload: Encoded) -> Any:
        """Decode the bytes of one sample, uint8, shape (bytes,). Raises ValueError, whose message
        is a reason against the sample."""
        raise NotImplementedError(f"{type(self).__name__}.decode")

    def decoder(self, *, max_pixels: int = MAX_PIXELS) -> Callable[[Encoded], Any]:
        """Return the function that decodes a payload, and checks the result against `decoded`. It
        raises ValueError for a payload that doesn't decode."""
        if self.kind in _MODULES:
            return self.decode
        form, decode = self.decoded, self.decode

        def decoded(payload: Encoded) -> Any:
            try:
                value = decode(payload)
            except (PenstockError, MemoryError, ValueError):
                raise
            except Exception as error:  # a library may raise anything for damaged bytes
                raise ValueError(f"it doesn't decode ({failure(error)})") from error
            if form is None:
                return value
            array = np.asarray(value)
            if array.dtype != form.dtype or not form.has(array.shape):
                got = ArrayForm(array.dtype, array.shape)
                raise ValueError(f"it decodes to {got}, wanted {form}")
            return array

        return decoded

    @property
    def empty(self) -> Any:
        """The value of a sample that lacks an encoded field."""
        return self.missing if self.decoded is None else self.decoded.empty

    def lacking(self, count: int) -> Column:
        """Return the column, as it is stored, of samples that all lack the field: empty or 0."""
        if (form := self.stored) is not None:
            return form.column([form.empty] * count)
        dims = np.zeros((count, 2), np.int32) if self.has_sides else None
        return EncodedColumn([np.empty(0, np.uint8)] * count, dims)

    def column(self, samples: list[Any]) -> Column:
        """Join the values of samples, with `empty` for those that lack the field."""
        form = self.form or self.decoded
        return ListColumn(samples) if form is None else form.column(samples)

    def returned(self, value: Any) -> Any:
        """Convert a value that a `Map` returned. Raises ValueError(got, wanted) for another kind of
        value; got is "" to show the value."""
        form = self.stored or self.decoded
        if form is not None:
            return form.returned(value)
        wanted = type(self.missing)
        if not isinstance(value, wanted):
            raise ValueError("", f"a {wanted.__name__}")
        return value

    # How its values follow the pixels of their image.

    @property
    def follows(self) -> bool:
        """Return True if values move with the pixels of the image to which they refer."""
        return self.reference is not None and type(self).follow is not FieldType.follow

    @property
    def needs_size(self) -> bool:
        """Return True if `follow` needs the size of an image that isn't moved."""
        return False

    def follow(self, column: Column, moves: Moves | None, *, size: Size | None) -> ArrayColumn:
        """Return the values of a batch where the pixels of their images will be.

        column: as `column` returned it. moves: of the images; None if no recipe changes them, or
        they aren't selected. size: height and width of all images then, if `needs_size`. Raises
        DatasetError for values that don't fit their image.
        """
        raise NotImplementedError(f"{type(self).__name__}.follow")

    def resized(self, value: Numbers, before: Size, after: Size) -> Numbers:
        """Return a stored sample, the bytes of an encoded one, for its image in another size, as
        `pack` stores it. before, after: height and width of the image. Raises ValueError if that
        isn't possible."""
        if self.follows:
            raise ValueError(f"{type(self).__name__} has no `resized`")
        return value

    # Where its samples may come from.

    @property
    def column_kinds(self) -> Set[str]:
        """The values of Arrow columns that can be samples: "binary", "text", "number", "list"."""
        if self.is_encoded:
            return {"binary"}
        return {"list"} if self.number is None else {"number"}

    def cell(self, value: Any, *, is_text: bool) -> Any:
        """Convert the value of a table's cell to a sample: bytes if encoded, else a number or an
        array. Raises ValueError, whose message is a reason against the row; a Rejection that is
        returned counts as well. is_text: the value is text of a CSV."""
        return self.cell_reader(is_text=is_text)(value)

    def cell_reader(self, *, is_text: bool) -> Callable[[Any], Any]:
        """Return the function that converts the values of one column. It raises ValueError."""
        from penstock.readers.fieldtypes.cells import array_cell, number_cell, text_cell

        if type(self).cell is not FieldType.cell:
            return lambda value: accepted(self.cell(value, is_text=is_text))
        if self.number is not None:
            return partial(number_cell, dtype=self.number, is_text=is_text)
        if self.is_encoded:
            return partial(text_cell, decode=self.decoder())
        return partial(array_cell, known=self.known, check=self.check_values, is_text=is_text)

    def can_hold(self, dtype: np.dtype[Any], shape: tuple[int | None, ...]) -> bool:
        """Return True if stored arrays of a dtype and shape can be samples of the type. Numbers of
        another dtype are cast, and a number that doesn't fit makes its sample bad. shape: None in
        it is a length that differs, or that isn't known."""
        form = self.stored
        if form is None:
            return bool(shape) and not self.is_encoded
        is_alike = len(shape) == len(form.shape) and all(
            None in pair or pair[0] == pair[1] for pair in zip(shape, form.shape, strict=True)
        )
        are_integers = {dtype.kind, form.dtype.kind} <= {*"iu"}
        return is_alike and (are_integers or np.can_cast(dtype, form.dtype, "same_kind"))

    def may_not_fit(self, stored: np.dtype[Any]) -> bool:
        """Return True if some numbers of a stored dtype may not fit the type."""
        form = self.stored
        return self.is_class or (form is not None and not np.can_cast(stored, form.dtype))

    def unfit(self, numbers: Numbers, dtype: np.dtype[Any]) -> Bools:
        """Mark the stored numbers that aren't values of the type: integers out of range, and
        fractions that would become infinite. dtype: of the values. Returns bools of their shape."""
        return unfit_numbers(dtype, numbers)

    def put_fitting(
        self, field: str, found: Numbers, out: Numbers, places: Ints | slice
    ) -> dict[int, str]:
        """Write rows of stored numbers to out[places], with zeros for a row that doesn't fit.
        Returns the reasons by row."""
        unfit = self.unfit(found, out.dtype)
        rows = unfit.reshape(len(found), -1).any(axis=1)
        wrong = {}
        for row in np.flatnonzero(rows).tolist():
            value = found[row][unfit[row]].reshape(-1)[0].item()
            wrong[row] = f"{field}: {value!r} {self.mismatch()}. {UNFIT}"
        with np.errstate(all="ignore"):
            if wrong:
                found = found.copy()
                found[rows] = 0
            out[places] = found
        return wrong

    def mismatch(self) -> str:
        """Describe why a number isn't a value of the type, as the end of a sentence."""
        return f"doesn't fit {self!r}"

    # How it is shown and stored.

    def show(self, value: Any) -> str | None:
        """Return the text by which `penstock inspect` shows one value of a batch, or None for the
        usual one."""
        return None

    def to_json(self) -> dict[str, Any]:
        """Return the type as manifests store it."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}  # type: ignore[arg-type]
        return {"kind": self.kind, **{k: v for k, v in values.items() if v is not None}}


_MODULES = {
    **dict.fromkeys(("image", "audio", "video", "text", "texts", "bytes"), "media"),
    **dict.fromkeys(
        ("value", "array", "tokens", "class_label", "class_labels", "multi_label"), "number_types"
    ),
    "mask": "masks",
    "instance_masks": "instance_masks",
    **dict.fromkeys(("boxes", "keypoints", "instance_keypoints", "image_size"), "boxes"),
}
FieldTypes = Mapping[str, FieldType]
"""The types of fields, by name."""

_KNOWN: dict[str, type[FieldType]] = {}
_MAIN = {"__main__", "__mp_main__"}  # a script may be imported under its own name as well


def named_type(kind: str) -> type[FieldType]:
    """Return the type of a kind: ours, one that this process has defined, or that of an installed
    package. Raises ValueError for text that isn't a kind, and MissingDependencyError for a kind
    that no package provides."""
    if kind in _MODULES:
        import_module(f"{__package__}.{_MODULES[kind]}")
    if kind in _KNOWN:
        return _KNOWN[kind]
    if not _KIND.fullmatch(kind):
        raise ValueError(f"{kind[:80]!r} isn't a kind of field")
    point = next(iter(entry_points(group=GROUP, name=kind)), None)
    if point is None:
        raise MissingDependencyError(
            f"It has a field of the type {kind!r}, which isn't one of Penstock's. Install the "
            f"package that provides it (entry point {kind!r} of {GROUP!r}), or import its module "
            "first."
        )
    try:
        point.load()
        return _KNOWN[kind]
    except Exception as error:  # another package's code may raise anything
        raise MissingDependencyError(
            f"The type of field {kind!r} ({point.value}) can't be loaded "
            f"({type(error).__name__}: {error}). Correct its package, or install what it needs."
        ) from error


def from_json(value: Any) -> FieldType:
    """Return the type that a manifest stores. The value is untrusted. Raises ValueError, and
    MissingDependencyError for a kind that no package provides."""
    kind = value.get("kind") if isinstance(value, Mapping) else None
    if not isinstance(kind, str):
        raise ValueError(f"{str(value)[:80]!r} isn't a field's type")
    found = named_type(kind)
    values = {k: tuple(v) if isinstance(v, list) else v for k, v in value.items() if k != "kind"}
    try:
        return found(**values)
    except (ConfigError, TypeError) as error:
        raise ValueError(str(error)) from error


def is_field_name(name: object) -> bool:
    """Return True if a field can have this name."""
    return isinstance(name, str) and bool(_NAME.fullmatch(name))


def check_field_name(name: object, *, what: str) -> str:
    """Return a field's name, or raise ConfigError. what: the argument, for the message."""
    if not isinstance(name, str) or not is_field_name(name) or name.endswith(PRESENT):
        raise ConfigError(
            f"{what}: got {name!r}, wanted a field's name: 1 to 128 characters without a slash; "
            f'names that end in "{PRESENT}" are reserved.'
        )
    return name


def check_field_type(name: str, type: object) -> None:
    """Raise ConfigError unless a value of `schema=` is a type. name: of the field."""
    parameters = getattr(type, "__dataclass_params__", None)
    if not isinstance(type, FieldType) or parameters is None or not parameters.frozen:
        wanted = 'a field type such as Image(), Value("int64") or Array("float32", (3,))'
        if isinstance(type, str):
            with contextlib.suppress(ConfigError):
                named_type("value")(type)  # type: ignore[call-arg]
                wanted = f'Value("{type}")'
        elif inspect.isclass(type) and issubclass(type, FieldType):
            wanted = f"an instance of it: {type.__name__}(), with its arguments if it has any"
        elif isinstance(type, FieldType):
            wanted = "a class that is a @dataclass(frozen=True)"
        raise ConfigError(f'schema["{name}"]: got {type!r}, wanted {wanted}.')


def number_name(fields: Container[str]) -> str:
    """Return the first free name for the sample's number. fields: of the dataset."""
    return next(name for name in (ID, SAMPLE_ID, NUMBER) if name not in fields)


def is_number(name: str, fields: Container[str]) -> bool:
    """Return True if a name stands for the sample's number. fields: of the dataset."""
    return name in (ID, SAMPLE_ID, NUMBER) and name not in fields


def check_dtype(what: str, dtype: Any) -> str:
    """Return the name of a supported dtype, or raise ConfigError. what: the type's name."""
    with contextlib.suppress(TypeError, ValueError):
        name = np.dtype(dtype).newbyteorder("=").name
        if dtype is not None and name in DTYPES:  # numpy reads None as float64
            return str(name)
    raise ConfigError(f"{what}: got dtype={dtype!r}, wanted one of {', '.join(sorted(DTYPES))}.")


def check_reference(what: str, of: object) -> None:
    """Raise ConfigError unless `of=` is a field's name. what: the type's name."""
    if not is_field_name(of):
        raise ConfigError(f"{what}: got of={of!r:.80}, wanted the name of a field.")
