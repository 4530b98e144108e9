"""Join the samples of all tar files into one schema, and list them as candidates.

Headers, labels and json members are read; nothing is decoded. The contents of labels and json
become columns of values. An archive is a shard, whose members are read in place.
"""

from __future__ import annotations

import logging
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from penstock.cache import ConfigError, DatasetError, PenstockWarning, ordered
from penstock.readers.fieldtypes import (
    LABEL,
    ClassLabel,
    Image,
    Schema,
    TextTable,
    fields_of,
    is_mask_name,
    valid_object_table,
)
from penstock.readers.files import printable
from penstock.readers.formats.candidates import MISSING, Candidates, Grouping, Spans
from penstock.readers.formats.dataset_arguments import given_types
from penstock.readers.formats.format import Snapshot
from penstock.readers.formats.tar.archive_samples import NO_KEY, archive_samples, member_path
from penstock.readers.formats.tar.member_fields import RequestedFields, span_types
from penstock.readers.formats.unindexed_files import drop_cached_copy, is_cached, open_data_file

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping

    from numpy.typing import NDArray

    from penstock.readers.fieldtypes import Column, FieldType
    from penstock.readers.formats.tar.archive_samples import ArchiveSample, ArchiveSamples
    from penstock.readers.formats.tar.member_fields import Kind, MemberField
    from penstock.readers.origin import Entry, Origin

_log = logging.getLogger("penstock")

_MAX_FIELDS = 1024
_SHOWN_EXTENSIONS, _SHOWN_NAMES = 32, 5
_IMAGE, _UNIT = "image", "sample"


class _SampleNames(Sequence[str]):
    """The names of samples for messages. Each is made when a message needs it."""

    def __init__(self, name: Callable[[int], str], rows: range) -> None:
        self._name, self._rows = name, rows

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, row: int) -> str: ...
    @overload
    def __getitem__(self, row: slice) -> _SampleNames: ...
    def __getitem__(self, row: int | slice) -> str | _SampleNames:
        if isinstance(row, slice):
            return _SampleNames(self._name, self._rows[row])
        return self._name(self._rows[row])


class _ValueCollector:
    """Collects the columns of values that the labels and the json of n samples hold.

    values, present: by field, present only if some samples lack it. refused: the reason for each
    rejected sample, by number. left_out: keys of json that can't be fields, with the reason. notes:
    one sentence for each decision.
    """

    def __init__(
        self,
        samples: Sequence[ArchiveSample],
        requested: RequestedFields,
        name: Callable[[int], str],
        url: str,
    ) -> None:
        """name: returns a sample's name for messages, by its number."""
        self._samples, self._requested, self._url = samples, requested, url
        self._names = _SampleNames(name, range(len(samples)))
        self.types: dict[str, FieldType] = {}
        self.values: dict[str, Column] = {}
        self.present: dict[str, NDArray[np.bool_]] = {}
        self.refused: dict[int, str] = {}
        self.left_out: dict[str, str] = {}
        self.notes: list[str] = []

    def collect(self, fields: Collection[MemberField], spans: Collection[str]) -> None:
        """Collect labels first, because json may repeat them for other samples.

        fields: of all members. spans: names of the fields that lie in members. Raises DatasetError
        for labels of two kinds.
        """
        classes = {each.name: self._contents(each) for each in fields if each.kind == "class"}
        columns: dict[str, Sequence[Any]] = dict(classes)
        for each in fields:
            if each.kind != "json":
                continue
            for key, values in self._flat(self._contents(each)).items():
                if not self._requested.wants_key(each, key):
                    continue
                full = f"{each.name}.{key}" if each.name else key
                full = self._requested.names.get(full, full)
                if full in classes and (both := _merged(columns[full], values)) is not None:
                    columns[full] = both
                    continue
                if full in columns or full in spans:
                    self.notes.append(
                        f'"{full}" is a member; the value in json is the field "json.{full}"'
                    )
                    full = f"json.{full}"
                if full in columns or full in spans:
                    self.left_out[full] = "a member and another json have this name too"
                else:
                    columns[full] = values
        for full, values in columns.items():
            if all(value is None for value in values):
                self.notes.append(f'no sample has a value under "{full}" of json')
            else:
                self._add(full, values, ClassLabel() if full in classes else None)

    def _contents(self, field: MemberField) -> list[Any]:
        return [sample.values.get(field) for sample in self._samples]

    def _flat(self, objects: list[Any]) -> Mapping[str, Sequence[Any]]:
        """Return objects as columns. Samples whose object can't be a row are rejected."""
        try:
            return valid_object_table(
                objects, rejected=self.refused, source=self._url, places=self._names, unit=_UNIT
            ).columns
        except DatasetError as error:
            self.left_out["json"] = str(error)
            return {}

    def _add(self, name: str, values: Sequence[Any], default: FieldType | None) -> None:
        """Add one column by itself, so that an error in it doesn't affect the others."""
        table = TextTable(source=self._url, columns={name: values}, places=self._names, unit=_UNIT)
        type = self._requested.types.get(name) or default
        try:
            found = fields_of(table, {} if type is None else {name: type})
        except DatasetError as error:
            if name == LABEL:
                raise
            self.left_out[name] = str(error)
            return
        self.types |= found.types
        self.values |= found.values
        self.present |= found.present
        self.left_out |= found.left_out
        self.notes += (
            note.removeprefix(f"{self._url}: ").removesuffix(".") for note in found.notes
        )
        for row, reason in found.rejected.items():
            self.refused.setdefault(row, reason)


