"""`python -m benchmarks.dlio`: AU of DLIO-style jobs at the pace of published accelerators.

The samples of each job have the published size. Its step is a wait of the published duration times
a reported factor k, which is chosen by the measured rate of this disk: a job demands at most half
of it, so that the loader decides the result, not the disk. k is 1 if this disk can feed the real
accelerator. Before each run the data is dropped from the page cache, and each run ends before all
of it was read once. torch's DataLoader, and a batch that is always ready (the overhead of the
emulation itself), play in the same rounds. If Penstock stays below 99 %, `fed_at_k` reports how
much slower a job it can feed. Writes benchmarks/results/dlio.json.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from benchmarks.dlio_child import LOADERS, LoaderName
from benchmarks.dlio_data import GeneratedSet, forget, make
from benchmarks.dlio_jobs import (
    DISK_SHARE,
    NAMES,
    WORKLOADS,
    DlioWorkload,
    Pace,
    measured_seconds,
    pace_of,
)
from benchmarks.dlio_task import Task
from benchmarks.record import RESULTS, write_result
from penstock.pipeline.bench import Child, Figure, machine, versions

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

ROUNDS = 5
SECONDS = 6.0
CLAIM_AU = 99.0
_SLOWER = (2, 4, 8, 16, 32, 64)  # times; where the claim isn't reached, from when on it would be
_LEAST_STEPS = 4
_REHEARSALS = 3
_SAMPLES_QUICK = 48
_BYTES_QUICK = 131_072
_FIGURES = ("au", "samples_per_s", "bytes_per_s", "cpu_s_per_1000", "wait_p50_s", "wait_p99_s")


def measure(
    names: Sequence[str],
    data: Path,
    *,
    rounds: int = ROUNDS,
    seconds: float = SECONDS,
    quick: bool = False,
    results: Path = RESULTS,
    console: Console,
) -> Path:
    """Generate missing data below `data`, play the rounds, print and write. Returns the path of the
    result."""
    console.print(f"{machine()}\n{versions()}", highlight=False, style="dim")
    record: dict[str, Any] = {}
    for workload in WORKLOADS:
        if workload.name in names:
            asked = _shrunk(workload) if quick else workload
            record[workload.name] = report = _measure_one(
                asked, data, rounds=rounds, seconds=seconds, console=console
            )
            console.print(_line(workload.name, report), highlight=False)
    console.print(_table(record))
    written = {"rounds": rounds, "disk_share": DISK_SHARE, "quick": quick, "workloads": record}
    return write_result("dlio", written, folder=results)


def _shrunk(workload: DlioWorkload) -> DlioWorkload:
    """Return a workload for tests: few samples in batches of 4, all small."""
    return replace(
        workload,
        samples=_SAMPLES_QUICK,
        batch_size=4,
        sample_bytes=min(workload.size, _BYTES_QUICK),
    )


def _made(workload: DlioWorkload, data: Path) -> GeneratedSet:
    # Jobs of the same samples read the same files.
    shared = workload.kind in ("jpeg", "npz")
    name = f"{workload.kind}-{workload.size}" if shared else workload.name
    return make(
        data / f"{name}-{workload.samples}",
        kind=workload.kind,
        samples=workload.samples,
        sample_bytes=workload.size,
        workers=int(machine()["cores"]),
    )


def _measure_one(
    workload: DlioWorkload, data: Path, *, rounds: int, seconds: float, console: Console
) -> dict[str, Any]:
    with console.status(f"{workload.name}: generating data"):
        made = _made(workload, data.absolute())
    task = Task(
        work=workload.work,
        files=str(made.files),
        pack=str(made.pack),
        sample_bytes=made.sample_bytes,
        batch_size=workload.batch,
        workers=int(machine()["cores"]),
        kind=workload.kind,
    )
    names: tuple[LoaderName, ...] = tuple(LOADERS)
    with _players([*names, "raw"], task) as players, console.status(workload.name) as status:
        pace = _paced(players, workload, made, seconds=seconds)
        asked = _asked(workload, made, pace.step_s, seconds=seconds)
        runs: dict[str, list[dict[str, Any]]] = {name: [] for name in (*names, "raw")}
        for number in range(rounds):
            turn = list(runs) if number % 2 == 0 else list(reversed(runs))
            for name in turn:
                status.update(f"{workload.name}: round {number + 1} of {rounds}, {name}")
                runs[name].append(_played(players[name], made, asked))
        status.update(f"{workload.name}: slower steps")
        fed_at = _fed_at(players["penstock"], workload, made, pace, runs, seconds=seconds)
    return {
        "accelerator": asdict(workload.pace),
        "note": workload.note,
        "data": made.record(),
        "batch_size": workload.batch,
        "seconds": asked["seconds"],
        **asdict(pace),
        "fed_at_k": fed_at,
        "load_average_5_min": os.getloadavg()[1],
        "raw_rounds": [run["bytes_per_s"] for run in runs.pop("raw")],
        "summary": {name: _summary(rows) for name, rows in runs.items()},
        "runs": runs,
    }


def _asked(
    workload: DlioWorkload, made: GeneratedSet, step_s: float, *, seconds: float
) -> dict[str, float]:
    most_s = measured_seconds(
        workload, step_s, samples=made.samples, most_s=max(seconds, _LEAST_STEPS * step_s)
    )
    return {"step_s": step_s, "seconds": most_s}


def _fed_at(
    player: Child,
    workload: DlioWorkload,
    made: GeneratedSet,
    pace: Pace,
    runs: Mapping[str, Sequence[Mapping[str, Any]]],
    *,
    seconds: float,
) -> float | None:
    """Return the first k, doubled from the job's, at which Penstock reaches the claimed AU: the
    job's own by its median, later ones by one run each. None if no k suffices."""
    if statistics.median(run["au"] for run in runs["penstock"]) >= CLAIM_AU:
        return pace.k
    for times in _SLOWER:
        asked = _asked(workload, made, times * pace.step_s, seconds=seconds)
        if _played(player, made, asked)["au"] >= CLAIM_AU:
            return times * pace.k
    return None


