"""Codecs as metadata name them: a name and a configuration each, not yet built."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

MAX_CODECS = 32
"""In one chain."""

_NUMCODECS = "numcodecs."

OBJECT_CODECS = {
    *("pickle", "json2", "msgpack2", "categorize", "vlen-utf8", "vlen-bytes", "vlen-array"),
}
"""Of Python objects; pickles run code."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecSpec:
    """A codec of a chain. name: as written, of version 2 its id. configuration: the rest of what is
    written, without it."""

    name: str
    configuration: Mapping[str, Any] = field(default_factory=dict)

    @property
    def plain_name(self) -> str:
        """Its name without "numcodecs.", which version 3 writes before some."""
        return self.name.removeprefix(_NUMCODECS)

    @property
    def is_numcodecs(self) -> bool:
        """Whether version 3 names it as one of numcodecs' own."""
        return self.name.startswith(_NUMCODECS)


def v2_specs(filters: object, compressor: object) -> tuple[CodecSpec, ...]:
    """The chain of version 2, in the order of writing. Raises ValueError, NotImplementedError."""
    listed = filters if filters is not None else []
    if not isinstance(listed, list) or len(listed) >= MAX_CODECS:
        raise ValueError(f"its filters are {_short(filters)}")
    told = [*listed, *([] if compressor is None else [compressor])]
    found = []
    for codec in told:
        if not isinstance(codec, dict) or not isinstance(codec.get("id"), str):
            raise ValueError(f"it names a codec {_short(codec)}")
        rest = {key: value for key, value in codec.items() if key != "id"}
        found.append(CodecSpec(name=codec["id"][:80], configuration=rest))
    return _checked(found)


def v3_specs(told: object) -> tuple[CodecSpec, ...]:
    """The chain of version 3, in the order of writing. Raises ValueError, NotImplementedError."""
    if not isinstance(told, list) or not 1 <= len(told) <= MAX_CODECS:
        raise ValueError(f"its codecs are {_short(told)}")
    found = []
    for codec in told:
        name: object = codec
        configuration: object = {}
        if isinstance(codec, dict):
            name, configuration = codec.get("name"), codec.get("configuration") or {}
        if not isinstance(name, str) or not isinstance(configuration, dict):
            raise ValueError(f"it names a codec {_short(codec)}")
        found.append(CodecSpec(name=name[:80], configuration=configuration))
    return _checked(found)


def _checked(codecs: list[CodecSpec]) -> tuple[CodecSpec, ...]:
    for codec in codecs:
        if codec.plain_name in OBJECT_CODECS:
            raise NotImplementedError(
                f"its codec {codec.name!r} makes Python objects or texts, which can't be a tensor"
            )
    return tuple(codecs)


def _short(value: object) -> str:
    return repr(value)[:80]
