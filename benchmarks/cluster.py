"""`python -m benchmarks.cluster [NAME …]`: jobs of several nodes that come, go and change places.

Each node is a network namespace with a link and a cache of its own (`benchmarks.hosts`), each rank
a process under torchrun with gloo; the remote is an HTTP server on a host of its own, which counts
what it sends. Steps sleep, as all nodes share this machine's cores: so what is measured is bytes,
exactness and whether anybody waits, not speed. Needs root.

    change    three epochs; a plain restart; ranks dealt anew; 4 to 3 to 4 nodes; a node that is
              killed in mid-epoch and replaced by one with an empty cache: remote bytes, ids
    limited   the remote's link has a quarter of what the job takes, the peers' what it takes, and
              all shards move in each epoch: the accelerators' utilisation
    off       `change` without peers
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.hosts import Host, hosts, why_not
from benchmarks.record import write_result
from penstock import pack

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

SAMPLES, SAMPLE_BYTES, SHARD_BYTES = 4_096, 50_000, 2**21
BATCH, STEP_S = 64, 0.1
PORT = 29_400
_PEER_PORT = 7_077
_LIMIT_S = 240


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What one run of the job did: bytes that the remote sent meanwhile, exit statuses by node, how
    long, and what each rank measured."""

    name: str
    remote_bytes: int
    statuses: list[int]
    seconds: float
    ranks: list[dict[str, Any]]


