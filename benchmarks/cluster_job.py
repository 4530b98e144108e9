"""A cluster on one machine for trials: hosts, a remote that counts its sent bytes, and runs of a
job.

Each node is a network namespace with a link and a cache of its own (`benchmarks.hosts`). Each rank
is a process under torchrun with gloo. The remote is an HTTP server on a host of its own.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.hosts import TALK_DEVICE, Host, hosts
from penstock import pack

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

PEER_PORT = 7_077
_PORT = 29_400
_LIMIT_S = 240
_ENV = {"GLOO_SOCKET_IFNAME": TALK_DEVICE, "OMP_NUM_THREADS": "1"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """The dataset and the steps of a trial. Samples are arrays of bytes, so that decoding doesn't
    use the cores that all nodes share."""

    samples: int = 4_032
    sample_bytes: int = 50_000
    shard_bytes: int = 2**20
    batch: int = 96
    step_s: float = 0.1

    @property
    def steps(self) -> int:
        """The steps of an epoch."""
        return self.samples // self.batch


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The result of one run of the job: bytes that the remote sent meanwhile, exit statuses by
    node, duration, and each rank's measurements.

    ended_s: seconds from a kill until the last surviving node ended.
    """

    name: str
    remote_bytes: int
    statuses: list[int]
    seconds: float
    ranks: list[dict[str, Any]]
    ended_s: float | None = None

    def epochs(self, what: str) -> list[list[float]]:
        """Return a figure of each rank and epoch."""
        return [[epoch[what] for epoch in rank["epochs"]] for rank in self.ranks]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """A kill of a node, after rank 0 has made a number of steps."""

    node: int
    step: int


