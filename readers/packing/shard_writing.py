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

import errno
import hashlib
import os
import pickle
import secrets
import shutil
from dataclasses import dataclass
from itertools import compress
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.cache import (
    DestinationError,
    IndexChangedError,
    check_executor,
    keep_open,
    ordered,
    run_tasks,
)
from penstock.readers.fieldtypes import (
    DenseColumn,
    EncodedColumn,
    RaggedColumn,
    image_fields,
    is_progressive,
    named_verify,
    verify_for,
)
from penstock.readers.files import make_folder, printable, write_error
from penstock.readers.formats.pack import PictureFacts, ShardContent, pack_forms, write_shard
from penstock.readers.index import DatasetDescription, selected_candidates
from penstock.readers.origin import QuarantineEntry
from penstock.readers.packing.pack_folder import PackFolder, ShardRecord
from penstock.readers.packing.pack_plan import PlannedShard
from penstock.readers.packing.pack_sources import CandidateSource, RowSource
from penstock.readers.types import Rejection

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from concurrent.futures import Executor

    from numpy.typing import NDArray

    from penstock.readers.fieldtypes import Column, Schema
    from penstock.readers.formats import Candidates
    from penstock.readers.formats.pack import PackForm
    from penstock.readers.packing.pack_sources import PackSample, PackSource, SampleGroup
    from penstock.readers.packing.transcode import Transcode
    from penstock.readers.serialized_source import SerializedSource
    from penstock.readers.types import Encoded, Facts, Verify

    Ints = NDArray[np.int64]
    _Samples = list[PackSample | Rejection]

_EMPTY = np.empty(0, np.uint8)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardWriter:
    """Write shards into a pack's folder. verify: decodes images; None means the installed decoder.
    workers: threads."""

    source: PackSource
    folder: PackFolder
    verify: Verify | None
    transcode: Transcode
    workers: int

    def write(
        self, shards: Sequence[PlannedShard], report: Callable[[Ints], None] = lambda _: None
    ) -> Iterator[ShardRecord]:
        """Write shards, and yield their records in order. report: called with the positions of
        samples that were read.

        Raises IndexChangedError, DatasetError, FetchError, WriteError.
        """
        # One thread writes a shard while the next one is decoded.
        return ordered(
            lambda draft: self._write(*draft),
            self._drafts(shards, report),
            workers=1,
            ahead=1,
            name="pack-write",
            leave_s=None,
        )

    def _drafts(
        self, shards: Sequence[PlannedShard], report: Callable[[Ints], None]
    ) -> Iterator[tuple[PlannedShard, _Samples, list[bytes]]]:
        """Yield each shard with its samples, good and bad, and their names."""
        wanted = ((shard.number, shard.positions) for shard in shards)
        groups = self.source.groups(wanted, verify=self.verify, workers=self.workers)
        for shard in shards:
            samples: _Samples = []
            names: list[bytes] = []
            while len(samples) < len(shard.positions):
                group = next(groups)
                names += group.names
                samples += self._transcoded(group)
                report(group.positions)
            yield shard, samples, names

    def _transcoded(self, group: SampleGroup) -> Iterable[PackSample | Rejection]:
        if not self.transcode.is_needed:
            return group.samples

        def transcode(sample: PackSample | Rejection) -> PackSample | Rejection:
            if isinstance(sample, Rejection):
                return sample
            return self.transcode.apply(sample, self.source.schema)

        ahead = self.workers + 2
        return ordered(
            transcode, group.samples, workers=self.workers, ahead=ahead, name="transcode"
        )

    def _write(self, shard: PlannedShard, samples: _Samples, names: list[bytes]) -> ShardRecord:
        """Write the good samples of a shard, and record it."""
        good = [sample for sample in samples if not isinstance(sample, Rejection)]
        facts = None
        if good:
            is_good = [not isinstance(sample, Rejection) for sample in samples]
            content = _shard_content(
                good,
                self.source.schema,
                source=shard.source_ids[is_good],
                names=list(compress(names, is_good)),
            )
            facts = write_shard(self.folder.shard(shard.number), content)
        rejected = [
            (source_id, QuarantineEntry(name=name, reason=sample.reason))
            for source_id, name, sample in zip(
                shard.source_ids.tolist(), names, samples, strict=True
            )
            if isinstance(sample, Rejection)
        ]
        record = ShardRecord(facts=facts, rejected=rejected)
        self.folder.write_record(shard.number, record)
        return record


