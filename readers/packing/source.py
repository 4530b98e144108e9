"""What a pack is made from: data without an index of its own, or another pack."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from crc32c import crc32c

from penstock.cache.errors import ConfigError
from penstock.readers.fields.arrays import array_form, to_array
from penstock.readers.fields.boxes import BoxUnits
from penstock.readers.fields.columns import DenseColumn, EncodedColumn, ListColumn
from penstock.readers.fields.examine import verify_for
from penstock.readers.fields.facts import Facts
from penstock.readers.fields.field_types import Array, Boxes, Text, is_encoded
from penstock.readers.fields.naming import Naming
from penstock.readers.fields.schema import Schema
from penstock.readers.fields.settle import Settling
from penstock.readers.files.names import printable
from penstock.readers.index.intake import check_units, read_chunks
from penstock.readers.packing.plan import PackPlan, plan_candidates
from penstock.readers.packing.sample import PackSample, payload_of
from penstock.readers.types import Rejection

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from penstock.readers.fields.field_types import FieldType
    from penstock.readers.formats.candidates import Candidates
    from penstock.readers.formats.format import Indexing
    from penstock.readers.index.intake import Chunk
    from penstock.readers.origin.origin import Origin
    from penstock.readers.origin.quarantine import LeftOut, QuarantineEntry
    from penstock.readers.types import Encoded, Verify


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleGroup:
    """Some samples of one shard to be, read and examined. positions: int64, shape (n,); samples:
    each, or why it is bad; names: in the source."""

    positions: NDArray[np.int64]
    samples: list[PackSample | Rejection]
    names: list[bytes]


class SampleSource(Protocol):
    """What shards are written from: samples by their positions.

    schema: the fields that are packed; a mask's dtype may be unsettled. sizes: bytes of each
    sample, int64, shape (n,).
    """

    url: str
    schema: Schema
    sizes: NDArray[np.int64]

    def groups(
        self,
        shards: Iterator[tuple[int, NDArray[np.int64]]],
        *,
        verify: Verify | None,
        workers: int,
    ) -> Iterator[SampleGroup]:
        """The samples of (shard, positions), in that order, in pieces of one shard each. verify:
        decodes images, None for the installed decoder; samples that were verified aren't again."""

    def name(self, position: int) -> bytes:
        """A sample's name for the quarantine."""


class PackSource(SampleSource, Protocol):
    """What a whole pack is made from.

    fingerprint: changes when anything about the source does. has_ids: its samples have ids already,
    which don't change where one of them turns out bad. has_papers, max_pixels: as of
    `Candidates`. left_out:
    samples that it left out itself, before any was read for the pack, and that aren't in
    `quarantined`.
    """

    has_ids: bool
    has_papers: bool
    max_pixels: int
    fingerprint: str
    quarantined: list[QuarantineEntry]
    left_out: Mapping[str, LeftOut]

    def plan(self, *, shuffle: bool, seed: int, shard_bytes: int) -> PackPlan:
        """Which sample goes into which shard."""


class CandidateSource:
    """Data without an index of its own: each sample is read where it lies and checked once, on its
    way into the pack. Of remote objects that hold many samples as many stay in the cache as it has
    room for: a shuffled shard takes from all."""

    has_ids = False

    def __init__(
        self,
        origin: Origin,
        indexing: Indexing,
        *,
        fields: Sequence[str] | None = None,
        renames: Mapping[str, str] | None = None,
        workers: int,
    ) -> None:
        """renames: names of fields, each with that which the candidates have for it."""
        listing = indexing.list(origin)
        found = listing.candidates(workers=workers)
        if renames:
            found = _renamed(found, Naming.of(found.schema, renames, (), url=origin.url))
        if origin.arrangement.max_pixels is not None:
            found = replace(found, max_pixels=origin.arrangement.max_pixels)
        found = _settled(origin, chosen(found, fields), workers=workers)
        check_units(found)
        told = f"{listing.snapshot().fingerprint}{origin.variant}"
        self._take(origin, found, hashlib.sha256(told.encode()).hexdigest())

    @classmethod
    def of(cls, origin: Origin, candidates: Candidates, *, fingerprint: str) -> CandidateSource:
        """Candidates that somebody has listed and settled already."""
        made = cls.__new__(cls)
        made._take(origin, candidates, fingerprint)
        return made

    def _take(self, origin: Origin, found: Candidates, fingerprint: str) -> None:
        self._origin, self.candidates = origin, found
        self.url, self.fingerprint = origin.url, fingerprint
        self.schema, self.sizes, self.quarantined = found.schema, found.sizes, found.quarantined
        self.has_papers, self.left_out = found.has_papers, found.unnamed
        self.max_pixels = found.max_pixels
        self._units = BoxUnits(enough=min(8, len(found)))

    def plan(self, *, shuffle: bool, seed: int, shard_bytes: int) -> PackPlan:
        return plan_candidates(self.candidates, shuffle=shuffle, seed=seed, shard_bytes=shard_bytes)

    def groups(
        self,
        shards: Iterator[tuple[int, NDArray[np.int64]]],
        *,
        verify: Verify | None,
        workers: int,
    ) -> Iterator[SampleGroup]:
        found = self.candidates
        decoder = verify_for(self.schema, verify, workers=workers, max_pixels=found.max_pixels)
        for chunk in read_chunks(self._origin, found, shards, workers=workers):
            yield SampleGroup(
                positions=chunk.positions,
                samples=list(_samples(chunk, found, decoder, self._units)),
                names=[self.name(position) for position in chunk.positions.tolist()],
            )

    def name(self, position: int) -> bytes:
        return self.candidates.names[position]


