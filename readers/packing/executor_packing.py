"""Pack with an executor: the driver lists, plans and completes, workers write one shard per task.

If the driver is killed, the records in the folder stay, and the same call resumes from them. A task
may run twice, at the same time or one after the other. Each task therefore writes into a folder of
its own below the driver's, and renames the finished files. The driver removes its folder before it
completes the pack, so that a lost worker can't add anything afterwards.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import pickle
import secrets
import shutil
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from penstock.cache import (
    DestinationError,
    IndexChangedError,
    check_everywhere,
    check_executor,
    keep_open,
    run_tasks,
)
from penstock.readers.dataset import Dataset, copy_keeping
from penstock.readers.fieldtypes import named_verify, verify_for
from penstock.readers.files import ProgressReporter, make_folder, printable, write_error
from penstock.readers.formats import Grouping
from penstock.readers.index import check_indexes, selected_candidates
from penstock.readers.packing.pack_folder import PackFolder, ShardRecord, ShardWriter, shard_name
from penstock.readers.packing.pack_plan import PackPlan
from penstock.readers.packing.pack_sources import (
    CandidateSource,
    PackedSource,
    RowSource,
    SampleGroup,
)

if TYPE_CHECKING:
    from collections.abc import Mapping
    from concurrent.futures import Executor

    from numpy.typing import NDArray

    from penstock.readers.formats import Candidates
    from penstock.readers.packing.pack_sources import Groups, PackSource, Shards
    from penstock.readers.packing.transcode import Transcode
    from penstock.readers.serialized_source import SerializedSource
    from penstock.readers.types import Progress, Verify

    Ints = NDArray[np.int64]


_log = logging.getLogger("penstock")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSource:
    """The source of a pack for workers, and the way they read it.

    serialized: a DatasetAddress if each task brings its candidates, else a dataset to open. fields:
    the packed ones; None means all.
    """

    kind: Literal["candidates", "pack", "rows"]
    serialized: SerializedSource
    fields: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PackJob:
    """The arguments that all tasks of a run share.

    root: the pack's folder. run: the name of the driver's folder in it. fingerprint: of the source.
    verify: the name of a decoder. workers: threads of a task.
    """

    root: bytes
    run: bytes
    settings: Mapping[str, Any]
    source: WorkerSource
    fingerprint: str
    transcode: Transcode
    verify: str | None
    workers: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ShardTask:
    """One shard of a pack to write. positions: in the source. ids: in the source's index if no file
    were bad. sizes: bytes. These are int64, shape (n,). candidates: these samples, if the source
    has no index."""

    job: PackJob
    shard: int
    positions: Ints
    ids: Ints
    sizes: Ints
    candidates: Candidates | None


def run_folder(folder: PackFolder, run: bytes) -> bytes:
    """Return the folder that the tasks of one run write to."""
    return os.path.join(folder.own, b"ranks", run)


def check_worker(job: PackJob) -> None:
    """Check that this process reaches the source and the destination, and has a decoder. Raises an
    error that names what is missing."""
    folder = PackFolder(job.root, job.settings)
    if not os.path.isdir(run_folder(folder, job.run)):
        raise _unseen(job.root)
    source = _opened(job)
    if isinstance(source, RowSource | PackedSource):
        verify_for(source.schema, _verify(job), workers=job.workers)


def write_task(task: ShardTask) -> ShardRecord:
    """Write one shard of a pack, unless it is finished. Raises DestinationError if this machine
    doesn't see the destination or the run is over, errors of reading, and WriteError."""
    job = task.job
    folder = PackFolder(job.root, job.settings)
    done = folder.read_record(task.shard)
    if done is not None:
        return done
    own = _TaskFolder(folder, job.run, task.shard)
    source = _TaskSamples(_source(task), task)
    own.begin()
    count = len(task.positions)
    grouping = Grouping(order=np.arange(count), bounds=np.array([0, count]))
    writer = ShardWriter(
        source=source,
        plan=PackPlan(grouping=grouping, source_ids=task.ids),
        folder=own,
        verify=_verify(job),
        transcode=job.transcode,
        workers=job.workers,
        progress=lambda *_: None,  # the driver reports it
    )
    try:
        (record,) = writer.write(range(1))
        own.publish(record)
    finally:
        own.remove()
    return record