@dataclass(slots=True)
class Cluster:
    """Hosts, the store on the last of them, and the folders of one trial."""

    made: list[Host]
    folder: Path
    url: str
    store: subprocess.Popen[str]
    data_bytes: int
    peers: bool
    runs: int = 0
    delivered: dict[int, Counter[int]] = field(default_factory=dict)

    def sent_bytes(self) -> int:
        """What the remote has sent so far."""
        assert self.store.stdin is not None
        assert self.store.stdout is not None
        self.store.stdin.write("\n")
        self.store.stdin.flush()
        return int(self.store.stdout.readline())

    def cache(self, node: int) -> Path:
        """The cache of a node."""
        return self.folder / f"cache-{node}"

    def run(
        self, name: str, nodes: Sequence[int], *words: str, kill: tuple[int, int] | None = None
    ) -> Outcome:
        """Run the job on these nodes, the first of them with rank 0. kill: (node, step): that node
        is killed once rank 0 has written so many steps."""
        self.runs += 1
        out = self.folder / f"out-{self.runs}"
        out.mkdir()
        before, began = self.sent_bytes(), time.monotonic()
        jobs = {node: self._start(node, rank, nodes, out, words) for rank, node in enumerate(nodes)}
        try:
            if kill is not None:
                self._kill_at(jobs, out, *kill)
            statuses = [
                jobs[node].wait(max(1.0, began + _LIMIT_S - time.monotonic())) for node in nodes
            ]
        finally:
            for node, job in jobs.items():
                self.made[node].kill()
                job.wait()
        ranks = [json.loads(path.read_text()) for path in sorted(out.glob("rank-*.json"))]
        self._count(out)
        outcome = Outcome(
            name=name,
            remote_bytes=self.sent_bytes() - before,
            statuses=statuses,
            seconds=time.monotonic() - began,
            ranks=ranks,
        )
        self._tell(outcome)
        if kill is None and any(statuses):
            log = out / f"node-{nodes[0]}.log"
            raise RuntimeError(f"{name}: a node failed:\n{log.read_text()[-4000:]}")
        return outcome

    def _start(
        self, node: int, rank: int, nodes: Sequence[int], out: Path, words: Sequence[str]
    ) -> subprocess.Popen[str]:
        host = self.made[node]
        launcher = [
            *("-m", "torch.distributed.run", "--nnodes", str(len(nodes)), "--node-rank", str(rank)),
            *("--nproc-per-node", "1", "--master-addr", self.made[nodes[0]].address),
            *("--master-port", str(PORT + self.runs), "-m", "benchmarks.cluster_child"),
        ]
        own = ["--url", self.url, "--cache", str(self.cache(node)), "--out", str(out)]
        own += ["--state", str(self.folder / "state.json"), "--max-bytes", str(2 * self.data_bytes)]
        own += ["--batch", str(BATCH), "--step-s", str(STEP_S)]
        if self.peers:
            own += ["--peers", f"{host.address}:{_PEER_PORT}"]
        with (out / f"node-{node}.log").open("w") as log:
            return host.start(
                [sys.executable, *launcher, *own, *words],
                env={"GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"},
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def _kill_at(
        self, jobs: dict[int, subprocess.Popen[str]], out: Path, node: int, step: int
    ) -> None:
        ids = out / "ids-0.jsonl"
        until = time.monotonic() + _LIMIT_S
        while time.monotonic() < until and all(job.poll() is None for job in jobs.values()):
            if ids.is_file() and ids.read_bytes().count(b"\n") >= step:
                break
            time.sleep(0.05)
        self.made[node].kill()

    def _count(self, out: Path) -> None:
        for path in out.glob("ids-*.jsonl"):
            for line in path.read_text().splitlines():
                with contextlib.suppress(json.JSONDecodeError):  # of a rank that was killed
                    told = json.loads(line)
                    self.delivered.setdefault(told["epoch"], Counter()).update(told["ids"])

    def _tell(self, outcome: Outcome) -> None:
        share = outcome.remote_bytes / self.data_bytes
        au = [f"{epoch['au']:.1f}" for epoch in (outcome.ranks or [{"epochs": []}])[0]["epochs"]]
        print(
            f"{outcome.name:44} remote {share:6.3f} x dataset   exit {outcome.statuses}   "
            f"{outcome.seconds:5.1f} s   AU % {' '.join(au)}",
            flush=True,
        )

    def exactly_once(self, epochs: Sequence[int]) -> bool:
        """Whether each sample of these epochs was handed out once, over all runs since `forget`."""
        return all(
            len(found := self.delivered.get(epoch, Counter())) == SAMPLES
            and set(found.values()) == {1}
            for epoch in epochs
        )

    def forget(self) -> None:
        """Begin anew: no state, no ids."""
        self.delivered.clear()
        (self.folder / "state.json").unlink(missing_ok=True)


@contextlib.contextmanager
def cluster(
    nodes: int, *, peers: bool, link: float | None = None, store_link: float | None = None
) -> Iterator[Cluster]:
    """So many nodes with empty caches, and a remote. link, store_link: bits a second."""
    with tempfile.TemporaryDirectory() as scratch, hosts(nodes + 1, bits_per_s=link) as made:
        folder = Path(scratch)
        data = folder / "data"
        _make_data(data)
        size = sum(path.stat().st_size for path in data.rglob("*.arrow"))
        made[-1].set_rate(store_link)
        words = [str(data), "0.005", "1e12", made[-1].address]
        store = made[-1].start(
            [sys.executable, "-m", "benchmarks.store_server", *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        try:
            assert store.stdout is not None
            port = int(store.stdout.readline())
            url = f"http://{made[-1].address}:{port}"
            yield Cluster(made, folder, url, store, size, peers)
        finally:
            made[-1].kill()
            store.wait()


def _make_data(folder: Path) -> None:
    """A pack of arrays, so that nothing has to be decoded on the cores that all nodes share."""
    arrays = folder.parent / "arrays"
    arrays.mkdir()
    random = np.random.default_rng(1)
    data = random.integers(0, 256, (SAMPLES, SAMPLE_BYTES), dtype=np.uint8)
    np.save(arrays / "data.npy", data)
    pack(str(arrays / "data.npy"), str(folder), shard_bytes=SHARD_BYTES, seed=1)
    shutil.rmtree(arrays)


def change(*, peers: bool) -> dict[str, Any]:
    """Nodes come, go and change places: remote bytes as shares of the dataset, exactness."""
    with cluster(4, peers=peers) as job:
        size = job.data_bytes
        runs = {
            "three epochs, cold": job.run("three epochs, cold", [0, 1, 2, 3], "--epochs", "3"),
            "restarted": job.run("restarted", [0, 1, 2, 3], "--epochs", "4"),
            "ranks dealt anew": job.run("ranks dealt anew", [2, 0, 3, 1], "--epochs", "5"),
            "4 to 3": job.run("4 to 3", [2, 0, 1], "--epochs", "6"),
        }
        shutil.rmtree(job.cache(3))
        runs["3 to 4, one cold"] = job.run("3 to 4, one cold", [2, 0, 1, 3], "--epochs", "7")
        exact = job.exactly_once(range(7))
        whole_at = SAMPLES // BATCH // 4
        killed = job.run(
            "one killed in mid-epoch",
            *([2, 0, 1, 3], "--epochs", "8", "--state-every", str(whole_at)),
            kill=(3, whole_at + 5),
        )
        shutil.rmtree(job.cache(3))
        # What was handed out behind the last state is handed out again.
        job.delivered.pop(7, None)
        runs["replaced, cold, from the state"] = job.run(
            "replaced, cold, from the state", [2, 0, 1, 3], "--epochs", "8"
        )
        found = job.delivered.get(7, Counter())
        rest = len(found) == SAMPLES - whole_at * BATCH and set(found.values()) == {1}
        print(
            f"each sample once in 7 epochs: {exact}; the rest of the epoch after the kill: {rest}"
        )
        return {
            "peers": peers,
            "dataset_bytes": size,
            "remote_share": {name: run.remote_bytes / size for name, run in runs.items()},
            "exit_statuses": {name: run.statuses for name, run in runs.items()},
            "killed": {"statuses": killed.statuses, "seconds": killed.seconds},
            "each_sample_once": exact,
            "rest_once_after_kill": rest,
        }


def limited() -> dict[str, Any]:
    """The remote has a quarter of what the job takes, each node's link what its rank takes."""
    need = 8 * BATCH * SAMPLE_BYTES / STEP_S  # bits a second, of all nodes
    with cluster(4, peers=True, link=need / 2, store_link=need / 4) as job:
        run = job.run("limited remote", [0, 1, 2, 3], "--epochs", "4", "--reshuffle", "1.0")
        au = [[epoch["au"] for epoch in rank["epochs"]] for rank in run.ranks]
        return {
            "need_bits_per_s": need,
            "remote_share": run.remote_bytes / job.data_bytes,
            "au": au,
            "bytes_peers": [[epoch["bytes_peers"] for epoch in r["epochs"]] for r in run.ranks],
            "exact": job.exactly_once(range(4)),
        }


def main() -> None:
    """Run the trials that were named, and keep what they gave."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", default=["change", "limited"])
    names = parser.parse_args().names
    if words := why_not():
        sys.exit(f"No hosts can be made here: {words}.")
    trials = {
        "change": lambda: change(peers=True),
        "off": lambda: change(peers=False),
        "limited": limited,
    }
    for name in names:
        print(f"-- {name}")
        print(write_result(f"cluster-{name}", trials[name]()))


if __name__ == "__main__":
    main()
