"""Fields under other names than those that an index has for them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

from penstock.cache.errors import ConfigError
from penstock.readers.fields.field_types import PRESENT, check_field_name
from penstock.readers.fields.schema import Schema
from penstock.readers.fields.selection import base_name

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from penstock.readers.fields.columns import SampleBatch
    from penstock.readers.fields.field_types import FieldType

_Value = TypeVar("_Value")


def check_renames(names: object) -> dict[str, str]:
    """What `rename` was given: new names by the old ones. Raises ConfigError."""
    if not isinstance(names, dict) or not all(isinstance(old, str) for old in names):
        raise ConfigError(
            f"rename: got {names!r}, wanted new names of fields by the old ones, such as "
            '{"image": "pixel_values"}.'
        )
    for new in names.values():
        check_field_name(new, what="rename")
    return dict(names)


def renamed_field(name: str, names: Mapping[str, str]) -> str:
    """A field, or what says which samples have it, under its new name. names: by the old ones."""
    if name in names:
        return names[name]
    base = base_name(name)
    return name if base == name else names.get(base, base) + PRESENT


@dataclass(frozen=True, slots=True, kw_only=True)
class Naming:
    """The names of a dataset's fields. schema: under the new names; by_new, by_stored: of the
    fields that have another name than in the index, the other."""

    schema: Schema
    by_new: Mapping[str, str] = field(default_factory=dict)
    by_stored: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        schema: Schema,
        places: Mapping[str, str],
        renames: Iterable[Mapping[str, str]],
        *,
        url: str,
    ) -> Naming:
        """The names after `fields=` with names in place of places, and then each `rename`. places:
        stored names by the new ones; renames: new names by those before. Raises ConfigError."""
        own = {name: name for name in schema}
        steps = [{old: new for new, old in places.items()}, *renames]
        if len(steps[0]) < len(places):
            raise ConfigError(f"fields: got {dict(places)}, wanted each field of {url} once.")
        for step in steps:
            unknown = [old for old in step if old not in own]
            if unknown:
                raise ConfigError(
                    f"fields: got {unknown[0]!r}, and {url} has {list(own)}: name one of those"
                    + (", or a place where a field lies." if step is steps[0] else ".")
                )
            after = {step.get(name, name): stored for name, stored in own.items()}
            if len(after) < len(own):
                twice = next(new for old, new in step.items() if new in own and new not in step)
                raise ConfigError(
                    f"fields: {url} has a field {twice!r} already: give that another name too."
                )
            own = after
        by_stored = {stored: new for new, stored in own.items() if new != stored}

        def renamed(type: FieldType) -> FieldType:
            of: Any = getattr(type, "of", None)
            return type if of not in by_stored else replace(type, of=by_stored[of])  # type: ignore[arg-type]

        return cls(
            schema=Schema({by_stored.get(n, n): renamed(type) for n, type in schema.items()})
            if by_stored
            else schema,
            by_new={new: stored for stored, new in by_stored.items()},
            by_stored=by_stored,
        )

    @property
    def is_plain(self) -> bool:
        """Whether all names are those of the index."""
        return not self.by_new

    def stored_name(self, name: str) -> str:
        """A field's name in the index, by its new one."""
        return renamed_field(name, self.by_new)

    def new_name(self, name: str) -> str:
        """A field's new name, by that in the index."""
        return renamed_field(name, self.by_stored)

    def stored(self, fields: Sequence[str] | None) -> tuple[str, ...] | None:
        """The names of several fields in the index."""
        return None if fields is None else tuple(map(self.stored_name, fields))

    def new(self, values: Mapping[str, _Value]) -> dict[str, _Value]:
        """Values by field, under the new names."""
        return {self.new_name(name): value for name, value in values.items()}

    def batch(self, batch: SampleBatch) -> SampleBatch:
        """Samples under the new names."""
        return replace(batch, columns=self.new(batch.columns), present=self.new(batch.present))


PLAIN = Naming(schema=Schema({}))
"""Of a dataset that isn't open."""
