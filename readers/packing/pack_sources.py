"""Read and check the samples that a pack is made from.

They come from data without an index of its own, or from any dataset, a part of one, or several
joined.
"""

from __future__ import annotations

import hashlib
import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from crc32c import crc32c

from penstock.cache import ConfigError, CorruptShardError, ordered
from penstock.readers.dataset import Dataset, copy_keeping, open_shard
from penstock.readers.fieldtypes import (
    BoxUnits,
    DenseColumn,
    EncodedColumn,
    ListColumn,
    Naming,
    RaggedColumn,
    Schema,
    Settling,
    ValueChecks,
    decode_array,
    examine,
    verify_for,
)
from penstock.readers.files import printable
from penstock.readers.formats.pack import pack_forms, pack_shard
from penstock.readers.index import check_units, cut_into_batches, read_candidate_batches
from penstock.readers.packing.pack_plan import (
    WINDOW_BYTES,
    PackPlan,
    plan_candidates,
    plan_samples,
    plan_units,
)
from penstock.readers.reading import OPENERS
from penstock.readers.types import Facts, Rejection

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from penstock.readers.fieldtypes import Column, SampleBatch
    from penstock.readers.formats import Candidates, Format
    from penstock.readers.formats.pack import PackShard
    from penstock.readers.index import CandidateBatch, IndexOpener
    from penstock.readers.origin import LeftOut, Origin, QuarantineEntry
    from penstock.readers.sources import Source
    from penstock.readers.types import Encoded, Verify

    Ints = NDArray[np.int64]
    _Payloads = dict[str, list[Encoded | Rejection | None]]
    Shards = Iterator[tuple[int, Ints]]
    Groups = Iterator["SampleGroup"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PackSample:
    """One good sample to pack, by field; a field that it lacks is absent.

    payloads: bytes of encoded fields. facts: of the same fields. arrays: the values of all other
    fields in their own shape and in the stored dtype.
    """

    payloads: Mapping[str, Encoded]
    facts: Mapping[str, Facts]
    arrays: Mapping[str, NDArray[Any]]

    @property
    def fields(self) -> set[str]:
        """Return the names of the sample's fields."""
        return {*self.payloads, *self.arrays}


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleGroup:
    """Some samples of one shard, read and checked. positions: int64, shape (n,). samples: each
    sample, or its rejection. names: in the source."""

    positions: Ints
    samples: list[PackSample | Rejection]
    names: list[bytes]


class PackSource(ABC):
    """The samples of a pack by position, which shards are written from.

    schema: the packed fields; a mask's dtype may be unknown. fingerprint: changes with anything
    about the source. has_ids: True if its samples already have ids, which don't change if one of
    them is bad. has_stray_files, max_pixels: see `Candidates`. quarantined: the candidates that
    were rejected before they were read. left_out: further samples that the source left out.
    """

    has_ids: ClassVar[bool] = True
    url: str
    schema: Schema
    fingerprint: str
    max_pixels: int
    has_stray_files = False
    quarantined: Sequence[QuarantineEntry] = ()
    left_out: Mapping[str, LeftOut]

    @property
    @abstractmethod
    def sizes(self) -> Ints:
        """The bytes of each sample, int64, shape (n,)."""

    @abstractmethod
    def plan(self, *, shuffle: bool, seed: int, shard_bytes: int) -> PackPlan:
        """Plan which sample is packed into which shard."""

    @abstractmethod
    def groups(self, shards: Shards, *, verify: Verify | None, workers: int) -> Groups:
        """Read the samples of (shard, positions), in that order, in groups of one shard each.
        verify: decodes images; None means the installed decoder. Samples that were verified before
        aren't verified again."""


class CandidateSource(PackSource):
    """Data without an index of its own: each sample is read and checked once, while it is packed.
    Of remote objects that hold many samples, the cache keeps as many as it has room for, because a
    shuffled shard reads from all of them."""

    has_ids = False

    def __init__(self, origin: Origin, candidates: Candidates, *, fingerprint: str) -> None:
        """candidates: settled, see `list`."""
        self._origin, self.candidates = origin, candidates
        self.url, self.fingerprint, self.schema = origin.url, fingerprint, candidates.schema
        self.quarantined, self.left_out = candidates.quarantined, candidates.unnamed
        self.has_stray_files = candidates.has_stray_files
        self.max_pixels = candidates.max_pixels
        self._units = BoxUnits(enough=min(8, len(candidates)))

    @classmethod
    def list(
        cls, opener: IndexOpener, format: Format, *, fields: Sequence[str] | None, workers: int
    ) -> CandidateSource:
        """List the candidates of a dataset of this format."""
        origin, renames = opener.origin, opener.renames
        listing = format.list(origin)
        found = listing.candidates(workers=workers)
        if renames:
            naming = Naming.of(found.schema, renames, (), url=origin.url)
            found = replace(
                found,
                schema=naming.schema,
                spans=naming.new(found.spans),
                values=naming.new(found.values),
                present=naming.new(found.present),
            )
        if origin.arrangement.max_pixels is not None:
            found = replace(found, max_pixels=origin.arrangement.max_pixels)
        found = _settle_arrays(origin, with_fields(found, fields), workers=workers)
        check_units(found)
        identity = f"{listing.snapshot().fingerprint}{origin.variant}"
        return cls(origin, found, fingerprint=hashlib.sha256(identity.encode()).hexdigest())

    @property
    def sizes(self) -> Ints:
        return self.candidates.sizes

    def plan(self, *, shuffle: bool, seed: int, shard_bytes: int) -> PackPlan:
        return plan_candidates(self.candidates, shuffle=shuffle, seed=seed, shard_bytes=shard_bytes)

    def groups(self, shards: Shards, *, verify: Verify | None, workers: int) -> Groups:
        found = self.candidates
        decoder = verify_for(self.schema, verify, workers=workers, max_pixels=found.max_pixels)
        for batch in read_candidate_batches(self._origin, found, shards, workers=workers):
            yield SampleGroup(
                positions=batch.positions,
                samples=list(_samples(batch, found, decoder, self._units)),
                names=[found.names[position] for position in batch.positions.tolist()],
            )


def with_fields(candidates: Candidates, fields: Sequence[str] | None) -> Candidates:
    """Select some fields of candidates. Raises ConfigError for others."""
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
    """Select some fields of a schema. Raises ConfigError for an unknown field, and for one that
    belongs to a field that isn't selected."""
    wrong = [name for name in fields if name not in schema]
    if wrong or not fields or len(set(fields)) < len(fields):
        raise ConfigError(f"fields: got {list(fields)}, wanted some of {list(schema)}, each once.")
    return schema.only(tuple(fields))


def _settle_arrays(origin: Origin, candidates: Candidates, *, workers: int) -> Candidates:
    """Read all arrays of unknown dtype or number of dimensions to find these, because a shard's
    columns have types. Raises DatasetError if they differ."""
    schema = candidates.schema
    unsettled = {name: schema[name] for name in schema.unsettled if not schema[name].is_encoded}
    if not unsettled:
        return candidates
    # Without `of`, they can be read alone.
    apart = Schema(
        {
            name: replace(each, of=None) if name in unsettled and each.reference else each  # type: ignore[type-var]
            for name, each in schema.items()
        }
    )
    alone = with_fields(replace(candidates, schema=apart), tuple(unsettled))
    settling = Settling(alone.schema)
    shards = ((n, candidates.shards.positions(n)) for n in range(candidates.shards.shards))
    for chunk in read_candidate_batches(origin, alone, shards, workers=workers):
        for position, facts in zip(
            chunk.positions.tolist(), chunk.examine(alone, None), strict=True
        ):
            if not isinstance(facts, Rejection):
                settling.add(facts, sample=printable(candidates.names[position]))
    settled = {
        name: unsettled[name].completed(form.dtype.name, form.shape)
        for name, type in settling.schema().items()
        if (form := type.form) is not None
    }
    return replace(candidates, schema=Schema({**schema, **settled}))


def _samples(
    chunk: CandidateBatch, candidates: Candidates, verify: Verify | None, units: BoxUnits
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
            if type.is_encoded:
                payloads[name], kept[name] = payload, replace(each, start=0)
            elif (form := type.form) is not None:
                values = decode_array(payload, each.codec, each.shape)
                arrays[name] = values.astype(form.dtype, copy=False)
                units.add(name, type, arrays[name])
        for name, column in candidates.values.items():
            present = candidates.present.get(name)
            if present is not None and not present[position]:
                continue
            if isinstance(column, ListColumn | EncodedColumn):
                payloads[name] = payload = payload_of(column, position)
                kept[name] = Facts(
                    crc32c(payload), 0, len(payload), (), candidates.schema[name].codec
                )
            else:
                arrays[name] = column.sample(position)
        yield PackSample(payloads=payloads, facts=kept, arrays=arrays)


class RowSource(PackSource):
    """The samples of any source.

    The facts of encoded samples are those that a pack recorded. Encoded samples of other sources
    are checked again while they are packed, and so are boxes and points, because only the indexes
    of the source know their facts.
    """

    def __init__(
        self,
        source: Source,
        *,
        fields: Sequence[str] | None = None,
        verify: Verify | None = None,
        workers: int,
    ) -> None:
        """verify, workers: for a dataset that has no index yet. Raises the errors of opening it."""
        self.url, index = source.url, None
        self._copy: Dataset | None = None
        if isinstance(source, Dataset):
            index = source.open(verify=verify, workers=workers)
            if index.remote is not None and index.manifest.is_of_chunks:
                # The packed fields are cached, even if batches have other fields.
                source = self._copy = copy_keeping(source, tuple(fields or source.schema))
        self._source, contents = source, source.contents
        self._is_of_chunks = not contents.are_checked
        schema = contents.schema
        self.schema = schema if fields is None else chosen_schema(schema, fields)
        self.left_out, self.max_pixels = source.samples_left_out, contents.max_pixels
        self.fingerprint = contents.fingerprint
        self._pack: Dataset | None = None
        if isinstance(source, Dataset) and source.index.is_self_contained:
            self._pack, self.url = source, source.index.url
        # The mean of its shard: the size of a sample may be unknown until it is read.
        means = np.maximum(1, self._shard_bytes() // contents.sizes)
        self._means = np.repeat(means, contents.sizes)
        self._boxes = None
        if self._pack is None:
            self._boxes = ValueChecks.of(self.schema, [*self.schema], samples=len(source))
        self._ids = source.ids(contents.rows(np.arange(len(source), dtype=np.int64)))

    def close(self) -> None:
        """Close what this object has opened. Safe to call twice."""
        if self._copy is not None:
            self._copy.close()

    @cached_property
    def sizes(self) -> Ints:
        pack = self._pack
        if pack is None:
            return self._means
        forms = pack_forms(self.schema)

        def read(number: int) -> Ints:
            """Return the bytes of each sample in the packed fields."""
            columns = pack_shard(open_shard(pack, number)).columns
            total = np.zeros(len(columns), np.int64)
            for name, form in zip(pack.stored_fields(list(forms)), forms.values(), strict=True):
                bounds = columns.fields[name].bounds
                total += -(-form.numbers // 8) if form.is_bits else form.row_bytes
                if bounds is not None:
                    total += np.diff(bounds) - form.row_bytes
            return total

        workers, shards = 1 if pack.remote is None else OPENERS, range(len(pack.contents.sizes))
        sizes = ordered(read, shards, workers=workers, ahead=OPENERS, name="tables")
        return np.concatenate(list(sizes))

    def plan(self, *, shuffle: bool, seed: int, shard_bytes: int) -> PackPlan:
        units = self._source.contents.units
        if units is None:
            plan = plan_samples(self.sizes, shuffle=shuffle, seed=seed, shard_bytes=shard_bytes)
        else:
            sizes = self._source.contents.sizes.tolist()
            units = [
                rows if len(rows) else np.ones(size, np.int64)
                for rows, size in zip(units, sizes, strict=True)
            ]
            plan = plan_units(
                units,
                self.sizes,
                shuffle=shuffle,
                seed=seed,
                shard_bytes=shard_bytes,
                window_bytes=WINDOW_BYTES,
            )
        return replace(plan, source_ids=self._ids)

    def groups(self, shards: Shards, *, verify: Verify | None, workers: int) -> Groups:
        decoder = None
        if self._pack is None:
            decoder = verify_for(self.schema, verify, workers=workers, max_pixels=self.max_pixels)
        pieces = (
            positions[part]
            for _, positions in shards
            for part in cut_into_batches(self._means[positions])
        )
        for positions, batch, bad in ordered(
            self._read, pieces, workers=workers, ahead=workers + 2, name="intake"
        ):
            facts = None
            if self._pack is not None:
                names, facts = _recorded(
                    self._pack, self._source.contents.rows(positions), self.schema
                )
            else:
                shown = self._source.names(self._ids[positions])
                names = [name.encode("utf-8", "surrogateescape") for name in shown]
            samples = list(self._samples(batch, decoder, bad, facts))
            yield SampleGroup(positions=positions, samples=samples, names=names)

    def _read(self, positions: Ints) -> tuple[Ints, SampleBatch, dict[int, str]]:
        rows = self._source.contents.rows(positions)
        bad: dict[int, str] = {}
        # Samples in chunks are decoded here for the first time, so they may be bad. For other
        # samples a wrong checksum means damage since the index was built, which is an error.
        batch = self._source.read(
            rows, fields=tuple(self.schema), bad=bad if self._is_of_chunks else None
        )
        if self._boxes is not None:
            bad = self._boxes(batch) | bad
        return positions, batch, bad

    def _shard_bytes(self) -> Ints:
        """Return the bytes that the samples of each shard take in a pack, as far as they are
        known."""
        source, contents = self._source, self._source.contents
        if not isinstance(source, Dataset) or not self._is_of_chunks:
            return contents.shard_bytes
        found, stored = np.zeros(len(contents.sizes), np.int64), []
        for name, type in self.schema.items():
            dtype, form = type.number, type.form
            if dtype is not None:
                found += contents.sizes * dtype.itemsize
            elif form is not None and not form.is_ragged:
                found += contents.sizes * math.prod(form.fixed_shape) * form.dtype.itemsize
            else:
                stored.append(name)
        return found + source.index.manifest.bytes_of(source.stored_fields(stored))

    def _samples(
        self,
        batch: SampleBatch,
        decoder: Verify | None,
        bad: Mapping[int, str],
        recorded: Sequence[Mapping[str, Facts]] | None,
    ) -> Iterator[PackSample | Rejection]:
        columns, all_rows = batch.columns, np.ones(len(batch), bool)
        present = {name: batch.present.get(name, all_rows) for name in self.schema}
        encoded: _Payloads = {
            name: [
                payload_of(columns[name], row) if has and row not in bad else None
                for row, has in enumerate(mine)
            ]
            for name, mine in present.items()
            if self.schema[name].is_encoded
        }
        results: Sequence[Mapping[str, Facts] | Rejection] = [{}] * len(batch)
        if recorded is not None:
            results = recorded
        elif encoded:
            results = examine(encoded, self.schema, decoder, max_pixels=self.max_pixels)
        for row, facts in enumerate(results):
            if row in bad:
                yield Rejection(bad[row])
                continue
            if isinstance(facts, Rejection):
                yield facts
                continue
            payloads = {}
            kept = {}
            for name, each in facts.items():
                data = encoded[name][row]
                if isinstance(data, np.ndarray):
                    payloads[name], kept[name] = data[each.start :], replace(each, start=0)
            yield PackSample(
                payloads=payloads,
                facts=kept,
                arrays={
                    name: column.sample(row)
                    for name, column in columns.items()
                    if isinstance(column, DenseColumn | RaggedColumn)
                    and name not in encoded
                    and present[name][row]
                },
            )


def _recorded(
    pack: Dataset, rows: Ints, schema: Schema
) -> tuple[list[bytes], list[Mapping[str, Facts]]]:
    """Return the names of a pack's samples, and the facts that it recorded of their encoded
    fields."""
    names, facts = [b""] * len(rows), [dict[str, Facts]() for _ in rows]
    encoded = [name for name, type in schema.items() if type.is_encoded]
    for number in np.unique(rows[:, 0]).tolist():
        places = np.flatnonzero(rows[:, 0] == number)
        mine = rows[places, 1]
        shard = pack_shard(open_shard(pack, number))
        known = shard.columns.names(mine) or [shard.name(row).encode() for row in mine.tolist()]
        for place, name in zip(places.tolist(), known, strict=True):
            names[place] = name
        for field, stored in zip(encoded, pack.stored_fields(encoded), strict=True):
            for place, each in zip(places.tolist(), _facts(shard, stored, mine), strict=True):
                facts[place][field] = each
    return names, list(facts)


def _facts(shard: PackShard, name: str, rows: Ints) -> list[Facts]:
    """Return the recorded facts of encoded samples of a pack's shard."""
    field = shard.columns.fields[name]
    bounds, crcs, shapes = field.bounds, field.crcs, field.shapes
    assert bounds is not None
    assert crcs is not None
    try:
        codecs = shard.columns.codecs(name) if field.form.is_picture else None
    except ValueError as error:
        raise CorruptShardError(f"{shard.shown}: {error}. Pack from an intact copy.") from error
    return [
        Facts(
            crc32c=int(crcs[row]),
            start=0,
            size=int(bounds[row + 1] - bounds[row]),
            shape=() if shapes is None else tuple(shapes[row].tolist()),
            codec="" if codecs is None else codecs[row],
        )
        for row in rows.tolist()
    ]


def payload_of(column: Column, row: int) -> Encoded:
    """Return the bytes of one sample of an encoded field."""
    if isinstance(column, EncodedColumn):
        return column.samples[row]
    assert isinstance(column, ListColumn)
    sample = column.samples[row]
    return np.frombuffer(sample.encode() if isinstance(sample, str) else sample, np.uint8)
