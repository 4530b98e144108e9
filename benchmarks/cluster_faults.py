"""Trials of nodes that serve others and fail, and of the cost of serving."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.cluster_job import PEER_PORT, Cluster, Meanwhile, Sizes, cluster, end, load
from benchmarks.cluster_judge import Judge, facts

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Iterator

    from benchmarks.hosts import Host

_FULL = 3  # the node that has the whole dataset, in addition to the job's three
_SLOW_BITS = 1e6
_SLOWEST_S = 30.0  # that a step may wait, as long as survivors of a lost rank have to end
_TICKS = os.sysconf("SC_CLK_TCK")


def faults() -> dict[str, Any]:
    """Run `faults`: a node that has the whole dataset and isn't part of the job is slow, cut off,
    or killed repeatedly."""
    judge, sizes = Judge(), Sizes(samples=2_016)
    found: dict[str, Any] = {}
    trials: tuple[tuple[str, int, Callable[[Host, threading.Event], None]], ...] = (
        ("as it should be", 0, lambda _host, _over: None),
        ("slow: it sends 1 Mbit/s", 0, lambda host, _over: host.set_send_rate(_SLOW_BITS)),
        ("cut off in mid-epoch", 5, lambda host, _over: host.cut_off()),
        ("server killed again and again", 0, _kill_servers),
    )
    for name, step, do in trials:
        with cluster(4, sizes, link=2e8) as job, full_node(job, _FULL):
            host = job.made[_FULL]
            meanwhile = Meanwhile(step, functools.partial(do, host))
            run = job.run(name, [0, 1, 2], "--epochs", "2", *shared(job), meanwhile=meanwhile)
            slowest = [max(rank["epochs"][0]["first_wait_s"] for rank in run.ranks)]
            slowest += [max(w) for w in zip(*run.epochs("slowest_wait_s"), strict=True)]
            peers = sum(sum(of_rank) for of_rank in run.epochs("bytes_peers"))
            failed = sum(sum(of_rank) for of_rank in run.epochs("peer_failed"))
            judge.holds(f"{name}: each sample once", held=job.is_exact(range(2)))
            judge.at_most(f"{name}: slowest step's wait, s", max(slowest), _SLOWEST_S)
            found[name] = {
                "slowest_wait_s": slowest,
                "peers_share": peers / job.data_bytes,
                "peer_failed": failed,
                **facts(job, Judge(), [run]),
            }
            print(f"   from peers {peers / job.data_bytes:.3f} x dataset, {failed} failed")
    return {"trials": found, "load": load(), "judged": judge.lines}


def _kill_servers(host: Host, over: threading.Event) -> None:
    while not over.wait(0.5):
        for pid in servers(host):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def servers(host: Host) -> list[int]:
    """Return the processes on a host that serve its cache."""
    found = []
    for pid in host.pids():
        with suppress(OSError):
            words = Path(f"/proc/{pid}/cmdline").read_bytes()
            if b"penstock-peer-server" in words:
                found.append(pid)
    return found


def shared(job: Cluster) -> list[str]:
    """Return the options that all nodes receive: the addresses of the others, and the secret."""
    token = job.folder / "token"
    if not token.exists():
        token.touch(0o600)
        token.write_text("of this trial alone, for its four nodes")
    nodes = ",".join(f"{host.address}:{PEER_PORT}" for host in job.made[:-1])
    return ["--nodes", nodes, "--token-file", str(token)]


@contextmanager
def full_node(job: Cluster, node: int) -> Iterator[None]:
    """Run a node that has the whole dataset in its cache and only serves it."""
    words = [*job.words(node), "--step-s", "0", *shared(job), "--serve"]
    with (job.folder / "full.log").open("w") as log:
        child = job.made[node].start(
            [sys.executable, "-m", "benchmarks.cluster_child", *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
        )
    try:
        assert child.stdout is not None
        if child.stdout.readline() != "serves\n":
            raise RuntimeError(f"no node served:\n{(job.folder / 'full.log').read_text()[-4000:]}")
        yield
    finally:
        job.made[node].kill()
        end(child)


def cpu() -> dict[str, Any]:
    """Measure the CPU-seconds per GB of filling a cache from another node, on both sides, and from
    the store."""
    judge, sizes = Judge(), Sizes(samples=12_096, shard_bytes=2**25)
    rows: dict[str, list[tuple[float, float]]] = {"peers": [], "store": []}
    with cluster(4, sizes) as job, full_node(job, _FULL):
        (server,) = servers(job.made[_FULL])
        for number in range(3):
            for kind, of_kind in rows.items():
                job.peers = kind == "peers"
                of_kind.append(_filled(job, number, server))
                print(f"   from {kind}: client, server {of_kind[-1]} CPU-s a GB", flush=True)
                job.lose_cache(number)
        both = sorted(client + served for client, served in rows["peers"])
        judge.at_most("CPU-s a GB, both sides, median", both[1], 0.8)
        return {"cpu_s_per_gb": rows, "judged": judge.lines, "load": load()}


def _filled(job: Cluster, node: int, server: int) -> tuple[float, float]:
    """Return the CPU-seconds per GB of filling a node's cache, and of the full node's server
    meanwhile."""
    words = [*job.words(node), *(shared(job) if job.peers else []), "--warm"]
    before_s = _cpu_s(server)
    child = job.made[node].start(
        [sys.executable, "-m", "benchmarks.cluster_child", *words], stdout=subprocess.PIPE
    )
    out, _ = child.communicate(timeout=120)
    size_bytes, half_bytes, client_s = out.split()[:3]
    return (
        float(client_s) / (int(half_bytes) / 1e9),
        (_cpu_s(server) - before_s) / (int(size_bytes) / 1e9),
    )


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS
