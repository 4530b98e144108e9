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
    TextTable,
    fields_of,
    is_mask_name,
    masks_by_name,
    object_table,
)
from penstock.readers.formats.candidates import MISSING, Spans
from penstock.readers.formats.file_kinds import TYPES
from penstock.readers.formats.span_listing import SpanListing
from penstock.readers.formats.span_samples import SpanSamples, left_out_sentences
from penstock.readers.formats.tar.archive_samples import NO_KEY, archive_samples
from penstock.readers.formats.tar.member_fields import RequestedFields

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from numpy.typing import NDArray

    from penstock.readers.fieldtypes import TableFields
    from penstock.readers.formats.tar.archive_samples import ArchiveSamples
    from penstock.readers.formats.tar.member_fields import MemberField
    from penstock.readers.formats.unindexed_files import DataFile
    from penstock.readers.origin import Entry, QuarantineEntry

_MAX_FIELDS = 1024
_SHOWN_EXTENSIONS, _SHOWN_NAMES = 32, 5
_IMAGE = "image"
_TOGETHER = "Write all members of a key into one archive"


class TarListing(SpanListing):
    """The tar files of a dataset, in order. Listing them reads none of them."""

    def samples(self, files: Sequence[Entry], *, workers: int) -> SpanSamples:
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
        return ArchiveJoin(archives, requested, url=self.origin.url).join()


