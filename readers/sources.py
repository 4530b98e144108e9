"""Define a source of samples, from which the loader reads.

A dataset is a source, and so are a selection of one and several joined end to end. A source stands
between the plan, which names (shard, row), and the feed, which needs columns; neither depends on
its kind. `Contents` describes the samples of a source; a `View` reads those of others, such as a
`Selection`.
"""

from __future__ import annotations

import contextlib
import hashlib
import html
import os
from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import (
    TYPE_CHECKING,
    Any,
    Literal,
    NamedTuple,
    NoReturn,
    Self,
    SupportsIndex,
    TypedDict,
    Unpack,
    cast,
)

import numpy as np

from penstock.cache import (
    ConfigError,
    CorruptSampleError,
    IndexChangedError,
    PenstockError,
    PlanError,
    log,
)
from penstock.cache.base import READ_MODE, ReadMode
from penstock.readers.fieldtypes import (
    LABELS,
    PRESENT,
    DenseColumn,
    EncodedColumn,
    RaggedColumn,
    check_renames,
    class_field,
    decoded_sample,
    fields_to_decode,
    interleaved,
    joined_columns,
)
from penstock.readers.sample_weights import (
    BALANCED,
    SampleWeights,
    balanced_weights,
    checked_weights,
    is_score_file,
    read_scores,
)
from penstock.readers.types import MAX_PIXELS, Floats, ImageRange, Ints, Numbers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from penstock.readers.blocks import Blocks
    from penstock.readers.epoch_lists import EpochLists
    from penstock.readers.fieldtypes import Column, ColumnCrop, FieldType, SampleBatch, Schema
    from penstock.readers.formats import DecodedChunks
    from penstock.readers.mixtures import EpochRule, MixtureStream, WeightChange, WeightScale
    from penstock.readers.origin import LeftOut
    from penstock.readers.reading import FoundRows, SampleReader
    from penstock.readers.remote_shards import RemoteShards
    from penstock.readers.sample_weights import WeightsOfSamples


@dataclass(frozen=True, kw_only=True, eq=False)
class Contents:
    """The contents of a source, as far as its index knows them.

    - schema: all fields, selected or not.
    - sizes: samples of each shard; shard_bytes: bytes to read it whole; both int64, shape
      (shards,), no shard empty.
    - id_end: greater than every sample's id.
    - fingerprint: of the content and of the selection, as hex.
    - icc: label correlation inside a shard (`index.totals.label_correlation`), None if unknown.
    - shuffled: True if the samples are in random order.
    - images: bounds of the upright sizes, by field.
    - files: their number; is_file_per_sample: each sample has its own.
    - units: rows of each decode unit, by shard; None if samples can be read one by one.
    - unit_bytes: mean decoded size of a unit over all fields, as far as the metadata record it.
    - longest: largest first length of fields whose samples differ in it, as far as known.
    - is_encoded: numbers are decoded when they are read.
    - max_pixels: of an image or a mask that is decoded.
    - are_checked: False if samples weren't read when they were indexed, so that values may be
      invalid.
    - selected_bytes: mean size of a sample in its shard if not all of a shard's samples are
      selected, so that shard_bytes doesn't tell it; else None.
    - lacking: the number of samples that lack a field, for fields that some lack; of a selection,
      that of the whole.
    - mixture: of the parts of a mixture, which follow one another here; None for other sources.
    - weights: of the samples; None if an epoch delivers each of them once.
    - lists: the samples of each epoch, if a sampler lists them; else None.
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
    are_checked: bool = True
    selected_bytes: float | None = None
    lacking: Mapping[str, int] = field(default_factory=dict)
    mixture: MixtureContents | None = None
    weights: SampleWeights | None = None
    lists: EpochLists | None = None

    @cached_property
    def samples(self) -> int:
        """The number of samples."""
        return int(self.sizes.sum())

    @cached_property
    def expected(self) -> Contents:
        """The contents with deliveries in place of samples: sizes and units count how often the
        job's first epochs deliver samples of each, to within one. Empty units are left out."""
        if self.weights is None:
            return self
        slots = self.weights.slots(self.weights.first, self.weights.samples)
        sizes, units = slots.expanded(self.sizes, self.units)
        return replace(self, sizes=sizes, units=units, weights=None)

    @property
    def sample_bytes(self) -> float:
        """The mean size of a sample in the files, in bytes."""
        if self.selected_bytes is not None:
            return self.selected_bytes
        return float(self.shard_bytes.sum()) / max(1, self.samples)

    @cached_property
    def starts(self) -> Ints:
        """The number of samples before each shard, int64, shape (shards,)."""
        return np.cumsum(self.sizes) - self.sizes

    def lack(self, name: str) -> int:
        """Return how many samples lack a field, which may be unknown here."""
        return self.lacking.get(name, 0) if name in self.schema else self.samples

    def places(self, rows: Ints) -> Ints:
        """Return the positions among all samples of (shard, row): int64, shape (n,)."""
        return self.starts[rows[:, 0]] + rows[:, 1]

    def rows(self, places: Ints) -> Ints:
        """Return (shard, row) of positions among all samples: int64, shape (n, 2)."""
        shards = np.searchsorted(self.starts, places, side="right") - 1
        return np.stack([shards, places - self.starts[shards]], axis=1)


