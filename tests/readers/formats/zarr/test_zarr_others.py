"""Hierarchies written by zarr-python 2, xarray and tensorstore (`write_others.py`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from zipfile import ZipFile

import numpy as np
import pytest

from penstock.cache import DatasetError
from penstock.readers import Dataset
from tests.readers.formats.zarr.hierarchies import PLACES, opened, read_all, values, windows

pytestmark = pytest.mark.filterwarnings("ignore::penstock.cache.errors.PenstockWarning")


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("others")
    ZipFile(Path(__file__).with_name("others.zip")).extractall(root)
    return root


@pytest.mark.parametrize("place", PLACES)
def test_zarr_python_2(place: str, others: Path, tmp_path: Path) -> None:
    x = values((7, 3, 8, 6))
    sparse = np.full((7, 4), 5, "u2")
    sparse[2:4] = 1
    with opened(others / "zarr2.zarr", place, tmp_path) as dataset:
        found = read_all(dataset)
    assert set(found) == {"blosc", "order", "delta", "big", "bare", "sparse", "when"}
    for name in ("blosc", "order", "delta", "big", "bare"):
        assert (found[name] == x).all(), name
    assert found["big"].dtype == np.float64
    assert (found["sparse"] == sparse).all()
    assert found["when"].tolist() == list(range(7))
    with pytest.raises(DatasetError, match="names: Python objects"):
        Dataset(others / "zarr2.zarr", fields={"names": "names"}).open()


def test_xarray(others: Path) -> None:
    t2m = values((6, 4, 8), "f4")
    with Dataset(others / "xarray.zarr") as dataset:
        assert set(dataset.fields) == {"t2m", "time"}
        found = read_all(dataset)
        assert (found["t2m"] == t2m).all()
        assert found["time"].tolist() == list(range(6))
    with Dataset(others / "xarray.zarr", sample=(3,), stride=(1,)) as dataset:
        found = read_all(dataset)
        assert (found["t2m"] == np.stack(windows(t2m, (3,), (1,)))).all()
        assert found["time"].tolist() == [[i, i + 1, i + 2] for i in range(4)]


@pytest.mark.parametrize("place", PLACES)
def test_tensorstore(place: str, others: Path, tmp_path: Path) -> None:
    x = values((9, 3, 8, 8), "u2")
    root = others / "tensorstore.zarr"
    fields: Any = {name: name for name in ("ts2", "ts3", "shards")}
    with opened(root, place, tmp_path, fields=fields) as dataset:
        found = read_all(dataset)
        assert all((found[name] == x).all() for name in fields)
    window = (2, None, 5, 3)
    with opened(root, place, tmp_path, fields=fields, sample=window) as dataset:
        found = read_all(dataset)
        assert all((found[name] == np.stack(windows(x, window))).all() for name in fields)
