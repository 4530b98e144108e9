"""Trials of a job with one odd node: its clock, link, disk or settings are wrong, or it stands
still."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import subprocess
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from benchmarks.cluster_faults import servers, shared
from benchmarks.cluster_job import PEER_PORT, Cluster, Meanwhile, Sizes, cluster, load
from benchmarks.cluster_judge import Judge, facts
from benchmarks.hosts import Host

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Iterator

    from benchmarks.cluster_job import Outcome

_ODD = 3  # the node
_LINK_BITS = 2e8
_PAUSE_S = 30.0
_SLOWEST_S = 30.0  # limit of the wait of a step, without a pause
_CLOCK = "import time\n_now = time.time\ntime.time = lambda: _now() + 3600.0\n"


@dataclass(frozen=True, slots=True)
class Odd:
    """A trial.

    make: makes the node odd before the job starts, until it has ended. do: makes it odd from the
    middle of the second epoch on. begins: True if the job starts with the node. pause_s: for which
    all ranks stand. says: text that a node must have reported.
    """

    name: str
    make: Callable[[Cluster], contextlib.AbstractContextManager[None]] | None = None
    do: Callable[[Host], None] | None = None
    pause_s: float = 0.0
    begins: bool = True
    says: str = ""
    words: Callable[[Cluster], list[str]] | None = None
    failed: list[str] = field(default_factory=list)


def odd() -> dict[str, Any]:
    """Run `odd`: 4 nodes for two epochs in which all shards move, with one odd node."""
    judge, found = Judge(), {}
    for trial in _TRIALS:
        sizes = Sizes(samples=2_016)
        with (
            cluster(4, sizes, link=_LINK_BITS) as job,
            trial.make(job) if trial.make is not None else contextlib.nullcontext(),
        ):
            do = trial.do
            meanwhile = None
            if do is not None:
                meanwhile = Meanwhile(sizes.steps + 4, functools.partial(_do, do, job.made[_ODD]))
            words = ["--epochs", "2", "--reshuffle", "1.0", *(trial.words or _no_words)(job)]
            run = job.run(
                trial.name, range(4), *words, meanwhile=meanwhile, may_fail=not trial.begins
            )
            found[trial.name] = _judged(judge, trial, job, run)
    return {"trials": found, "load": load(), "judged": judge.lines}


def _judged(judge: Judge, trial: Odd, job: Cluster, run: Outcome) -> dict[str, Any]:
    said = _said(job)
    for node, lines in said.items():
        for line in lines:
            print(f"      node {node}: {line[:180]}")
    if trial.says:
        report = any(trial.says in line for lines in said.values() for line in lines)
        judge.holds(f"{trial.name}: a node says {trial.says!r}", held=report)
    if not trial.begins:
        judge.at_most(f"{trial.name}: the job ended, s", run.seconds, 60.0)
        judge.holds(f"{trial.name}: with an error", held=any(run.statuses))
        return {"said": said, **facts(job, Judge(), [run])}
    judge.holds(f"{trial.name}: each sample once", held=job.is_exact(range(2)))
    kinds = ("first_wait_s", "slowest_wait_s")
    slowest = [max(w) for kind in kinds for w in zip(*run.epochs(kind), strict=True)]
    judge.at_most(f"{trial.name}: slowest batch, s", max(slowest), _SLOWEST_S + trial.pause_s)
    others = run.ranks[:_ODD]
    au = [[round(epoch["au"], 1) for epoch in rank["epochs"]] for rank in run.ranks]
    waited = [[round(epoch["waited_s"], 2) for epoch in rank["epochs"]] for rank in run.ranks]
    peers = sum(sum(of_rank) for of_rank in run.epochs("bytes_peers")) / job.data_bytes
    failed = sum(sum(of_rank) for of_rank in run.epochs("peer_failed"))
    print(f"   first batches and slowest others, s {[round(one, 2) for one in slowest]}")
    print(f"   AU % {au}, waited for batches, s {waited}; from peers {peers:.2f}, {failed} failed")
    return {
        "au": au,
        "waited_s": waited,
        "others_waited_s": max(epoch["waited_s"] for rank in others for epoch in rank["epochs"]),
        "first_and_slowest_waits_s": slowest,
        "peers_share": peers,
        "peer_failed": failed,
        "said": said,
        **facts(job, Judge(), [run]),
    }


def _said(job: Cluster) -> dict[int, list[str]]:
    """Return the messages of the nodes about data, each once."""
    found = {}
    for path in sorted((job.folder / f"out-{job.runs}").glob("node-*.log")):
        lines = [line.strip() for line in path.read_text(errors="replace").splitlines()]
        own = [one for one in lines if "Penstock" in one or "penstock.cache.errors" in one]
        found[int(path.stem.split("-")[1])] = list(dict.fromkeys(own))
    return found


def _do(do: Callable[[Host], None], host: Host, _over: threading.Event) -> None:
    do(host)


def _no_words(_: Cluster) -> list[str]:
    return []


@contextlib.contextmanager
def _wrong_clock(job: Cluster) -> Iterator[None]:
    """Set the clock of every Python process of the node an hour ahead."""
    place = job.folder / "clock"
    place.mkdir()
    (place / "sitecustomize.py").write_text(_CLOCK)
    before = os.environ.get("PYTHONPATH", "")
    job.env[_ODD] = {"PYTHONPATH": f"{place}:{before}" if before else str(place)}
    yield


@contextlib.contextmanager
def _slow_link(job: Cluster) -> Iterator[None]:
    """Give the node a hundredth of the bandwidth of the others."""
    job.made[_ODD].set_send_rate(_LINK_BITS / 100)
    yield


@contextlib.contextmanager
def _full_disk(job: Cluster) -> Iterator[None]:
    """Give the node a disk for a tenth of the dataset, less than its cache's limit."""
    place = job.cache(_ODD)
    place.mkdir(mode=0o700)
    size = f"size={job.data_bytes // 10},mode=700"
    subprocess.run(["mount", "-t", "tmpfs", "-o", size, "penstock-trial", place], check=True)
    try:
        yield
    finally:
        job.made[_ODD].kill()
        subprocess.run(["umount", place], check=True)


