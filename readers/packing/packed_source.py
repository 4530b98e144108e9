"""Another pack as what a pack is made from."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from crc32c import crc32c

from penstock.cache.errors import CorruptSampleError, CorruptShardError
from penstock.cache.threads import ordered
from penstock.readers.fields.facts import Facts
from penstock.readers.fields.field_types import Text
from penstock.readers.formats.pack.format import pack_shard
from penstock.readers.formats.pack.forms import pack_forms
from penstock.readers.index.intake import cut
from penstock.readers.packing.plan import PackPlan, plan_samples
from penstock.readers.packing.sample import PackSample
from penstock.readers.packing.source import SampleGroup, chosen_schema
from penstock.readers.reading.open_shards import OPENERS, OpenShards
from penstock.readers.types import Rejection

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from penstock.readers.formats.pack.blob import PackBlob
    from penstock.readers.formats.pack.columns import PackField
    from penstock.readers.formats.pack.shard import PackShard
    from penstock.readers.index.index import Index
    from penstock.readers.origin.quarantine import QuarantineEntry
    from penstock.readers.types import Encoded, Verify

    _Shard = PackShard | PackBlob


class PackedSource:
    """Another pack: its samples were checked when it was written, so their CRCs are checked here
    and their facts are taken over."""

    has_ids = True
    has_papers = False

    def __init__(
        self, index: Index, *, fields: Sequence[str] | None = None, sizes_known: bool = False
    ) -> None:
        """sizes_known: the caller fills in the sizes of those that it asks for, and no shard is
        opened for them."""
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

    def _sizes(self, shard: _Shard) -> NDArray[np.int64]:
        """The bytes of each sample in the fields that are packed."""
        total = np.zeros(len(shard.columns), np.int64)
        for name, form in pack_forms(self.schema).items():
            bounds = shard.columns.fields[name].bounds
            total += -(-form.numbers // 8) if form.is_bits else form.row_bytes
            if bounds is not None:
                total += np.diff(bounds) - form.row_bytes
        return total

    def plan(self, *, shuffle: bool, seed: int, shard_bytes: int) -> PackPlan:
        return plan_samples(self.sizes, shuffle=shuffle, seed=seed, shard_bytes=shard_bytes)

    def groups(
        self,
        shards: Iterator[tuple[int, NDArray[np.int64]]],
        *,
        verify: Verify | None,
        workers: int,
    ) -> Iterator[SampleGroup]:
        del verify
        pieces = (positions[part] for _, positions in shards for part in cut(self.sizes[positions]))
        yield from ordered(self._read, pieces, workers=workers, ahead=workers + 2, name="intake")

    def _read(self, ids: NDArray[np.int64]) -> SampleGroup:
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

    def _samples(self, number: int, rows: NDArray[np.int64]) -> tuple[_Shard, list[PackSample]]:
        """A shard and samples of it; what the cache has wrong is fetched again."""
        shard = self._shard(number)
        try:
            return shard, self._checked(number, shard, rows)
        except CorruptShardError:
            if self._index.remote is None:
                raise
        shard = pack_shard(self._opened.replace(number, shard))
        return shard, self._checked(number, shard, rows)

    def _checked(self, number: int, shard: _Shard, rows: NDArray[np.int64]) -> list[PackSample]:
        payloads: list[dict[str, Encoded]] = [{} for _ in rows]
        facts: list[dict[str, Facts]] = [{} for _ in rows]
        arrays: list[dict[str, NDArray[Any]]] = [{} for _ in rows]
        for name, type in self.schema.items():
            field = shard.columns.fields[name]
            there = np.ones(len(rows), bool) if field.present is None else field.present[rows]
            places = np.flatnonzero(there).tolist()
            here = rows[there]
            if field.bounds is None:
                values = self._values(number, shard, name, field, here)
                for place, value in zip(places, values, strict=True):
                    arrays[place][name] = value
                continue
            spans = self._spans(number, shard, name, field, here)
            if field.form.kind != "bytes":
                assert field.shapes is not None
                for place, row, data in zip(places, here.tolist(), spans, strict=True):
                    shape = field.shapes[row]
                    arrays[place][name] = data.view(field.form.dtype).reshape(shape)
                continue
            noted = _facts(
                shard, name, field, here, codec="utf-8" if isinstance(type, Text) else ""
            )
            for place, data, each in zip(places, spans, noted, strict=True):
                payloads[place][name], facts[place][name] = data, each
        return [
            PackSample(payloads=p, facts=f, arrays=a)
            for p, f, a in zip(payloads, facts, arrays, strict=True)
        ]

    def _spans(
        self, number: int, shard: _Shard, name: str, field: PackField, rows: NDArray[np.int64]
    ) -> list[Encoded]:
        assert field.bounds is not None
        assert field.crcs is not None
        found = shard.views(field.bounds[rows].tolist(), field.bounds[rows + 1].tolist())
        for row, crc, data in zip(rows.tolist(), field.crcs[rows].tolist(), found, strict=True):
            if crc32c(data) != crc:
                raise self._corrupt(number, shard, name, row)
        return found

    def _values(
        self, number: int, shard: _Shard, name: str, field: PackField, rows: NDArray[np.int64]
    ) -> NDArray[Any]:
        """Numbers, or arrays of one shape, of some rows."""
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
    shard: _Shard, name: str, field: PackField, rows: NDArray[np.int64], *, codec: str
) -> Iterator[Facts]:
    """What is noted of encoded samples. codec: of those of which none is noted."""
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
