"""Hierarchies that tests write with zarr-python, and how they are read, here and remote."""

from __future__ import annotations

import itertools
import warnings
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar

import fsspec
import numpy as np
import zarr

from penstock.readers import Dataset
from tests.readers.remote_sets import upload

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from penstock.readers.fields import SampleBatch

PLACES = ("local", "remote")


def values(shape: Sequence[int], dtype: str = "uint8") -> NDArray[Any]:
    """Numbers that are all different where the dtype can."""
    count = int(np.prod(shape))
    return (np.arange(count) * 7 % 251).reshape(shape).astype(dtype)


def write_group(
    root: Path, arrays: dict[str, NDArray[Any]], *, version: int = 3, **options: Any
) -> Path:
    """A group of arrays. options: of `create_array`, by array where they are dicts."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        group = zarr.open_group(root, mode="w", zarr_format=version)
        for name, data in arrays.items():
            told = {key: each[name] for key, each in options.items() if name in each}
            array = group.create_array(name, shape=data.shape, dtype=data.dtype, **told)
            array[...] = data
    return root


@contextmanager
def opened(root: Path, place: str, tmp_path: Path, **options: Any) -> Iterator[Dataset]:
    """A dataset at its place: "local", or "remote" in another store behind a cache."""
    if place == "local":
        with Dataset(root, **options) as dataset:
            yield dataset
        return
    memory, below = fsspec.filesystem("memory"), f"/zarr-{tmp_path.name}-{root.name}"
    upload(root, memory, below)
    try:
        with Dataset(f"memory:/{below}", cache=tmp_path / "cache", **options) as dataset:
            yield dataset
    finally:
        memory.rm(below, recursive=True)


def read_all(dataset: Dataset, *, batch: int = 7, seed: int = 3) -> dict[str, NDArray[Any]]:
    """Every sample, by field, in the order of ids; read in a random order, in batches."""
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
    """The windows of an array, as numpy has them."""
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
    """All samples, and what is wrong with some, by id."""
    bad: dict[int, str] = {}
    batch = dataset.read(dataset.contents.rows(np.arange(len(dataset))), bad=bad)
    ids = batch.ids.tolist()
    return batch, {ids[place]: reason for place, reason in bad.items()}


class Requests:
    """Counts what a memory file system is asked; each request could take a while."""

    asked: ClassVar[list[tuple[str, str]]] = []

    @classmethod
    def watch(cls, monkeypatch: Any) -> list[tuple[str, str]]:
        """Note every request from now on."""
        from fsspec.implementations.memory import MemoryFileSystem

        cls.asked = []
        for name in ("info", "ls", "find", "cat_file", "_open"):
            monkeypatch.setattr(
                MemoryFileSystem, name, cls._noted(name, getattr(MemoryFileSystem, name))
            )
        return cls.asked

    @classmethod
    def _noted(cls, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def ask(self: Any, path: str, *args: Any, **options: Any) -> Any:
            cls.asked.append((name, path))
            return real(self, path, *args, **options)

        return ask
