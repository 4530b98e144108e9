"""Join several datasets, or parts of them, end to end into one source of samples."""

from __future__ import annotations

import hashlib
import logging
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.cache import ConfigError, CorruptSampleError
from penstock.cache.base import READ_MODE
from penstock.readers.fieldtypes import Schema, joined_batches, stored_fields
from penstock.readers.formats import join_ranges
from penstock.readers.remote_shards import RemoteShards
from penstock.readers.sources import Contents, Source

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from penstock.cache.base import ReadMode
    from penstock.readers.blocks import Blocks
    from penstock.readers.fieldtypes import ColumnCrop, FieldType, SampleBatch
    from penstock.readers.formats import DecodedChunks

    Ints = NDArray[np.int64]

_log = logging.getLogger("penstock")


def concat(sources: Sequence[Source]) -> Source:
    """Join datasets, or parts of some, end to end into one that reads them.

    All must have the same fields selected, of the same types, with the same class names in the same
    order. Fields that aren't selected are left out if they differ. Sample ids are those of the
    first, followed by those of the second, and so on: the ids of each part begin where those of the
    dataset before end. Its `close()` closes nothing: keep the parts open as long as you need them.
    Raises ConfigError for parts that don't fit, naming the field, and the errors of opening them.
    """
    found = list(sources) if isinstance(sources, list | tuple) else sources
    if not isinstance(found, list) or not found:
        raise ConfigError(f"concat: got {sources!r:.80}, wanted a list of datasets.")
    for source in found:
        if not isinstance(source, Source):
            raise ConfigError(
                f"concat: got {source!r:.80}, wanted penstock.Dataset, subset() or split() of one."
            )
    parts = [
        part
        for source in found
        for part in (source.parts if isinstance(source, Concatenation) else (source,))
    ]
    for part in parts[1:]:
        _check_same(parts[0], part)
    joined = Concatenation(parts)
    lost = [name for part in parts for name in part.schema if name not in joined.schema]
    if lost:
        _log.info(
            "concat: the fields %s differ between the parts; they are left out, as they aren't "
            "selected",
            ", ".join(map(repr, dict.fromkeys(lost))),
        )
    return joined


