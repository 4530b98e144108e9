"""The share of each shard in a node's cache is found by listing its folder once."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import fsspec
import numpy as np

from penstock.cache import DiskCache
from penstock.cache.disk import FolderLayout, Lookup
from penstock.readers import Dataset, concat

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def held(source: Any) -> list[float]:
    return [round(float(share), 6) for share in source.remote_shards.held_shares()]


def test_whole_shards_and_parts_of_shards_count(pack: Path, tmp_path: Path) -> None:
    cache = DiskCache(tmp_path / "cache", max_bytes="64MiB")
    files = fsspec.filesystem("file", skip_instance_cache=True)
    with Dataset(str(pack), filesystem=files, cache=cache) as dataset:
        count = len(dataset.contents.sizes)
        assert held(dataset) == [0.0] * count
        assert dataset.remote_shards is not None
        dataset.remote_shards.fill(1, progress=lambda _: None, stop=threading.Event())
        assert held(dataset) == [0.0, 1.0] + [0.0] * (count - 2)
        dataset.read(np.array([[2, 0]]))  # a sample by its range
        shares = held(dataset)
        assert 0 < shares[2] < 1
        assert held(concat([dataset, dataset.subset(range(5))]))[:count] == shares
    cache.close()


def test_a_large_folder_is_listed_without_opening_blobs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = DiskCache(tmp_path / "cache", max_bytes="64MiB")
    cache.open()
    layout = FolderLayout(str(tmp_path / "cache"))
    for number in range(300):
        (tmp_path / "cache" / "blobs" / f"{number:040x}").touch()
    opened: list[str] = []
    monkeypatch.setattr(layout.blobs, "open", opened.append)
    assert len(Lookup(layout).held()) == 300
    assert not opened
    cache.close()
