"""Index a dataset over an executor: the driver lists and writes, workers check the samples.

What workers have found is kept in the index's folder, `parts/`, until the index stands: after a
driver was killed, the same call goes on from there. An index may lie where only the driver can
write, so results come back to it, a few dozen bytes a sample.
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import shutil
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.cache import check_everywhere, check_executor, keep_open, run_tasks
from penstock.readers.fields import named_verify, verify_for, verify_name
from penstock.readers.files import ProgressReporter, make_folder, write_bytes
from penstock.readers.formats import format_named
from penstock.readers.index.building import CheckList, IndexBuilder
from penstock.readers.index.dataset_address import DatasetAddress, selected_candidates
from penstock.readers.types import Facts, Rejection
from penstock.version import __version__

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from concurrent.futures import Executor

    from penstock.cache.disk import DiskCache
    from penstock.readers.fields import Schema
    from penstock.readers.formats import Candidates
    from penstock.readers.index.building import Checked
    from penstock.readers.index.index_folders import Folder
    from penstock.readers.origin import Url
    from penstock.readers.types import Verify

PARTS = b"parts"

_CheckResults = list["Mapping[str, Facts] | Rejection"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckJob:
    """What all tasks have in common. reach: pickled; format, verify: names, None is the installed
    decoder; workers: threads of a task."""

    reach: bytes
    format: str
    schema: Schema
    verify: str | None
    workers: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CheckTask:
    """Samples of one shard that are to be checked. before: what an earlier index says of some, by
    their place among these."""

    job: CheckJob
    shard: int
    candidates: Candidates
    before: Mapping[int, Mapping[str, Facts]]


@dataclass(frozen=True, slots=True)
class CheckedShard:
    """What a worker found of a task's samples, in their order; progressive: by field."""

    found: _CheckResults
    progressive: Mapping[str, int]

    def to_json(self) -> bytes:
        """For a file, by `of_json`."""
        found = [
            each.reason
            if isinstance(each, Rejection)
            else {n: [f.crc32c, f.start, f.size, f.shape, f.codec] for n, f in each.items()}
            for each in self.found
        ]
        return json.dumps([found, dict(self.progressive)]).encode("ascii")

    @classmethod
    def of_json(cls, data: bytes, count: int) -> CheckedShard:
        """Raises ValueError for what isn't of so many samples."""
        try:
            told, progressive = json.loads(data)
            found: _CheckResults = [
                Rejection(each)
                if isinstance(each, str)
                else {n: Facts(a, b, c, tuple(shape), e) for n, (a, b, c, shape, e) in each.items()}
                for each in told
            ]
        except (TypeError, AttributeError) as error:
            raise ValueError(f"not a shard's facts: {error}") from error
        if len(found) != count:
            raise ValueError(f"got {len(found)} samples, wanted {count}")
        return cls(found, progressive)


def check_worker(job: CheckJob) -> None:
    """See whether this process reaches the data, and has what checks samples. Raises what says
    which it lacks."""
    _open_data(job)
    verify_for(job.schema, _verify(job), workers=job.workers)


def check_task(task: CheckTask) -> CheckedShard:
    """Check the samples of a task. Raises what reading raises."""
    job, count = task.job, len(task.candidates)
    origin, _ = _open_data(job)
    builder = IndexBuilder(
        origin=origin,
        format=format_named(job.format),
        verify=verify_for(
            job.schema, _verify(job), workers=job.workers, max_pixels=task.candidates.max_pixels
        ),
        workers=job.workers,
    )
    reporter = ProgressReporter("", total=count, progress=lambda *_: None, remedy="")
    every = [np.arange(count, dtype=np.int64)]
    wanted = CheckList(candidates=task.candidates, positions=every, before=task.before)
    ((found, progressive),) = builder.check(wanted, reporter)
    return CheckedShard([found[place] for place in range(count)], dict(progressive))


def _open_data(job: CheckJob) -> Any:
    key = hashlib.sha256(job.reach).hexdigest()
    # Of the driver, as the task that it came with.
    return keep_open(f"index {key}", lambda: pickle.loads(job.reach).open())


