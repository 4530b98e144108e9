"""The trial of members that are killed, replaced, leave and come back without a restart."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from benchmarks.cluster_job import Cluster, Sizes, cluster, end, load
from benchmarks.cluster_judge import Judge
from benchmarks.hosts import TALK_DEVICE
from penstock import DataLoader, Dataset, World

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

_PORT = 29_399
_LIMIT_S = 240.0
_GOES_ON_S = 30.0  # survivors of a kill have made the next step by then


@dataclass(slots=True)
class Manager:
    """The manager of the job: its store, and a process for each node that is or will
    be a member."""

    job: Cluster
    out: Path
    store: subprocess.Popen[str]
    members: dict[int, subprocess.Popen[str]] = field(default_factory=dict)
    quorums: list[dict[str, Any]] = field(default_factory=list)

    def ask(self, name: str, *words: Any) -> Any:
        """Return the result of a method of the store."""
        assert self.store.stdin is not None
        assert self.store.stdout is not None
        self.store.stdin.write(json.dumps([name, *words]) + "\n")
        self.store.stdin.flush()
        line = self.store.stdout.readline()
        if not line:
            raise RuntimeError(f"The store of the members doesn't answer.\n{self.logs()}")
        return json.loads(line)

    def logs(self) -> str:
        """Return the last output of the members."""
        logs = sorted(self.out.glob("node-*.log"))
        return "\n".join(f"{path.name}: {path.read_text()[-1500:]}" for path in logs)

    def start(self, node: int) -> None:
        """Start a member, which waits until it is in a quorum."""
        words = [*self.job.words(node), "--out", str(self.out), "--node", str(node)]
        words += ["--manager", f"{self.job.made[-1].talk_address}:{_PORT}"]
        with (self.out / f"node-{node}.log").open("a") as log:
            self.members[node] = self.job.made[node].start(
                [sys.executable, "-m", "benchmarks.cluster_member", *words],
                env={"GLOO_SOCKET_IFNAME": TALK_DEVICE, "OMP_NUM_THREADS": "1"},
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def wait(self, key: str) -> None:
        """Wait for a key; fail if a member has ended."""
        until = time.monotonic() + _LIMIT_S
        while not self.ask("check", [key]):
            for node, member in self.members.items():
                if member.poll() is not None:
                    raise RuntimeError(f"node {node} ended: {member.poll()}\n{self.logs()}")
            if time.monotonic() > until:
                raise RuntimeError(f"{key} wasn't set within {_LIMIT_S:.0f} s\n{self.logs()}")
            time.sleep(0.05)

    def quorum(self, members: Sequence[int], *, step: int, new: Sequence[int] = ()) -> int:
        """Announce the members from a step on; return the number of this quorum."""
        number = len(self.quorums)
        tells = next((node for node in members if node not in new), None)
        report = {"members": members, "step": step, "new": new, "tells": tells}
        self.quorums.append(report)
        self.ask("set", f"quorum-{number}", json.dumps(report))
        return number

    def make_steps(self, count: int) -> None:
        """Wait until this quorum has committed so many steps."""
        self.wait(f"step-{len(self.quorums) - 1}-{self.quorums[-1]['step'] + count - 1}")

    def end_quorum(self) -> int:
        """End this quorum after its current step; return the next step."""
        number = len(self.quorums) - 1
        self.ask("set", f"end-{number}", "")
        self.wait(f"ended-{number}")
        return int(self.ask("get", f"ended-{number}"))

    def lose(self, node: int, *, is_cut: bool = False) -> float:
        """Kill a whole node and return the time. is_cut: packets to it are dropped, too."""
        host = self.job.made[node]
        if is_cut:
            host.cut_off()
        host.kill()
        self.members.pop(node).wait()
        return time.monotonic()

    def break_step(self) -> int:
        """Mark the current step as not committed, because a member is lost; return its number."""
        number = len(self.quorums) - 1
        step = int(self.quorums[-1]["step"])
        while self.ask("compare_set", f"step-{number}-{step}", "", "broken") != "broken":
            step += 1
        return step

    def end(self) -> list[int]:
        """End the job; return the members' exit statuses."""
        self.ask("set", f"quorum-{len(self.quorums)}", "null")
        return [member.wait(_LIMIT_S) for member in self.members.values()]

    def report(self) -> list[dict[str, Any]]:
        """Return the records of all members, including killed ones."""
        lines = []
        for path in sorted(self.out.glob("member-*.jsonl")):
            node = int(path.name.split("-")[1])
            whole = [line for line in path.read_text().splitlines() if line.endswith("}")]
            lines += [{"node": node, **json.loads(line)} for line in whole]
        return lines


