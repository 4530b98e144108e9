"""Real processes whose ranks come late, raise an error, or read other data than the others."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

from tests.pipeline.ranks import run_ranks

if TYPE_CHECKING:
    from pathlib import Path

# One group for all: each case has loaders of its own, and ranks meet between two cases.
SCRIPT = textwrap.dedent(
    """
    import json, os, sys, warnings
    import torch.distributed as dist
    from penstock.pipeline import DataLoader, World
    import penstock.pipeline.members.handshake as handshake
    from penstock.readers import Dataset

    warnings.simplefilter("ignore")
    handshake.MEET_TIMEOUT_S = 0.2
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


def test_each_rank_ends_with_the_reason_and_nobody_hangs(pack: Path, ordered_pack: Path) -> None:
    told = run_ranks(SCRIPT, str(pack), str(ordered_pack), size=3)
    wanted = {
        "own": ("reads dataset", "rank 0", "(203 samples", "shared out twice"),
        "cut": ("(68 samples", "shared out twice"),
        "late": ("rank 2 with seed 4", "seed 3"),
        "refused": ("tate version 1", "version 3"),
    }
    for rank, one in enumerate(told):
        for case, words in wanted.items():
            kind, text = one[case]
            assert kind in ("PlanError", "RankFailedError", "ResumeError"), (rank, case, text)
            for word in words:
                assert word in text.replace("Rank", "rank"), (rank, case)
        assert one["alone"] == ["done", 69 if rank == 0 else None]
        assert one["after"] == ["done", 66]
