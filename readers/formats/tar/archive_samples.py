"""Collect the samples of one archive from its headers: keys, and the members that are fields.

A sample consists of the members of one archive whose names share a key: the path up to the first
dot of its last part, as in WebDataset. Members of a key need not be adjacent. After that dot, the
last extension gives the kind of content, and the part before it is the field's name: "left.png" is
the image "left". Without such a part, the field has the usual name of its kind.

Labels and json are read in the same pass; all other members are only located. Members of unknown
kinds are never opened: unpickling would run code.
"""

from __future__ import annotations

import functools
import os
import re
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from penstock.cache import DatasetError
from penstock.readers.fieldtypes import PRESENT, FieldTypes, is_field_name, json_value
from penstock.readers.files import FIELDS_BY_KIND, KINDS, Kind, printable, unsafe_reason
from penstock.readers.formats.tar.tar_headers import TarMember, archive_members
from penstock.readers.origin import QuarantineEntry
from penstock.readers.types import Rejection

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from penstock.readers.formats.unindexed_files import DataFile
    from penstock.readers.origin import Entry

NO_KEY = "(no key)"
"""Counts members without an extension among the skipped ones."""

_KEY = re.compile(rb"((?:.*/)?[^./][^./]*)\.([^/]*)", re.S)
_SHOWN = 32
_LABEL_BYTES, _JSON_BYTES = 256, 16 * 2**20
_INTEGER = re.compile(rb"[+-]?[0-9]{1,19}")
_INT64 = range(-(2**63), 2**63)


def split_key(name: bytes) -> tuple[bytes, str] | None:
    """Return (key, extension in lower case), or None for a name without an extension.

    The key is the path up to the first dot of its last part; the extension is the rest.
    """
    if (found := _KEY.fullmatch(name)) is None:
        return None
    return found[1], found[2].decode("utf-8", "surrogateescape").lower()


class MemberField(NamedTuple):
    """The field that a member is, or whose values it holds.

    name: of the field; for json, the prefix of its keys' fields, or "".
    """

    name: str
    kind: Kind

    @property
    def is_value(self) -> bool:
        """Return True if the member holds values, which are read when the archive is listed."""
        return self.kind in ("class", "json")


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


@dataclass(frozen=True, slots=True)
class RequestedFields:
    """The fields that the user asked for.

    types: given types, by field. names: fields by their source, which is an extension of members, a
    key of json, or the usual name of a kind. If it isn't empty, only these are read.
    """

    types: FieldTypes = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)

    def field_of(self, extension: str) -> MemberField | None:
        """Return the field of an extension (in lower case), or None if it isn't read."""
        known = member_field(extension)
        name = self.names.get(extension)
        if name is None and known is not None and known.name:
            name = self.names.get(known.name)
        if name is not None:
            return MemberField(name, "given" if known is None else known.kind)
        if self.names:
            # A source that isn't an extension of members may be a key of json.
            is_json = known is not None and known.kind == "json"
            return known if is_json and not all(map(member_field, self.names)) else None
        if known is None and extension in self.types:
            return MemberField(extension, "given")
        return known

    def wants_key(self, json: MemberField, key: str) -> bool:
        """Return True if a key of json is, or holds, a requested field."""
        if not self.names or json.name in self.names.values():
            return True
        full = f"{json.name}.{key}" if json.name else key
        return any(f"{each}.".startswith(f"{full}.") for each in self.names)


class Member(NamedTuple):
    """A member that is read. start, end: its bytes in the archive, end exclusive. value: its
    content, if it holds values, or a Rejection."""

    field: MemberField
    extension: str
    name: bytes
    start: int
    end: int
    value: Any


class ArchiveSample(NamedTuple):
    """The members of one key. name, start: of the member after which the sample is named: its first
    image, if it has one."""

    name: bytes
    start: int
    members: Mapping[MemberField, Member]


