"""Archives' contents joined: one schema for all, and which keys are samples of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from penstock.cache.errors import ConfigError, DatasetError
from penstock.readers.fields.field_types import ClassLabel
from penstock.readers.fields.rows import Table, object_table
from penstock.readers.fields.schema import Schema
from penstock.readers.fields.selection import LABEL
from penstock.readers.fields.tables import fields_of
from penstock.readers.files.names import printable
from penstock.readers.formats.candidates import MISSING, Candidates, Spans
from penstock.readers.formats.grouping import Grouping
from penstock.readers.formats.tar.archive_samples import below
from penstock.readers.formats.tar.member_fields import span_types

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from numpy.typing import NDArray

    from penstock.readers.fields.columns import Column
    from penstock.readers.fields.field_types import FieldType
    from penstock.readers.formats.tar.archive_samples import ArchiveSamples, Sample
    from penstock.readers.formats.tar.member_fields import Asked, Kind, MemberField

_MAX_FIELDS = 1024
_SHOWN_EXTENSIONS = 32
_UNIT = "sample"


@dataclass(slots=True, kw_only=True)
class Joined:
    """What archives hold together. left_out: keys of json that no field can be, and why; notes:
    what was decided, a sentence each."""

    candidates: Candidates
    left_out: dict[str, str]
    notes: list[str]


def join(archives: Sequence[ArchiveSamples], asked: Asked, *, url: str) -> Joined:
    """Join what archives hold. url: of the dataset, for people.

    Raises ConfigError (a schema of what isn't there), DatasetError (more fields than can be meant;
    labels of two kinds).
    """
    return _Joining(archives, asked, url).join()


@dataclass(slots=True)
class _Noted:
    """Values of all samples, before any was refused."""

    types: dict[str, FieldType] = field(default_factory=dict)
    values: dict[str, Column] = field(default_factory=dict)
    present: dict[str, NDArray[np.bool_]] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


class _Places(Sequence[str]):
    """Names of samples, each made when a message has it."""

    def __init__(self, name: Callable[[int], str], rows: range) -> None:
        self._name, self._rows = name, rows

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, row: int) -> str: ...
    @overload
    def __getitem__(self, row: slice) -> _Places: ...
    def __getitem__(self, row: int | slice) -> str | _Places:
        if isinstance(row, slice):
            return _Places(self._name, self._rows[row])
        return self._name(self._rows[row])


class _Joining:
    """The samples of all archives, numbered across them."""

    def __init__(self, archives: Sequence[ArchiveSamples], asked: Asked, url: str) -> None:
        self._archives, self._asked, self._url = archives, asked, url
        self._samples = [sample for each in archives for sample in each.samples]
        counts = [len(each.samples) for each in archives]
        self._number = np.repeat(np.arange(len(archives)), counts)
        self._fields: dict[MemberField, set[str]] = {}
        for each in archives:
            for found, extensions in each.fields.items():
                self._fields.setdefault(found, set()).update(extensions)
        self._refused: dict[int, str] = {}
        self._noted = _Noted()

    def join(self) -> Joined:
        kinds = self._span_kinds()
        extensions: dict[str, set[str]] = {}
        for found, parts in self._fields.items():
            extensions.setdefault(found.name, set()).update(parts)
        types, notes = span_types(kinds, extensions, self._asked.types)
        self._refuse_without_image(kinds)
        self._note(types)
        self._refuse_unlabelled()
        self._check_asked({**types, **self._noted.types})
        images = [name for name, kind in kinds.items() if kind == "image"]
        labels = [LABEL] if LABEL in self._noted.types else []
        order = dict.fromkeys((*sorted(images, key=lambda n: types[n].kind != "image"), *labels))
        schema = Schema(
            {
                name: {**types, **self._noted.types}[name]
                for name in (*order, *(n for n in (*types, *self._noted.types) if n not in order))
            }
        )
        return Joined(
            candidates=self._candidates(schema, types),
            left_out=self._noted.left_out,
            notes=[*notes, *self._noted.notes],
        )

    def _span_kinds(self) -> dict[str, Kind]:
        """The kinds of fields that lie in members. Raises DatasetError."""
        kinds: dict[str, Kind] = {}
        for found in self._fields:
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
        return kinds

    def _refuse_without_image(self, kinds: Mapping[str, Kind]) -> None:
        """Where there are images, a key without one is no sample, and is named."""
        images = {name for name, kind in kinds.items() if kind == "image"}
        if not images:
            return
        with_image = {s.key: i for i, s in enumerate(self._samples) if images & s.spans.keys()}
        for row, sample in enumerate(self._samples):
            if images & sample.spans.keys():
                continue
            names = [*sample.spans, *(each.name or "json" for each in sample.values)]
            there = with_image.get(sample.key)
            where = "isn't there"
            if there is not None:
                archive = self._archives[int(self._number[there])].entry.name
                where = f"lies in another archive ({printable(archive)})"
            self._refused[row] = f"{', '.join(names)} whose image {where}"

    def _note(self, spans: Mapping[str, FieldType]) -> None:
        """Make columns of labels and of what json says."""
        taken = set(spans)
        for found in sorted(self._fields, key=lambda each: each.kind):  # cls before json
            if not found.is_value:
                continue
            values = [sample.values.get(found) for sample in self._samples]
            if found.kind == "class":
                self._note_column(found.name, self._table({found.name: values}), ClassLabel())
                taken.add(found.name)
                continue
            for name, column in self._flat(values).items():
                full = f"{found.name}.{name}" if found.name else name
                full = self._asked.names.get(full, full)
                if full in taken or full in self._noted.types:
                    self._noted.notes.append(
                        f'what json says of "{full}" is the field "json.{full}", beside the '
                        f'member "{full}"'
                    )
                    full = f"json.{full}"
                self._note_column(full, self._table({full: column}), None)

    def _flat(self, objects: list[Any]) -> Mapping[str, Sequence[Any]]:
        """Objects as columns; samples whose object can't be one are refused."""
        try:
            return self._objects(objects)
        except DatasetError:
            pass  # some sample's, or that of all together: which?
        for row, each in enumerate(objects):
            try:
                self._objects([each], first=row)
            except DatasetError as error:
                self._refused.setdefault(row, str(error))
                objects[row] = None
        try:
            return self._objects(objects)
        except DatasetError as error:
            self._noted.left_out["json"] = str(error)
            return {}

    def _objects(self, objects: list[Any], first: int = 0) -> Mapping[str, Sequence[Any]]:
        places = _Places(self._name, range(first, first + len(objects)))
        return object_table(objects, source=self._url, places=places, unit=_UNIT).columns

    def _table(self, columns: Mapping[str, Sequence[Any]]) -> Table:
        places = _Places(self._name, range(len(self._samples)))
        return Table(source=self._url, columns=columns, places=places, unit=_UNIT)

    def _name(self, row: int) -> str:
        entry = self._archives[int(self._number[row])].entry
        return printable(below(entry, self._samples[row].name))

    def _note_column(self, name: str, table: Table, usual: FieldType | None) -> None:
        """One column by itself: what is odd about it mustn't keep the others out."""
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
        noted.notes += found.notes
        for row, reason in found.rejected.items():
            self._refused.setdefault(row, reason)

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
                f"{list(types)}. Name one of these, or the extension of members."
            )

    def _candidates(self, schema: Schema, spans: Mapping[str, FieldType]) -> Candidates:
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
                below(self._archives[number].entry, sample.name)
                for number, sample in zip(archives.tolist(), samples, strict=True)
            ],
            spans={name: _spans(name, samples, archives) for name in schema if name in spans},
            values={name: noted.values[name].take(rows) for name in schema if name not in spans},
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


def _spans(name: str, samples: Sequence[Sample], archives: NDArray[np.int64]) -> Spans:
    members = [sample.spans.get(name) for sample in samples]
    starts = np.array([0 if each is None else each.start for each in members], np.int64)
    ends = np.array([0 if each is None else each.end for each in members], np.int64)
    there = np.array([each is not None for each in members], np.bool_)
    return Spans(files=np.where(there, archives, MISSING), starts=starts, sizes=ends - starts)


def _shown_counts(counts: Counter[str]) -> dict[str, int]:
    shown = dict(counts.most_common(_SHOWN_EXTENSIONS))
    rest = counts.total() - sum(shown.values())
    return {**shown, "(others)": rest} if rest else shown
