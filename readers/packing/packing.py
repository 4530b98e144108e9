"""Write a dataset as a pack: a seeded full shuffle, every sample checked, resumable at any moment.

Each shard is written, renamed into place and then recorded; the manifest comes last, once every
shard of every rank is finished, and until then nothing can be read. The contents of each shard
follow from the source's names and sizes alone, so killed runs and any number of ranks make
byte-identical packs. (Packed shard by shard, a shard of which no sample is good leaves a gap in the
numbers; the manifest names the shards that are.)
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from penstock.cache import ConfigError, DatasetNotFoundError, PenstockError
from penstock.cache.base import parse_size, usable_cores
from penstock.readers.dataset import Dataset, copy_keeping
from penstock.readers.fields import (
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
    nothing_decodes,
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
    from penstock.readers.fields import FieldType
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
    """Turns a folder of finished shards into a pack. Whichever rank comes last does it. known:
    records by shard, where somebody was told them already."""

    source: PackSource
    plan: PackPlan
    folder: PackFolder
    known: Mapping[int, ShardRecord] = field(default_factory=dict)

    def finish(self) -> Manifest | None:
        """Write the manifest if every shard of every rank is finished; else None.

        Raises DatasetNotFoundError where not one image is good, WriteError.
        """
        with locked(self.folder.own):
            try:
                done = self.folder.finished()
                return done if done is not None else self._finish()
            except (PenstockError, FileNotFoundError):
                # Without locks (some NFS) two ranks may finish at once, and one tidies up under the
                # other: fine if the result stands.
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
            raise DatasetNotFoundError(nothing_decodes(self.source.url, quarantined))
        if rejected and not self.source.has_ids:
            self._close_gaps(records, np.sort(np.array([i for i, _ in rejected], np.int64)))
        settings = self.folder.settings
        manifest = join_manifest(
            [shard_name(shard) for shard, _ in good],
            [facts for _, facts in good],
            kind=PackFormat.name,
            schema=_settled(self.source.schema, [facts for _, facts in good]),
            quarantined=len(quarantined),
            shuffled=settings["shuffle"],
            seed=settings["seed"],
            source=self.source.url,
            settings=settings,
            samples_left_out=joined_left_out(
                [
                    count_left_out(quarantined, has_papers=self.source.has_papers),
                    self.source.left_out,
                ]
            )
            or None,
        )
        write_manifest(os.path.join(self.folder.own, MANIFEST), manifest)
        self.folder.tidy()
        return manifest

    def _close_gaps(self, records: list[ShardRecord], rejected: NDArray[np.int64]) -> None:
        """Turn the `source` columns into ids of the source's index, which counts good files only.

        Which files are bad is known only now. The column is computed from the plan, not from what
        is there, so doing it twice does no harm.
        """
        for shard, record in enumerate(records):
            if record.facts is None:
                continue
            ids = self.plan.source_ids[self.plan.grouping.positions(shard)]
            ids = ids[~np.isin(ids, rejected)]
            source = ids - np.searchsorted(rejected, ids)
            rewrite_source(self.folder.shard(shard), self.source.schema, source)


def _settled(schema: Schema, shards: Sequence[ShardSummary]) -> Schema:
    """The schema, in which masks that may have any dtype get the one that holds them all."""
    found = dict(schema)
    for name, type in schema.of_type(Mask).items():
        if not type.is_settled:
            dtypes = {mask_dtype(codec) for shard in shards for codec in shard.fields[name].codecs}
            found[name] = replace(type, dtype="int32" if "int32" in dtypes else "uint8")
    return Schema(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class PackSummary:
    """What `pack` did. bytes: of the shard files. complete: the manifest is written; else the
    counts are of this rank's share, and other ranks have theirs to finish. progressive: JPEGs of
    that kind in the pack, None where nobody counted. left_out: samples by the reason why they
    aren't in the pack, those that its source left out among them."""

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
        """The summary of a complete pack."""
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
        """The summary of one rank's finished shards."""
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
                    (q for record in records for _, q in record.rejected), has_papers=True
                ).items()
            },
        )


_log = logging.getLogger("penstock")


