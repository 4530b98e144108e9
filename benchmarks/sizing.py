"""`python -m benchmarks.sizing [NAME …]`: `penstock plan` compared with the real loader.

Each set-up limits one resource that can be limited on one machine: a store with a bandwidth or a
latency, a disk that the kernel throttles (blkio), links of network namespaces that it shapes (tbf),
a decoder that sleeps, a step that sleeps, a cache with room for half. The plan receives the same
figures, never measurements of the run. Writes benchmarks/results/sizing.json. disk, nic and peer
require root; without it they are excluded and listed.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from rich.console import Console
from rich.table import Table

from benchmarks.hosts import TALK_DEVICE, hosts, why_not
from benchmarks.record import RESULTS, write_result
from benchmarks.sizing_setups import SET_UPS, SetUp, Shape
from penstock import pack

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from benchmarks.hosts import Host

WITHIN = 0.15
_CGROUP = Path("/sys/fs/cgroup/blkio")
_PATIENCE_S = 240
_PORT, _PEER_PORT = 29_700, 7_177


def make_data(folder: Path, shape: Shape) -> int:
    """Write a pack of bytes without a decoder, in which each sample can be fetched alone; return
    its bytes.

    Arrays of one shape would be fetched in blocks of 1 MiB.
    """
    random = np.random.default_rng(1)
    data = [random.bytes(shape.sample_bytes) for _ in range(shape.samples)]
    with tempfile.TemporaryDirectory(dir=folder.parent) as place:
        table = pa.table({"data": pa.array(data, pa.binary())})
        pq.write_table(table, Path(place) / "data.parquet")
        pack(str(Path(place) / "data.parquet"), str(folder), shard_bytes=shape.shard_bytes, seed=1)
    return sum(path.stat().st_size for path in folder.rglob("*.arrow"))


def planned(wanted: SetUp, pack_url: Path, data_bytes: int) -> dict[str, Any]:
    """Return the forecast of `penstock plan` for a set-up."""
    rate = wanted.batch / wanted.nodes / wanted.gpus / wanted.step_s
    words = [str(pack_url), "--nodes", str(wanted.nodes), "--gpus", str(wanted.gpus)]
    words += ["--epochs", "3", "--global-batch-size", str(wanted.batch)]
    words += ["--samples-per-s", f"{rate:g}", "--ram", "16GB"]
    # Sleeping functions take no core: as many run at a time as there are processes.
    words += ["--cores", str(wanted.processes * wanted.gpus)]
    words += ["--nvme-bandwidth", f"{wanted.disk or 1e9:.0f}B/s"]
    words += ["--nvme", str(int(wanted.room * data_bytes))]
    words += ["--nic", f"{wanted.link or 1e11:.0f}b/s"]
    if wanted.store is None:
        words.append("--local")
    else:
        latency_s, bandwidth = wanted.store
        words += ["--store-latency", str(1000 * latency_s), "--stream-bandwidth", "500MB/s"]
        words += ["--store-bandwidth", f"{bandwidth:.0f}B/s", "--store-requests-per-s", "1e6"]
    if wanted.decode:
        words += ["--cpu-s-per-1000", str(1000 * wanted.decode)]
    if wanted.nodes > 1:
        words += ["--peers", "--no-tls", *(["--moved", "1.0"] if wanted.moved else [])]
    command = [sys.executable, "-m", "penstock.pipeline.cli", "plan", *words, *wanted.told]
    done = subprocess.run([*command, "--json"], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found | {"command": " ".join(["PACK", *words[1:], *wanted.told])}


@contextlib.contextmanager
def store_server(
    folder: Path, figures: tuple[float, float], host: Host | None = None
) -> Iterator[str]:
    """Serve a store with a latency and a bandwidth, on this machine or on a host; yield its URL."""
    address = [host.address] if host is not None else []
    words = [sys.executable, "-m", "benchmarks.store_server", str(folder), *map(str, figures)]
    start = host.start if host is not None else _start
    server = start([*words, *address], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert server.stdout is not None
        port = int(server.stdout.readline())
        yield f"http://{host.address if host is not None else '127.0.0.1'}:{port}"
    finally:
        server.kill()
        server.wait()


def _start(command: Sequence[str], **more: Any) -> subprocess.Popen[str]:
    return subprocess.Popen(command, text=True, **more)


@contextlib.contextmanager
def throttled_disk(folder: Path, bytes_per_s: float | None) -> Iterator[Path | None]:
    """Make a control group in which the kernel limits reads of a folder's disk; None if that isn't
    possible."""
    if bytes_per_s is None:
        yield None
        return
    device = os.stat(folder).st_dev
    group = _CGROUP / f"penstock-{os.getpid()}"
    group.mkdir()
    try:
        limit = f"{os.major(device)}:{os.minor(device)} {int(bytes_per_s)}"
        (group / "blkio.throttle.read_bps_device").write_text(limit)
        yield group
    finally:
        group.rmdir()


def forget_pages(folder: Path) -> None:
    """Drop a folder's files from the page cache."""
    for path in folder.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


