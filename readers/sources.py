"""Define a source of samples: what the loader reads, whatever it is made of.

A dataset is a source, and so are a selection of one and several joined end to end. A source stands
between the plan, which names (shard, row), and the feed, which wants columns; neither asks which
kind it is. `Contents` says what a source holds, `Selection` reads some samples of another source,
and `whole_column` reads one field of all samples (labels, groups, lengths) to choose by.
"""

from __future__ import annotations

import hashlib
import logging
from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, Self, cast

import numpy as np

from penstock.cache import ConfigError, IndexChangedError
from penstock.cache.base import READ_MODE
from penstock.readers.fields import (
    LABELS,
    PRESENT,
    ClassLabel,
    DenseColumn,
    RaggedColumn,
    Text,
    Value,
    check_renames,
    class_field,
    has_values,
    joined_columns,
)
from penstock.readers.origin import joined_left_out
from penstock.readers.types import MAX_PIXELS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from penstock.cache.base import ReadMode
    from penstock.readers.blocks import Blocks
    from penstock.readers.fields import Column, ColumnCrop, FieldType, SampleBatch, Schema
    from penstock.readers.formats import DecodedChunks
    from penstock.readers.origin import LeftOut
    from penstock.readers.remote_shards import RemoteShards
    from penstock.readers.types import ImageRange

    Ints = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, eq=False)
class Contents:
    """What a source holds, as far as its index tells.

    schema: all fields, whether selected or not. sizes: samples of each shard; shard_bytes: to read
    it whole; both int64, shape (shards,), no shard empty. id_end: above every sample's id.
    fingerprint: of the content and of what was selected, as hex. icc: label correlation inside a
    shard (`index.totals.label_correlation`), None where it isn't known. shuffled: whether the
    samples lie in random order. images: bounds of the oriented sizes, by field. files: that
    the samples lie in; is_file_per_sample: in one each. units: rows of each decode unit, by shard;
    None where a sample can be had alone. unit_bytes: of all fields of one, decoded, on average and
    as far as metadata tell. longest: largest first length of fields whose samples differ in it, as
    far as known. is_encoded: numbers are decoded when they are read. max_pixels: of an
    image or a mask that is decoded.
    """

    schema: Schema
    sizes: Ints
    shard_bytes: Ints
    id_end: int
    fingerprint: str
    icc: float | None
    shuffled: bool
    images: Mapping[str, ImageRange]
    files: int
    is_file_per_sample: bool
    units: Sequence[Ints] | None = None
    unit_bytes: float = 0.0
    longest: Mapping[str, int] = field(default_factory=dict)
    is_encoded: bool = False
    max_pixels: int = MAX_PIXELS

    @cached_property
    def samples(self) -> int:
        """How many samples there are."""
        return int(self.sizes.sum())

    @cached_property
    def starts(self) -> Ints:
        """Samples before each shard, int64, shape (shards,)."""
        starts: Ints = np.cumsum(self.sizes) - self.sizes
        return starts

    def places(self, rows: Ints) -> Ints:
        """Where samples stand among all, by (shard, row): int64, shape (n,)."""
        places: Ints = self.starts[rows[:, 0]] + rows[:, 1]
        return places

    def rows(self, places: Ints) -> Ints:
        """(shard, row) of samples by where they stand among all: int64, shape (n, 2)."""
        shards = np.searchsorted(self.starts, places, side="right") - 1
        return np.stack([shards, places - self.starts[shards]], axis=1)


def selected(base: Contents, places: Ints, shards: Ints) -> Contents:
    """What a selection holds. places: of the samples among all, ascending; shards: that hold any of
    them. How alike samples of a shard are, and the sizes of images, are taken to be as in all."""
    digest = hashlib.sha256(f"selection {base.fingerprint} {len(places)} ".encode())
    digest.update(places.astype("<i8", copy=False).data)
    borders = np.searchsorted(places, [*base.starts[shards].tolist(), base.samples])
    units = base.units
    if units is not None:
        units = [
            _of_units(places[begin:end] - base.starts[shard], units[shard])
            for shard, begin, end in zip(shards.tolist(), borders[:-1], borders[1:], strict=True)
        ]
    return replace(
        base,
        sizes=np.diff(borders),
        shard_bytes=base.shard_bytes[shards],
        fingerprint=digest.hexdigest(),
        files=len(places) if base.is_file_per_sample else len(shards),
        units=units,
    )