class Concatenation(Source):
    """The samples of several sources, part after part. It closes nothing."""

    def __init__(self, parts: Sequence[Source]) -> None:
        """parts: of the same schema, as `concat` has checked."""
        self.parts = tuple(parts)
        self.url = " + ".join(part.url for part in self.parts)
        self._contents: Contents | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the parts: a spawned worker opens them again."""
        return concat, (list(self.parts),)

    def __repr__(self) -> str:
        return f"concat([{', '.join(map(repr, self.parts))}])"

    @property
    def contents(self) -> Contents:
        """The contents of all parts. The label correlation of several datasets is unknown: icc is
        None, and the order mixes as widely as for such data."""
        if self._contents is None:
            self._contents = _joined([part.contents for part in self.parts])
        return self._contents

    def _renamed(self, names: Mapping[str, str], made: dict[int, Source]) -> Source:
        return concat([part._renamed(names, made) for part in self.parts])

    def _datasets(self) -> tuple[Source, ...]:
        return tuple(whole for part in self.parts for whole in part._datasets())

    @cached_property
    def _first_shard(self) -> Ints:
        """The number of shards before each part, int64, shape (parts,)."""
        counts = [len(part.contents.sizes) for part in self.parts]
        return np.cumsum([0, *counts[:-1]])

    @cached_property
    def _first_id(self) -> Ints:
        """The offset of the ids of each part, int64, shape (parts,)."""
        ends = [part.contents.id_end for part in self.parts]
        return np.cumsum([0, *ends[:-1]])

    @property
    def fields(self) -> tuple[str, ...]:
        """The fields of a batch, in order: the same in all parts."""
        return self.parts[0].fields

    @property
    def cache_folder(self) -> str | None:
        """The cache folder of the first part that has one; None if there is none."""
        folders = (part.cache_folder for part in self.parts)
        return next((folder for folder in folders if folder is not None), None)

    @property
    def remote_shards(self) -> RemoteShards | None:
        """The shards of all parts that are read from a remote store."""
        return RemoteShards.end_to_end(
            [(part.remote_shards, len(part.contents.sizes)) for part in self.parts]
        )

    @property
    def chunks(self) -> tuple[DecodedChunks, ...]:
        """The stores of decoded chunks of all parts, one for each dataset."""
        return tuple(dict.fromkeys(store for part in self.parts for store in part.chunks))

    # -- samples

    def _by_part(self, rows: Ints) -> Iterator[tuple[int, Ints, Ints]]:
        """Yield each part that has some of these rows: its number, their positions, and the rows in
        the part."""
        of = np.searchsorted(self._first_shard, rows[:, 0], side="right") - 1
        for number in np.unique(of).tolist():
            places = np.flatnonzero(of == number)
            yield number, places, rows[places] - [self._first_shard[number], 0]

    def ids(self, rows: Ints) -> Ints:
        """Return sample ids: those of the parts, one after the other."""
        ids = np.empty(len(rows), np.int64)
        for number, places, mine in self._by_part(rows):
            ids[places] = self.parts[number].ids(mine) + self._first_id[number]
        return ids

    def rows(self, ids: Ints) -> Ints:
        """Return (shard, row) of sample ids. Raises ConfigError for ids that no part has."""
        rows = np.empty((len(ids), 2), np.int64)
        for number, places, mine in self._ids_by_part(ids):
            rows[places] = self.parts[number].rows(mine)
            rows[places, 0] += self._first_shard[number]
        return rows

    def _ids_by_part(self, ids: Ints) -> Iterator[tuple[int, Ints, Ints]]:
        end = self.contents.id_end
        if len(ids) and not (ids.min() >= 0 and ids.max() < end):
            raise ConfigError(f"ids: got {ids.min()} to {ids.max()}, wanted 0 to {end - 1}.")
        of = np.searchsorted(self._first_id, ids, side="right") - 1
        for number in np.unique(of).tolist():
            places = np.flatnonzero(of == number)
            yield number, places, ids[places] - self._first_id[number]

    def read(
        self,
        rows: Ints,
        *,
        mode: ReadMode = READ_MODE,
        bad: dict[int, str] | None = None,
        fields: Sequence[str] | None = None,
        crops: Mapping[str, ColumnCrop] | None = None,
        blocks: Blocks | None = None,
    ) -> SampleBatch:
        """Read samples in the order of rows; see `Dataset.read`."""

        def read(number: int, mine: Ints, places: Ints) -> SampleBatch:
            found: dict[int, str] | None = None if bad is None else {}
            try:
                batch = self.parts[number].read(
                    mine,
                    mode=mode,
                    bad=found,
                    fields=fields,
                    crops=crops and {name: crop.take(places) for name, crop in crops.items()},
                    blocks=blocks,
                )
            except CorruptSampleError as error:
                error.sample_id += int(self._first_id[number])
                raise
            if bad is not None and found:
                bad.update({int(places[row]): why for row, why in found.items()})
            return batch

        return self._gathered(rows, read)

    def values(self, name: str, rows: Ints) -> SampleBatch:
        """Read only one field of these rows."""
        return self._gathered(rows, lambda number, mine, _: self.parts[number].values(name, mine))

    def _gathered(self, rows: Ints, read: Callable[[int, Ints, Ints], SampleBatch]) -> SampleBatch:
        """Join the batches that `read` returns for each part, in the order of the rows, with their
        ids in the concatenation."""
        batches, order = [], []
        for number, places, mine in self._by_part(rows):
            batch = read(number, mine, places)
            batches.append(replace(batch, ids=batch.ids + self._first_id[number]))
            order.append(places)
        if not batches:
            return read(0, rows, rows[:, 0])
        joined = joined_batches(batches)
        if len(batches) == 1:
            return joined
        back = np.empty(len(rows), np.int64)
        back[np.concatenate(order)] = np.arange(len(rows))
        return joined.take(back)

    def lengths(self, name: str, rows: Ints) -> Ints:
        """Return first lengths of samples, int64, shape (n,)."""
        lengths = np.empty(len(rows), np.int64)
        for number, places, mine in self._by_part(rows):
            lengths[places] = self.parts[number].lengths(name, mine)
        return lengths

    def names(self, ids: Iterable[int] | Ints) -> list[str]:
        """Return the samples' names for messages, as in their parts."""
        wanted = np.asarray([*ids], np.int64)
        names = [""] * len(wanted)
        for number, places, mine in self._ids_by_part(wanted):
            for place, name in zip(places.tolist(), self.parts[number].names(mine), strict=True):
                names[place] = name
        return names

    def _part_of(self, shard: int) -> tuple[Source, int]:
        """Return the part of a shard, and the shard's number in it."""
        number = int(np.searchsorted(self._first_shard, shard, side="right")) - 1
        return self.parts[number], shard - int(self._first_shard[number])

    def image_dims(self, shard: int, name: str) -> NDArray[np.int32]:
        """Return the upright height and width of the images in a shard, int32, shape (samples,
        2)."""
        part, number = self._part_of(shard)
        return part.image_dims(number, name)

    def is_near(self, shard: int) -> bool:
        """Return True if the table of a shard's samples can be read without the remote."""
        part, number = self._part_of(shard)
        return part.is_near(number)

    def give_back(self) -> None:
        """Close those open shards of all parts that the cache needn't keep."""
        for part in self.parts:
            part.give_back()

    def close(self) -> None:
        """Close nothing: the caller closes the parts."""


