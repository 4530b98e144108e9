"""Where shards are filled from, decided by several threads at once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import fsspec

from penstock import Peers
from penstock.cache.disk.disk_cache import DiskCache
from penstock.pipeline import DataLoader
from penstock.readers import Dataset

if TYPE_CHECKING:
    from pathlib import Path


class Watched(dict[int, Any]):
    """What was decided; as soon as one looks for a shard, another thread begins anew."""

    def __init__(self, filler: Any) -> None:
        super().__init__()
        self._filler = filler

    def __contains__(self, shard: object) -> bool:
        found = super().__contains__(shard)
        self._filler._decided_until = 0.0
        self._filler._forget_decisions(now=1.0)
        return found


def test_a_decision_that_another_thread_takes_back_stands_for_who_has_looked_it_up(
    pack: Path, tmp_path: Path
) -> None:
    cache = DiskCache(tmp_path / "cache", max_bytes="64MiB", peers=Peers("127.0.0.1:0"))
    files = fsspec.filesystem("file", skip_instance_cache=True)
    with (
        Dataset(str(pack), fields=("label", "id"), filesystem=files, cache=cache) as remote,
        DataLoader(remote, batch_size=8, shuffle=True, seed=5, drop_last=True) as loader,
    ):
        filler = loader._engine._setup.ready.feed.prefetch._filler  # type: ignore[union-attr]
        far, _ = filler._supplies
        filler._decided = decided = Watched(filler)
        decided[0] = far
        assert filler._supply_of(0) is far
        assert filler._decided == {}