def _renamed(candidates: Candidates, naming: Naming) -> Candidates:
    """Candidates under the new names."""
    return replace(
        candidates,
        schema=naming.schema,
        spans=naming.new(candidates.spans),
        values=naming.new(candidates.values),
        present=naming.new(candidates.present),
    )


def chosen(candidates: Candidates, fields: Sequence[str] | None) -> Candidates:
    """Candidates with some of their fields. Raises ConfigError for others."""
    if fields is None:
        return candidates
    schema = chosen_schema(candidates.schema, fields)
    return replace(
        candidates,
        schema=schema,
        spans={name: each for name, each in candidates.spans.items() if name in schema},
        values={name: each for name, each in candidates.values.items() if name in schema},
        present={name: each for name, each in candidates.present.items() if name in schema},
    )


def chosen_schema(schema: Schema, fields: Sequence[str]) -> Schema:
    """Some fields of a schema. Raises ConfigError for what is none, and for what belongs to a field
    that isn't among them."""
    wrong = [name for name in fields if name not in schema]
    if wrong or not fields or len(set(fields)) < len(fields):
        raise ConfigError(f"fields: got {list(fields)}, wanted some of {list(schema)}, each once.")
    return schema.only(tuple(fields))


def _settled(origin: Origin, candidates: Candidates, *, workers: int) -> Candidates:
    """Candidates whose arrays have a dtype and as many dimensions as they have: they are read for
    it, since a shard's columns have types. Raises DatasetError (they differ)."""
    schema = candidates.schema
    arrays = schema.of_type(Array)
    open = {name: arrays[name] for name in schema.unsettled if name in arrays}
    if not open:
        return candidates
    # Belonging to nothing, they can be read without it.
    apart = Schema({**schema, **{name: replace(type, of=None) for name, type in open.items()}})
    alone = chosen(replace(candidates, schema=apart), tuple(open))
    settling = Settling(alone.schema)
    every = (
        (shard, candidates.shards.positions(shard)) for shard in range(candidates.shards.shards)
    )
    for chunk in read_chunks(origin, alone, every, workers=workers):
        for position, facts in zip(
            chunk.positions.tolist(), chunk.examine(alone, None), strict=True
        ):
            if not isinstance(facts, Rejection):
                settling.see(facts, sample=printable(candidates.names[position]))
    found = settling.schema()
    return replace(candidates, schema=Schema({**schema, **_belonging(found, open)}))


def _belonging(found: Schema, to: Mapping[str, Array]) -> dict[str, FieldType]:
    """Arrays with what each belongs to."""
    return {
        name: replace(type, of=to[name].of)
        for name, type in found.items()
        if isinstance(type, Array)
    }


def _samples(
    chunk: Chunk, candidates: Candidates, verify: Verify | None, units: BoxUnits
) -> Iterator[PackSample | Rejection]:
    results = chunk.examine(candidates, verify)
    for row, (position, facts) in enumerate(zip(chunk.positions.tolist(), results, strict=True)):
        if isinstance(facts, Rejection):
            yield facts
            continue
        payloads: dict[str, Encoded] = {}
        arrays: dict[str, NDArray[Any]] = {}
        kept: dict[str, Facts] = {}
        for name, each in facts.items():
            data, type = chunk.contents[name][row], candidates.schema[name]
            assert isinstance(data, np.ndarray)
            payload = data[each.start : each.start + each.size]
            if is_encoded(type):
                payloads[name], kept[name] = payload, replace(each, start=0)
            elif (form := array_form(type)) is not None:
                arrays[name] = to_array(payload, each.codec, each.shape, form.dtype)
                if isinstance(type, Boxes):
                    units.see(name, type, arrays[name])
        for name, column in candidates.values.items():
            there = candidates.present.get(name)
            if there is not None and not there[position]:
                continue
            if isinstance(column, ListColumn | EncodedColumn):
                payloads[name] = payload = payload_of(column, position)
                codec = "utf-8" if isinstance(candidates.schema[name], Text) else "bytes"
                kept[name] = Facts(crc32c(payload), 0, len(payload), (), codec)
            elif isinstance(column, DenseColumn):
                arrays[name] = column.values[position]
            else:
                arrays[name] = column.sample(position)
        yield PackSample(payloads=payloads, facts=kept, arrays=arrays)