@dataclass(frozen=True, slots=True, kw_only=True)
class PackTask:
    """What `pack` was asked for, checked. shard_bytes: or a rule that tells it from the samples'
    bytes, asked once these are known. Raises ConfigError."""

    shuffle: bool
    seed: int
    shard_bytes: int | ShardRule
    transcode: Transcode
    workers: int
    verify: Verify | None
    rank: int
    size: int
    progress: Progress | None
    crew: PackWorkers | None = None
    began: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise ConfigError(
                f"rank: got {self.rank} of size {self.size}, wanted 0 <= rank < size."
            )
        if self.crew is not None and self.size > 1:
            raise ConfigError(
                f"executor: got one together with rank {self.rank} of {self.size}. Either ranks "
                "share the work out, or one process hands it to an executor's workers: run the "
                "latter once, outside of torchrun and srun."
            )

    def settings(self, source: PackSource) -> dict[str, Any]:
        """What the pack is made of; equal settings make equal packs."""
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
        luggage: Callable[[], WorkerSource | None] | None = None,
    ) -> PackSummary:
        """Write this rank's share, and the manifest if all shares are there by then. luggage: the
        source for a crew, asked for where there is one."""
        if not isinstance(self.shard_bytes, int):
            told = parse_size(self.shard_bytes(source.sizes), what="shard_bytes")
            return replace(self, shard_bytes=told).run(source, root, luggage)
        travels = None if self.crew is None or luggage is None else luggage()
        self.transcode.image_fields(source.schema)
        if self.transcode.short_side is not None:
            for name in untyped_places(source.schema):
                _log.warning(
                    '"%s" stays as it is while images are resized, as it is no Boxes or Keypoints '
                    "in the schema. If it is places in an image, pack from Python: pack(source, "
                    'destination, schema={"%s": Boxes(of=…, format=…)}, short_side=…).',
                    name,
                    name,
                )
        pack_forms(source.schema)
        folder = PackFolder(root, self.settings(source))
        manifest = folder.finished()
        if manifest is not None:
            _log.info("%s already holds this pack, complete: nothing to do", printable(root))
            with locked(folder.own):
                folder.tidy()
            return PackSummary.of_manifest(manifest, self._seconds(), folder.left_out(manifest))
        plan = source.plan(shuffle=self.shuffle, seed=self.seed, shard_bytes=self.shard_bytes)
        folder.begin()
        mine = b"%06d-of-%06d" % (self.rank, self.size)
        own = os.path.join(folder.own, b"ranks", b"driver" if travels is not None else mine)
        make_folder(own)
        busy = (
            f"{printable(root)}: another process is packing into it. Wait for it, or end it first."
        )
        known: dict[int, ShardRecord] = {}
        records: list[ShardRecord] = []
        with locked(own, busy=busy):
            if travels is not None:
                known = self._with_crew(travels, source, plan, folder)
            else:
                records = self._alone(source, plan, folder)
        done = PackCompletion(source=source, plan=plan, folder=folder, known=known)
        manifest = done.finish()
        if manifest is None:
            return PackSummary.of_records(records, self._seconds())
        return PackSummary.of_manifest(manifest, self._seconds(), folder.left_out(manifest))

    def _alone(self, source: PackSource, plan: PackPlan, folder: PackFolder) -> list[ShardRecord]:
        """Write this rank's shards on threads."""
        writer = ShardWriter(
            source=source,
            plan=plan,
            folder=folder,
            verify=self.verify,
            transcode=self.transcode,
            workers=self.workers,
            progress=self.progress,
        )
        return writer.write(range(self.rank, plan.grouping.shards, self.size))

    def _with_crew(
        self, luggage: WorkerSource, source: PackSource, plan: PackPlan, folder: PackFolder
    ) -> dict[int, ShardRecord]:
        """Have all shards written by workers."""
        from penstock.readers.packing.executor_packing import (
            ExecutorWriter,  # who packs alone needs none
        )

        assert self.crew is not None
        writer = ExecutorWriter(
            crew=self.crew,
            luggage=luggage,
            source=source,
            plan=plan,
            folder=folder,
            transcode=self.transcode,
            progress=self.progress,
        )
        return writer.write()

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
    """Write a dataset as a pack into the local folder dst. Killed, the same call goes on.

    src: what a Dataset takes; or a dataset, a part of one, several end to end. fields: those that
    are packed, None is all; it, format, manifest, schema, allow_empty and max_pixels say how src
    lies, as for `index`; sampling: what sample, stride, dtype, documents and vocabulary say there.
    shuffle: False keeps the ids of the source's index.
    shard_bytes: mean bytes of a shard, counted before images are rewritten; or a function of the
    samples' bytes (int64) that tells them. short_side: images with a longer one become baseline
    JPEGs of this short side (pixels, upright, quality 92), their masks, boxes and points follow.
    quality: of what is rewritten, 1 to 100; without short_side every image is, at its size.
    baseline: other progressive JPEGs become baseline ones without loss (extra `transcode`). image:
    fields that these three act on, None is all. workers: threads, None is all cores. verify:
    decodes images, None finds the installed one. rank, size: this process's share of the shards;
    whoever sees all finished writes the manifest. progress: called as progress(done samples, total
    samples, done bytes). storage_options, filesystem, cache: of src, as for Dataset; without a
    cache nothing is kept. executor: whose workers write a shard each (docs/packs.md); workers are
    threads of a task then, None is 1, and verify is importable or a name.

    Raises DestinationError (dst holds other data; nothing was touched), ConfigError, WriteError
    (disk full, read-only), IndexChangedError (a file changed meanwhile), and as `index` does.
    """
    rewrite = Transcode(short_side=short_side, quality=quality, baseline=baseline, images=image)
    task = PackTask(
        shuffle=shuffle,
        seed=seed,
        shard_bytes=parse_size(shard_bytes, what="shard_bytes")
        if isinstance(shard_bytes, int | str)
        else shard_bytes,
        transcode=rewrite,
        workers=workers if workers and executor is None else usable_cores(),
        verify=named_verify(verify) if isinstance(verify, str) else verify,
        rank=rank,
        size=size,
        progress=progress,
        crew=_crew(executor, verify, workers=workers or 1),
    )
    told = _SourceArguments(
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
    return _packed(task, src, dst, fields, told)


def _packed(
    task: PackTask,
    src: Url | Source,
    dst: Folder,
    fields: Sequence[str] | Mapping[str, str | None] | None,
    told: _SourceArguments,
) -> PackSummary:
    if isinstance(src, Source):
        return _pack_source(task, src, dst, fields, told)
    return _pack_url(task, src, dst, fields, told)


def _crew(
    executor: Executor | None, verify: Verify | str | None, *, workers: int
) -> PackWorkers | None:
    if executor is None:
        return None
    from penstock.readers.packing.executor_packing import PackWorkers  # who packs alone needs none

    return PackWorkers(executor=executor, verify=verify_name(verify), workers=workers)


class _SourceArguments(NamedTuple):
    """What was said of the source beside its URL."""

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
    task: PackTask, src: Source, dst: Folder, fields: Iterable[str] | None, told: _SourceArguments
) -> PackSummary:
    if told != _SourceArguments():
        raise ConfigError(
            f"pack: got {', '.join(f'{name}=' for name in told._fields)} or one of them beside a "
            "dataset, which was told these itself. Leave them out."
        )
    names = None if fields is None else tuple(fields)
    if not isinstance(src, Dataset):
        root = _destination(dst, None)
    else:
        index = src.open(verify=task.verify, workers=task.workers)
        root = _destination(dst, index.origin)
        if index.is_self_contained and not src.is_renamed:
            packed = PackedSource(index, fields=names)
            return task.run(packed, root, lambda: _carried(src, names, is_pack=True))
    return _pack_rows(task, src, names, root)


