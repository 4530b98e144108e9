"""`python -m benchmarks.throughput`: Penstock beside DALI's own reader and torch's DataLoader.

Images/s, CPU-seconds per 1,000 images, first batch, waiting; medians and paired ratios of
interleaved rounds. Writes benchmarks/results/throughput.json.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, cast, get_args

from rich.console import Console

from benchmarks.data import Prepared, prepare
from benchmarks.demo import comparison_table, ratio_lines
from benchmarks.measure import RESULTS, compare, comparison_record, machine, versions, write_result
from benchmarks.peers import Name, Work
from benchmarks.player import RoundSize

if TYPE_CHECKING:
    from collections.abc import Sequence

PEERS: tuple[Name, ...] = ("penstock", "dali", "torch")
PAIRS = 9


def measure(
    prepared: Prepared,
    *,
    peers: Sequence[Name] = PEERS,
    rounds: int,
    size: RoundSize,
    batch_size: int = 128,
    crop: int = 224,
    results: Path = RESULTS,
    console: Console,
) -> Path:
    """Play the rounds, print the table, write the result. Returns its path."""
    work = Work(
        folder=prepared.images.train.absolute(),
        pack=prepared.pack.absolute(),
        batch_size=batch_size,
        size=crop,
        workers=int(machine()["cores"]),
    )
    told = prepared.record()
    console.print(f"{machine()}\n{versions()}\n{told}", highlight=False, style="dim")
    with console.status("playing") as status:
        done = compare(
            peers,
            work,
            rounds=rounds,
            size=size,
            progress=lambda played: status.update(f"{played} of {rounds * len(peers)} rounds"),
        )
    console.print(comparison_table(done))
    for line in ratio_lines(done):
        console.print(line, highlight=False)
    return write_result("throughput", comparison_record(done, work, told), folder=results)


def main(argv: list[str] | None = None) -> None:
    """Parse the command line and measure."""
    parser = argparse.ArgumentParser(prog="benchmarks.throughput", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="3 short rounds: a look, no evidence")
    parser.add_argument("--data", type=Path, help="your own image folder, <class>/*.jpg")
    parser.add_argument("--work", type=Path, default=Path("demo"), help="where images and pack go")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--rounds", type=int, default=PAIRS)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--peers", nargs="+", choices=get_args(Name), default=list(PEERS))
    options = parser.parse_args(argv)
    path = measure(
        prepare(options.work, data=options.data),
        peers=cast("list[Name]", options.peers),
        rounds=3 if options.quick else options.rounds,
        size=RoundSize(timed=6, stepped=4) if options.quick else RoundSize(),
        batch_size=options.batch_size,
        results=options.results,
        console=(console := Console()),
    )
    console.print(f"   {path}", highlight=False)


if __name__ == "__main__":
    main()
