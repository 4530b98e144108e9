"""Real processes that share models by a DeviceMesh: one replica's get the same batches."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

from tests.pipeline.ranks import run_ranks

if TYPE_CHECKING:
    from pathlib import Path

# 2 replicas of 2 processes, with caches that serve one another, and then 4 of one each.
SCRIPT = textwrap.dedent(
    """
    import json, os, sys, warnings
    from dataclasses import replace
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from penstock import DataLoader, Dataset, DiskCache, Peers, World

    warnings.simplefilter("ignore")
    url, caches, rank = sys.argv[1], sys.argv[2], int(os.environ["RANK"])
    os.environ["PENSTOCK_PEER_TOKEN"] = "a secret of these four processes alone"
    dist.init_process_group("gloo")
    dp = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))["dp"]

    def node(world):  # each process is one: slots follow what four caches hold
        return replace(world, local_rank=0, local_size=1, node=None)

    found = {}

    def run(name, world, steps, state=None):
        cache = DiskCache(f"{caches}/{rank}", max_bytes="64MiB", peers=Peers("127.0.0.1:0"))
        loader = DataLoader(
            Dataset(url, fields=("label", "id"), cache=cache), seed=5, global_batch_size=24,
            shuffle=True, drop_last=True, world=world, num_workers=1,
        )
        if state is not None:
            loader.load_state_dict(state)
        told = found[name] = []
        with loader:
            for _, (labels, ids) in zip(range(steps), loader):
                told.append([ids.tolist(), labels.tolist()])
                dist.barrier()
            return loader.state_dict()

    state = run("mesh", node(World.from_mesh(dp)), 3)
    run("resumed", World.from_mesh(dp), 3, state)
    run("numbers", World.detect().with_replicas(rank // 2, 2), 3, state)
    run("all", World.detect(), 3, state)
    print(json.dumps(found), flush=True)
    dist.barrier()
    dist.destroy_process_group()
    """
)


def test_processes_of_a_replica_get_the_same_batches(pack: Path, tmp_path: Path) -> None:
    from tests.servers import serving

    with serving(pack.parent) as remote:
        told = run_ranks(SCRIPT, f"{remote.url}/{pack.name}", str(tmp_path), size=4)
    for name in ("mesh", "resumed", "numbers"):
        steps = [one[name] for one in told]
        assert steps[0] == steps[1], name
        assert steps[2] == steps[3], name
        for first, second in zip(steps[0], steps[2], strict=True):
            assert len(set(first[0]) | set(second[0])) == 24
    batches = {
        name: [sorted(i for r in rows for i in told[r][name][step][0]) for step in range(3)]
        for name, rows in (("resumed", (0, 2)), ("numbers", (0, 2)), ("all", range(4)))
    }
    assert batches["resumed"] == batches["numbers"] == batches["all"]
