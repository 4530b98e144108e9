"""Pack over an executor: the driver lists, plans and completes, workers write one shard a task.

The driver may be killed: what is recorded in the folder stays, and the same call goes on after it.
A task may run twice, at once or after one another: each run writes into a folder of its own below
the driver's, and renames what it has made. The driver removes its folder before it completes the
pack, so that a worker that was given up for dead can't put anything into it afterwards.
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
from penstock.readers.fields import named_verify, verify_for
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
from penstock.readers.serialized_source import SerializedSource

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from concurrent.futures import Executor

    from numpy.typing import NDArray

    from penstock.readers.formats import Candidates
    from penstock.readers.index import DatasetAddress
    from penstock.readers.packing.pack_sources import PackSource
    from penstock.readers.packing.transcode import Transcode
    from penstock.readers.sources import Source
    from penstock.readers.types import Progress, Verify


@dataclass(frozen=True, slots=True, kw_only=True)
class PackJob:
    """What all tasks of a run have in common.

    root: the pack's folder; run: the name of the driver's folder in it. source: pickled, a Reach
    for candidates that each task brings, else a dataset to be opened. fingerprint: the source's.
    indexes: local folders with the indexes of datasets, which have to be there.
    verify: a name; workers: threads of a task.
    """

    root: bytes
    run: bytes
    settings: Mapping[str, Any]
    kind: Literal["candidates", "pack", "rows"]
    source: bytes
    fingerprint: str
    indexes: tuple[bytes, ...]
    fields: tuple[str, ...] | None
    transcode: Transcode
    verify: str | None
    workers: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ShardTask:
    """One shard of a pack. positions, ids: in the source, and in its index if no file were bad;
    sizes: bytes; all int64, shape (n,). candidates: these samples, where there is no index."""

    job: PackJob
    shard: int
    positions: NDArray[np.int64]
    ids: NDArray[np.int64]
    sizes: NDArray[np.int64]
    candidates: Candidates | None


def run_folder(folder: PackFolder, run: bytes) -> bytes:
    """Where the tasks of one run write."""
    return os.path.join(folder.own, b"ranks", run)


def check_worker(job: PackJob) -> None:
    """Look whether this process sees the source and the destination, and has what checks samples.
    Raises what says which of them it lacks."""
    folder = PackFolder(job.root, job.settings)
    if not os.path.isdir(run_folder(folder, job.run)):
        raise _unseen(job.root)
    source = _opened(job)
    if isinstance(source, RowSource | PackedSource):
        verify_for(source.schema, _verify(job), workers=job.workers)


def write_task(task: ShardTask) -> ShardRecord:
    """Write one shard of a pack, unless it is there. Raises DestinationError (the destination isn't
    seen from here, or the run is over), what reading raises, WriteError."""
    job = task.job
    folder = PackFolder(job.root, job.settings)
    done = folder.read_record(task.shard)
    if done is not None:
        return done
    own = _TaskFolder(folder, job.run, task.shard)
    source = _TaskSamples(_source(task), task)
    own.begin()
    count = len(task.positions)
    one = Grouping(order=np.arange(count), bounds=np.array([0, count]))
    writer = ShardWriter(
        source=source,
        plan=PackPlan(grouping=one, source_ids=task.ids),
        folder=own,
        verify=_verify(job),
        transcode=job.transcode,
        workers=job.workers,
        progress=lambda *_: None,  # the driver tells it
    )
    try:
        (record,) = writer.write(range(1))
        own.publish(record)
    finally:
        own.remove()
    return record


class _TaskFolder(PackFolder):
    """Where one run of one task writes its only shard, before that gets its place and name."""

    def __init__(self, folder: PackFolder, run: bytes, shard: int) -> None:
        super().__init__(folder.root, folder.settings)
        self._whole, self._shard = folder, shard
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
        """Put the shard into its place, then its record."""
        try:
            if record.facts is not None:
                os.replace(self.shard(0), self._whole.shard(self._shard))
            os.replace(self.record(0), self._whole.record(self._shard))
        except FileNotFoundError:
            raise _unseen(self.root) from None
        except OSError as error:
            raise write_error(self._whole.shard(self._shard), error) from error

    def remove(self) -> None:
        """Take away what is left."""
        shutil.rmtree(self._path, ignore_errors=True)


def _unseen(root: bytes) -> DestinationError:
    return DestinationError(
        f"{printable(root)}: the folder of this run isn't there on this machine. Give a "
        "destination that is mounted under the same path on every machine; or the process that "
        "handed out this work has ended, and a newer one goes on."
    )


class _TaskSamples:
    """Some samples of a source, as a `SampleSource`: position 0 is the first of them."""

    def __init__(self, source: PackSource, task: ShardTask) -> None:
        self._source, self._positions = source, task.positions
        if task.candidates is not None:
            self._positions = np.arange(len(task.positions))
        self.url, self.schema, self.sizes = source.url, source.schema, task.sizes

    def groups(
        self,
        shards: Iterator[tuple[int, NDArray[np.int64]]],
        *,
        verify: Verify | None,
        workers: int,
    ) -> Iterator[SampleGroup]:
        asked = ((shard, self._positions[mine]) for shard, mine in shards)
        start = 0
        for group in self._source.groups(asked, verify=verify, workers=workers):
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
    """The task's source, opened once a process. Raises what says why it can't be."""
    opened = _opened(task.job)
    if task.candidates is not None:
        origin, _ = opened
        return CandidateSource.of(origin, task.candidates, fingerprint=task.job.fingerprint)
    if isinstance(opened, PackedSource):
        opened.sizes[task.positions] = task.sizes
    source: PackSource = opened
    return source


def _opened(job: PackJob) -> Any:
    key = hashlib.sha256(b"%s\0%r" % (job.source, job.fields)).hexdigest()
    opened = keep_open(f"pack {key}", lambda: _open(job))
    if job.kind != "candidates" and opened.fingerprint != job.fingerprint:
        raise IndexChangedError(
            f"{opened.url}: it isn't the same here as where the work is handed out, as its index "
            "differs. Are all machines looking at the same files?"
        )
    return opened


def _open(job: PackJob) -> Any:
    made = pickle.loads(job.source)  # of the driver, as the task that it came with
    if job.kind == "candidates":
        return made.open()
    check_indexes(made.url, job.indexes)
    if job.kind == "pack":
        assert isinstance(made, Dataset)
        return PackedSource(made.open(), fields=job.fields, sizes_known=True)
    if isinstance(made, Dataset):
        there = made.open(verify=_verify(job), workers=job.workers)
        if there.remote is not None and there.manifest.is_of_chunks:
            made = copy_keeping(made, job.fields or tuple(made.schema))
    return RowSource(made, fields=job.fields, verify=_verify(job), workers=job.workers)


_log = logging.getLogger("penstock")


@dataclass(frozen=True, slots=True, kw_only=True)
class PackWorkers:
    """The workers of a pack, and what they have to know. verify: a name, None is the installed
    decoder; workers: threads of each task."""

    executor: Executor
    verify: str | None
    workers: int

    def __post_init__(self) -> None:
        check_executor(self.executor)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSource:
    """What the workers of a pack get of its source, and how they read it. fields: those that are
    packed, None is all."""

    kind: Literal["candidates", "pack", "rows"]
    luggage: SerializedSource
    fields: tuple[str, ...] | None = None

    @classmethod
    def of_files(cls, reach: DatasetAddress) -> WorkerSource:
        """Of data that has no index: each task brings what was listed of its samples."""
        return cls(kind="candidates", luggage=SerializedSource(source=pickle.dumps(reach)))

    @classmethod
    def of_source(
        cls, source: Source, *, is_pack: bool, fields: tuple[str, ...] | None
    ) -> WorkerSource:
        """Of what is open here, and is opened anew there. Raises ConfigError."""
        kind: Literal["pack", "rows"] = "pack" if is_pack else "rows"
        return cls(kind=kind, luggage=SerializedSource.of(source), fields=fields)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutorWriter:
    """Has the shards of a plan written by a crew, into a pack's folder that has begun."""

    crew: PackWorkers
    luggage: WorkerSource
    source: PackSource
    plan: PackPlan
    folder: PackFolder
    transcode: Transcode
    progress: Progress | None

    def write(self) -> dict[int, ShardRecord]:
        """Have what isn't finished written; returns the records of all. Raises what a task raises,
        with the worker's name, and WorkerError."""
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
                self._tell(reporter, shard)
        left = [shard for shard in shards if shard not in records]
        job = self._begun()
        try:
            if left:
                check_everywhere(self.crew.executor, check_worker, job)
            tasks = (self._task(job, shard) for shard in left)
            for task, record in run_tasks(
                self.crew.executor, write_task, tasks, what="shards", total=len(left)
            ):
                records[task.shard] = record
                self._tell(reporter, task.shard)
        finally:
            # Whoever still writes has nowhere to put it.
            shutil.rmtree(run_folder(self.folder, job.run), ignore_errors=True)
        return records

    def _begun(self) -> PackJob:
        """The job of a new run; what a dead driver's workers are still at comes to nothing."""
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
            kind=self.luggage.kind,
            source=self.luggage.luggage.source,
            fingerprint=self.source.fingerprint,
            indexes=self.luggage.luggage.indexes,
            fields=self.luggage.fields,
            transcode=self.transcode,
            verify=self.crew.verify,
            workers=self.crew.workers,
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

    def _tell(self, reporter: ProgressReporter, shard: int) -> None:
        positions = self.plan.grouping.positions(shard)
        reporter.done(len(positions), int(self.source.sizes[positions].sum()))
