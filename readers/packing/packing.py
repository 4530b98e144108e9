"""Writing a pack: shards of a seeded full shuffle, every sample checked once, resumable at any
moment.

Each shard is written, renamed into place and then recorded; the manifest comes last, and until then
nothing can be read. What is in each shard follows from the source's names and sizes alone, so
killed runs and any number of ranks make byte-identical packs. (Packed shard by shard, a shard of
which no sample is good leaves a gap in the numbers; the manifest names the shards that are.)
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import closing
from typing import TYPE_CHECKING, Any, NamedTuple

from penstock.cache.base.limits import usable_cores
from penstock.cache.base.sizes import parse_size
from penstock.cache.errors import ConfigError
from penstock.readers.dataset import Dataset, copy_keeping
from penstock.readers.fields.verify import named_verify, verify_name
from penstock.readers.files.names import printable
from penstock.readers.formats.arranging import arrangement_of
from penstock.readers.formats.chunked import ChunkFormat
from penstock.readers.formats.registry import AUTO, check_format, indexing_of
from penstock.readers.formats.sampling import AS_THEY_COME, Sampling
from penstock.readers.index.opening import Opener, locate_fields
from penstock.readers.origin.local import LocalFolder
from penstock.readers.origin.scratch import Scratch
from penstock.readers.origin.urls import local_path, show
from penstock.readers.packing.packed_source import PackedSource
from penstock.readers.packing.row_source import RowSource
from penstock.readers.packing.source import CandidateSource
from penstock.readers.packing.task import PackTask
from penstock.readers.packing.transcode import Transcode
from penstock.readers.source import Source

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from concurrent.futures import Executor

    from penstock.cache.disk.disk_cache import DiskCache
    from penstock.readers.fields.field_types import FieldType
    from penstock.readers.formats.arranging import ManifestFile
    from penstock.readers.index.opening import Folder
    from penstock.readers.origin.origin import Origin
    from penstock.readers.origin.urls import Url
    from penstock.readers.packing.crew import Crew, PackLuggage
    from penstock.readers.packing.summary import PackSummary
    from penstock.readers.packing.task import ShardRule
    from penstock.readers.types import Progress, Verify


def pack(
    src: Url | Source,
    dst: Folder,
    *,
    format: str = AUTO,
    fields: Sequence[str] | Mapping[str, str | None] | None = None,
    manifest: ManifestFile | None = None,
    schema: Mapping[str, FieldType] | None = None,
    sampling: Sampling = AS_THEY_COME,
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
    told = _Told(
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
    told: _Told,
) -> PackSummary:
    if isinstance(src, Source):
        return _pack_source(task, src, dst, fields, told)
    return _pack_url(task, src, dst, fields, told)


def _crew(executor: Executor | None, verify: Verify | str | None, *, workers: int) -> Crew | None:
    if executor is None:
        return None
    from penstock.readers.packing.crew import Crew  # who packs alone needs none

    return Crew(executor=executor, verify=verify_name(verify), workers=workers)


class _Told(NamedTuple):
    """What was said of the source beside its URL."""

    format: str = AUTO
    manifest: ManifestFile | None = None
    schema: Mapping[str, FieldType] | None = None
    sampling: Sampling = AS_THEY_COME
    storage_options: Mapping[str, Any] | None = None
    filesystem: Any | None = None
    cache: DiskCache | Folder | None = None
    allow_empty: bool = False
    max_pixels: int | None = None


def _pack_source(
    task: PackTask, src: Source, dst: Folder, fields: Iterable[str] | None, told: _Told
) -> PackSummary:
    if told != _Told():
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
    task: PackTask, src: Url, dst: Folder, fields: Iterable[str] | None, told: _Told
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
        opener = Opener(origin=origin, scratch=scratch, index=None, verify=None, workers=1)
        index = opener.open_own(told.format)
        if index is not None and not renames:
            packed = PackedSource(index, fields=names)
            return task.run(packed, root, lambda: _carried_pack(src, told, names))
        if index is None:
            format = opener.foreign(told.format)
            told = told._replace(format=format.name)
            if not isinstance(format, ChunkFormat):
                found = CandidateSource(
                    origin,
                    indexing_of(format),
                    fields=names,
                    renames=renames,
                    workers=task.workers,
                )
                return task.run(found, root, lambda: luggage)
    # Nothing of it is known before it is decoded, unit by unit, as a dataset does it.
    dataset = _dataset(src, told, fields=fields)
    with closing(dataset):
        return _pack_rows(task, dataset, names, root)


def _dataset(src: Url, told: _Told, *, fields: Iterable[str] | None) -> Dataset:
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


def _files(src: Url, told: _Told) -> PackLuggage:
    """Data without an index of its own, for a crew."""
    from penstock.readers.index.reach import Reach
    from penstock.readers.packing.crew import PackLuggage

    reach = Reach.of(
        src,
        storage_options=told.storage_options,
        filesystem=told.filesystem,
        cache=told.cache,
    )
    return PackLuggage.of_files(reach)


def _carried_pack(src: Url, told: _Told, names: tuple[str, ...] | None) -> PackLuggage:
    with closing(_dataset(src, told, fields=None)) as dataset:
        return _carried(dataset, names, is_pack=True)


def _carried(src: Source, names: tuple[str, ...] | None, *, is_pack: bool) -> PackLuggage:
    """What is open here, for a crew."""
    from penstock.readers.packing.crew import PackLuggage

    return PackLuggage.of_source(src, is_pack=is_pack, fields=names)


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