@dataclass(frozen=True, kw_only=True, eq=False)
class MixtureContents:
    """The parts of a mixture, and what decides which of them a position of its stream belongs to.

    names: of the parts, in order. parts: their contents. changes: their weights. rule: of the end
    of an epoch. per: what weights are shares of. max_repeats: largest mean number of times that an
    epoch delivers a sample of a part, by name. scale: turns weights into shares. augments: the
    recipes of parts that have one of their own, by name.
    """

    names: tuple[str, ...]
    parts: tuple[Contents, ...]
    changes: tuple[WeightChange, ...]
    scale: WeightScale
    rule: EpochRule = "first"
    per: Literal["sample", "token", "batch"] = "sample"
    max_repeats: Mapping[str, float] = field(default_factory=dict)
    augments: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def sizes(self) -> Ints:
        """Samples of each part, int64, shape (parts,)."""
        return np.array([part.samples for part in self.parts], np.int64)

    @cached_property
    def lengths(self) -> Ints:
        """Samples of an epoch of each part, int64, shape (parts,)."""
        return np.array([part.expected.samples for part in self.parts], np.int64)

    @cached_property
    def weights(self) -> str | None:
        """The hash of the weights of the parts' samples; None if no part has any."""
        each = [part.weights and part.weights.first for part in self.parts]
        return hashlib.sha256(repr(each).encode()).hexdigest()[:32] if any(each) else None

    @cached_property
    def samples(self) -> int:
        """The number of samples of an epoch of the mixture. Raises PlanError if it has no end, and
        if it repeats a part more often than `max_repeats` allows."""
        from penstock.readers.mixtures import epoch_samples

        samples = epoch_samples(self.lengths, self.changes, self.rule)
        self.check_repeats(samples, self.stream())
        return samples

    def batch_samples(self, global_batch: int) -> int:
        """Return the number of samples of an epoch in which each global batch is of one part."""
        from penstock.readers.mixtures import epoch_samples

        samples = epoch_samples(self.lengths, self.changes, self.rule, unit=global_batch)
        return max(samples, self.samples)

    def shares_of(self, weights: object) -> tuple[int, ...]:
        """Return the integer shares of weights that are no schedule. Raises ConfigError."""
        changes = self.scale.changes(weights)
        if len(changes) > 1:
            raise ConfigError(f"set_weights: got {weights!r:.100}, wanted a weight for each part.")
        return changes[0].shares

    def check_repeats(self, samples: int, stream: MixtureStream) -> None:
        """Raise PlanError if an epoch of a number of samples repeats a part too often: the first
        one, or the first complete one after a change of weights."""
        if not self.max_repeats:
            return
        ends = (end for change in stream.changes for end in (change.start, change.until))
        starts = {-(-end // samples) * samples for end in ends if end is not None and end < 2**60}
        for start in sorted(starts):
            counts = stream.counts(start + samples) - stream.counts(start)
            epoch = f"epoch {start // samples:,}" if start else "an epoch"
            rows = zip(self.names, counts.tolist(), self.sizes.tolist(), strict=True)
            for name, count, size in rows:
                most = self.max_repeats.get(name)
                # Later epochs may have two more, by rounding.
                if most is not None and count > most * size + 2 * (start > 0):
                    raise PlanError(
                        f"max_repeats: {epoch} of {samples:,} samples delivers {count:,} of "
                        f'"{name}", which has {size:,}: {count / size:.3g} times each, and at most '
                        f"{most:g} are allowed. Lower its weight, shorten the epoch, or raise "
                        "max_repeats."
                    )

    def stream(
        self,
        *,
        changes: Sequence[WeightChange] | None = None,
        counts: Ints | None = None,
        owed: Floats | None = None,
        unit: int = 1,
    ) -> MixtureStream:
        """Return the stream of the parts' samples; see `MixtureStream`. changes: other weights than
        those of the job's start."""
        from penstock.readers.mixtures import MixtureStream  # needed by mixtures only

        return MixtureStream(
            self.lengths,
            self.changes if changes is None else changes,
            counts=counts,
            owed=owed,
            is_once=self.rule == "once",
            unit=unit,
        )


def selected(base: Contents, places: Ints, shards: Ints) -> Contents:
    """Return the contents of a selection. places: positions of the samples among all, ascending.
    shards: those that hold any of them. The label correlation and the sizes of images are assumed
    to be those of the whole."""
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
        selected_bytes=base.sample_bytes,
        weights=None if base.weights is None else base.weights.take(places),
    )


def _of_units(rows: Ints, units: Ints) -> Ints:
    """Return how many of these rows of a shard are in each unit, without units that have none."""
    counts = np.bincount(np.searchsorted(np.cumsum(units), rows, side="right"))
    return counts[counts > 0].astype(np.int64)


# What a notebook shows of a source.
_SHOWN_SAMPLES, _SHOWN_CLASSES, _SHOWN_CHARACTERS = 8, 20, 120


class Source(ABC):
    """A source of samples that are read by shard and row.

    A sample's id is fixed by its dataset: a selection keeps the ids of its source, so that a
    sample's name and draws don't change. A concatenation numbers the samples of the first part,
    then those of the second, and so on. Several threads may read.

    url: for messages. is_one_url: it is the address of all data, which a command can take; not so
    for a list of URLs or several datasets. part_of: fingerprint of the source from which this was
    selected; None if it is no selection.
    """

    url: str
    is_one_url: bool = False
    part_of: str | None = None
    _chunks: tuple[DecodedChunks, ...] = ()

    # -- contents

    @property
    @abstractmethod
    def contents(self) -> Contents:
        """The contents of the source, which is opened at first use."""

    @property
    @abstractmethod
    def fields(self) -> tuple[str, ...]:
        """The fields of a batch, in order."""

    @property
    def schema(self) -> Schema:
        """All fields of a sample and their types, selected or not."""
        return self.contents.schema

    @property
    def classes(self) -> tuple[str, ...]:
        """Class names by label; empty without labels."""
        return self._stored_schema.class_names()

    @property
    def _stored_schema(self) -> Schema:
        """The fields of a sample that are stored."""
        return self.schema

    @property
    def num_classes(self) -> int | None:
        """The number of classes: of the class names, else one more than the largest label. None
        without labels.

        Labels are the selected field of classes, or integers called "label" or "labels". If the
        index doesn't know the largest, the whole column is read. A selection has the classes of its
        dataset.
        """
        if self.classes:
            return len(self.classes)
        schema = self._stored_schema
        if (field := _field_of_classes(schema, self.fields)) is None:
            return None
        # One of several fields of classes may have names.
        known = len(schema[field].class_names)
        datasets = (each for each in self._datasets() if field in each.schema)
        return known or 1 + max(each._largest(field) for each in datasets)

    def _largest(self, name: str) -> int:
        """Return the largest value of a field of integers."""
        return int(np.max(self.column(name)))

    @property
    def left_out(self) -> dict[str, int]:
        """The number of samples that are left out, by reason, the most frequent first: those that
        were bad when the dataset was indexed or packed. A selection reports those of its dataset, a
        concatenation those of each of its datasets once."""
        return {reason: each.samples for reason, each in self.samples_left_out.items()}

    @property
    def samples_left_out(self) -> Mapping[str, LeftOut]:
        """Like `left_out`, with an example for each reason."""
        found = [each._own_left_out() for each in dict.fromkeys(self._datasets())]
        if not any(found):
            return {}
        from penstock.readers.origin import joined_left_out

        return joined_left_out(found)

    def _datasets(self) -> tuple[Source, ...]:
        """Return the datasets of which the source consists."""
        return (self,)

    def _own_left_out(self) -> Mapping[str, LeftOut]:
        """Return the samples that one dataset leaves out, by reason."""
        return {}

    @property
    def cache_folder(self) -> str | None:
        """The user's cache folder; None if there is none."""
        return None

    @property
    def remote_shards(self) -> RemoteShards | None:
        """The shards that are read from a remote store; None if all are local."""
        return None

    @property
    def kind(self) -> str:
        """The format of the data, or what the source makes of others."""
        return type(self).__name__

    @property
    def is_self_contained(self) -> bool:
        """True if the data hold their own index, as packs do, or need none."""
        return True

    @property
    def chunks(self) -> tuple[DecodedChunks, ...]:
        """The stores of decoded chunks, one for each dataset that is open."""
        return tuple(dict.fromkeys(store for each in self._datasets() for store in each._chunks))

    # -- samples

    def ids(self, rows: Ints) -> Ints:
        """Return the sample ids of (shard, row), int64, shape (n,): positions in the index, unless
        a subclass overrides it."""
        return self.contents.places(rows)

    @property
    def _shard_ids(self) -> Ints | None:
        """The id of the first sample of each shard, int64, shape (shards,), if those of its other
        rows follow it; None if they don't."""
        return self.contents.starts

    @property
    def _whole_reader(self) -> SampleReader | None:
        """The reader of all samples, if the source is a dataset without renamed fields."""
        return None

    def rows(self, ids: Ints) -> Ints:
        """Return (shard, row) of sample ids, int64, shape (n, 2). Raises ConfigError for ids that
        the source lacks."""
        end = self.contents.id_end
        if len(ids) and not (ids.min() >= 0 and ids.max() < end):
            raise ConfigError(
                f"ids: got {ids.min()} to {ids.max()}, but {self.url} has 0 to {end - 1}."
            )
        return self._rows(ids)

    def _rows(self, ids: Ints) -> Ints:
        """Return (shard, row) of ids below `Contents.id_end`: of positions in the index, unless a
        subclass overrides it."""
        return self.contents.rows(ids)

    @abstractmethod
    def read(self, rows: Ints, **options: Unpack[ReadOptions]) -> SampleBatch:
        """Read samples in the order of rows; see `Dataset.read`."""

    def _find(self, rows: Ints) -> FoundRows | None:
        """Return where samples lie in memory, if they are plain rows of one form that are copied
        best together with those of other sources; else None."""
        return None

    def names(self, ids: Iterable[int] | Ints) -> list[str]:
        """Return the samples' names for messages: file names below the folder; for a pack the names
        in its sources, or shard and row if the pack doesn't hold them. Raises ConfigError for ids
        that the source lacks."""
        return self._names_of(self.rows(np.asarray([*ids], np.int64)))

    @abstractmethod
    def _names_of(self, rows: Ints) -> list[str]:
        """Return the names of the samples (shard, row), as `names` does."""

    def values(self, name: str, rows: Ints) -> SampleBatch:
        """Read only one field of these rows, selected or not. Values that an index or a pack holds
        are returned without reading samples. Raises ConfigError for a field that doesn't exist."""
        return self.read(rows, fields=(name,))

    def lengths(self, name: str, rows: Ints) -> Ints:
        """Return the first length of each sample of a field whose samples differ in it, int64,
        shape (n,), from tables if a source has them. Raises ConfigError for other fields."""
        column = self.values(name, rows).columns[name]
        if not isinstance(column, RaggedColumn):
            raise ConfigError(f'"{name}" of {self.url}: its samples don\'t differ in length.')
        return column.first_lengths

    def column(self, name: str) -> Numbers | list[Any]:
        """Return one field of all samples, in the order of their ids, such as labels, to select by.

        The result is an array with a row for each sample; for texts a list of str, for arrays whose
        shapes differ a list of arrays. For a field that some samples lack, "<name>.present" is a
        mask of those that have it (values in files are read for that). All values are in memory at
        once. Raises ConfigError for fields that must be decoded or are raw bytes (images, masks,
        sounds), except for texts in files of their own, and for a field that some samples lack.
        """
        field = name.removesuffix(PRESENT) if isinstance(name, str) else name
        type = self.schema.get(field)
        if type is None or not (type.in_tables or name != field):
            found = "no field" if type is None else f"a field of {type!r}"
            raise ConfigError(
                f'"{name}": {found} of {self.url}, wanted one of values: '
                f"{[n for n, t in self.schema.items() if t.in_tables]}."
            )
        columns, present = [], [np.empty(0, np.bool_)]
        for places in _ranges(self.contents.samples):
            batch = self.values(field, self.contents.rows(places))
            present.append(batch.has(field))
            columns.append(batch.columns[field])
        has = np.concatenate(present)
        if name != field:
            return has
        if not has.all():
            places = np.flatnonzero(~has)[:3]
            lacking = self.names(self.ids(self.contents.rows(places)))
            raise ConfigError(
                f'"{name}": {np.count_nonzero(~has):,} samples of {self.url} lack it, such as '
                f"{', '.join(lacking)}. Select those that have it: "
                f'dataset.subset(dataset.column("{name}{PRESENT}")).'
            )
        return _values_of(joined_columns(columns), type)

    # -- selections

    def rename(self, names: Mapping[str, str]) -> Self:
        """Return the same samples with other names of fields: rename({"image": "pixel_values"}).

        names: new names by the current ones, also for fields that aren't selected; masks and boxes
        refer to their image by its new name. Sample ids, order and draws stay. The result is a
        dataset that opens and closes on its own; a selection reads the renamed dataset, and so does
        a concatenation. Raises ConfigError for invalid names; for fields that don't exist, and two
        of one name, when it is opened.
        """
        return cast("Self", self._renamed(check_renames(names), {}))

    def _renamed(self, names: Mapping[str, str], made: dict[int, Source]) -> Source:
        """Return the renamed source. made: the datasets that were renamed already, by identity."""
        raise NotImplementedError(f"{type(self).__name__} can't be renamed")

    def subset(
        self,
        which: Iterable[int] | Iterable[bool] | Numbers | None = None,
        *,
        weights: WeightsOfSamples | None = None,
    ) -> View:
        """Return some of the samples, as a dataset of its own that reads this one.

        which: sample ids, in any order, each once; or a mask of bools, one for each sample in the
        order of ids; None: all of them. Samples keep their ids, names and draws. It needs 8 bytes
        of memory per sample. Its `close()` closes nothing: keep this dataset open while you use the
        result.

        weights: how often each of the samples is expected in an epoch, which then has as many
        samples as the sum, rounded. Each is delivered as often as its weight, rounded down or up,
        with other random draws each time:

        - numbers, one for each sample: in the order of `which` if it has ids, else in that of ids;
        - the name of a field of numbers;
        - "balanced": each class is expected equally often; the sum is the number of samples;
        - a file (a path or a URL): .npy with such an array; .csv or .parquet with a column "weight"
          or "score" (or one column of numbers), and optionally "id", the samples to which they
          belong.

        Raises ConfigError for ids that don't exist or occur twice, a mask of another length, an
        empty selection, and weights that are negative, not finite, all 0 or of another number.
        """
        if which is None:
            if weights is None:
                raise ConfigError("subset: got neither ids or a mask nor weights=.")
            return weighted(self, weights)
        from penstock.readers.splits import check_choice

        array = check_choice(which, self.contents.samples, url=self.url)
        order = None
        if array.dtype == np.bool_:
            places = np.flatnonzero(array)
        else:
            places = self.contents.places(self.rows(array.astype(np.int64)))
            order = np.argsort(places)
            places = places[order]
            if (twice := places[1:][np.diff(places) == 0]).size:
                (sample,) = self.ids(self.contents.rows(twice[:1])).tolist()
                raise ConfigError(f"subset: got sample {sample} twice, wanted each once.")
        if not len(places):
            raise ConfigError(f"subset: got no samples of {self.url}, wanted at least one.")
        found = Selection.of(self, places.astype(np.int64, copy=False))
        return found if weights is None else weighted(found, weights, order=order)

    def split(
        self,
        *shares: float,
        seed: int,
        by: str | Callable[[str], object] | Sequence[object] | Numbers | None = None,
    ) -> tuple[Selection, ...]:
        """Return disjoint parts of the samples, one per share: split(0.9, 0.1, seed=0) returns two.

        A keyed hash of seed and sample chooses the part: it is always the same, on every machine.
        Shares that add up to less than 1 leave the rest out. by: the property that parts share or
        separate:

        - None: no property; each sample is assigned on its own.
        - the name of a `ClassLabel` field: **stratified**: each part has its share of every class.
        - the name of another field (a number or a text, such as "patient"), an array or list with a
          key for each sample in the order of ids, or a function of a sample's name: **groups**: all
          samples of one key are in one part, so that no patient or video is in two parts. Sizes are
          then as near to the shares as whole groups allow. To group by a class field, pass its
          values: by=dataset.column("label").

        Raises ConfigError for invalid shares, a part that would be empty, and other values of `by`.
        """
        from penstock.readers.splits import by_group, by_sample, check_shares

        wanted = check_shares(shares, seed=seed)
        ids = self.ids(self.contents.rows(np.arange(self.contents.samples, dtype=np.int64)))
        if by is None:
            parts = by_sample(ids, wanted, seed=seed)
        elif isinstance(by, str) and by in self.schema and self.schema[by].is_class:
            parts = by_sample(ids, wanted, seed=seed, classes=np.asarray(self.column(by)))
            log.info('split: stratified by the classes of "%s"', by)
        else:
            parts = by_group(_keys(self, by, ids), len(ids), wanted, seed=seed)
        found = [np.flatnonzero(parts == number) for number in range(len(shares))]
        for share, places in zip(shares, found, strict=True):
            if not len(places):
                raise ConfigError(
                    f"split: the share {share} of {len(self):,} samples of {self.url} holds no "
                    f"{'group' if by is not None else 'sample'}. Choose larger shares, or fewer "
                    "parts."
                )
        return tuple(Selection.of(self, places) for places in found)

    @abstractmethod
    def image_dims(self, shard: int, name: str) -> NDArray[np.int32]:
        """Return the upright height and width of an image field in a whole shard, int32, shape
        (samples, 2). Raises what opening the shard raises."""

    def is_near(self, shard: int) -> bool:
        """Return True if the table of a shard's samples can be read without the remote."""
        return True

    def __len__(self) -> int:
        return self.contents.samples

    def __getitem__(self, index: SupportsIndex) -> dict[str, Any]:
        """Read and decode one sample, for a person who looks at it; a loader reads far faster.

        index: of the sample among those of this source (of a mixture: of its parts, one after
        another), from 0, or from -1 backwards.

        Returns a dict by the fields of a batch, with the values that a batch without a recipe has
        for one sample: tensors, images as uint8 of shape (3, height, width), boxes in pixels, texts
        as str. A field that the sample lacks is None. Raises IndexError for a sample that doesn't
        exist, ConfigError for anything but an integer, DatasetError for a sample that doesn't
        decode, and what reading raises.
        """
        import torch

        rows = self.contents.rows(np.array([self._place(index)], np.int64))
        content = self.read(rows, fields=fields_to_decode(self.fields, self.schema))
        most = self.contents.max_pixels
        try:
            values = decoded_sample(content, self.schema, self.fields, max_pixels=most)
        except PenstockError:
            raise
        except ValueError as error:
            number = int(content.ids[0])
            (name,) = self._names_of(rows)
            raise CorruptSampleError(
                f"Sample {number} ({name}) of {self.url}: {error}.", sample_id=number
            ) from error
        return {
            name: torch.from_numpy(np.array(value))
            if isinstance(value, np.ndarray | np.generic)
            else value
            for name, value in values.items()
        }

    def _place(self, index: SupportsIndex) -> int:
        """Return the place of a sample by the index that the user passed."""
        count = self.contents.samples
        if isinstance(index, bool) or not hasattr(index, "__index__"):
            raise ConfigError(
                f"{self.url}: got [{index!r}], wanted the number of one sample. Several samples "
                "are dataset.subset(ids) or dataset.split(0.9, 0.1, seed=0), and batches come from "
                "DataLoader(dataset, ...)."
            )
        place = index.__index__()
        if not -count <= place < count:
            raise IndexError(f"{self.url} has {count} samples, and [{place}] isn't one of them.")
        return place % count

    def __getitems__(self, indices: object) -> NoReturn:
        """Always raise ConfigError: torch's own loader would request batches this way."""
        raise ConfigError(
            f"Samples {indices!r} of {self.url} were requested by index. A native dataset is read "
            "by shards, through Penstock's DataLoader: loop over DataLoader(dataset, ...), and "
            "for a part of it use dataset.subset(ids) or dataset.split(0.9, 0.1, seed=0). If a "
            "framework requested them, it has replaced that loader by torch's own, which would "
            "shard again and skip decoding: docs/howto/trainers.md lists what to switch off, "
            "such as `ignore_data_skip=True` in the HF Trainer."
        )

    # -- in notebooks

    @property
    def _is_open(self) -> bool:
        """True if the index is open, so that showing the source costs little."""
        return True

    def _repr_html_(self) -> str:
        """Return what a notebook shows: size, fields and classes, and samples of local data. It
        builds and downloads nothing, and never fails."""
        from penstock.readers.pictures import (
            Reading,
            contact_sheet,
            pictures_of,
            sheet_html,
            spread,
            table_html,
        )

        title = f"<b>{html.escape(repr(self))}</b>"
        if not self._is_open:
            return f"{title}<br>It opens at its first use, such as len(dataset)."
        rows = [
            ("samples", f"{len(self):,}"),
            *((name, repr(type)[:_SHOWN_CHARACTERS]) for name, type in self.schema.items()),
            ("a batch has", ", ".join(self.fields)),
        ]
        if names := self.classes:
            shown = ", ".join(names[:_SHOWN_CLASSES]) + (", …" * (len(names) > _SHOWN_CLASSES))
            rows.append((f"{len(names):,} classes", shown))
        if left_out := sum(self.left_out.values()):
            rows.append(("left out", f"{left_out:,}"))
        pictures = []
        if self.remote_shards is None:
            how = Reading(schema=self.schema, classes=self.classes)
            for place in spread(self.contents.samples, _SHOWN_SAMPLES):
                with contextlib.suppress(PenstockError, OSError):
                    pictures += pictures_of({"id": place, **self[place]}, how)
        sheet = sheet_html(contact_sheet(pictures, width=900), alt="samples") if pictures else ""
        return f"{title}{table_html(rows)}{sheet}"

    # -- closing

    @abstractmethod
    def give_back(self) -> None:
        """Close those open shards that the cache needn't keep for this source's loaders."""

    @abstractmethod
    def close(self) -> None:
        """Release what the source opened itself; a selection and a concatenation have opened
        nothing. Safe to call twice."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class ReadOptions(TypedDict, total=False):
    """The arguments of `Dataset.read` except for the rows."""

    mode: ReadMode
    bad: dict[int, str] | None
    fields: Sequence[str] | None
    crops: Mapping[str, ColumnCrop] | None
    blocks: Blocks | None


class Run(NamedTuple):
    """Some rows of a view in one of its bases. rows: (shard, row) in the base. at: their positions
    among the rows of the view; a slice if they are all of them. first_id: the id in the view of the
    base's sample 0."""

    base: Source
    rows: Ints
    at: Ints | slice
    first_id: int = 0


class View(Source):
    """Samples of other sources, which it reads and doesn't close: a selection or a concatenation.

    bases: these sources, which have the same fields.
    """

    bases: tuple[Source, ...]

    @abstractmethod
    def _runs(self, rows: Ints) -> Iterable[Run]:
        """Return where these rows, (shard, row), are in the bases: each base once."""

    def _datasets(self) -> tuple[Source, ...]:
        return tuple(whole for base in self.bases for whole in base._datasets())

    @property
    def kind(self) -> str:
        """The formats of the bases."""
        return "/".join(dict.fromkeys(base.kind for base in self.bases))

    @property
    def is_self_contained(self) -> bool:
        """True if the data of all bases hold their own index."""
        return all(base.is_self_contained for base in self.bases)

    @property
    def fields(self) -> tuple[str, ...]:
        """The fields of a batch, in order."""
        return self.bases[0].fields

    @property
    def cache_folder(self) -> str | None:
        """The user's cache folder, the first of several; None if there is none."""
        folders = (base.cache_folder for base in self.bases)
        return next((folder for folder in folders if folder is not None), None)

    def _facts(self, rows: Ints, read: Callable[[Run], Any], dtype: Any = np.int64) -> Numbers:
        """Return the values that `read` returns for each base, in the order of the rows."""
        found = np.empty(len(rows), dtype)
        for run in self._runs(rows):
            found[run.at] = read(run)
        return found

    def ids(self, rows: Ints) -> Ints:
        """Return the sample ids of (shard, row), int64, shape (n,)."""
        return self._facts(rows, lambda run: run.base.ids(run.rows) + run.first_id)

    @property
    def _shard_ids(self) -> Ints | None:
        return None

    def lengths(self, name: str, rows: Ints) -> Ints:
        """Return first lengths of samples, int64, shape (n,)."""
        return self._facts(rows, lambda run: run.base.lengths(name, run.rows))

    def _names_of(self, rows: Ints) -> list[str]:
        """Return the samples' names, as in the bases."""
        return list(self._facts(rows, lambda run: run.base._names_of(run.rows), object))

    def read(self, rows: Ints, **options: Unpack[ReadOptions]) -> SampleBatch:
        """Read samples in the order of rows; see `Dataset.read`."""
        bad, crops = options.get("bad"), options.get("crops")
        blocks, mode = options.get("blocks"), options.get("mode", READ_MODE)
        is_whole = not crops and options.get("fields") is None and blocks is not None
        if is_whole and len(rows) and blocks is not None and not self._reads_apart():
            together = self._read_together(rows, mode=mode, bad=bad, blocks=blocks)
            if together is not None:
                return together
        runs, batches, order = list(self._runs(rows)), [], []
        for run in runs:
            own, places = options.copy(), np.arange(len(rows))[run.at]
            if bad is not None:
                own["bad"] = {}
            if crops:
                own["crops"] = {name: crop.take(run.at) for name, crop in crops.items()}
            try:
                batch = self._read_run(run, own)
            except CorruptSampleError as error:
                error.sample_id += run.first_id
                raise
            if bad is not None:
                bad.update({int(places[row]): why for row, why in (own["bad"] or {}).items()})
            batches.append(replace(batch, ids=batch.ids + run.first_id) if run.first_id else batch)
            order.append(places)
        return interleaved(batches, order)

    def _reads_apart(self) -> bool:
        """Return True if this batch is read base by base."""
        return False

    def _read_together(
        self, rows: Ints, *, mode: ReadMode, bad: dict[int, str] | None, blocks: Blocks
    ) -> SampleBatch | None:
        """Read samples of all bases by one pass; None if that isn't possible."""
        if mode == "pread":
            return None
        runs = list(self._runs(rows))
        found = self._found(runs, len(rows)) if len(runs) > 1 else None
        return None if found is None else found.read(blocks)

    def _read_run(self, run: Run, options: ReadOptions) -> SampleBatch:
        """Read samples of one base."""
        return run.base.read(run.rows, **options)

    def _find(self, rows: Ints) -> FoundRows | None:
        return self._found(list(self._runs(rows)), len(rows))

    def _found(self, runs: Sequence[Run], count: int) -> FoundRows | None:
        """Return where samples lie in memory; None if they aren't plain rows of one form."""
        found: list[tuple[Ints | slice, FoundRows]] = []
        for run in runs:
            each = run.base._find(run.rows)
            if each is None:
                return None
            found.append((run.at, replace(each, ids=each.ids + run.first_id)))
        return type(found[0][1]).joined(found, count) if found else None

    def image_dims(self, shard: int, name: str) -> NDArray[np.int32]:
        """Return the upright height and width of the images in a shard, int32, shape (samples,
        2)."""
        rows = np.arange(int(self.contents.sizes[shard]), dtype=np.int64)
        (run,) = self._runs(np.stack([np.full_like(rows, shard), rows], axis=1))
        dims: NDArray[np.int32] = run.base.image_dims(int(run.rows[0, 0]), name)
        return dims[run.rows[:, 1]]

    def is_near(self, shard: int) -> bool:
        """Return True if the table of a shard's samples can be read without the remote."""
        (run,) = self._runs(np.array([[shard, 0]]))
        return run.base.is_near(int(run.rows[0, 0]))

    def give_back(self) -> None:
        """Close those open shards of all bases that the cache needn't keep."""
        for base in self.bases:
            base.give_back()

    def close(self) -> None:
        """Close nothing: the caller closes the bases."""


class Selection(View):
    """Some samples of another source: the result of `subset` and `split`. Its shards are those of
    that source that hold any of them."""

    def __init__(self, base: Source, places: Ints, fingerprint: str) -> None:
        """places: positions of the samples among all of base, int64, ascending. fingerprint: of the
        base from which they were chosen."""
        self.url, self.is_one_url, self.bases = base.url, base.is_one_url, (base,)
        self._base, self._places = base, places
        self.part_of = self._fingerprint = fingerprint

    @classmethod
    def of(cls, source: Source, places: Ints) -> Selection:
        """Select from a source by position; from a selection, select from its own source."""
        if isinstance(source, Selection):
            return cls(source._base, source._places[places], source._fingerprint)
        return cls(source, places, source.contents.fingerprint)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the selection: a spawned worker opens its source again, and gets the same
        samples."""
        return Selection, (self._base, self._places, self._fingerprint)

    def __repr__(self) -> str:
        return f"Selection(<{len(self._places):,} samples>, {self._base!r})"

    @cached_property
    def contents(self) -> Contents:
        """The selected contents. Raises IndexChangedError if the dataset has changed since the
        selection."""
        base = self._base.contents
        if base.fingerprint != self._fingerprint:
            raise IndexChangedError(
                f"{self.url}: the dataset has changed since this selection was taken from it "
                f"(index {self._fingerprint[:12]}, now {base.fingerprint[:12]}), so its ids "
                "mean other samples. Take the selection again."
            )
        return selected(base, self._places, self._shards)

    def _renamed(self, names: Mapping[str, str], made: dict[int, Source]) -> Source:
        return Selection(self._base._renamed(names, made), self._places, self._fingerprint)

    @cached_property
    def _shards(self) -> Ints:
        """The number in the base of each shard, int64, ascending."""
        starts = self._base.contents.starts
        return np.unique(np.searchsorted(starts, self._places, side="right") - 1)

    def _runs(self, rows: Ints) -> Iterable[Run]:
        places = self._places[self.contents.places(rows)]
        found = np.empty((len(rows), 2), np.int64)
        found[:, 0] = shards = self._shards[rows[:, 0]]
        np.subtract(places, self._base.contents.starts[shards], out=found[:, 1])
        return (Run(self._base, found, slice(None)),)

    @property
    def remote_shards(self) -> RemoteShards | None:
        """The shards that are read from a remote store, whole, as the cache keeps them."""
        remote = self._base.remote_shards
        return None if remote is None else remote.only(self._shards)

    def _rows(self, ids: Ints) -> Ints:
        wanted = self._base.contents.places(self._base.rows(ids))
        places = np.searchsorted(self._places, wanted)
        missing = places == len(self._places)
        missing[~missing] = self._places[places[~missing]] != wanted[~missing]
        if missing.any():
            raise ConfigError(
                f"ids: got {int(ids[missing][0])}, which is a sample of {self.url}, but not one of "
                f"the {len(self._places):,} that were selected from it."
            )
        return self.contents.rows(places)


class Reordered(View):
    """All samples of another source, which an epoch delivers in another order or number: as often
    as their weights say, or as a sampler lists them."""

    def __init__(
        self, base: Source, weights: SampleWeights | None = None, *, lists: EpochLists | None = None
    ) -> None:
        """base: with weights: without any, or with others, which don't count here."""
        self._base: Source = base
        if isinstance(base, Reordered) and base.contents.weights is not None:
            self._base = base.bases[0]
        self._weights, self._lists = weights, lists
        self.bases, self.url, self.part_of = (self._base,), base.url, base.part_of

    def __reduce__(self) -> Any:
        """Pickle the source and the weights: a spawned worker opens it again. It reads the samples
        that are requested of it, so it needs no lists."""
        given = self._base, self._weights
        return (Reordered, given) if self._weights else self._base.__reduce__()

    def __repr__(self) -> str:
        return f"{self._base!r} with {'a sampler' if self._weights is None else 'weights'}"

    @cached_property
    def contents(self) -> Contents:
        """The contents of the source, with the weights or the lists."""
        return replace(self._base.contents, weights=self._weights, lists=self._lists)

    def _renamed(self, names: Mapping[str, str], made: dict[int, Source]) -> Source:
        return Reordered(self._base._renamed(names, made), self._weights, lists=self._lists)

    def _runs(self, rows: Ints) -> Iterable[Run]:
        return (Run(self._base, rows, slice(None)),)

    @property
    def remote_shards(self) -> RemoteShards | None:
        """The shards that are read from a remote store."""
        return self._base.remote_shards

    def _rows(self, ids: Ints) -> Ints:
        return self._base.rows(ids)


def listed(source: Source, lists: EpochLists) -> Reordered:
    """Return the samples of a source that a sampler lists, epoch by epoch. Raises ConfigError for a
    mixture, and for samples with weights."""
    contents = source.contents
    if contents.mixture is not None or contents.weights is not None:
        has = "parts" if contents.weights is None else "samples"
        raise ConfigError(
            f"sampler: {source!r:.100} has weights of its {has}, which decide what an epoch "
            "delivers. Drop the sampler, or the weights."
        )
    return Reordered(source, lists=lists)


def weighted(source: Source, weights: object, *, order: Ints | None = None) -> Reordered:
    """Return a source with weights of its samples. order: that of numbers, which are then those of
    samples order[0], order[1], ...; None: that of ids. Raises ConfigError; see `Source.subset`."""
    if source.contents.weights is not None:
        raise ConfigError(
            f"weights: the samples of {source!r:.100} have weights already. Pass them once, to the "
            "loader or to subset()."
        )
    return Reordered(source, SampleWeights.of(weights_for(source, weights, order=order)))


def reweighted(
    source: Source, weights: object, *, is_first: bool, keeps: str | None = None
) -> Reordered:
    """Return a source for a job that changes to other weights. Its epochs keep their length; if it
    has no weights, each of its samples was delivered once. is_first, keeps: as for
    `SampleWeights.with_array`. Raises ConfigError; see `Source.subset`."""
    if source.contents.lists is not None:
        raise ConfigError(
            f"weights: {source!r:.100}, which decides what an epoch delivers, has no weights. Let "
            "the sampler draw by other weights."
        )
    array, contents = weights_for(source, weights), source.contents
    before = contents.weights or SampleWeights.of(np.ones(contents.samples))
    return Reordered(source, before.with_array(array, is_first=is_first, keeps=keeps))


def weights_for(source: Source, weights: object, *, order: Ints | None = None) -> Floats:
    """Return the weights of a source's samples, float64, shape (samples,), in the order of ids.
    Arguments and errors: as for `weighted`."""
    count = source.contents.samples
    if source.contents.mixture is not None:
        raise ConfigError(
            f"weights: {source!r:.100} is a mixture, whose parts have weights (set_weights changes "
            "these). Give weights of samples to its parts: mix({...: part.subset(weights=...)})."
        )
    if isinstance(weights, str) and weights == BALANCED:
        return balanced_weights(_classes(source))
    if isinstance(weights, str) and weights in source.schema:
        type = source.schema[weights]
        if type.number is None:
            raise ConfigError(f'weights: "{weights}" is {type!r}, wanted a field of numbers.')
        return checked_weights(source.column(weights), count)
    if isinstance(weights, os.PathLike) or (isinstance(weights, str) and is_score_file(weights)):
        weights, ids = read_scores(weights)
        if ids is not None:
            return checked_weights(_by_id(source, checked_weights(weights, len(ids)), ids), count)
    elif isinstance(weights, str):
        numbers = [name for name, type in source.schema.items() if type.number is not None]
        raise ConfigError(
            f'weights: got "{weights}", wanted a field of numbers (of {source.url}: {numbers}), '
            f'"{BALANCED}", a file of scores (.npy, .csv or .parquet), or one number for each '
            "sample."
        )
    given = checked_weights(weights, count)
    if order is not None:
        given = given[order]
    return given


def _classes(source: Source) -> Numbers:
    """Return the class of each sample, as integers. Raises ConfigError without classes."""
    schema = source.schema
    field = _field_of_classes(schema, source.fields)
    classes = None if field is None else np.asarray(source.column(field))
    if classes is None or classes.ndim != 1:
        raise ConfigError(
            f'weights="{BALANCED}": {source.url} has no field of classes. Its fields: '
            f"{dict(schema)}. Pass one number for each sample instead."
        )
    return classes


def _by_id(source: Source, scores: Floats, ids: Numbers) -> Floats:
    """Return scores in the order of the samples. Raises ConfigError unless each has one."""
    if ids.dtype.kind not in "iu":
        raise ConfigError(f'weights: the column "id" is {ids.dtype}, wanted integers: sample ids.')
    places = source.contents.places(source.rows(ids.astype(np.int64)))
    found = np.full(source.contents.samples, -1.0)
    found[places] = scores
    if len(places) != len(found) or (found < 0).any():
        raise ConfigError(
            f"weights: the file has {len(places):,} scores, of {len(np.unique(places)):,} samples; "
            f"wanted one for each of the {len(found):,} samples of {source.url}."
        )
    return found


def _field_of_classes(schema: Schema, fields: Sequence[str]) -> str | None:
    """Return the selected field of classes, or else of integers with a usual name."""
    whole = next((name for name in LABELS if _is_whole(schema.get(name))), None)
    return class_field(schema, (*fields, *schema)) or whole


def _is_whole(type: FieldType | None) -> bool:
    """Return True for a type of whole numbers that aren't classes."""
    return type is not None and type.number is not None and type.number.kind in "biu"


def _keys(
    source: Source, by: str | Callable[[str], object] | Sequence[object] | Numbers, ids: Ints
) -> object:
    """Return the key of each sample's group."""
    if callable(by):
        return [by(name) for run in _ranges(len(ids)) for name in source.names(ids[run])]
    if not isinstance(by, str):
        return by
    type = source.schema.get(by)
    if type is None or not (_is_whole(type) or (type.is_encoded and type.in_tables)):
        found = f"a field of {type!r}" if type is not None else "no field"
        raise ConfigError(
            f'split: by="{by}" is {found} of {source.url}, wanted a field of classes (each part '
            "has its share of every class), or of texts or integers (samples of one value stay "
            f"together). Fields: {dict(source.schema)}."
        )
    return source.column(by)


_SAMPLES_AT_ONCE = 2**14  # samples whose values or names are read together


def _ranges(count: int) -> Iterator[Ints]:
    """Yield the integers up to count in arrays."""
    for start in range(0, count, _SAMPLES_AT_ONCE):
        yield np.arange(start, min(count, start + _SAMPLES_AT_ONCE), dtype=np.int64)


def _values_of(column: Column, type: FieldType) -> Numbers | list[Any]:
    """Return a column's values as a numpy array or a list."""
    if isinstance(column, DenseColumn):
        return column.values
    samples = [column.sample(row) for row in range(len(column))]
    return list(map(type.decoder(), samples)) if isinstance(column, EncodedColumn) else samples
