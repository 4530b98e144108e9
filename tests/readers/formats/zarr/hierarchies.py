"""Write hierarchies with zarr-python, and read them locally and from a store."""

from __future__ import annotations

import itertools
import warnings
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import zarr

from penstock.readers import Dataset
from tests.files import uploaded

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from penstock.readers.fieldtypes import SampleBatch

PLACES = ("local", "remote")


def values(shape: Sequence[int], dtype: str = "uint8") -> NDArray[Any]:
    """Return numbers that repeat only after 251 values."""
    count = int(np.prod(shape))
    return (np.arange(count) * 7 % 251).reshape(shape).astype(dtype)


def write_group(
    root: Path, arrays: dict[str, NDArray[Any]], *, version: int = 3, **options: Any
) -> Path:
    """Write a group of arrays. options: of `create_array`, each a dict by array."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        group = zarr.open_group(root, mode="w", zarr_format=version)
        for name, data in arrays.items():
            own = {key: each[name] for key, each in options.items() if name in each}
            array = group.create_array(name, shape=data.shape, dtype=data.dtype, **own)
            array[...] = data
    return root


@contextmanager
def opened(root: Path, place: str, tmp_path: Path, **options: Any) -> Iterator[Dataset]:
    """Open a dataset at its place: "local", or "remote" in a store with a cache."""
    if place == "local":
        with Dataset(root, **options) as dataset:
            yield dataset
        return
    with uploaded(root) as url, Dataset(url, cache=tmp_path / "cache", **options) as dataset:
        yield dataset


def read_all(dataset: Dataset, *, batch: int = 7, seed: int = 3) -> dict[str, NDArray[Any]]:
    """Read all samples in a random order, in batches; return them by field, sorted by id."""
    order = np.random.default_rng(seed).permutation(len(dataset))
    found: dict[str, list[Any]] = {}
    for first in range(0, len(order), batch):
        rows = dataset.contents.rows(order[first : first + batch])
        read = dataset.read(rows)
        assert read.ids.tolist() == dataset.ids(rows).tolist()
        for name, column in read.columns.items():
            found.setdefault(name, []).append(column.values.copy())
    ids = dataset.ids(dataset.contents.rows(order))
    return {name: np.concatenate(parts)[np.argsort(ids)] for name, parts in found.items()}


def windows(
    array: NDArray[Any], window: Sequence[int | None], stride: Sequence[int | None] = ()
) -> list[NDArray[Any]]:
    """Return the windows of an array, computed with slices."""
    lengths = [part or size for part, size in itertools.zip_longest(window, array.shape)]
    steps = [step or part for step, part in itertools.zip_longest(stride, lengths)]
    axes = [
        range(0, size - part + 1, step)
        for size, part, step in zip(array.shape, lengths, steps, strict=True)
    ]
    return [
        array[tuple(slice(a, a + b) for a, b in zip(corner, lengths, strict=True))]
        for corner in itertools.product(*axes)
    ]


def bad_of(dataset: Dataset) -> tuple[SampleBatch, dict[int, str]]:
    """Read all samples; return the batch, and the reasons of bad ones by id."""
    bad: dict[int, str] = {}
    batch = dataset.read(dataset.contents.rows(np.arange(len(dataset))), bad=bad)
    ids = batch.ids.tolist()
    return batch, {ids[place]: reason for place, reason in bad.items()}


class Requests:
    """Records the requests to a memory file system."""

    requests: ClassVar[list[tuple[str, str]]] = []

    @classmethod
    def watch(cls, monkeypatch: Any) -> list[tuple[str, str]]:
        """Start to record; return the list of requests."""
        from fsspec.implementations.memory import MemoryFileSystem

        cls.requests = []
        for name in ("info", "ls", "find", "cat_file", "_open"):
            monkeypatch.setattr(
                MemoryFileSystem, name, cls._recorded(name, getattr(MemoryFileSystem, name))
            )
        return cls.requests

    @classmethod
    def _recorded(cls, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def record(self: Any, path: str, *args: Any, **options: Any) -> Any:
            cls.requests.append((name, path))
            return real(self, path, *args, **options)

        return record
