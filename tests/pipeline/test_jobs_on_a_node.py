"""Several jobs on a node: a sweep over seeds, each a process of its own, one cache for all."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

from tests.pipeline.ranks import run_ranks
from tests.servers import serving

if TYPE_CHECKING:
    from pathlib import Path

SCRIPT = textwrap.dedent(
    """
    import json, os, sys
    from penstock.cache import DiskCache
    from penstock.pipeline import DataLoader, World
    from penstock.readers import Dataset

    cache = DiskCache(sys.argv[2], max_bytes="64MiB")
    seed = int(os.environ["RANK"])  # the number of the job, here
    data = Dataset(sys.argv[1], fields=("label", "id"), cache=cache)
    ids = []
    with DataLoader(data, 4, shuffle=True, seed=seed, world=World(0, 1)) as loader:
        for _ in range(2):
            ids.append([i for _, batch in loader for i in batch.tolist()])
    print(json.dumps({"ids": ids}), flush=True)
    """
)


def test_two_seeds_fetch_each_object_once(pack: Path, tmp_path: Path) -> None:
    shards = {f"/{pack.name}/{file.name}": file.stat().st_size for file in pack.glob("shard-*")}
    with serving(pack.parent) as server:
        jobs = run_ranks(SCRIPT, f"{server.url}/{pack.name}", str(tmp_path / "cache"))
        sent = {path: server.bytes_of[path] for path in shards}
    assert jobs[0]["ids"][0] != jobs[1]["ids"][0]
    for job in jobs:
        for epoch in job["ids"]:
            assert sorted(epoch) == list(range(203))
    # No piece came twice; what the fields of no sample lie in, not at all.
    assert all(0 < sent[path] <= size for path, size in shards.items()), sent
