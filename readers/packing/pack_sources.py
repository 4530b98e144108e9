"""Read and check the samples that a pack is made from, and plan which is packed into which shard.

They come from data without an index of its own, or from any dataset, a part of one, or several
joined. The plan is made from names and sizes, before any data is read. So every rank knows the
entire plan, a killed run can resume, and the result depends on neither. Bad samples are left out of
their shard, and no other sample moves.
"""

from __future__ import annotations

import hashlib
import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, ClassVar, TypeVar

import numpy as np

from penstock.cache import ConfigError, IndexChangedError, keep_open, ordered
from penstock.cache.base import keyed_hash
from penstock.readers.dataset import Dataset, copy_keeping, open_shard
from penstock.readers.fieldtypes import (
    BoxUnits,
    EncodedColumn,
    Naming,
    Schema,
    Settling,
    ValueChecks,
    decode_array,
    examine,
    verify_for,
)
from penstock.readers.files import printable
from penstock.readers.formats import cut_at, part_bounds
from penstock.readers.formats.pack import PackSample, PackShard, pack_forms
from penstock.readers.index import check_units, cut_into_batches, read_candidate_batches
from penstock.readers.reading import OPENERS
from penstock.readers.types import Bools, Facts, Ints, Numbers, Rejection, Verify

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from penstock.readers.fieldtypes import Column, SampleBatch
    from penstock.readers.formats import Candidates, Contents, Format
    from penstock.readers.index import DatasetDescription, IndexOpener
    from penstock.readers.origin import LeftOut, Origin, QuarantineEntry
    from penstock.readers.serialized_source import SerializedSource
    from penstock.readers.sources import Source

    Samples = Iterator[tuple[bytes, PackSample | Rejection]]

T = TypeVar("T")

WINDOW_BYTES = 2**29
"""The bytes of samples in chunks that a shuffled pack mixes at a time: 8 shards of the default
size. It is the same on every machine, because ranks must agree. Decoded chunks may use more memory
if there is more."""


@dataclass(frozen=True, slots=True, eq=False)
class PlannedShard:
    """A shard of a pack before it is written. positions: of its samples in the source. source_ids:
    their ids in the source's index if no file were bad. Both are int64, shape (n,)."""

    number: int
    positions: Ints
    source_ids: Ints


PackPlan = list[PlannedShard]
"""The shards of a pack, by number."""


def plan_samples(
    sizes: Ints,
    *,
    shuffle: bool,
    seed: int,
    shard_bytes: int,
    order: Ints | None = None,
    units: Sequence[Ints] | None = None,
    window_bytes: int = WINDOW_BYTES,
) -> list[Ints]:
    """Group samples into the shards of a pack. If they lie in decode units, the units are shuffled,
    then the samples of a window of units, so that each unit is decoded once and at most one window
    is in memory.

    sizes: bytes, int64, shape (n,). order: of the samples, unless they are shuffled; None is that
    of their positions. units: rows of each, by shard, in that order. window_bytes: of the units
    that are mixed.
    """
    if order is None:
        order = np.arange(len(sizes), dtype=np.int64)
    if shuffle and units is not None:
        windows = _windows(np.concatenate(list(units)), sizes, seed, window_bytes)
        order = np.lexsort((keyed_hash(seed, order), windows)).astype(np.int64)
    elif shuffle:
        order = order[shuffled(len(order), seed)]
    return cut_evenly(order, sizes, shard_bytes)


def _windows(rows: Ints, sizes: Ints, seed: int, window_bytes: int) -> Ints:
    """Return the number of each sample's window. rows: of each unit."""
    order = shuffled(len(rows), seed)
    before = np.concatenate(([0], np.cumsum(sizes)))
    unit_bytes = np.diff(before[np.concatenate(([0], np.cumsum(rows)))])[order]
    cuts = part_bounds(unit_bytes, target_bytes=window_bytes)
    window = np.empty(len(rows), np.int64)
    window[order] = np.searchsorted(cuts, np.arange(len(rows)), side="right")
    return np.repeat(window, rows)


def shuffled(count: int, seed: int) -> Ints:
    """Return a permutation of range(count), int64, from a keyed hash, so that it doesn't depend on
    the version of numpy."""
    keys = keyed_hash(seed, np.arange(count, dtype=np.int64))
    return np.argsort(keys, kind="stable").astype(np.int64)