def _pack_url(
    task: PackTask, src: Url, dst: Folder, fields: Iterable[str] | None, told: _SourceArguments
) -> PackSummary:
    check_format(told.format)
    luggage = None if task.crew is None else _files(src, told)  # before anything is read
    scratch = Scratch(told.cache)
    origin, renames = locate_fields(
        src,
        storage_options=told.storage_options,
        scratch=scratch,
        filesystem=told.filesystem,
        arrangement=arrangement_of(
            src,
            manifest=told.manifest,
            fields=fields,
            schema=told.schema,
            filesystem=told.filesystem,
            sampling=told.sampling,
            allow_empty=told.allow_empty,
            max_pixels=told.max_pixels,
        ),
        index=None,
        format=told.format,
    )
    with closing(scratch), closing(origin):
        root = _destination(dst, origin)
        names = None if fields is None else tuple(fields)
        opener = IndexOpener(origin=origin, scratch=scratch, index=None, verify=None, workers=1)
        index = opener.open_own(told.format)
        if index is not None and not renames:
            packed = PackedSource(index, fields=names)
            return task.run(packed, root, lambda: _carried_pack(src, told, names))
        if index is None:
            format = opener.foreign(told.format)
            told = told._replace(format=format.name)
            if not isinstance(format, ChunkFormat):
                found = CandidateSource(
                    origin, indexing_of(format), fields=names, renames=renames, workers=task.workers
                )
                return task.run(found, root, lambda: luggage)
    # Nothing of it is known before it is decoded, unit by unit, as a dataset does it.
    dataset = _dataset(src, told, fields=fields)
    with closing(dataset):
        return _pack_rows(task, dataset, names, root)


