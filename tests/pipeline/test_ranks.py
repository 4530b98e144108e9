"""Test ranks as real processes in a gloo group: equal steps, each sample once in evaluation,
replicas, and ranks that are late, fail or differ.
"""

from __future__ import annotations

import json
import textwrap
from pathlib import Path

import pytest

from tests.pipeline.ranks import forked, free_port, rank_variables, run_ranks
from tests.servers import Faults, serving

ROOT = Path(__file__).resolve().parents[2]


SCRIPT = """
import json, sys
import torch.distributed as dist
from penstock.augment import imagenet_eval, imagenet_train
from penstock.pipeline import DataLoader, World
from penstock.readers import Dataset
from tests.torch_datasets import Squares

pack, out, wrong_seed = sys.argv[1], sys.argv[2], int(sys.argv[3])
dist.init_process_group("gloo")
rank = dist.get_rank()
found = {}

def run(name, loader, ids_of):
    steps = []
    for batch in loader:
        steps.append(ids_of(batch))
        dist.barrier()          # hangs, and then fails by its timeout, if ranks differ in steps
    found[name] = steps
    loader.close()

fields = ("image", "id")
seed = 3 + wrong_seed * rank
run("train", DataLoader(Dataset(pack, fields=fields), 5, shuffle=True, seed=seed, drop_last=True,
                        augment=imagenet_train(32)), lambda b: b[1].tolist())
run("evaluate", DataLoader(Dataset(pack, fields=fields), 7, pad="mask",
                           augment=imagenet_eval(32, 40)), lambda b: b[1][b[2]].tolist())
run("torch train", DataLoader(Squares(61, "int"), 4, shuffle=True, seed=1, drop_last=True,
                              num_workers=1), lambda b: b.tolist())
run("torch evaluate", DataLoader(Squares(61, "int"), 4, seed=1, pad="mask"),
    lambda b: b[0][b[1]].tolist())
if rank == 0:  # alone: it must not wait for the others
    found["alone"] = sum(len(b[0]) for b in DataLoader(
        Dataset(pack), 16, augment=imagenet_eval(32, 40), world=World(0, 1)))
open(f"{out}/{rank}.json", "w").write(json.dumps(found))
dist.barrier()
dist.destroy_process_group()
"""


