"""Real processes that are killed and replaced, within the job (as torchft does) and by torchrun."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from penstock.pipeline import DataLoader, World
from penstock.readers import Dataset
from tests.pipeline.ranks import forked
from tests.watchdog import PATIENCE_S

ROOT = Path(__file__).resolve().parents[2]
B = 30

# A member of a job whose manager (the test) sets its members from a step on: a quorum. Each
# step is committed by all members or by none.
MEMBER = textwrap.dedent(
    """
    import json, sys
    from datetime import timedelta
    import torch.distributed as dist
    from penstock.pipeline import DataLoader, World
    from penstock.readers import Dataset

    own, port, pack = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    store = dist.TCPStore("127.0.0.1", port, None, False, timeout=timedelta(seconds=60))
    loader = DataLoader(
        Dataset(pack, fields=("id",)), global_batch_size=30, shuffle=True, seed=5, drop_last=True,
        world=World(0, 1),
    )
    number, has_begun = 0, False

    def commit(step, ids):
        "Whether all came to the end of this step."
        if told["victim"] == [own, step]:
            store.set("victim waits", "")
            store.wait(["for ever"], timedelta(seconds=600))
        key = f"step-{number}-{step}"
        if store.add(f"{key}-count", 1) == len(told["members"]):
            store.compare_set(key, "", "ok")
        if store.get(key) != b"ok":
            return False
        print(json.dumps([step, ids]), flush=True)
        return True

    while (told := json.loads(store.get(f"quorum-{number}"))):
        members, step, until = told["members"], told["step"], told["until"]
        if own in members:
            if told["new"] == own:
                loader.load_state_dict(json.loads(store.get(f"state-{number}")))
            elif own == members[0]:
                store.set(f"state-{number}", json.dumps(loader.state_dict()))
            loader.rejoin(
                World(members.index(own), len(members)),
                step=step,
                store=dist.PrefixStore(f"ranks-{number}", store),
            )
            goes_on = True
            while goes_on and loader.step < until:
                for (ids,) in loader:
                    goes_on = commit(loader.step - 1, ids.tolist())
                    if not goes_on or loader.step >= until:
                        break
        number += 1
    """
)


def global_batches(pack: Path, count: int) -> list[list[int]]:
    """Return the global batches of a job without failures."""
    found: list[list[int]] = []
    with DataLoader(
        Dataset(pack, fields=("id",)),
        global_batch_size=B,
        shuffle=True,
        seed=5,
        drop_last=True,
        world=World(0, 1),
    ) as loader:
        while len(found) < count:
            found += [sorted(ids.tolist()) for (ids,) in loader]
    return found[:count]


def test_a_member_is_killed_and_later_replaced_while_the_others_continue(pack: Path) -> None:
    server: Any = dist.TCPStore(  # type: ignore[attr-defined]
        "127.0.0.1", 0, None, True, timedelta(seconds=60), wait_for_workers=False
    )
    children: list[tuple[list[str], dict[str, str]]] = [
        ([str(number), str(server.port), str(pack)], {}) for number in range(4)
    ]

    def quorum(number: int, who: list[int], *, step: int, until: int, **more: Any) -> None:
        report = {"members": who, "step": step, "until": until, "victim": None, "new": None, **more}
        server.set(f"quorum-{number}", json.dumps(report))

    with forked(MEMBER, children) as members:
        quorum(0, [0, 1, 2], step=0, until=99, victim=[1, 4])
        server.wait(["victim waits"], timedelta(seconds=PATIENCE_S))
        os.kill(members.pids[1], signal.SIGKILL)
        # As the manager does: the step isn't committed, and the remaining members repeat it.
        assert server.compare_set("step-0-4", "", "broken") == b"broken"
        quorum(1, [0, 2], step=4, until=8)
        quorum(2, [2, 3, 0], step=8, until=14, new=3)
        server.set("quorum-3", "null")
        done = members.done()
    assert [code for code, _, _ in done] == [0, -signal.SIGKILL, 0, 0], done
    committed: dict[int, list[int]] = {}
    for _, out, _ in done:
        for line in out.splitlines():
            step, ids = json.loads(line)
            committed.setdefault(step, []).extend(ids)
    found = [sorted(committed[step]) for step in sorted(committed)]
    assert found == global_batches(pack, 14)


TRAINER = textwrap.dedent(
    """
    import json, os, signal, sys
    from datetime import timedelta
    from pathlib import Path
    import torch.distributed as dist
    from penstock.pipeline import DataLoader
    from penstock.readers import Dataset

    pack, out = sys.argv[1], Path(sys.argv[2])
    rank, attempt = int(os.environ["RANK"]), os.environ["TORCHELASTIC_RESTART_COUNT"]
    server = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), None, False)
    store, state = dist.PrefixStore(f"attempt-{attempt}", server), out / "state.json"

    def barrier(step):  # like a collective of the step
        store.set(f"{step}-{rank}", "")
        store.wait([f"{step}-0", f"{step}-1"], timedelta(seconds=60))

    with DataLoader(
        Dataset(pack, fields=("id",)), global_batch_size=30, shuffle=True, seed=5, drop_last=True
    ) as loader:
        if state.exists():
            loader.load_state_dict(json.loads(state.read_text()))
        while loader.step < 10:
            for (ids,) in loader:
                step = loader.step - 1
                if rank == 1 and step == 4 and attempt == "0":
                    os.kill(os.getpid(), signal.SIGKILL)
                (out / f"{step}-{rank}.json").write_text(json.dumps(ids.tolist()))
                barrier(step)
                if rank == 0:
                    (out / "half").write_text(json.dumps(loader.state_dict()))
                    (out / "half").replace(state)
                if loader.step >= 10:
                    break
    barrier("end")
    """
)


@pytest.mark.grid
def test_torchrun_restarts_continue_from_the_state(pack: Path, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(TRAINER)
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node=2", "--max-restarts=1", "--monitor-interval=0.1"),
            *(str(script), str(pack), str(tmp_path)),
        ],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=3 * PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = [
        sorted(sum((json.loads((tmp_path / f"{s}-{r}.json").read_text()) for r in (0, 1)), []))  # noqa: RUF017
        for s in range(10)
    ]
    assert found == global_batches(pack, 10)
