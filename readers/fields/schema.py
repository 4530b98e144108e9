"""A schema: the fields of a dataset's samples, by name and in order, each with its type."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

from penstock.cache.errors import ConfigError
from penstock.readers.fields.field_types import (
    FIELD_TYPES,
    Array,
    Boxes,
    ClassLabel,
    FieldType,
    Image,
    Mask,
    MultiLabel,
    check_field_name,
    from_json,
    is_field_name,
    to_json,
)

MAX_FIELDS = 4096
_Type = TypeVar("_Type")


class Schema(Mapping[str, FieldType]):
    """The named, typed fields of a sample, in order. It never changes, and equal ones are equal."""

    __slots__ = ("_fields",)

    def __init__(self, fields: Mapping[str, FieldType]) -> None:
        """Raises ConfigError for names and types that can't be, and for masks, boxes and keypoints
        of what isn't an image."""
        for name, type in fields.items():
            check_field_name(name, what="schema")
            if not isinstance(type, tuple(FIELD_TYPES.values())):
                raise ConfigError(
                    f'schema["{name}"]: got {type!r}, wanted a field type such as Image() or '
                    'Array("float32", (3,)).'
                )
        self._fields = dict(fields)
        self._check_references()

    def _check_references(self) -> None:
        for name, type in self._fields.items():
            of = getattr(type, "of", None)
            if of is None:
                continue
            wanted = Boxes if isinstance(type, Array) else Image
            if not isinstance(self._fields.get(of), wanted):
                raise ConfigError(
                    f'schema["{name}"]: got {type!r}, and "{of}" is no field of type '
                    f"{wanted.__name__} here. Fields: {list(self._fields)}."
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
        """Order counts: it is that of a batch."""
        return isinstance(other, Schema) and list(self.items()) == list(other.items())

    def __repr__(self) -> str:
        return f"Schema({self._fields})"

    def __reduce__(self) -> tuple[Any, ...]:
        return Schema, (self._fields,)

    def of_type(self, kind: type[_Type]) -> dict[str, _Type]:
        """The fields of one type, in order."""
        return {name: type for name, type in self.items() if isinstance(type, kind)}

    def only(self, names: Mapping[str, Any] | tuple[str, ...]) -> Schema:
        """Some of the fields, in the order of names; references to others must stay inside."""
        return Schema({name: self._fields[name] for name in names})

    @property
    def unsettled(self) -> tuple[str, ...]:
        """The fields whose type isn't known in full before their data were seen."""
        return tuple(
            name
            for name, type in self.items()
            if isinstance(type, Array | Mask) and not type.is_settled
        )

    def class_names(self) -> tuple[str, ...]:
        """The names of the only field of classes; empty where there is none, or several."""
        found = [t.names for t in self.values() if isinstance(t, ClassLabel | MultiLabel)]
        return found[0] if len(found) == 1 else ()

    def to_json(self) -> list[dict[str, Any]]:
        """As a manifest has it: a list, as the order counts."""
        return [{"name": name, **to_json(type)} for name, type in self.items()]

    @classmethod
    def from_json(cls, values: Any) -> Schema:
        """What a manifest says, which may come from anybody. Raises ValueError."""
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