def _merged(labels: Sequence[Any], others: Sequence[Any]) -> list[Any] | None:
    """Return labels of cls and of json as one column if they never differ, else None."""
    both = []
    for label, other in zip(labels, others, strict=True):
        if other is not None and (type(other) is not int or label not in (None, other)):
            return None
        both.append(other if label is None else label)
    return both


@dataclass(slots=True, kw_only=True)
class JoinedArchives:
    """The samples of all archives.

    left_out: keys of json that can't be fields, with the reason. notes: one sentence for each
    decision.
    """

    candidates: Candidates
    left_out: dict[str, str]
    notes: list[str]


def join_archives(
    archives: Sequence[ArchiveSamples], requested: RequestedFields, *, url: str
) -> JoinedArchives:
    """Join the samples of archives. url: of the dataset, for messages.

    Raises ConfigError (the schema or fields= name fields that don't exist), DatasetError (too many
    fields; labels of two kinds; members of two kinds for one field).
    """
    return _ArchiveJoin(archives, requested, url).join()


class _ArchiveJoin:
    """The samples of all archives, numbered across them."""

    def __init__(
        self, archives: Sequence[ArchiveSamples], requested: RequestedFields, url: str
    ) -> None:
        self._archives, self._requested, self._url = archives, requested, url
        self._samples = [sample for each in archives for sample in each.samples]
        counts = [len(each.samples) for each in archives]
        self._number = np.repeat(np.arange(len(archives)), counts)
        self._fields: dict[MemberField, set[str]] = {}
        for each in archives:
            for found, extensions in each.fields.items():
                self._fields.setdefault(found, set()).update(extensions)
        self._refused: dict[int, str] = {}
        self._sources: dict[str, list[str]] = {}
        self._values = _ValueCollector(self._samples, requested, self._name, url)

    def join(self) -> JoinedArchives:
        """Return the joined samples, and quarantine the rejected ones in their archives."""
        members, extensions = self._members()
        self._sources, only = self._sources_of(members, extensions)
        kinds = {name: members[names[0]] for name, names in self._sources.items()}
        suffixes = {
            name: [e.rpartition(".")[2] for each in names for e in extensions[each]]
            for name, names in self._sources.items()
        }
        types, notes = span_types(kinds, suffixes, self._requested.types)
        self._reject_without_image([name for name, kind in members.items() if kind == "image"])
        self._values.collect(self._fields, spans=types)
        for row, reason in self._values.refused.items():
            self._refused.setdefault(row, reason)
        self._reject_unlabelled()
        types |= self._values.types
        self._check_requested(types)
        images = [name for name, kind in kinds.items() if kind == "image"]
        first = sorted(images, key=lambda name: not isinstance(types[name], Image))
        order = dict.fromkeys((*first, *((LABEL,) if LABEL in types else ()), *types))
        return JoinedArchives(
            candidates=self._candidates(Schema({name: types[name] for name in order})),
            left_out=self._values.left_out,
            notes=[*only, *notes, *self._values.notes],
        )

    def _sources_of(
        self, kinds: Mapping[str, Kind], extensions: Mapping[str, set[str]]
    ) -> tuple[dict[str, list[str]], list[str]]:
        """Return the names of members that each field comes from, and a note on the decision.

        A field has one source, with one exception: if no key has several images, its only image is
        the field "image", whatever its member is called.
        """
        requested = {*self._requested.types, *self._requested.names.values()} - {_IMAGE}
        images = {
            name
            for name, kind in kinds.items()
            if kind == "image"
            and not is_mask_name(name, [e.rpartition(".")[2] for e in extensions[name]])
        }
        sources = {name: [name] for name in kinds}
        others = images - {_IMAGE}
        if not others or others & requested or kinds.get(_IMAGE, "image") != "image":
            return sources, []
        if any(len(images & sample.spans.keys()) > 1 for sample in self._samples):
            return sources, []
        named = [name for name in kinds if name in images]
        sources = {name: names for name, names in sources.items() if name not in images}
        listed = ", ".join(f'"{name}"' for name in named[:_SHOWN_NAMES])
        note = f'the only image of each key ({listed}) is the field "{_IMAGE}"'
        return {_IMAGE: named, **sources}, [note]

    def _members(self) -> tuple[dict[str, Kind], dict[str, set[str]]]:
        """Return the kind and the extensions of each field that lies in members.

        Raises DatasetError.
        """
        kinds: dict[str, Kind] = {}
        extensions: dict[str, set[str]] = {}
        for found, parts in self._fields.items():
            extensions.setdefault(found.name, set()).update(parts)
            if not found.is_value and kinds.setdefault(found.name, found.kind) != found.kind:
                both = ", ".join(sorted({kinds[found.name], found.kind}))
                raise DatasetError(
                    f'{self._url}: the field "{found.name}" has members of two kinds ({both}). A '
                    "field has one kind: rename the members of the other, such as other.EXTENSION."
                )
        if len(kinds) > _MAX_FIELDS:
            some = ", ".join(list(kinds)[:3])
            raise DatasetError(
                f"{self._url}: got {len(kinds):,} fields ({some}, …), wanted at most "
                f"{_MAX_FIELDS:,}. A member's key ends at the first dot of its name, and the rest "
                "names its field: rename members whose names have dots of their own."
            )
        return kinds, extensions

    def _reject_without_image(self, names: Sequence[str]) -> None:
        """If some keys have images, reject the keys without one."""
        images = set(names)
        if not images:
            return
        with_image = {s.key: i for i, s in enumerate(self._samples) if images & s.spans.keys()}
        for row, sample in enumerate(self._samples):
            if images & sample.spans.keys():
                continue
            parts = [*sample.spans, *(each.name or "json" for each in sample.values)]
            problem, other = "isn't there", with_image.get(sample.key)
            if other is not None:
                archive = self._archives[int(self._number[other])].entry.name
                problem = f"lies in another archive ({printable(archive)})"
            self._refused[row] = f"{', '.join(parts)} whose image {problem}"

    def _name(self, row: int) -> str:
        entry = self._archives[int(self._number[row])].entry
        return printable(member_path(entry, self._samples[row].name))

    def _reject_unlabelled(self) -> None:
        """If some samples have classes, reject those without one.

        A class is never guessed, and one that is missing doesn't keep the labels from the others.
        If the schema names the label, such samples are kept.
        """
        present = self._values.present.get(LABEL)
        is_class = isinstance(self._values.types.get(LABEL), ClassLabel)
        if present is None or not is_class or LABEL in self._requested.types:
            return
        elsewhere = {
            sample.key: row
            for row, sample in enumerate(self._samples)
            if row in self._refused and present[row]
        }
        for row in np.flatnonzero(~present).tolist():
            other = elsewhere.get(self._samples[row].key)
            if other is None:
                reason = (
                    "no label (cls, or in json), but other samples have one; to keep such samples "
                    f'pass schema={{"{LABEL}": ClassLabel()}}'
                )
            else:
                reason = (
                    f"its label lies in another archive ({self._name(other)}): write all members "
                    "of a key into one archive"
                )
            self._refused.setdefault(row, reason)

    def _check_requested(self, types: Mapping[str, FieldType]) -> None:
        for source, name in self._requested.names.items():
            # Every key of a json is a field, whose name starts with the name that json was given.
            if name not in types and not any(each.startswith(f"{name}.") for each in types):
                raise ConfigError(
                    f'fields["{name}"]: no member in {self._url} ends in {source!r}, and no json '
                    f"has that key. The fields are {list(types)}."
                )
        missing = [name for name in self._requested.types if name not in types]
        if missing:
            # The first quarantined member may have held the missing field.
            first = next((each for found in self._archives for each in found.quarantined), None)
            left_out = f" (left out: {printable(first.name)}: {first.reason})" if first else ""
            raise ConfigError(
                f"schema: got {missing[0]!r}, but the members in {self._url} are the fields "
                f"{list(types)}{left_out}. Use one of these names, or an extension of members that "
                "are no field yet."
            )

    def _candidates(self, schema: Schema) -> Candidates:
        kept = np.array([i not in self._refused for i in range(len(self._samples))], np.bool_)
        rows = np.flatnonzero(kept)
        samples = [self._samples[row] for row in rows.tolist()]
        archives = self._number[rows]
        for row, reason in self._refused.items():
            self._archives[int(self._number[row])].refuse(self._samples[row].name, reason)
        counts = sum((each.passed_over for each in self._archives), Counter[str]())
        passed_over = dict(counts.most_common(_SHOWN_EXTENSIONS))
        if rest := counts.total() - sum(passed_over.values()):
            passed_over["(others)"] = rest
        bounds = np.searchsorted(archives, np.arange(len(self._archives) + 1))
        values, all_present = self._values.values, self._values.present
        return Candidates(
            schema=schema,
            files=[each.entry for each in self._archives],
            names=[
                member_path(self._archives[number].entry, sample.name)
                for number, sample in zip(archives.tolist(), samples, strict=True)
            ],
            spans={
                name: _spans(self._sources[name], samples, archives)
                for name in schema
                if name in self._sources
            },
            values={name: values[name].take(rows) for name in schema if name in values},
            present={
                name: present[rows]
                for name, present in all_present.items()
                if not present[rows].all()
            },
            shards=Grouping(
                order=np.arange(len(samples), dtype=np.int64), bounds=bounds.astype(np.int64)
            ),
            shard_bytes=None,
            quarantined=[q for each in self._archives for q in each.quarantined],
            passed_over=passed_over,
        )


