"""Build or open the index of a dataset on its own, as `penstock.index` and the commands do."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from penstock.readers.formats import AUTO, DEFAULT_SAMPLING, check_sampling
from penstock.readers.index.dataset_description import DatasetDescription
from penstock.readers.index.opening import IndexOpener
from penstock.readers.origin import Scratch

if TYPE_CHECKING:
    from collections.abc import Mapping
    from concurrent.futures import Executor

    from penstock.cache.disk import DiskCache
    from penstock.readers.fieldtypes import FieldType
    from penstock.readers.formats import DocumentMode, ManifestFile, Sampling, WindowArgument
    from penstock.readers.index.dataset_description import Folder
    from penstock.readers.index.index import Index
    from penstock.readers.origin import Url
    from penstock.readers.types import Progress, Verify


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexSummary:
    """The counts of a finished index.

    bytes: of all samples. quarantined: samples that are left out and listed in quarantine.jsonl.
    seconds: wall time. place: the index's folder. left_out: the number of left-out samples by
    reason.
    """

    samples: int
    shards: int
    bytes: int
    quarantined: int
    seconds: float
    place: str
    left_out: Mapping[str, int]


def open_index(
    url: Url,
    *,
    verify: Verify | str | None = None,
    workers: int | None = None,
    executor: Executor | None = None,
    sampling: Sampling = DEFAULT_SAMPLING,
    **description: Any,
) -> Index:
    """Open the index of a dataset. The index of data that doesn't carry one is built on first use,
    and updated if the data has changed.

    verify: decodes images while the index is built; None means the installed decoder. workers:
    threads for building; None means all cores. executor: its workers check the samples, one shard
    per task (docs/packs.md lists what they must see); verify must then be importable, or a name.
    sampling: its sample, stride, dtype, documents and vocabulary, checked by `check_sampling`.
    description: the other arguments of `Dataset` that identify one; see `DatasetDescription`.

    Raises DatasetNotFoundError, ConfigError, CorruptShardError for a damaged manifest of a pack,
    DatasetError for a newer version, IndexChangedError if index= holds the index of another
    dataset, FetchError, MissingDependencyError, WriteError.
    """
    data = DatasetDescription(url=url, sampling=sampling, **description)
    scratch = Scratch(data.cache)
    return IndexOpener.of(data, scratch, verify=verify, workers=workers, executor=executor).open()


def index(
    url: Url,
    *,
    out: Folder | None = None,
    format: str = AUTO,
    sample: WindowArgument | None = None,
    stride: WindowArgument | None = None,
    dtype: str | None = None,
    documents: DocumentMode | None = None,
    vocabulary: int | None = None,
    manifest: ManifestFile | None = None,
    fields: Mapping[str, str] | None = None,
    schema: Mapping[str, FieldType] | None = None,
    allow_empty: bool = False,
    max_pixels: int | None = None,
    workers: int | None = None,
    cache: DiskCache | Folder | None = None,
    storage_options: Mapping[str, Any] | None = None,
    filesystem: Any | None = None,
    verify: Verify | str | None = None,
    progress: Progress | None = None,
    executor: Executor | None = None,
) -> IndexSummary:
    """Build the index of a dataset, write it, and return a summary, as the command `penstock index`
    does.

    All data is read and checked, even if an index exists: the samples of image folders and tar
    files are decoded once, and of formats with chunks (Zarr, Parquet, …) the metadata is read. A
    Dataset builds the same index at its first use; this function does so before the job starts.

    out: the folder for the index; for remote data also a URL of the same store. None means next to
    local data, else the cache folder, else the user's cache directory. format, sample, stride,
    dtype, documents, vocabulary, manifest, schema, allow_empty, max_pixels, cache, storage_options,
    filesystem: as for Dataset. fields: the place of each field. workers: threads; None means all
    usable cores. verify: decodes images; None means the installed decoder. progress: called as
    progress(done samples, total samples, done bytes). executor: its workers check the samples, one
    shard per task (docs/packs.md lists what they must see); verify must then be importable, or a
    name.

    Raises ConfigError for invalid arguments and for a pack, which carries its index;
    DatasetNotFoundError and DatasetError for data that can't be read; FetchError;
    MissingDependencyError; WriteError if the index can't be written.
    """
    began = time.monotonic()
    data = DatasetDescription(
        url=url,
        format=format,
        index=out,
        cache=cache,
        storage_options=storage_options,
        filesystem=filesystem,
        manifest=manifest,
        fields=fields,
        schema=schema,
        sampling=check_sampling(sample, stride, dtype, documents, vocabulary),
        allow_empty=allow_empty,
        max_pixels=max_pixels,
    )
    scratch = Scratch(cache)
    opener = IndexOpener.of(
        data, scratch, verify=verify, workers=workers, progress=progress, executor=executor
    )
    try:
        built = opener.rebuild()
        return IndexSummary(
            samples=built.samples,
            shards=len(built.sizes),
            bytes=int(built.shard_bytes.sum()),
            quarantined=built.about.quarantined,
            seconds=time.monotonic() - began,
            place=built.place,
            left_out={reason: each.samples for reason, each in built.left_out.items()},
        )
    finally:
        opener.origin.close()
        scratch.close()


build_index = index
"""The name of `index` in `penstock.readers`, where `index` is a package."""