def _shard_content(
    samples: Sequence[PackSample],
    schema: Schema,
    *,
    source: NDArray[np.int64],
    names: Sequence[bytes],
) -> ShardContent:
    """Build the columns of a shard from at least one sample. source, names: see `ShardContent`."""
    columns: dict[str, Column] = {}
    crcs: dict[str, NDArray[np.uint32]] = {}
    pictures: dict[str, PictureFacts] = {}
    present: dict[str, NDArray[np.bool_]] = {}
    images = image_fields(schema, schema)
    for name, form in pack_forms(schema).items():
        if form.kind == "bytes":
            payloads = [sample.payloads.get(name) for sample in samples]
            facts = [sample.facts.get(name) for sample in samples]
            is_present = np.array([each is not None for each in payloads], bool)
            columns[name] = EncodedColumn([_EMPTY if p is None else p for p in payloads])
            crcs[name] = np.array([0 if f is None else f.crc32c for f in facts], np.uint32)
            if form.is_picture:
                pictures[name] = _picture(facts, payloads if name in images else None)
        else:
            arrays = [sample.arrays.get(name) for sample in samples]
            is_present = np.array([each is not None for each in arrays], bool)
            columns[name] = _numbers(arrays, form)
        if not is_present.all():
            present[name] = is_present
    return ShardContent(
        schema=schema,
        columns=columns,
        crcs=crcs,
        pictures=pictures,
        present=present,
        source=source,
        names=names,
    )


def _picture(
    facts: Sequence[Facts | None], images: Sequence[Encoded | None] | None
) -> PictureFacts:
    shapes = [(0, 0, 0) if each is None else each.shape for each in facts]
    return PictureFacts(
        shapes=np.array(shapes, np.int64).reshape(len(facts), 3),
        codecs=["" if each is None else each.codec for each in facts],
        progressive=(
            None
            if images is None
            else sum(is_progressive(image) for image in images if image is not None)
        ),
    )


def _numbers(arrays: Sequence[NDArray[Any] | None], form: PackForm) -> Column:
    """Build a column of arrays; a missing sample becomes zeros, or an empty array."""
    if not form.is_span:
        dense = np.zeros((len(arrays), *(length or 0 for length in form.row)), form.dtype)
        for row, each in enumerate(arrays):
            if each is not None:
                dense[row] = each
        return DenseColumn(dense)
    lengths = form.row if form.kind == "shaped" else (0, *form.row)
    empty = np.empty(tuple(length or 0 for length in lengths), form.dtype)
    values = [empty if each is None else each.astype(form.dtype, copy=False) for each in arrays]
    like = RaggedColumn(empty, np.zeros(1, np.int64))
    if form.kind == "shaped":
        like = RaggedColumn(
            empty.reshape(-1), np.zeros(1, np.int64), np.zeros((0, empty.ndim), np.int64)
        )
    return RaggedColumn.of(values, like=like)


@dataclass(frozen=True, slots=True, kw_only=True)
class PackJob:
    """The arguments that all tasks of a run share.

    source: a dataset's files if each task brings its candidates, else a source to open. fields: the
    packed ones; None means all. fingerprint: of the source. root: the pack's folder. run: the name
    of the driver's folder in it. verify: the name of a decoder. workers: threads of a task.
    """

    source: DatasetDescription | SerializedSource
    fields: tuple[str, ...] | None
    fingerprint: str
    root: bytes
    run: bytes
    settings: Mapping[str, Any]
    transcode: Transcode
    verify: str | None
    workers: int

    def folder(self) -> tuple[PackFolder, bytes]:
        """Return the pack's folder, and the path of this run's folder in it."""
        folder = PackFolder(self.root, self.settings)
        return folder, os.path.join(folder.own, b"ranks", self.run)

    def decoder(self) -> Verify | None:
        """Return the decoder of this process; None means the installed one."""
        return None if self.verify is None else named_verify(self.verify, workers=self.workers)

    def open(self, candidates: Candidates | None) -> PackSource:
        """Return the source, which is opened once per process. Raises an error if it can't be
        opened."""
        if candidates is not None:
            assert isinstance(self.source, DatasetDescription)
            origin, _ = self.source.open_files()
            return CandidateSource(origin, candidates, fingerprint=self.fingerprint)
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
        source = self.source.load()
        return RowSource(source, fields=self.fields, verify=self.decoder(), workers=self.workers)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ShardTask:
    """One shard of a pack to write. candidates: its samples, if the source has no index."""

    job: PackJob
    shard: PlannedShard
    candidates: Candidates | None


