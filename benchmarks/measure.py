"""Interleaved rounds of several peers over the same work: medians, spreads, paired ratios.

Every round plays all peers one after the other, in turning order, so that a drifting machine drifts
for all of them. Ratios are taken inside a round and then the median over the rounds. Peers whose
tensors
differ are not compared: that is an error.
"""

from __future__ import annotations

import contextlib
import datetime
import importlib.metadata
import json
import math
import os
import platform
import statistics
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.children import Child
from benchmarks.player import Pixels, Round, RoundSize, round_from_json
from cache.errors import PenstockError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from benchmarks.peers import Name, Work

RESULTS = Path(__file__).parent / "results"
# Some hundreds of images a peer; means of normalised pixels then agree within a few hundredths,
# while a forgotten or doubled normalisation moves them by 0.5 and more.
MEAN_TOLERANCE = 0.15
DEVIATION_TOLERANCE = 0.12
DETAIL_TOLERANCE = 0.25  # relative; a resize without antialiasing, or nearest, is beyond
# The accelerator of the stepped batches takes this share of what the fastest peer was heard to
# deliver: that one can keep up, if its read-ahead is any good, and the others show by how much they
# can't.
ACCELERATOR_SHARE = 0.8


class NotTheSameWorkError(PenstockError, ValueError):
    """Two peers' tensors differ, so their times say nothing about one another."""


class Player:
    """A peer in a process of its own. Leaving the context ends the process."""

    def __init__(self, name: Name, work: Work) -> None:
        self.name = name
        told = {k: str(v) if isinstance(v, Path) else v for k, v in asdict(work).items()}
        self._child = Child("benchmarks.player", [name, json.dumps(told)])
        self._ready = False

    def play(self, size: RoundSize) -> Round:
        """Play one round. Raises ChildFailedError if the process ends instead."""
        if not self._ready:
            self._child.answer()
            self._ready = True
        self._child.say(asdict(size))
        return round_from_json(self._child.answer())

    def __enter__(self) -> Player:
        return self

    def __exit__(self, *error: object) -> None:
        self._child.__exit__(*error)


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A median over the rounds and the lowest and highest round."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Figure:
        return cls(median=statistics.median(values), low=min(values), high=max(values))


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """One peer over all rounds.

    images_per_s, cpu_s_per_1000 (CPU-seconds per 1,000 images, workers included), first_batch_s
    (constructor to first batch), wait_share (of the time with a training step; 0 without), and
    batch_wait_ms, batch_step_ms: how a batch's time with a training step splits.
    speed_ratio, cpu_ratio: of the first peer to this one, in the same round; above 1 the first is
    better.
    """

    images_per_s: Figure
    cpu_s_per_1000: Figure
    first_batch_s: Figure
    wait_share: Figure
    batch_wait_ms: Figure
    batch_step_ms: Figure
    speed_ratio: Figure
    cpu_ratio: Figure


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Peers in the order that was asked for; the first is the one that ratios belong to."""

    summaries: Mapping[Name, Summary]
    rounds: Mapping[Name, Sequence[Round]]
    size: RoundSize


def compare(
    names: Sequence[Name],
    work: Work,
    *,
    rounds: int,
    size: RoundSize,
    progress: Callable[[int], None] | None = None,
) -> Comparison:
    """Play `rounds` interleaved rounds. progress: told how many rounds of all peers are played.

    Raises NotTheSameWorkError where the peers' tensors differ, ChildFailedError where one fails.
    """
    played: dict[Name, list[Round]] = {name: [] for name in names}
    with contextlib.ExitStack() as stack:
        players = [stack.enter_context(Player(name, work)) for name in names]
        size = _rehearse(players, work, size)
        for number in range(rounds):
            sized = replace(size, seed=work.seed + number)
            for player in players if number % 2 == 0 else reversed(players):
                played[player.name].append(player.play(sized))
                if progress is not None:
                    progress(sum(map(len, played.values())))
    check_same_work(played, pooled=True)
    first = played[names[0]]
    return Comparison(
        summaries={name: summarise(played[name], first) for name in names}, rounds=played, size=size
    )


def _rehearse(players: Sequence[Player], work: Work, size: RoundSize) -> RoundSize:
    """A short round of every peer that isn't counted: it warms the page cache, refuses unequal
    tensors before time is spent on them, and says how long a step an accelerator may have.
    """
    short = replace(size, looked=1, stepped=0)
    heard = {player.name: [player.play(short)] for player in players}
    check_same_work(heard, pooled=False)
    if not size.stepped or size.step_ms:
        return size
    fastest = max(rounds[0].images_per_s for rounds in heard.values())
    return replace(size, step_ms=1000 * work.batch_size / (ACCELERATOR_SHARE * fastest))


def summarise(rounds: Sequence[Round], first: Sequence[Round]) -> Summary:
    """The medians of a peer's rounds; ratios are paired with the rounds of the first peer."""
    pairs = list(zip(first, rounds, strict=True))
    return Summary(
        images_per_s=Figure.of([r.images_per_s for r in rounds]),
        cpu_s_per_1000=Figure.of([r.cpu_s_per_1000 for r in rounds]),
        first_batch_s=Figure.of([r.build_s + r.first_batch_s for r in rounds]),
        wait_share=Figure.of([r.wait_share for r in rounds]),
        batch_wait_ms=Figure.of([r.batch_wait_ms for r in rounds]),
        batch_step_ms=Figure.of([r.batch_step_ms for r in rounds]),
        speed_ratio=Figure.of([a.images_per_s / b.images_per_s for a, b in pairs]),
        cpu_ratio=Figure.of([b.cpu_s_per_1000 / a.cpu_s_per_1000 for a, b in pairs]),
    )


