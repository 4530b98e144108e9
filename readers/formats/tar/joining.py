"""Archives' contents joined: one schema for all, and which keys are samples of it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from penstock.cache.errors import ConfigError, DatasetError
from penstock.readers.fields.field_types import ClassLabel, Image
from penstock.readers.fields.mask_names import is_mask_name
from penstock.readers.fields.schema import Schema
from penstock.readers.fields.selection import LABEL
from penstock.readers.files.names import printable
from penstock.readers.formats.candidates import MISSING, Candidates, Spans
from penstock.readers.formats.grouping import Grouping
from penstock.readers.formats.tar.archive_samples import below
from penstock.readers.formats.tar.member_fields import span_types
from penstock.readers.formats.tar.noting import Noted, note_values

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from penstock.readers.fields.field_types import FieldType
    from penstock.readers.formats.tar.archive_samples import ArchiveSamples, Sample
    from penstock.readers.formats.tar.member_fields import Asked, Kind, MemberField

_MAX_FIELDS = 1024
_SHOWN_EXTENSIONS = 32
_SHOWN_NAMES = 5
_IMAGE = "image"


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
        self._sources: dict[str, list[str]] = {}
        self._noted = Noted()

    def join(self) -> Joined:
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
            self._samples,
            self._fields,
            self._asked,
            taken=types,
            name=self._name,
            url=self._url,
        )
        for row, reason in self._noted.refused.items():
            self._refused.setdefault(row, reason)
        self._refuse_unlabelled()
        types |= self._noted.types
        self._check_asked(types)
        images = [name for name, kind in kinds.items() if kind == "image"]
        first = sorted(images, key=lambda name: not isinstance(types[name], Image))
        order = dict.fromkeys((*first, *((LABEL,) if LABEL in types else ()), *types))
        return Joined(
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
        return printable(below(entry, self._samples[row].name))

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
                below(self._archives[number].entry, sample.name)
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


def _spans(names: Sequence[str], samples: Sequence[Sample], archives: NDArray[np.int64]) -> Spans:
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
