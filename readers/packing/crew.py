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
from typing import TYPE_CHECKING, Any, Literal

from penstock.cache.errors import ConfigError
from penstock.cache.executors import check_everywhere, check_executor, over
from penstock.readers.dataset import Dataset
from penstock.readers.files.atomic import make_folder
from penstock.readers.files.progress import Reporter
from penstock.readers.index.reach import Reach, part_of, pickled
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

    from penstock.readers.packing.folder import PackFolder, ShardRecord
    from penstock.readers.packing.plan import PackPlan
    from penstock.readers.packing.source import PackSource
    from penstock.readers.packing.transcode import Transcode
    from penstock.readers.source import Source
    from penstock.readers.types import Progress

_log = logging.getLogger("penstock")

_MOST_SOURCE_BYTES = 16 * 2**20


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
class Luggage:
    """A source as it travels to workers. source: pickled; indexes: folders in which the indexes of
    its datasets lie."""

    kind: Literal["candidates", "pack", "rows"]
    source: bytes
    indexes: tuple[bytes, ...] = ()
    fields: tuple[str, ...] | None = None

    @classmethod
    def of_files(cls, reach: Reach) -> Luggage:
        """Of data that has no index: each task brings what was listed of its samples."""
        return cls(kind="candidates", source=pickle.dumps(reach))

    @classmethod
    def of_source(cls, source: Source, *, is_pack: bool, fields: tuple[str, ...] | None) -> Luggage:
        """Of what is open here, and is opened anew there. Raises ConfigError."""
        indexes: list[bytes] = []

        def carried(value: Any) -> Any:
            return _carried(value, indexes) if isinstance(value, Dataset) else NotImplemented

        made = pickled(source, carried)
        if len(made) > _MOST_SOURCE_BYTES:
            raise ConfigError(
                f"{source.url}: this selection takes {len(made):,} bytes, and each task of an "
                "executor would carry it. Pack it in ranks, under torchrun or Slurm, or pack the "
                "whole dataset and select of the pack."
            )
        kind: Literal["pack", "rows"] = "pack" if is_pack else "rows"
        return cls(kind=kind, source=made, indexes=tuple(indexes), fields=fields)


def _carried(dataset: Dataset, indexes: list[bytes]) -> tuple[Any, ...]:
    """A dataset as it is pickled for another machine: absolute, without secrets, and with the index
    that it has here. indexes: its folder is added."""
    make, (url, arguments, names) = dataset.__reduce__()
    reach = Reach.of(
        url,
        storage_options=arguments["storage_options"],
        filesystem=arguments["filesystem"],
        cache=arguments["cache"],
    )
    index = arguments["index"]
    if not dataset.index.is_self_contained and os.path.isdir(dataset.index.place):
        index = os.path.abspath(dataset.index.place)
        indexes.append(os.fsencode(index))
    return make, (reach.url, {**arguments, "index": index, "cache": reach.cache}, names)


@dataclass(frozen=True, slots=True, kw_only=True)
class CrewWriter:
    """Has the shards of a plan written by a crew, into a pack's folder that has begun."""

    crew: Crew
    luggage: Luggage
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
            for task, record in over(
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
            source=self.luggage.source,
            fingerprint=self.source.fingerprint,
            indexes=self.luggage.indexes,
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