class _TaskFolder(PackFolder):
    """The folder in which one run of a task writes its only shard, before the files get their final
    names."""

    def __init__(self, folder: PackFolder, run: bytes, shard: int) -> None:
        super().__init__(folder.root, folder.settings)
        self._pack, self._shard = folder, shard
        name = b"%06d-%s" % (shard, secrets.token_hex(8).encode())
        self._path = os.path.join(run_folder(folder, run), name)

    def begin(self) -> None:
        try:
            os.mkdir(self._path)
        except OSError as error:
            if error.errno == errno.ENOENT:
                raise _unseen(self.root) from error
            raise write_error(self._path, error) from error

    def shard(self, shard: int) -> bytes:
        return os.path.join(self._path, shard_name(shard))

    def record(self, shard: int) -> bytes:
        return os.path.join(self._path, b"%06d.json" % shard)

    def publish(self, record: ShardRecord) -> None:
        """Move the shard to its final place, then its record."""
        try:
            if record.facts is not None:
                os.replace(self.shard(0), self._pack.shard(self._shard))
            os.replace(self.record(0), self._pack.record(self._shard))
        except FileNotFoundError:
            raise _unseen(self.root) from None
        except OSError as error:
            raise write_error(self._pack.shard(self._shard), error) from error

    def remove(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self._path, ignore_errors=True)


def _unseen(root: bytes) -> DestinationError:
    return DestinationError(
        f"{printable(root)}: the folder of this run doesn't exist on this machine. Give a "
        "destination that is mounted under the same path on every machine. If it is, the driver of "
        "this run has ended, and another one continues."
    )


class _TaskSamples:
    """The samples of a task, as a `SampleSource`: position 0 is the first of them."""

    def __init__(self, source: PackSource, task: ShardTask) -> None:
        self._source, self._positions = source, task.positions
        if task.candidates is not None:
            self._positions = np.arange(len(task.positions))
        self.url, self.schema, self.sizes = source.url, source.schema, task.sizes

    def groups(self, shards: Shards, *, verify: Verify | None, workers: int) -> Groups:
        wanted = ((shard, self._positions[mine]) for shard, mine in shards)
        start = 0
        for group in self._source.groups(wanted, verify=verify, workers=workers):
            end = start + len(group.positions)
            yield SampleGroup(
                positions=np.arange(start, end), samples=group.samples, names=group.names
            )
            start = end

    def name(self, position: int) -> bytes:
        return self._source.name(int(self._positions[position]))


def _verify(job: PackJob) -> Verify | None:
    return None if job.verify is None else named_verify(job.verify, workers=job.workers)


def _source(task: ShardTask) -> PackSource:
    """Return the task's source, which is opened once per process. Raises an error if it can't be
    opened."""
    opened = _opened(task.job)
    if task.candidates is not None:
        origin, _ = opened
        return CandidateSource(origin, task.candidates, fingerprint=task.job.fingerprint)
    if isinstance(opened, PackedSource):
        opened.sizes[task.positions] = task.sizes
    source: PackSource = opened
    return source


