"""Interleaved rounds of several loaders over the same work: medians, spreads, paired ratios.

Every round plays all loaders one after the other, in turning order, so that a drifting machine
drifts for all of them. Ratios are taken inside a round and then the median over the rounds.
Loaders whose tensors differ are not compared: that is an error.
"""

from __future__ import annotations

import contextlib
import math
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.pipeline.bench.adapters.registry import TITLES
from penstock.pipeline.bench.children import Child, ChildFailedError
from penstock.pipeline.bench.figures import Figure
from penstock.pipeline.bench.round import Round, RoundSize, TensorFacts, round_from_json
from penstock.pipeline.bench.sameness import LOOKED_SAMPLES, check_same_work

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from penstock.pipeline.bench.adapters.work import Work

# The accelerator of the stepped batches takes this share of what the fastest loader was heard to
# deliver: that one can keep up, if its read-ahead is any good, and the others show by how much they
# can't.
ACCELERATOR_SHARE = 0.8


class Player:
    """A loader in a process of its own. Leaving the context ends the process."""

    def __init__(self, name: str, work: Work) -> None:
        self.name = name
        self._child = Child("penstock.pipeline.bench.player", [name, work.to_json()])

    def ready(self) -> None:
        """Wait until it has imported and converted what it needs. Raises ChildFailedError."""
        with self._named():
            self._child.answer()

    def play(self, size: RoundSize) -> Round:
        """Play one round. Raises ChildFailedError, which names the loader, if the process ends
        instead."""
        with self._named():
            self._child.say(asdict(size))
            return round_from_json(self._child.answer())

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        try:
            yield
        except ChildFailedError as error:
            raise ChildFailedError(f"{TITLES[self.name]} failed. {error}") from error

    def __enter__(self) -> Player:
        return self

    def __exit__(self, *error: object) -> None:
        self._child.__exit__(*error)


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """One loader over all rounds.

    images_per_s, cpu_s_per_1000 (CPU-seconds per 1,000 images, workers included), first_batch_s
    (constructor to first batch), wait_share (of the time with a training step; 0 without), and
    batch_wait_ms, batch_step_ms: how a batch's time with a training step splits.
    speed_ratio, cpu_ratio: of the first loader to this one, in the same round; above 1 the first is
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
    """Loaders in the order that was asked for; the first is the one that ratios belong to."""

    summaries: Mapping[str, Summary]
    rounds: Mapping[str, Sequence[Round]]
    size: RoundSize


def compare(
    names: Sequence[str],
    work: Work,
    *,
    rounds: int,
    size: RoundSize,
    progress: Callable[[int], None] | None = None,
) -> Comparison:
    """Play `rounds` interleaved rounds. progress: told how many rounds of all loaders are played.

    Each loader is a process of its own that first converts the data if it has a format of its own,
    one loader after the other; that isn't timed.

    Raises NotTheSameWorkError where the loaders' tensors differ, ChildFailedError where one fails.
    """
    size = fitted(size, work, rounds=rounds)
    played: dict[str, list[Round]] = {name: [] for name in names}
    with contextlib.ExitStack() as stack:
        players = []
        for name in names:
            players.append(stack.enter_context(Player(name, work)))
            players[-1].ready()
        size = _rehearse(players, work, size)
        for number in range(rounds):
            sized = replace(size, seed=work.seed + number)
            for player in players if number % 2 == 0 else reversed(players):
                played[player.name].append(player.play(sized))
                if progress is not None:
                    progress(sum(map(len, played.values())))
    check_same_work(_pixels(played), pooled=True)
    first = played[names[0]]
    return Comparison(
        summaries={name: summarise(played[name], first) for name in names}, rounds=played, size=size
    )


def fitted(size: RoundSize, work: Work, *, rounds: int) -> RoundSize:
    """The round with enough batches for this work.

    Enough are looked at to tell whether the work is the same; more are taken to settle than torch's
    workers keep ready, two each and the one that is being made; and some of each worker are timed.
    """
    return replace(
        size,
        looked=max(size.looked, math.ceil(LOOKED_SAMPLES / (rounds * work.batch_size))),
        settle=max(size.settle, 2 * work.workers + 1),
        timed=max(size.timed, 4 * work.workers),
    )


def _rehearse(players: Sequence[Player], work: Work, size: RoundSize) -> RoundSize:
    """A short round of every loader that isn't counted: it warms the page cache, refuses unequal
    tensors before time is spent on them, and says how long a step an accelerator may have.
    """
    short = replace(size, looked=1, stepped=0)
    rehearsed = {player.name: [player.play(short)] for player in players}
    check_same_work(_pixels(rehearsed), pooled=False)
    if not size.stepped or size.step_ms:
        return size
    fastest = max(rounds[0].images_per_s for rounds in rehearsed.values())
    return replace(size, step_ms=1000 * work.batch_size / (ACCELERATOR_SHARE * fastest))


def _pixels(played: Mapping[str, Sequence[Round]]) -> dict[str, list[TensorFacts]]:
    return {name: [one.pixels for one in rounds] for name, rounds in played.items()}


def summarise(rounds: Sequence[Round], first: Sequence[Round]) -> Summary:
    """The medians of a loader's rounds; ratios are paired with the rounds of the first loader."""
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
