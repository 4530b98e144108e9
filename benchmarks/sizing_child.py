"""Run one rank of `benchmarks.sizing`: read epochs with a training step that sleeps, and time them.

`python -m benchmarks.sizing_child TASK`: a task as JSON in, a record of each epoch as JSON out.
"""

from __future__ import annotations

import functools
import json
import sys
import time
from typing import TYPE_CHECKING, Any

from penstock import DataLoader, Dataset, DiskCache, Map, Order, Peers, World

if TYPE_CHECKING:
    from collections.abc import Callable


def epochs(task: dict[str, Any]) -> list[dict[str, float]]:
    """Train over a dataset and return a record of each epoch.

    task: url, cache ("": none), max_bytes, peers ("": none), batch (global), epochs, step_s, decode
    (seconds per sample that a function sleeps, in so many `processes`), world ([rank, size]),
    slots, reshuffle.
    """
    cache = None
    if task["cache"]:
        peers = Peers(task["peers"], tls=False) if task.get("peers") else None
        cache = DiskCache(task["cache"], max_bytes=task["max_bytes"], peers=peers)
    augment: Any = None
    if task["decode"]:
        augment = [Map(_sleeper(task["decode"]), fields=("data",), processes=task["processes"])]
    with (
        Dataset(task["url"], cache=cache, fields=("data",)) as dataset,
        DataLoader(
            dataset,
            global_batch_size=task["batch"],
            shuffle=True,
            drop_last=True,
            seed=7,
            augment=augment,
            world=World(*task["world"]) if task.get("world") else None,
            order=Order(reshuffle=task["reshuffle"], slots=task.get("slots", "data")),
        ) as loader,
    ):
        dataset.open()
        return [_epoch(loader, task) for _ in range(task["epochs"])]


def _sleeper(seconds: float) -> Callable[[bytes], bytes]:
    return functools.partial(_slept, seconds=seconds)


def _slept(data: bytes, *, seconds: float) -> bytes:
    """Sleep like a decoder that takes time but no core, so that others on this machine don't change
    its rate."""
    time.sleep(seconds)
    return data


def _epoch(loader: DataLoader, task: dict[str, Any]) -> dict[str, float]:
    before, began = loader.statistics(), time.perf_counter()
    steps, first_s, first_end = 0, 0.0, 0.0
    for _ in loader:
        first_s = first_s or time.perf_counter() - began
        if task["step_s"]:
            time.sleep(task["step_s"])
        steps += 1
        first_end = first_end or time.perf_counter()
    seconds = time.perf_counter() - began
    after = loader.statistics()
    rest = began + seconds - first_end
    return {
        "seconds": seconds,
        "first_batch_s": first_s,
        "steps": steps,
        "au": min(100.0, 100 * (steps - 1) * task["step_s"] / rest) if rest else 100.0,
        "bytes_remote": after.bytes_remote - before.bytes_remote,
        "bytes_peers": after.bytes_peers - before.bytes_peers,
    }


def main() -> None:
    """Run the task; under torchrun, in its group."""
    task = json.loads(sys.argv[1])
    if task.get("group"):
        import torch.distributed as dist

        dist.init_process_group("gloo")
        found = epochs(task)
        rank = dist.get_rank()
        dist.barrier()
        dist.destroy_process_group()
        with open(f"{task['group']}/rank-{rank}.json", "w") as file:
            json.dump(found, file)
        return
    print(json.dumps(epochs(task)))


if __name__ == "__main__":
    main()