@dataclass(slots=True)
class Bench:
    """The runs of set-ups. scratch: for their data and caches."""

    scratch: Path
    runs: int = field(default=0)
    packs: dict[Shape, tuple[Path, int]] = field(default_factory=dict)

    def pack(self, shape: Shape) -> tuple[Path, int]:
        """Return the folder of a pack and its bytes; it is written once."""
        if shape not in self.packs:
            folder = self.scratch / f"pack-{len(self.packs)}"
            self.packs[shape] = folder, make_data(folder, shape)
        return self.packs[shape]

    def measured(self, wanted: SetUp) -> dict[str, float]:
        """Measure the epoch of a set-up."""
        self.runs += 1
        data, data_bytes = self.pack(wanted.shape)
        task = {
            "cache": str(self.scratch / f"cache-{self.runs}") if wanted.store else "",
            "max_bytes": int(wanted.room * data_bytes),
            "batch": wanted.batch,
            "step_s": wanted.step_s,
            "decode": wanted.decode,
            "processes": wanted.processes,
            "reshuffle": wanted.reshuffle,
            "epochs": wanted.epochs,
        }
        if wanted.store is None:
            forget_pages(data)
            with throttled_disk(data, wanted.disk) as group:
                return self._child(task | {"url": str(data)}, group=group)[-1]
        if wanted.is_linked:
            return self._linked(wanted, task)
        with store_server(data, wanted.store) as url:
            return self._child(task | {"url": url})[-1]

    def _child(self, task: dict[str, Any], *, group: Path | None = None) -> list[dict[str, float]]:
        def enter() -> None:
            if group is not None:
                (group / "cgroup.procs").write_text(str(os.getpid()))

        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.sizing_child", json.dumps(task)],
            stdout=subprocess.PIPE,
            text=True,
            check=True,
            timeout=_PATIENCE_S,
            preexec_fn=enter,
        )
        found: list[dict[str, float]] = json.loads(done.stdout)
        return found

    def _linked(self, wanted: SetUp, task: dict[str, Any]) -> dict[str, float]:
        """Run ranks on nodes behind links. If they change places, they fill their caches first, so
        that the data of each is then on another node."""
        assert wanted.store is not None
        with hosts(wanted.nodes + 1) as made:
            *nodes, far = made
            latency_s, bandwidth = wanted.store
            # One server for both jobs: the caches know the data by its URL.
            figures = (latency_s, 1e9 if wanted.moved else bandwidth)
            with store_server(self.pack(wanted.shape)[0], figures, far) as url:
                places = list(range(wanted.nodes))
                if wanted.moved:
                    self._job(wanted, nodes, places, task | {"url": url, "epochs": 1})
                    far.set_rate(8 * bandwidth)
                    places = [*places[1:], 0]
                for node in nodes:
                    node.set_rate(wanted.link)
                return self._job(wanted, nodes, places, task | {"url": url})

    def _job(
        self, wanted: SetUp, nodes: Sequence[Host], order: Sequence[int], task: dict[str, Any]
    ) -> dict[str, float]:
        """Run a job under torchrun, node order[r] at place r; return the epoch of its
        slowest rank."""
        self.runs += 1
        out = self.scratch / f"out-{self.runs}"
        out.mkdir()
        jobs = []
        for place, number in enumerate(order):
            host = nodes[number]
            more: dict[str, Any] = {"cache": f"{task['cache']}-{number}", "group": str(out)}
            if wanted.nodes > 1:
                more |= {"peers": f"{host.address}:{_PEER_PORT}"}
            if wanted.moved:
                more |= {"slots": "rank"}
            launcher = ["-m", "torch.distributed.run", "--nnodes", str(len(nodes))]
            launcher += ["--node-rank", str(place), "--nproc-per-node", str(wanted.gpus)]
            launcher += ["--master-addr", nodes[order[0]].talk_address]
            launcher += ["--master-port", str(_PORT + self.runs), "-m", "benchmarks.sizing_child"]
            jobs.append(
                host.start(
                    [sys.executable, *launcher, json.dumps(task | more)],
                    env={"GLOO_SOCKET_IFNAME": TALK_DEVICE, "OMP_NUM_THREADS": "1"},
                )
            )
        if any(job.wait(_PATIENCE_S) for job in jobs):
            raise RuntimeError(f"{wanted.name}: a rank failed.")
        ranks = [json.loads(path.read_text())[-1] for path in sorted(out.glob("rank-*.json"))]
        slowest: dict[str, float] = max(ranks, key=lambda rank: float(rank["seconds"]))
        return slowest | {
            name: sum(rank[name] for rank in ranks) for name in ("bytes_remote", "bytes_peers")
        }


