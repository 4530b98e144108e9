"""The trial of changes among 4 to 32 nodes, with real caches and loaders, in one process.

Each node is a loader with a cache folder of its own, on threads of this process. The remote is a
server in another process, which counts its sent bytes. With peers, each node also has the process
of its server.
"""

from __future__ import annotations

import contextlib
import itertools
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from torch.distributed import HashStore  # type: ignore[attr-defined]

from benchmarks.cluster_job import Sizes, end, load, make_data
from benchmarks.cluster_judge import Judge
from penstock import DataLoader, Dataset, DiskCache, Peers, World
from penstock.cache.peers import peer_link

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_EMPTY = -1
_STRAY = 0.005  # bytes of answers other than shards, as a share of the dataset


@dataclass(slots=True)
class Worlds:
    """A dataset of tiny shards on a server, and the caches of jobs that have completed an epoch."""

    folder: Path
    url: str
    store: subprocess.Popen[str]
    data_bytes: int
    sizes: Sizes
    states: dict[int, dict[str, Any]] = field(default_factory=dict)

    def sent_bytes(self) -> int:
        """Return the bytes that the remote has sent so far."""
        assert self.store.stdin is not None
        assert self.store.stdout is not None
        self.store.stdin.write("\n")
        self.store.stdin.flush()
        return int(self.store.stdout.readline())

    @property
    def shards(self) -> int:
        """The number of shards."""
        return sum(1 for _ in (self.folder / "data").rglob("*.arrow"))

    def warm(self, nodes: int) -> float:
        """Run an epoch of a job with empty caches; return the bytes that the remote sent, as a
        share of the dataset."""
        caches = [self._cache(nodes, node) for node in range(nodes)]
        share, state, _ = self._epoch(caches, None, peers=False)
        self.states[nodes] = state
        return share

    def change(self, nodes: int, then: Sequence[int], *, peers: bool) -> tuple[float, bool]:
        """Run an epoch of the job with the caches of these nodes, `_EMPTY` for a new node; return
        the bytes that the remote sent, as a share of the dataset, and whether each sample was
        delivered once."""
        caches = [self.folder / f"now-{rank}" for rank in range(len(then))]
        for cache, node in zip(caches, then, strict=True):
            if node != _EMPTY:
                shutil.copytree(self._cache(nodes, node), cache)
        try:
            share, _, exact = self._epoch(caches, self.states[nodes], peers=peers)
        finally:
            for cache in caches:
                shutil.rmtree(cache, ignore_errors=True)
        return share, exact

    def _cache(self, nodes: int, node: int) -> Path:
        return self.folder / f"cache-{nodes}-{node}"

    def _epoch(
        self, caches: Sequence[Path], state: dict[str, Any] | None, *, peers: bool
    ) -> tuple[float, dict[str, Any], bool]:
        count = len(caches)
        with contextlib.ExitStack() as stack, ThreadPoolExecutor(count) as pool:
            loaders = [self._loader(stack, cache, peers=peers) for cache in caches]
            for loader in loaders:
                if state is not None:
                    loader.load_state_dict(state)
            before, store = self.sent_bytes(), HashStore()
            step = loaders[0].step

            def run(rank: int) -> Counter[int]:
                loaders[rank].rejoin(World(rank, count), step=step, store=store)
                found: Counter[int] = Counter()
                for _, id in loaders[rank]:
                    found.update(id.tolist())
                    time.sleep(self.sizes.step_s)
                return found

            ids = sum(pool.map(run, range(count)), Counter())
            sent = self.sent_bytes() - before
            exact = len(ids) == self.sizes.samples and set(ids.values()) == {1}
            return sent / self.data_bytes, loaders[0].state_dict(), exact

    def _loader(self, stack: contextlib.ExitStack, cache: Path, *, peers: bool) -> DataLoader:
        own = Peers("127.0.0.1:0") if peers else None
        disk = DiskCache(cache, max_bytes=4 * self.data_bytes, peers=own)
        dataset = stack.enter_context(Dataset(self.url, cache=disk, fields=("array", "id")))
        return stack.enter_context(
            DataLoader(
                dataset,
                global_batch_size=self.sizes.batch,
                shuffle=True,
                drop_last=True,
                seed=7,
                num_workers=1,
                world=World(0, 1),
            )
        )


