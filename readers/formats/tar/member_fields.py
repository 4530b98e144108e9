"""Map the name of an archive's member to a sample's key and a field: "left.png" is image "left".

The key is the path up to the first dot of its last part, as in WebDataset. After that dot, the last
extension gives the kind of content, and the part before it is the field's name. Without such a
part, the field has the usual name of its kind. Members of unknown kinds are never opened:
unpickling would run code.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from penstock.readers.fieldtypes import PRESENT, is_field_name
from penstock.readers.files import FIELDS_BY_KIND, KINDS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from penstock.readers.fieldtypes import FieldType
    from penstock.readers.files import Kind

_KEY = re.compile(rb"((?:.*/)?[^./][^./]*)\.([^/]*)", re.S)


def split_key(name: bytes) -> tuple[bytes, str] | None:
    """Return (key, extension in lower case), or None for a name without an extension.

    The key is the path up to the first dot of its last part; the extension is the rest.
    """
    found = _KEY.fullmatch(name)
    if found is None:
        return None
    return found[1], found[2].decode("utf-8", "surrogateescape").lower()


@dataclass(frozen=True, slots=True)
class MemberField:
    """The field that a member is, or whose values it holds.

    name: of the field; for json, the prefix of its keys' fields, or "".
    """

    name: str
    kind: Kind

    @property
    def is_value(self) -> bool:
        """Return True if the member holds values, which are read when the archive is listed."""
        return self.kind in ("class", "json")


@dataclass(frozen=True, slots=True)
class RequestedFields:
    """The fields that the user asked for.

    types: given types, by field. names: fields by their source, which is an extension of members, a
    key of json, or the usual name of a kind. If it isn't empty, only these are read.
    """

    types: Mapping[str, FieldType] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)

    def wants(self, extension: str) -> bool:
        """Return True if members with this extension may be, or hold, a requested field."""
        if not self.names or extension in self.names:
            return True
        known = member_field(extension)
        if known is None:
            return False
        # A source that isn't an extension of members may be a key of json.
        has_keys = known.kind == "json" and any(member_field(each) is None for each in self.names)
        return has_keys or (bool(known.name) and known.name in self.names)

    def wants_key(self, json: MemberField, key: str) -> bool:
        """Return True if a key of json is, or holds, a requested field."""
        if not self.names or json.name in self.names.values():
            return True
        full = f"{json.name}.{key}" if json.name else key
        return any(f"{each}.".startswith(f"{full}.") for each in self.names)

    def field_of(self, extension: str) -> MemberField | None:
        """Return the field of an extension (in lower case), or None if it isn't read."""
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
    """Return the default field of an extension (in lower case), or None if it is unknown."""
    stem, _, suffix = extension.rpartition(".")
    kind = "class" if suffix == "cls" else KINDS.get(suffix)
    if kind is None:
        return None
    if not stem:
        return MemberField(FIELDS_BY_KIND[kind], kind)
    try:
        stem.encode()
    except UnicodeEncodeError:
        return None
    is_name = is_field_name(stem) and not stem.endswith(PRESENT)
    return MemberField(stem, kind) if is_name else None