def compare(wanted: SetUp, bench: Bench, rounds: int) -> dict[str, Any]:
    """Return a set-up's plan and its measured epochs, of which the median counts."""
    plan = planned(wanted, *bench.pack(wanted.shape))
    report = plan[wanted.epoch]
    runs = [bench.measured(wanted) for _ in range(rounds)]
    seconds = statistics.median(run["seconds"] for run in runs)
    return {
        "measured_at": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "epoch": wanted.epoch,
        "limit": max(report["tiers_s"], key=lambda tier: report["tiers_s"][tier]),
        "planned_s": report["seconds"],
        "measured_s": seconds,
        "ratio": seconds / report["seconds"],
        "planned_au": report["au"],
        "measured_au": statistics.median(run["au"] for run in runs),
        "planned_remote_bytes": report["bytes_by_tier"]["remote"],
        "planned_peer_bytes": report["bytes_by_tier"]["peer"],
        "runs": runs,
        "plan": plan["command"],
    }


def main() -> None:
    """Compare the selected set-ups and write the results."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--update", action="store_true", help="update only these set-ups")
    options = parser.parse_args()
    wanted = [one for one in SET_UPS if not options.names or one.name in options.names]
    console, found, left_out = Console(), {}, {}
    with tempfile.TemporaryDirectory(prefix="penstock-sizing-") as place:
        bench = Bench(Path(place))
        for one in wanted:
            needs_root = one.is_linked or one.disk is not None
            if needs_root and (words := why_not()):
                left_out[one.name] = words
                continue
            found[one.name] = compare(one, bench, options.rounds)
            console.print(one.name, _short(found[one.name]), highlight=False)
    table = Table("set-up", "epoch", "limit", "planned s", "measured s", "ratio", box=None)
    for name, row in found.items():
        figures = (f"{row['planned_s']:.2f}", f"{row['measured_s']:.2f}", f"{row['ratio']:.2f}")
        table.add_row(name, row["epoch"], row["limit"], *figures)
    console.print(table)
    if options.update:  # the others stay as they were measured, each with its own date
        before = json.loads((RESULTS / "sizing.json").read_text())
        found, left_out = before["set_ups"] | found, before["left_out"]
    within = sum(abs(row["ratio"] - 1) <= WITHIN for row in found.values())
    console.print(f"{within} of {len(found)} within {WITHIN:.0%}; left out: {left_out or 'none'}")
    if options.update or not options.names:
        print(write_result("sizing", {"set_ups": found, "left_out": left_out, "within": within}))


def _short(row: dict[str, Any]) -> str:
    return f"planned {row['planned_s']:.2f} s, measured {row['measured_s']:.2f} s"


if __name__ == "__main__":
    main()
