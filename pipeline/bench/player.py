"""Play the rounds of one loader in a process of its own, and report the figures of each.

Loaders can't share a process: torch forks its workers, which is unsafe while DALI's threads run,
and one loader's prefetching would use the cores during another's round. Each round builds its
loader, measures it and closes it, so that nothing runs between two rounds. Imports are done before
the first round.

The parent writes a RoundSize as one JSON line to stdin and reads a Round as one line from stdout.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

from penstock.pipeline.bench.adapters import Adapter, Work, find_adapter
from penstock.pipeline.bench.child_process import send_to_parent
from penstock.pipeline.bench.measured_run import StepTimes, play_steps, tree_cpu_s
from penstock.pipeline.bench.rounds import Round, RoundSize, look

if TYPE_CHECKING:
    import torch


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