def _of_units(rows: Ints, units: Ints) -> Ints:
    """Rows of each unit that are among some rows of their shard, without those that have none."""
    counts = np.bincount(np.searchsorted(np.cumsum(units), rows, side="right"))
    kept: Ints = counts[counts > 0].astype(np.int64)
    return kept


_log = logging.getLogger("penstock")


class Source(ABC):
    """What can be read by shards and rows, with names, ids and what the cache needs to know.

    A sample's id is fixed where it lies: a selection keeps the ids of what it was taken from, so
    that a sample's name and draws don't change; datasets end to end have those of the first, then
    those of the second behind them, and so on. Several threads may read.

    url: for people. part_of: fingerprint of what this was selected from; None where it is whole.
    """

    url: str
    part_of: str | None = None
    _chunks: tuple[DecodedChunks, ...] = ()

    # -- what there is

    @property
    @abstractmethod
    def contents(self) -> Contents:
        """What is there; opens it at first use."""

    @property
    @abstractmethod
    def fields(self) -> tuple[str, ...]:
        """What a batch has, in order."""

    @property
    def schema(self) -> Schema:
        """All fields of a sample and their types, selected or not."""
        return self.contents.schema

    @property
    def classes(self) -> tuple[str, ...]:
        """Class names by label; empty without labels."""
        return self.schema.class_names()

    @property
    def num_classes(self) -> int | None:
        """How many classes there are: as many as names, else one more than the largest label (the
        selected field of classes, or whole numbers called "label" or "labels"), as the index knows
        it, or where it doesn't, as the whole column says, which is read then. A part has its
        dataset's. None without labels."""
        if self.classes:
            return len(self.classes)
        schema = self.schema
        field = class_field(schema, (*self.fields, *schema))
        field = field or next((name for name in LABELS if _is_whole(schema.get(name))), None)
        if field is None:
            return None
        type = schema[field]
        if isinstance(type, ClassLabel) and type.names:  # of several fields of classes
            return len(type.names)
        return 1 + max(each._largest(field) for each in self._wholes())

    def _largest(self, name: str) -> int:
        """The largest of a field of whole numbers."""
        return int(np.max(self.column(name)))

    @property
    def left_out(self) -> dict[str, int]:
        """How many samples are left out, by reason, most first: those that were bad when the
        dataset was indexed or packed. A part has those of its dataset, datasets end to end those of
        each dataset once."""
        return {reason: each.samples for reason, each in self.samples_left_out.items()}

    @property
    def samples_left_out(self) -> Mapping[str, LeftOut]:
        """As `left_out`, with a name for each reason."""
        return joined_left_out(each._own_left_out() for each in dict.fromkeys(self._wholes()))

    def _wholes(self) -> tuple[Source, ...]:
        """The datasets that it is made of."""
        return (self,)

    def _own_left_out(self) -> Mapping[str, LeftOut]:
        """What one of those left out."""
        return {}

    @property
    def cache_folder(self) -> str | None:
        """The user's cache folder; None where there is none."""
        return None

    @property
    def remote_shards(self) -> RemoteShards | None:
        """The shards that come from afar; None where all are local."""
        return None

    @property
    def chunks(self) -> tuple[DecodedChunks, ...]:
        """Where decoded chunks are kept, of each dataset that is open once."""
        return self._chunks

    # -- samples

    def ids(self, rows: Ints) -> Ints:
        """Sample ids of (shard, row), int64, shape (n,): positions in the index, unless a source
        says else."""
        return self.contents.places(rows)

    @abstractmethod
    def rows(self, ids: Ints) -> Ints:
        """(shard, row) of sample ids, int64, shape (n, 2). Raises ConfigError for ids that aren't
        in it."""

    @abstractmethod
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
        """The samples of rows, in their order: see `Dataset.read`."""

    def read_parts(
        self,
        rows: Ints,
        bounds: Sequence[int],
        *,
        mode: ReadMode = READ_MODE,
        bad: dict[int, str] | None = None,
        fields: Sequence[str] | None = None,
        blocks: Blocks | None = None,
    ) -> list[SampleBatch]:
        """Several small batches by one read: the samples between bounds, each part in memory of its
        own. Other arguments, and what is raised, as for `read`."""
        batch = self.read(rows, mode=mode, bad=bad, fields=fields, blocks=blocks)
        return batch.parts(bounds) if blocks is None else batch.parts(bounds, array=blocks.array)

    @abstractmethod
    def names(self, ids: Iterable[int] | Ints) -> list[str]:
        """The samples' names for people. Raises ConfigError for ids that aren't in it."""

    def values(self, name: str, rows: Ints) -> SampleBatch:
        """One field of these rows, whether it is selected or not, and nothing else: where its
        values are noted beside the samples, no sample is read. Raises ConfigError for a field that
        isn't there."""
        return self.read(rows, fields=(name,))

    def lengths(self, name: str, rows: Ints) -> Ints:
        """The first length of each sample of a field whose samples differ in it, int64, shape (n,):
        from what is noted of samples, where a source knows how. Raises ConfigError for other
        fields."""

        return lengths_of(self.values(name, rows).columns[name], name, url=self.url)

    def column(self, name: str) -> NDArray[Any] | list[Any]:
        """One field of all samples, in the order of their ids: such as labels, to choose by.

        An array with a row for each sample; of texts a list of str, of arrays whose shapes differ a
        list of arrays. Of a field that some lack, "<name>.present" is a mask of those that have it
        (where it lies in files, these are read for that).
        Memory is that of the values, all of them at once. What has to be decoded or kept as bytes
        (images, masks, sounds) is refused with ConfigError; texts in files of their own are read.
        Raises ConfigError also for a field that some lack.
        """

        return whole_column(self, name)

    # -- parts

    def rename(self, names: Mapping[str, str]) -> Self:
        """The same samples with other names of fields: rename({"image": "pixel_values"}).

        names: new names by those of now, also of fields that aren't selected; masks and boxes
        refer to their image by its new name. Sample ids, order and draws stay. It is a dataset that
        opens and closes by itself; a part reads the renamed one, and so do datasets end to end.
        Raises ConfigError for names that can't be; for fields that aren't there, and two of one
        name, when it is opened.
        """
        return cast("Self", self._renamed(check_renames(names), {}))

    def _renamed(self, names: Mapping[str, str], made: dict[int, Source]) -> Source:
        """made: the datasets that were renamed already, by identity."""
        raise NotImplementedError(f"{type(self).__name__} can't be renamed")

    def subset(self, which: Iterable[int] | Iterable[bool] | NDArray[Any]) -> Selection:
        """Some of the samples, as a dataset of its own that reads this one.

        which: sample ids, in any order, each once; or a mask of bools, one for each sample in the
        order of ids. Samples keep their ids, names and draws. It needs 8 bytes of memory a sample.
        Its `close()` closes nothing: this dataset stays open as long as you need its parts. Raises
        ConfigError for ids that aren't in it or come twice, a mask of another length, and for no
        samples.
        """
        return Selection.of(self, _chosen(self, which))

    def split(
        self,
        *shares: float,
        seed: int,
        by: str | Callable[[str], object] | Sequence[object] | NDArray[Any] | None = None,
    ) -> tuple[Selection, ...]:
        """Parts without a common sample, one a share: split(0.9, 0.1, seed=0) gives two.

        Which sample goes where is a keyed hash of seed and sample: the same everywhere, for ever.
        Shares that add up to less than 1 leave the rest out. by says what parts have in common:

        - None: nothing; each sample is drawn by itself.
        - the name of a `ClassLabel` field: **stratified**: each part has its share of every class.
        - the name of another field (a number or a text, such as "patient"), an array or list with a
          key for each sample in the order of ids, or a function of a sample's name: **groups**: all
          samples of one key are in one part, so that nothing of a patient or a video leaks. Sizes
          are then as near to the shares as whole groups allow. To group by a class field, pass its
          values: by=dataset.column("label").

        Raises ConfigError for shares that can't be, a part that would be empty, and a `by` that is
        neither.
        """
        from penstock.readers.splits import by_group, by_sample, check_shares

        wanted = check_shares(shares, seed=seed)
        ids = self.ids(self.contents.rows(np.arange(len(self), dtype=np.int64)))
        if by is None:
            parts = by_sample(ids, wanted, seed=seed)
        elif isinstance(by, str) and isinstance(self.schema.get(by), ClassLabel):
            parts = by_sample(ids, wanted, seed=seed, classes=np.asarray(self.column(by)))
            _log.info('split: stratified by the classes of "%s"', by)
        else:
            parts = by_group(_keys(self, by, ids), len(ids), wanted, seed=seed)
        found = [np.flatnonzero(parts == number) for number in range(len(shares))]
        for share, places in zip(shares, found, strict=True):
            if not len(places):
                raise ConfigError(
                    f"split: the share {share} of {len(self):,} samples of {self.url} "
                    f"{'is none of the groups' if by is not None else 'is none'}. Ask for larger "
                    "shares, or for fewer parts."
                )
        return tuple(Selection.of(self, places) for places in found)

    @abstractmethod
    def image_dims(self, shard: int, name: str) -> NDArray[np.int32]:
        """Oriented height and width of an image field in a whole shard, shape (samples, 2). Raises
        what opening the shard raises."""

    def is_near(self, shard: int) -> bool:
        """Whether what is noted of a shard's samples can be had without the remote."""
        del shard
        return True

    def __len__(self) -> int:
        return self.contents.samples

    def __getitem__(self, index: object) -> NoReturn:
        """Always raises ConfigError: samples are read by shards, through the loader."""
        raise ConfigError(
            f"Sample {index!r} of {self.url} was asked for by index. A native dataset is read by "
            "shards, through Penstock's DataLoader only: loop over DataLoader(dataset, ...), and "
            "for a part of it take dataset.subset(ids) or dataset.split(0.9, 0.1, seed=0). If a "
            "framework asked, it has rebuilt that loader as torch's own, which would shard again "
            "and leave out decoding: docs/trainers.md says what to switch off, such as "
            "`ignore_data_skip=True` in the HF Trainer."
        )

    # -- life

    @abstractmethod
    def give_back(self) -> None:
        """Forget those open shards that the cache needn't keep for this source's loaders."""

    @abstractmethod
    def close(self) -> None:
        """Release what it opened itself: a selection, and datasets end to end, have opened nothing.
        Safe to call twice."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Selection(Source):
    """Some samples of another source, which it reads: what `subset` and `split` give.

    Its shards are those of that source that hold any of them. It closes nothing.
    """

    def __init__(self, base: Source, places: Ints, *, fingerprint: str) -> None:
        """places: where they stand among all of base, int64, ascending; fingerprint: of the base
        that they were chosen from."""
        self.url = base.url
        self._base, self._places = base, places
        self.part_of = self._fingerprint = fingerprint
        self._contents: Contents | None = None

    @classmethod
    def of(cls, source: Source, places: Ints) -> Selection:
        """Some of a source, by where they stand; of a selection: of what that was taken from."""
        if isinstance(source, Selection):
            return cls(source._base, source._places[places], fingerprint=source._fingerprint)
        return cls(source, places, fingerprint=source.contents.fingerprint)

    def __reduce__(self) -> tuple[Any, ...]:
        """For a spawned worker: what it was taken from is opened anew there, and is the same."""
        return _selection, (self._base, self._places, self._fingerprint)

    def __repr__(self) -> str:
        return f"Selection(<{len(self._places):,} samples>, {self._base!r})"

    @property
    def contents(self) -> Contents:
        """What was selected. Raises IndexChangedError where the dataset isn't the one that it was
        selected from any more."""
        if self._contents is None:
            base = self._base.contents
            if base.fingerprint != self._fingerprint:
                raise IndexChangedError(
                    f"{self.url}: the dataset has changed since this selection was taken from it "
                    f"(index {self._fingerprint[:12]}, now {base.fingerprint[:12]}), so its ids "
                    "mean other samples. Take the selection again."
                )
            self._contents = selected(base, self._places, self._shards)
        return self._contents

    def _wholes(self) -> tuple[Source, ...]:
        return self._base._wholes()

    def _renamed(self, names: Mapping[str, str], made: dict[int, Source]) -> Source:
        return Selection(
            self._base._renamed(names, made), self._places, fingerprint=self._fingerprint
        )

    @cached_property
    def _shards(self) -> Ints:
        """Of each shard its number in the base, int64, ascending."""
        starts = self._base.contents.starts
        return np.unique(np.searchsorted(starts, self._places, side="right") - 1)

    def _in_base(self, rows: Ints) -> Ints:
        """(shard, row) of the base."""
        places = self._places[self.contents.places(rows)]
        shards = self._shards[rows[:, 0]]
        return np.stack([shards, places - self._base.contents.starts[shards]], axis=1)

    @property
    def fields(self) -> tuple[str, ...]:
        """What a batch has: as in the dataset that it was taken from."""
        return self._base.fields

    @property
    def cache_folder(self) -> str | None:
        """The user's cache folder; None where there is none."""
        return self._base.cache_folder

    @property
    def remote_shards(self) -> RemoteShards | None:
        """Those of its shards that come from afar, whole, as the cache keeps them."""
        remote = self._base.remote_shards
        return None if remote is None else remote.only(self._shards)

    @property
    def chunks(self) -> tuple[DecodedChunks, ...]:
        """Where decoded chunks of what it was taken from are kept."""
        return self._base.chunks

    def ids(self, rows: Ints) -> Ints:
        """Sample ids, which are those of what it was taken from."""
        return self._base.ids(self._in_base(rows))

    def rows(self, ids: Ints) -> Ints:
        """(shard, row) of sample ids. Raises ConfigError for samples that aren't selected."""
        wanted = self._base.contents.places(self._base.rows(ids))
        places = np.searchsorted(self._places, wanted)
        missing = places == len(self._places)
        missing[~missing] = self._places[places[~missing]] != wanted[~missing]
        if missing.any():
            raise ConfigError(
                f"ids: got {int(ids[missing][0])}, which is a sample of {self.url}, but not of the "
                f"{len(self._places):,} that were selected of it."
            )
        return self.contents.rows(places)

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
        """The samples of rows, in their order: see `Dataset.read`."""
        return self._base.read(
            self._in_base(rows), mode=mode, bad=bad, fields=fields, crops=crops, blocks=blocks
        )

    def values(self, name: str, rows: Ints) -> SampleBatch:
        """One field of these rows and nothing else."""
        return self._base.values(name, self._in_base(rows))

    def lengths(self, name: str, rows: Ints) -> Ints:
        """First lengths of samples, int64, shape (n,)."""
        return self._base.lengths(name, self._in_base(rows))

    def names(self, ids: Iterable[int] | Ints) -> list[str]:
        """The samples' names for people. Raises ConfigError for samples that aren't selected."""
        wanted = np.asarray([*ids], np.int64)
        self.rows(wanted)
        return self._base.names(wanted)

    def image_dims(self, shard: int, name: str) -> NDArray[np.int32]:
        """Oriented height and width of the selected images of a shard, shape (samples, 2)."""
        count = int(self.contents.sizes[shard])
        rows = np.stack([np.full(count, shard), np.arange(count)], axis=1)
        mine = self._in_base(rows)
        dims: NDArray[np.int32] = self._base.image_dims(int(self._shards[shard]), name)[mine[:, 1]]
        return dims

    def is_near(self, shard: int) -> bool:
        """Whether what is noted of a shard's samples can be had without the remote."""
        return self._base.is_near(int(self._shards[shard]))

    def give_back(self) -> None:
        """Forget open shards of what it was taken from that the cache needn't keep."""
        self._base.give_back()

    def close(self) -> None:
        """Close nothing: what it was taken from is its user's to close."""