@contextlib.contextmanager
def _port_in_use(job: Cluster) -> Iterator[None]:
    """Run another program at the port of the node's server."""
    host = job.made[_ODD]
    code = (
        f"import socket, sys; s = socket.create_server(({host.address!r}, {PEER_PORT})); "
        "print('there', flush=True); sys.stdin.read()"
    )
    other = host.start(["python3", "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert other.stdin is not None
    assert other.stdout is not None
    other.stdout.readline()
    try:
        yield
    finally:
        other.stdin.close()
        other.wait(10)
        other.stdout.close()


@contextlib.contextmanager
def _wrong_address(job: Cluster) -> Iterator[None]:
    """Give the node an address at which no machine is."""
    host = job.made[_ODD]
    job.addresses[_ODD] = host.address.rpartition(".")[0] + ".99"
    yield


def _pause(pids: Callable[[Host], list[int]]) -> Callable[[Host], None]:
    def do(host: Host) -> None:
        stopped = pids(host)
        for pid in stopped:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)
        time.sleep(_PAUSE_S)
        for pid in stopped:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    return do


_TRIALS = (
    Odd("as it should be"),
    Odd("its clock is an hour ahead", _wrong_clock),
    Odd("it sends a hundredth of the others", _slow_link),
    Odd("its disk is full", _full_disk, says="disk"),
    Odd("all of it stands for 30 s", do=_pause(Host.pids), pause_s=_PAUSE_S),
    Odd("its server stands for 30 s", do=_pause(servers)),
    Odd("its port is in use, nodes listed", _port_in_use, says="is taken", words=shared),
    Odd("it has another machine's address", _wrong_address, begins=False, says="can't listen at"),
)
