"""Two processes agree through the store: same plans, one count of bad samples, one end for all."""

from __future__ import annotations

import json
import os
import socket
import textwrap
from typing import TYPE_CHECKING, Any

import pytest

from tests.pipeline.feed.test_bad_samples import build
from tests.warm import ROOT, Warm

if TYPE_CHECKING:
    from pathlib import Path

SCRIPT = textwrap.dedent(
    """
    import json, os, select, sys, warnings
    from datetime import timedelta
    import torch.distributed as dist
    from penstock.augment import imagenet_eval
    from penstock.pipeline import DataLoader
    from penstock.pipeline.members import JobMembership
    from penstock.readers import Dataset

    warnings.simplefilter("ignore")
    rank, store, path, case = int(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4]
    # Rank 0 holds the store, and takes it away when it ends.
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    options = dict(
        batch_size=5, shuffle=True, seed=3, drop_last=True, augment=imagenet_eval(16, resize=20),
        num_workers=1, max_bad=1 / 40,
    )
    if case == "limit":
        options["max_bad"] = float(rank)  # rank 0 alone ends the job, by its first bad sample
    if case == "seed":
        options["seed"] += rank
    data = Dataset(path, fields=("image", "id"))
    if case == "twice":
        data = data.subset(range(rank, 40, 2))
    if case == "validation" and rank == 0:
        with DataLoader(Dataset(path), **{**options, "shuffle": False}) as own:
            next(iter(own))
    steps, told, states, ending = 0, {}, [], False
    # In "limit" rank 1 takes each batch first, so that it can't have heard of the end; then rank 0
    # asks for the next one first, and exits at once if it may.
    store = dist.distributed_c10d._get_default_store()
    if rank == 0:
        store.set("pid", str(os.getpid()))
    rank_0 = os.pidfd_open(int(store.get("pid")))
    stop, end_together = JobMembership.stop, JobMembership.end_together

    def stopping(self, notice):
        global ending
        ending = True
        stop(self, notice)

    def waiting(self):
        store.set("rank 0", "waits")
        end_together(self)

    if case == "limit" and rank == 0:
        JobMembership.stop, JobMembership.end_together = stopping, waiting

    def step(batches):
        global steps
        if case == "limit" and rank == 0 and not ending:
            store.wait([f"took {steps}"])
        batch = next(batches, None)
        if case == "limit" and rank == 1:
            store.set(f"took {steps}", "")
        if batch is None:
            return False
        steps += 1
        dist.barrier()  # as a training step's gradients would
        if case != "validation" or rank == 0:  # one rank alone may ask
            states.append(loader.state_dict())
        if case == "limit" and rank == 0:
            store.set(f"after {steps}", "ends" if ending else "goes on")
        if case == "limit" and rank == 1 and store.get(f"after {steps}") == b"ends":
            if store.get("rank 0") == b"exits":
                select.select([rank_0], [], [])
        return True

    try:
        with DataLoader(data, **options) as loader:
            if case in ("seed", "twice"):
                store.set(f"built {rank}", "")
                store.wait([f"built {1 - rank}"], timedelta(seconds=300))
            if case == "fails" and rank == 1:
                def fail(*_, **__):
                    raise OSError("planted")
                Dataset.read = fail
            for epoch in range(9):
                batches = iter(loader)
                while step(batches):
                    pass
    except Exception as error:
        told = {
            "type": type(error).__name__,
            "text": str(error),
            "ids": getattr(error, "sample_ids", ()),
        }
    print(json.dumps({"steps": steps, "states": states, **told}), flush=True)
    if case in ("seed", "twice"):  # the store stays until both have ended
        store.set(f"built {rank}", "")
        store.set(f"ended {rank}", "")
        store.wait([f"ended {1 - rank}"], timedelta(seconds=300))
    if case == "limit":
        if rank == 0:
            store.compare_set("rank 0", "", "exits")
        os._exit(0)
    """
)


def two_ranks(path: Path, case: str) -> list[dict[str, Any]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        store = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
    told_all = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    processes = [
        Warm(["-c", SCRIPT, rank, store, path, case], cwd=ROOT, env=told_all) for rank in range(2)
    ]
    told = []
    try:
        for process in processes:
            out, errors = process.communicate()
            assert out, errors
            told.append(json.loads(out.splitlines()[-1]))
    finally:
        for process in processes:
            process.kill()
    return told


@pytest.fixture(scope="module")
def damaged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """40 samples, 4 of them bad."""
    return build(tmp_path_factory.mktemp("two") / "set", {3, 11, 22, 31}, samples=40)


class TestTwoProcesses:
    def test_past_the_limit_both_end_at_the_same_step_with_the_list_and_the_same_states(
        self, damaged: Path
    ) -> None:
        first, second = two_ranks(damaged, "limit")
        assert first["type"] == second["type"] == "TooManyBadSamplesError"
        assert first["steps"] == second["steps"] > 0
        assert first["ids"]
        assert set(first["ids"]) <= set(second["ids"])
        assert "passed the limit" in first["text"]
        assert first["states"] == second["states"]
        # Every rank told before the barrier that the states are taken behind.
        counts = [state["bad"] for state in first["states"]]
        assert counts == sorted(counts)
        assert counts[-1] >= 1

    def test_another_seed_is_refused_at_the_start(self, damaged: Path) -> None:
        told = two_ranks(damaged, "seed")
        assert sorted(t["type"] for t in told) == ["PlanError", "RankFailedError"]
        assert all("seed 3" in t["text"] and "seed 4" in t["text"] for t in told)

    def test_a_dataset_that_each_rank_cut_for_itself_is_refused_on_each(
        self, damaged: Path
    ) -> None:
        told = two_ranks(damaged, "twice")
        assert sorted(t["type"] for t in told) == ["PlanError", "RankFailedError"]
        assert all("shared out twice" in t["text"] for t in told)

    def test_rank_0_alone_may_build_another_loader(self, damaged: Path) -> None:
        first, second = two_ranks(damaged, "validation")
        assert first["type"] == second["type"] == "TooManyBadSamplesError"
        assert first["steps"] == second["steps"]

    def test_a_rank_that_fails_ends_the_other(self, damaged: Path) -> None:
        first, second = two_ranks(damaged, "fails")
        assert second["type"] == "OSError"
        # It waits in a collective or asks for its next batch: either way it ends.
        assert first["type"] in ("RankFailedError", "RuntimeError", "DistBackendError")
