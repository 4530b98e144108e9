"""A source of samples: what the loader reads, whatever it is made of.

A dataset is one, and so are a selection of one and several end to end. Between the plan, which
says (shard, row), and the feed, which wants columns, nobody asks which.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NoReturn, Self

import numpy as np

from penstock.cache.base.blob import READ_MODE
from penstock.cache.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from numpy.typing import NDArray

    from penstock.cache.base.blob import ReadMode
    from penstock.readers.fields.columns import SampleBatch
    from penstock.readers.fields.schema import Schema
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
    None where a sample can be had alone.
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


class Source(ABC):
    """What can be read by shards and rows, with names, ids and what the cache needs to know.

    A sample's id is fixed where it lies: a selection keeps the ids of what it was taken from, so
    that a sample's name and draws don't change; datasets end to end have those of the first, then
    those of the second behind them, and so on. Several threads may read.

    url: for people.
    """

    url: str

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
    def cache_folder(self) -> str | None:
        """The user's cache folder; None where there is none."""
        return None

    @property
    def remote_shards(self) -> RemoteShards | None:
        """The shards that come from afar; None where all are local."""
        return None

    # -- samples

    @abstractmethod
    def ids(self, rows: Ints) -> Ints:
        """Sample ids of (shard, row), int64, shape (n,)."""

    @abstractmethod
    def rows(self, ids: Ints) -> Ints:
        """(shard, row) of sample ids, int64, shape (n, 2). Raises ConfigError for ids that aren't
        in it."""

    @abstractmethod
    def read(
        self, rows: Ints, *, mode: ReadMode = READ_MODE, bad: dict[int, str] | None = None
    ) -> SampleBatch:
        """The samples of rows, in their order: see `Dataset.read`."""

    @abstractmethod
    def names(self, ids: Iterable[int] | Ints) -> list[str]:
        """The samples' names for people. Raises ConfigError for ids that aren't in it."""

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