def _spans(
    names: Sequence[str], samples: Sequence[ArchiveSample], archives: NDArray[np.int64]
) -> Spans:
    members = [
        next((sample.spans[name] for name in names if name in sample.spans), None)
        for sample in samples
    ]
    starts = np.array([0 if each is None else each.start for each in members], np.int64)
    ends = np.array([0 if each is None else each.end for each in members], np.int64)
    there = np.array([each is not None for each in members], np.bool_)
    return Spans(files=np.where(there, archives, MISSING), starts=starts, sizes=ends - starts)


def _warn_of_members(url: str, passed_over: Mapping[str, int]) -> None:
    kinds = {extension: count for extension, count in passed_over.items() if extension != NO_KEY}
    if not kinds:
        return
    some = list(kinds.items())[:_SHOWN_NAMES]
    listed = ", ".join(f"{count:,} .{extension}" for extension, count in some)
    more = " and others" if len(kinds) > _SHOWN_NAMES else ""
    warnings.warn(
        f"{url}: {listed}{more} members are left out and were never opened: their kind is unknown. "
        f'To read their bytes pass schema={{"{next(iter(kinds))}": Bytes()}} (docs/fields.md).',
        PenstockWarning,
        stacklevel=6,
    )


def _warn_of_keys(url: str, left_out: Mapping[str, str]) -> None:
    if not left_out:
        return
    listed = "; ".join(
        f'"{name}": {why.removeprefix(f"{url}: ").rstrip(".")}'
        for name, why in list(left_out.items())[:_SHOWN_NAMES]
    )
    more = f"; and {len(left_out) - _SHOWN_NAMES} more" if len(left_out) > _SHOWN_NAMES else ""
    warnings.warn(
        f"{url}: keys of json are left out: {listed}{more}. To read one, give its type in schema=.",
        PenstockWarning,
        stacklevel=6,
    )


