"""The statistics of a whole job: each rank names the slowest rank and its cause."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

from tests.pipeline.ranks import run_ranks
from tests.servers import Faults, serving

if TYPE_CHECKING:
    from pathlib import Path

SCRIPT = textwrap.dedent(
    """
    import json, os, sys
    import torch.distributed as dist
    from penstock.cache import DiskCache
    from penstock.pipeline import DataLoader
    from penstock.readers import Dataset

    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo")
    data = Dataset(sys.argv[1 + rank], fields=("label", "id"))
    order = {"shuffle": True, "seed": 3, "drop_last": True}
    with DataLoader(data, 4, **order) as loader:
        before = loader.statistics().job
        for _ in range(1):
            for batch in loader:
                dist.barrier()
        dist.barrier()  # both have published at the epoch's end
        found = loader.statistics()
    job = found.job
    print(json.dumps({
        "before": before.heard,
        "heard": [job.heard, job.processes],
        "slowest": job.slowest.rank,
        "limit": job.slowest.limit,
        "share": job.slowest.wait_share,
        "line": str(found).splitlines()[-1],
    }), flush=True)
    dist.barrier()
    """
)


def test_a_rank_behind_a_slow_remote_is_named_on_each(pack: Path) -> None:
    with serving(pack.parent) as fast, serving(pack.parent) as slow:
        slow.faults = Faults(latency_s=0.15)
        told = run_ranks(SCRIPT, f"{fast.url}/{pack.name}", f"{slow.url}/{pack.name}")
    for one in told:
        assert one["before"] == 0
        assert one["heard"] == [2, 2]
        assert one["slowest"] == 1
        assert one["limit"] == "remote"
        assert one["share"] > 0.1
        assert one["line"].startswith("Job: 2 of 2 processes reported. Slowest: rank 1")
