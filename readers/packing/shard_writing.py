"""Write the shards of a pack: read, check and transcode their samples, and record each finished
shard.

A shard is one task, which may run twice and always writes the same bytes. This process runs the
tasks of its rank, or the workers of an executor run all: the driver lists, plans and completes. If
it is killed, the records in the folder stay, and the same call resumes from them. A worker's task
writes into a folder of its own below the driver's, and renames the finished files. The driver
removes its folder before it completes the pack, so that a lost worker can't add anything
afterwards.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import secrets
import shutil
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.cache import DestinationError, IndexChangedError, keep_open, ordered, run_tasks
from penstock.readers.fieldtypes import named_verify, verify_for
from penstock.readers.files import make_folder, printable, write_error
from penstock.readers.formats.pack import PackSample, ShardContent, write_shard
from penstock.readers.index import DatasetDescription
from penstock.readers.origin import QuarantineEntry
from penstock.readers.packing.pack_folder import PackFolder, ShardRecord
from penstock.readers.packing.pack_plan import PlannedShard
from penstock.readers.packing.pack_sources import CandidateSource, RowSource
from penstock.readers.types import Rejection

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from concurrent.futures import Executor

    from numpy.typing import NDArray

    from penstock.readers.fieldtypes import Schema
    from penstock.readers.formats import Candidates
    from penstock.readers.packing.pack_sources import PackSource
    from penstock.readers.packing.transcode import Transcode
    from penstock.readers.serialized_source import SerializedSource
    from penstock.readers.types import Verify

    Ints = NDArray[np.int64]
    _Found = tuple[bytes, PackSample | Rejection]

_REPORTED_SAMPLES = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class PackRules:
    """How the samples of a pack are checked and rewritten. verify: decodes images, or its name;
    None means the installed decoder. workers: threads."""

    transcode: Transcode
    verify: Verify | str | None
    workers: int

    def decoder(self) -> Verify | None:
        """Return the decoder of this process; None means the installed one. Raises
        MissingDependencyError."""
        if isinstance(self.verify, str):
            return named_verify(self.verify, workers=self.workers)
        return self.verify


def write_shards(
    source: PackSource,
    shards: Sequence[PlannedShard],
    folder: PackFolder,
    rules: PackRules,
    *,
    report: Callable[[Ints], None] = lambda _: None,
) -> Iterator[ShardRecord]:
    """Write shards into a pack's folder, and yield their records in order. report: called with the
    positions of samples that were read.

    Raises IndexChangedError, DatasetError, FetchError, WriteError.
    """

    def transcoded(found: _Found) -> _Found:
        name, sample = found
        if isinstance(sample, Rejection):
            return found
        return name, rules.transcode.apply(sample, source.schema)

    def drafts() -> Iterator[tuple[PlannedShard, list[_Found]]]:
        """Yield each shard with the names of its samples, and the samples, good and bad."""
        workers = rules.workers
        samples = source.samples(shards, verify=rules.decoder(), workers=workers)
        if rules.transcode.is_needed:
            ahead = workers + 2
            samples = ordered(transcoded, samples, workers=workers, ahead=ahead, name="transcode")
        for shard in shards:
            found: list[_Found] = []
            while len(found) < len(shard.positions):
                positions = shard.positions[len(found) :][:_REPORTED_SAMPLES]
                found += islice(samples, len(positions))
                report(positions)
            yield shard, found

    # One thread writes a shard while the next one is decoded.
    return ordered(
        lambda draft: _write_shard(source.schema, folder, *draft),
        drafts(),
        workers=1,
        ahead=1,
        name="pack-write",
        leave_s=None,
    )


def _write_shard(
    schema: Schema, folder: PackFolder, shard: PlannedShard, found: Sequence[_Found]
) -> ShardRecord:
    """Write the good samples of a shard, and record it."""
    good = [(name, sample) for name, sample in found if isinstance(sample, PackSample)]
    facts = None
    if good:
        is_good = [isinstance(sample, PackSample) for _, sample in found]
        content = ShardContent(
            schema=schema,
            samples=[sample for _, sample in good],
            source=shard.source_ids[is_good],
            names=[name for name, _ in good],
        )
        facts = write_shard(folder.shard(shard.number), content)
    rejected = [
        (source_id, QuarantineEntry(name=name, reason=sample.reason))
        for source_id, (name, sample) in zip(shard.source_ids.tolist(), found, strict=True)
        if isinstance(sample, Rejection)
    ]
    record = ShardRecord(facts=facts, rejected=rejected)
    folder.write_record(shard.number, record)
    return record


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ShardTask:
    """One shard of a pack, which a worker of an executor writes.

    candidates: its samples, if the source has no index; then `source` describes its files, else it
    is opened. fields: the packed ones. fingerprint: of the source. root: the pack's folder. run:
    the driver's folder in it. settings: of the pack.
    """

    shard: PlannedShard
    candidates: Candidates | None
    source: DatasetDescription | SerializedSource
    fields: tuple[str, ...]
    fingerprint: str
    root: bytes
    run: bytes
    settings: Mapping[str, Any]
    rules: PackRules

    def open(self) -> PackSource:
        """Return the source, which is opened once per process. Raises an error if it can't be
        opened."""
        if self.candidates is not None:
            assert isinstance(self.source, DatasetDescription)
            origin, _ = self.source.open_files()
            return CandidateSource(origin, self.candidates, fingerprint=self.fingerprint)
        key = hashlib.sha256(pickle.dumps((self.source, self.fields))).hexdigest()
        opened = keep_open(f"pack {key}", self._open_rows)
        if opened.fingerprint != self.fingerprint:
            raise IndexChangedError(
                f"{opened.url}: its index differs from that of the driver. Check that all machines "
                "see the same files."
            )
        return opened

    def _open_rows(self) -> RowSource:
        assert not isinstance(self.source, DatasetDescription)
        verify, workers = self.rules.decoder(), self.rules.workers
        return RowSource(self.source.load(), fields=self.fields, verify=verify, workers=workers)

    def unseen(self) -> DestinationError:
        """Return the error for a machine without the folder of this run."""
        return DestinationError(
            f"{printable(self.root)}: the folder of this run doesn't exist on this machine. Give a "
            "destination that is mounted under the same path on every machine. If it is, the "
            "driver of this run has ended, and another one continues."
        )


def check_worker(task: ShardTask) -> None:
    """Check that this process reaches the source and the destination, and has a decoder. Raises an
    error that names what is missing."""
    if not os.path.isdir(task.run):
        raise task.unseen()
    verify_for(task.open().schema, task.rules.decoder(), workers=task.rules.workers)


def write_task(task: ShardTask) -> ShardRecord:
    """Write one shard of a pack, unless it is finished. Raises DestinationError if this machine
    doesn't see the destination or the run is over, errors of reading, and WriteError."""
    shard, folder = task.shard, PackFolder(task.root, task.settings)
    done = folder.read_record(shard.number)
    if done is not None:
        return done
    source = task.open()
    if task.candidates is not None:  # the source has no others
        positions = np.arange(len(shard.positions))
        shard = PlannedShard(shard.number, positions=positions, source_ids=shard.source_ids)
    path = os.path.join(task.run, b"%06d-%s" % (shard.number, secrets.token_hex(8).encode()))
    with _run_errors(task):
        os.mkdir(path)
    try:
        own = PackFolder(task.root, task.settings, inside=path)
        (record,) = write_shards(source, [shard], own, task.rules)
        with _run_errors(task):
            if record.facts is not None:
                os.replace(own.shard(shard.number), folder.shard(shard.number))
            os.replace(own.record(shard.number), folder.record(shard.number))
    finally:
        shutil.rmtree(path, ignore_errors=True)
    return record