def cut_evenly(order: Ints, sizes: Ints, shard_bytes: int) -> list[Ints]:
    """Cut a sequence of samples into ceil(total / shard_bytes) shards of about equal bytes, or
    fewer if samples are larger than a shard. order: positions in sizes, int64, shape (n,)."""
    before = np.concatenate(([0], np.cumsum(sizes[order], dtype=np.int64)))
    total = int(before[-1])
    count = max(1, -(-total // shard_bytes))
    # Python ints: k * total passes 2^63 for large sets.
    targets = np.array([-(-k * total // count) for k in range(1, count)], np.int64)
    cuts = np.searchsorted(before[:-1], targets, side="left")
    return cut_at(order, np.unique(np.concatenate(([0], cuts, [len(order)]))).tolist())


class PackSource(ABC):
    """The samples of a pack by position, which shards are written from.

    schema: the packed fields; a mask's dtype may be unknown. fingerprint: changes with anything
    about the source. has_ids: True if its samples already have ids, which don't change if one of
    them is bad. ids: by position, int64, shape (n,). order: positions by id, None if they are in
    this order. units: rows of each decode unit, by shard; None if samples can be read singly.
    shards, shard_bytes: the shards that the source has, and the mean size to which they were cut;
    None if a pack has others. max_pixels: see `Candidates`. quarantined: the candidates that were
    rejected before they were read. left_out: further samples that the source left out.
    """

    has_ids: ClassVar[bool] = True
    url: str
    schema: Schema
    fingerprint: str
    ids: Ints
    order: Ints | None = None
    units: Sequence[Ints] | None = None
    shards: Sequence[Ints] | None = None
    shard_bytes: int | None = None
    max_pixels: int
    quarantined: Sequence[QuarantineEntry] = ()
    left_out: Mapping[str, LeftOut]

    @property
    @abstractmethod
    def sizes(self) -> Ints:
        """The bytes of each sample, int64, shape (n,)."""

    def plan(self, *, shuffle: bool, seed: int, shard_bytes: int) -> PackPlan:
        """Plan which sample is packed into which shard."""
        groups = self.shards
        if groups is None or shuffle or shard_bytes != self.shard_bytes:
            groups = plan_samples(
                self.sizes,
                shuffle=shuffle,
                seed=seed,
                shard_bytes=shard_bytes,
                order=self.order,
                units=self.units,
                window_bytes=WINDOW_BYTES,
            )
        return [PlannedShard(number, mine, self.ids[mine]) for number, mine in enumerate(groups)]

    @abstractmethod
    def for_worker(self, shard: PlannedShard) -> tuple[Callable[[], PackSource], PlannedShard]:
        """Return a function that opens the source of a shard in an executor's worker, and the shard
        by its positions in that source. The function can be pickled, without secrets."""

    @abstractmethod
    def samples(
        self, shards: Iterable[PlannedShard], *, verify: Verify | str | None, workers: int
    ) -> Samples:
        """Read and check the samples of shards, in order. Yield the name of each in the source, and
        the sample or its rejection. verify: decodes images; None means the installed decoder.
        Samples that were verified before aren't verified again."""

    def _samples(
        self,
        names: Sequence[bytes],
        results: Sequence[Mapping[str, Facts] | Rejection],
        contents: Contents,
        *,
        columns: Mapping[str, Column],
        present: Mapping[str, Bools],
    ) -> Samples:
        """Yield samples that were read and checked together.

        results: of each sample, the facts of the fields that were examined, or why it is bad.
        contents: the bytes of these fields. columns: the values of all other fields, which are
        missing where `present` is False.
        """
        for row, (name, found) in enumerate(zip(names, results, strict=True)):
            if isinstance(found, Rejection):
                yield name, found
                continue
            values: dict[str, Numbers] = {}
            facts: dict[str, Facts] = {}
            for field, each in found.items():
                data, type = contents[field][row], self.schema[field]
                if not isinstance(data, np.ndarray):
                    continue
                payload = data[each.start : each.start + each.size]
                if type.is_encoded:
                    values[field], facts[field] = payload, replace(each, start=0)
                elif type.form is not None:
                    array = decode_array(payload, each.codec, each.shape)
                    values[field] = array.astype(type.form.dtype, copy=False)
            for field, column in columns.items():
                if field in present and not present[field][row]:
                    continue
                value = column.sample(row)
                image = found.get(self.schema[field].reference or "")
                if self.schema[field].is_measured and image is not None and not value.any():
                    value = np.array(image.shape[:2], value.dtype)
                values[field] = value
                if isinstance(column, EncodedColumn):
                    facts[field] = Facts.of(value, codec=self.schema[field].codec)
            yield name, PackSample(values=values, facts=facts)


class CandidateSource(PackSource):
    """Data without an index of its own: each sample is read and checked once, while it is packed.
    Of remote objects that hold many samples, the cache keeps as many as it has room for, because a
    shuffled shard reads from all of them."""

    has_ids = False

    def __init__(
        self,
        origin: Origin,
        candidates: Candidates,
        *,
        fingerprint: str,
        sent: DatasetDescription | None = None,
    ) -> None:
        """candidates: settled, see `list`. sent: describes the files to workers."""
        self._origin, self._candidates, self._sent = origin, candidates, sent
        self.url, self.fingerprint, self.schema = origin.url, fingerprint, candidates.schema
        self.quarantined, self.left_out = candidates.quarantined, candidates.unnamed
        self.max_pixels = candidates.max_pixels
        self.shards, self.shard_bytes = candidates.shards, candidates.shard_bytes
        self.order = np.concatenate([np.empty(0, np.int64), *self.shards])
        self.ids = np.empty(len(self.order), np.int64)  # of an index
        self.ids[self.order] = np.arange(len(self.order))
        self._units = BoxUnits(enough=min(8, len(candidates)))

    @classmethod
    def list(
        cls,
        opener: IndexOpener,
        format: Format,
        *,
        fields: Sequence[str] | None,
        workers: int,
        sent: DatasetDescription | None,
    ) -> CandidateSource:
        """List the candidates of a dataset of this format."""
        origin, listing = opener.origin, format.list(opener.origin)
        found = listing.candidates(workers=workers)
        naming = Naming.of(found.schema, opener.renames, (), url=origin.url)
        schema = naming.schema if fields is None else chosen_schema(naming.schema, fields)
        found = _with_fields(found, schema, naming)
        found = _settle_arrays(origin, found, workers=workers)
        check_units(found)
        identity = f"{listing.snapshot().fingerprint}{origin.variant}"
        fingerprint = hashlib.sha256(identity.encode()).hexdigest()
        return cls(origin, found, fingerprint=fingerprint, sent=sent)

    @cached_property
    def sizes(self) -> Ints:
        return self._candidates.sizes

    def for_worker(self, shard: PlannedShard) -> tuple[Callable[[], PackSource], PlannedShard]:
        assert self._sent is not None
        mine = self._candidates.take(shard.positions)
        open = partial(_open_candidates, self._sent, mine, self.fingerprint)
        return open, replace(shard, positions=np.arange(len(shard.positions)))

    def samples(
        self, shards: Iterable[PlannedShard], *, verify: Verify | str | None, workers: int
    ) -> Samples:
        found, wanted = self._candidates, (shard.positions for shard in shards)
        decoder = verify_for(self.schema, verify, workers=workers, max_pixels=found.max_pixels)
        for batch in read_candidate_batches(self._origin, found, wanted, workers=workers):
            some, results = found.take(batch.positions), batch.examine(found, decoder)
            for name, sample in self._samples(
                some.names, results, batch.contents, columns=some.values, present=some.present
            ):
                for field, value in sample.values.items() if isinstance(sample, PackSample) else ():
                    if field in found.spans:
                        self._units.add(field, self.schema[field], value)
                yield name, sample


def _open_candidates(
    data: DatasetDescription, candidates: Candidates, fingerprint: str
) -> CandidateSource:
    """Open the source of these candidates in a worker."""
    return CandidateSource(data.open_files()[0], candidates, fingerprint=fingerprint)


def chosen_schema(schema: Schema, fields: Sequence[str]) -> Schema:
    """Select some fields of a schema. Raises ConfigError for an unknown field, and for one that
    belongs to a field that isn't selected."""
    wrong = [name for name in fields if name not in schema]
    if wrong or not fields or len(set(fields)) < len(fields):
        raise ConfigError(f"fields: got {list(fields)}, wanted some of {list(schema)}, each once.")
    return schema.only(tuple(fields))


def _with_fields(candidates: Candidates, schema: Schema, naming: Naming) -> Candidates:
    """Return candidates with the fields of a schema, under their new names."""

    def chosen(values: Mapping[str, T]) -> dict[str, T]:
        return {name: each for name, each in naming.new(values).items() if name in schema}

    spans, values = chosen(candidates.spans), chosen(candidates.values)
    present = chosen(candidates.present)
    return replace(candidates, schema=schema, spans=spans, values=values, present=present)


def _settle_arrays(origin: Origin, candidates: Candidates, *, workers: int) -> Candidates:
    """Read all arrays of unknown dtype or number of dimensions to find these, because a shard's
    columns have types. Raises DatasetError if they differ."""
    schema = candidates.schema
    names = [name for name in schema.unsettled if not schema[name].is_encoded]
    if not names:
        return candidates
    spans = {name: each for name, each in candidates.spans.items() if name in names}
    alone, settling = replace(candidates, spans=spans, values={}, present={}), Settling(schema)
    for batch in read_candidate_batches(origin, alone, candidates.shards, workers=workers):
        results = batch.examine(alone, None)
        for position, facts in zip(batch.positions.tolist(), results, strict=True):
            if not isinstance(facts, Rejection):
                settling.add(facts, sample=printable(candidates.names[position]))
    settled = settling.schema()
    return replace(candidates, schema=Schema({**schema, **{name: settled[name] for name in names}}))


class RowSource(PackSource):
    """The samples of any source.

    The facts of encoded samples are those that a pack recorded. Encoded samples of other sources
    are checked again while they are packed, and so are boxes and points, because only the indexes
    of the source know their facts.
    """

    def __init__(
        self,
        source: Source,
        fields: Sequence[str] | None = None,
        sent: SerializedSource | None = None,
    ) -> None:
        """sent: the source, for workers. Raises the errors of opening it."""
        self.url, self._sent = source.url, sent
        self._copy: Dataset | None = None
        self._pack: Dataset | None = None
        if isinstance(source, Dataset):
            index = source.index
            if index.remote is not None and index.manifest.is_of_chunks:
                # The packed fields are cached, even if batches have other fields.
                source = self._copy = copy_keeping(source, tuple(fields or source.schema))
            if index.is_self_contained:
                self._pack, self.url = source, index.url
        self._source, contents = source, source.contents
        self._is_of_chunks = not contents.are_checked
        schema = contents.schema
        self.schema = schema if fields is None else chosen_schema(schema, fields)
        self.left_out, self.max_pixels = source.samples_left_out, contents.max_pixels
        self.fingerprint = contents.fingerprint
        # The mean of its shard: the size of a sample may be unknown until it is read.
        means = np.maximum(1, self._shard_bytes() // contents.sizes)
        self._means = np.repeat(means, contents.sizes)
        self._checks = None
        if self._pack is None:
            self._checks = ValueChecks.of(self.schema, [*self.schema], samples=len(source))
        self.ids = source.ids(contents.rows(np.arange(len(source), dtype=np.int64)))
        if contents.units is not None:  # empty if a sample can be read alone
            self.units = [
                rows if len(rows) else np.ones(size, np.int64)
                for rows, size in zip(contents.units, contents.sizes.tolist(), strict=True)
            ]

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
        spans = pack.stored_fields([name for name, form in forms.items() if form.is_span])
        places = [pack.index.layout.table.spans[name] for name in spans]
        dense = [form for form in forms.values() if not form.is_span]
        fixed = sum(-(-form.numbers // 8) if form.is_bits else form.row_bytes for form in dense)

        def read(number: int) -> Ints:
            """Return the bytes of each sample in the packed fields."""
            table = open_shard(pack, number).table
            total = np.full(len(table), fixed, np.int64)
            for place in places:
                total += table[:, place.end] - table[:, place.start]
            return total

        workers, shards = 1 if pack.remote is None else OPENERS, range(len(pack.contents.sizes))
        sizes = ordered(read, shards, workers=workers, ahead=OPENERS, name="tables")
        return np.concatenate(list(sizes))

    def _shard_bytes(self) -> Ints:
        """Return the bytes that the samples of each shard take in a pack, as far as they are
        known."""
        source, contents = self._source, self._source.contents
        if not isinstance(source, Dataset) or not self._is_of_chunks:
            return contents.shard_bytes
        found, stored = np.zeros(len(contents.sizes), np.int64), []
        for name, type in self.schema.items():
            form = type.stored
            if form is not None and not form.is_ragged:
                found += contents.sizes * math.prod(form.fixed_shape) * form.dtype.itemsize
            else:
                stored.append(name)
        return found + source.index.manifest.bytes_of(source.stored_fields(stored))

    def for_worker(self, shard: PlannedShard) -> tuple[Callable[[], PackSource], PlannedShard]:
        assert self._sent is not None
        return partial(_open_rows, self._sent, tuple(self.schema), self.fingerprint), shard

    def samples(
        self, shards: Iterable[PlannedShard], *, verify: Verify | str | None, workers: int
    ) -> Samples:
        decoder = None
        if self._pack is None:
            decoder = verify_for(self.schema, verify, workers=workers, max_pixels=self.max_pixels)
        groups = (shard.positions for shard in shards)
        pieces = (each[part] for each in groups for part in cut_into_batches(self._means[each]))
        read = ordered(self._read, pieces, workers=workers, ahead=workers + 2, name="intake")
        for positions, batch, bad in read:
            has = {name: batch.has(name) for name in self.schema}
            contents: Contents = {
                name: [
                    batch.columns[name].sample(row) if here and row not in bad else None
                    for row, here in enumerate(has[name].tolist())
                ]
                for name, type in self.schema.items()
                if type.is_encoded
            }
            names, examined = self._examine(positions, contents, decoder)
            results = [Rejection(bad[i]) if i in bad else each for i, each in enumerate(examined)]
            columns = {name: each for name, each in batch.columns.items() if name not in contents}
            yield from self._samples(names, results, contents, columns=columns, present=has)

    def _read(self, positions: Ints) -> tuple[Ints, SampleBatch, dict[int, str]]:
        """Return samples as they are stored, and why some of them are bad, by row."""
        rows = self._source.contents.rows(positions)
        bad: dict[int, str] = {}
        # Samples in chunks are decoded here for the first time, so they may be bad. For other
        # samples a wrong checksum means damage since the index was built, which is an error.
        batch = self._source.read(
            rows, fields=tuple(self.schema), bad=bad if self._is_of_chunks else None
        )
        if self._checks is not None:
            bad = self._checks(batch) | bad
        return positions, batch, bad

    def _examine(
        self, positions: Ints, contents: Contents, decoder: Verify | None
    ) -> tuple[list[bytes], Sequence[Mapping[str, Facts] | Rejection]]:
        """Return the names of samples, and the facts of their encoded fields: those that a pack
        recorded, or new ones."""
        pack = self._pack
        if pack is None:
            shown = self._source.names(self.ids[positions])
            names = [name.encode("utf-8", "surrogateescape") for name in shown]
            if not contents:
                return names, [{}] * len(names)
            return names, examine(contents, self.schema, decoder, max_pixels=self.max_pixels)
        rows = pack.contents.rows(positions)
        names, facts = [b""] * len(rows), [dict[str, Facts]() for _ in rows]
        for number in np.unique(rows[:, 0]).tolist():
            places = np.flatnonzero(rows[:, 0] == number).tolist()
            shard, mine = open_shard(pack, number), rows[places, 1]
            assert isinstance(shard, PackShard)
            for place, row in zip(places, mine.tolist(), strict=True):
                names[place] = shard.names[row]
            for field, stored in zip(contents, pack.stored_fields(list(contents)), strict=True):
                for place, each in zip(places, shard.facts(stored, mine), strict=True):
                    facts[place][field] = each
        return names, facts


def _open_rows(sent: SerializedSource, fields: tuple[str, ...], fingerprint: str) -> RowSource:
    """Open a source in a worker, once per process."""
    opened = keep_open((sent, fields), lambda: RowSource(sent.load(), fields=fields))
    if opened.fingerprint != fingerprint:
        raise IndexChangedError(
            f"{opened.url}: its index differs from that of the driver. Check that all machines see "
            "the same files."
        )
    return opened
