"""Real processes in a gloo group: exactly once in evaluation, equal steps in training."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.pipeline.ranks import forked, free_port, rank_variables

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
    told = run(size, pack, tmp_path)
    assert [code for code, _ in told] == [0] * size, told
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
    told = run(2, pack, tmp_path, wrong_seed=True)
    assert all(code for code, _ in told)
    words = "".join(errors for _, errors in told)
    assert "PlanError" in words
    assert "seed" in words
