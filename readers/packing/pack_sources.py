"""Read and check the samples that a pack is made from.

They come from data without an index of its own, or from any dataset, a part of one, or several
joined.
"""

from __future__ import annotations

import hashlib
import math
from abc import ABC, abstractmethod
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from crc32c import crc32c

from penstock.cache import ConfigError, ordered
from penstock.readers.dataset import Dataset, copy_keeping, open_shard
from penstock.readers.fieldtypes import (
    PLAIN,
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
from penstock.readers.formats.pack import PackSample, PackShard, pack_forms
from penstock.readers.index import check_units, cut_into_batches, read_candidate_batches
from penstock.readers.packing.pack_plan import WINDOW_BYTES, plan_candidates, plan_samples
from penstock.readers.reading import OPENERS
from penstock.readers.types import Facts, Rejection

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from penstock.readers.fieldtypes import Column, SampleBatch
    from penstock.readers.formats import Candidates, Contents, Format
    from penstock.readers.index import IndexOpener
    from penstock.readers.origin import LeftOut, Origin, QuarantineEntry
    from penstock.readers.packing.pack_plan import PackPlan, PlannedShard
    from penstock.readers.sources import Source
    from penstock.readers.types import Verify

    Ints = NDArray[np.int64]
    Samples = Iterator[tuple[bytes, PackSample | Rejection]]


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
    def samples(
        self, shards: Iterable[PlannedShard], *, verify: Verify | None, workers: int
    ) -> Samples:
        """Read and check the samples of shards, in order. Yield the name of each in the source, and
        the sample or its rejection. verify: decodes images; None means the installed decoder.
        Samples that were verified before aren't verified again."""

    def _sample(
        self,
        facts: Mapping[str, Facts],
        contents: Contents,
        row: int,
        *,
        columns: Mapping[str, Column],
        present: Mapping[str, NDArray[np.bool_]],
        place: int,
    ) -> PackSample:
        """Make a good sample. facts: of the fields that were examined; contents: their bytes, in
        this row. columns: the values of all other fields, in this place."""
        values: dict[str, NDArray[Any]] = {}
        kept: dict[str, Facts] = {}
        for name, each in facts.items():
            data, type = contents[name][row], self.schema[name]
            if not isinstance(data, np.ndarray):
                continue
            payload = data[each.start : each.start + each.size]
            if type.is_encoded:
                values[name] = payload
                kept[name] = replace(each, start=0) if each.start else each
            elif type.form is not None:
                array = decode_array(payload, each.codec, each.shape)
                values[name] = array.astype(type.form.dtype, copy=False)
        for name, column in columns.items():
            if name in present and not present[name][place]:
                continue
            if isinstance(column, EncodedColumn):
                values[name] = payload = column.sample(place)
                codec = self.schema[name].codec
                kept[name] = Facts(crc32c(payload), 0, len(payload), (), codec)
            else:
                values[name] = column.sample(place)
        return PackSample(values=values, facts=kept)


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
        origin, listing = opener.origin, format.list(opener.origin)
        found = listing.candidates(workers=workers)
        naming = Naming.of(found.schema, opener.renames, (), url=origin.url)
        schema = naming.schema if fields is None else chosen_schema(naming.schema, fields)
        found = _with_fields(found, schema, naming)
        found = _settle_arrays(origin, found, workers=workers)
        check_units(found)
        identity = f"{listing.snapshot().fingerprint}{origin.variant}"
        return cls(origin, found, fingerprint=hashlib.sha256(identity.encode()).hexdigest())

    @cached_property
    def sizes(self) -> Ints:
        return self.candidates.sizes

    def plan(self, *, shuffle: bool, seed: int, shard_bytes: int) -> PackPlan:
        return plan_candidates(self.candidates, shuffle=shuffle, seed=seed, shard_bytes=shard_bytes)

    def samples(
        self, shards: Iterable[PlannedShard], *, verify: Verify | None, workers: int
    ) -> Samples:
        found, wanted = self.candidates, (shard.positions for shard in shards)
        decoder = verify_for(self.schema, verify, workers=workers, max_pixels=found.max_pixels)
        for batch in read_candidate_batches(self._origin, found, wanted, workers=workers):
            results = batch.examine(found, decoder)
            for row, (place, facts) in enumerate(
                zip(batch.positions.tolist(), results, strict=True)
            ):
                if isinstance(facts, Rejection):
                    yield found.names[place], facts
                    continue
                sample = self._sample(
                    facts,
                    batch.contents,
                    row,
                    columns=found.values,
                    present=found.present,
                    place=place,
                )
                for name in facts:
                    self._units.add(name, self.schema[name], sample.values[name])
                yield found.names[place], sample


def chosen_schema(schema: Schema, fields: Sequence[str]) -> Schema:
    """Select some fields of a schema. Raises ConfigError for an unknown field, and for one that
    belongs to a field that isn't selected."""
    wrong = [name for name in fields if name not in schema]
    if wrong or not fields or len(set(fields)) < len(fields):
        raise ConfigError(f"fields: got {list(fields)}, wanted some of {list(schema)}, each once.")
    return schema.only(tuple(fields))


def _with_fields(candidates: Candidates, schema: Schema, naming: Naming) -> Candidates:
    """Return candidates with the fields of a schema, under their new names."""
    spans, values = naming.new(candidates.spans), naming.new(candidates.values)
    present = naming.new(candidates.present)
    return replace(
        candidates,
        schema=schema,
        spans={name: each for name, each in spans.items() if name in schema},
        values={name: each for name, each in values.items() if name in schema},
        present={name: each for name, each in present.items() if name in schema},
    )


def _settle_arrays(origin: Origin, candidates: Candidates, *, workers: int) -> Candidates:
    """Read all arrays of unknown dtype or number of dimensions to find these, because a shard's
    columns have types. Raises DatasetError if they differ."""
    schema = candidates.schema
    unsettled = {name: schema[name] for name in schema.unsettled if not schema[name].is_encoded}
    if not unsettled:
        return candidates
    # Without `of`, they can be read alone.
    apart = {
        name: replace(each, of=None) if each.reference else each  # type: ignore[type-var]
        for name, each in unsettled.items()
    }
    alone = _with_fields(candidates, Schema(apart), PLAIN)
    settling = Settling(alone.schema)
    for chunk in read_candidate_batches(origin, alone, candidates.shards, workers=workers):
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
        self.url = source.url
        self._copy: Dataset | None = None
        self._pack: Dataset | None = None
        if isinstance(source, Dataset):
            index = source.open(verify=verify, workers=workers)
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
        spans = pack.stored_fields([name for name, form in forms.items() if form.is_span])
        places = [pack.index.layout.table.spans[name] for name in spans]
        fixed = sum(
            -(-form.numbers // 8) if form.is_bits else form.row_bytes
            for form in forms.values()
            if not form.is_span
        )

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

    def plan(self, *, shuffle: bool, seed: int, shard_bytes: int) -> PackPlan:
        units = self._source.contents.units
        if units is not None:  # empty if a sample can be read alone
            sizes = self._source.contents.sizes.tolist()
            units = [
                rows if len(rows) else np.ones(size, np.int64)
                for rows, size in zip(units, sizes, strict=True)
            ]
        return plan_samples(
            self.sizes,
            shuffle=shuffle,
            seed=seed,
            shard_bytes=shard_bytes,
            units=units,
            window_bytes=WINDOW_BYTES,
            source_ids=self._ids,
        )

    def samples(
        self, shards: Iterable[PlannedShard], *, verify: Verify | None, workers: int
    ) -> Samples:
        decoder = None
        if self._pack is None:
            decoder = verify_for(self.schema, verify, workers=workers, max_pixels=self.max_pixels)
        pieces = (
            shard.positions[part]
            for shard in shards
            for part in cut_into_batches(self._means[shard.positions])
        )
        for positions, batch, bad in ordered(
            self._read, pieces, workers=workers, ahead=workers + 2, name="intake"
        ):
            has = {name: batch.has(name) for name in self.schema}
            contents: Contents = {
                name: [
                    batch.columns[name].sample(row) if here and row not in bad else None
                    for row, here in enumerate(has[name].tolist())
                ]
                for name, type in self.schema.items()
                if type.is_encoded
            }
            names, results = self._examine(positions, contents, decoder)
            columns = {name: each for name, each in batch.columns.items() if name not in contents}
            for row, (name, facts) in enumerate(zip(names, results, strict=True)):
                if row in bad:
                    yield name, Rejection(bad[row])
                elif isinstance(facts, Rejection):
                    yield name, facts
                else:
                    yield (
                        name,
                        self._sample(facts, contents, row, columns=columns, present=has, place=row),
                    )

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
            shown = self._source.names(self._ids[positions])
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