@dataclass(slots=True)
class Cluster:
    """The hosts, the store on the last host, and the folders of one trial. env, addresses:
    overrides by node."""

    made: list[Host]
    folder: Path
    url: str
    store: subprocess.Popen[str]
    data_bytes: int
    sizes: Sizes
    peers: bool = True
    cache_share: float = 2.0
    tls: bool = False
    runs: int = 0
    delivered: dict[int, Counter[int]] = field(default_factory=dict)
    env: dict[int, dict[str, str]] = field(default_factory=dict)
    addresses: dict[int, str] = field(default_factory=dict)

    def sent_bytes(self) -> int:
        """Return the bytes that the remote has sent so far."""
        assert self.store.stdin is not None
        assert self.store.stdout is not None
        self.store.stdin.write("\n")
        self.store.stdin.flush()
        return int(self.store.stdout.readline())

    def cache(self, node: int) -> Path:
        """Return the cache folder of a node."""
        return self.folder / f"cache-{node}"

    def held_bytes(self, node: int) -> int:
        """Return the bytes of shards in a node's cache."""
        held = 0
        for kind in ("blobs", "fills", "unverified"):
            for path in (self.cache(node) / kind).rglob("*"):
                with contextlib.suppress(OSError):  # the cache is in use
                    held += path.stat().st_blocks * 512 if path.is_file() else 0
        return held

    def lose_cache(self, node: int) -> int:
        """Remove a node's disk; return the bytes of shards that it had."""
        held = self.held_bytes(node)
        shutil.rmtree(self.cache(node))
        return held

    def words(self, node: int) -> list[str]:
        """Return the command line of a child process on a node."""
        words = ["--url", self.url, "--cache", str(self.cache(node))]
        words += ["--max-bytes", str(int(self.cache_share * self.data_bytes))]
        words += ["--batch", str(self.sizes.batch), "--step-s", str(self.sizes.step_s)]
        if self.peers:
            own = self.addresses.get(node, self.made[node].address)
            words += ["--peers", f"{own}:{PEER_PORT}"]
            if self.tls:
                words.append("--tls")
        return words

    def run(
        self,
        name: str,
        nodes: Sequence[int],
        *words: str,
        kill: Kill | None = None,
        meanwhile: Meanwhile | None = None,
        may_fail: bool = False,
    ) -> Outcome:
        """Run the job on these nodes; the first of them has rank 0.

        Raises RuntimeError if it fails, unless a node is killed or failure is permitted.
        """
        self.runs += 1
        out = self.folder / f"out-{self.runs}"
        out.mkdir()
        before, began = self.sent_bytes(), time.monotonic()
        jobs = {node: self._start(node, rank, nodes, out, words) for rank, node in enumerate(nodes)}
        ended_s = None
        try:
            if meanwhile is not None:
                meanwhile.start(jobs[nodes[0]], out)
            if kill is not None:
                _at_step(jobs[nodes[0]], out, kill.step)
                self.made[kill.node].kill()
            killed = time.monotonic()
            statuses = [
                jobs[node].wait(max(1.0, began + _LIMIT_S - time.monotonic())) for node in nodes
            ]
            ended_s = time.monotonic() - killed if kill is not None else None
        finally:
            for node, job in jobs.items():
                self.made[node].kill()
                job.wait()
            if meanwhile is not None:
                meanwhile.end()
        ranks = [json.loads(path.read_text()) for path in sorted(out.glob("rank-*.json"))]
        self._count(out)
        outcome = Outcome(
            name=name,
            remote_bytes=self.sent_bytes() - before,
            statuses=statuses,
            seconds=time.monotonic() - began,
            ranks=ranks,
            ended_s=ended_s,
        )
        self._tell(outcome)
        if kill is None and not may_fail and any(statuses):
            log = out / f"node-{nodes[0]}.log"
            raise RuntimeError(f"{name}: a node failed:\n{log.read_text()[-4000:]}")
        return outcome

    def _start(
        self, node: int, rank: int, nodes: Sequence[int], out: Path, words: Sequence[str]
    ) -> subprocess.Popen[str]:
        launcher = [
            *("-m", "torch.distributed.run", "--nnodes", str(len(nodes)), "--node-rank", str(rank)),
            *("--nproc-per-node", "1", "--master-addr", self.made[nodes[0]].talk_address),
            *("--master-port", str(_PORT + self.runs), "-m", "benchmarks.cluster_child"),
        ]
        own = [*self.words(node), "--out", str(out), "--state", str(self.folder / "state.json")]
        with (out / f"node-{node}.log").open("w") as log:
            return self.made[node].start(
                [sys.executable, *launcher, *own, *words],
                env={**_ENV, **self.env.get(node, {})},
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def _count(self, out: Path) -> None:
        for path in out.glob("ids-*.jsonl"):
            for line in path.read_text().splitlines():
                with contextlib.suppress(json.JSONDecodeError):  # of a rank that was killed
                    report = json.loads(line)
                    self.delivered.setdefault(report["epoch"], Counter()).update(report["ids"])

    def _tell(self, outcome: Outcome) -> None:
        share = outcome.remote_bytes / self.data_bytes
        au = [f"{epoch['au']:.1f}" for epoch in (outcome.ranks or [{"epochs": []}])[0]["epochs"]]
        print(
            f"{outcome.name:44} remote {share:6.3f} x dataset   exit {outcome.statuses}   "
            f"{outcome.seconds:5.1f} s   AU % {' '.join(au)}",
            flush=True,
        )

    def is_exact(self, epochs: Sequence[int], *, samples: int | None = None) -> bool:
        """Return True if each sample of these epochs was delivered once, or as many samples as
        given."""
        return all(
            len(found := self.delivered.get(epoch, Counter())) == (samples or self.sizes.samples)
            and set(found.values()) == {1}
            for epoch in epochs
        )


@dataclass(slots=True)
class Meanwhile:
    """An action on the cluster while a job runs, from a step of rank 0 on."""

    step: int
    do: Callable[[threading.Event], None]
    over: threading.Event = field(default_factory=threading.Event)
    thread: threading.Thread | None = None

    def start(self, job: subprocess.Popen[str], out: Path) -> None:
        """Wait on a thread for the step, then call do(over)."""

        def work() -> None:
            _at_step(job, out, self.step, over=self.over)
            if not self.over.is_set():
                self.do(self.over)

        self.thread = threading.Thread(target=work, name="meanwhile")
        self.thread.start()

    def end(self) -> None:
        """End the action."""
        self.over.set()
        if self.thread is not None:
            self.thread.join(30)


def _at_step(
    job: subprocess.Popen[str], out: Path, step: int, *, over: threading.Event | None = None
) -> None:
    """Return when rank 0 has made so many steps, or its job has ended."""
    ids, until = out / "ids-0.jsonl", time.monotonic() + _LIMIT_S
    over = over or threading.Event()
    while time.monotonic() < until and job.poll() is None and not over.is_set():
        if step == 0 or (ids.is_file() and ids.read_bytes().count(b"\n") >= step):
            break
        over.wait(0.05)


@contextlib.contextmanager
def cluster(
    nodes: int,
    sizes: Sizes,
    *,
    peers: bool = True,
    cache_share: float = 2.0,
    link: float | None = None,
    store_link: float | None = None,
    tls: bool = False,
) -> Iterator[Cluster]:
    """Start nodes with empty caches, and a remote.

    cache_share: size of each cache, as a share of the dataset. link, store_link: bits per second.
    tls: True encrypts between nodes.
    """
    with tempfile.TemporaryDirectory() as scratch, hosts(nodes + 1, bits_per_s=link) as made:
        folder = Path(scratch)
        data = folder / "data"
        make_data(data, sizes)
        size = sum(path.stat().st_size for path in data.rglob("*.arrow"))
        made[-1].set_rate(store_link)
        words = [str(folder), "0.005", "1e12", made[-1].address]
        store = made[-1].start(
            [sys.executable, "-m", "benchmarks.store_server", *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        try:
            assert store.stdout is not None
            url = f"http://{made[-1].address}:{int(store.stdout.readline())}/data"
            yield Cluster(made, folder, url, store, size, sizes, peers, cache_share, tls)
        finally:
            made[-1].kill()
            end(store)


def end(child: subprocess.Popen[str]) -> None:
    """Wait for a child that was killed, and close its pipes."""
    child.wait()
    for pipe in (child.stdin, child.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):  # the child no longer reads its input
                pipe.close()


def make_data(folder: Path, sizes: Sizes, *, seed: int = 1) -> None:
    """Write a pack of arrays of random bytes."""
    arrays = folder.parent / "arrays"
    arrays.mkdir()
    random = np.random.default_rng(seed)
    data = random.integers(0, 256, (sizes.samples, sizes.sample_bytes), dtype=np.uint8)
    np.save(arrays / "data.npy", data)
    pack(str(arrays / "data.npy"), str(folder), shard_bytes=sizes.shard_bytes, seed=1)
    shutil.rmtree(arrays)


def load() -> str:
    """Return the machine's load averages, to judge measured times."""
    return " ".join(f"{one:.1f}" for one in os.getloadavg())
