"""Run one measurement of `benchmarks.cache` in a process of its own: a task as JSON
in, JSON out."""

from __future__ import annotations

import json
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

from penstock import DiskCache

if TYPE_CHECKING:
    from penstock import Dataset


def epochs(task: dict[str, Any]) -> list[dict[str, float]]:
    """Train over a dataset and return a record of each epoch.

    task: url, cache, max_bytes (0: no cache), batch_size, epochs, step_s (of an emulated
    accelerator), window (batches over which demand is compared with consumption).
    """
    from penstock import DataLoader, Dataset, imagenet_train

    kept = DiskCache(task["cache"], max_bytes=task["max_bytes"]) if task["max_bytes"] else None
    with (
        Dataset(task["url"], cache=kept) as dataset,
        DataLoader(
            dataset,
            batch_size=task["batch_size"],
            shuffle=True,
            drop_last=True,
            seed=7,
            augment=imagenet_train(224),
        ) as loader,
    ):
        dataset.open()
        opened_bytes = dataset.bytes_fetched
        records = [
            _epoch(dataset, loader, task, opened_bytes=opened_bytes) for _ in range(task["epochs"])
        ]
        requests = dataset.traffic().requests
    if kept is not None:
        kept.close()
    return [record | {"requests": requests} for record in records]


def _epoch(dataset: Dataset, loader: Any, task: dict[str, Any], *, opened_bytes: int) -> Any:
    """Return the record of one epoch. opened_bytes: fetched before the first."""
    step_s = task.get("step_s", 0.0)
    never = threading.Event()
    wall, cpu = time.perf_counter(), time.process_time()
    samples, first_s, first_bytes = 0, 0.0, 0
    marks, waits = [], []
    asked = wall
    for images, _ in loader:
        got = time.perf_counter()
        waits.append(got - asked)
        samples += len(images)
        if not first_s:
            first_s, first_bytes = got - wall, dataset.bytes_fetched - opened_bytes
        marks.append((dataset.bytes_fetched, loader.statistics().bytes_disk))
        if step_s:
            never.wait(step_s)
        asked = time.perf_counter()
    took = time.perf_counter() - wall
    late = waits[len(waits) // 2 :]
    return {
        "samples": samples,
        "images_per_s": samples / took,
        "cpu_ms": (time.process_time() - cpu) / samples * 1e3,
        "first_s": first_s,
        "first_bytes": first_bytes,
        "fetched_bytes": dataset.bytes_fetched,
        "wait_share": sum(waits[1:]) / took,
        "late_wait_share": sum(late) / (sum(late) + len(late) * step_s),
        "demand": _demand(marks, task["batch_size"], dataset, task.get("window", 16)),
    }


def _demand(marks: list[tuple[int, int]], batch_size: int, dataset: Any, window: int) -> float:
    """Return the largest number of bytes that was fetched within `window` batches of the epoch's
    second half, divided by the bytes that they consumed."""
    consumed = dataset.index.shard_bytes.sum() / dataset.index.samples * batch_size * window
    fetched = [mark for mark, _ in marks]
    late = range(len(fetched) // 2, len(fetched) - window)
    return float(max(((fetched[i + window] - fetched[i]) / consumed for i in late), default=0.0))


def fill(task: dict[str, Any]) -> dict[str, float]:
    """Fill a cache with objects, or read the same ranges with the same client and discard them;
    four objects at a time, like `penstock warm`.

    task: url, names, sizes, cache ("" for none).
    """
    from penstock.cache import ordered
    from penstock.cache.base import BlobSource, ObjectRange, Segment, blob_key
    from penstock.cache.blobs import Remote
    from penstock.cache.fetch import Fetcher
    from penstock.cache.stores import open_store

    fetcher = Fetcher(open_store(task["url"], {}))
    objects = list(zip(task["names"], task["sizes"], strict=True))
    total = sum(task["sizes"])
    cache = DiskCache(task["cache"], max_bytes=2 * total) if task["cache"] else None
    remote = Remote(fetcher, cache, group="bench", label=task["url"])
    if cache is not None:
        cache.open()
    wall, cpu = time.perf_counter(), time.process_time()

    def bring(wanted: tuple[str, int]) -> None:
        name, size = wanted
        if cache is None:
            step = fetcher.policy.range_bytes
            spans = [
                ObjectRange(path=name, start=a, end=min(a + step, size), version=None)
                for a in range(0, size, step)
            ]
            fetcher.fetch(spans, lambda _number, _answer: None, urgent=False)
        else:
            key = blob_key(scope="bench", uri=name, version="1")
            segment = Segment(path=name, size_bytes=size, version=None)
            remote.fill(BlobSource(key=key, uri=name, segments=(segment,), size_bytes=size))

    for _ in ordered(bring, objects, workers=4, ahead=4, name="bench"):
        pass
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    remote.close()
    if cache is not None:
        cache.close()
    return {"mb_per_s": total / wall / 1e6, "cpu_s_per_gb": cpu / total * 1e9}


def main() -> None:
    """Read a task and print its measurements."""
    task = json.loads(sys.argv[1])
    print(json.dumps({"epochs": epochs, "fill": fill}[task["what"]](task)))


if __name__ == "__main__":
    main()
