"""Helpers of tests of NumPy files: upload them, read them, compare all samples."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import fsspec
import numpy as np

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    from penstock.readers import Dataset


def upload(root: Path, place: str) -> None:
    """Copy the files of a folder to the memory file system."""
    memory = fsspec.filesystem("memory")
    for path in root.rglob("*"):
        if path.is_file():
            memory.pipe(f"{place}/{path.relative_to(root)}", path.read_bytes())


def shuffled(dataset: Dataset, seed: int = 3) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return all ids in a random order, and their rows."""
    ids = np.random.default_rng(seed).permutation(len(dataset))
    return ids, dataset.rows(ids)


def dense(dataset: Dataset, name: str, rows: NDArray[np.int64]) -> NDArray[Any]:
    """Read one field of some rows."""
    found: NDArray[Any] = dataset.read(rows, fields=(name,)).columns[name].values
    return found


def check_rows(dataset: Dataset, wanted: dict[str, NDArray[Any]]) -> None:
    """Check every sample of each field for equality, in a random order."""
    ids, rows = shuffled(dataset)
    assert len(dataset) == len(next(iter(wanted.values())))
    batch = dataset.read(rows, fields=tuple(wanted))
    for name, values in wanted.items():
        got = batch.columns[name].values
        assert got.dtype == values.dtype.newbyteorder("=")
        assert got.dtype.isnative
        np.testing.assert_array_equal(got, values[ids])
    few = np.array([len(ids) // 2], np.int64)
    np.testing.assert_array_equal(
        dense(dataset, next(iter(wanted)), dataset.rows(few)), next(iter(wanted.values()))[few]
    )