def _verify(job: CheckJob) -> Verify | None:
    return None if job.verify is None else named_verify(job.verify, workers=job.workers)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutorChecker:
    """An executor's workers, who check samples in a builder's place. verify: a name."""

    executor: Executor
    reach: DatasetAddress
    verify: str | None

    @classmethod
    def of(
        cls,
        executor: Executor,
        url: Url,
        *,
        options: Mapping[str, Any] | None,
        filesystem: Any | None,
        cache: DiskCache | Folder | None,
        verify: Verify | str | None,
    ) -> ExecutorChecker:
        """The crew of what `open_index` takes. Raises ConfigError for what can't travel."""
        check_executor(executor)
        reach = DatasetAddress.of(url, storage_options=options, filesystem=filesystem, cache=cache)
        return cls(executor=executor, reach=reach, verify=verify_name(verify))

    def check(
        self,
        wanted: CheckList,
        *,
        format: str,
        listing: str,
        folder: bytes,
        reporter: ProgressReporter,
    ) -> Iterator[Checked]:
        """Have all checked, then give them out in order; see `building.Checker`."""
        positions, sizes = wanted.positions, wanted.candidates.sizes
        job = CheckJob(
            reach=pickle.dumps(self.reach),
            format=format,
            schema=wanted.candidates.schema,
            verify=self.verify,
            workers=1,
        )
        told = json.dumps([listing, __version__, self.verify])
        parts = _CheckedShardFiles(
            os.path.join(folder, PARTS), hashlib.sha256(told.encode()).hexdigest()[:32]
        )
        left = []
        for number, mine in enumerate(positions):
            if parts.read(number, len(mine)) is None:
                left.append(number)
            else:
                reporter.done(len(mine), int(sizes[mine].sum()))
        if left:
            check_everywhere(self.executor, check_worker, job)
        tasks = (_task(job, number, wanted) for number in left)
        for task, facts in run_tasks(
            self.executor, check_task, tasks, what="shards", total=len(left)
        ):
            parts.write(task.shard, facts)
            mine = positions[task.shard]
            reporter.done(len(mine), int(sizes[mine].sum()))
        for number, mine in enumerate(positions):
            known = parts.read(number, len(mine))
            assert known is not None, number
            yield dict(zip(mine.tolist(), known.found, strict=True)), known.progressive

    def finish(self, folder: bytes) -> None:
        """What only an unfinished index needs goes."""
        shutil.rmtree(os.path.join(folder, PARTS), ignore_errors=True)


def _task(job: CheckJob, number: int, wanted: CheckList) -> CheckTask:
    mine, before = wanted.positions[number], wanted.before
    return CheckTask(
        job=job,
        shard=number,
        candidates=replace(selected_candidates(wanted.candidates, mine), chunked=()),
        before={i: before[p] for i, p in enumerate(mine.tolist()) if p in before},
    )


class _CheckedShardFiles:
    """What is known of shards, as files. key: of what they are of; files of others go."""

    def __init__(self, folder: bytes, key: str) -> None:
        self._folder = os.path.join(folder, key.encode())
        if os.path.isdir(folder):
            for name in os.listdir(folder):
                if name != key.encode():
                    shutil.rmtree(os.path.join(folder, name), ignore_errors=True)
        make_folder(self._folder)

    def _path(self, shard: int) -> bytes:
        return os.path.join(self._folder, b"%06d.json" % shard)

    def read(self, shard: int, count: int) -> CheckedShard | None:
        """What is known of a shard; None where nothing is, or nothing that can be used."""
        if not count:
            return CheckedShard([], {})
        try:
            with open(self._path(shard), "rb") as file:
                return CheckedShard.of_json(file.read(), count)
        except (FileNotFoundError, ValueError):
            return None

    def write(self, shard: int, facts: CheckedShard) -> None:
        """Note what a worker found. Raises WriteError."""
        write_bytes(self._path(shard), facts.to_json())
