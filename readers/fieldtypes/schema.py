"""Describe a dataset's fields: their names, order and types, and which of them a batch has.

`Schema` maps names to types. `Settling` completes types that a schema leaves open, after all
samples were seen: lengths that differ make a type ragged, and a dtype or a number of dimensions
that differs is an error, as no batch could hold both. The fields of a batch are those that the user
selects, else a default choice. `Naming` translates between the names that a user gave and those in
the index.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

from penstock.cache import ConfigError, DatasetError
from penstock.readers.fieldtypes.field_type import (
    MASK,
    PRESENT,
    SIZE,
    FieldType,
    FieldTypes,
    check_field_name,
    check_field_type,
    from_json,
    is_field_name,
    is_number,
    named_type,
    number_name,
)
from penstock.readers.types import Facts, array_codec

if TYPE_CHECKING:
    from penstock.readers.fieldtypes.columns import SampleBatch

MAX_FIELDS = 4096


class Schema(Mapping[str, FieldType]):
    """The named, typed fields of a sample, in order; immutable, and compared by value."""

    __slots__ = ("_fields",)

    def __init__(self, fields: FieldTypes) -> None:
        """Check names and types. Raises ConfigError for invalid ones, and for masks, boxes and
        keypoints that refer to a field that isn't an image."""
        for name, type in fields.items():
            check_field_name(name, what="schema")
            check_field_type(name, type)
        self._fields = dict(fields)
        for name, type in fields.items():
            of, wanted = type.reference, type.refers_to
            found = fields.get(of) if isinstance(of, str) else None
            if of is not None and wanted is not None and (found is None or found.kind != wanted):
                raise ConfigError(
                    f'schema["{name}"]: got {type!r}, but "{of}" is no field of type '
                    f"{named_type(wanted).__name__}. Fields: {list(fields)}."
                )

    def __getitem__(self, name: str) -> FieldType:
        return self._fields[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._fields)

    def __len__(self) -> int:
        return len(self._fields)

    def __hash__(self) -> int:
        return hash(tuple(self._fields.items()))

    def __eq__(self, other: object) -> bool:
        """Compare types and order, which is that of a batch."""
        return isinstance(other, Schema) and list(self.items()) == list(other.items())

    def __repr__(self) -> str:
        return f"Schema({self._fields})"

    def only(self, names: Mapping[str, Any] | tuple[str, ...]) -> Schema:
        """Return a schema of some of the fields, in the order of names. The fields to which they
        refer must be among them."""
        return Schema({name: self._fields[name] for name in names})

    @property
    def unsettled(self) -> tuple[str, ...]:
        """The fields whose types are known in full only after their data were seen."""
        return tuple(name for name, type in self.items() if not type.is_settled)

    def class_names(self) -> tuple[str, ...]:
        """Return the class names of the only field of classes; empty if there is none, or
        several."""
        found = [names for t in self.values() if (names := t.class_names) or t.is_class]
        return found[0] if len(found) == 1 else ()

    def to_json(self) -> list[dict[str, Any]]:
        """Return the schema as manifests store it: a list, to keep the order."""
        return [{"name": name, **type.to_json()} for name, type in self.items()]

    @classmethod
    def from_json(cls, values: Any) -> Schema:
        """Return the schema that a manifest stores. The values are untrusted. Raises ValueError."""
        if not isinstance(values, list) or not 1 <= len(values) <= MAX_FIELDS:
            raise ValueError("its schema isn't a list of fields")
        fields: dict[str, FieldType] = {}
        for value in values:
            if not isinstance(value, dict) or not is_field_name(value.get("name")):
                raise ValueError(f"its schema has a field {str(value)[:80]!r}")
            if value["name"] in fields:
                raise ValueError(f"its schema has the field {value['name']!r} twice")
            fields[value["name"]] = from_json({k: v for k, v in value.items() if k != "name"})
        try:
            return cls(fields)
        except ConfigError as error:
            raise ValueError(str(error)) from error


_NOTHING = Facts(0, 0, 0, (0,), "<f4")  # the sample of a field that no sample has


class Settling:
    """Settles the types of a schema from the facts of all good samples."""

    def __init__(self, schema: Schema) -> None:
        self._schema = schema
        self._open = {*schema.unsettled}
        self._found: dict[str, FieldType] = {}
        self._first: dict[str, str] = {}

    def add(self, facts: Mapping[str, Facts], *, sample: str) -> None:
        """Add the facts of one good sample. sample: its name in messages. Raises DatasetError if a
        field has two dtypes or numbers of dimensions."""
        for name in self._open & facts.keys():
            each, type = facts[name], self._schema[name]
            codec = array_codec(each.codec)
            shown = f"{codec.name if codec else each.codec} of shape {each.shape} in {sample}"
            first = self._first.setdefault(name, shown)
            try:
                self._found[name] = type.settled(self._found.get(name), each, field=name)
            except ValueError as error:
                raise DatasetError(
                    f'The field "{name}" is {first}, and {shown}: '
                    "wanted one dtype and number of dimensions. Convert the others, or choose one "
                    f"type and quarantine the others: {error}."
                ) from None

    def schema(self) -> Schema:
        """Return the settled schema. A field that no sample has becomes an empty float32 array, or
        a uint8 mask."""
        found = {
            name: self._found.get(name) or type.settled(None, _NOTHING, field=name)
            for name, type in self._schema.items()
        }
        return Schema(found)


