"""Columns, arrays and members that can't be fields are refused by name, with the reason."""

from __future__ import annotations

from decimal import Decimal
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq
import pytest

from penstock import Dataset
from penstock.cache import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

TABLE = pa.table(
    {
        "x": [1.0, 2.0],
        "price": pa.array([Decimal("1.50"), Decimal("2.50")], pa.decimal128(9, 2)),
        "map": pa.array([[("a", 1)], []], pa.map_(pa.string(), pa.int64())),
    }
)


def refusal(root: Path, name: str) -> str:
    """Return the message for a field, which is the same from a new and from an existing index."""
    messages = []
    for _ in range(2):
        with pytest.raises(ConfigError) as refused, Dataset(root, fields=(name,)) as dataset:
            dataset.open()
        messages.append(str(refused.value))
    assert messages[0] == messages[1]
    with Dataset(root, fields=("x",)) as dataset:
        assert len(dataset) == 2
    return messages[0]


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_columns(kind: str, tmp_path: Path) -> None:
    if kind == "parquet":
        pq.write_table(TABLE, tmp_path / "a.parquet")
    else:
        feather.write_feather(TABLE, str(tmp_path / "a.arrow"), compression="uncompressed")
    assert "decimal" in refusal(tmp_path, "price")
    assert "'map'" in refusal(tmp_path, "map")
    assert "can't be a field" in refusal(tmp_path, "map")
    assert "can't be a field" not in refusal(tmp_path, "nowhere")


def test_members(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=np.zeros((2, 3)), names=np.array(["a", None], object))
    assert "object" in refusal(tmp_path, "names")


def test_arrays_of_zarr(tmp_path: Path) -> None:
    zarr = pytest.importorskip("zarr")
    group = zarr.open_group(str(tmp_path), mode="w", zarr_format=2)
    group.create_array("x", shape=(2, 3), chunks=(1, 3), dtype="f4")[:] = 1
    group.create_array("total", shape=(), dtype="f4")
    assert "single number" in refusal(tmp_path, "total")
