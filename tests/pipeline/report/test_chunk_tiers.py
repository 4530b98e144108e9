"""The statistics of data in chunks: bytes by tier are those of storage, and a file of one chunk is
no shard."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from penstock import DataLoader, Dataset
from penstock.cache import DiskCache
from tests.servers import serving

if TYPE_CHECKING:
    from pathlib import Path

    from penstock import Statistics

ROWS, EPOCHS = 200, 2


def write(kind: str, root: Path) -> dict[str, Any]:
    """A dataset of ROWS samples. Returns the arguments that open it."""
    random = np.random.default_rng(7)
    numbers = random.integers(0, 99, (ROWS, 32, 32)).astype(np.float32)
    root.mkdir()
    if kind in ("zarr", "zarr, a sample a chunk"):
        zarr = pytest.importorskip("zarr")
        rows = 8 if kind == "zarr" else 1
        array = zarr.create_array(
            str(root), shape=numbers.shape, chunks=(rows, 32, 32), dtype=numbers.dtype
        )
        array[:] = numbers
        return {"format": "zarr"}
    if kind == "parquet":
        column = pa.array(random.random(ROWS))
        pq.write_table(pa.table({"x": column}), root / "a.parquet", row_group_size=50)
        return {"fields": ("x",)}
    if kind == "npy":
        np.save(root / "a.npy", numbers)
        return {"sample": "row"}
    if kind == "npy, a file a sample":
        for number in range(ROWS):
            np.save(root / f"{number:03}.npy", numbers[number])
        return {"format": "npy", "sample": "file"}
    random.integers(0, 5000, ROWS * 64).astype(np.uint16).tofile(root / "a.bin")
    return {"format": "tokens", "dtype": "uint16", "sample": (64,)}


KINDS = ("zarr", "zarr, a sample a chunk", "parquet", "npy", "npy, a file a sample", "tokens")


def run(url: Any, arguments: dict[str, Any], **more: Any) -> tuple[Statistics, int]:
    """Return the statistics of two epochs, and the bytes of the samples in storage."""
    with (
        Dataset(url, **arguments, **more) as dataset,
        DataLoader(dataset, batch_size=10, seed=1, drop_last=False) as loader,
    ):
        for _ in range(EPOCHS):
            assert sum(1 for _ in loader) == ROWS // 10
        return loader.statistics(), int(dataset.index.shard_bytes.sum())


@pytest.mark.parametrize("kind", KINDS)
def test_local_bytes_are_those_of_the_files(kind: str, tmp_path: Path) -> None:
    arguments = write(kind, tmp_path / "set")
    found, size_bytes = run(tmp_path / "set", arguments)
    assert 0.6 * size_bytes < found.bytes_disk / EPOCHS <= 1.01 * size_bytes
    assert (found.bytes_remote, found.hits, found.misses, found.hit_ratio) == (0, 0, 0, 1.0)
    assert found.facts.shards is not None
    assert found.facts.shards.count == 1
    assert not found.facts.shards.are_files
    assert found.cause != "tiny-shards"


@pytest.mark.parametrize("kind", KINDS)
def test_remote_bytes_come_once_and_then_from_the_cache(kind: str, tmp_path: Path) -> None:
    arguments = write(kind, tmp_path / "set")
    cache = DiskCache(tmp_path / "cache", max_bytes="64MiB")
    with serving(tmp_path / "set") as server:
        found, size_bytes = run(server.url, arguments, cache=cache)
    assert found.bytes_filled <= 1.05 * size_bytes + 8192
    # Two batches may ask for a chunk before one of them has decoded it.
    assert found.bytes_disk <= 2 * EPOCHS * size_bytes
    assert 0.3 <= found.hit_ratio <= 1.0
    assert found.cause != "tiny-shards"
