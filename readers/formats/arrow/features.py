"""What Hugging Face's `Features` say of columns, as they stand in a schema's metadata."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from penstock.cache.errors import ConfigError
from penstock.readers.fields.field_types import (
    Array,
    Audio,
    ClassLabel,
    FieldType,
    Image,
    Video,
)

KEY = b"huggingface"
_MAX_BYTES = 2**26
_MEDIA: Mapping[str, FieldType] = {"Image": Image(), "Audio": Audio(), "Video": Video()}
_ARRAYS = {f"Array{n}D": n for n in (2, 3, 4, 5)}


@dataclass(frozen=True, slots=True)
class Feature:
    """What the features say of one column. type: where they tell; refusal: why it can't be a
    field."""

    type: FieldType | None = None
    refusal: str | None = None


def features_of(metadata: Mapping[bytes, bytes] | None) -> dict[str, Feature]:
    """The features by column, those that say more than the column's own type. Raises ValueError for
    what isn't `Features`."""
    told = (metadata or {}).get(KEY)
    if told is None:
        return {}
    if len(told) > _MAX_BYTES:
        raise ValueError(f"its features take {len(told):,} bytes")
    try:
        columns = json.loads(told)["info"]["features"]
        return {name: _feature(each) for name, each in columns.items()}
    except (KeyError, TypeError, AttributeError, RecursionError, ConfigError) as error:
        raise ValueError(f"its features can't be understood ({error})") from error


def _feature(told: Any) -> Feature:
    if not isinstance(told, Mapping):  # a list of something, or a dict of columns
        return Feature()
    kind = str(told.get("_type"))
    if kind in _MEDIA:
        return Feature(_MEDIA[kind])
    if kind == "ClassLabel":
        return Feature(ClassLabel(tuple(told.get("names") or ())))
    if kind in _ARRAYS:
        shape = tuple(told["shape"])
        if len(shape) != _ARRAYS[kind]:
            raise ValueError(f"{kind} of shape {shape}")
        return Feature(Array(told["dtype"], shape))
    if kind in ("Translation", "TranslationVariableLanguages"):
        return Feature(refusal="it holds translations: texts by language")
    return Feature()
