"""A store of a few objects, and remotes that read it through one cache folder."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from penstock.cache.base import FetchPolicy
from penstock.cache.blobs import Remote, Upstream
from penstock.cache.disk import DiskCache
from penstock.cache.fetch import Fetcher
from tests.cache.blobs.remotes import MIB, SIZES
from tests.stores import MemoryStore

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


@pytest.fixture
def store() -> MemoryStore:
    rng = np.random.default_rng(7)
    return MemoryStore({f"o{i}": rng.bytes(size) for i, size in enumerate(SIZES)})


@pytest.fixture
def remotes(tmp_path: Path) -> Iterator[Callable[..., Remote]]:
    made: list[Remote] = []

    def make(
        store: MemoryStore,
        *,
        max_bytes: int | None = 8 * MIB,
        group: str = "g",
        upstream: Callable[[Fetcher], Upstream] = Upstream,
    ) -> Remote:
        cache = DiskCache(tmp_path / "cache", max_bytes=max_bytes) if max_bytes else None
        policy = FetchPolicy(retry_timeout_s=5.0, range_bytes=65_536)
        fetcher = Fetcher(store, policy=policy)
        made.append(
            Remote(fetcher, cache, group=group, label="mem://set", upstream=upstream(fetcher))
        )
        return made[-1]

    yield make
    for remote in made:
        remote.close()
        if remote.cache is not None:
            remote.cache.close()
