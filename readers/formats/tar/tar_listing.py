"""Join the samples of all tar files into one schema and list them as candidates.

Headers, labels and json members are read; nothing is decoded. What labels and json say becomes
columns of values. An archive is a shard, its members are read in place.
"""

from __future__ import annotations

import logging
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from penstock.cache import ConfigError, DatasetError, PenstockWarning, ordered
from penstock.readers.fields import (
    LABEL,
    ClassLabel,
    Image,
    Schema,
    TextTable,
    fields_of,
    is_mask_name,
    object_table,
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

    from penstock.readers.fields import Column, FieldType
    from penstock.readers.formats.tar.archive_samples import ArchiveSample, ArchiveSamples
    from penstock.readers.formats.tar.member_fields import Kind, MemberField
    from penstock.readers.origin import Entry, Origin

_UNIT = "sample"


@dataclass(slots=True, kw_only=True)
class NotedValues:
    """The fields of n samples whose values are known. present: of those that some lack. refused: by
    sample, why it is none; left_out: keys of json that no field can be, and why; notes: what was
    decided, a sentence each."""

    types: dict[str, FieldType] = field(default_factory=dict)
    values: dict[str, Column] = field(default_factory=dict)
    present: dict[str, NDArray[np.bool_]] = field(default_factory=dict)
    refused: dict[int, str] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def note_values(
    samples: Sequence[ArchiveSample],
    fields: Collection[MemberField],
    asked: RequestedFields,
    *,
    taken: Collection[str],
    name: Callable[[int], str],
    url: str,
) -> NotedValues:
    """Gather what the samples' labels and json say.

    fields: of all members; taken: names of fields that lie in members; name: of a sample, for
    people. Raises DatasetError (labels of two kinds).
    """
    return _ValueCollector(samples, asked, name, url).note(fields, taken)


class _SampleNames(Sequence[str]):
    """Names of samples, each made when a message has it."""

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
    def __init__(
        self,
        samples: Sequence[ArchiveSample],
        asked: RequestedFields,
        name: Callable[[int], str],
        url: str,
    ) -> None:
        self._samples, self._asked, self._name, self._url = samples, asked, name, url
        self._noted = NotedValues()

    def note(self, fields: Collection[MemberField], taken: Collection[str]) -> NotedValues:
        """Labels first: json may say the same of other samples."""
        classes = {each.name: self._values(each) for each in fields if each.kind == "class"}
        columns: dict[str, Sequence[Any]] = dict(classes)
        for each in fields:
            if each.kind != "json":
                continue
            for key, values in self._flat(self._values(each)).items():
                if not self._asked.wants_key(each, key):
                    continue
                full = f"{each.name}.{key}" if each.name else key
                full = self._asked.names.get(full, full)
                if full in classes and (both := _merged(columns[full], values)) is not None:
                    columns[full] = both
                    continue
                if full in columns or full in taken:
                    self._noted.notes.append(
                        f'"{full}" is a member; what json says of it is the field "json.{full}"'
                    )
                    full = f"json.{full}"
                if full in columns or full in taken:
                    self._noted.left_out[full] = "a member has this name, and other json too"
                else:
                    columns[full] = values
        for full, values in columns.items():
            if all(value is None for value in values):
                self._noted.notes.append(f'no sample has a value under "{full}" of json')
                continue
            self._add(full, values, ClassLabel() if full in classes else None)
        return self._noted

    def _values(self, field: MemberField) -> list[Any]:
        return [sample.values.get(field) for sample in self._samples]

    def _flat(self, objects: list[Any]) -> Mapping[str, Sequence[Any]]:
        """Objects as columns; samples whose object can't be one are refused."""
        try:
            return self._objects(objects)
        except DatasetError:
            pass  # one sample's fault, or that of all together: which?
        for row, each in enumerate(objects):
            try:
                self._objects([each], first=row)
            except DatasetError as error:
                self._noted.refused.setdefault(row, str(error))
                objects[row] = None
        try:
            return self._objects(objects)
        except DatasetError as error:
            self._noted.left_out["json"] = str(error)
            return {}

    def _objects(self, objects: list[Any], first: int = 0) -> Mapping[str, Sequence[Any]]:
        places = _SampleNames(self._name, range(first, first + len(objects)))
        return object_table(objects, source=self._url, places=places, unit=_UNIT).columns

    def _add(self, name: str, values: Sequence[Any], usual: FieldType | None) -> None:
        """One column by itself: what is odd about it mustn't keep the others out."""
        places = _SampleNames(self._name, range(len(self._samples)))
        table = TextTable(source=self._url, columns={name: values}, places=places, unit=_UNIT)
        noted, type = self._noted, self._asked.types.get(name) or usual
        try:
            found = fields_of(table, {} if type is None else {name: type})
        except DatasetError as error:
            if name == LABEL:
                raise
            noted.left_out[name] = str(error)
            return
        noted.types |= found.types
        noted.values |= found.values
        noted.present |= found.present
        noted.left_out |= found.left_out
        noted.notes += (
            note.removeprefix(f"{self._url}: ").removesuffix(".") for note in found.notes
        )
        for row, reason in found.rejected.items():
            noted.refused.setdefault(row, reason)


def _merged(labels: Sequence[Any], told: Sequence[Any]) -> list[Any] | None:
    """Labels of cls and of json as one column, where both never differ; else None."""
    both = []
    for label, other in zip(labels, told, strict=True):
        if other is not None and (type(other) is not int or label not in (None, other)):
            return None
        both.append(other if label is None else label)
    return both


_MAX_FIELDS = 1024
_SHOWN_EXTENSIONS = 32
_SHOWN_NAMES = 5
_IMAGE = "image"


@dataclass(slots=True, kw_only=True)
class JoinedArchives:
    """What archives hold together. left_out: keys of json that no field can be, and why; notes:
    what was decided, a sentence each."""

    candidates: Candidates
    left_out: dict[str, str]
    notes: list[str]


def join_archives(
    archives: Sequence[ArchiveSamples], asked: RequestedFields, *, url: str
) -> JoinedArchives:
    """Join what archives hold. url: of the dataset, for people.

    Raises ConfigError (a schema of what isn't there), DatasetError (more fields than can be meant;
    labels of two kinds).
    """
    return _ArchiveJoin(archives, asked, url).join()


class _ArchiveJoin:
    """The samples of all archives, numbered across them."""

    def __init__(
        self, archives: Sequence[ArchiveSamples], asked: RequestedFields, url: str
    ) -> None:
        self._archives, self._asked, self._url = archives, asked, url
        self._samples = [sample for each in archives for sample in each.samples]
        counts = [len(each.samples) for each in archives]
        self._number = np.repeat(np.arange(len(archives)), counts)
        self._fields: dict[MemberField, set[str]] = {}
        for each in archives:
            for found, extensions in each.fields.items():
                self._fields.setdefault(found, set()).update(extensions)
        self._refused: dict[int, str] = {}
        self._sources: dict[str, list[str]] = {}
        self._noted = NotedValues()

    def join(self) -> JoinedArchives:
        members, extensions = self._members()
        self._sources, only = self._sources_of(members, extensions)
        kinds = {name: members[names[0]] for name, names in self._sources.items()}
        lasts = {
            name: [e.rpartition(".")[2] for each in names for e in extensions[each]]
            for name, names in self._sources.items()
        }
        types, notes = span_types(kinds, lasts, self._asked.types)
        self._refuse_without_image([name for name, kind in members.items() if kind == "image"])
        self._noted = note_values(
            self._samples, self._fields, self._asked, taken=types, name=self._name, url=self._url
        )
        for row, reason in self._noted.refused.items():
            self._refused.setdefault(row, reason)
        self._refuse_unlabelled()
        types |= self._noted.types
        self._check_asked(types)
        images = [name for name, kind in kinds.items() if kind == "image"]
        first = sorted(images, key=lambda name: not isinstance(types[name], Image))
        order = dict.fromkeys((*first, *((LABEL,) if LABEL in types else ()), *types))
        return JoinedArchives(
            candidates=self._candidates(Schema({name: types[name] for name in order})),
            left_out=self._noted.left_out,
            notes=[*only, *notes, *self._noted.notes],
        )

    def _sources_of(
        self, kinds: Mapping[str, Kind], extensions: Mapping[str, set[str]]
    ) -> tuple[dict[str, list[str]], list[str]]:
        """The members' names that each field comes from, and what was decided. It is one, but where
        no key has several images: then that is the field "image", whatever its member is called."""
        asked = {*self._asked.types, *self._asked.names.values()} - {_IMAGE}
        images = {
            name
            for name, kind in kinds.items()
            if kind == "image"
            and not is_mask_name(name, [e.rpartition(".")[2] for e in extensions[name]])
        }
        sources = {name: [name] for name in kinds}
        others = images - {_IMAGE}
        if not others or others & asked or kinds.get(_IMAGE, "image") != "image":
            return sources, []
        if any(len(images & sample.spans.keys()) > 1 for sample in self._samples):
            return sources, []
        named = [name for name in kinds if name in images]
        sources = {name: names for name, names in sources.items() if name not in images}
        listed = ", ".join(f'"{name}"' for name in named[:_SHOWN_NAMES])
        note = f'the only image of each key ({listed}) is the field "{_IMAGE}"'
        return {_IMAGE: named, **sources}, [note]

    def _members(self) -> tuple[dict[str, Kind], dict[str, set[str]]]:
        """Of the names of members that are spans the kind, and extensions. Raises DatasetError."""
        kinds: dict[str, Kind] = {}
        extensions: dict[str, set[str]] = {}
        for found, parts in self._fields.items():
            extensions.setdefault(found.name, set()).update(parts)
            if not found.is_value and kinds.setdefault(found.name, found.kind) != found.kind:
                both = ", ".join(sorted({kinds[found.name], found.kind}))
                raise DatasetError(
                    f'{self._url}: members of the field "{found.name}" are of two kinds ({both}). '
                    "A field has one kind: rename the others, such as other.EXTENSION."
                )
        if len(kinds) > _MAX_FIELDS:
            some = ", ".join(list(kinds)[:3])
            raise DatasetError(
                f"{self._url}: got {len(kinds):,} fields ({some}, …), wanted at most "
                f"{_MAX_FIELDS:,}. A member's key ends at the first dot of its name, and the rest "
                "names its field: rename members whose names have dots of their own."
            )
        return kinds, extensions

    def _refuse_without_image(self, names: Sequence[str]) -> None:
        """Where there are images, a key without one is no sample, and is named."""
        images = set(names)
        if not images:
            return
        with_image = {s.key: i for i, s in enumerate(self._samples) if images & s.spans.keys()}
        for row, sample in enumerate(self._samples):
            if images & sample.spans.keys():
                continue
            parts = [*sample.spans, *(each.name or "json" for each in sample.values)]
            there = with_image.get(sample.key)
            where = "isn't there"
            if there is not None:
                archive = self._archives[int(self._number[there])].entry.name
                where = f"lies in another archive ({printable(archive)})"
            self._refused[row] = f"{', '.join(parts)} whose image {where}"

    def _name(self, row: int) -> str:
        entry = self._archives[int(self._number[row])].entry
        return printable(member_path(entry, self._samples[row].name))

    def _refuse_unlabelled(self) -> None:
        """Where samples have classes, one without isn't guessed at and doesn't keep the label from
        all others; a schema that names the label wants to have it as it is."""
        present = self._noted.present.get(LABEL)
        is_class = isinstance(self._noted.types.get(LABEL), ClassLabel)
        if present is None or not is_class or LABEL in self._asked.types:
            return
        elsewhere = {
            sample.key: row
            for row, sample in enumerate(self._samples)
            if row in self._refused and present[row]
        }
        for row in np.flatnonzero(~present).tolist():
            there = elsewhere.get(self._samples[row].key)
            if there is None:
                reason = (
                    "no label (cls, or in json), and other samples have one; to keep such samples "
                    f'pass schema={{"{LABEL}": ClassLabel()}}'
                )
            else:
                reason = (
                    f"its label lies in another archive ({self._name(there)}): write the members "
                    "of a key into one"
                )
            self._refused.setdefault(row, reason)

    def _check_asked(self, types: Mapping[str, FieldType]) -> None:
        for where, name in self._asked.names.items():
            # Of json every key is a field, whose names begin with what it was called.
            if name not in types and not any(each.startswith(f"{name}.") for each in types):
                raise ConfigError(
                    f'fields["{name}"]: no member in {self._url} ends in {where!r}, and no json '
                    f"has that key. Fields: {list(types)}."
                )
        missing = [name for name in self._asked.types if name not in types]
        if missing:
            raise ConfigError(
                f"schema: got {missing[0]!r}, and the members in {self._url} are the fields "
                f"{list(types)}{self._first_refused()}. Name one of these, or an extension that is "
                "no field yet."
            )

    def _first_refused(self) -> str:
        """What was left out before: it may be all that had the field."""
        first = next((each for found in self._archives for each in found.quarantined), None)
        return f" (left out: {printable(first.name)}: {first.reason})" if first else ""

    def _candidates(self, schema: Schema) -> Candidates:
        kept = np.array([i not in self._refused for i in range(len(self._samples))], np.bool_)
        rows = np.flatnonzero(kept)
        samples = [self._samples[row] for row in rows.tolist()]
        archives = self._number[rows]
        for row, reason in self._refused.items():
            self._archives[int(self._number[row])].refuse(self._samples[row].name, reason)
        passed = sum((each.passed_over for each in self._archives), Counter[str]())
        bounds = np.searchsorted(archives, np.arange(len(self._archives) + 1))
        noted = self._noted
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
            values={name: noted.values[name].take(rows) for name in schema if name in noted.values},
            present={
                name: present[rows]
                for name, present in noted.present.items()
                if not present[rows].all()
            },
            shards=Grouping(
                order=np.arange(len(samples), dtype=np.int64), bounds=bounds.astype(np.int64)
            ),
            shard_bytes=None,
            quarantined=[q for each in self._archives for q in each.quarantined],
            passed_over=_shown_counts(passed),
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


def _shown_counts(counts: Counter[str]) -> dict[str, int]:
    shown = dict(counts.most_common(_SHOWN_EXTENSIONS))
    rest = counts.total() - sum(shown.values())
    return {**shown, "(others)": rest} if rest else shown


_NAMED = 5

_log = logging.getLogger("penstock")


def list_samples(
    origin: Origin, archives: Sequence[Entry], *, workers: int, warns: bool = True
) -> Candidates:
    """Read all headers, labels and json; remote archives are fetched whole for that. warns: of what
    is left out.

    Raises DatasetError (an archive is torn, damaged or compressed; fields that can't be),
    ConfigError (the user names fields that aren't there), IndexChangedError (an archive changed
    meanwhile), FetchError.
    """
    arrangement = origin.arrangement
    names = {where.lower(): name for name, where in arrangement.places}
    names |= {where: name for name, where in arrangement.places}  # keys of json as they stand
    asked = RequestedFields(given_types(arrangement), names)

    def read_once(entry: Entry) -> ArchiveSamples:
        with open_data_file(origin, entry, whole=True) as opened:
            return archive_samples(entry, opened, asked)

    def read(entry: Entry) -> ArchiveSamples:
        was_here = is_cached(origin, entry)
        try:
            return read_once(entry)
        except DatasetError:
            if not was_here:
                raise
        drop_cached_copy(origin, entry)
        return read_once(entry)

    found = list(ordered(read, archives, workers=workers, ahead=workers + 2, name="tar-list"))
    joined = join_archives(found, asked, url=origin.url)
    if warns:
        for note in joined.notes:
            _log.info("%s: %s.", origin.url, note)
        _warn_of_members(origin.url, joined.candidates.passed_over)
        _warn_of_keys(origin.url, joined.left_out)
        _tell_of_refused(origin.url, joined.candidates)
    return joined.candidates


def _warn_of_members(url: str, passed_over: Mapping[str, int]) -> None:
    kinds = {extension: count for extension, count in passed_over.items() if extension != NO_KEY}
    if not kinds:
        return
    some = list(kinds.items())[:_NAMED]
    listed = ", ".join(f"{count:,} .{extension}" for extension, count in some)
    more = " and others" if len(kinds) > _NAMED else ""
    warnings.warn(
        f"{url}: {listed}{more} members are left out, and were never opened: nothing is known of "
        f'their kind. schema={{"{next(iter(kinds))}": Bytes()}} hands out their bytes '
        "(docs/fields.md).",
        PenstockWarning,
        stacklevel=8,
    )


def _warn_of_keys(url: str, left_out: Mapping[str, str]) -> None:
    if not left_out:
        return
    listed = "; ".join(
        f'"{name}": {why.removeprefix(f"{url}: ").rstrip(".")}'
        for name, why in list(left_out.items())[:_NAMED]
    )
    more = f"; and {len(left_out) - _NAMED} more" if len(left_out) > _NAMED else ""
    warnings.warn(
        f"{url}: keys of json are left out: {listed}{more}. A type in schema= says what is meant.",
        PenstockWarning,
        stacklevel=8,
    )


def _tell_of_refused(url: str, candidates: Candidates) -> None:
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
            "%s: the fields %s are numbers: a key ends at the first dot of a name, so that %s is "
            "of one sample with the others. If each is a sample, rename the members: no dot but "
            "the last.",
            url,
            ", ".join(map(repr, numbered[:_NAMED])),
            f"NAME.{numbered[0]}.jpg",
        )


