"""Map the name of an archive's member to a sample's key and a field: "left.png" is image "left".

The key is the path up to the first dot of its last part, as in WebDataset. The last part says what
the member holds, what stands before that is the field's name; without that it has the usual name of
its kind. Members of any other kind are never opened: unpickling runs code.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from penstock.readers.fields import (
    PRESENT,
    Array,
    Audio,
    Bytes,
    Image,
    Text,
    Video,
    is_field_name,
    masks_by_name,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from penstock.readers.fields import FieldType

# Those that no decoder here takes are named too: each is refused with what to do, not passed over.
IMAGE_EXTENSIONS = frozenset(
    (
        *("avif", "bmp", "gif", "heic", "heif", "j2c", "j2k", "jp2", "jpe", "jpeg", "jpg", "jxl"),
        *("pbm", "pgm", "png", "pnm", "ppm", "tif", "tiff", "webp"),
    )
)
"""Extensions of images."""

_KEY = re.compile(rb"((?:.*/)?[^./][^./]*)\.([^/]*)", re.S)


def split_key(name: bytes) -> tuple[bytes, str] | None:
    """(key, extension in lower case): the path up to the first dot of its last part, and what
    follows; None for a name without."""
    found = _KEY.fullmatch(name)
    return (
        None if found is None else (found[1], found[2].decode("utf-8", "surrogateescape").lower())
    )


def member_extension(name: bytes) -> str:
    """What follows a name's key; "" without one."""
    found = split_key(name)
    return "" if found is None else found[1]


Kind = Literal["image", "text", "array", "audio", "video", "class", "json", "given"]
"""What a member holds. class, json: values, which are known once it is listed. given: of a kind
that nothing is known of, and a user asks for it: bytes, unless a schema says more."""

_AUDIO = ("wav", "flac", "mp3", "ogg", "oga", "opus", "m4a", "aac", "aif", "aiff", "au", "wma")
_VIDEO = ("mp4", "m4v", "webm", "mkv", "mov", "avi", "mpg", "mpeg", "flv", "wmv", "ogv")
# By extension: the kind, and the field's name where the member has none of its own.
_KINDS: Mapping[str, tuple[Kind, str]] = {
    **dict.fromkeys(IMAGE_EXTENSIONS, ("image", "image")),
    **dict.fromkeys(_AUDIO, ("audio", "audio")),
    **dict.fromkeys(_VIDEO, ("video", "video")),
    "txt": ("text", "caption"),
    "npy": ("array", "array"),
    "cls": ("class", "label"),
    "json": ("json", ""),
}
_TYPES: Mapping[Kind, FieldType] = {
    "image": Image(),
    "text": Text(),
    "array": Array(),
    "audio": Audio(),
    "video": Video(),
    "given": Bytes(),
}


@dataclass(frozen=True, slots=True)
class MemberField:
    """What a member is. name: of the field; of json before its keys, with a dot, or ""."""

    name: str
    kind: Kind

    @property
    def is_value(self) -> bool:
        """Whether it holds values, which are noted when the member is listed."""
        return self.kind in ("class", "json")


@dataclass(frozen=True, slots=True)
class RequestedFields:
    """What a user says of fields. types: of some; names: of fields, by the extension of members,
    the key of json or the usual name that each is: nothing else is read then; empty: everything
    is."""

    types: Mapping[str, FieldType] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)

    def wants(self, extension: str) -> bool:
        """Whether a member may be one of the fields, or hold one."""
        if not self.names or extension in self.names:
            return True
        known = member_field(extension)
        if known is None:
            return False
        is_key = known.kind == "json" and any(map(_is_key, self.names))
        return is_key or (bool(known.name) and known.name in self.names)

    def wants_key(self, json: MemberField, key: str) -> bool:
        """Whether what json has under a key is one of the fields, or holds one."""
        if not self.names or json.name in self.names.values():
            return True
        full = f"{json.name}.{key}" if json.name else key
        return any(f"{each}.".startswith(f"{full}.") for each in self.names)

    def field_of(self, extension: str) -> MemberField | None:
        """The field that a member is, by its extension in lower case; None for what isn't read."""
        known = member_field(extension)
        name = self.names.get(extension)
        if name is None and known is not None and known.name:
            name = self.names.get(known.name)
        if name is not None:
            return MemberField(name, "given" if known is None else known.kind)
        if known is None and extension in self.types:
            return MemberField(extension, "given")
        return known


@functools.lru_cache(maxsize=256)
def member_field(extension: str) -> MemberField | None:
    """The field that a member is, by its extension in lower case; None for what isn't read."""
    stem, _, suffix = extension.rpartition(".")
    if suffix not in _KINDS:
        return None
    kind, usual = _KINDS[suffix]
    if not stem:
        return MemberField(usual, kind)
    is_name = is_field_name(stem) and not stem.endswith(PRESENT)
    return MemberField(stem, kind) if is_name and _is_unicode(stem) else None


def _is_key(where: str) -> bool:
    """Whether what a user names may be a key of json: it is no member's extension."""
    return member_field(where) is None


def span_types(
    kinds: Mapping[str, Kind],
    extensions: Mapping[str, Iterable[str]],
    given: Mapping[str, FieldType],
) -> tuple[dict[str, FieldType], list[str]]:
    """The types of fields that lie in members, and what was decided, a sentence each.

    kinds: by field; extensions: of its members, without names; given: types that a schema says.
    """
    types = {name: given.get(name) or _TYPES[kind] for name, kind in kinds.items()}
    masks, notes = masks_by_name(types, extensions, given=given)
    return {**types, **masks}, notes


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
