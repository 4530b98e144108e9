"""Write a dataset as a pack: shuffled by a seed, every sample checked, resumable at any moment.

Each shard is written, renamed to its final name, and then recorded. The manifest is written last,
after every rank has finished its shards; until then the pack can't be read. The content of each
shard depends only on the source's names and sizes, so killed runs and any number of ranks make
byte-identical packs. A shard without a good sample leaves a gap in the numbers; the manifest names
the shards that exist.
"""

from __future__ import annotations

import logging
import os
import pickle
import time
from collections.abc import Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from penstock.cache import ConfigError, DatasetNotFoundError, PenstockError
from penstock.cache.base import parse_size, usable_cores
from penstock.readers.dataset import Dataset, copy_keeping
from penstock.readers.fieldtypes import (
    Mask,
    Schema,
    mask_dtype,
    named_verify,
    untyped_places,
    verify_name,
)
from penstock.readers.files import locked, make_folder, printable, write_bytes
from penstock.readers.formats import (
    AUTO,
    DEFAULT_SAMPLING,
    VERSION,
    ChunkFormat,
    Sampling,
    arrangement_of,
    check_format,
    indexing_of,
)
from penstock.readers.formats.pack import PackFormat, pack_forms, rewrite_source
from penstock.readers.index import (
    MANIFEST,
    IndexOpener,
    Manifest,
    join_manifest,
    locate_fields,
    write_manifest,
)
from penstock.readers.origin import (
    QUARANTINE,
    LocalFolder,
    Scratch,
    count_left_out,
    joined_left_out,
    local_path,
    no_good_sample_message,
    quarantine_lines,
    show,
)
from penstock.readers.packing.pack_folder import PackFolder, ShardWriter, shard_name
from penstock.readers.packing.pack_sources import CandidateSource, PackedSource, RowSource
from penstock.readers.packing.transcode import Transcode
from penstock.readers.sources import Source
from penstock.readers.types import MAX_PIXELS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from concurrent.futures import Executor

    from numpy.typing import NDArray

    from penstock.cache.disk import DiskCache
    from penstock.readers.fieldtypes import FieldType
    from penstock.readers.formats import ManifestFile, ShardSummary
    from penstock.readers.index import Folder
    from penstock.readers.origin import LeftOut, Origin, Url
    from penstock.readers.packing.executor_packing import PackWorkers, WorkerSource
    from penstock.readers.packing.pack_folder import ShardRecord
    from penstock.readers.packing.pack_plan import PackPlan
    from penstock.readers.packing.pack_sources import PackSource
    from penstock.readers.types import Progress, Verify

    ShardRule = Callable[[NDArray[np.int64]], int]


@dataclass(frozen=True, slots=True, kw_only=True)
class PackCompletion:
    """Complete a folder of finished shards to a pack. The rank that finishes last does it. known:
    records by shard, if they are already in memory."""

    source: PackSource
    plan: PackPlan
    folder: PackFolder
    known: Mapping[int, ShardRecord] = field(default_factory=dict)

    def finish(self) -> Manifest | None:
        """Write the manifest if every shard of every rank is finished, else return None.

        Raises DatasetNotFoundError if no sample is good, and WriteError.
        """
        with locked(self.folder.own):
            try:
                done = self.folder.finished()
                return done if done is not None else self._finish()
            except (PenstockError, FileNotFoundError):
                # Without locks (some NFS) two ranks may finish at once, and one may remove files
                # that the other reads. That is fine if the pack is complete.
                if (done := self.folder.finished()) is not None:
                    return done
                raise

    def _finish(self) -> Manifest | None:
        records = []
        for shard in range(self.plan.grouping.shards):
            record = self.known.get(shard) or self.folder.read_record(shard)
            if record is None:
                return None
            records.append(record)
        rejected = [r for record in records for r in record.rejected]
        quarantined = [*self.source.quarantined, *(q for _, q in rejected)]
        write_bytes(os.path.join(self.folder.own, QUARANTINE), quarantine_lines(quarantined))
        good = [(k, record.facts) for k, record in enumerate(records) if record.facts is not None]
        if not good:
            raise DatasetNotFoundError(no_good_sample_message(self.source.url, quarantined))
        if rejected and not self.source.has_ids:
            self._close_gaps(records, np.sort(np.array([i for i, _ in rejected], np.int64)))
        settings = self.folder.settings
        manifest = join_manifest(
            [shard_name(shard) for shard, _ in good],
            [facts for _, facts in good],
            kind=PackFormat.name,
            schema=_settle_masks(self.source.schema, [facts for _, facts in good]),
            quarantined=len(quarantined),
            shuffled=settings["shuffle"],
            seed=settings["seed"],
            source=self.source.url,
            settings=settings,
            samples_left_out=joined_left_out(
                [
                    count_left_out(quarantined, has_stray_files=self.source.has_stray_files),
                    self.source.left_out,
                ]
            )
            or None,
        )
        write_manifest(os.path.join(self.folder.own, MANIFEST), manifest)
        self.folder.tidy()
        return manifest

    def _close_gaps(self, records: list[ShardRecord], rejected: NDArray[np.int64]) -> None:
        """Replace the `source` columns by ids of the source's index, which counts good files only.

        The bad files are known only now. The column is computed from the plan, not from the file,
        so doing it twice does no harm.
        """
        for shard, record in enumerate(records):
            if record.facts is None:
                continue
            ids = self.plan.source_ids[self.plan.grouping.positions(shard)]
            ids = ids[~np.isin(ids, rejected)]
            source = ids - np.searchsorted(rejected, ids)
            rewrite_source(self.folder.shard(shard), self.source.schema, source)


