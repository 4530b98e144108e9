"""Play interleaved rounds of several loaders on the same work: medians, spreads, paired ratios.

Every round plays all loaders, in an order that is reversed each time, so that a drift of the
machine's speed affects all of them equally. Ratios are computed within each round; the result is
their median. The loaders' tensors are compared first: if they differ, the loaders don't do the same
work, and the comparison ends with an error.

Each loader plays in a process of its own (`Player`): torch forks its workers, which is unsafe while
DALI's threads run, and one loader's prefetching would use the cores during another's round. A round
builds its loader, measures it and closes it, so that nothing runs between two rounds. Imports are
done before the first round. The parent writes a RoundSize as one JSON line to stdin and reads a
Round as one line from stdout.
"""

from __future__ import annotations

import contextlib
import json
import math
import sys
import time
from dataclasses import asdict, dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.cache import PenstockError
from penstock.pipeline.bench.adapters import TITLES, Adapter, Work, find_adapter
from penstock.pipeline.bench.child_process import Child, send_to_parent
from penstock.pipeline.bench.measured_run import Figure, StepTimes, play_steps, tree_cpu_s

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorFacts:
    """The statistics of a loader's tensors, which show whether two loaders do the same work.

    samples: number of compared samples; label_mean, label_deviation: of their labels.
    spread: the standard deviation of the images' means, of the channel in which it is largest; it
    bounds the random error of a mean over few images.
    mean, deviation: of each channel over all pixels, in normalised units.
    detail: mean absolute difference of horizontally neighbouring pixels; a resize without
    antialiasing raises it.
    """

    shape: Sequence[int]
    dtype: str
    label_dtype: str
    samples: int
    label_mean: float
    label_deviation: float
    spread: float
    mean: Sequence[float]
    deviation: Sequence[float]
    detail: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundSize:
    """The numbers of batches of a round.

    looked: the first batches, whose pixels are compared.
    settle: consumed next without being timed; more than any loader prefetches, so that the timed
    batches arrive at the rate at which they are produced.
    timed: consumed as fast as they arrive.
    stepped: each followed by a wait of step_ms without CPU use, as while an accelerator trains.
    seed: of the order and the crops; different in each round, so that the pooled statistics cover
    more samples.
    """

    looked: int = 2
    settle: int = 5
    timed: int = 16
    stepped: int = 12
    step_ms: float = 0.0
    seed: int = 7


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """The figures of one round.

    images_per_s, cpu_s_per_1000: of the timed batches; CPU-seconds per 1,000 images, workers
    included. first_batch_s: from the constructor to the first batch. wait_share: waiting time over
    the time with a training step; 0 without a step. batch_wait_ms, batch_step_ms: the two parts of
    a batch's time with a step.
    """

    images_per_s: float
    cpu_s_per_1000: float
    first_batch_s: float
    wait_share: float
    batch_wait_ms: float
    batch_step_ms: float
    pixels: TensorFacts

    @classmethod
    def of(cls, timed: StepTimes, fed: StepTimes, *, cpu_s: float, **others: Any) -> Round:
        """Return the figures of timed batches and of batches with a step. others: the figures that
        don't follow from them."""
        wait_s, step_s, steps = sum(fed.waits_s), sum(fed.computes_s), max(1, len(fed.waits_s))
        return cls(
            images_per_s=timed.samples / timed.elapsed_s,
            cpu_s_per_1000=1000 * cpu_s / timed.samples,
            wait_share=wait_s / (wait_s + step_s) if step_s else 0.0,
            batch_wait_ms=1000 * wait_s / steps,
            batch_step_ms=1000 * step_s / steps,
            **others,
        )


# On top of the random error. A missing or doubled normalisation moves a mean by 0.5 or more.
MEAN_TOLERANCE = 0.15
DEVIATION_TOLERANCE = 0.12
DETAIL_TOLERANCE = 0.25  # relative; a resize without antialiasing, or nearest, exceeds it
LABEL_TOLERANCE = 0.05  # of the labels' mean and deviation, in standard deviations
CHANCE = 4.0  # standard errors of the difference of two means over different samples
# The least number of compared samples of each loader: enough for these tolerances.
LOOKED_SAMPLES = 1024


class NotTheSameWorkError(PenstockError, ValueError):
    """Two loaders' tensors differ, so their times can't be compared."""


