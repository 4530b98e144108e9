"""`python -m benchmarks.compare`: Penstock and every other installed loader, on the same work.

Rounds are interleaved. Measured are images/s, CPU-seconds per 1,000 images, the first batch, and
waits in an emulated training step: medians, spreads and paired ratios. Writes throughput.json to
benchmarks/results, its charts to docs/images, and docs/benchmarks.md; with another --results, a
result and a chart to that folder. With --short-side-256 the images are first resized to that short
side, and the name is throughput-256.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from benchmarks import page
from benchmarks.chart import draw
from benchmarks.data import Prepared, prepare
from benchmarks.demo import comparison_table, ratio_lines
from benchmarks.record import RESULTS, comparison_record, write_result
from penstock.cache import ConfigError, PenstockError
from penstock.pipeline.bench import RoundSize, compare, export_files, machine, versions
from penstock.pipeline.bench.adapters import ADAPTERS, LOADERS, Work, split_installed
from penstock_bench_loaders.simplejpeg import fastest_decoder

if TYPE_CHECKING:
    from collections.abc import Sequence

ROUNDS = 5
LEAST_ROUNDS = 5  # below, a median of a machine that drifts is no evidence
SHORT_SIDE = 256
SHORT_SIDE_QUALITY = 92  # of the rewritten JPEGs
SCRATCH = "loaders"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One comparison. name: of its result. record: describes the images in results."""

    name: str
    folder: Path
    pack: Path
    record: dict[str, Any]


def original(prepared: Prepared) -> Case:
    """Return the unchanged JPEGs."""
    return Case(
        name="throughput",
        folder=prepared.images.train.absolute(),
        pack=prepared.pack.absolute(),
        record=prepared.record() | {"short_side": None},
    )


def short_side_256(prepared: Prepared, place: Path) -> Case:
    """Resize the images to a short side of 256 and pack them with Penstock. Other loaders read the
    pack's JPEGs, so that all decode the same bytes."""
    from penstock import Dataset, pack

    packed, folder = place / "pack", place / "files"
    shutil.rmtree(place, ignore_errors=True)
    pack(
        str(prepared.images.train),
        str(packed),
        short_side=SHORT_SIDE,
        quality=SHORT_SIDE_QUALITY,
        workers=int(machine()["cores"]),
    )
    with Dataset(packed) as dataset:
        export_files(dataset, folder)
    sizes = [path.stat().st_size for path in folder.rglob("*.jpg")]
    report = {"short_side": SHORT_SIDE, "mean_bytes": round(sum(sizes) / len(sizes))}
    return Case(
        name=f"throughput-{SHORT_SIDE}",
        folder=folder.absolute(),
        pack=packed.absolute(),
        record=prepared.record() | report,
    )


def measure(
    case: Case,
    *,
    loaders: Sequence[str] = LOADERS,
    rounds: int = ROUNDS,
    size: RoundSize,
    scratch: Path,
    batch_size: int = 128,
    crop: int = 224,
    results: Path = RESULTS,
    console: Console,
) -> Path:
    """Play the rounds of Penstock and all other installed loaders; print and write the result.

    scratch: for converted data of the loaders. Returns the result's path. Raises ConfigError for an
    unknown loader, NotTheSameWorkError, ChildFailedError.
    """
    there, missing = split_installed(loaders)
    work = Work(
        folder=case.folder,
        pack=case.pack,
        scratch=scratch.absolute(),
        batch_size=batch_size,
        size=crop,
        workers=int(machine()["cores"]),
    )
    names = ["penstock", *(name for name in there if name != "penstock")]
    distributions = tuple(filter(None, (ADAPTERS[name].distribution for name in names)))
    console.print(
        f"{machine()}\n{versions(*distributions)}\n{case.record}", highlight=False, style="dim"
    )
    for name, install in missing.items():
        console.print(f"{name} isn't installed, left out. {install}", highlight=False)
    with console.status("other loaders convert what they need") as status:
        done = compare(
            names,
            work,
            rounds=rounds,
            size=size,
            progress=lambda played: status.update(f"{played} of {rounds * len(names)} rounds"),
        )
    console.print(comparison_table(done))
    for line in ratio_lines(done):
        console.print(line, highlight=False)
    report = comparison_record(done, work, case.record)
    report |= {
        "not_installed": missing,
        "decoder_of_the_rest": fastest_decoder(),
        "rounds_played": rounds,
    }
    return write_result(case.name, report, folder=results, distributions=distributions)


def main(argv: list[str] | None = None) -> int:
    """Parse the command line and measure. Returns 0 on success, 1 on failure, 2 for a wrong command
    line."""
    parser = argparse.ArgumentParser(prog="benchmarks.compare", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="short rounds, for a quick check")
    parser.add_argument("--data", type=Path, help="your own image folder, <class>/*.jpg")
    parser.add_argument(
        "--work", type=Path, default=Path("demo"), help="folder for images and packs"
    )
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--rounds", type=int, help=f"{ROUNDS}, or 3 if quick")
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument(
        "--loaders", nargs="+", metavar="LOADER", help=f"any of {', '.join(LOADERS)}"
    )
    parser.add_argument("--short-side-256", action="store_true", help="resize the images first")
    options = parser.parse_args(argv)
    console = Console(width=None if sys.stdout.isatty() else 140)
    kept = options.results == RESULTS and not options.quick
    try:
        rounds = options.rounds or (3 if options.quick else ROUNDS)
        if kept and rounds < LEAST_ROUNDS:
            raise ConfigError(
                f"--rounds: got {rounds}, wanted at least {LEAST_ROUNDS} for figures that the "
                "documentation shows. Use --quick for a quick check."
            )
        split_installed(options.loaders or LOADERS)  # report an unknown name before the work
        prepared = prepare(options.work, data=options.data)
        cases = [original(prepared)]
        if options.short_side_256:
            cases.append(short_side_256(prepared, options.work / f"short-side-{SHORT_SIDE}"))
        for case in cases:
            path = measure(
                case,
                loaders=options.loaders or LOADERS,
                rounds=rounds,
                size=RoundSize(timed=6, stepped=4) if options.quick else RoundSize(),
                scratch=options.work / SCRATCH,
                batch_size=options.batch_size,
                results=options.results,
                console=console,
            )
            console.print(f"   {path}", highlight=False)
            if not kept:
                draw(path, path.with_suffix(".svg"))
        if kept:
            page.publish()
    except PenstockError as error:
        console.print(f"[bold red]{type(error).__name__}[/bold red] {error}", highlight=False)
        return 2 if isinstance(error, ConfigError) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