def _settle_masks(schema: Schema, shards: Sequence[ShardSummary]) -> Schema:
    """Return the schema in which each mask of unknown dtype gets the smallest one that fits all its
    samples."""
    found = dict(schema)
    for name, type in schema.of_type(Mask).items():
        if not type.is_settled:
            dtypes = {mask_dtype(codec) for shard in shards for codec in shard.fields[name].codecs}
            found[name] = replace(type, dtype="int32" if "int32" in dtypes else "uint8")
    return Schema(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class PackSummary:
    """The result of `pack`. bytes: of the shard files. complete: True if the manifest is written;
    else the counts are those of this rank, and other ranks have yet to finish. progressive: the
    number of progressive JPEGs in the pack, None if they weren't counted. left_out: the number of
    samples that aren't in the pack by reason, including those that its source leaves out."""

    samples: int
    shards: int
    bytes: int
    quarantined: int
    seconds: float
    complete: bool
    progressive: int | None
    left_out: Mapping[str, int]

    @classmethod
    def of_manifest(
        cls, manifest: Manifest, seconds: float, left_out: Mapping[str, LeftOut]
    ) -> PackSummary:
        """Summarise a complete pack."""
        return cls(
            samples=manifest.about.samples,
            shards=len(manifest.names),
            bytes=int(manifest.shard_bytes.sum()),
            quarantined=manifest.about.quarantined,
            seconds=seconds,
            complete=True,
            progressive=manifest.about.progressive,
            left_out={reason: each.samples for reason, each in left_out.items()},
        )

    @classmethod
    def of_records(cls, records: Sequence[ShardRecord], seconds: float) -> PackSummary:
        """Summarise one rank's finished shards."""
        facts = [record.facts for record in records if record.facts is not None]
        return cls(
            samples=sum(f.samples for f in facts),
            shards=len(facts),
            bytes=sum(f.size_bytes for f in facts),
            quarantined=sum(len(record.rejected) for record in records),
            seconds=seconds,
            complete=False,
            progressive=sum(s.progressive or 0 for f in facts for s in f.fields.values()),
            left_out={
                reason: each.samples
                for reason, each in count_left_out(
                    (q for record in records for _, q in record.rejected), has_stray_files=True
                ).items()
            },
        )


_log = logging.getLogger("penstock")


@dataclass(frozen=True, slots=True, kw_only=True)
class PackTask:
    """The checked arguments of `pack`. shard_bytes: a number, or a function that returns it for the
    samples' bytes. Raises ConfigError."""

    shuffle: bool
    seed: int
    shard_bytes: int | ShardRule
    transcode: Transcode
    workers: int
    verify: Verify | None
    rank: int
    size: int
    progress: Progress | None
    executor: PackWorkers | None = None
    began: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise ConfigError(
                f"rank: got {self.rank} of size {self.size}, wanted 0 <= rank < size."
            )
        if self.executor is not None and self.size > 1:
            raise ConfigError(
                f"executor: got one together with rank {self.rank} of {self.size}. Either ranks "
                "share the work, or one process sends it to an executor's workers. For an "
                "executor, run one process, outside of torchrun and srun."
            )

    def settings(self, source: PackSource) -> dict[str, Any]:
        """Return the settings that identify the pack; equal settings make equal packs."""
        return {
            "version": VERSION,
            "source": source.fingerprint,
            "shuffle": self.shuffle,
            "seed": self.seed if self.shuffle else None,
            "shard_bytes": self.shard_bytes,
            "fields": list(source.schema),
            **({"max_pixels": source.max_pixels} if source.max_pixels != MAX_PIXELS else {}),
            **self.transcode.settings(),
        }

    def run(
        self,
        source: PackSource,
        root: bytes,
        worker_source: Callable[[], WorkerSource | None] = lambda: None,
    ) -> PackSummary:
        """Write this rank's share, and the manifest if all shares are finished. worker_source:
        returns the source for workers; called only if there is an executor."""
        if not isinstance(self.shard_bytes, int):
            size = parse_size(self.shard_bytes(source.sizes), what="shard_bytes")
            return replace(self, shard_bytes=size).run(source, root, worker_source)
        for_workers = None if self.executor is None else worker_source()
        self.transcode.image_fields(source.schema)
        if self.transcode.short_side is not None:
            for name in untyped_places(source.schema):
                _log.warning(
                    "The field \"%s\" isn't resized with the images, because the schema doesn't "
                    "declare it as Boxes or Keypoints. If it holds places in an image, pack from "
                    'Python: pack(source, destination, schema={"%s": Boxes(of=…, format=…)}, '
                    "short_side=…).",
                    name,
                    name,
                )
        pack_forms(source.schema)
        folder = PackFolder(root, self.settings(source))
        manifest = folder.finished()
        if manifest is not None:
            _log.info("%s already holds this complete pack: nothing to do", printable(root))
            with locked(folder.own):
                folder.tidy()
            return PackSummary.of_manifest(manifest, self._seconds(), folder.left_out(manifest))
        plan = source.plan(shuffle=self.shuffle, seed=self.seed, shard_bytes=self.shard_bytes)
        folder.begin()
        rank = b"%06d-of-%06d" % (self.rank, self.size)
        own = os.path.join(folder.own, b"ranks", rank if for_workers is None else b"driver")
        make_folder(own)
        busy = f"{printable(root)}: another process is packing into it. Wait for it, or stop it."
        known: dict[int, ShardRecord] = {}
        records: list[ShardRecord] = []
        with locked(own, busy=busy):
            if self.executor is not None and for_workers is not None:
                from penstock.readers.packing.executor_packing import ExecutorWriter

                known = ExecutorWriter(
                    workers=self.executor,
                    worker_source=for_workers,
                    source=source,
                    plan=plan,
                    folder=folder,
                    transcode=self.transcode,
                    progress=self.progress,
                ).write()
            else:
                records = ShardWriter(
                    source=source,
                    plan=plan,
                    folder=folder,
                    verify=self.verify,
                    transcode=self.transcode,
                    workers=self.workers,
                    progress=self.progress,
                ).write(range(self.rank, plan.grouping.shards, self.size))
        manifest = PackCompletion(source=source, plan=plan, folder=folder, known=known).finish()
        if manifest is None:
            return PackSummary.of_records(records, self._seconds())
        return PackSummary.of_manifest(manifest, self._seconds(), folder.left_out(manifest))

    def _seconds(self) -> float:
        return time.monotonic() - self.began


def pack(
    src: Url | Source,
    dst: Folder,
    *,
    format: str = AUTO,
    fields: Sequence[str] | Mapping[str, str | None] | None = None,
    manifest: ManifestFile | None = None,
    schema: Mapping[str, FieldType] | None = None,
    sampling: Sampling = DEFAULT_SAMPLING,
    allow_empty: bool = False,
    max_pixels: int | None = None,
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

    src: anything that Dataset accepts, or an open dataset, a part of one, or several joined.
    fields: the packed ones; None means all. fields, format, manifest, schema, allow_empty and
    max_pixels describe src as for `index`; sampling: its sample, stride, dtype, documents and
    vocabulary. shuffle: False keeps the ids of the source's index. shard_bytes: mean bytes of a
    shard, before images are rewritten; or a function that returns it for the samples' bytes
    (int64). short_side: images with a longer one become baseline JPEGs of this short side (pixels,
    upright, quality 92); their masks, boxes and points are resized with them. quality: of rewritten
    images, 1 to 100; without short_side, every image is rewritten at its size. baseline: other
    progressive JPEGs become baseline ones without loss (extra `transcode`). image: the fields that
    these three apply to; None means all. workers: threads; None means all cores. verify: decodes
    images; None means the installed decoder. rank, size: this process's share of the shards; the
    process that finishes last writes the manifest. progress: called as progress(done samples, total
    samples, done bytes). storage_options, filesystem, cache: of src, as for Dataset; without a
    cache nothing is kept. executor: its workers write one shard per task (docs/packs.md); then
    workers are the threads of a task, None means 1, and verify must be importable or a name.

    Raises DestinationError if dst holds other data, which stays unchanged; ConfigError; WriteError
    if the disk is full or read-only; IndexChangedError if a file changes meanwhile; and the same
    errors as `index`.
    """
    task_workers = None
    if executor is not None:
        from penstock.readers.packing.executor_packing import PackWorkers

        task_workers = PackWorkers(
            executor=executor, verify=verify_name(verify), workers=workers or 1
        )
    if isinstance(shard_bytes, int | str):
        shard_bytes = parse_size(shard_bytes, what="shard_bytes")
    task = PackTask(
        shuffle=shuffle,
        seed=seed,
        shard_bytes=shard_bytes,
        transcode=Transcode(
            short_side=short_side, quality=quality, baseline=baseline, images=image
        ),
        workers=workers if workers and executor is None else usable_cores(),
        verify=named_verify(verify) if isinstance(verify, str) else verify,
        rank=rank,
        size=size,
        progress=progress,
        executor=task_workers,
    )
    arguments = _SourceArguments(
        format=format,
        manifest=manifest,
        schema=schema,
        sampling=sampling,
        storage_options=storage_options,
        filesystem=filesystem,
        cache=cache,
        allow_empty=allow_empty,
        max_pixels=max_pixels,
    )
    if isinstance(src, Source):
        return _pack_source(task, src, dst, fields, arguments)
    return _pack_url(task, src, dst, fields, arguments)


class _SourceArguments(NamedTuple):
    """The arguments that describe the source in addition to its URL."""

    format: str = AUTO
    manifest: ManifestFile | None = None
    schema: Mapping[str, FieldType] | None = None
    sampling: Sampling = DEFAULT_SAMPLING
    storage_options: Mapping[str, Any] | None = None
    filesystem: Any | None = None
    cache: DiskCache | Folder | None = None
    allow_empty: bool = False
    max_pixels: int | None = None


def _pack_source(
    task: PackTask,
    src: Source,
    dst: Folder,
    fields: Iterable[str] | None,
    arguments: _SourceArguments,
) -> PackSummary:
    for name, value, default in zip(arguments._fields, arguments, _SourceArguments(), strict=True):
        if value != default:
            raise ConfigError(
                f"pack: got {name}= together with a dataset, which has this argument itself. Leave "
                f"{name}= out."
            )
    names = None if fields is None else tuple(fields)
    if not isinstance(src, Dataset):
        root = _destination(dst, None)
    else:
        index = src.open(verify=task.verify, workers=task.workers)
        root = _destination(dst, index.origin)
        if index.is_self_contained and not src.is_renamed:
            packed = PackedSource(index, fields=names)
            return task.run(packed, root, lambda: _worker_source(src, names, is_pack=True))
    return _pack_rows(task, src, names, root)


def _pack_url(
    task: PackTask, src: Url, dst: Folder, fields: Iterable[str] | None, arguments: _SourceArguments
) -> PackSummary:
    check_format(arguments.format)
    files = None
    if task.executor is not None:  # checked before anything is read
        from penstock.readers.index import DatasetAddress
        from penstock.readers.packing.executor_packing import WorkerSource
        from penstock.readers.serialized_source import SerializedSource

        address = DatasetAddress.of(
            src,
            storage_options=arguments.storage_options,
            filesystem=arguments.filesystem,
            cache=arguments.cache,
        )
        serialized = SerializedSource(source=pickle.dumps(address))
        files = WorkerSource(kind="candidates", serialized=serialized)
    scratch = Scratch(arguments.cache)
    origin, renames = locate_fields(
        src,
        storage_options=arguments.storage_options,
        scratch=scratch,
        filesystem=arguments.filesystem,
        arrangement=arrangement_of(
            src,
            manifest=arguments.manifest,
            fields=fields,
            schema=arguments.schema,
            filesystem=arguments.filesystem,
            sampling=arguments.sampling,
            allow_empty=arguments.allow_empty,
            max_pixels=arguments.max_pixels,
        ),
        index=None,
        format=arguments.format,
    )
    with closing(scratch), closing(origin):
        root = _destination(dst, origin)
        names = None if fields is None else tuple(fields)
        opener = IndexOpener(origin=origin, scratch=scratch, index=None, verify=None, workers=1)
        index = opener.open_own(arguments.format)
        if index is not None and not renames:
            packed = PackedSource(index, fields=names)

            def packed_source() -> WorkerSource:
                with closing(_dataset(src, arguments, fields=None)) as dataset:
                    return _worker_source(dataset, names, is_pack=True)

            return task.run(packed, root, packed_source)
        if index is None:
            format = opener.recognise(arguments.format)
            arguments = arguments._replace(format=format.name)
            if not isinstance(format, ChunkFormat):
                found = CandidateSource.list(
                    origin, indexing_of(format), fields=names, renames=renames, workers=task.workers
                )
                return task.run(found, root, lambda: files)
    # Samples in chunks are read as a dataset does it, one decode unit at a time.
    dataset = _dataset(src, arguments, fields=fields)
    with closing(dataset):
        return _pack_rows(task, dataset, names, root)


def _dataset(src: Url, arguments: _SourceArguments, *, fields: Iterable[str] | None) -> Dataset:
    return Dataset(
        src,
        format=arguments.format,
        fields=fields if isinstance(fields, Mapping) else None,
        manifest=arguments.manifest,
        schema=arguments.schema,
        storage_options=arguments.storage_options,
        filesystem=arguments.filesystem,
        cache=arguments.cache,
        allow_left_out=1,  # the summary of the pack reports them
        allow_empty=arguments.allow_empty,
        max_pixels=arguments.max_pixels,
        **arguments.sampling.arguments(),
    )


def _worker_source(src: Source, names: tuple[str, ...] | None, *, is_pack: bool) -> WorkerSource:
    from penstock.readers.packing.executor_packing import WorkerSource
    from penstock.readers.serialized_source import SerializedSource

    kind: Literal["pack", "rows"] = "pack" if is_pack else "rows"
    return WorkerSource(kind=kind, serialized=SerializedSource.of(src), fields=names)


def _pack_rows(
    task: PackTask, src: Source, names: tuple[str, ...] | None, root: bytes
) -> PackSummary:
    """Pack the samples that a source reads. The packed fields of remote chunks are cached, even if
    batches of them would have other fields."""
    with ExitStack() as stack:
        if isinstance(src, Dataset):
            index = src.open(verify=task.verify, workers=task.workers)
            if index.remote is not None and index.manifest.is_of_chunks:
                src = stack.enter_context(closing(copy_keeping(src, names or tuple(src.schema))))
        rows = RowSource(src, fields=names, verify=task.verify, workers=task.workers)
        return task.run(rows, root, lambda: _worker_source(src, names, is_pack=False))


def _destination(dst: Folder, origin: Origin | None) -> bytes:
    path = local_path(os.fspath(dst))
    if not path:
        raise ConfigError(
            f"dst: got {show(dst)}, wanted a local folder. Pack into a local folder, then copy it "
            "with its `_penstock` folder by your store's own tool."
        )
    root = os.path.abspath(path)
    # A pack may lie next to selected tar files, but not inside a folder that is a dataset.
    folder = origin.root if isinstance(origin, LocalFolder) else getattr(origin, "mount", None)
    if origin is not None and folder is not None and origin.selection is None:
        source, target = os.path.realpath(folder), os.path.realpath(root)
        if os.path.commonpath((source, target)) in (source, target):
            raise ConfigError(
                f"dst: the destination {printable(root)} and the source {printable(folder)} must "
                "not contain each other. Give a folder outside the source."
            )
    return root
