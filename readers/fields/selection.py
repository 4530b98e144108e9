"""Which fields batches have: what users name, or what is chosen where they don't."""

from __future__ import annotations

from collections.abc import Container, Iterable, Set
from typing import TYPE_CHECKING

from penstock.cache.errors import ConfigError
from penstock.readers.fields.field_types import (
    PRESENT,
    Audio,
    ClassLabel,
    Image,
    Video,
    is_number,
    number_name,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from penstock.readers.fields.schema import Schema

LABEL = "label"
"""The classes that are handed out beside images where nobody chooses."""

LABELS = (LABEL, "labels")
"""Whole numbers of these names are taken for classes, where nothing says more of them."""

_SHOWN = 4
_UNDECODABLE = (Audio, Video)  # by anything that is built yet


def base_name(field: str) -> str:
    """The field that a companion such as "caption.present" belongs to; others are their own."""
    return field.removesuffix(PRESENT)


def stored_fields(fields: Iterable[str], schema: Container[str]) -> tuple[str, ...]:
    """The fields of a schema that these are made of, each once, in order."""
    return tuple(dict.fromkeys(base_name(each) for each in fields if not is_number(each, schema)))


def default_fields(schema: Schema, lacking: Mapping[str, int]) -> tuple[str, ...]:
    """The fields of a batch where nobody chose any.

    The first images and the classes named "label" where both are there; a caption that is found
    too must not break `for images, labels in loader`. Else all that can be handed out. What some
    samples lack isn't chosen. lacking: how many samples lack a field, of those that some lack.
    """
    whole = dict.fromkeys(name for name in schema if not lacking.get(name))  # in order
    image = next((name for name in whole if isinstance(schema[name], Image)), None)
    if image is not None and LABEL in whole and isinstance(schema[LABEL], ClassLabel):
        return image, LABEL
    return tuple(name for name in fields_handed_out(schema) if name in whole)


def image_fields(schema: Schema, fields: Iterable[str]) -> tuple[str, ...]:
    """Those of some fields, the schema's or not, that are images."""
    return tuple(name for name in fields if isinstance(schema.get(name), Image))


def class_field(schema: Schema, fields: Iterable[str]) -> str | None:
    """The first of some fields that is a class."""
    return next((name for name in fields if isinstance(schema.get(name), ClassLabel)), None)


def fields_handed_out(schema: Schema) -> tuple[str, ...]:
    """The fields that batches can have."""
    return tuple(name for name, type in schema.items() if not isinstance(type, _UNDECODABLE))


def not_chosen(schema: Schema, lacking: Mapping[str, int]) -> str:
    """What `default_fields` would choose but for the samples that lack it, as a sentence; ""
    where there is nothing."""
    chosen = default_fields(schema, lacking)
    if not any(isinstance(type, Image) for type in schema.values()):
        raw = next((name for name in schema if isinstance(schema[name], _UNDECODABLE)), None)
        if raw is not None:
            return (
                f'batches have {chosen} where nobody names fields=: "{raw}" is '
                f"{type(schema[raw]).__name__}, which nothing decodes yet. To have its bytes pass "
                f'schema={{"{raw}": Bytes()}} (of a pack: when it is packed).'
            )
    left = [name for name in default_fields(schema, {}) if name not in chosen]
    if not left:
        return ""
    told = ", ".join(f'"{name}" ({lacking[name]:,})' for name in left[:_SHOWN])
    return (
        f"batches have {chosen} where nobody names fields=: some samples lack {told}"
        f"{' and others' if len(left) > _SHOWN else ''}. To have it too, name it and what says "
        f'which have it: fields=(…, "{left[0]}", "{left[0]}{PRESENT}").'
    )


def check_names(fields: Sequence[str] | str | None) -> tuple[str, ...] | None:
    """The names that a user gave, as a tuple; None: they are left open. Whether they are there is
    checked once the schema is known. Raises ConfigError."""
    if fields is None:
        return None
    # A set has no order, and would give images and labels in another one in each process.
    is_listed = isinstance(fields, Iterable) and not isinstance(fields, Set | bytes)
    wanted = (fields,) if isinstance(fields, str) else tuple(fields) if is_listed else ()
    if not wanted or not all(isinstance(field, str) for field in wanted):
        raise ConfigError(
            f'fields: got {fields!r}, wanted names of fields, such as ("image", "label", "id").'
        )
    for place, field in enumerate(wanted):
        if field in wanted[:place]:
            raise ConfigError(f"fields: got {field!r} twice in {list(wanted)}: name it once.")
    return wanted


def check_selection(
    fields: tuple[str, ...] | None,
    schema: Schema,
    lacking: Mapping[str, int],
    *,
    url: str,
    says_why: bool = False,
    left_out: Mapping[str, str] | None = None,
) -> tuple[str, ...]:
    """The fields of a batch, in order.

    fields: as `check_names` gives them. lacking: as for `default_fields`. left_out: what is there
    and no field, and why; says_why: its format tells more where a mapping asks for it. Raises
    ConfigError for those that the dataset hasn't, that nothing decodes, and that some samples lack
    where nobody asked which; and where there is nothing that can be chosen.
    """
    there = [*schema, number_name(schema)]
    if fields is None:
        chosen = default_fields(schema, lacking)
        if not chosen:
            raise ConfigError(
                f"{url} has no field that all samples have and that can be handed out, so name "
                f"what you want by fields=. Its fields: {there}."
            )
        return chosen
    for field in fields:
        name = base_name(field)
        if name not in schema and not is_number(field, schema):
            if why := (left_out or {}).get(name):
                raise ConfigError(f"fields: {field!r} of {url} can't be a field: {why}.")
            hint = "; labels need one sub-folder a class" if field == LABEL else ""
            if says_why:
                hint = f', or see why it was left out: fields={{"{field}": "{field}"}}'
            raise ConfigError(f"fields: got {field!r}, and {url} has {there}. Ask for those{hint}.")
        if name not in schema or field.endswith(PRESENT):
            continue
        if isinstance(schema[name], _UNDECODABLE):
            kind = type(schema[name]).__name__
            raise ConfigError(
                f"fields: {field!r} is {kind}, which nothing decodes yet. Leave it out, or declare "
                f'it as Bytes, schema={{"{field}": Bytes()}} (of a pack: when it is packed), and '
                f"decode it yourself."
            )
        if lacking.get(name) and name + PRESENT not in fields:
            raise ConfigError(
                f"fields: {lacking[name]:,} samples of {url} have no {field!r}. Either add "
                f'"{name}{PRESENT}" to fields=, a bool a sample that says which have it (the '
                "others are empty or zeros), or leave the field out and give those samples one."
            )
    return fields