def _opened(job: PackJob) -> Any:
    source, fields = job.source.serialized.source, job.source.fields
    key = hashlib.sha256(b"%s\0%r" % (source, fields)).hexdigest()

    def open_source() -> Any:
        # Unpickling is as safe as running the task: both come from the driver.
        opened = pickle.loads(source)
        if job.source.kind == "candidates":
            return opened.open()
        check_indexes(opened.url, job.source.serialized.indexes)
        if job.source.kind == "pack":
            assert isinstance(opened, Dataset)
            return PackedSource(opened.open(), fields=fields, sizes_known=True)
        if isinstance(opened, Dataset):
            index = opened.open(verify=_verify(job), workers=job.workers)
            if index.remote is not None and index.manifest.is_of_chunks:
                opened = copy_keeping(opened, fields or tuple(opened.schema))
        return RowSource(opened, fields=fields, verify=_verify(job), workers=job.workers)

    opened = keep_open(f"pack {key}", open_source)
    if job.source.kind != "candidates" and opened.fingerprint != job.fingerprint:
        raise IndexChangedError(
            f"{opened.url}: its index differs from that of the driver. Check that all machines see "
            "the same files."
        )
    return opened


@dataclass(frozen=True, slots=True, kw_only=True)
class PackWorkers:
    """The executor of a pack, and the settings of its tasks. verify: the name of a decoder; None
    means the installed one. workers: threads of each task."""

    executor: Executor
    verify: str | None
    workers: int

    def __post_init__(self) -> None:
        check_executor(self.executor)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutorWriter:
    """Write the shards of a plan on the workers of an executor."""

    workers: PackWorkers
    worker_source: WorkerSource
    source: PackSource
    plan: PackPlan
    folder: PackFolder
    transcode: Transcode
    progress: Progress | None

    def write(self) -> dict[int, ShardRecord]:
        """Write the shards that aren't finished, and return the records of all. Raises the errors
        of tasks, with the worker's name, and WorkerError."""
        shards = range(self.plan.grouping.shards)
        records = {
            shard: record
            for shard in shards
            if (record := self.folder.read_record(shard)) is not None
        }
        reporter = ProgressReporter(
            f"Packing {self.source.url}",
            total=len(self.source.sizes),
            progress=self.progress,
            remedy="`penstock pack` shows a progress bar.",
        )
        if records:
            _log.info("Resuming: %d of %d shards are finished", len(records), len(shards))
            for shard in records:
                self._report(reporter, shard)
        left = [shard for shard in shards if shard not in records]
        job = self._start_run()
        try:
            if left:
                check_everywhere(self.workers.executor, check_worker, job)
            tasks = (self._task(job, shard) for shard in left)
            for task, record in run_tasks(
                self.workers.executor, write_task, tasks, what="shards", total=len(left)
            ):
                records[task.shard] = record
                self._report(reporter, task.shard)
        finally:
            # Tasks that still run can't write any more.
            shutil.rmtree(run_folder(self.folder, job.run), ignore_errors=True)
        return records

    def _start_run(self) -> PackJob:
        """Start a new run and return its job. The folders of earlier runs are removed, so that
        their workers can't finish."""
        ranks = os.path.join(self.folder.own, b"ranks")
        for name in os.listdir(ranks):
            if name.startswith(b"run-"):
                shutil.rmtree(os.path.join(ranks, name), ignore_errors=True)
        run = b"run-" + secrets.token_hex(8).encode()
        make_folder(run_folder(self.folder, run))
        return PackJob(
            root=self.folder.root,
            run=run,
            settings=self.folder.settings,
            source=self.worker_source,
            fingerprint=self.source.fingerprint,
            transcode=self.transcode,
            verify=self.workers.verify,
            workers=self.workers.workers,
        )

    def _task(self, job: PackJob, shard: int) -> ShardTask:
        positions = self.plan.grouping.positions(shard)
        candidates = None
        if isinstance(self.source, CandidateSource):
            candidates = selected_candidates(self.source.candidates, positions)
        return ShardTask(
            job=job,
            shard=shard,
            positions=positions,
            ids=self.plan.source_ids[positions],
            sizes=self.source.sizes[positions],
            candidates=candidates,
        )

    def _report(self, reporter: ProgressReporter, shard: int) -> None:
        positions = self.plan.grouping.positions(shard)
        reporter.done(len(positions), int(self.source.sizes[positions].sum()))