class TarListing:
    """The tar files of a dataset, in order; nothing of them was read."""

    def __init__(self, origin: Origin, archives: Sequence[Entry]) -> None:
        self._origin, self._archives = origin, archives

    def snapshot(self) -> Snapshot:
        """What an index notes of the archives."""
        return Snapshot.of(self._archives, {})

    def candidates(self, *, workers: int) -> Candidates:
        """Read all headers and labels; remote archives are fetched whole for that."""
        return self._candidates(self._archives, workers=workers)

    def counterparts(
        self, number: int, name: bytes, *, total: int, workers: int
    ) -> Iterator[tuple[Candidates, int]]:
        """The archive by itself first, then without the cache's copy; then with all others, where
        what they hold says what is a sample here. See `Listing`."""
        del number, total
        ending = b"-%s.arrow"
        here = [e for e in self._archives if name.endswith(ending % e.identity.encode())]
        if not here:
            return
        entry = here[0]
        yield self._candidates([entry], workers=workers, warns=False), 0
        drop_cached_copy(self._origin, entry)
        yield self._candidates([entry], workers=workers, warns=False), 0
        together = self._candidates(self._archives, workers=workers, warns=False)
        yield together, self._archives.index(entry)

    def _candidates(
        self, archives: Sequence[Entry], *, workers: int, warns: bool = True
    ) -> Candidates:
        return list_samples(self._origin, archives, workers=workers, warns=warns)