LABEL = "label"
"""The classes that a batch has by default, together with images."""

LABELS = (LABEL, "labels")
"""Integers with these names are treated as classes, unless the schema says otherwise."""

_SHOWN = 4


def base_name(field: str, schema: Container[str] = ()) -> str:
    """Return the field that a companion such as "caption.present" or "image.size" belongs to; other
    names, and those of the schema, are returned as they are."""
    for suffix in (PRESENT, SIZE, MASK):
        if field.endswith(suffix) and field not in schema:
            return field.removesuffix(suffix)
    return field


def stored_fields(fields: Iterable[str], schema: Container[str]) -> tuple[str, ...]:
    """Return the fields of a schema that these are read from, each once, in order."""
    names = (base_name(each, schema) for each in fields if not is_number(each, schema))
    return tuple(dict.fromkeys(names))


def default_fields(schema: Schema, lacking: Mapping[str, int]) -> tuple[str, ...]:
    """Return the fields of a batch if the user chose none.

    With images and a field of classes named "label", these are the first images and "label"; an
    additional caption must not break `for images, labels in loader`. Otherwise all fields but sound
    and video. A field that some samples lack isn't chosen. lacking: the number of samples that lack
    a field, for fields that some lack.

    With images and targets (classes or keypoints of boxes, captions), these are the first images,
    the boxes and the targets; areas, masks and so on must be named.
    """
    complete = [name for name in schema if not lacking.get(name)]
    image = next((name for name in complete if schema[name].is_image), None)
    targets = [name for name in complete if schema[name].is_target]
    if image is not None and targets:
        owners = [of for name in targets if (of := schema[name].reference) in complete]
        return tuple(dict.fromkeys([image, *owners, *targets]))
    if image is not None and LABEL in complete and schema[LABEL].is_class:
        return image, LABEL
    return tuple(name for name in complete if schema[name].is_default)


def image_fields(schema: Schema, fields: Iterable[str]) -> tuple[str, ...]:
    """Return those of the fields that are images; names may be missing from the schema."""
    return tuple(name for name in fields if name in schema and schema[name].is_image)


def class_field(schema: Schema, fields: Iterable[str]) -> str | None:
    """Return the first of the fields that is a class."""
    return next((name for name in fields if name in schema and schema[name].is_class), None)


def not_chosen(schema: Schema, lacking: Mapping[str, int]) -> str:
    """Return a sentence about the fields that `default_fields` leaves out because some samples lack
    them, or because nothing decodes them; "" if there are none."""
    chosen = default_fields(schema, lacking)
    left = [name for name in default_fields(schema, {}) if name not in chosen]
    raw = [name for name in schema if not schema[name].is_default]
    if raw and not image_fields(schema, schema):
        reason = f'nothing decodes "{raw[0]}", but batches may have its bytes'
    elif left:
        counts = ", ".join(f'"{name}" ({lacking[name]:,})' for name in left[:_SHOWN])
        reason = (
            f"some samples lack {counts}{' and others' if len(left) > _SHOWN else ''}. To have it "
            "too, name it together with the mask of samples that have it: "
            f'fields=(…, "{left[0]}", "{left[0]}{PRESENT}")'
        )
    else:
        return ""
    return f"batches have {chosen} unless fields= is given: {reason}."


def check_names(fields: Sequence[str] | str | None) -> tuple[str, ...] | None:
    """Return the names that a user gave as a tuple, or None if there were none. Whether the dataset
    has them is checked when its schema is known. Raises ConfigError."""
    if fields is None:
        return None
    # A set has no order: each process would deliver the fields in another one.
    is_listed = isinstance(fields, Iterable) and not isinstance(fields, Set | bytes)
    wanted = (fields,) if isinstance(fields, str) else tuple(fields) if is_listed else ()
    are_names = all(isinstance(field, str) for field in wanted)
    if not wanted or not are_names or len({*wanted}) < len(wanted):
        raise ConfigError(
            f"fields: got {fields!r}, wanted names of fields, each once, such as "
            '("image", "label", "id").'
        )
    return wanted


