"""Build an index with an executor: the driver lists and writes, workers check the samples.

The results are kept in the index's folder, `parts/`, until the index is complete. If the driver is
killed, the same call resumes from them. Only the driver may be able to write the index, so workers
return their results, a few dozen bytes per sample.
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
from penstock.readers.fieldtypes import named_verify, verify_for
from penstock.readers.files import ProgressReporter, make_folder, write_bytes
from penstock.readers.formats import format_named
from penstock.readers.index.building import CheckList, IndexBuilder
from penstock.readers.index.dataset_address import selected_candidates
from penstock.readers.types import Facts, Rejection
from penstock.version import __version__

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from concurrent.futures import Executor

    from penstock.readers.fieldtypes import Schema
    from penstock.readers.formats import Candidates
    from penstock.readers.index.building import Checked
    from penstock.readers.index.dataset_address import DatasetAddress
    from penstock.readers.types import Verify

PARTS = b"parts"

_CheckResults = list["Mapping[str, Facts] | Rejection"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckJob:
    """The arguments that all tasks share. address: a pickled DatasetAddress. format, verify: names;
    None means the installed decoder. workers: threads of a task."""

    address: bytes
    format: str
    schema: Schema
    verify: str | None
    workers: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CheckTask:
    """Samples of one shard to check. before: facts of an earlier index about some of them, by their
    position in the task."""

    job: CheckJob
    shard: int
    candidates: Candidates
    before: Mapping[int, Mapping[str, Facts]]


@dataclass(frozen=True, slots=True)
class CheckedShard:
    """The results of a task's samples, in their order. progressive: the number of progressive JPEGs
    by field."""

    found: _CheckResults
    progressive: Mapping[str, int]

    def to_json(self) -> bytes:
        """Encode the results for a file; `of_json` decodes them."""
        found = [
            each.reason
            if isinstance(each, Rejection)
            else {n: [f.crc32c, f.start, f.size, f.shape, f.codec] for n, f in each.items()}
            for each in self.found
        ]
        return json.dumps([found, dict(self.progressive)]).encode("ascii")

    @classmethod
    def of_json(cls, data: bytes, count: int) -> CheckedShard:
        """Decode the results of so many samples. Raises ValueError for anything else."""
        try:
            results, progressive = json.loads(data)
            found: _CheckResults = [
                Rejection(each)
                if isinstance(each, str)
                else {n: Facts(a, b, c, tuple(shape), e) for n, (a, b, c, shape, e) in each.items()}
                for each in results
            ]
        except (TypeError, AttributeError) as error:
            raise ValueError(f"not the results of a shard: {error}") from error
        if len(found) != count:
            raise ValueError(f"got {len(found)} samples, wanted {count}")
        return cls(found, progressive)


def check_worker(job: CheckJob) -> None:
    """Check that this process reaches the data and has a decoder. Raises an error that names what
    is missing."""
    _open_data(job)
    verify_for(job.schema, _verify(job), workers=job.workers)


def check_task(task: CheckTask) -> CheckedShard:
    """Check the samples of a task. Raises errors of reading."""
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
    key = hashlib.sha256(job.address).hexdigest()
    # Unpickling is as safe as running the task: both come from the driver.
    return keep_open(f"index {key}", lambda: pickle.loads(job.address).open())


def _verify(job: CheckJob) -> Verify | None:
    return None if job.verify is None else named_verify(job.verify, workers=job.workers)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutorChecker:
    """Check samples on an executor's workers. verify: the name of a decoder."""

    executor: Executor
    address: DatasetAddress
    verify: str | None

    def __post_init__(self) -> None:
        check_executor(self.executor)

    def check(
        self,
        wanted: CheckList,
        *,
        format: str,
        listing: str,
        folder: bytes,
        reporter: ProgressReporter,
    ) -> Iterator[Checked]:
        """Check all samples, then yield the results in order; see `building.Checker`."""
        positions, sizes = wanted.positions, wanted.candidates.sizes
        job = CheckJob(
            address=pickle.dumps(self.address),
            format=format,
            schema=wanted.candidates.schema,
            verify=self.verify,
            workers=1,
        )
        inputs = json.dumps([listing, __version__, self.verify]).encode()
        parts = _CheckedShardFiles(
            os.path.join(folder, PARTS), hashlib.sha256(inputs).hexdigest()[:32]
        )
        left = []
        for number, mine in enumerate(positions):
            if parts.read(number, len(mine)) is None:
                left.append(number)
            else:
                reporter.done(len(mine), int(sizes[mine].sum()))
        if left:
            check_everywhere(self.executor, check_worker, job)

        def task_of(number: int) -> CheckTask:
            mine, before = positions[number], wanted.before
            return CheckTask(
                job=job,
                shard=number,
                candidates=replace(selected_candidates(wanted.candidates, mine), chunked=()),
                before={i: before[p] for i, p in enumerate(mine.tolist()) if p in before},
            )

        for task, results in run_tasks(
            self.executor, check_task, map(task_of, left), what="shards", total=len(left)
        ):
            parts.write(task.shard, results)
            mine = positions[task.shard]
            reporter.done(len(mine), int(sizes[mine].sum()))
        for number, mine in enumerate(positions):
            known = parts.read(number, len(mine))
            assert known is not None, number
            yield dict(zip(mine.tolist(), known.found, strict=True)), known.progressive

    def finish(self, folder: bytes) -> None:
        """Remove the files that only an unfinished index needs."""
        shutil.rmtree(os.path.join(folder, PARTS), ignore_errors=True)


class _CheckedShardFiles:
    """The results of shards as files. key: identifies the index; files of other keys are
    removed."""

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
        """Read the results of a shard; None if there are none that can be used."""
        if not count:
            return CheckedShard([], {})
        try:
            with open(self._path(shard), "rb") as file:
                return CheckedShard.of_json(file.read(), count)
        except (FileNotFoundError, ValueError):
            return None

    def write(self, shard: int, results: CheckedShard) -> None:
        """Write the results of a worker. Raises WriteError."""
        write_bytes(self._path(shard), results.to_json())