def check_worker(task: ShardTask) -> None:
    """Check that this process reaches the source and the destination, and has a decoder. Raises an
    error that names what is missing."""
    job = task.job
    _, run = job.folder()
    if not os.path.isdir(run):
        raise _unseen(job.root)
    verify_for(job.open(task.candidates).schema, job.decoder(), workers=job.workers)


def write_task(task: ShardTask) -> ShardRecord:
    """Write one shard of a pack, unless it is finished. Raises DestinationError if this machine
    doesn't see the destination or the run is over, errors of reading, and WriteError."""
    job, shard = task.job, task.shard
    folder, run = job.folder()
    done = folder.read_record(shard.number)
    if done is not None:
        return done
    source = job.open(task.candidates)
    if task.candidates is not None:  # the source has no others
        positions = np.arange(len(shard.positions))
        shard = PlannedShard(shard.number, positions=positions, source_ids=shard.source_ids)
    path = os.path.join(run, b"%06d-%s" % (shard.number, secrets.token_hex(8).encode()))
    try:
        os.mkdir(path)
    except OSError as error:
        if error.errno == errno.ENOENT:
            raise _unseen(job.root) from error
        raise write_error(path, error) from error
    try:
        own = folder.inside(path)
        writer = ShardWriter(
            source=source,
            folder=own,
            verify=job.decoder(),
            transcode=job.transcode,
            workers=job.workers,
        )
        (record,) = writer.write([shard])
        _publish(own, folder, shard.number, has_file=record.facts is not None)
    finally:
        shutil.rmtree(path, ignore_errors=True)
    return record


def _publish(own: PackFolder, folder: PackFolder, shard: int, *, has_file: bool) -> None:
    """Move a shard from a task's folder to its final place, then its record."""
    try:
        if has_file:
            os.replace(own.shard(shard), folder.shard(shard))
        os.replace(own.record(shard), folder.record(shard))
    except FileNotFoundError:
        raise _unseen(folder.root) from None
    except OSError as error:
        raise write_error(folder.shard(shard), error) from error


def _unseen(root: bytes) -> DestinationError:
    return DestinationError(
        f"{printable(root)}: the folder of this run doesn't exist on this machine. Give a "
        "destination that is mounted under the same path on every machine. If it is, the driver of "
        "this run has ended, and another one continues."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PackWorkers:
    """The executor of a pack, and the settings of its tasks. verify: the name of a decoder; None
    means the installed one. workers: threads of each task."""

    executor: Executor
    verify: str | None
    workers: int

    def __post_init__(self) -> None:
        check_executor(self.executor)

    def write(
        self,
        shards: Sequence[PlannedShard],
        *,
        source: PackSource,
        sent: DatasetDescription | SerializedSource,
        folder: PackFolder,
        transcode: Transcode,
    ) -> Iterator[tuple[PlannedShard, ShardRecord]]:
        """Write shards, and yield each with its record when it is done. sent: the source, for
        workers. Raises the errors of tasks, with the worker's name, and WorkerError."""
        ranks = os.path.join(folder.own, b"ranks")
        for name in os.listdir(ranks):  # the workers of earlier runs can't finish
            if name.startswith(b"run-"):
                shutil.rmtree(os.path.join(ranks, name), ignore_errors=True)
        job = PackJob(
            source=sent,
            fields=tuple(source.schema),
            fingerprint=source.fingerprint,
            root=folder.root,
            run=b"run-" + secrets.token_hex(8).encode(),
            settings=folder.settings,
            transcode=transcode,
            verify=self.verify,
            workers=self.workers,
        )
        _, run = job.folder()
        make_folder(run)

        def task_of(shard: PlannedShard) -> ShardTask:
            candidates = None
            if isinstance(source, CandidateSource):
                candidates = selected_candidates(source.candidates, shard.positions)
            return ShardTask(job=job, shard=shard, candidates=candidates)

        try:
            for task, record in run_tasks(
                self.executor,
                write_task,
                map(task_of, shards),
                check=check_worker,
                what="shards",
                total=len(shards),
            ):
                yield task.shard, record
        finally:
            # Tasks that still run can't write any more.
            shutil.rmtree(run, ignore_errors=True)
