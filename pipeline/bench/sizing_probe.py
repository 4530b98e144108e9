"""Measure this machine's disk and decoding, and the URL's store, for `penstock plan --measure`."""

from __future__ import annotations

import contextlib
import mmap
import os
import statistics
import tempfile
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.cache import ordered
from penstock.pipeline.bench.ceilings import remote_ranges
from penstock.pipeline.bench.measurement import workload_ceilings

if TYPE_CHECKING:
    from pathlib import Path

    from penstock.pipeline.bench.workload import Workload
    from penstock.readers import Source

_DISK_BYTES, _BLOCK, _READERS = 2**28, 2**20, 8
_LEAST_STORE_BYTES = 2**26  # smaller datasets don't show a store's rate
_PINGS, _PING_BYTES = 8, 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineProbe:
    """Figures of this machine; None if a figure can't be measured or doesn't apply.

    cpu_s_per_1000: CPU-seconds to decode and augment 1,000 samples by the recipe "imagenet".
    disk_bytes_per_s: of the disk of the cache's folder, without the page cache. store_bytes_per_s,
    store_latency_s: of the URL's store for one process; the rate only for 64 MiB of data or more.
    """

    cpu_s_per_1000: float | None = None
    disk_bytes_per_s: float | None = None
    store_bytes_per_s: float | None = None
    store_latency_s: float | None = None


def probe(workload: Workload) -> MachineProbe:
    """Measure the machine in some seconds. Raises what opening, reading and decoding raise."""
    with workload.dataset() as dataset:
        settled = workload.settled(dataset)
        ceilings = workload_ceilings(settled, dataset, settled.setup(dataset))
        latency_s = store_latency(dataset)
        is_enough = int(dataset.contents.shard_bytes.sum()) >= _LEAST_STORE_BYTES
    remote = ceilings.remote if is_enough else None
    return MachineProbe(
        cpu_s_per_1000=ceilings.augment.cpu_s_per_1000 if ceilings.augment else None,
        disk_bytes_per_s=disk_rate(workload.data.get("cache")),
        store_bytes_per_s=remote.bytes_per_s if remote else None,
        store_latency_s=latency_s,
    )


def store_latency(dataset: Source) -> float | None:
    """Return the median time of consecutive small requests; None for a local dataset."""
    remote = dataset.remote_shards
    if remote is None:
        return None
    span = next(remote_ranges(remote, len(dataset.contents.sizes), _PING_BYTES))
    took = []
    for _ in range(_PINGS):
        began = time.perf_counter()
        remote.remotes[0].fetcher.fetch([span], lambda _number, _answer: None)
        took.append(time.perf_counter() - began)
    return statistics.median(took)


def disk_rate(folder: Path | None, *, size_bytes: int = _DISK_BYTES) -> float | None:
    """Measure the read rate of a folder's disk in bytes a second, with parallel readers; None if
    its file system doesn't support O_DIRECT or is too full for the test file."""
    place = folder
    while place is not None and not place.is_dir():  # the nearest existing parent is on its disk
        place = place.parent
    try:
        with tempfile.TemporaryFile(dir=place) as file:
            for _ in range(size_bytes // _BLOCK):
                file.write(os.urandom(_BLOCK))
            file.flush()
            os.fsync(file.fileno())
            # Open the unnamed file again, with O_DIRECT.
            fd = os.open(f"/proc/self/fd/{file.fileno()}", os.O_RDONLY | os.O_DIRECT)
            try:
                return _read_rate(fd, size_bytes)
            finally:
                os.close(fd)
    except OSError:
        return None


def _read_rate(fd: int, size_bytes: int) -> float:
    def read(at: int) -> int:
        with mmap.mmap(-1, _BLOCK) as room:  # O_DIRECT wants whole pages
            return os.preadv(fd, [room], at)

    began = time.perf_counter()
    blocks = ordered(read, range(0, size_bytes, _BLOCK), workers=_READERS, ahead=2 * _READERS)
    with contextlib.closing(blocks):
        done = sum(blocks)
    return done / (time.perf_counter() - began)
