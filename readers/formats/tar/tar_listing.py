"""Join the samples of all tar files into one schema.

Headers, labels and json members are read; nothing is decoded. The contents of labels and json
become columns of values. An archive is a shard, whose members are read in place.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.cache import ConfigError, DatasetError
from penstock.readers.fieldtypes import (
    LABEL,
    ClassLabel,
    Schema,
    TextTable,
    fields_of,
    is_mask_name,
    masks_by_name,
    object_table,
)
from penstock.readers.formats.candidates import Candidates, Spans, left_out_sentences
from penstock.readers.formats.file_kinds import TYPES
from penstock.readers.formats.open_shard import MISSING
from penstock.readers.formats.span_listing import SpanListing
from penstock.readers.formats.tar.archive_samples import NO_KEY, RequestedFields, archive_samples

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from penstock.readers.fieldtypes import TableFields
    from penstock.readers.formats.tar.archive_samples import ArchiveSamples, Member, MemberField
    from penstock.readers.formats.unindexed_files import DataFile
    from penstock.readers.origin import Entry
    from penstock.readers.types import Ints

    Columns = Mapping[MemberField, Sequence[Member | None]]

_MAX_FIELDS = 1024
_SHOWN_EXTENSIONS, _SHOWN_NAMES = 32, 5
_IMAGE = "image"
_TOGETHER = "Write all members of a key into one archive"


class TarListing(SpanListing):
    """The tar files of a dataset, in order. Listing them reads none of them."""

    def samples(self, files: Sequence[Entry], *, workers: int) -> Candidates:
        """Read all headers, labels and json; for this, remote archives are fetched completely.

        Raises DatasetError (an archive is truncated, damaged or compressed; impossible fields),
        ConfigError (the user names fields that don't exist), IndexChangedError (an archive changed
        in the meantime), FetchError.
        """
        places = self.origin.arrangement.places
        names = {source.lower(): name for name, source in places}
        names |= {source: name for name, source in places}  # keys of json keep their case
        requested = RequestedFields(self.given, names)

        def read(opened: DataFile, entry: Entry) -> ArchiveSamples:
            return archive_samples(entry, opened, requested)

        archives = self.read_each(files, read, workers=workers)
        return join_archives(archives, requested, url=self.origin.url)


def join_archives(
    archives: Sequence[ArchiveSamples], requested: RequestedFields, *, url: str
) -> Candidates:
    """Join the samples of all archives, numbered across them. url: of the dataset, for messages.

    Raises ConfigError (fields= names fields that don't exist), DatasetError (too many fields,
    members of two kinds for one field, labels of two kinds).
    """
    extensions: dict[MemberField, set[str]] = {}
    for archive in archives:
        for field, found in archive.fields.items():
            extensions.setdefault(field, set()).update(found)
    suffixes = {f: {each.rpartition(".")[2] for each in some} for f, some in extensions.items()}
    rows = [sample.members for archive in archives for sample in archive.samples]
    names = [archive.path(sample.name) for archive in archives for sample in archive.samples]
    archive_of = np.repeat(np.arange(len(archives)), [len(each.samples) for each in archives])
    columns: Columns = {field: [row.get(field) for row in rows] for field in extensions}
    sources, notes = _sources(columns, suffixes, requested, url=url)
    given, kinds = requested.types, {name: some[0].kind for name, some in sources.items()}
    types = {name: given.get(name) or TYPES[kind] for name, kind in kinds.items()}
    of_fields = {name: {s for f in some for s in suffixes[f]} for name, some in sources.items()}
    masks, of_masks, doubts = masks_by_name(types, of_fields, given=given)
    values = _values(columns, names, types, requested, url=url)
    refused = [entry for archive in archives for entry in archive.quarantined]
    passed_over = _most_common(sum((each.passed_over for each in archives), Counter[str]()))
    unread = left_out_sentences("samples or members", refused)
    samples = Candidates(
        schema=Schema(types | masks),
        names=names,
        files=[archive.entry for archive in archives],
        spans={n: _spans([columns[f] for f in some], archive_of) for n, some in sources.items()},
        shard_of=archive_of,
        rejected=_unlabelled(values, requested) | values.rejected | _without_image(columns),
        quarantined=refused,
        passed_over=passed_over,
        notes=[*notes, *of_masks],
        unread=[*unread, *_numbered(sources), *doubts, *_unread_members(passed_over)],
    ).with_table(values, of="keys of json")
    schema = samples.schema
    for source, name in requested.names.items():
        # Every key of a json is a field, whose name starts with the name that json was given.
        if not any(each == name or each.startswith(f"{name}.") for each in schema):
            raise ConfigError(
                f'fields["{name}"]: no member in {url} ends in {source!r}, and no json has that '
                f"key. The fields are {list(schema)}."
            )
    images = [name for name, kind in kinds.items() if kind == _IMAGE]
    images.sort(key=lambda name: not schema[name].is_image)
    order = [name for name in dict.fromkeys((*images, LABEL, *schema)) if name in schema]
    return replace(samples, schema=schema.only(tuple(order)))


def _sources(
    columns: Columns, suffixes: Mapping[MemberField, set[str]], requested: RequestedFields, url: str
) -> tuple[dict[str, list[MemberField]], list[str]]:
    """Return the members that each field in files comes from, and a note on the decision.

    A field has one source, with one exception: if no key has several images, its only image is the
    field "image", whatever its member is called. Raises DatasetError.
    """
    members: dict[str, MemberField] = {}
    for found in columns:
        if not found.is_value and members.setdefault(found.name, found) != found:
            both = ", ".join(sorted({members[found.name].kind, found.kind}))
            raise DatasetError(
                f'{url}: the field "{found.name}" has members of two kinds ({both}). A field has '
                "one kind: rename the members of the other, such as other.EXTENSION."
            )
    if len(members) > _MAX_FIELDS:
        raise DatasetError(
            f"{url}: got {len(members):,} fields ({', '.join(list(members)[:3])}, …), wanted at "
            f"most {_MAX_FIELDS:,}. A member's key ends at the first dot of its name, and the rest "
            "names its field: rename members whose names have dots of their own."
        )
    sources = {name: [each] for name, each in members.items()}
    images = [each for each in members.values() if each.kind == _IMAGE]
    images = [each for each in images if not is_mask_name(each.name, suffixes[each])]
    others = {each.name for each in images} - {_IMAGE}
    asked = {*requested.types, *requested.names.values()} - {_IMAGE}
    is_taken = _IMAGE in members and members[_IMAGE].kind != _IMAGE
    if not others or others & asked or is_taken or (_count(columns, images) > 1).any():
        return sources, []
    listed = ", ".join(f'"{each.name}"' for each in images[:_SHOWN_NAMES])
    note = f'the only image of each key ({listed}) is the field "{_IMAGE}".'
    rest = {name: some for name, some in sources.items() if members[name] not in images}
    return {_IMAGE: images, **rest}, [note]


def _count(columns: Columns, fields: Iterable[MemberField]) -> Ints:
    """Return how many of some fields each sample has."""
    found = [[each is not None for each in columns[field]] for field in fields]
    counts: Ints = np.array(found, np.bool_).sum(axis=0, dtype=np.int64)
    return counts


def _spans(columns: Sequence[Sequence[Member | None]], archive_of: Ints) -> Spans:
    """Return the spans of a field. columns: of its sources, of which a sample has one at most."""
    members = [next(filter(None, row), None) for row in zip(*columns, strict=True)]
    starts = np.array([0 if each is None else each.start for each in members], np.int64)
    ends = np.array([0 if each is None else each.end for each in members], np.int64)
    there = np.array([each is not None for each in members], np.bool_)
    return Spans(files=np.where(there, archive_of, MISSING), starts=starts, sizes=ends - starts)


def _values(
    cells: Columns, names: Sequence[bytes], spans: Collection[str], asked: RequestedFields, url: str
) -> TableFields:
    """Return the fields of labels and json. spans: the fields that lie in members.

    Labels come first, because json may repeat them for other samples. Raises DatasetError for
    labels of two kinds.
    """
    contents = {
        field: [None if each is None else each.value for each in column]
        for field, column in cells.items()
        if field.is_value
    }
    values: dict[str, Any] = {f.name: c for f, c in contents.items() if f.kind == "class"}
    labels, notes = {*values}, list[str]()
    rejected: dict[int, str] = {}
    left_out: dict[str, str] = {}
    for json, objects in contents.items():
        if json.kind != "json":
            continue
        try:  # samples whose object can't be a row are rejected
            flat = object_table(
                objects, rejected=rejected, source=url, places=names, unit="sample"
            ).columns
        except DatasetError as error:
            left_out["json"] = str(error)
            continue
        for key, column in flat.items():
            if not asked.wants_key(json, key):
                continue
            name = f"{json.name}.{key}" if json.name else key
            name = asked.names.get(name, name)
            both = _merged(values[name], column) if name in labels else None
            if both is not None:
                values[name] = both
                continue
            if name in values or name in spans:
                notes.append(f'"{name}" is a member; its value in json is "json.{name}".')
                name = f"json.{name}"
            if name in values or name in spans:
                left_out[name] = "a member and another json have this name too"
            elif all(value is None for value in column):
                notes.append(f'no sample has a value under "{name}" of json.')
            else:
                values[name] = column
    table = TextTable(source=url, columns=values, places=names, unit="sample")
    types = {**dict.fromkeys(labels, ClassLabel()), **asked.types}
    found = fields_of(table, types, is_lenient=True)
    return replace(
        found,
        rejected={**found.rejected, **rejected},
        left_out={**left_out, **found.left_out},
        notes=[*notes, *found.notes],
    )


def _merged(labels: Sequence[Any], others: Sequence[Any]) -> list[Any] | None:
    """Return labels of cls and of json as one column if they never differ, else None."""
    both = []
    for label, other in zip(labels, others, strict=True):
        if other is not None and (type(other) is not int or label not in (None, other)):
            return None
        both.append(other if label is None else label)
    return both


def _without_image(columns: Columns) -> dict[int, str]:
    """If some keys have images, reject the keys without one."""
    images = [field for field in columns if field.kind == _IMAGE]
    rejected: dict[int, str] = {}
    for row in np.flatnonzero(_count(columns, images) == 0).tolist() if images else ():
        parts = [field.name or "json" for field, some in columns.items() if some[row] is not None]
        rejected[row] = f"{', '.join(parts)} whose image isn't in its archive. {_TOGETHER}"
    return rejected


def _unlabelled(values: TableFields, requested: RequestedFields) -> dict[int, str]:
    """If some samples have classes, reject those without one.

    A class is never guessed, and one that is missing doesn't keep the labels from the others. If
    the schema names the label, such samples are kept.
    """
    present = values.present.get(LABEL)
    is_class = isinstance(values.types.get(LABEL), ClassLabel)
    if present is None or not is_class or LABEL in requested.types:
        return {}
    reason = (
        f"no label (cls, or in json) in its archive, but other samples have one. {_TOGETHER}; to "
        f'keep such samples pass schema={{"{LABEL}": ClassLabel()}}'
    )
    return dict.fromkeys(np.flatnonzero(~present).tolist(), reason)


def _most_common(counts: Counter[str]) -> dict[str, int]:
    """Return the counts of the most frequent extensions, and of all others together."""
    found = dict(counts.most_common(_SHOWN_EXTENSIONS))
    rest = counts.total() - sum(found.values())
    return found | ({"(others)": rest} if rest else {})


def _unread_members(passed_over: Mapping[str, int]) -> list[str]:
    """Return a sentence about members of unknown kinds; none if there are none."""
    kinds = [each for each in passed_over if each != NO_KEY]
    listed = ", ".join(f"{passed_over[each]:,} .{each}" for each in kinds[:_SHOWN_NAMES])
    more = " and others" if len(kinds) > _SHOWN_NAMES else ""
    return [
        f"{listed}{more} members are left out and were never opened: their kind is unknown. To "
        f'read their bytes pass schema={{"{first}": Bytes()}} (docs/reference/fields.md).'
        for first in kinds[:1]
    ]


def _numbered(fields: Iterable[str]) -> list[str]:
    """Return a sentence about fields whose names are numbers."""
    numbers = [name for name in fields if name.isdigit()]
    return [
        f"the fields {', '.join(numbers[:_SHOWN_NAMES])} are numbers, because a key ends at the "
        "first dot of a name. If each member is a sample of its own, rename them so that their "
        "only dot precedes the extension."
    ] * (len(numbers) > 1)
