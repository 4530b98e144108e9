"""Reuse what an earlier index says of today's candidates, so that unchanged files aren't read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.readers.formats.candidates import MISSING
from penstock.readers.types import Facts

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from penstock.readers.fields import FieldType, Schema
    from penstock.readers.formats.candidates import Candidates
    from penstock.readers.formats.sidecar import Sidecar
    from penstock.readers.origin import Entry

    _Span = tuple[Entry, int, int]
    _Earlier = dict[str, tuple[Entry, Facts]]


@dataclass(frozen=True, slots=True, kw_only=True)
class PriorFacts:
    """What an earlier index says of today's candidates, by position.

    same: of those whose files look as they did, so that this holds unread; before: of all whose
    files have the size they had, so that this holds where the bytes have those CRC-32Cs; shared,
    gone: samples of that index that are still there by name, and that aren't.
    """

    same: Mapping[int, Mapping[str, Facts]]
    before: Mapping[int, Mapping[str, Facts]]
    shared: int
    gone: int


def prior_facts(candidates: Candidates, sidecars: Iterable[Sidecar]) -> PriorFacts:
    """What all sidecars of an earlier index say. Raises what reading them raises."""
    earlier: dict[bytes, _Earlier] = {}
    for sidecar in sidecars:
        earlier |= _samples(sidecar, candidates.schema)
    same: dict[int, Mapping[str, Facts]] = {}
    before: dict[int, Mapping[str, Facts]] = {}
    shared = 0
    for position, name in enumerate(candidates.names):
        if name not in earlier:
            continue
        shared += 1
        known, today = earlier[name], _spans(candidates, position)
        facts = _facts(known, today)
        if facts is None:
            continue
        if all(known[field][0] == entry for field, (entry, _, _) in today.items()):
            same[position] = facts
        if not any(each.start for each in facts.values()):  # a header has no CRC
            before[position] = facts
    return PriorFacts(same=same, before=before, shared=shared, gone=len(earlier) - shared)


def _samples(sidecar: Sidecar, schema: Schema) -> Iterator[tuple[bytes, _Earlier]]:
    files = list(sidecar.files.entries())
    columns = {
        name: _rows(sidecar, name)
        for name in sidecar.spans
        if name in schema and _is_alike(sidecar.layout.schema[name], schema[name])
    }
    for row, name in enumerate(sidecar.names):
        facts = {field: each for field, rows in columns.items() if (each := rows[row]) is not None}
        yield name, {field: (files[number], each) for field, (number, each) in facts.items()}


def _is_alike(was: FieldType, now: FieldType) -> bool:
    """Whether what a check told of a type holds for another: a picture's decoder isn't a mask's."""
    return type(was) is type(now) and getattr(was, "of", None) == getattr(now, "of", None)


def _rows(sidecar: Sidecar, name: str) -> list[tuple[int, Facts] | None]:
    notes = sidecar.spans[name]
    shapes = [()] * sidecar.samples if notes.shapes is None else notes.shapes.tolist()
    columns = (notes.files, notes.crcs, notes.starts, notes.sizes)
    rows = zip(*(column.tolist() for column in columns), shapes, notes.codecs, strict=True)
    return [
        None if file == MISSING else (file, Facts(crc, start, size, tuple(shape), codec))
        for file, crc, start, size, shape, codec in rows
    ]


def _spans(candidates: Candidates, position: int) -> dict[str, _Span]:
    """Where one candidate's fields lie today."""
    found = {}
    for name, spans in candidates.spans.items():
        number = int(spans.files[position])
        if number != MISSING:
            entry = candidates.files[number]
            found[name] = entry, int(spans.starts[position]), int(spans.sizes[position])
    return found


def _facts(known: _Earlier, today: Mapping[str, _Span]) -> Mapping[str, Facts] | None:
    """The facts as an examination of today's spans gives them; None where fields or sizes are
    others."""
    if set(known) != set(today):
        return None
    facts = {}
    for field, (entry, start, size) in today.items():
        earlier, was = known[field]
        begun = was.start - start
        if earlier.size_bytes != entry.size_bytes or begun < 0 or begun + was.size != size:
            return None
        facts[field] = Facts(was.crc32c, begun, was.size, was.shape, was.codec)
    return facts