def check_selection(
    fields: tuple[str, ...],
    schema: Schema,
    lacking: Mapping[str, int],
    *,
    url: str,
    has_reasons: bool = False,
    left_out: Mapping[str, str] | None = None,
) -> tuple[str, ...]:
    """Return the fields of a batch, in order.

    fields: of the user, else the default ones. lacking: as for `default_fields`. left_out: why some
    names can't be fields. has_reasons: the format reports reasons if a mapping names the field.
    Raises ConfigError for fields that the dataset lacks, and that some samples lack if their mask
    isn't selected; and if no field can be chosen.
    """
    available = [*schema, number_name(schema)]
    if not fields:
        raise ConfigError(
            f"{url} has no field that all samples have and that is decoded, so choose some with "
            f"fields=. Its fields: {available}."
        )
    for field in fields:
        name = base_name(field, schema)
        if name not in schema and not is_number(field, schema):
            hint = "; labels need one sub-folder per class" if field == LABEL else ""
            if has_reasons:
                hint = f', or see why it was left out: fields={{"{field}": "{field}"}}'
            if why := (left_out or {}).get(name):
                hint = f" ({field!r} can't be a field: {why})"
            added = [
                name + suffix for name in image_fields(schema, schema) for suffix in (SIZE, MASK)
            ]
            added += [name + PRESENT for name in lacking if name in schema]
            near = difflib.get_close_matches(field, [*available, *added], n=1)
            raise ConfigError(
                f"fields: got {field!r}, but {url} has {available}"
                f"{f', and on request {added}' if added else ''}. "
                f"{f'Did you mean {near[0]!r}? ' if near else ''}Choose some of those{hint}."
            )
        images = image_fields(schema, fields)
        if name != field and not field.endswith(PRESENT) and name not in images:
            raise ConfigError(
                f"fields: got {field!r}, which batches have in addition to selected images. "
                f'Selected images: {[*images]}. Add "{name}" if it is one, or leave this out.'
            )
        if lacking.get(field) and field + PRESENT not in fields:
            raise ConfigError(
                f"fields: {lacking[field]:,} samples of {url} have no {field!r}. Either add "
                f'"{field}{PRESENT}" to fields=, one bool per sample that marks which have it (the '
                "others are empty or zeros), or leave the field out, or add it to those samples."
            )
    return fields


_Value = TypeVar("_Value")


def check_renames(names: object) -> dict[str, str]:
    """Check the argument of `rename`: new names by the old ones. Raises ConfigError."""
    if not isinstance(names, dict) or not all(isinstance(old, str) for old in names):
        raise ConfigError(
            f"rename: got {names!r}, wanted new names of fields by the old ones, such as "
            '{"image": "pixel_values"}.'
        )
    for new in names.values():
        check_field_name(new, what="rename")
    return dict(names)


def renamed_field(name: str, names: Mapping[str, str]) -> str:
    """Return a field, or the mask of samples that have it, under its new name. names: new names by
    the old ones."""
    if name in names:
        return names[name]
    base = base_name(name)
    return name if base == name else names.get(base, base) + name[len(base) :]


@dataclass(frozen=True, slots=True, kw_only=True)
class Naming:
    """The names of a dataset's fields. schema: under the new names. by_new, by_stored: for fields
    whose name differs from the index, the other name."""

    schema: Schema
    by_new: Mapping[str, str] = dataclasses.field(default_factory=dict)
    by_stored: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(
        cls, schema: Schema, places: Mapping[str, str], steps: Iterable[Mapping[str, str]], url: str
    ) -> Naming:
        """Return the names after a mapping for `fields=` and then each `rename`. places: stored
        names by the new ones. steps: new names by the previous ones. Raises ConfigError."""
        own = {name: name for name in schema}
        first = {old: new for new, old in places.items()}
        if len(first) < len(places):
            raise ConfigError(f"fields: got {dict(places)}, wanted each field of {url} once.")
        for step in (first, *steps):
            unknown = [old for old in step if old not in own]
            if unknown:
                raise ConfigError(
                    f"fields: got {unknown[0]!r}, but {url} has {list(own)}: name one of those"
                    + (", or a place where a field lies." if step is first else ".")
                )
            after = {step.get(name, name): stored for name, stored in own.items()}
            if len(after) < len(own):
                raise ConfigError(
                    f"fields: {dict(step)} gives two fields of {url} one name: rename both."
                )
            own = after
        by_stored = {stored: new for new, stored in own.items() if new != stored}
        schema = Schema({by_stored.get(n, n): t.renamed(by_stored) for n, t in schema.items()})
        by_new = {new: stored for stored, new in by_stored.items()}
        return cls(schema=schema, by_new=by_new, by_stored=by_stored)

    @property
    def is_plain(self) -> bool:
        """Return True if all names are those of the index."""
        return not self.by_new

    def stored_name(self, name: str) -> str:
        """Return the name in the index for a new name."""
        return renamed_field(name, self.by_new)

    def new_name(self, name: str) -> str:
        """Return the new name for a name in the index."""
        return renamed_field(name, self.by_stored)

    def stored(self, fields: Sequence[str] | None) -> tuple[str, ...] | None:
        """Return the names of several fields in the index."""
        return None if fields is None else tuple(map(self.stored_name, fields))

    def new(self, values: Mapping[str, _Value]) -> dict[str, _Value]:
        """Return values by field under the new names."""
        return {self.new_name(name): value for name, value in values.items()}

    def batch(self, batch: SampleBatch) -> SampleBatch:
        """Return samples under the new names."""
        if self.is_plain:
            return batch
        return replace(batch, columns=self.new(batch.columns), present=self.new(batch.present))


PLAIN = Naming(schema=Schema({}))
"""The naming of a dataset that isn't open."""