@contextlib.contextmanager
def _players(names: Sequence[str], task: Task) -> Iterator[dict[str, Child]]:
    """Start one process per loader, kept over the rounds, so that imports happen
    before the first."""
    with contextlib.ExitStack() as stack:
        report = json.dumps(asdict(task))
        players = {
            name: stack.enter_context(Child("benchmarks.dlio_child", [name, report]))
            for name in names
        }
        for player in players.values():
            player.receive()
        yield players


def _played(player: Child, made: GeneratedSet, asked: Mapping[str, float]) -> dict[str, Any]:
    for folder in {made.files, made.pack}:
        forget(folder)
    player.send(asked)
    return player.receive()


def _paced(
    players: Mapping[str, Child], workload: DlioWorkload, made: GeneratedSet, *, seconds: float
) -> Pace:
    def rate(name: str, what: str) -> float:
        asked = {"step_s": 0.0, "seconds": seconds}
        return statistics.median(
            float(_played(players[name], made, asked)[what]) for _ in range(_REHEARSALS)
        )

    decodes = workload.work in ("decode", "detect")
    return pace_of(
        workload,
        raw_bytes_per_s=rate("raw", "bytes_per_s"),
        decode_samples_per_s=rate("penstock", "samples_per_s") if decodes else 0.0,
    )


def _summary(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {name: asdict(Figure.of([run[name] for run in runs])) for name in _FIGURES}


def _line(name: str, report: Mapping[str, Any]) -> str:
    """Return the parameters of a workload, and whether the claim holds."""
    au = report["summary"]["penstock"]["au"]["median"]
    return (
        f"{name}: steps {report['k']:g} times as long as published "
        f"({1e3 * report['step_s']:.1f} ms over {report['batch_size']}), "
        f"which demands {report['required_bytes_per_s'] / 1e6:.0f} MB/s "
        f"of the {report['raw_bytes_per_s'] / 1e6:.0f} that the disk provides. AU {au:.2f} %"
        + (
            "."
            if au >= CLAIM_AU
            else f": below {CLAIM_AU:g}, which it reaches at k = {report['fed_at_k']}."
        )
    )


def _table(record: Mapping[str, Any]) -> Table:
    table = Table("job", "loader", "AU %", "low..high", "samples/s", "MB/s", "CPU-s/1000")
    for name, report in record.items():
        for loader, summary in report["summary"].items():
            au = summary["au"]
            table.add_row(
                name,
                loader,
                f"{au['median']:.2f}",
                f"{au['low']:.2f}..{au['high']:.2f}",
                f"{summary['samples_per_s']['median']:,.1f}",
                f"{summary['bytes_per_s']['median'] / 1e6:,.0f}",
                f"{summary['cpu_s_per_1000']['median']:.3f}",
            )
    return table


def main(argv: list[str] | None = None) -> None:
    """Parse the command line and run the measurement."""
    parser = argparse.ArgumentParser(prog="benchmarks.dlio", description=__doc__)
    parser.add_argument("--workload", nargs="+", choices=[*NAMES, "all"], default=["all"])
    parser.add_argument(
        "--quick", action="store_true", help="2 rounds of tiny jobs, for a quick check"
    )
    parser.add_argument(
        "--data", type=Path, default=Path("demo/dlio"), help="folder for generated data (28 GB)"
    )
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--seconds", type=float, default=SECONDS, help="maximum duration of a run")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args(argv)
    path = measure(
        NAMES if "all" in options.workload else options.workload,
        options.data,
        rounds=2 if options.quick else options.rounds,
        seconds=1.0 if options.quick else options.seconds,
        quick=options.quick,
        results=options.results,
        console=(console := Console()),
    )
    console.print(f"   {path}", highlight=False)


if __name__ == "__main__":
    main()