@contextmanager
def manager(job: Cluster, *, steps: int) -> Iterator[Manager]:
    """Run the store of the members on the remote's host; kill all members afterwards."""
    out = job.folder / "members"
    out.mkdir()
    host = job.made[-1]
    store = host.start(
        [sys.executable, "-m", "benchmarks.cluster_manager", host.talk_address, str(_PORT)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    made = Manager(job, out, store)
    try:
        assert store.stdout is not None
        if store.stdout.readline() != "serves\n":
            raise RuntimeError("The store of the members didn't begin.")
        made.ask("set", "steps", str(steps))
        yield made
    finally:
        for number, member in made.members.items():
            job.made[number].kill()
            member.wait()
        store.kill()
        end(store)


def rejoin(*, tls: bool = False) -> dict[str, Any]:
    """Run `rejoin` with 4 nodes for three epochs: one is killed, three continue, a cold one joins;
    another is killed, cut off and replaced at once; one leaves and comes back."""
    sizes = Sizes()
    steps = 3 * sizes.steps
    with cluster(6, sizes, cache_share=0.5, tls=tls) as job, manager(job, steps=steps) as members:
        past = _Past(job)
        for node in range(6):  # two of them are spares
            members.start(node)
        for node in range(6):
            members.wait(f"ready-{node}")
        past.note("before the first step")
        members.quorum([0, 1, 2, 3], step=0)
        members.make_steps(sizes.steps + 9)
        past.note("4 nodes, cold, an epoch and 9 steps")
        past.kills.append(members.lose(3))
        members.quorum([0, 1, 2], step=members.break_step())
        past.lost.append(job.lose_cache(3))
        members.make_steps(20)
        past.note("one killed, three go on")
        members.quorum([2, 0, 4, 1], step=members.end_quorum(), new=[4])
        members.make_steps(18)
        past.note("a cold one joins, ranks dealt anew")
        past.kills.append(members.lose(1, is_cut=True))
        members.quorum([2, 0, 4, 5], step=members.break_step(), new=[5])
        past.lost.append(job.lose_cache(1))
        members.make_steps(12)
        past.note("one killed, replaced at once by a cold one")
        past.lost.append(job.held_bytes(0))
        members.quorum([2, 4, 5], step=members.end_quorum())
        members.make_steps(8)
        members.quorum([5, 2, 0, 4], step=members.end_quorum(), new=[0])
        members.wait(f"ended-{len(members.quorums) - 1}")
        past.note("one leaves with its cache, and comes back")
        return {"tls": tls, **_judged(members, past)}


@dataclass(slots=True)
class _Past:
    """The history of the job.

    sent_bytes: of the remote until each note. lost: bytes of the nodes that were lost. kills: times
    at which nodes were killed.
    """

    job: Cluster
    sent_bytes: dict[str, int] = field(default_factory=dict)
    lost: list[int] = field(default_factory=list)
    kills: list[float] = field(default_factory=list)

    def note(self, what: str) -> None:
        """Record an event and the bytes that it cost."""
        self.sent_bytes[what] = self.job.sent_bytes()
        print(f"   {what}: {self.shares()[what]:.3f} x dataset from the remote", flush=True)

    def shares(self) -> dict[str, float]:
        """Return the bytes that the remote sent between notes, as shares of the dataset."""
        before = [0, *self.sent_bytes.values()]
        return {
            what: (sent - last) / self.job.data_bytes
            for (what, sent), last in zip(self.sent_bytes.items(), before, strict=False)
        }


def _judged(members: Manager, past: _Past) -> dict[str, Any]:
    """Return the recorded facts."""
    judge, job, share = Judge(), past.job, past.shares()
    statuses, report = members.end(), members.report()
    judge.holds("all members that weren't killed ended well", held=not any(statuses))
    judge.holds("committed steps' ids are an uninterrupted job's", held=_is_exact(job, report))
    lost = [one / job.data_bytes for one in past.lost]
    bounds = [1.02 * lost[0], 0.02, 1.02 * lost[1], 1.02 * lost[2]]
    for (what, got), most in zip(list(share.items())[2:], bounds, strict=True):
        judge.at_most(f"{what}: remote, x dataset", got, most)
    judge.at_most("all, remote, x dataset", sum(share.values()), 1.05 + sum(lost))
    quorums = [line for line in report if "rejoin_s" in line]
    joined = sum(line["peers"] for line in quorums if line["quorum"] == 2) / job.data_bytes
    judge.at_least("dealt anew, from peers, x dataset", joined, 0.2)
    goes_on = [_next_step(report, at) - at for at in past.kills]
    for what, seconds in zip(("killed", "killed and cut off"), goes_on, strict=True):
        judge.at_most(f"{what}: the next step, s later", seconds, _GOES_ON_S)
    found = [
        {**one, "measured": [line for line in quorums if line["quorum"] == number]}
        for number, one in enumerate(members.quorums)
    ]
    print(f"   who was lost held {_rounded(lost)}; rejoin, first batch, slowest batch, s:")
    for one in found:
        worst = [max(line[key] for line in one["measured"]) for key in _SECONDS]
        print(f"   {one['members']}: {_rounded(worst)}")
    return {
        "dataset_bytes": job.data_bytes,
        "remote_share": share,
        "lost_share": lost,
        "goes_on_s": goes_on,
        "quorums": found,
        "load": load(),
        "judged": judge.lines,
    }


_SECONDS = ("rejoin_s", "first_wait_s", "slowest_wait_s")


def _rounded(figures: Sequence[float]) -> str:
    return " ".join(f"{one:.2f}" for one in figures)


def _next_step(report: Sequence[dict[str, Any]], at: float) -> float:
    steps = (line["at"] for line in report if "committed" in line and line["at"] > at)
    return min(steps, default=1e9)


def _is_exact(job: Cluster, report: Sequence[dict[str, Any]]) -> bool:
    """Return True if the committed steps are the global batches of an undisturbed job."""
    committed = {(line["quorum"], line["committed"]) for line in report if "committed" in line}
    steps: dict[int, Counter[int]] = {}
    for line in report:
        if "step" in line and (line["quorum"], line["step"]) in committed:
            steps.setdefault(line["step"], Counter()).update(line["ids"])
    found = [sorted(steps[step].elements()) for step in sorted(steps)]
    if sorted(steps) != list(range(len(steps))):
        return False
    wanted: list[list[int]] = []
    with DataLoader(
        Dataset(job.folder / "data", fields=("id",)),
        global_batch_size=job.sizes.batch,
        shuffle=True,
        drop_last=True,
        seed=7,
        world=World(0, 1),
    ) as loader:
        while len(wanted) < len(found):
            wanted += [sorted(ids.tolist()) for (ids,) in loader]
    return found == wanted
