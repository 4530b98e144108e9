"""Collect the samples of one archive from its headers: keys, and the members that are fields.

Labels and json are read on the way, everything else is only located. A sample is the members of one
archive whose names share a key: the path up to the first dot of its last part (WebDataset's rule).
Members of a key need not be adjacent.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from penstock.cache import DatasetError
from penstock.readers.fields import ClassLabel, json_value
from penstock.readers.files import printable, unsafe_reason
from penstock.readers.formats.tar.member_fields import split_key
from penstock.readers.formats.tar.tar_headers import archive_members
from penstock.readers.origin import QuarantineEntry
from penstock.readers.types import Rejection

if TYPE_CHECKING:
    from collections.abc import Mapping

    from penstock.readers.formats.tar.member_fields import MemberField, RequestedFields
    from penstock.readers.formats.tar.tar_headers import TarMember
    from penstock.readers.formats.unindexed_files import DataFile
    from penstock.readers.origin import Entry

NO_KEY = "(no key)"
"""Stands for the extension of members that have none."""

_TAR = "tar"
_SHOWN = 32
_LABEL_BYTES, _JSON_BYTES = 256, 16 * 2**20
_INTEGER = re.compile(rb"[+-]?[0-9]{1,19}")
_INT64 = range(-(2**63), 2**63)


@dataclass(frozen=True, slots=True)
class ArchiveSample:
    """The members of one key. name: of the one that it is known by; start: the byte by which
    samples are sorted. spans: the members that are fields; values: what the others hold, by
    field."""

    key: bytes
    name: bytes
    start: int
    spans: Mapping[str, TarMember]
    values: Mapping[MemberField, Any]


@dataclass(slots=True, kw_only=True)
class ArchiveSamples:
    """Of one archive. kinds: of the fields; extensions: that each has."""

    entry: Entry
    samples: list[ArchiveSample] = field(default_factory=list)
    fields: dict[MemberField, set[str]] = field(default_factory=dict)
    quarantined: list[QuarantineEntry] = field(default_factory=list)
    passed_over: Counter[str] = field(default_factory=Counter)

    def refuse(self, name: bytes, reason: str) -> None:
        """Leave out what a member belongs to."""
        self.quarantined.append(QuarantineEntry(name=member_path(self.entry, name), reason=reason))


def member_path(archive: Entry, name: bytes) -> bytes:
    """A member's name below the dataset's root: "train-000.tar/dog.jpg"."""
    return archive.name + b"/" + name


def archive_samples(entry: Entry, opened: DataFile, asked: RequestedFields) -> ArchiveSamples:
    """Read an archive's headers, labels and json.

    Raises DatasetError (it is torn, damaged or compressed), IndexChangedError, FetchError.
    """
    found = ArchiveSamples(entry=entry)
    groups: dict[bytes, dict[str, list[TarMember]]] = {}
    # Read as the headers are walked, since of a remote archive only what is near is at hand.
    values: dict[int, Any] = {}
    count = 0
    for member in archive_members(opened.read_at, entry.size_bytes, shown=printable(entry.name)):
        count += 1
        name = _without_dot(member.name)
        reason = member.refused or unsafe_reason(name) or (None if name else "it has no name")
        split = split_key(name)
        extension = split[1] if split else ""
        if reason is None and extension == _TAR:
            reason = "a tar inside a tar: extract it, and give it as an archive of its own"
        if reason is not None:
            found.refuse(member.name, reason)
        elif split is None or (name.startswith(b"__") and name.endswith(b"__")):
            # No dot, a dot-file, or what WebDataset keeps for itself.
            found.passed_over[NO_KEY] += 1
        elif asked.wants(extension):
            groups.setdefault(split[0], {}).setdefault(extension, []).append(member)
            kind = asked.field_of(extension)
            if kind is not None and kind.is_value:
                values[member.start] = _read_value(member, kind, opened, asked)
    if count == 0:
        reason = "an archive without members"
        found.quarantined.append(QuarantineEntry(name=entry.name, reason=reason))
    for key, parts in groups.items():
        _sort_out(key, parts, found, values, asked)
    found.samples.sort(key=lambda sample: sample.start)
    return found


def _without_dot(name: bytes) -> bytes:
    while name.startswith(b"./"):  # as `tar -c .` writes them
        name = name[2:].lstrip(b"/")
    return name


def _sort_out(
    key: bytes,
    parts: Mapping[str, list[TarMember]],
    found: ArchiveSamples,
    values: Mapping[int, Any],
    asked: RequestedFields,
) -> None:
    """One key's members: a sample, a reason against it, or nothing that is read. values: by the
    start of the member that holds them."""
    doubled = next((part for part, same in parts.items() if len(same) > 1), None)
    if doubled is not None:
        what = f"two members of one key and extension ({_shown(doubled)})"
        found.refuse(parts[doubled][0].name, what)
        return
    fields: dict[MemberField, str] = {}
    for part in parts:
        kind = asked.field_of(part)
        if kind is None:
            found.passed_over[_shown(part)] += 1
            continue
        other = next((field for field in fields if field.name == kind.name), None)
        if other is not None:
            both = sorted((fields[other], part))
            what = "members"
            remedy = f"a key ends at the first dot of a name. Rename one, such as other.{part}"
            if other.kind == kind.kind == "image":
                what = "images"
                remedy = f'say what each is, fields={{"image": "{both[0]}", "mask": "{both[1]}"}}'
            found.refuse(
                parts[fields[other]][0].name,
                f"two {what} of one key ({', '.join(both)}), and both would be the field "
                f'"{kind.name}": {remedy}',
            )
            return
        fields[kind] = part
    if fields:
        _add(key, {field: parts[part][0] for field, part in fields.items()}, found, values)
        for kind, part in fields.items():
            found.fields.setdefault(kind, set()).add(part)


def _add(
    key: bytes,
    fields: Mapping[MemberField, TarMember],
    found: ArchiveSamples,
    values: Mapping[int, Any],
) -> None:
    images = [member for field, member in fields.items() if field.kind == "image"]
    first = images[0] if images else next(iter(fields.values()))
    noted = {field: values[member.start] for field, member in fields.items() if field.is_value}
    bad = next((value for value in noted.values() if isinstance(value, Rejection)), None)
    if bad is not None:
        found.refuse(first.name, bad.reason)
        return
    spans = {field.name: member for field, member in fields.items() if not field.is_value}
    found.samples.append(ArchiveSample(key, first.name, first.start, spans, noted))


def _shown(extension: str) -> str:
    return printable(os.fsencode(extension))[:_SHOWN]


def _read_value(
    member: TarMember, field: MemberField, opened: DataFile, asked: RequestedFields
) -> Any:
    """What a label or a json member holds, or why it can't be read."""
    size_bytes = member.end - member.start
    if field.kind == "class":
        text = opened.read_at(member.start, min(size_bytes, _LABEL_BYTES + 1)).strip()
        return _label(text, field, asked)
    if size_bytes > _JSON_BYTES:
        return Rejection(f"its json has {size_bytes:,} bytes, and {_JSON_BYTES:,} are read at most")
    text = opened.read_at(member.start, size_bytes)
    try:
        found = json_value(text, what="its json")
    except DatasetError as error:
        return Rejection(str(error))
    if not isinstance(found, dict):
        found = {"json": found}
    return {key: value for key, value in found.items() if asked.wants_key(field, key)}


def _label(text: bytes, field: MemberField, asked: RequestedFields) -> int | Rejection:
    """A class by its number, or by its name where a schema has names."""
    if len(text) <= _LABEL_BYTES:
        if _INTEGER.fullmatch(text) and (label := int(text)) in _INT64:
            return label
        type = asked.types.get(field.name)
        names = type.names if isinstance(type, ClassLabel) else ()
        name = text.decode("utf-8", "replace")
        if name in names:
            return names.index(name)
        if names:
            return Rejection(f"its {field.name} (cls) is {name!r}, which is none of the classes")
    return Rejection(
        f"its {field.name} (cls) isn't an integer in ASCII; to read names say which there are, "
        f'schema={{"{field.name}": ClassLabel((…))}}'
    )