class ArchiveJoin:
    """The samples of all archives, numbered across them."""

    def __init__(
        self, archives: Sequence[ArchiveSamples], requested: RequestedFields, *, url: str
    ) -> None:
        """url: of the dataset, for messages. Raises DatasetError for too many fields, and for
        members of two kinds for one field."""
        self._archives, self._requested, self._url = archives, requested, url
        samples = [sample for each in archives for sample in each.samples]
        self._names = [each.path(sample.name) for each in archives for sample in each.samples]
        counts = [len(each.samples) for each in archives]
        self._archive_of = np.repeat(np.arange(len(archives)), counts)
        self._extensions: dict[MemberField, set[str]] = {}
        for each in archives:
            for field, extensions in each.fields.items():
                self._extensions.setdefault(field, set()).update(extensions)
        self._members = self._check_members()
        # The parts of all samples by field, None if a sample lacks it.
        self._parts: dict[MemberField, list[Any]] = {
            field: [None] * len(samples) for field in self._extensions
        }
        for row, sample in enumerate(samples):
            for field, part in sample.parts.items():
                self._parts[field][row] = part

    def join(self) -> SpanSamples:
        """Return the joined samples. Raises ConfigError (fields= names fields that don't exist),
        DatasetError (labels of two kinds)."""
        given, members = self._requested.types, self._members
        sources, notes = self._sources()
        kinds = {name: members[some[0]].kind for name, some in sources.items()}
        types = {name: given.get(name) or TYPES[kind] for name, kind in kinds.items()}
        suffixes = {
            name: {suffix for each in some for suffix in self._suffixes(members[each])}
            for name, some in sources.items()
        }
        masks, of_masks = masks_by_name(types, suffixes, given=given)
        types |= masks
        found = self._values(types)
        rejected = {**self._unlabelled(found), **found.rejected, **self._without_image()}
        refused = [entry for each in self._archives for entry in each.quarantined]
        counts = sum((each.passed_over for each in self._archives), Counter[str]())
        passed_over = dict(counts.most_common(_SHOWN_EXTENSIONS))
        if rest := counts.total() - sum(passed_over.values()):
            passed_over["(others)"] = rest
        samples = SpanSamples(
            names=self._names,
            files=[each.entry for each in self._archives],
            spans={name: self._spans(some) for name, some in sources.items()},
            types=types,
            shard_of=self._archive_of,
            rejected=rejected,
            quarantined=refused,
            passed_over=passed_over,
            notes=[f"{note}." for note in (*notes, *of_masks)],
            hints=_hints(sources, refused),
            left_out=_unread_members(passed_over),
        ).with_table(found, of="keys of json")
        for source, name in self._requested.names.items():
            # Every key of a json is a field, whose name starts with the name that json was given.
            if not any(each == name or each.startswith(f"{name}.") for each in samples.types):
                raise ConfigError(
                    f'fields["{name}"]: no member in {self._url} ends in {source!r}, and no json '
                    f"has that key. The fields are {list(samples.types)}."
                )
        images = [name for name, kind in kinds.items() if kind == _IMAGE]
        images.sort(key=lambda name: not types[name].is_image)
        order = [n for n in dict.fromkeys((*images, LABEL, *samples.types)) if n in samples.types]
        return replace(samples, types={name: samples.types[name] for name in order})

    def _check_members(self) -> dict[str, MemberField]:
        """Return the fields that lie in members, by name. Raises DatasetError."""
        members: dict[str, MemberField] = {}
        for found in self._extensions:
            if not found.is_value and members.setdefault(found.name, found) != found:
                both = ", ".join(sorted({members[found.name].kind, found.kind}))
                raise DatasetError(
                    f'{self._url}: the field "{found.name}" has members of two kinds ({both}). A '
                    "field has one kind: rename the members of the other, such as other.EXTENSION."
                )
        if len(members) > _MAX_FIELDS:
            raise DatasetError(
                f"{self._url}: got {len(members):,} fields ({', '.join(list(members)[:3])}, …), "
                f"wanted at most {_MAX_FIELDS:,}. A member's key ends at the first dot of its "
                "name, and the rest names its field: rename members whose names have dots of their "
                "own."
            )
        return members

    def _suffixes(self, member: MemberField) -> set[str]:
        return {extension.rpartition(".")[2] for extension in self._extensions[member]}

    def _count(self, fields: Iterable[MemberField]) -> NDArray[np.int64]:
        """Return how many of some fields each sample has."""
        counts = np.zeros(len(self._names), np.int64)
        for field in fields:
            counts += np.array([part is not None for part in self._parts[field]], np.bool_)
        return counts

    def _sources(self) -> tuple[dict[str, list[str]], list[str]]:
        """Return the names of members that each field comes from, and a note on the decision.

        A field has one source, with one exception: if no key has several images, its only image is
        the field "image", whatever its member is called.
        """
        members = self._members
        requested = {*self._requested.types, *self._requested.names.values()} - {_IMAGE}
        images = {
            name: each
            for name, each in members.items()
            if each.kind == _IMAGE and not is_mask_name(name, self._suffixes(each))
        }
        sources = {name: [name] for name in members}
        others = images.keys() - {_IMAGE}
        if (
            not others
            or others & requested
            or (_IMAGE in members and members[_IMAGE].kind != _IMAGE)
            or (self._count(images.values()) > 1).any()
        ):
            return sources, []
        listed = ", ".join(f'"{name}"' for name in [*images][:_SHOWN_NAMES])
        note = f'the only image of each key ({listed}) is the field "{_IMAGE}"'
        rest = {name: some for name, some in sources.items() if name not in images}
        return {_IMAGE: [*images], **rest}, [note]

    def _spans(self, names: Sequence[str]) -> Spans:
        columns = (self._parts[self._members[name]] for name in names)
        members = [next(filter(None, row), None) for row in zip(*columns, strict=True)]
        starts = np.array([0 if each is None else each.start for each in members], np.int64)
        ends = np.array([0 if each is None else each.end for each in members], np.int64)
        there = np.array([each is not None for each in members], np.bool_)
        files = np.where(there, self._archive_of, MISSING)
        return Spans(files=files, starts=starts, sizes=ends - starts)

    def _values(self, spans: Collection[str]) -> TableFields:
        """Return the fields of labels and json. spans: the fields that lie in members.

        Labels come first, because json may repeat them for other samples. Raises DatasetError for
        labels of two kinds.
        """
        requested, names, notes = self._requested, self._names, list[str]()
        rejected: dict[int, str] = {}
        left_out: dict[str, str] = {}
        columns: dict[str, Sequence[Any]] = {
            each.name: parts for each, parts in self._parts.items() if each.kind == "class"
        }
        labels = {*columns}
        for json, objects in self._parts.items():
            if json.kind != "json":
                continue
            try:  # samples whose object can't be a row are rejected
                flat = object_table(
                    objects, rejected=rejected, source=self._url, places=names, unit="sample"
                ).columns
            except DatasetError as error:
                left_out["json"] = str(error)
                continue
            for key, values in flat.items():
                if not requested.wants_key(json, key):
                    continue
                name = f"{json.name}.{key}" if json.name else key
                name = requested.names.get(name, name)
                both = _merged(columns[name], values) if name in labels else None
                if both is not None:
                    columns[name] = both
                    continue
                if name in columns or name in spans:
                    notes.append(f'"{name}" is a member; its value in json is "json.{name}".')
                    name = f"json.{name}"
                if name in columns or name in spans:
                    left_out[name] = "a member and another json have this name too"
                elif all(value is None for value in values):
                    notes.append(f'no sample has a value under "{name}" of json.')
                else:
                    columns[name] = values
        table = TextTable(source=self._url, columns=columns, places=names, unit="sample")
        types = {**dict.fromkeys(labels, ClassLabel()), **requested.types}
        found = fields_of(table, types, is_lenient=True)
        return replace(
            found,
            rejected={**found.rejected, **rejected},
            left_out={**left_out, **found.left_out},
            notes=[*notes, *found.notes],
        )

    def _without_image(self) -> dict[int, str]:
        """If some keys have images, reject the keys without one."""
        images = [each for each in self._members.values() if each.kind == _IMAGE]
        rejected: dict[int, str] = {}
        for row in np.flatnonzero(self._count(images) == 0).tolist() if images else ():
            parts = [f.name or "json" for f, some in self._parts.items() if some[row] is not None]
            rejected[row] = f"{', '.join(parts)} whose image isn't in its archive. {_TOGETHER}"
        return rejected

    def _unlabelled(self, found: TableFields) -> dict[int, str]:
        """If some samples have classes, reject those without one.

        A class is never guessed, and one that is missing doesn't keep the labels from the others.
        If the schema names the label, such samples are kept.
        """
        present = found.present.get(LABEL)
        is_class = isinstance(found.types.get(LABEL), ClassLabel)
        if present is None or not is_class or LABEL in self._requested.types:
            return {}
        reason = (
            f"no label (cls, or in json) in its archive, but other samples have one. {_TOGETHER}; "
            f'to keep such samples pass schema={{"{LABEL}": ClassLabel()}}'
        )
        return dict.fromkeys(np.flatnonzero(~present).tolist(), reason)