def _is_whole(type: FieldType | None) -> bool:
    return isinstance(type, Value) and np.dtype(type.dtype).kind in "biu"


def _keys(
    source: Source, by: str | Callable[[str], object] | Sequence[object] | NDArray[Any], ids: Ints
) -> object:
    """A group's key for each sample."""
    if callable(by):
        return [by(name) for run in ranges_of(len(ids)) for name in source.names(ids[run])]
    if not isinstance(by, str):
        return by
    type = source.schema.get(by)
    if not isinstance(type, Text) and not _is_whole(type):
        said = f"a field of {type!r}" if type is not None else "no field"
        raise ConfigError(
            f'split: by="{by}" is {said} of {source.url}, wanted a field of classes (each part '
            "has its share of every class), or of texts or whole numbers (those of one value "
            f"stay together). Fields: {dict(source.schema)}."
        )
    return source.column(by)


def _chosen(source: Source, which: Iterable[int] | Iterable[bool] | NDArray[Any]) -> Ints:
    """Where the samples that were asked for stand among all, ascending."""
    from penstock.readers.splits import check_choice

    array = check_choice(which, len(source), url=source.url)
    if array.dtype == np.bool_:
        places = np.flatnonzero(array)
    else:
        places = np.sort(source.contents.places(source.rows(array.astype(np.int64))))
        if (twice := places[1:][np.diff(places) == 0]).size:
            (sample,) = source.ids(source.contents.rows(twice[:1])).tolist()
            raise ConfigError(
                f"subset: got sample {sample} twice, wanted each once: a subset is a set."
            )
    if not len(places):
        raise ConfigError(f"subset: got no samples of {source.url}, wanted at least one.")
    return places.astype(np.int64, copy=False)


