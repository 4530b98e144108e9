"""Mix datasets of other libraries whose samples are read by index, such as torch's.

`MapMixture` is such a dataset itself: torch's workers read from it by index. Its `mixture` decides
the order, as for native datasets.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np

from penstock.cache import ConfigError
from penstock.readers.fieldtypes import Schema
from penstock.readers.sources import Contents, MixtureContents

# Up to this many samples, all indices are shuffled at once, at 8 bytes each. Larger datasets are
# shuffled in windows of virtual shards, as native ones are.
FULL_SHUFFLE_SAMPLES = 2**26
VIRTUAL_SHARD_SAMPLES = 2**16


def index_contents(dataset: Any, samples: int) -> Contents:
    """Return the indices 0 to `samples` - 1 of a dataset as contents with virtual shards.

    Such a dataset has no fingerprint, so its type and length stand for it.
    """
    sizes = np.array([samples])
    if samples > FULL_SHUFFLE_SAMPLES:
        whole, rest = divmod(samples, VIRTUAL_SHARD_SAMPLES)
        sizes = np.array([VIRTUAL_SHARD_SAMPLES] * whole + [rest] * (rest > 0))
    return Contents(
        schema=Schema({}),
        sizes=sizes,
        shard_bytes=sizes * 0,
        id_end=samples,
        fingerprint=f"{type(dataset).__name__}-{samples}",
        icc=None,
        shuffled=False,
        images={},
        files=0,
        is_file_per_sample=False,
    )


def check_map_style(name: str, dataset: Any) -> None:
    """Raise ConfigError unless a part of a mixture is a dataset with a length and samples by
    index."""
    kind, remedy = type(dataset), ""
    is_iterable = any(each.__name__ == "IterableDataset" for each in kind.__mro__)
    if is_iterable or (not hasattr(kind, "__getitem__") and hasattr(kind, "__iter__")):
        remedy = (
            "an iterable dataset, whose samples have no numbers by which an order could name them. "
            "Pass a dataset with __getitem__ and __len__, or read its files with penstock.Dataset."
        )
    elif isinstance(dataset, str | bytes | os.PathLike | Mapping | type) or not (
        hasattr(kind, "__getitem__") and hasattr(kind, "__len__")
    ):
        remedy = (
            "wanted penstock.Dataset, subset(), split(), concat() or mix() of some, or torch "
            "datasets with __getitem__ and __len__."
        )
    if remedy:
        raise ConfigError(f'mix: got {dataset!r:.80} for "{name}", {remedy}')


class MapMixture:
    """Samples by index of several map-style datasets, in an order that follows their weights.

    Indices are those of the first part, followed by those of the second, and so on. `DataLoader`
    needs seed= to read it: torch's own order has no weights. Picklable if the parts are.
    """

    def __init__(self, parts: Sequence[Any], mixture: MixtureContents) -> None:
        """parts: datasets with samples by index. mixture: their contents and weights."""
        self.bases, self.mixture = tuple(parts), mixture
        self._ends = np.cumsum(mixture.sizes)

    def __repr__(self) -> str:
        parts = zip(self.mixture.names, self.bases, strict=True)
        return f"mix({{{', '.join(f'{name!r}: {type(part).__name__}' for name, part in parts)}}})"

    def __len__(self) -> int:
        """Return the number of samples of an epoch of the mixture."""
        return self.mixture.samples

    def __getitem__(self, index: int) -> Any:
        """Return a sample of a part by its index among the samples of all parts."""
        part, own = self._place(index)
        return self.bases[part][own]

    @property
    def parts(self) -> tuple[str, ...]:
        """The names of the parts, in order."""
        return self.mixture.names

    @cached_property
    def contents(self) -> Contents:
        """The indices of all parts as contents; its `mixture` has the weights."""
        parts, mixture = self.mixture.parts, self.mixture
        names = [part.fingerprint for part in parts]
        text = repr((names, mixture.names, mixture.changes, mixture.rule, mixture.per))
        sizes = np.concatenate([part.sizes for part in parts])
        return replace(
            parts[0],
            sizes=sizes,
            shard_bytes=sizes * 0,
            id_end=int(self._ends[-1]),
            fingerprint=f"mix-{hashlib.sha256(text.encode()).hexdigest()}",
            mixture=mixture,
        )

    def _place(self, index: int) -> tuple[int, int]:
        """Return the part of an index, and the index in that part. Raises IndexError."""
        if not 0 <= index < self._ends[-1]:
            raise IndexError(f"{self!r}: got index {index}, wanted one in [0, {self._ends[-1]}).")
        part = int(np.searchsorted(self._ends, index, side="right"))
        return part, int(index) - int(self._ends[part] - self.mixture.sizes[part])


class FetchingMapMixture(MapMixture):
    """A mixture of datasets some of which return several samples by one call (`__getitems__`)."""

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Return samples by their indices, by one call for each part that can."""
        places = [self._place(index) for index in indices]
        samples: list[Any] = [None] * len(places)
        for part in dict.fromkeys(part for part, _ in places):
            mine = [number for number, (each, _) in enumerate(places) if each == part]
            own, base = [places[number][1] for number in mine], self.bases[part]
            many = getattr(base, "__getitems__", None)
            found = many(own) if callable(many) else [base[index] for index in own]
            for number, sample in zip(mine, found, strict=True):
                samples[number] = sample
        return samples


def mix_by_index(parts: Sequence[Any], mixture: MixtureContents) -> MapMixture:
    """Return the mixture of map-style datasets."""
    fetches = any(callable(getattr(part, "__getitems__", None)) for part in parts)
    return (FetchingMapMixture if fetches else MapMixture)(parts, mixture)
