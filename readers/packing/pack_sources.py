"""Read and check the samples that a pack is made from.

They come from data without an index of its own, from another pack, or from any dataset, a part of
one, or several joined.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from crc32c import crc32c

from penstock.cache import ConfigError, CorruptSampleError, CorruptShardError, ordered
from penstock.readers.dataset import Dataset
from penstock.readers.fieldtypes import (
    Array,
    BoxChecks,
    Boxes,
    BoxUnits,
    DenseColumn,
    EncodedColumn,
    ListColumn,
    Naming,
    RaggedColumn,
    Schema,
    Settling,
    Text,
    array_form,
    examine,
    is_encoded,
    number_dtype,
    to_array,
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
from penstock.readers.reading import OPENERS, OpenShards
from penstock.readers.types import Facts, Rejection

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from penstock.readers.fieldtypes import Column, SampleBatch
    from penstock.readers.formats import Candidates, Indexing
    from penstock.readers.formats.pack import PackBlob, PackField, PackShard
    from penstock.readers.index import CandidateBatch, Index
    from penstock.readers.origin import LeftOut, Origin, QuarantineEntry
    from penstock.readers.sources import Source
    from penstock.readers.types import Encoded, Verify

    Ints = NDArray[np.int64]
    _Shard = PackShard | PackBlob
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


class SampleSource(Protocol):
    """Samples by position, which shards are written from.

    schema: the packed fields; a mask's dtype may be unknown. sizes: bytes of each sample, int64,
    shape (n,).
    """

    url: str
    schema: Schema
    sizes: Ints

    def groups(self, shards: Shards, *, verify: Verify | None, workers: int) -> Groups:
        """Read the samples of (shard, positions), in that order, in groups of one shard each.
        verify: decodes images; None means the installed decoder. Samples that were verified before
        aren't verified again."""

    def name(self, position: int) -> bytes:
        """Return a sample's name for the quarantine."""


class PackSource(SampleSource, Protocol):
    """The source of a complete pack.

    fingerprint: changes with anything about the source. has_ids: True if its samples already have
    ids, which don't change if one of them is bad. has_stray_files, max_pixels: see `Candidates`.
    left_out: samples that the source left out before it was read for the pack, and that aren't in
    `quarantined`.
    """

    has_ids: bool
    has_stray_files: bool
    max_pixels: int
    fingerprint: str
    quarantined: list[QuarantineEntry]
    left_out: Mapping[str, LeftOut]

    def plan(self, *, shuffle: bool, seed: int, shard_bytes: int) -> PackPlan:
        """Plan which sample is packed into which shard."""


class CandidateSource:
    """Data without an index of its own: each sample is read and checked once, while it is packed.
    Of remote objects that hold many samples, the cache keeps as many as it has room for, because a
    shuffled shard reads from all of them."""

    has_ids = False

    def __init__(self, origin: Origin, candidates: Candidates, *, fingerprint: str) -> None:
        """candidates: settled, see `list`."""
        self._origin, self.candidates = origin, candidates
        self.url, self.fingerprint = origin.url, fingerprint
        self.schema, self.sizes = candidates.schema, candidates.sizes
        self.quarantined, self.left_out = candidates.quarantined, candidates.unnamed
        self.has_stray_files = candidates.has_stray_files
        self.max_pixels = candidates.max_pixels
        self._units = BoxUnits(enough=min(8, len(candidates)))

    @classmethod
    def list(
        cls,
        origin: Origin,
        indexing: Indexing,
        *,
        fields: Sequence[str] | None = None,
        renames: Mapping[str, str] | None = None,
        workers: int,
    ) -> CandidateSource:
        """List the candidates of an origin. renames: new names of fields, each mapped to its name
        in the candidates."""
        listing = indexing.list(origin)
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

    def plan(self, *, shuffle: bool, seed: int, shard_bytes: int) -> PackPlan:
        return plan_candidates(self.candidates, shuffle=shuffle, seed=seed, shard_bytes=shard_bytes)

    def groups(self, shards: Shards, *, verify: Verify | None, workers: int) -> Groups:
        found = self.candidates
        decoder = verify_for(self.schema, verify, workers=workers, max_pixels=found.max_pixels)
        for chunk in read_candidate_batches(self._origin, found, shards, workers=workers):
            yield SampleGroup(
                positions=chunk.positions,
                samples=list(_samples(chunk, found, decoder, self._units)),
                names=[self.name(position) for position in chunk.positions.tolist()],
            )

    def name(self, position: int) -> bytes:
        return self.candidates.names[position]


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
    arrays = schema.of_type(Array)
    unsettled = {name: arrays[name] for name in schema.unsettled if name in arrays}
    if not unsettled:
        return candidates
    # Without `of`, they can be read alone.
    apart = Schema({**schema, **{name: replace(type, of=None) for name, type in unsettled.items()}})
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
        name: replace(type, of=unsettled[name].of)
        for name, type in settling.schema().items()
        if isinstance(type, Array)
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
            if is_encoded(type):
                payloads[name], kept[name] = payload, replace(each, start=0)
            elif (form := array_form(type)) is not None:
                arrays[name] = to_array(payload, each.codec, each.shape, form.dtype)
                if isinstance(type, Boxes):
                    units.add(name, type, arrays[name])
        for name, column in candidates.values.items():
            present = candidates.present.get(name)
            if present is not None and not present[position]:
                continue
            if isinstance(column, ListColumn | EncodedColumn):
                payloads[name] = payload = payload_of(column, position)
                codec = "utf-8" if isinstance(candidates.schema[name], Text) else "bytes"
                kept[name] = Facts(crc32c(payload), 0, len(payload), (), codec)
            else:
                arrays[name] = column.sample(position)
        yield PackSample(payloads=payloads, facts=kept, arrays=arrays)


