"""Kill a training job, resume it, and prove that the resumed job continued the first exactly."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from benchmarks.train import arguments
from penstock.pipeline.bench import Child

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from benchmarks.train import Job

    Step = tuple[list[int], float]  # sample ids, loss


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The comparison of a killed and resumed job with an uninterrupted one.

    killed_after, resumed_after: steps completed at the kill, and at the checkpoint before it.
    steps: number of compared steps, of both processes. same_ids, same_losses: of every step.
    same_weights: SHA-256 of the model after the last one. each_once: no sample of an epoch occurs
    twice over both processes, without the steps that the kill undid.
    """

    killed_after: int
    resumed_after: int
    steps: int
    same_ids: bool
    same_losses: bool
    same_weights: bool
    each_once: bool

    @property
    def exact(self) -> bool:
        return self.same_ids and self.same_losses and self.same_weights and self.each_once


def train(job: Job) -> Iterator[dict[str, Any]]:
    """Run a job in a process of its own, and yield its events."""
    with Child("benchmarks.train", arguments(job)) as child:
        yield from child.messages()


def kill_and_resume(
    job: Job, whole: Job, *, kill_at: int, report: Callable[[dict[str, Any]], None] | None = None
) -> Verdict:
    """Run `job`, kill it after step kill_at, run it again to its end; compare with `whole`.

    whole: the same job with another out folder, which has run without a break at least as far.
    report: receives the events of both processes.
    """
    tell = report or (lambda _: None)
    with Child("benchmarks.train", arguments(job)) as child:
        for event in child.messages():
            tell(event)
            if event["event"] == "step" and event["step"] >= kill_at:
                child.kill()
                break
    last: dict[str, Any] = {}
    resumed: dict[str, Any] = {"step": 0}
    for event in train(job):
        tell(event)
        last = event if event["event"] == "epoch" else last
        resumed = event if event["event"] == "resumed" else resumed
    first_life, second_life = read_lives(job.out)
    reference = read_lives(whole.out)[0]
    return judge(
        reference,
        first_life,
        second_life,
        resumed_after=resumed["step"],
        same_weights=last["weights"] == read_weights(whole.out)[last["epoch"]],
        epoch_steps=last["step"] // (last["epoch"] + 1),
    )


def judge(
    reference: dict[int, Step],
    first_life: dict[int, Step],
    second_life: dict[int, Step],
    *,
    resumed_after: int,
    same_weights: bool,
    epoch_steps: int,
) -> Verdict:
    """Compare steps by number. Pure."""
    lives = [*first_life.items(), *second_life.items()]
    kept = {n: step for n, step in first_life.items() if n <= resumed_after} | second_life
    complete = sorted(kept) == list(range(1, max(kept) + 1))
    epochs: dict[int, list[int]] = {}
    for number, (ids, _) in kept.items():
        epochs.setdefault((number - 1) // epoch_steps, []).extend(ids)
    return Verdict(
        killed_after=max(first_life),
        resumed_after=resumed_after,
        steps=len(lives),
        same_ids=all(reference[n][0] == ids for n, (ids, _) in lives),
        same_losses=all(reference[n][1] == loss for n, (_, loss) in lives),
        same_weights=same_weights,
        each_once=complete and all(len(ids) == len(set(ids)) for ids in epochs.values()),
    )


def read_lives(out: Path) -> list[dict[int, Step]]:
    """Return the steps of each process that worked on a job, by number; losses are compared bit for
    bit."""
    lives = []
    for log in sorted(out.glob("steps-*.jsonl")):
        lines = log.read_text().split("\n")[:-1]  # what follows the last newline a kill cut off
        steps = map(json.loads, lines)
        lives.append({step["step"]: (step["ids"], step["loss"]) for step in steps})
    return lives


def read_weights(out: Path) -> dict[int, str]:
    """Return the hash of the weights after each epoch."""
    lines = (out / "epochs.jsonl").read_text().splitlines()
    return {line["epoch"]: line["weights"] for line in map(json.loads, lines)}