def check_same_work(played: Mapping[Name, Sequence[Round]], *, pooled: bool) -> None:
    """Compare every peer's tensors with the first one's; pooled: their pixels' statistics too."""
    looks = {name: _pool([r.pixels for r in rounds]) for name, rounds in played.items()}
    reference_name, reference = next(iter(looks.items()))
    for name, pixels in looks.items():
        for what in ("shape", "dtype", "label_dtype"):
            if getattr(pixels, what) != getattr(reference, what):
                _refuse(name, reference_name, what, getattr(pixels, what), getattr(reference, what))
        if not pooled:
            continue
        for what, tolerance in (("mean", MEAN_TOLERANCE), ("deviation", DEVIATION_TOLERANCE)):
            mine, wanted = getattr(pixels, what), getattr(reference, what)
            if max(abs(a - b) for a, b in zip(mine, wanted, strict=True)) > tolerance:
                _refuse(name, reference_name, f"channels' {what}", mine, wanted)
        if not math.isclose(pixels.detail, reference.detail, rel_tol=DETAIL_TOLERANCE):
            _refuse(name, reference_name, "detail", pixels.detail, reference.detail)


def _refuse(name: str, reference: str, what: str, got: object, wanted: object) -> None:
    raise NotTheSameWorkError(
        f"{name}: {what} of its batches is {got}, but {wanted} at {reference}. They don't do "
        "the same work, so they aren't compared. Give both the same operations."
    )


def _pool(looks: Sequence[Pixels]) -> Pixels:
    """Means over rounds of what each round saw."""

    def mean(rows: Sequence[tuple[float, ...]]) -> tuple[float, ...]:
        return tuple(statistics.fmean(column) for column in zip(*rows, strict=True))

    return Pixels(
        shape=looks[-1].shape,
        dtype=looks[-1].dtype,
        label_dtype=looks[-1].label_dtype,
        labels=max(look.labels for look in looks),
        mean=mean([look.mean for look in looks]),
        deviation=mean([look.deviation for look in looks]),
        detail=statistics.fmean(look.detail for look in looks),
    )


def machine() -> dict[str, Any]:
    """What the figures were measured on: cores that may be used, processor, memory, kernel."""
    text = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    models = [line.partition(":")[2].strip() for line in text.splitlines() if "model name" in line]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cores": len(os.sched_getaffinity(0)),
        "processor": models[0] if models else platform.processor() or platform.machine(),
        "memory_gib": round(memory / 2**30, 1),
        "system": f"{platform.system()} {platform.release()}",
    }


def versions() -> dict[str, str]:
    """Python's version and those of the packages that matter; only the ones that are installed."""
    found = {"python": platform.python_version()}
    names = {
        "penstock": ("penstock",),
        "torch": ("torch",),
        "dali": ("nvidia-dali-cuda130", "nvidia-dali-cuda120"),
        "pillow": ("pillow",),
        "numpy": ("numpy",),
    }
    for name, distributions in names.items():
        for distribution in distributions:
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                found[name] = importlib.metadata.version(distribution)
    return found


def write_result(what: str, measured: Mapping[str, Any], *, folder: Path = RESULTS) -> Path:
    """Write `<folder>/<what>.json`: the measurement, with date, machine and versions."""
    folder.mkdir(parents=True, exist_ok=True)
    now = datetime.datetime.now(datetime.UTC).replace(microsecond=0)
    record = {"what": what, "date": now.isoformat(), "machine": machine(), "versions": versions()}
    path = folder / f"{what}.json"
    path.write_text(json.dumps(record | dict(measured), indent=1, default=str) + "\n")
    return path


def comparison_record(done: Comparison, work: Work, dataset: Mapping[str, Any]) -> dict[str, Any]:
    """A Comparison as JSON values; paths of this machine stay out of it."""
    plain = {f.name: getattr(work, f.name) for f in fields(work)}
    return {
        "dataset": dict(dataset),
        "work": {k: v for k, v in plain.items() if not isinstance(v, Path)},
        "round": asdict(done.size),
        "summary": {name: asdict(summary) for name, summary in done.summaries.items()},
        "rounds": {name: [asdict(r) for r in rounds] for name, rounds in done.rounds.items()},
    }
