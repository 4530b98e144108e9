"""Join several datasets, or parts of them, end to end into one source of samples."""

from __future__ import annotations

import hashlib
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.cache import ConfigError, log
from penstock.readers.fieldtypes import FieldType, SampleBatch, Schema, stored_fields
from penstock.readers.formats import join_ranges
from penstock.readers.remote_shards import RemoteShards
from penstock.readers.sample_weights import joined_weights
from penstock.readers.sources import Contents, Run, Source, View

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from penstock.cache.base import ReadMode
    from penstock.readers.blocks import Blocks
    from penstock.readers.reading import JoinedReader
    from penstock.readers.types import Ints


def concat(sources: Sequence[Source]) -> Source:
    """Join datasets, or parts of some, end to end into one that reads them.

    ```python
    from penstock import Dataset, concat

    both = concat([Dataset("packs/train"), Dataset("packs/val")])
    print(len(both))  # 120
    ```

    All must have the same fields selected, of the same types, with the same class names in the same
    order. Fields that aren't selected are left out if they differ. Sample ids are those of the
    first, followed by those of the second, and so on: the ids of each part begin where those of the
    dataset before end. Its `close()` closes nothing: keep the parts open while you use it. Raises
    ConfigError for parts that don't fit, naming the field, and the errors of opening them.
    """
    found = list(sources) if isinstance(sources, list | tuple) else []
    if not found or not all(isinstance(source, Source) for source in found):
        raise ConfigError(
            f"concat: got {sources!r:.80}, wanted a list of penstock.Dataset, subset() or split() "
            "of one."
        )
    nested = [each.bases if isinstance(each, Concatenation) else (each,) for each in found]
    parts = [part for each in nested for part in each]
    if any(source.contents.mixture is not None for source in found):
        raise ConfigError(
            "concat: got a mixture, whose parts have weights. Give it to mix(), together with the "
            "other sources, or join the parts before they are mixed."
        )
    for part in parts[1:]:
        _check_same(parts[0], part)
    joined = Concatenation(parts)
    if lost := {name for part in parts for name in part.schema} - joined.schema.keys():
        log.info(
            "concat: the fields %s differ between the parts; they are left out, as they aren't "
            "selected",
            ", ".join(map(repr, sorted(lost))),
        )
    return joined


class Concatenation(View):
    """The samples of several sources, part after part."""

    def __init__(self, parts: Sequence[Source]) -> None:
        """parts: of the same schema, as `concat` has checked."""
        self.bases = tuple(parts)
        self.url = " + ".join(part.url for part in self.bases)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the parts: a spawned worker opens them again."""
        return concat, (list(self.bases),)

    def __repr__(self) -> str:
        return f"concat([{', '.join(map(repr, self.bases))}])"

    @cached_property
    def contents(self) -> Contents:
        """The contents of all parts. The label correlation of several datasets is unknown: icc is
        None, and the order mixes as widely as for such data."""
        each = [part.contents for part in self.bases]
        return joined_contents(each, common_schema([part.schema for part in each]))

    def _renamed(self, names: Mapping[str, str], made: dict[int, Source]) -> Source:
        return concat([part._renamed(names, made) for part in self.bases])

    @cached_property
    def _first_shard(self) -> Ints:
        """The number of shards before each part, int64, shape (parts,)."""
        counts = [len(part.contents.sizes) for part in self.bases]
        return np.cumsum([0, *counts[:-1]])

    @cached_property
    def _first_id(self) -> Ints:
        """The offset of the ids of each part, int64, shape (parts,)."""
        ends = [part.contents.id_end for part in self.bases]
        return np.cumsum([0, *ends[:-1]])

    @property
    def remote_shards(self) -> RemoteShards | None:
        """The shards of all parts that are read from a remote store."""
        parts = [(part.remote_shards, len(part.contents.sizes)) for part in self.bases]
        return RemoteShards.end_to_end(parts)

    @cached_property
    def _shard_ids(self) -> Ints | None:
        each = [part._shard_ids for part in self.bases]
        pairs = zip(each, self._first_id, strict=True)
        firsts = [ids + first for ids, first in pairs if ids is not None]
        return np.concatenate(firsts) if len(firsts) == len(each) else None

    @cached_property
    def _joined(self) -> JoinedReader | None:
        """The reader that reads the samples of all parts by one call; None unless all parts are
        local datasets whose samples are stored in the same way."""
        readers = [found for part in self.bases if (found := part._whole_reader) is not None]
        if len(readers) < max(2, len(self.bases)):
            return None
        from penstock.readers.reading import JoinedReader  # remote parts don't need it

        return JoinedReader(readers, self._first_id) if JoinedReader.can_join(readers) else None

    def _read_together(
        self, rows: Ints, *, mode: ReadMode, bad: dict[int, str] | None, blocks: Blocks
    ) -> SampleBatch | None:
        """Read samples of all parts by one pass; None if that isn't possible."""
        if self._joined is None:
            return super()._read_together(rows, mode=mode, bad=bad, blocks=blocks)
        return self._joined.read(rows, mode=mode, bad=bad, blocks=blocks)

    def ids(self, rows: Ints) -> Ints:
        """Return the sample ids of (shard, row), int64, shape (n,)."""
        if (firsts := self._shard_ids) is None:
            return super().ids(rows)
        return firsts[rows[:, 0]] + rows[:, 1]

    def _runs(self, rows: Ints) -> Iterator[Run]:
        for number, at, mine in _by_part(rows, rows[:, 0], self._first_shard):
            mine[:, 0] -= self._first_shard[number]
            yield Run(self.bases[number], mine, at, int(self._first_id[number]))

    def _rows(self, ids: Ints) -> Ints:
        rows = np.empty((len(ids), 2), np.int64)
        for number, places, mine in _by_part(ids, ids, self._first_id):
            rows[places] = self.bases[number].rows(mine - self._first_id[number])
            rows[places, 0] += self._first_shard[number]
        return rows


