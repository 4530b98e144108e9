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
import threading
import time
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

from penstock.pipeline.bench.adapters import Work, build, imports, prepare
from penstock.pipeline.bench.child_process import send_to_parent
from penstock.pipeline.bench.measured_run import tree_cpu_s
from penstock.pipeline.bench.rounds import Round, RoundSize, look

if TYPE_CHECKING:
    import torch

    from penstock.pipeline.bench.adapters import Batches


def play(name: str, work: Work, size: RoundSize) -> Round:
    """Play one round, from the constructor to close()."""
    began = time.perf_counter()
    loader = build(name, replace(work, seed=size.seed))
    built = time.perf_counter()
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
        images, wall_s, cpu_s = _time_batches(batches, size.timed)
        wait_s = step_s = 0.0
        if size.stepped:
            wait_s, step_s = _feed_accelerator(batches, size.stepped, step_s=size.step_ms / 1000)
    finally:
        batches.close()  # type: ignore[attr-defined]
        loader.close()
    return Round(
        build_s=built - began,
        first_batch_s=first - built,
        images=images,
        wall_s=wall_s,
        cpu_s=cpu_s,
        stepped=size.stepped,
        wait_s=wait_s,
        step_s=step_s,
        pixels=pixels,
    )


def _copied(batch: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Copy a batch: some loaders reuse its memory."""
    images, labels = batch
    return images.clone(), labels.clone()


def _time_batches(batches: Batches, count: int) -> tuple[int, float, float]:
    images = 0
    cpu, wall = tree_cpu_s(), time.perf_counter()
    for _ in range(count):
        images += len(next(batches)[1])
    return images, time.perf_counter() - wall, tree_cpu_s() - cpu


def _feed_accelerator(batches: Batches, count: int, *, step_s: float) -> tuple[float, float]:
    """Return the seconds of waiting for data and of steps. Two uncounted steps come first, in which
    the loader's prefetch fills."""
    idle = threading.Event()
    wait_s = busy_s = 0.0
    for number in range(-2, count):
        began = time.perf_counter()
        next(batches)
        waited = time.perf_counter()
        idle.wait(step_s)
        if number >= 0:
            wait_s += waited - began
            busy_s += time.perf_counter() - waited
    return wait_s, busy_s


def main(argv: list[str]) -> None:
    """Play rounds until stdin closes. argv: the loader's name, and its Work as JSON."""
    name, work = argv[0], Work.from_json(argv[1])
    imports(name)
    prepare(name, work)
    send_to_parent({"ready": name})
    for line in sys.stdin:
        send_to_parent(asdict(play(name, work, RoundSize(**json.loads(line)))))


if __name__ == "__main__":
    main(sys.argv[1:])