class PackedSource:
    """Another pack. Its samples were checked when it was written, so only their CRCs are checked
    and their facts are reused."""

    has_ids = True
    has_stray_files = False

    def __init__(
        self, index: Index, *, fields: Sequence[str] | None = None, sizes_known: bool = False
    ) -> None:
        """sizes_known: True if the caller sets the sizes of the samples that it reads; then no
        shard is opened for them."""
        self._index, self._opened = index, OpenShards(index)
        self.url, self.fingerprint = index.url, index.fingerprint
        self.schema = index.schema if fields is None else chosen_schema(index.schema, fields)
        self.quarantined: list[QuarantineEntry] = []
        self.left_out, self.max_pixels = index.left_out(), index.max_pixels
        if sizes_known:
            self.sizes = np.zeros(index.samples, np.int64)
            return
        sizes = ordered(
            lambda number: self._sizes(self._shard(number)),
            range(len(index.sizes)),
            workers=1 if index.remote is None else OPENERS,
            ahead=OPENERS,
            name="tables",
        )
        self.sizes = np.concatenate(list(sizes))

    def _shard(self, number: int) -> _Shard:
        (shard,) = self._opened.get([number])
        return pack_shard(shard)

    def _sizes(self, shard: _Shard) -> Ints:
        """Return the bytes of each sample in the packed fields."""
        total = np.zeros(len(shard.columns), np.int64)
        for name, form in pack_forms(self.schema).items():
            bounds = shard.columns.fields[name].bounds
            total += -(-form.numbers // 8) if form.is_bits else form.row_bytes
            if bounds is not None:
                total += np.diff(bounds) - form.row_bytes
        return total

    def plan(self, *, shuffle: bool, seed: int, shard_bytes: int) -> PackPlan:
        return plan_samples(self.sizes, shuffle=shuffle, seed=seed, shard_bytes=shard_bytes)

    def groups(self, shards: Shards, *, verify: Verify | None, workers: int) -> Groups:
        del verify
        pieces = (
            positions[part]
            for _, positions in shards
            for part in cut_into_batches(self.sizes[positions])
        )
        yield from ordered(self._read, pieces, workers=workers, ahead=workers + 2, name="intake")

    def _read(self, ids: Ints) -> SampleGroup:
        shards = np.searchsorted(self._index.starts, ids, side="right") - 1
        samples: list[PackSample | Rejection] = [Rejection("")] * len(ids)
        names = [b""] * len(ids)
        for number in np.unique(shards).tolist():
            places = np.flatnonzero(shards == number)
            rows = ids[places] - self._index.starts[number]
            shard, found = self._samples(number, rows)
            known = shard.columns.names(rows) or [shard.name(r).encode() for r in rows.tolist()]
            for place, name, sample in zip(places.tolist(), known, found, strict=True):
                names[place], samples[place] = name, sample
        return SampleGroup(positions=ids, samples=samples, names=names)

    def _samples(self, number: int, rows: Ints) -> tuple[_Shard, list[PackSample]]:
        """Return a shard and some of its samples. Damaged bytes in the cache are fetched again."""
        shard = self._shard(number)
        try:
            return shard, self._checked(number, shard, rows)
        except CorruptShardError:
            if self._index.remote is None:
                raise
        shard = pack_shard(self._opened.replace(number, shard))
        return shard, self._checked(number, shard, rows)

    def _checked(self, number: int, shard: _Shard, rows: Ints) -> list[PackSample]:
        payloads: list[dict[str, Encoded]] = [{} for _ in rows]
        facts: list[dict[str, Facts]] = [{} for _ in rows]
        arrays: list[dict[str, NDArray[Any]]] = [{} for _ in rows]
        for name, type in self.schema.items():
            field = shard.columns.fields[name]
            is_present = np.ones(len(rows), bool) if field.present is None else field.present[rows]
            places = np.flatnonzero(is_present).tolist()
            present = rows[is_present]
            if field.bounds is None:
                values = self._values(number, shard, name, field, present)
                for place, value in zip(places, values, strict=True):
                    arrays[place][name] = value
                continue
            spans = self._spans(number, shard, name, field, present)
            if field.form.kind != "bytes":
                assert field.shapes is not None
                for place, row, data in zip(places, present.tolist(), spans, strict=True):
                    shape = field.shapes[row]
                    arrays[place][name] = data.view(field.form.dtype).reshape(shape)
                continue
            noted = _facts(
                shard, name, field, present, codec="utf-8" if isinstance(type, Text) else ""
            )
            for place, data, each in zip(places, spans, noted, strict=True):
                payloads[place][name], facts[place][name] = data, each
        return [
            PackSample(payloads=p, facts=f, arrays=a)
            for p, f, a in zip(payloads, facts, arrays, strict=True)
        ]

    def _spans(
        self, number: int, shard: _Shard, name: str, field: PackField, rows: Ints
    ) -> list[Encoded]:
        assert field.bounds is not None
        assert field.crcs is not None
        found = shard.views(field.bounds[rows].tolist(), field.bounds[rows + 1].tolist())
        for row, crc, data in zip(rows.tolist(), field.crcs[rows].tolist(), found, strict=True):
            if crc32c(data) != crc:
                raise self._corrupt(number, shard, name, row)
        return found

    def _values(
        self, number: int, shard: _Shard, name: str, field: PackField, rows: Ints
    ) -> NDArray[Any]:
        """Return the numbers, or the arrays of one shape, of some rows."""
        if field.form.kind == "value":
            assert field.values is not None
            return field.values[rows]
        shape = (len(rows), *(length or 0 for length in field.form.row))
        values = np.empty(shape, field.form.dtype)
        wrong: dict[int, str] = {}
        shard.gather(name, rows, values, slice(None), wrong)
        for place in wrong:
            raise self._corrupt(number, shard, name, int(rows[place]))
        return values

    def _corrupt(self, number: int, shard: _Shard, name: str, row: int) -> CorruptSampleError:
        sample_id = int(self._index.starts[number]) + row
        return CorruptSampleError(
            f"Sample {sample_id} of {self.url} ({shard.name(row)}): the checksum (CRC-32C) of its "
            f"field {name!r} is wrong. Pack from an intact copy of the source.",
            sample_id=sample_id,
        )

    def name(self, position: int) -> bytes:
        return b"%d" % position


def _facts(
    shard: _Shard, name: str, field: PackField, rows: Ints, *, codec: str
) -> Iterator[Facts]:
    """Yield the recorded facts of encoded samples. codec: of samples without a recorded one."""
    assert field.bounds is not None
    assert field.crcs is not None
    try:
        codecs = shard.columns.codecs(name) if field.form.is_picture else None
    except ValueError as error:
        raise CorruptShardError(f"{shard.shown}: {error}. Pack from an intact copy.") from error
    for row in rows.tolist():
        shape = () if field.shapes is None else tuple(field.shapes[row].tolist())
        yield Facts(
            crc32c=int(field.crcs[row]),
            start=0,
            size=int(field.bounds[row + 1] - field.bounds[row]),
            shape=shape,
            codec=codec if codecs is None else codecs[row],
        )


class RowSource:
    """The samples of any source. Encoded fields are checked again while they are packed, and so are
    boxes and points, because only the indexes of the source know their facts."""

    has_ids = True
    has_stray_files = False

    def __init__(
        self,
        source: Source,
        *,
        fields: Sequence[str] | None = None,
        verify: Verify | None = None,
        workers: int,
    ) -> None:
        """verify, workers: for a dataset that has no index yet. Raises the errors of opening it."""
        if isinstance(source, Dataset):
            source.open(verify=verify, workers=workers)
        self._source, contents = source, source.contents
        self._is_of_chunks = (
            source.index.manifest.is_of_chunks
            if isinstance(source, Dataset)
            else contents.units is not None
        )
        self.url, self.fingerprint = source.url, contents.fingerprint
        schema = contents.schema
        self.schema = schema if fields is None else chosen_schema(schema, fields)
        self.quarantined: list[QuarantineEntry] = []
        self.left_out, self.max_pixels = source.samples_left_out, contents.max_pixels
        # The mean of its shard: the size of a sample is unknown until it is read.
        means = np.maximum(1, self._shard_bytes() // contents.sizes)
        self.sizes = np.repeat(means, contents.sizes)
        self._boxes = BoxChecks.of(self.schema, [*self.schema], samples=len(source))
        self._ids = source.ids(contents.rows(np.arange(len(source), dtype=np.int64)))

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
        decoder = verify_for(self.schema, verify, workers=workers, max_pixels=self.max_pixels)
        pieces = (
            positions[part]
            for _, positions in shards
            for part in cut_into_batches(self.sizes[positions])
        )
        for positions, batch, bad in ordered(
            self._read, pieces, workers=workers, ahead=workers + 2, name="intake"
        ):
            names = self._source.names(self._ids[positions])
            yield SampleGroup(
                positions=positions,
                samples=list(self._samples(batch, decoder, bad)),
                names=[name.encode("utf-8", "surrogateescape") for name in names],
            )

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
            dtype, form = number_dtype(type), array_form(type)
            if dtype is not None:
                found += contents.sizes * dtype.itemsize
            elif form is not None and not form.is_ragged:
                found += contents.sizes * math.prod(form.fixed_shape) * form.dtype.itemsize
            else:
                stored.append(name)
        return found + source.index.manifest.bytes_of(source.stored_fields(stored))

    def _samples(
        self, batch: SampleBatch, decoder: Verify | None, bad: Mapping[int, str]
    ) -> Iterator[PackSample | Rejection]:
        columns, all_rows = batch.columns, np.ones(len(batch), bool)
        present = {name: batch.present.get(name, all_rows) for name in self.schema}
        encoded: _Payloads = {
            name: [
                payload_of(columns[name], row) if has and row not in bad else None
                for row, has in enumerate(mine)
            ]
            for name, mine in present.items()
            if is_encoded(self.schema[name])
        }
        results: Sequence[Mapping[str, Facts] | Rejection] = [{}] * len(batch)
        if encoded:
            results = examine(encoded, self.schema, decoder, max_pixels=self.max_pixels)
        for row, facts in enumerate(results):
            if row in bad:
                yield Rejection(bad[row])
                continue
            if isinstance(facts, Rejection):
                yield facts
                continue
            payloads = {}
            for name, each in facts.items():
                data = encoded[name][row]
                assert isinstance(data, np.ndarray)
                payloads[name] = data[each.start :]
            yield PackSample(
                payloads=payloads,
                facts={name: replace(each, start=0) for name, each in facts.items()},
                arrays={
                    name: column.sample(row)
                    for name, column in columns.items()
                    if isinstance(column, DenseColumn | RaggedColumn)
                    and name not in encoded
                    and present[name][row]
                },
            )

    def name(self, position: int) -> bytes:
        (name,) = self._source.names(self._ids[position : position + 1])
        return name.encode("utf-8", "surrogateescape")


def payload_of(column: Column, row: int) -> Encoded:
    """Return the bytes of one sample of an encoded field."""
    if isinstance(column, EncodedColumn):
        return column.samples[row]
    assert isinstance(column, ListColumn)
    sample = column.samples[row]
    return np.frombuffer(sample.encode() if isinstance(sample, str) else sample, np.uint8)
