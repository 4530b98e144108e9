"""Child processes of the cache's fault tests. They read a known dataset through one cache folder.

The bytes of an object are computed from its name, so that every child can detect a wrong byte
without other data. The children are forked from a server that has imported everything, so that a
new one starts within milliseconds.
"""

from __future__ import annotations

import contextlib
import hashlib
import multiprocessing
import os
import signal
import sqlite3
import tempfile
import warnings
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import obstore  # noqa: F401 - imported by the fork server, not by each child
import pyarrow as pa  # noqa: F401

from penstock.cache.base import BlobSource, BlobSpans, FetchPolicy, Segment, blob_key
from penstock.cache.blobs import Remote
from penstock.cache.disk import DiskCache
from penstock.cache.fetch import Fetcher
from penstock.cache.stores import open_store

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from multiprocessing.connection import Connection
    from multiprocessing.process import BaseProcess
    from pathlib import Path

    from penstock.cache.base import Traffic

CONTEXT = multiprocessing.get_context("forkserver")
# One server serves all tests of a process: torch's workers too, which need torch.
CONTEXT.set_forkserver_preload(["__main__", "tests.cache_jobs", "tests.torch_datasets"])

# Retries only cost time: the server of these tests doesn't fail.
# Hedges cost bytes, which these tests count.
POLICY = FetchPolicy(
    retry_timeout_s=20,
    max_attempts=4,
    min_connections=2,
    start_connections=4,
    max_connections=8,
    hedge_least=10**9,
)


@dataclass(frozen=True, kw_only=True)
class Job:
    """The task of a child process.

    objects: names and sizes. rounds: epochs. span_bytes: size of one sample; None to fill whole
    blobs first. kill_at: the number of the disk change before which the child is killed, 0 for
    none. user: the user that it runs as. of_ranges: each blob consists of three ranges of its
    object, out of order.
    """

    url: str
    folder: str
    max_bytes: int
    objects: tuple[tuple[str, int], ...]
    rounds: int = 1
    span_bytes: int | None = None
    seed: int = 0
    group: str = "set"
    kill_at: int = 0
    mode: str = "mmap"
    user: int | None = None
    of_ranges: bool = False


def content(name: str, size_bytes: int) -> bytes:
    """Return the bytes of an object, which are computed from its name."""
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")
    return np.random.default_rng(seed).bytes(size_bytes)


def write_objects(folder: Path, sizes: dict[str, int]) -> tuple[tuple[str, int], ...]:
    """Write objects for a server, and return their names and sizes for a Job."""
    for name, size_bytes in sizes.items():
        place = folder / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(content(name, size_bytes))
    return tuple(sizes.items())


