"""`python -m benchmarks.versus OTHER_CHECKOUT`: this checkout compared with another one, in pairs.

Each pair plays both, one directly after the other in rotating order, each in a new process that
imports only its own checkout, so that a drift of the machine affects both. A ratio is computed
within a pair and is this checkout's gain: above 1 it is better, for every figure. Printed and
written are the median of the ratios with the lowest and the highest, and the medians of both sides.
With --least the exit code is 1 if a median is below it. If others use the machine, judge by the
CPU-seconds.

Cases: pack and folder (the native engine, imagenet_train), torch (a map dataset that decodes with
Pillow in workers). The images are this checkout's photographs, or --data.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import tomllib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from benchmarks.photographs import borrow_images, make_photographs
from benchmarks.record import RESULTS, write_result
from penstock.cache import ConfigError, PenstockError
from penstock.pipeline.bench import ChildFailedError, Figure, machine

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

HERE = Path(__file__).resolve().parent.parent
CASES = ("pack", "folder", "torch")
PAIRS = 9
# Of a figure: whether more of it is better.
FIGURES: Mapping[str, bool] = {
    "samples_per_s": True,
    "cpu_s_per_1000": False,
    "first_batch_s": False,
    "first_batch_cpu_s": False,
}
TITLES = {
    "samples_per_s": "samples/s",
    "cpu_s_per_1000": "CPU s/1,000",
    "first_batch_s": "first batch, s",
    "first_batch_cpu_s": "first batch, CPU s",
}
_PLAY_TIMEOUT_S = 600.0  # a side that hangs ends the comparison


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """The work of each side: batches of so many samples, cropped to size x size.

    settle: batches that use up what was prefetched before counting. timed: batches that are
    counted.
    """

    batch_size: int = 128
    size: int = 224
    workers: int = 2
    settle: int = 8
    timed: int = 48


@dataclass(frozen=True, slots=True, kw_only=True)
class Gain:
    """One figure of one case. ratio: this checkout's gain over the other one in a pair. ours,
    theirs: medians of the figure over the pairs."""

    ratio: Figure
    ours: float
    theirs: float


def gains(pairs: Sequence[tuple[Mapping[str, float], Mapping[str, float]]]) -> dict[str, Gain]:
    """Return each figure over pairs of (ours, theirs)."""
    found = {}
    for name, more_is_better in FIGURES.items():
        sides = [(ours[name], theirs[name]) for ours, theirs in pairs]
        found[name] = Gain(
            ratio=Figure.of([a / b if more_is_better else b / a for a, b in sides]),
            ours=statistics.median(a for a, _ in sides),
            theirs=statistics.median(b for _, b in sides),
        )
    return found


def checked(checkout: Path) -> Path:
    """Return a folder that contains our packages. Raises ConfigError."""
    if not (checkout / "readers").is_dir() and not (checkout / "penstock").is_dir():
        raise ConfigError(f"{checkout} isn't a checkout: it has neither readers/ nor penstock/.")
    return checkout.resolve()


def write_entry_points(checkout: Path, folder: Path) -> Path:
    """Write the checkout's entry points as those of an installed distribution, for PYTHONPATH.

    Otherwise those of the environment would be found, which name modules of the installed version:
    an older checkout would verify images with newer code, whose results it can't read.
    """
    project = checkout / "pyproject.toml"
    groups = (
        tomllib.loads(project.read_text())["project"].get("entry-points", {})
        if project.is_file()
        else {}
    )
    lines = []
    for group, points in groups.items():
        lines += [f"[{group}]", *(f"{name} = {where}" for name, where in points.items())]
    place = folder / "penstock-0.dist-info"
    place.mkdir(parents=True)
    (place / "METADATA").write_text("Metadata-Version: 2.1\nName: penstock\nVersion: 0\n")
    (place / "entry_points.txt").write_text("\n".join(lines) + "\n")
    return folder


class Side:
    """A checkout with a copy of the images and a pack of its own below `place`."""

    def __init__(self, checkout: Path, images: Path, place: Path, load: Load) -> None:
        self.checkout = checked(checkout)
        self._load = load
        self._folder, self._pack = place / "images", place / "pack"
        self._metadata = write_entry_points(self.checkout, place / "metadata")
        # An index of a folder lies inside or next to it: neither side may see the other's.
        shutil.copytree(images, self._folder, copy_function=_link)

    def prepare(self) -> None:
        """Pack and index, untimed. Raises ChildFailedError."""
        self._run("prepare", case="pack")

    def play(self, case: str) -> dict[str, float]:
        """Run a case once in a new process. Raises ChildFailedError."""
        return self._run("play", case=case)

    def _run(self, what: str, *, case: str) -> dict[str, Any]:
        task = asdict(self._load) | {
            "what": what,
            "case": case,
            "checkout": str(self.checkout),
            "folder": str(self._folder),
            "pack": str(self._pack),
        }
        child = Path(__file__).with_name("versus_child.py")
        with tempfile.TemporaryDirectory() as cwd:  # -P and this: no folder's names hide packages
            try:
                done = subprocess.run(
                    [sys.executable, "-P", str(child), json.dumps(task)],
                    env=os.environ | {"PYTHONPATH": f"{self.checkout}{os.pathsep}{self._metadata}"},
                    cwd=cwd,
                    capture_output=True,
                    text=True,
                    timeout=_PLAY_TIMEOUT_S,
                )
            except subprocess.TimeoutExpired as error:
                raise ChildFailedError(
                    f"{what} {case} in {self.checkout} took more than {_PLAY_TIMEOUT_S:g} s."
                ) from error
        if done.returncode:
            raise ChildFailedError(
                f"{what} {case} in {self.checkout} ended with {done.returncode}. Its stderr ends:\n"
                + done.stderr[-2000:]
            )
        report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return report


def _link(source: str, target: str) -> None:
    try:
        os.link(os.path.realpath(source), target)
    except OSError:  # another file system
        shutil.copyfile(source, target)


def versus(
    other: Path,
    images: Path,
    *,
    cases: Sequence[str] = CASES,
    pairs: int = PAIRS,
    load: Load,
    report: Callable[[str], None],
) -> dict[str, list[tuple[dict[str, float], dict[str, float]]]]:
    """Play the pairs; return (ours, theirs) of each, by case. Raises ConfigError,
    ChildFailedError."""
    with tempfile.TemporaryDirectory(prefix="versus-") as scratch:
        ours = Side(HERE, images, Path(scratch) / "ours", load)
        theirs = Side(other, images, Path(scratch) / "theirs", load)
        for side in (ours, theirs):
            if set(cases) - {"torch"}:  # it reads the files as they are
                report(f"preparing {side.checkout.name}")
                side.prepare()
        played: dict[str, list[tuple[dict[str, float], dict[str, float]]]] = {c: [] for c in cases}
        for number in range(pairs):
            for case in cases:
                report(f"{case}, pair {number + 1} of {pairs}")
                if number % 2:
                    second = theirs.play(case)
                    played[case].append((ours.play(case), second))
                else:
                    first = ours.play(case)
                    played[case].append((first, theirs.play(case)))
        return played


def show(found: Mapping[str, Mapping[str, Gain]], console: Console) -> None:
    """Print a row per figure."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("case", "figure", "this", "other", "this is better by", "range"):
        table.add_column(name, justify="left" if name in ("case", "figure") else "right")
    for case, figures in found.items():
        for name, gain in figures.items():
            table.add_row(
                case,
                TITLES[name],
                f"{gain.ours:,.4g}",
                f"{gain.theirs:,.4g}",
                f"{gain.ratio.median:.3f}",
                f"{gain.ratio.low:.3f} to {gain.ratio.high:.3f}",
            )
    console.print(table)