def _by_part(values: Ints, numbers: Ints, firsts: Ints) -> Iterator[tuple[int, Ints | slice, Ints]]:
    """Yield each part that has some of the values: its number, their positions, and a copy of them.

    numbers: of the shard or the sample of each. firsts: the first such number of each part."""
    of = np.searchsorted(firsts, numbers, side="right") - 1
    parts = np.flatnonzero(np.bincount(of)).tolist() or [0]  # faster than np.unique
    for number in parts:
        at = np.flatnonzero(of == number) if len(parts) > 1 else slice(None)
        yield number, at, np.array(values[at])


def joined_contents(each: Sequence[Contents], schema: Schema) -> Contents:
    """Join the contents of several sources, end to end. schema: of their samples; some of the
    sources may lack some of the fields."""
    if len(each) == 1:
        return each[0]
    digest = hashlib.sha256("\n".join(["concat", *(c.fingerprint for c in each)]).encode())
    counts = [len(c.sizes) if c.units is None else sum(map(len, c.units)) for c in each]
    unit_bytes = sum(n * c.unit_bytes for n, c in zip(counts, each, strict=True))
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
            name: join_ranges([c.images[name] for c in each if name in c.images])
            for name in schema
            if any(name in c.images for c in each)
        },
        files=sum(c.files for c in each),
        is_file_per_sample=any(c.is_file_per_sample for c in each),
        units=units,
        selected_bytes=sum(c.sample_bytes * c.samples for c in each)
        / max(1, sum(c.samples for c in each)),
        unit_bytes=unit_bytes / max(1, sum(counts)),
        is_encoded=any(c.is_encoded for c in each),
        are_checked=all(c.are_checked for c in each),
        max_pixels=max(c.max_pixels for c in each),
        longest={
            name: max(c.longest[name] for c in each if name in c.schema)
            for name in schema
            if all(name in c.longest for c in each if name in c.schema)
        },
        lacking={name: lack for name in schema if (lack := sum(c.lack(name) for c in each))},
        weights=joined_weights([(c.weights, c.samples) for c in each]),
    )


def common_schema(schemas: Sequence[Schema], *, masks: bool = False) -> Schema:
    """Return the fields that are equal in all schemas, without those that refer to others. masks:
    also the fields that some of the schemas lack."""
    types = {name: type for each in reversed(schemas) for name, type in each.items()}
    alike = {
        name: types[name]
        for name in dict.fromkeys(name for each in schemas for name in each)
        if all((masks and name not in each) or each.get(name) == types[name] for each in schemas)
    }
    while alone := [n for n, t in alike.items() if (t.reference or n) not in alike]:
        for name in alone:
            del alike[name]
    return Schema(alike)


def _check_same(first: Source, other: Source) -> None:
    """Raise ConfigError if two sources differ in the fields that they deliver, or in the fields to
    which these refer."""
    ours, theirs = first.schema, other.schema
    both = f"{first.url} and {other.url}"
    delivered = stored_fields((*first.fields, *other.fields), {**ours, **theirs})
    types = [each[name] for each in (ours, theirs) for name in delivered if name in each]
    for name in dict.fromkeys([*delivered, *(t.reference for t in types if t.reference)]):
        if name not in ours or name not in theirs:
            raise ConfigError(
                f'concat: only one of {both} has a field "{name}". Fields: {list(ours)} and '
                f"{list(theirs)}. Pass the same fields= to both, with fields that both have."
            )
        if ours[name] != theirs[name]:
            raise ConfigError(
                f'concat: the field "{name}" of {both} differs: '
                f"{difference(name, ours[name], theirs[name])}"
            )
    if first.fields != other.fields:
        raise ConfigError(
            f"concat: {both} deliver different fields: {first.fields!r} and {other.fields!r}. Pass "
            "the same fields= to both."
        )


def difference(name: str, ours: FieldType, theirs: FieldType) -> str:
    """Describe how two types of one field differ, and the remedy, for a message."""
    ours_named, theirs_named = ours.class_names, theirs.class_names
    if not ours_named or type(ours) is not type(theirs) or ours_named == theirs_named:
        return f"{ours!r} and {theirs!r}. Give both the same type, with schema= of their Dataset."
    alone = sorted({*ours_named} ^ {*theirs_named})
    what = "they have the same classes in another order"
    if alone:
        what = f"only one has the classes {alone[:5]}"
    of = f', of="{ours.reference}"' if ours.reference else ""
    return (
        f"{what}, so that one number would mean two classes. Give both the same list: "
        f'schema={{"{name}": {type(ours).__name__}([...]{of})}} of their Dataset.'
    )
