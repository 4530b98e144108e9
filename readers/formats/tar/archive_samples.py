"""Collect the samples of one archive from its headers: keys, and the members that are fields.

Labels and json are read in the same pass; all other members are only located. A sample consists of
the members of one archive whose names share a key: the path up to the first dot of its last part
(WebDataset's rule). Members of a key need not be adjacent.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from penstock.cache import DatasetError
from penstock.readers.fieldtypes import json_value
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

    # Members by extension, each with the content that was read.
    _Group = dict[str, list[tuple[TarMember, Any]]]

NO_KEY = "(no key)"
"""Counts members without an extension among the skipped ones."""

_SHOWN = 32
_LABEL_BYTES, _JSON_BYTES = 256, 16 * 2**20
_INTEGER = re.compile(rb"[+-]?[0-9]{1,19}")
_INT64 = range(-(2**63), 2**63)


class ArchiveSample(NamedTuple):
    """The members of one key.

    name: of the member after which the sample is named. start: that member's first byte, by which
    samples are sorted. parts: the member of each field, or its content if it holds values.
    """

    key: bytes
    name: bytes
    start: int
    parts: Mapping[MemberField, Any]


@dataclass(slots=True, kw_only=True)
class ArchiveSamples:
    """The samples of one archive.

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


def archive_samples(entry: Entry, opened: DataFile, requested: RequestedFields) -> ArchiveSamples:
    """Read an archive's headers, labels and json.

    Raises DatasetError (the archive is truncated, damaged or compressed), IndexChangedError,
    FetchError.
    """
    found = ArchiveSamples(entry=entry)
    groups: dict[bytes, _Group] = {}
    is_empty = True
    for member in archive_members(opened.read_at, entry.size_bytes, shown=printable(entry.name)):
        is_empty = False
        name = member.name
        while name.startswith(b"./"):  # as `tar -c .` writes names
            name = name[2:].lstrip(b"/")
        reason = member.refused or unsafe_reason(name) or (None if name else "it has no name")
        key, extension = split_key(name) or (b"", "")
        if reason is None and extension == "tar":
            reason = "a tar inside a tar: extract it, and add it as an archive of its own"
        if reason is not None:
            found.refuse(member.name, reason)
        elif not key or (name.startswith(b"__") and name.endswith(b"__")):
            # No dot, a dot-file, or a name that WebDataset reserves.
            found.passed_over[NO_KEY] += 1
        elif requested.wants(extension):
            field = requested.field_of(extension)
            part: Any = member
            if field is not None and field.is_value:
                # Here, because a remote archive buffers only the bytes around its position.
                part = _read_value(member, field, opened, requested)
            groups.setdefault(key, {}).setdefault(extension, []).append((member, part))
    if is_empty:
        empty = QuarantineEntry(name=entry.name, reason="an archive without members")
        found.quarantined.append(empty)
    for key, group in groups.items():
        _add_sample(key, group, found, requested)
    found.samples.sort(key=lambda sample: sample.start)
    return found


def _add_sample(
    key: bytes, group: _Group, found: ArchiveSamples, requested: RequestedFields
) -> None:
    """Add one key's members as a sample, or quarantine them, or skip them."""
    members: dict[str, tuple[MemberField, str, TarMember]] = {}
    parts: dict[MemberField, Any] = {}
    unread: list[str] = []
    for extension, ((member, part), *others) in group.items():
        if others:
            what = f"two members of one key and extension ({_shown(extension)})"
            found.refuse(member.name, what)
            return
        field = requested.field_of(extension)
        if field is None:
            unread.append(_shown(extension))
            continue
        if field.name in members:
            other, first, named = members[field.name]
            both = sorted((first, extension))
            what = "members"
            remedy = f"a key ends at the first dot of a name. Rename one, such as other.{extension}"
            if other.kind == field.kind == "image":
                what = "images"
                remedy = f'name each field, fields={{"image": "{both[0]}", "mask": "{both[1]}"}}'
            found.refuse(
                named.name,
                f"two {what} of one key ({', '.join(both)}), and both would be the field "
                f'"{field.name}": {remedy}',
            )
            return
        members[field.name] = field, extension, member
        parts[field] = part
    found.passed_over.update(unread)
    for field, extension, _ in members.values():
        found.fields.setdefault(field, set()).add(extension)
    # Named after its first image.
    order = sorted(members.values(), key=lambda each: each[0].kind != "image")
    bad = next((part for part in parts.values() if isinstance(part, Rejection)), None)
    if bad is not None:
        found.refuse(order[0][2].name, bad.reason)
    elif order:
        own = order[0][2]
        found.samples.append(ArchiveSample(key, own.name, own.start, parts))


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
    text = opened.read_at(member.start, size_bytes)
    try:
        found = json_value(text, what="its json")
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