def _selection(base: Source, places: Ints, fingerprint: str) -> Selection:
    return Selection(base, places, fingerprint=fingerprint)


class ColumnSource(Protocol):
    """What has values by field, such as a source."""

    url: str

    @property
    def schema(self) -> Schema: ...
    @property
    def contents(self) -> Contents: ...
    def values(self, name: str, rows: Ints) -> SampleBatch: ...
    def ids(self, rows: Ints) -> Ints: ...
    def names(self, ids: Ints) -> list[str]: ...
    def __len__(self) -> int: ...


_AT_ONCE = 2**14  # samples whose values or names are asked for together


def whole_column(source: ColumnSource, name: str) -> NDArray[Any] | list[Any]:
    """One field of all samples in the order of their ids, as `Source.column`."""
    field = name.removesuffix(PRESENT) if isinstance(name, str) else name
    type = source.schema.get(field)
    if type is None or not (has_values(type) or name != field):
        said = "no field" if type is None else f"a field of {type!r}"
        raise ConfigError(
            f'"{name}": {said} of {source.url}, wanted one of values: '
            f"{[n for n, t in source.schema.items() if has_values(t)]}."
        )
    columns, present = [], [np.empty(0, np.bool_)]
    for places in ranges_of(len(source)):
        batch = source.values(field, source.contents.rows(places))
        present.append(batch.present.get(field, np.ones(len(batch), np.bool_)))
        columns.append(batch.columns[field])
    has = np.concatenate(present)
    if name != field:
        return has
    if not has.all():
        places = np.flatnonzero(~has)[:3]
        lacking = source.names(source.ids(source.contents.rows(places)))
        raise ConfigError(
            f'"{name}": {np.count_nonzero(~has):,} samples of {source.url} lack it, such as '
            f"{', '.join(lacking)}. Take those that have it: "
            f'dataset.subset(dataset.column("{name}{PRESENT}")).'
        )
    return _plain(joined_columns(columns))


def lengths_of(column: Column, name: str, *, url: str) -> Ints:
    """The first length of each sample of a column. Raises ConfigError where it has none."""
    if not isinstance(column, RaggedColumn):
        raise ConfigError(f'"{name}" of {url}: its samples don\'t differ in length.')
    return np.diff(column.offsets) if column.shapes is None else column.shapes[:, 0]


def ranges_of(count: int) -> Iterator[Ints]:
    """The numbers up to count, some at a time."""
    for start in range(0, count, _AT_ONCE):
        yield np.arange(start, min(count, start + _AT_ONCE), dtype=np.int64)


def _plain(column: Column) -> NDArray[Any] | list[Any]:
    """A column as numpy and Python have such values."""
    if isinstance(column, DenseColumn):
        return column.values
    if isinstance(column, RaggedColumn):
        return [column.sample(row) for row in range(len(column))]
    from penstock.readers.fields import decode_text

    samples: list[Any] = list(column.samples)
    return [each if isinstance(each, str | bytes) else decode_text(each) for each in samples]
