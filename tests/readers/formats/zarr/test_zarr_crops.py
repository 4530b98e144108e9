"""Crops of the samples of a Zarr array: only their chunks are read and decoded."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from penstock.readers import Dataset
from penstock.readers.fields import ColumnCrop
from tests.readers.formats.zarr.hierarchies import PLACES, opened, values, write_group

if TYPE_CHECKING:
    from pathlib import Path

X = values((9, 4, 12, 16))

pytestmark = pytest.mark.filterwarnings("ignore::penstock.cache.errors.PenstockWarning")


def corners(rows: int, whole: tuple[int, ...], part: tuple[int, ...]) -> np.ndarray:
    rng = np.random.default_rng(5)
    room = np.array(whole) - np.array(part)
    return rng.integers(0, room + 1, (rows, len(whole)))


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("chunks", [(1, 4, 12, 16), (2, 2, 5, 4), (1, 4, 4, 4)])
def test_crops_equal_those_of_whole_samples(
    chunks: tuple[int, ...], place: str, tmp_path: Path
) -> None:
    root = write_group(tmp_path / "set.zarr", {"x": X}, chunks={"x": chunks})
    part = (2, 5, 6)
    with opened(root, place, tmp_path) as dataset:
        rows = dataset.contents.rows(np.random.default_rng(1).permutation(len(dataset)))
        at = corners(len(rows), X.shape[1:], part)
        found = dataset.read(rows, crops={"x": ColumnCrop(at, part)})
        for id, corner, sample in zip(
            found.ids.tolist(), at.tolist(), found.columns["x"].values, strict=True
        ):
            where = tuple(slice(a, a + b) for a, b in zip(corner, part, strict=True))
            assert (sample == X[id][where]).all()


def test_crops_of_windows(tmp_path: Path) -> None:
    root = write_group(tmp_path / "set.zarr", {"x": X}, chunks={"x": (2, 2, 5, 4)})
    part = (2, 2, 5, 6)
    with Dataset(root, sample=(3,), stride=(2,)) as dataset:
        rows = dataset.contents.rows(np.arange(len(dataset)))
        at = corners(len(rows), (3, *X.shape[1:]), part)
        found = dataset.read(rows, crops={"x": ColumnCrop(at, part)}).columns["x"].values
        for number, (corner, sample) in enumerate(zip(at.tolist(), found, strict=True)):
            window = X[2 * number : 2 * number + 3]
            where = tuple(slice(a, a + b) for a, b in zip(corner, part, strict=True))
            assert (sample == window[where]).all()


def test_only_the_chunks_of_crops_are_needed(tmp_path: Path) -> None:
    options = {"chunks": {"x": (1, 4, 4, 4)}, "compressors": {"x": None}}
    root = write_group(tmp_path / "set.zarr", {"x": X}, **options)
    with Dataset(root) as dataset:
        assert len(dataset.contents.sizes) == 1

        def share(*corner: int) -> float:
            def draw(rows: np.ndarray) -> dict[str, ColumnCrop]:
                return {"x": ColumnCrop(np.tile(np.array(corner), (len(rows), 1)), (4, 4, 4))}

            return dataset.index.shards.wanted_share(0, ("x",), draw)

        assert share(0, 0, 0) == 1 / 12
        assert share(0, 1, 1) == 4 / 12
        assert dataset.index.shards.wanted_share(0, ("x",), lambda _: {}) == 1