def run(size: int, pack: Path, out: Path, *, wrong_seed: bool = False) -> list[tuple[int, str]]:
    """Return the exit status and the errors of each rank."""
    port = free_port()
    arguments = [str(pack), str(out), str(int(wrong_seed))]
    children = [(arguments, rank_variables(rank, size, port)) for rank in range(size)]
    with forked(SCRIPT, children) as ranks:
        return [(code, errors) for code, _, errors in ranks.done()]


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.grid)])
def test_whole_epochs_of_a_real_group(pack: Path, tmp_path: Path, size: int) -> None:
    report = run(size, pack, tmp_path)
    assert [code for code, _ in report] == [0] * size, report
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(size)]
    samples = found[0]["alone"]
    for name, wanted in (("evaluate", samples), ("torch evaluate", 61)):
        assert len({len(f[name]) for f in found}) == 1
        assert sorted(i for f in found for step in f[name] for i in step) == list(range(wanted))
    for name, batch, wanted in (("train", 5, samples), ("torch train", 4, 61)):
        assert [len(f[name]) for f in found] == [wanted // (batch * size)] * size
        seen = [i for f in found for step in f[name] for i in step]
        assert len(set(seen)) == len(seen) == wanted // (batch * size) * batch * size


def test_a_seed_that_differs_between_ranks_fails_loudly(pack: Path, tmp_path: Path) -> None:
    report = run(2, pack, tmp_path, wrong_seed=True)
    assert all(code for code, _ in report)
    words = "".join(errors for _, errors in report)
    assert "PlanError" in words
    assert "seed" in words


# One group for all: each case has loaders of its own, and ranks meet between two cases.
DIFFERING = textwrap.dedent(
    """
    import json, os, sys, warnings
    import torch.distributed as dist
    from penstock.pipeline import DataLoader, World
    import penstock.pipeline.members.job_membership as job_membership
    from penstock.readers import Dataset

    warnings.simplefilter("ignore")
    job_membership.ALONE_S = 0.2
    pack, rank = sys.argv[1], int(os.environ["RANK"])
    dist.init_process_group("gloo")
    store = dist.distributed_c10d._get_default_store()
    whole = Dataset(pack, fields=("id",))
    own = Dataset(sys.argv[1 + (rank > 0)], fields=("id",))  # another on rank 0
    half = whole.subset(range(rank, 203, 3))
    found = {}

    def meet(name):
        store.set(f"{name}-{rank}", "")
        store.wait([f"{name}-{one}" for one in range(3)])

    def case(name, work):
        try:
            told = ["done", work()]
        except Exception as error:
            told = [type(error).__name__, str(error)]
        found[name] = told
        meet(name)

    def read(loader, *, forever=False):
        count = 0
        with loader:
            while True:
                count += sum(len(ids) for ids, *_ in loader)
                if not forever:
                    return count

    train = dict(global_batch_size=9, shuffle=True, seed=3, drop_last=True, num_workers=1)
    evaluate = dict(batch_size=3, pad="mask", num_workers=1)

    def alone():
        if rank == 0:
            return read(DataLoader(whole, **evaluate))

    def late():  # rank 2's seed differs, and it comes when the others wait for it
        if rank == 2:
            store.wait(["waiting-0", "waiting-1"])
        loader = DataLoader(whole, **{**train, "seed": 3 + (rank == 2)})
        store.set(f"waiting-{rank}", "")
        read(loader, forever=True)

    def refused():
        loader = DataLoader(whole, **train)
        state = loader.state_dict()
        loader.load_state_dict({**state, "version": 1} if rank == 1 else state)
        read(loader, forever=True)

    case("alone", alone)
    case("own", lambda: read(DataLoader(own, **evaluate), forever=True))
    case("cut", lambda: read(DataLoader(half, **evaluate), forever=True))
    case("late", late)
    case("refused", refused)
    case("after", lambda: read(DataLoader(whole, **train)))
    print(json.dumps(found), flush=True)
    meet("end")
    os._exit(0)
    """
)


def test_each_rank_ends_with_the_reason_and_none_hangs(pack: Path, ordered_pack: Path) -> None:
    report = run_ranks(DIFFERING, str(pack), str(ordered_pack), size=3)
    wanted = {
        "own": ("reads dataset", "rank 0", "(203 samples", "shared out twice"),
        "cut": ("(68 samples", "shared out twice"),
        "late": ("rank 2 with seed 4", "seed 3"),
        "refused": ("tate version 1", "version 3"),
    }
    for rank, one in enumerate(report):
        for case, words in wanted.items():
            kind, text = one[case]
            assert kind in ("PlanError", "RankFailedError", "ResumeError"), (rank, case, text)
            for word in words:
                assert word in text.replace("Rank", "rank"), (rank, case)
        assert one["alone"] == ["done", 69 if rank == 0 else None]
        assert one["after"] == ["done", 66]


# 2 replicas of 2 processes, with caches that serve one another, and then 4 of one each.
REPLICAS = textwrap.dedent(
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
        report = run_ranks(REPLICAS, f"{remote.url}/{pack.name}", str(tmp_path), size=4)
    for name in ("mesh", "resumed", "numbers"):
        steps = [one[name] for one in report]
        assert steps[0] == steps[1], name
        assert steps[2] == steps[3], name
        for first, second in zip(steps[0], steps[2], strict=True):
            assert len(set(first[0]) | set(second[0])) == 24
    batches = {
        name: [sorted(i for r in rows for i in report[r][name][step][0]) for step in range(3)]
        for name, rows in (("resumed", (0, 2)), ("numbers", (0, 2)), ("all", range(4)))
    }
    assert batches["resumed"] == batches["numbers"] == batches["all"]


WAITING = textwrap.dedent(
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
        report = run_ranks(WAITING, f"{fast.url}/{pack.name}", f"{slow.url}/{pack.name}")
    for one in report:
        assert one["before"] == 0
        assert one["heard"] == [2, 2]
        assert one["slowest"] == 1
        assert one["limit"] == "remote"
        assert one["share"] > 0.1
        assert one["line"].startswith("Job: 2 of 2 processes reported. Slowest: rank 1")