@dataclass(slots=True, kw_only=True)
class ArchiveSamples:
    """The samples of one archive, sorted by their first bytes.

    fields: the extensions of each field's members. passed_over: counts of skipped members, by
    extension.
    """

    entry: Entry
    samples: list[ArchiveSample] = field(default_factory=list)
    fields: dict[MemberField, set[str]] = field(default_factory=dict)
    quarantined: list[QuarantineEntry] = field(default_factory=list)
    passed_over: Counter[str] = field(default_factory=Counter)

    def path(self, name: bytes) -> bytes:
        """Return a member's name below the dataset's root, such as train-000.tar/dog.jpg."""
        return self.entry.name + b"/" + name

    def refuse(self, name: bytes, reason: str) -> None:
        """Quarantine the sample of a member."""
        self.quarantined.append(QuarantineEntry(name=self.path(name), reason=reason))

    def add(self, members: Sequence[Member]) -> None:
        """Add the members of one key as a sample, or quarantine them."""
        own = next((each for each in members if each.field.kind == "image"), members[0])
        by_name: dict[str, Member] = {}
        for each in members:
            other = by_name.setdefault(each.field.name, each)
            if other is not each:
                a, b = sorted(map(_shown, (other.extension, each.extension)))
                self.refuse(
                    own.name,
                    f'two members of one key ({a}, {b}) would be the field "{each.field.name}": a '
                    "key ends at the first dot of a name. Rename one, or name each field, "
                    f'fields={{"{each.field.name}": "{a}", "other": "{b}"}}',
                )
                return
        for each in members:
            self.fields.setdefault(each.field, set()).add(each.extension)
        bad = next((each.value for each in members if isinstance(each.value, Rejection)), None)
        if bad is not None:
            self.refuse(own.name, bad.reason)
        else:
            sample = ArchiveSample(own.name, own.start, {each.field: each for each in members})
            self.samples.append(sample)


def archive_samples(entry: Entry, opened: DataFile, requested: RequestedFields) -> ArchiveSamples:
    """Read an archive's headers, labels and json.

    Raises DatasetError (the archive is truncated, damaged or compressed), IndexChangedError,
    FetchError.
    """
    found = ArchiveSamples(entry=entry)
    keys: dict[bytes, list[Member]] = {}
    is_empty = True
    for each in archive_members(opened.read_at, entry.size_bytes, shown=printable(entry.name)):
        is_empty = False
        name = each.name
        while name.startswith(b"./"):  # as `tar -c .` writes names
            name = name[2:].lstrip(b"/")
        reason = each.refused or unsafe_reason(name) or (None if name else "it has no name")
        key, extension = split_key(name) or (b"", "")
        if reason is None and extension == "tar":
            reason = "a tar inside a tar: extract it, and add it as an archive of its own"
        if reason is not None:
            found.refuse(each.name, reason)
        elif not key or (name.startswith(b"__") and name.endswith(b"__")):
            # No dot, a dot-file, or a name that WebDataset reserves.
            found.passed_over[NO_KEY] += 1
        elif (field := requested.field_of(extension)) is not None:
            # Values are read here, because a remote archive buffers only the bytes around its
            # position.
            value = _read_value(each, field, opened, requested) if field.is_value else None
            member = Member(field, extension, each.name, each.start, each.end, value)
            keys.setdefault(key, []).append(member)
        elif not requested.names:
            found.passed_over[_shown(extension)] += 1
    if is_empty:
        empty = QuarantineEntry(name=entry.name, reason="an archive without members")
        found.quarantined.append(empty)
    for members in keys.values():
        found.add(members)
    found.samples.sort(key=lambda sample: sample.start)
    return found


def _shown(extension: str) -> str:
    return printable(os.fsencode(extension))[:_SHOWN]


def _read_value(
    member: TarMember, field: MemberField, opened: DataFile, requested: RequestedFields
) -> Any:
    """Return the content of a label or a json member, or the reason why it can't be read."""
    size_bytes = member.end - member.start
    if field.kind == "class":
        text = opened.read_at(member.start, min(size_bytes, _LABEL_BYTES + 1)).strip()
        return _label(text, field, requested)
    if size_bytes > _JSON_BYTES:
        return Rejection(f"its json has {size_bytes:,} bytes, wanted at most {_JSON_BYTES:,}")
    try:
        found = json_value(opened.read_at(member.start, size_bytes), what="its json")
    except DatasetError as error:
        return Rejection(str(error))
    if not isinstance(found, dict):
        found = {"json": found}
    return {key: value for key, value in found.items() if requested.wants_key(field, key)}


def _label(text: bytes, field: MemberField, requested: RequestedFields) -> int | Rejection:
    """Parse a class: its number, or its name if the schema names the classes."""
    if len(text) <= _LABEL_BYTES:
        if _INTEGER.fullmatch(text) and (label := int(text)) in _INT64:
            return label
        type = requested.types.get(field.name)
        names = type.class_names if type is not None else ()
        name = text.decode("utf-8", "replace")
        if name in names:
            return names.index(name)
        if names:
            return Rejection(f"its {field.name} (cls) is {name!r}, which isn't one of the classes")
    return Rejection(
        f"its {field.name} (cls) isn't an integer in ASCII; to read names of classes, list them: "
        f'schema={{"{field.name}": ClassLabel((…))}}'
    )