def _dataset(src: Url, told: _SourceArguments, *, fields: Iterable[str] | None) -> Dataset:
    return Dataset(
        src,
        format=told.format,
        fields=fields if isinstance(fields, Mapping) else None,
        manifest=told.manifest,
        schema=told.schema,
        storage_options=told.storage_options,
        filesystem=told.filesystem,
        cache=told.cache,
        allow_left_out=1,  # the pack tells
        allow_empty=told.allow_empty,
        max_pixels=told.max_pixels,
        **told.sampling.arguments(),
    )


def _files(src: Url, told: _SourceArguments) -> WorkerSource:
    """Data without an index of its own, for a crew."""
    from penstock.readers.index import DatasetAddress
    from penstock.readers.packing.executor_packing import WorkerSource

    reach = DatasetAddress.of(
        src, storage_options=told.storage_options, filesystem=told.filesystem, cache=told.cache
    )
    return WorkerSource.of_files(reach)


def _carried_pack(src: Url, told: _SourceArguments, names: tuple[str, ...] | None) -> WorkerSource:
    with closing(_dataset(src, told, fields=None)) as dataset:
        return _carried(dataset, names, is_pack=True)


def _carried(src: Source, names: tuple[str, ...] | None, *, is_pack: bool) -> WorkerSource:
    """What is open here, for a crew."""
    from penstock.readers.packing.executor_packing import WorkerSource

    return WorkerSource.of_source(src, is_pack=is_pack, fields=names)


def _pack_rows(
    task: PackTask, src: Source, names: tuple[str, ...] | None, root: bytes
) -> PackSummary:
    """Pack what a source reads. What is packed of remote chunks is kept, whatever fields batches
    of them would have."""
    if isinstance(src, Dataset):
        index = src.open(verify=task.verify, workers=task.workers)
        packed = names or tuple(src.schema)
        if index.remote is not None and index.manifest.is_of_chunks:
            with closing(copy_keeping(src, packed)) as kept:
                return _run_rows(task, kept, names, root)
    return _run_rows(task, src, names, root)


def _run_rows(
    task: PackTask, src: Source, names: tuple[str, ...] | None, root: bytes
) -> PackSummary:
    found = RowSource(src, fields=names, verify=task.verify, workers=task.workers)
    return task.run(found, root, lambda: _carried(src, names, is_pack=False))


def _destination(dst: Folder, origin: Origin | None) -> bytes:
    path = local_path(os.fspath(dst))
    if not path:
        raise ConfigError(
            f"dst: got {show(dst)}, wanted a local folder. Pack there, then copy the folder, "
            "`_penstock` included, with your store's own tool."
        )
    root = os.path.abspath(path)
    # Tar files that were picked may have the pack beside them; a folder is the dataset as a whole.
    lies_in = origin.root if isinstance(origin, LocalFolder) else getattr(origin, "mount", None)
    if origin is not None and lies_in is not None and origin.selection is None:
        source, target = os.path.realpath(lies_in), os.path.realpath(root)
        if os.path.commonpath((source, target)) in (source, target):
            raise ConfigError(
                f"dst: {printable(root)} and the source {printable(lies_in)} lie one inside "
                "the other. Give a folder outside the source."
            )
    return root