def source(job: Job, name: str, size_bytes: int) -> BlobSource:
    """Return one object as a blob. Its version isn't known, as in a pack's manifest."""
    uri = f"{job.url}/{name}"
    segments = [Segment(path=name, size_bytes=size_bytes, version=None)]
    if job.of_ranges:
        cuts = [0, size_bytes // 3, size_bytes // 2 + 1, size_bytes]
        segments = [
            Segment(path=name, size_bytes=b - a, version=None, start=a, object_bytes=size_bytes)
            for a, b in (cuts[1:3], cuts[2:4], cuts[0:2])
        ]
    return BlobSource(
        key=blob_key(scope="", uri=uri, version=f"{size_bytes}-{len(segments)}"),
        uri=uri,
        segments=segments,
        size_bytes=size_bytes,
    )


class Reader:
    """A remote that has joined for a job until the context ends."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.cache = DiskCache(job.folder, max_bytes=job.max_bytes)
        self.fetcher = Fetcher(open_store(job.url, {}), policy=POLICY)
        self.remote = Remote(self.fetcher, self.cache, group=job.group, label=job.url)
        self.sources = [source(job, *each) for each in job.objects]
        self.remote.join([s.key for s in self.sources], [s.size_bytes for s in self.sources])

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *reason: object) -> None:
        self.remote.close()
        self.fetcher.close()
        self.cache.close()

    def fill(self) -> int:
        """Fill all blobs that fit into the cache, in an order from the seed; return the bytes
        fetched."""
        order = np.random.default_rng(self.job.seed).permutation(len(self.sources))
        return sum(max(0, self.remote.fill(self.sources[number])) for number in order)

    def epoch(self, number: int = 0) -> Iterator[tuple[str, int]]:
        """Read every sample once, in batches, and compare it; yield (object, wrong samples) of each
        batch."""
        job = self.job
        span_bytes = job.span_bytes or 16384
        rng = np.random.default_rng((job.seed, number))
        for each in rng.permutation(len(self.sources)):
            name, size_bytes = job.objects[each]
            whole, wanted = content(name, size_bytes), b""
            for one in self.sources[each].segments:
                wanted += whole[one.start : one.start + one.size_bytes]
            starts = rng.permutation(np.arange(0, size_bytes, span_bytes)).tolist()
            ends = [min(start + span_bytes, size_bytes) for start in starts]
            blob = self.remote.open(self.sources[each])
            for low in range(0, len(starts), 8):
                some = BlobSpans(blob=blob, starts=starts[low : low + 8], ends=ends[low : low + 8])
                (got,) = self.remote.load([some], mode=job.mode)  # type: ignore[arg-type]
                wrong = sum(
                    bytes(array) != wanted[start:end]
                    for array, start, end in zip(got, some.starts, some.ends, strict=True)
                )
                yield name, wrong


def run(job: Job, report: Connection | None = None) -> None:
    """Run a job: fill or read, then send (wrong samples, traffic, warnings). Exit with 3 if a byte
    is wrong."""
    if job.user is not None:
        become(job)
    if job.kill_at:
        die_at(job.kill_at)
    wrong = 0
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        with Reader(job) as reader:
            for number in range(job.rounds):
                if job.span_bytes is None:
                    reader.fill()
                wrong += sum(bad for _, bad in reader.epoch(number))
            traffic = reader.remote.traffic()
    if report is not None:
        report.send((wrong, traffic, tuple(str(each.message) for each in warned)))
    if wrong:
        os._exit(3)


def become(job: Job) -> None:
    """Switch to the job's user, who may have no right to read the interpreter's files: everything
    is imported before, by reading one object."""
    with tempfile.TemporaryDirectory() as folder:
        run(replace(job, user=None, folder=folder, objects=job.objects[:1]))
    os.setgroups([])
    os.setgid(job.user or 0)
    os.setuid(job.user or 0)


def die_at(call: int) -> None:
    """Kill this process with SIGKILL just before its `call`-th change of the disk,
    counted from 1."""
    count_changes(lambda number: os.kill(os.getpid(), signal.SIGKILL) if number == call else None)


CHANGES = (
    "pwrite",
    "pwritev",
    "write",
    "replace",
    "rename",
    "unlink",
    "remove",
    "link",
    "mkdir",
    "rmdir",
    "truncate",
    "ftruncate",
    "posix_fallocate",
    "utime",
    "fsync",
)


def count_changes(see: Callable[[int], None]) -> None:
    """Call see(number) before each call that changes the disk, until this process ends."""
    seen = 0

    def watched(call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*arguments: Any, **named: Any) -> Any:
            nonlocal seen
            seen += 1
            see(seen)
            return call(*arguments, **named)

        return wrapper

    for name in CHANGES:
        setattr(os, name, watched(getattr(os, name)))
    plain_open = os.open

    def opened(path: Any, flags: int, *more: Any, **named: Any) -> int:
        nonlocal seen
        if flags & os.O_CREAT:
            seen += 1
            see(seen)
        return plain_open(path, flags, *more, **named)

    os.open = opened  # type: ignore[assignment]
    connect = sqlite3.connect

    class Watched(sqlite3.Connection):
        def execute(self, sql: str, *values: Any) -> sqlite3.Cursor:  # type: ignore[override]
            nonlocal seen
            if sql.split()[0].upper() in ("COMMIT", "INSERT", "UPDATE", "DELETE", "BEGIN"):
                seen += 1
                see(seen)
            return super().execute(sql, *values)

    def connected(*arguments: Any, **named: Any) -> sqlite3.Connection:
        return connect(*arguments, factory=Watched, **named)

    sqlite3.connect = connected  # type: ignore[assignment]


def start(job: Job) -> BaseProcess:
    """Start a child process that runs a job."""
    process = CONTEXT.Process(target=run, args=(job,))
    process.start()
    return process


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The result of a child process.

    exit_code: 0, 3 for wrong bytes, -9 if it was killed. wrong and traffic: None if it didn't
    finish.
    """

    exit_code: int | None
    wrong: int | None = None
    traffic: Traffic | None = None
    warnings: tuple[str, ...] = ()


def finish(*jobs: Job, timeout_s: float = 60) -> list[Outcome]:
    """Run jobs as concurrent child processes and return their outcomes."""
    running = []
    for job in jobs:
        mine, theirs = CONTEXT.Pipe(duplex=False)
        process = CONTEXT.Process(target=run, args=(job, theirs))
        process.start()
        theirs.close()
        running.append((process, mine))
    outcomes = []
    for process, mine in running:
        found: dict[str, Any] = {}
        if mine.poll(timeout_s):
            with contextlib.suppress(EOFError):  # it died
                found = dict(zip(("wrong", "traffic", "warnings"), mine.recv(), strict=True))
        process.join(timeout_s)
        if process.is_alive():
            process.kill()
        mine.close()
        outcomes.append(Outcome(exit_code=process.exitcode, **found))
        process.close()
    return outcomes


__all__ = ["CONTEXT", "Job", "Outcome", "Reader", "content", "finish", "replace", "run", "start"]