def look(batches: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> TensorFacts:
    """Compute the statistics of batches of (n, 3, size, size) images and (n,) labels."""
    import torch

    images = torch.cat([images for images, _ in batches]).float()
    labels = torch.cat([labels for _, labels in batches])
    return TensorFacts(
        shape=list(batches[0][0].shape),
        dtype=str(batches[0][0].dtype),
        label_dtype=str(batches[0][1].dtype),
        samples=len(labels),
        label_mean=float(labels.double().mean()),
        label_deviation=float(labels.double().std(correction=0)),
        spread=float(images.mean(dim=(2, 3)).std(dim=0, correction=0).max()),
        mean=images.mean(dim=(0, 2, 3)).tolist(),
        deviation=images.std(dim=(0, 2, 3)).tolist(),
        detail=float((images[..., 1:] - images[..., :-1]).abs().mean()),
    )


def check_same_work(seen: Mapping[str, Sequence[TensorFacts]], *, pooled: bool) -> None:
    """Compare every loader's tensors with those of the first loader.

    pooled: also compare the statistics of pixels and labels, over LOOKED_SAMPLES or more. Raises
    NotTheSameWorkError.
    """
    looks = {name: pooled_facts(rounds) for name, rounds in seen.items()}
    reference_name, reference = next(iter(looks.items()))
    for name, pixels in looks.items():
        for what, mine, wanted, same in differences(pixels, reference, pooled=pooled):
            if not same:
                raise NotTheSameWorkError(
                    f"{name}: {what} of its batches is {mine}, but {wanted} for {reference_name}. "
                    "The loaders don't do the same work, so they aren't compared. Give both the "
                    "same images and operations."
                )


def differences(
    pixels: TensorFacts, reference: TensorFacts, *, pooled: bool
) -> Iterator[tuple[str, object, object, bool]]:
    """Yield (fact, value, reference value, True if they count as equal) for each compared fact."""
    for what in ("shape", "dtype", "label_dtype"):
        mine, wanted = getattr(pixels, what), getattr(reference, what)
        yield what, mine, wanted, mine == wanted
    if not pooled:
        return
    chance = CHANCE * math.sqrt(1 / pixels.samples + 1 / reference.samples)
    spread, labels = (
        max(getattr(pixels, what), getattr(reference, what))
        for what in ("spread", "label_deviation")
    )
    label = (LABEL_TOLERANCE + chance) * labels
    for what, shown, allowed in (
        ("mean", "channels' mean", MEAN_TOLERANCE + chance * spread),
        ("deviation", "channels' deviation", DEVIATION_TOLERANCE + chance * spread),
        ("detail", "detail", DETAIL_TOLERANCE * max(pixels.detail, reference.detail)),
        ("label_mean", "label_mean", label),
        ("label_deviation", "label_deviation", label),
    ):
        mine, wanted = getattr(pixels, what), getattr(reference, what)
        yield shown, mine, wanted, bool(np.max(np.abs(np.subtract(mine, wanted))) <= allowed)


def pooled_facts(looks: Sequence[TensorFacts]) -> TensorFacts:
    """Pool the statistics of rounds with equal numbers of samples."""
    names = ("label_mean", "label_deviation", "spread", "mean", "deviation", "detail")
    means = {name: np.mean([getattr(look, name) for look in looks], 0).tolist() for name in names}
    return replace(looks[-1], samples=sum(look.samples for look in looks), **means)


# The emulated accelerator consumes this share of the fastest loader's rate: with sufficient
# prefetch that loader keeps up, and the waits of the others show how far they are behind.
ACCELERATOR_SHARE = 0.8


class Player(Child):
    """A loader in a process of its own. Leaving the context ends the process."""

    def __init__(self, name: str, work: Work) -> None:
        self.name = name
        super().__init__(
            "penstock.pipeline.bench.rounds", [name, work.to_json()], title=TITLES[name]
        )

    def play(self, size: RoundSize) -> Round:
        """Play one round. Raises ChildFailedError, which names the loader, if the process ends
        instead."""
        self.send(asdict(size))
        values = self.receive()
        return Round(**(values | {"pixels": TensorFacts(**values["pixels"])}))


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """The figures of one loader over all rounds, as in `Round`.

    speed_ratio, cpu_ratio: the first loader against this one in the same round; above 1 if the
    first is better.
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
    """The results of loaders in the requested order; ratios refer to the first one."""

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
    """Play `rounds` interleaved rounds. progress: called with the number of rounds played so far.

    Each loader runs in a process of its own. A loader with its own format first converts the data,
    one loader after the other; that isn't timed.

    Raises NotTheSameWorkError if the loaders' tensors differ, ChildFailedError if a loader fails.
    """
    size = fitted_size(size, work, rounds=rounds)
    played: dict[str, list[Round]] = {name: [] for name in names}
    with contextlib.ExitStack() as stack:
        players = []
        for name in names:
            players.append(stack.enter_context(Player(name, work)))
            players[-1].receive()  # its imports and its conversion are done
        size = _rehearse(players, work, size)
        for number in range(rounds):
            sized = replace(size, seed=work.seed + number)
            for player in players if number % 2 == 0 else reversed(players):
                played[player.name].append(player.play(sized))
                if progress is not None:
                    progress(sum(map(len, played.values())))
    check_same_work(_pixels(played), pooled=True)
    summaries = {name: summarise(played[name], played[names[0]]) for name in names}
    return Comparison(summaries=summaries, rounds=played, size=size)


def fitted_size(size: RoundSize, work: Work, *, rounds: int) -> RoundSize:
    """Return a round with enough batches for this work.

    It compares enough samples to detect different work, settles for more batches than torch's
    workers prefetch (two each, and one in progress), and times several batches of each worker.
    """
    return replace(
        size,
        looked=max(size.looked, math.ceil(LOOKED_SAMPLES / (rounds * work.batch_size))),
        settle=max(size.settle, 2 * work.workers + 1),
        timed=max(size.timed, 4 * work.workers),
    )


def _rehearse(players: Sequence[Player], work: Work, size: RoundSize) -> RoundSize:
    """Play a short round of every loader that doesn't count.

    It warms the page cache, rejects unequal tensors early, and determines the emulated step.
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
    """Compute the medians of a loader's rounds, with ratios to the first loader's rounds."""
    pairs = list(zip(first, rounds, strict=True))
    names = [field.name for field in fields(Round) if field.name != "pixels"]
    return Summary(
        **{name: Figure.of([getattr(one, name) for one in rounds]) for name in names},
        speed_ratio=Figure.of([a.images_per_s / b.images_per_s for a, b in pairs]),
        cpu_ratio=Figure.of([b.cpu_s_per_1000 / a.cpu_s_per_1000 for a, b in pairs]),
    )


def play(adapter: Adapter, work: Work, size: RoundSize) -> Round:
    """Play one round, from the constructor to close()."""
    began = time.perf_counter()
    loader = adapter.build(replace(work, seed=size.seed))
    batches = loader.batches()
    try:
        looked = [_copied(next(batches))]
        first = time.perf_counter()
        looked += [_copied(next(batches)) for _ in range(size.looked - 1)]
        pixels = look(looked)
        del looked
        # Consume what the loader prefetched meanwhile; otherwise the first timed batches are free.
        for _ in range(size.settle):
            next(batches)
        cpu_s = tree_cpu_s()
        timed = play_steps(batches, 0.0, lambda steps, _: steps >= size.timed)
        cpu_s = tree_cpu_s() - cpu_s
        fed = StepTimes()
        if size.stepped:
            step_s = size.step_ms / 1000
            # Two uncounted steps come first, in which the loader's prefetch fills.
            play_steps(batches, step_s, lambda steps, _: steps >= 2)
            fed = play_steps(batches, step_s, lambda steps, _: steps >= size.stepped)
    finally:
        batches.close()  # type: ignore[attr-defined]
        loader.close()
    return Round.of(timed, fed, cpu_s=cpu_s, first_batch_s=first - began, pixels=pixels)


def _copied(batch: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Copy a batch: some loaders reuse its memory."""
    images, labels = batch
    return images.clone(), labels.clone()


def main(argv: list[str]) -> None:
    """Play rounds until stdin closes. argv: the loader's name, and its Work as JSON."""
    adapter, work = find_adapter(argv[0]), Work.from_json(argv[1])
    adapter.make_ready(work)
    send_to_parent({"ready": adapter.name})
    for line in sys.stdin:
        send_to_parent(asdict(play(adapter, work, RoundSize(**json.loads(line)))))


if __name__ == "__main__":
    main(sys.argv[1:])