@contextmanager
def _run_errors(task: ShardTask) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        raise task.unseen() from None
    except OSError as error:
        raise write_error(task.root, error) from error


def write_by_executor(
    executor: Executor,
    shards: Sequence[PlannedShard],
    *,
    source: PackSource,
    sent: DatasetDescription | SerializedSource,
    folder: PackFolder,
    rules: PackRules,
) -> Iterator[tuple[PlannedShard, ShardRecord]]:
    """Write shards by the workers of an executor, and yield each with its record when it is done.
    sent: the source, for workers. Raises the errors of tasks, with the worker's name, and
    WorkerError."""
    ranks = os.path.join(folder.own, b"ranks")
    for name in os.listdir(ranks):  # the workers of earlier runs can't finish
        if name.startswith(b"run-"):
            shutil.rmtree(os.path.join(ranks, name), ignore_errors=True)
    run = os.path.join(ranks, b"run-" + secrets.token_hex(8).encode())
    make_folder(run)
    tasks = (
        ShardTask(
            shard=shard,
            candidates=(
                source.candidates.take(shard.positions)
                if isinstance(source, CandidateSource)
                else None
            ),
            source=sent,
            fields=tuple(source.schema),
            fingerprint=source.fingerprint,
            root=folder.root,
            run=run,
            settings=folder.settings,
            rules=rules,
        )
        for shard in shards
    )
    try:
        for task, record in run_tasks(
            executor, write_task, tasks, check=check_worker, what="shards", total=len(shards)
        ):
            yield task.shard, record
    finally:
        # Tasks that still run can't write any more.
        shutil.rmtree(run, ignore_errors=True)
