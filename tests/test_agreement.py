"""Ranks agree through the store: same plans, one count of bad samples, one end for all."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from cache.errors import PenstockWarning, PlanError
from pipeline.agreement import Agreement, check_same_plan, join
from tests.test_bad_samples import build


def pair(store: Any = None) -> tuple[Agreement, Agreement]:
    store = store or dist.HashStore()  # type: ignore[attr-defined]
    return Agreement(store, name="x", rank=0), Agreement(store, name="x", rank=1)


class TestAgreement:
    def test_counts_are_everyones(self) -> None:
        first, second = pair()
        assert [first.add("bad", 2), second.add("bad", 3), first.add("bad", 0)] == [2, 5, 5]

    def test_the_first_notice_reaches_all(self) -> None:
        first, second = pair()
        assert first.stopped() is None
        assert second.stopped() is None
        second.stop({"rank": 1})
        first.stop({"rank": 0})
        assert first.stopped() is not None
        assert Agreement(second._store, name="x").stopped() == {"rank": 1}

    def test_a_restored_job_forgets_the_notice(self) -> None:
        first, second = pair()
        first.stop({"rank": 0})
        first.begin()
        second.begin()
        assert first.stopped() is None
        assert second.stopped() is None

    def test_other_seeds_and_worlds_are_refused_by_name(self) -> None:
        first, second = pair()
        check_same_plan(first, plan="p", seed=1, size=2)
        check_same_plan(second, plan="p", seed=1, size=2)
        with pytest.raises(PlanError, match=r"Rank 0 .*seed 1 for 2 ranks.*seed 2 for 3 ranks"):
            check_same_plan(second, plan="p", seed=2, size=3)

    def test_alone_it_agrees_with_itself(self) -> None:
        alone = join(dataset="d", shuffle=True, rank=0)
        assert not alone.is_shared
        check_same_plan(alone, plan="p", seed=1, size=2)
        assert [alone.add("bad", 2), alone.add("bad", 1)] == [2, 3]
        alone.stop({"rank": 0})
        assert alone.stopped() == {"rank": 0}

    def test_a_store_that_is_gone_costs_one_warning(self) -> None:
        class Gone:
            def __getattr__(self, name: str) -> Any:
                def fail(*_: object) -> None:
                    raise RuntimeError("Connection reset by peer")

                return fail

        agreement, _ = pair(Gone())
        with pytest.warns(PenstockWarning, match="Connection reset by peer"):
            assert agreement.stopped() is None
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert agreement.add("bad", 2) == 2
            agreement.stop({"rank": 0})
            assert agreement.stopped() == {"rank": 0}


SCRIPT = textwrap.dedent(
    """
    import json, sys, warnings
    import torch.distributed as dist
    from augment import imagenet_eval
    from cache.errors import PenstockError
    from pipeline import DataLoader
    from readers import Dataset

    warnings.simplefilter("ignore")
    rank, store, path, case = int(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4]
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    options = dict(
        batch_size=5, shuffle=True, seed=3, drop_last=True, augment=imagenet_eval(16, resize=20),
        num_workers=1, max_bad=1 / 40,
    )
    if case == "seed":
        options["seed"] += rank
    if case == "validation" and rank == 0:
        with DataLoader(Dataset(path), **{**options, "shuffle": False}) as own:
            next(iter(own))
    steps, told = 0, {}
    try:
        with DataLoader(Dataset(path, fields=("image", "id")), **options) as loader:
            if case == "fails" and rank == 1:
                def fail(*_, **__):
                    raise OSError("planted")
                Dataset.read = fail
            for epoch in range(9):
                for _ in loader:
                    steps += 1
                    dist.barrier()  # as a training step's gradients would
    except Exception as error:
        told = {
            "type": type(error).__name__,
            "text": str(error),
            "ids": getattr(error, "sample_ids", ()),
        }
    print(json.dumps({"steps": steps, **told}), flush=True)
    if case in ("limit", "validation"):  # who leaves first would close the other's connections
        ends = dist.FileStore(store + "-ends", 2)
        ends.set(str(rank), "ended")
        ends.wait(["0", "1"])
    """
)


def two_ranks(tmp_path: Path, path: Path, case: str) -> list[dict[str, Any]]:
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(rank), str(tmp_path / "store"), str(path), case],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parent.parent,
        )
        for rank in range(2)
    ]
    told = []
    try:
        for process in processes:
            out, errors = process.communicate(timeout=90)
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
    def test_past_the_limit_both_end_at_the_same_step_with_the_list(
        self, damaged: Path, tmp_path: Path
    ) -> None:
        first, second = two_ranks(tmp_path, damaged, "limit")
        assert first["type"] == second["type"] == "TooManyBadSamplesError"
        assert first["steps"] == second["steps"] > 0
        assert len(set(first["ids"]) | set(second["ids"])) >= 2
        assert "passed the limit" in first["text"]

    def test_another_seed_is_refused_at_the_start(self, damaged: Path, tmp_path: Path) -> None:
        told = two_ranks(tmp_path, damaged, "seed")
        assert sorted(t.get("type", "") for t in told).count("PlanError") >= 1
        assert any("seed 3" in t.get("text", "") and "seed 4" in t["text"] for t in told)

    def test_rank_0_alone_may_build_another_loader(self, damaged: Path, tmp_path: Path) -> None:
        first, second = two_ranks(tmp_path, damaged, "validation")
        assert first["type"] == second["type"] == "TooManyBadSamplesError"
        assert first["steps"] == second["steps"]

    def test_a_rank_that_fails_ends_the_other(self, damaged: Path, tmp_path: Path) -> None:
        first, second = two_ranks(tmp_path, damaged, "fails")
        assert second["type"] == "OSError"
        # It waits in a collective or asks for its next batch: either way it ends.
        assert first["type"] in ("RankFailedError", "RuntimeError", "DistBackendError")
