"""Any dataset, a part of one or several end to end, as what a pack is made from."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.cache.threads import ordered
from penstock.readers.dataset import Dataset
from penstock.readers.fields.arrays import array_form, number_dtype
from penstock.readers.fields.boxes import BoxChecks
from penstock.readers.fields.columns import DenseColumn, EncodedColumn, ListColumn
from penstock.readers.fields.examine import examine, verify_for
from penstock.readers.fields.field_types import is_encoded
from penstock.readers.index.intake import cut
from penstock.readers.packing.plan import PackPlan, plan_samples, plan_units
from penstock.readers.packing.sample import PackSample, payload_of
from penstock.readers.packing.source import SampleGroup, chosen_schema
from penstock.readers.types import Rejection

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from penstock.readers.fields.columns import Column, SampleBatch
    from penstock.readers.fields.facts import Facts
    from penstock.readers.origin.quarantine import QuarantineEntry
    from penstock.readers.source import Source
    from penstock.readers.types import Encoded, Verify

    _Payloads = dict[str, list[Encoded | Rejection | None]]


class RowSource:
    """Samples that a source of any kind reads. What is encoded is checked once more on its way, and
    so are boxes and points: only their indexes know what was found of them."""

    has_ids = True
    has_papers = False

    def __init__(
        self,
        source: Source,
        *,
        fields: Sequence[str] | None = None,
        verify: Verify | None = None,
        workers: int,
    ) -> None:
        """verify, workers: for a dataset that has no index yet. Raises what opening it raises."""
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
        # As large as those of its shard are on average: nobody knows before it is read.
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
            alone = [np.ones(size, np.int64) for size in sizes]
            each = [mine if len(mine) else one for mine, one in zip(units, alone, strict=True)]
            plan = plan_units(each, self.sizes, shuffle=shuffle, seed=seed, shard_bytes=shard_bytes)
        return replace(plan, source_ids=self._ids)

    def groups(
        self,
        shards: Iterator[tuple[int, NDArray[np.int64]]],
        *,
        verify: Verify | None,
        workers: int,
    ) -> Iterator[SampleGroup]:
        decoder = verify_for(self.schema, verify, workers=workers, max_pixels=self.max_pixels)
        pieces = (positions[part] for _, positions in shards for part in cut(self.sizes[positions]))
        for positions, batch, bad in ordered(
            self._read, pieces, workers=workers, ahead=workers + 2, name="intake"
        ):
            names = self._source.names(self._ids[positions])
            yield SampleGroup(
                positions=positions,
                samples=list(self._samples(batch, decoder, bad)),
                names=[name.encode("utf-8", "surrogateescape") for name in names],
            )

    def _read(
        self, positions: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], SampleBatch, dict[int, str]]:
        rows = self._source.contents.rows(positions)
        bad: dict[int, str] = {}
        # A sample whose checksum is wrong was good once; in a chunk nobody has seen it before.
        batch = self._source.read(
            rows, fields=tuple(self.schema), bad=bad if self._is_of_chunks else None
        )
        if self._boxes is not None:
            bad = self._boxes(batch) | bad
        return positions, batch, bad

    def _shard_bytes(self) -> NDArray[np.int64]:
        """What the samples of each shard take in a pack, as far as that is known."""
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
        columns, everyone = batch.columns, np.ones(len(batch), bool)
        there = {name: batch.present.get(name, everyone) for name in self.schema}
        encoded: _Payloads = {
            name: [
                payload_of(columns[name], row) if has and row not in bad else None
                for row, has in enumerate(mine)
            ]
            for name, mine in there.items()
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
                    name: _array(column, row)
                    for name, column in columns.items()
                    if name not in encoded and there[name][row]
                },
            )

    def name(self, position: int) -> bytes:
        (name,) = self._source.names(self._ids[position : position + 1])
        return name.encode("utf-8", "surrogateescape")


def _array(column: Column, row: int) -> NDArray[Any]:
    if isinstance(column, DenseColumn):
        found: NDArray[Any] = column.values[row]
        return found
    assert not isinstance(column, EncodedColumn | ListColumn)
    return column.sample(row)