@contextlib.contextmanager
def made_worlds(sizes: Sizes) -> Iterator[Worlds]:
    """Serve a dataset, without nodes."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        data = folder / "data"
        make_data(data, sizes)
        size = sum(path.stat().st_size for path in data.rglob("*.arrow"))
        store = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.store_server", str(data), "0", "1e12"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            assert store.stdout is not None
            url = f"http://127.0.0.1:{int(store.stdout.readline())}"
            yield Worlds(folder, url, store, size, sizes)
        finally:
            store.kill()
            end(store)


@dataclass(frozen=True, slots=True)
class Change:
    """A change of the nodes of a job.

    then: the owners of the caches that the ranks have after it. lost: the share of the dataset that
    no cache has afterwards. missing: the share that no cache can have where it is read.
    """

    name: str
    nodes: int
    then: tuple[int, ...]
    lost: float
    missing: float


def changes(*counts: int) -> list[Change]:
    """Return the changes of jobs of so many nodes."""
    found = []
    for count in counts:
        nodes = tuple(range(count))
        dealt = tuple(np.random.default_rng(count).permutation(count).tolist())
        found.append(Change(f"{count} dealt anew", count, dealt, 0.0, 0.0))
        fewer = nodes[:2] + nodes[3:]
        found.append(Change(f"{count} to {count - 1}", count, fewer, 1 / count, 1 / count))
        if 2 * count in counts:
            more = nodes + (_EMPTY,) * count
            found.append(Change(f"{count} to {2 * count}", count, more, 0.0, 0.5))
        if count // 2 in counts:
            found.append(Change(f"{count} to {count // 2}", count, nodes[::2], 0.5, 0.5))
    return found


_FEW: tuple[tuple[Sizes, tuple[int, ...]], ...] = (
    # Nodes of 7 and 8 have whole lanes each of 112, of 128 they haven't. Few shards, and many.
    (Sizes(samples=7_168, sample_bytes=2_000, shard_bytes=2**14, batch=896, step_s=0.1), (8,)),
    (Sizes(samples=7_168, sample_bytes=1_500, shard_bytes=2**12, batch=896, step_s=0.1), (8,)),
    (Sizes(samples=8_192, sample_bytes=2_000, shard_bytes=2**14, batch=1_024, step_s=0.1), (4, 8)),
)
_MANY: tuple[tuple[Sizes, tuple[int, ...]], ...] = (
    (
        Sizes(samples=8_192, sample_bytes=2_000, shard_bytes=2**14, batch=1_024, step_s=0.1),
        (16, 32),
    ),
)


def worlds(*, many: bool = False) -> dict[str, Any]:
    """Reassign ranks, with one node less, half of the nodes and twice as many, among 4 and 8 nodes,
    or 16 and 32; with and without peers."""
    judge = Judge()
    rows: list[dict[str, Any]] = []
    peer_link._ADDRESSES_S = 120.0  # 32 servers start on the same few cores
    for sizes, counts in _MANY if many else _FEW:
        with made_worlds(sizes) as made, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # tiny shards
            for count in counts:
                share = made.warm(count)
                lanes = made.states[count]["plan"]["lanes"]
                job = {"batch": sizes.batch, "lanes": lanes, "shards": made.shards}
                print(f"   {job}, {count} nodes, cold: {share:.3f}", flush=True)
                rows.append({**job, "change": f"{count} cold", "remote_share": share})
            for change, peers in itertools.product(changes(*counts), (False, True)):
                share, exact = made.change(change.nodes, change.then, peers=peers)
                words = f"{lanes} lanes, {change.name}, {'peers' if peers else 'no peers'}"
                most = 1.02 * (change.lost if peers else change.missing) + _STRAY
                judge.at_most(f"{words}: remote, x dataset", share, most)
                judge.holds(f"{words}: each sample once", held=exact)
                rows.append({**job, "change": change.name, "peers": peers, "remote_share": share})
    return {"rows": rows, "load": load(), "judged": judge.lines}
