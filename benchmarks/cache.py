"""`python -m benchmarks.cache`: the cost and the savings of a cache, with stores on this machine.

A pack is read from its folder, from nginx on loopback (cold, warm, and with room for half of it),
and from a store with a latency of 50 ms and twice the bandwidth that decoding needs. Rounds are
interleaved; medians and paired ratios are reported. Writes benchmarks/results/cache.json. Requires
nginx.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from benchmarks.data import Prepared, prepare
from benchmarks.record import RESULTS, write_result
from penstock.cache import MissingDependencyError
from penstock.pipeline.bench import Figure, machine, versions

if TYPE_CHECKING:
    from collections.abc import Iterator

LATENCY_S = 0.05
COPIES = 4  # of the images, for the slow store: an epoch must be long against its first window
BANDWIDTH_NEEDS = 2.0


def run(task: dict[str, Any]) -> Any:
    """Run one measurement in a child process."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.cache_child", json.dumps(task)],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=600,
    )
    return json.loads(done.stdout)


@contextlib.contextmanager
def slow_store(folder: Path, *, bytes_per_s: float) -> Iterator[str]:
    """Serve a store with a latency and a bandwidth; yield its URL."""
    wanted = [str(folder), str(LATENCY_S), str(bytes_per_s)]
    with subprocess.Popen(
        [sys.executable, "-m", "benchmarks.store_server", *wanted],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        yield f"http://127.0.0.1:{process.stdout.readline().strip()}"
        process.stdin.close()


def link_copies(folder: Path, target: Path, copies: int) -> Path:
    """Make an image folder with several symbolic links to each image."""
    for place in sorted(folder.glob("*/*")):
        if place.parent.name.startswith("_"):
            continue
        (target / place.parent.name).mkdir(parents=True, exist_ok=True)
        for number in range(copies):
            (target / place.parent.name / f"{number}-{place.name}").symlink_to(place.absolute())
    return target


def measure(
    prepared: Prepared,
    *,
    rounds: int = 5,
    batch_size: int = 64,
    shard_bytes: int | str = "2MiB",
    fill_bytes: int = 512 * 2**20,
    results: Path = RESULTS,
    console: Console,
) -> Path:
    """Play the rounds, print the table and write the result; return its path.

    Raises MissingDependencyError without nginx.
    """
    from penstock import pack
    from tests.servers.nginx import NGINX, nginx

    if NGINX is None:
        raise MissingDependencyError("This needs nginx: install Debian's nginx-light.")
    console.print(f"{machine()}\n{versions()}\n{prepared.record()}", highlight=False, style="dim")
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as place:
        root = Path(place) / "www"
        pack(str(prepared.images.train), str(root / "pack"), shard_bytes=shard_bytes)
        copies = link_copies(prepared.images.train, Path(place) / "copies", COPIES)
        pack(str(copies), str(root / "large"), shard_bytes="8MiB")
        names = []
        for number in range(max(1, fill_bytes // (64 * 2**20))):
            names.append(f"object-{number}")
            with open(root / names[-1], "wb") as file:
                file.write(os.urandom(min(fill_bytes, 64 * 2**20)))
        with nginx(root) as url:
            bench = _CacheBench(root, url, Path(place) / "cache", batch_size, rounds, console)
            found = {
                "fill": bench.fills(names),
                "epochs": bench.epochs(),
                "bytes": bench.remote_bytes(),
            }
        local = statistics.median(r["local"]["images_per_s"] for r in found["epochs"]["rounds"])
        found["slow"] = bench.slow(local)
    for name, part in found.items():
        console.print(_table(name, part["summary"]))
    report = {
        "dataset": prepared.record(),
        "pack": {"bytes": bench.pack_bytes, "shard_bytes": str(shard_bytes)},
        "batch_size": batch_size,
    }
    plain = {
        name: part | {"summary": {what: asdict(f) for what, f in part["summary"].items()}}
        for name, part in found.items()
    }
    return write_result("cache", report | plain, folder=results)


class _CacheBench:
    """The parts of the benchmark, for one store and one cache.

    Each part returns {"rounds": …, "summary": {name: Figure}}.
    """

    def __init__(
        self, root: Path, url: str, cache: Path, batch_size: int, rounds: int, console: Console
    ) -> None:
        self._root, self._url, self._cache = root, url, cache
        self._batch_size, self._rounds, self._console = batch_size, rounds, console
        self.pack_bytes = sum(f.stat().st_size for f in (root / "pack").glob("*.arrow"))

    def _epochs(self, url: str, *, share: float, epochs: int = 1, **more: Any) -> Any:
        size_bytes = self.pack_bytes * (COPIES if url.endswith("large") else 1)
        max_bytes = int(share * size_bytes)
        task = {"what": "epochs", "url": url, "cache": str(self._cache), "max_bytes": max_bytes}
        return run(task | {"batch_size": self._batch_size, "epochs": epochs} | more)

    def _clear(self) -> None:
        shutil.rmtree(self._cache, ignore_errors=True)

    def fills(self, names: list[str]) -> dict[str, Any]:
        """Measure fills: the same client with and without a cache."""
        sizes = [(self._root / name).stat().st_size for name in names]
        task = {"what": "fill", "url": self._url, "names": names, "sizes": sizes}
        rounds = []
        for _ in range(self._rounds):
            self._clear()
            read = run(task | {"cache": ""})
            filled = run(task | {"cache": str(self._cache)})
            rounds.append({"read": read, "fill": filled})
        self._clear()
        return {
            "rounds": rounds,
            "summary": {
                "read, MB/s": _figure(rounds, "read", "mb_per_s"),
                "fill, MB/s": _figure(rounds, "fill", "mb_per_s"),
                "fill by read": _ratio(rounds, "fill", "read", "mb_per_s"),
                "fill, CPU-s a GB": _figure(rounds, "fill", "cpu_s_per_gb"),
                "read, CPU-s a GB": _figure(rounds, "read", "cpu_s_per_gb"),
            },
        }

    def epochs(self) -> dict[str, Any]:
        """Measure an epoch from the folder, one cold from nginx, and one warm from the cache."""
        url, folder = f"{self._url}/pack", str(self._root / "pack")
        rounds = []
        for _ in range(self._rounds):
            self._clear()
            (cold,) = self._epochs(url, share=1.5)
            # The second epoch of each: the first warms the processor and the page cache.
            local = self._epochs(folder, share=0, epochs=2)[1]
            warm = self._epochs(url, share=1.5, epochs=2)[1]
            fresh = self._epochs(folder, share=0)[0]
            rounds.append({"cold": cold, "local": local, "warm": warm, "fresh": fresh})
        return {
            "rounds": rounds,
            "summary": {
                "local, images/s": _figure(rounds, "local", "images_per_s"),
                "warm by local, images/s": _ratio(rounds, "warm", "local", "images_per_s"),
                "local by warm, CPU": _ratio(rounds, "local", "warm", "cpu_ms"),
                "cold by first local epoch, images/s": _ratio(
                    rounds, "cold", "fresh", "images_per_s"
                ),
                "first local epoch by cold, CPU": _ratio(rounds, "fresh", "cold", "cpu_ms"),
                "cold, first batch, s": _figure(rounds, "cold", "first_s"),
                "cold, bytes by the first batch's": Figure.of(
                    [r["cold"]["first_bytes"] / self._batch_bytes(r["cold"]) for r in rounds]
                ),
            },
        }

    def _batch_bytes(self, record: dict[str, float]) -> float:
        samples = len(self._samples())
        return self.pack_bytes / samples * self._batch_size if samples else record["samples"]

    def _samples(self) -> range:
        from penstock import Dataset

        with Dataset(self._root / "pack") as dataset:
            return range(len(dataset))

    def remote_bytes(self) -> dict[str, Any]:
        """Return the bytes fetched over three epochs, divided by the bytes of the dataset."""
        url = f"{self._url}/pack"
        rounds = []
        for _ in range(min(self._rounds, 2)):  # counts, not times
            self._clear()
            whole = self._epochs(url, share=1.5, epochs=3)[-1]["fetched_bytes"]
            again = self._epochs(url, share=1.5)[-1]["fetched_bytes"]
            self._clear()
            half = self._epochs(url, share=0.5, epochs=3)[-1]["fetched_bytes"]
            rounds.append({"whole": whole, "again": again, "half": half})
        self._clear()
        return {
            "rounds": rounds,
            "summary": {
                "cache of 150 %, 3 epochs": self._by_dataset(rounds, "whole"),
                "a second job on it": self._by_dataset(rounds, "again"),
                "cache of 50 %, 3 epochs (bound 2.00)": self._by_dataset(rounds, "half"),
            },
        }

    def _by_dataset(self, rounds: list[dict[str, Any]], name: str) -> Figure:
        return Figure.of([r[name] / self.pack_bytes for r in rounds])

    def slow(self, images_per_s: float) -> dict[str, Any]:
        """Measure a cold and a warm epoch with a step that uses 80 % of the decoding rate.

        The store has a latency and twice the bandwidth that decoding needs, and shares the cores.
        """
        need = images_per_s * self.pack_bytes / max(1, len(self._samples()))
        step_s = 1.25 * self._batch_size / images_per_s
        rounds = []
        with slow_store(self._root, bytes_per_s=BANDWIDTH_NEEDS * need) as url:
            for _ in range(self._rounds):
                self._clear()
                (cold,) = self._epochs(f"{url}/large", share=1.5)
                fresh = self._epochs(str(self._root / "large"), share=0)[0]
                self._clear()
                stepped, again = self._epochs(f"{url}/large", share=1.5, step_s=step_s, epochs=2)
                rounds.append({"cold": cold, "fresh": fresh, "stepped": stepped, "again": again})
        return {
            "rounds": rounds,
            "bytes_per_s": BANDWIDTH_NEEDS * need,
            "latency_s": LATENCY_S,
            "summary": {
                "beside a step: cold by warm epoch, images/s": _ratio(
                    rounds, "stepped", "again", "images_per_s"
                ),
                "beside a step: waiting, second half": _figure(
                    rounds, "stepped", "late_wait_share"
                ),
                "beside a step: waiting in the warm epoch": _figure(
                    rounds, "again", "late_wait_share"
                ),
                "most fetched by consumed, 16 batches": _figure(rounds, "stepped", "demand"),
            },
        }


def _figure(rounds: list[dict[str, Any]], who: str, what: str) -> Figure:
    return Figure.of([r[who][what] for r in rounds])


def _ratio(rounds: list[dict[str, Any]], above: str, below: str, what: str) -> Figure:
    return Figure.of([r[above][what] / r[below][what] for r in rounds])


def _table(title: str, summary: dict[str, Figure]) -> Table:
    table = Table("", "median", "lowest", "highest", title=title)
    for name, figure in summary.items():
        table.add_row(name, *(f"{v:.4g}" for v in (figure.median, figure.low, figure.high)))
    return table


def main(argv: list[str] | None = None) -> None:
    """Parse the command line and measure."""
    parser = argparse.ArgumentParser(prog="benchmarks.cache", description=__doc__)
    parser.add_argument("--data", type=Path, help="your own image folder, <class>/*.jpg")
    parser.add_argument(
        "--work", type=Path, default=Path("demo"), help="folder for images and packs"
    )
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=64)
    options = parser.parse_args(argv)
    console = Console()
    path = measure(
        prepare(options.work, data=options.data),
        rounds=options.rounds,
        batch_size=options.batch_size,
        results=options.results,
        console=console,
    )
    console.print(f"written: {path}", highlight=False)


if __name__ == "__main__":
    main()
