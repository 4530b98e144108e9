"""Packing over an executor: the driver lists, plans and completes; workers write the shards.

The driver may be killed: what is recorded in the folder stays, and the same call goes on after it.
"""

from __future__ import annotations

import logging
import os
import pickle
import secrets
import shutil
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from penstock.cache.executors import check_everywhere, check_executor, run_tasks
from penstock.readers.files.atomic import make_folder
from penstock.readers.files.progress import Reporter
from penstock.readers.index.reach import part_of
from penstock.readers.luggage import Luggage
from penstock.readers.packing.shard_task import (
    PackJob,
    ShardTask,
    check_worker,
    run_folder,
    write_task,
)
from penstock.readers.packing.source import CandidateSource

if TYPE_CHECKING:
    from concurrent.futures import Executor

    from penstock.readers.index.reach import Reach
    from penstock.readers.packing.folder import PackFolder, ShardRecord
    from penstock.readers.packing.plan import PackPlan
    from penstock.readers.packing.source import PackSource
    from penstock.readers.packing.transcode import Transcode
    from penstock.readers.source import Source
    from penstock.readers.types import Progress

_log = logging.getLogger("penstock")


@dataclass(frozen=True, slots=True, kw_only=True)
class Crew:
    """The workers of a pack, and what they have to know. verify: a name, None is the installed
    decoder; workers: threads of each task."""

    executor: Executor
    verify: str | None
    workers: int

    def __post_init__(self) -> None:
        check_executor(self.executor)


@dataclass(frozen=True, slots=True, kw_only=True)
class PackLuggage:
    """What the workers of a pack get of its source, and how they read it. fields: those that are
    packed, None is all."""

    kind: Literal["candidates", "pack", "rows"]
    luggage: Luggage
    fields: tuple[str, ...] | None = None

    @classmethod
    def of_files(cls, reach: Reach) -> PackLuggage:
        """Of data that has no index: each task brings what was listed of its samples."""
        return cls(kind="candidates", luggage=Luggage(source=pickle.dumps(reach)))

    @classmethod
    def of_source(
        cls, source: Source, *, is_pack: bool, fields: tuple[str, ...] | None
    ) -> PackLuggage:
        """Of what is open here, and is opened anew there. Raises ConfigError."""
        kind: Literal["pack", "rows"] = "pack" if is_pack else "rows"
        return cls(kind=kind, luggage=Luggage.of(source), fields=fields)


@dataclass(frozen=True, slots=True, kw_only=True)
class CrewWriter:
    """Has the shards of a plan written by a crew, into a pack's folder that has begun."""

    crew: Crew
    luggage: PackLuggage
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
        reporter = Reporter(
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
            candidates = part_of(self.source.candidates, positions)
        return ShardTask(
            job=job,
            shard=shard,
            positions=positions,
            ids=self.plan.source_ids[positions],
            sizes=self.source.sizes[positions],
            candidates=candidates,
        )

    def _tell(self, reporter: Reporter, shard: int) -> None:
        positions = self.plan.grouping.positions(shard)
        reporter.done(len(positions), int(self.source.sizes[positions].sum()))
