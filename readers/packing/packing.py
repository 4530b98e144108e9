"""Write a dataset as a pack: shuffled by a seed, every sample checked, resumable at any moment.

Each shard is written, renamed to its final name, and then recorded. The manifest is written last,
after every rank has finished its shards; until then the pack can't be read. The content of each
shard depends only on the source's names and sizes, so killed runs and any number of ranks make
byte-identical packs. A shard without a good sample leaves a gap in the numbers; the manifest names
the shards that exist.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.cache import ConfigError, PenstockError, check_executor, log
from penstock.cache.base import parse_size, usable_cores
from penstock.readers.dataset import Dataset, dataset_of
from penstock.readers.fieldtypes import FieldTypes, Schema, Settling, named_verify, verify_name
from penstock.readers.files import ProgressReporter, locked, make_folder, printable
from penstock.readers.formats import AUTO, DEFAULT_SAMPLING, VERSION, ChunkFormat
from penstock.readers.formats.pack import PackFormat, pack_forms, rewrite_source
from penstock.readers.index import DatasetDescription, DatasetSummary, IndexOpener, complete_index
from penstock.readers.origin import Scratch, count_left_out, local_path, show
from penstock.readers.packing.pack_sources import CandidateSource, RowSource
from penstock.readers.packing.shard_writing import (
    PackFolder,
    PackRules,
    shard_name,
    write_by_executor,
    write_shards,
)
from penstock.readers.packing.transcode import Transcode
from penstock.readers.serialized_source import SerializedSource
from penstock.readers.sources import Source
from penstock.readers.types import MAX_PIXELS, Facts, Ints, Progress, Verify

if TYPE_CHECKING:
    from concurrent.futures import Executor

    from penstock.cache.disk import DiskCache
    from penstock.readers.formats import ManifestFile, Sampling, ShardSummary
    from penstock.readers.index import Folder, Manifest
    from penstock.readers.origin import Origin, QuarantineEntry, Url
    from penstock.readers.packing.pack_sources import PackPlan, PackSource, PlannedShard
    from penstock.readers.packing.shard_writing import ShardRecord

    ShardRule = Callable[[Ints], int]


def _settled(schema: Schema, shards: Sequence[ShardSummary]) -> Schema:
    """Return the schema in which each mask of unknown dtype gets the smallest one that fits all its
    samples."""
    settling = Settling(schema)
    for name in schema.unsettled:
        for codec in {codec for shard in shards for codec in shard.fields[name].codecs}:
            settling.add({name: Facts(0, 0, 0, (), codec)}, sample=name)
    return settling.schema()


@dataclass(frozen=True, slots=True, kw_only=True)
class PackSummary(DatasetSummary):
    """The result of `pack`. bytes: of the shard files. complete: True if the manifest is written;
    else the counts are those of this rank, and other ranks have yet to finish. progressive: the
    number of progressive JPEGs in the pack, None if they weren't counted. left_out: the number of
    samples that aren't in the pack by reason, including those that its source leaves out."""

    complete: bool
    progressive: int | None

    @classmethod
    def of_records(cls, records: Collection[ShardRecord], seconds: float) -> PackSummary:
        """Summarise one rank's finished shards."""
        facts = [record.facts for record in records if record.facts is not None]
        rejected = [entry for record in records for _, entry in record.rejected]
        return cls(
            samples=sum(f.samples for f in facts),
            shards=len(facts),
            bytes=sum(f.size_bytes for f in facts),
            quarantined=len(rejected),
            seconds=seconds,
            complete=False,
            progressive=sum(s.progressive or 0 for f in facts for s in f.fields.values()),
            left_out={reason: n.samples for reason, n in count_left_out(rejected).items()},
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PackRun:
    """One call of `pack`, with its checked arguments. shard_bytes: a number, or a function that
    returns it for the samples' bytes. workers: threads of this process. executor: writes the
    shards; None means this process. Raises ConfigError, MissingDependencyError."""

    shuffle: bool
    seed: int
    shard_bytes: int | ShardRule
    rules: PackRules
    workers: int
    rank: int
    size: int
    progress: Progress | None
    executor: Executor | None
    began: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise ConfigError(f"rank: got {self.rank} of {self.size}, wanted 0 <= rank < size.")
        if self.executor is not None and self.size > 1:
            raise ConfigError(
                f"executor: got one together with rank {self.rank} of {self.size}. Either ranks "
                "share the work, or one process sends it to an executor's workers. For an "
                "executor, run one process, outside of torchrun and srun."
            )
        if isinstance(self.rules.verify, str):
            named_verify(self.rules.verify)

    def settings(self, source: PackSource) -> dict[str, Any]:
        """Return the settings that identify the pack; equal settings make equal packs."""
        size = self.shard_bytes
        if not isinstance(size, int):
            size = parse_size(size(source.sizes), what="shard_bytes")
        return {
            "version": VERSION,
            "source": source.fingerprint,
            "shuffle": self.shuffle,
            "seed": self.seed if self.shuffle else None,
            "shard_bytes": size,
            "fields": list(source.schema),
            **({"max_pixels": source.max_pixels} if source.max_pixels != MAX_PIXELS else {}),
            **self.rules.transcode.settings(),
        }

    def write(self, source: PackSource, root: bytes) -> PackSummary:
        """Write this rank's share, and the manifest if all shares are finished."""
        self.rules.transcode.check(source.schema)
        pack_forms(source.schema)
        folder = PackFolder(root, self.settings(source))
        manifest = folder.finished()
        if manifest is not None:
            log.info("%s already holds this complete pack: nothing to do", printable(root))
            with locked(folder.own):
                folder.tidy()
        else:
            plan = source.plan(
                shuffle=self.shuffle, seed=self.seed, shard_bytes=folder.settings["shard_bytes"]
            )
            folder.begin()
            is_driver = self.executor is not None
            own = os.path.join(
                folder.ranks, b"driver" if is_driver else b"%06d-of-%06d" % (self.rank, self.size)
            )
            make_folder(own)
            busy = "another process is packing into it. Wait for it, or stop it."
            with locked(own, busy=f"{printable(root)}: {busy}"):
                records = self._write_shards(source, plan, folder)
            manifest = _complete(source, plan, folder, records)
            if manifest is None:
                return PackSummary.of_records(records.values(), self._seconds())
        progressive = manifest.about.progressive
        return PackSummary.of(
            manifest, seconds=self._seconds(), complete=True, progressive=progressive
        )

    def _write_shards(
        self, source: PackSource, plan: PackPlan, folder: PackFolder
    ) -> dict[int, ShardRecord]:
        """Write the shards of this rank that aren't finished. Return the records of all its shards.

        Raises IndexChangedError, DatasetError, FetchError, WriteError, and WorkerError.
        """
        mine = plan[self.rank :: self.size]
        found = ((shard, folder.read_record(shard.number)) for shard in mine)
        records = {shard.number: record for shard, record in found if record is not None}
        reporter = ProgressReporter(
            f"Packing {source.url}",
            total=sum(len(shard.positions) for shard in mine),
            progress=self.progress,
            remedy="`penstock pack` shows a progress bar.",
        )

        def report(positions: Ints) -> None:
            reporter.done(len(positions), int(source.sizes[positions].sum()))

        if records:
            log.info("Resuming: %d of %d shards are finished", len(records), len(mine))
            report(np.concatenate([plan[number].positions for number in records]))
        left = [shard for shard in mine if shard.number not in records]
        written: Iterator[tuple[PlannedShard, ShardRecord]]
        if self.executor is None:
            written = zip(left, write_shards(source, left, folder.shard, self.rules), strict=True)
        else:
            written = write_by_executor(
                self.executor, left, source=source, folder=folder, rules=self.rules
            )
        for shard, record in written:
            folder.write_record(shard.number, record)
            records[shard.number] = record
            report(shard.positions)
        return records

    def _seconds(self) -> float:
        return time.monotonic() - self.began


def _complete(
    source: PackSource, plan: PackPlan, folder: PackFolder, known: Mapping[int, ShardRecord]
) -> Manifest | None:
    """Write the manifest if every shard of every rank is finished, else return None. The rank that
    finishes last does it. known: records that are already in memory.

    Raises DatasetNotFoundError if no sample is good, and WriteError.
    """
    with locked(folder.own):
        try:
            done = folder.finished()
            return done if done is not None else _write_manifest(source, plan, folder, known)
        except (PenstockError, FileNotFoundError):
            # Without locks (some NFS) two ranks may finish at once, and one may remove files
            # that the other reads. That is fine if the pack is complete.
            if (done := folder.finished()) is not None:
                return done
            raise


def _write_manifest(
    source: PackSource, plan: PackPlan, folder: PackFolder, known: Mapping[int, ShardRecord]
) -> Manifest | None:
    rejected: list[tuple[int, QuarantineEntry]] = []
    good: list[PlannedShard] = []
    facts: list[ShardSummary] = []
    for shard in plan:
        record = known.get(shard.number) or folder.read_record(shard.number)
        if record is None:
            return None
        rejected += record.rejected
        if record.facts is not None:
            good.append(shard)
            facts.append(record.facts)
    if rejected and not source.has_ids:
        gone = np.sort(np.array([i for i, _ in rejected], np.int64))
        for shard in good:
            # Replace the `source` column by ids of the source's index, which counts good files
            # only. The bad files are known only now. The column is computed from the plan, not
            # from the file, so doing it twice does no harm.
            ids = shard.source_ids[~np.isin(shard.source_ids, gone)]
            shown = ids - np.searchsorted(gone, ids)
            rewrite_source(folder.shard(shard.number), source.schema, shown)
    manifest = complete_index(
        folder.own,
        [shard_name(shard.number) for shard in good],
        facts,
        url=source.url,
        quarantined=[*source.quarantined, *(entry for _, entry in rejected)],
        samples_left_out=source.left_out,
        kind=PackFormat.name,
        schema=_settled(source.schema, facts),
        shuffled=folder.settings["shuffle"],
        seed=folder.settings["seed"],
        source=source.url,
        settings=folder.settings,
    )
    folder.tidy()
    return manifest


def pack(
    src: Url | Source,
    dst: Folder,
    *,
    format: str = AUTO,
    fields: Sequence[str] | Mapping[str, str | None] | None = None,
    manifest: ManifestFile | None = None,
    schema: FieldTypes | None = None,
    sampling: Sampling = DEFAULT_SAMPLING,
    allow_empty: bool = False,
    max_pixels: int | None = None,
    split: str | None = None,
    shuffle: bool = True,
    seed: int = 0,
    shard_bytes: int | str | ShardRule = "64MiB",
    short_side: int | None = None,
    quality: int | None = None,
    baseline: bool = False,
    image: Sequence[str] | None = None,
    workers: int | None = None,
    verify: Verify | str | None = None,
    rank: int = 0,
    size: int = 1,
    progress: Progress | None = None,
    storage_options: Mapping[str, Any] | None = None,
    filesystem: Any | None = None,
    cache: DiskCache | Folder | None = None,
    executor: Executor | None = None,
) -> PackSummary:
    """Write a dataset as a pack into the local folder dst. If it was interrupted, the same call
    resumes.

    ```python
    from penstock import Dataset, pack

    pack("photos/train", "packed")
    print(len(Dataset("packed")))  # 96
    ```

    src: anything that Dataset accepts, or an open dataset, a part of one, or several joined.
    fields: the packed ones; None means all. fields, format, manifest, schema, allow_empty,
    max_pixels and split describe src as for `index`; sampling: its sample, stride, dtype, documents
    and vocabulary. shuffle: False keeps the ids of the source's index. shard_bytes: mean bytes of a
    shard, before images are rewritten; or a function that returns it for the samples' bytes
    (int64). short_side: images whose short side is longer are shrunk to this one, in pixels, and
    become baseline JPEGs (upright, quality 92); their masks, boxes and points are resized with
    them. quality: of rewritten images, 1 to 100; without short_side, every image is rewritten at
    its size. baseline: other progressive JPEGs become baseline ones without loss (extra
    `transcode`). image: the fields that these three apply to; None means all. workers: threads;
    None means all cores. verify: decodes images; None means the installed decoder. rank, size: this
    process's share of the shards; the process that finishes last writes the manifest. progress:
    called as progress(done samples, total samples, done bytes). storage_options, filesystem, cache:
    of src, as for Dataset; without a cache nothing is kept. executor: its workers write one shard
    per task (docs/howto/packs.md); then workers are the threads of a task, None means 1, and verify
    must be importable or a name.

    Raises DestinationError if dst holds other data, which stays unchanged; ConfigError; WriteError
    if the disk is full or read-only; IndexChangedError if a file changes meanwhile; and the same
    errors as `index`.
    """
    if isinstance(shard_bytes, int | str):
        shard_bytes = parse_size(shard_bytes, what="shard_bytes")
    threads = usable_cores()
    if executor is not None:
        check_executor(executor)
        verify = verify_name(verify)
    run = PackRun(
        shuffle=shuffle,
        seed=seed,
        shard_bytes=shard_bytes,
        rules=PackRules(
            transcode=Transcode(
                short_side=short_side, quality=quality, baseline=baseline, images=image
            ),
            verify=verify,
            workers=workers or (threads if executor is None else 1),
        ),
        workers=workers if workers and executor is None else threads,
        rank=rank,
        size=size,
        progress=progress,
        executor=executor,
    )
    names = None if fields is None else tuple(fields)
    arguments: dict[str, Any] = {
        "format": format,
        "manifest": manifest,
        "schema": schema,
        "sampling": sampling,
        "storage_options": storage_options,
        "filesystem": filesystem,
        "cache": cache,
        "allow_empty": allow_empty,
        "max_pixels": max_pixels,
        "split": split,
    }
    if isinstance(src, Source):
        defaults = {"format": AUTO, "sampling": DEFAULT_SAMPLING, "allow_empty": False}
        for name, value in arguments.items():
            if value != defaults.get(name):
                raise ConfigError(
                    f"pack: got {name}= together with a dataset, which has this argument itself. "
                    f"Leave {name}= out."
                )
        return _pack_rows(run, src, names, dst)
    places = fields if isinstance(fields, Mapping) else None
    data = DatasetDescription(url=src, fields=places, **arguments)
    sent = None if executor is None else data.for_workers()  # checked before anything is read
    with closing(Scratch(cache)) as scratch:
        opener = IndexOpener.of(data, scratch)
        with closing(opener.origin):
            root = _destination(dst, opener.origin)
            if opener.open_own() is None:
                found = opener.recognise()
                if not isinstance(found, ChunkFormat):
                    files = CandidateSource.list(
                        opener, found, fields=names, workers=run.workers, sent=sent
                    )
                    return run.write(files, root)
                data = replace(data, format=found.name)
    # Packs, and samples in chunks, are read as a dataset does it.
    with closing(dataset_of(data)) as dataset:
        return _pack_rows(run, dataset, names, dst)


def _pack_rows(
    run: PackRun, src: Source, names: tuple[str, ...] | None, dst: Folder
) -> PackSummary:
    """Pack the samples that a source reads."""
    origin = None
    if isinstance(src, Dataset):
        origin = src.open(verify=run.rules.verify, workers=run.workers).origin
    root = _destination(dst, origin)
    sent = None if run.executor is None else SerializedSource.of(src)
    with closing(RowSource(src, fields=names, sent=sent)) as rows:
        return run.write(rows, root)


def _destination(dst: Folder, origin: Origin | None) -> bytes:
    path = local_path(os.fspath(dst))
    if not path:
        raise ConfigError(
            f"dst: got {show(dst)}, wanted a local folder. Pack into a local folder, then copy it "
            "with its `_penstock` folder by your store's own tool."
        )
    root = os.path.abspath(path)
    # A pack may lie next to selected tar files, but not inside a folder that is a dataset.
    folder = None if origin is None or origin.selection is not None else origin.folder
    if folder is not None:
        source, target = os.path.realpath(folder), os.path.realpath(root)
        if os.path.commonpath((source, target)) in (source, target):
            raise ConfigError(
                f"dst: the destination {printable(root)} and the source {printable(folder)} must "
                "not contain each other. Give a folder outside the source."
            )
    return root