def _merged(labels: Sequence[Any], others: Sequence[Any]) -> list[Any] | None:
    """Return labels of cls and of json as one column if they never differ, else None."""
    both = []
    for label, other in zip(labels, others, strict=True):
        if other is not None and (type(other) is not int or label not in (None, other)):
            return None
        both.append(other if label is None else label)
    return both


def _unread_members(passed_over: Mapping[str, int]) -> list[str]:
    """Return a sentence about members of unknown kinds; none if there are none."""
    kinds = [each for each in passed_over if each != NO_KEY]
    if not kinds:
        return []
    listed = ", ".join(f"{passed_over[each]:,} .{each}" for each in kinds[:_SHOWN_NAMES])
    more = " and others" if len(kinds) > _SHOWN_NAMES else ""
    return [
        f"{listed}{more} members are left out and were never opened: their kind is unknown. To "
        f'read their bytes pass schema={{"{kinds[0]}": Bytes()}} (docs/fields.md).'
    ]


def _hints(fields: Collection[str], refused: Sequence[QuarantineEntry]) -> list[str]:
    numbered = [name for name in fields if name.isdigit()]
    if len(numbered) < 2:
        return left_out_sentences("keys or members", refused)
    return [
        *left_out_sentences("keys or members", refused),
        f"the fields {', '.join(map(repr, numbered[:_SHOWN_NAMES]))} are numbers, because a key "
        f"ends at the first dot of a name. NAME.{numbered[0]}.jpg is in one sample with the "
        "others. If each is a sample of its own, rename the members so that their only dot "
        "precedes the extension.",
    ]