def _joined(each: Sequence[Contents]) -> Contents:
    """Join the contents of several sources, end to end."""
    if len(each) == 1:
        return each[0]
    digest = hashlib.sha256("\n".join(["concat", *(c.fingerprint for c in each)]).encode())
    schema = _common([c.schema for c in each])
    units = None
    if any(c.units is not None for c in each):
        units = [rows for c in each for rows in c.units or c.sizes.reshape(-1, 1)]
    return Contents(
        schema=schema,
        sizes=np.concatenate([c.sizes for c in each]),
        shard_bytes=np.concatenate([c.shard_bytes for c in each]),
        id_end=sum(c.id_end for c in each),
        fingerprint=digest.hexdigest(),
        icc=None,
        shuffled=False,
        images={
            name: join_ranges([c.images[name] for c in each])
            for name in each[0].images
            if name in schema
        },
        files=sum(c.files for c in each),
        is_file_per_sample=any(c.is_file_per_sample for c in each),
        units=units,
        unit_bytes=_mean_unit_bytes(each),
        is_encoded=any(c.is_encoded for c in each),
        max_pixels=max(c.max_pixels for c in each),
        longest={
            name: max(c.longest[name] for c in each)
            for name in each[0].longest
            if all(name in c.longest for c in each)
        },
    )


def _mean_unit_bytes(each: Sequence[Contents]) -> float:
    """Return the mean size of a decode unit over several sources."""
    counts = [sum(map(len, c.units)) if c.units is not None else len(c.sizes) for c in each]
    return sum(n * c.unit_bytes for n, c in zip(counts, each, strict=True)) / max(1, sum(counts))


def _common(schemas: Sequence[Schema]) -> Schema:
    """Return the fields that are equal in all schemas, without those that refer to others."""
    first = schemas[0]
    alike = {n: t for n, t in first.items() if all(other.get(n) == t for other in schemas[1:])}
    while alone := [n for n, t in alike.items() if (getattr(t, "of", None) or n) not in alike]:
        for name in alone:
            del alike[name]
    return Schema(alike)


def _check_same(first: Source, other: Source) -> None:
    """Raise ConfigError if two sources differ in the fields that they deliver, or in the fields to
    which these refer."""
    ours, theirs = first.schema, other.schema
    both = f"{first.url} and {other.url}"
    delivered = stored_fields((*first.fields, *other.fields), {**ours, **theirs})
    owners = [getattr(each.get(name), "of", None) for each in (ours, theirs) for name in delivered]
    for name in dict.fromkeys([*delivered, *(owner for owner in owners if owner)]):
        if name not in ours or name not in theirs:
            has, lacks = (first, other) if name in ours else (other, first)
            raise ConfigError(
                f'concat: {has.url} has a field "{name}" and {lacks.url} has none. Fields: '
                f"{list(ours)} and {list(theirs)}. Pass the same fields= to both, with fields that "
                "both have."
            )
        if ours[name] != theirs[name]:
            raise ConfigError(
                f'concat: the field "{name}" of {both} differs: '
                f"{_difference(name, ours[name], theirs[name])}"
            )
    if first.fields != other.fields:
        raise ConfigError(
            f"concat: {both} deliver different fields: {first.fields!r} and {other.fields!r}. Pass "
            "the same fields= to both."
        )


def _difference(name: str, ours: FieldType, theirs: FieldType) -> str:
    if not ours.class_names or type(ours) is not type(theirs):
        return f"{ours!r} and {theirs!r}. Give both the same type, with schema= of their Dataset."
    alone = [*(set(ours.class_names) ^ set(theirs.class_names))]
    what = (
        f"only one has the classes {sorted(alone)[:5]}"
        if alone
        else "they have the same classes in another order"
    )
    return (
        f"{what}, so that one number would mean two classes. Give both the same list: "
        f'schema={{"{name}": {type(ours).__name__}([...])}} of their Dataset.'
    )