def _log_refused(url: str, candidates: Candidates) -> None:
    if candidates.quarantined:
        first = candidates.quarantined[0]
        _log.warning(
            "%s: %d keys or members are left out, such as %s: %s. All are in the index's "
            "quarantine.jsonl.",
            url,
            len(candidates.quarantined),
            printable(first.name),
            first.reason,
        )
    numbered = [name for name in candidates.spans if name.isdigit()]
    if len(numbered) > 1:
        _log.warning(
            "%s: the fields %s are numbers, because a key ends at the first dot of a name. %s is "
            "in one sample with the others. If each is a sample of its own, rename the members so "
            "that their only dot precedes the extension.",
            url,
            ", ".join(map(repr, numbered[:_SHOWN_NAMES])),
            f"NAME.{numbered[0]}.jpg",
        )


class TarListing:
    """The tar files of a dataset, in order. Listing them reads none of them."""

    def __init__(self, origin: Origin, archives: Sequence[Entry]) -> None:
        self._origin, self._archives = origin, archives

    def snapshot(self) -> Snapshot:
        """Return the archives' names, sizes and times for the index."""
        return Snapshot.of(self._archives, {})

    def candidates(self, *, workers: int) -> Candidates:
        """Read all headers, labels and json; for this, remote archives are fetched completely.

        Warns of what is left out. Raises DatasetError (an archive is truncated, damaged or
        compressed; impossible fields), ConfigError (the user names fields that don't exist),
        IndexChangedError (an archive changed in the meantime), FetchError.
        """
        joined, url = self._joined(self._archives, workers=workers), self._origin.url
        for note in joined.notes:
            _log.info("%s: %s.", url, note)
        _warn_of_members(url, joined.candidates.passed_over)
        _warn_of_keys(url, joined.left_out)
        _log_refused(url, joined.candidates)
        return joined.candidates

    def counterparts(
        self, number: int, name: bytes, *, total: int, workers: int
    ) -> Iterator[tuple[Candidates, int]]:
        """Yield candidates for an archive of an earlier index; see `Listing`.

        First the archive by itself, then the same without the cache's copy. Then all archives
        together, because the others may decide which of its keys are samples.
        """
        del number, total
        ending = b"-%s.arrow"
        same = [e for e in self._archives if name.endswith(ending % e.identity.encode())]
        if not same:
            return
        entry = same[0]
        yield self._joined([entry], workers=workers).candidates, 0
        drop_cached_copy(self._origin, entry)
        yield self._joined([entry], workers=workers).candidates, 0
        together = self._joined(self._archives, workers=workers).candidates
        yield together, self._archives.index(entry)

    def _joined(self, archives: Sequence[Entry], *, workers: int) -> JoinedArchives:
        origin, arrangement = self._origin, self._origin.arrangement
        names = {source.lower(): name for name, source in arrangement.places}
        names |= {
            source: name for name, source in arrangement.places
        }  # keys of json keep their case
        requested = RequestedFields(given_types(arrangement), names)

        def read_once(entry: Entry) -> ArchiveSamples:
            with open_data_file(origin, entry, whole=True) as opened:
                return archive_samples(entry, opened, requested)

        def read(entry: Entry) -> ArchiveSamples:
            was_cached = is_cached(origin, entry)
            try:
                return read_once(entry)
            except DatasetError:
                if not was_cached:
                    raise
            drop_cached_copy(origin, entry)
            return read_once(entry)

        found = list(ordered(read, archives, workers=workers, ahead=workers + 2, name="tar-list"))
        return join_archives(found, requested, url=origin.url)