def below(found: Mapping[str, Mapping[str, Gain]], least: float) -> list[str]:
    """Return the medians that are below the limit."""
    return [
        f"{case}: {TITLES[name]} {gain.ratio.median:.3f}"
        for case, figures in found.items()
        for name, gain in figures.items()
        if gain.ratio.median < least
    ]


def main(argv: list[str] | None = None, *, console: Console | None = None) -> int:
    """Parse the command line and play. Returns 1 if --least is missed or a side failed, 2 for a
    wrong command line."""
    console = console or Console()
    parser = argparse.ArgumentParser(prog="benchmarks.versus", description=__doc__)
    parser.add_argument("other", type=Path, help="the other checkout's folder")
    parser.add_argument("--pairs", type=int, default=PAIRS)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--least", type=float, help="exit with 1 below this median ratio")
    parser.add_argument("--quick", action="store_true", help="one pair of a few small batches")
    parser.add_argument("--data", type=Path, help="your own image folder, <class>/*.jpg")
    parser.add_argument("--work", type=Path, default=Path("demo"))
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args(argv)
    cores = int(machine()["cores"])
    load = Load(batch_size=8, size=32, workers=1, settle=1, timed=2) if options.quick else Load()
    pairs = 1 if options.quick else options.pairs
    try:
        if pairs < PAIRS and not options.quick:
            raise ConfigError(f"--pairs {pairs}: wanted at least {PAIRS} for a meaningful median.")
        other = checked(options.other)
        if options.data is not None:
            images = borrow_images(options.data, options.work / "yours").train
        else:
            count = 64 if options.quick else 3072
            place = options.work / f"versus-{count}"
            images = make_photographs(
                place, train_images=count, eval_images=16, workers=cores
            ).train
        with console.status("") as status:
            played = versus(
                other, images, cases=options.cases, pairs=pairs, load=load, report=status.update
            )
    except PenstockError as error:
        console.print(str(error), markup=False, highlight=False)
        return 2 if isinstance(error, ConfigError) else 1
    found = {case: gains(both) for case, both in played.items()}
    show(found, console)
    measured = {
        "pairs": pairs,
        "load": asdict(load),
        "gains": {c: {n: asdict(g) for n, g in figures.items()} for c, figures in found.items()},
        "played": played,
    }
    write_result("versus", measured, folder=options.results)
    missed = [] if options.least is None else below(found, options.least)
    for line in missed:
        console.print(f"below {options.least:g}: {line}", highlight=False)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
