"""Build or open the index of a dataset on its own, as `penstock.index` and the commands do."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from penstock.cache.base import usable_cores
from penstock.readers.fields import named_verify
from penstock.readers.formats import (
    AUTO,
    DEFAULT_SAMPLING,
    Sampling,
    arrangement_of,
    check_sampling,
)
from penstock.readers.index.opening import IndexOpener, locate_fields
from penstock.readers.origin import Scratch

if TYPE_CHECKING:
    from collections.abc import Mapping
    from concurrent.futures import Executor

    from penstock.cache.disk import DiskCache
    from penstock.readers.fields import FieldType
    from penstock.readers.formats import DocumentMode, ManifestFile, WindowArgument
    from penstock.readers.index.building import Checker
    from penstock.readers.index.index import Index
    from penstock.readers.index.index_folders import Folder
    from penstock.readers.origin import Url
    from penstock.readers.types import Progress, Verify


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexSummary:
    """The counts of a finished index.

    bytes: of all samples; quarantined: samples that are left out and named in quarantine.jsonl;
    seconds: wall time; place: the index's folder; left_out: samples by the reason why they aren't
    in it.
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
    index: Folder | None = None,
    cache: DiskCache | Folder | None = None,
    storage_options: Mapping[str, Any] | None = None,
    filesystem: Any | None = None,
    verify: Verify | str | None = None,
    format: str = AUTO,
    workers: int | None = None,
    manifest: ManifestFile | None = None,
    fields: Mapping[str, str] | None = None,
    schema: Mapping[str, FieldType] | None = None,
    sampling: Sampling = DEFAULT_SAMPLING,
    allow_empty: bool = False,
    max_pixels: int | None = None,
    executor: Executor | None = None,
) -> Index:
    """Open the index of a dataset; that of foreign data is built on first use, or brought up to
    date.

    index: folder that holds or gets it; of remote data also a URL of the same store, that holds it.
    cache: what remote data is read through, and for an index that has no better place; it,
    storage_options and filesystem: as for Dataset. verify: decodes images while building; None
    finds the installed one. workers: threads for building, None is all cores. manifest, fields
    (where each lies), schema, allow_empty, max_pixels: as for Dataset; sampling: what its sample,
    stride, dtype, documents and vocabulary say, by `check_sampling`. executor: whose workers check
    the samples of a shard each (docs/packs.md says what they must see); verify is importable then,
    or a name.

    Raises DatasetNotFoundError, ConfigError, CorruptShardError (a torn pack manifest), DatasetError
    (a newer version), IndexChangedError (index= of another dataset), FetchError,
    MissingDependencyError, WriteError.
    """
    checker = _checker(executor, url, storage_options, filesystem, cache, verify=verify)
    scratch = Scratch(cache)
    origin, _ = locate_fields(
        url,
        storage_options=storage_options,
        scratch=scratch,
        filesystem=filesystem,
        arrangement=arrangement_of(
            url,
            manifest=manifest,
            fields=fields,
            schema=schema,
            filesystem=filesystem,
            sampling=sampling,
            allow_empty=allow_empty,
            max_pixels=max_pixels,
        ),
        index=index,
        format=format,
    )
    opener = IndexOpener(
        origin=origin,
        scratch=scratch,
        index=index,
        verify=named_verify(verify) if isinstance(verify, str) else verify,
        workers=workers or usable_cores(),
        checker=checker,
    )
    return opener.open(format)


def _checker(
    executor: Executor | None,
    url: Url,
    options: Mapping[str, Any] | None,
    filesystem: Any | None,
    cache: DiskCache | Folder | None,
    *,
    verify: Verify | str | None,
) -> Checker | None:
    """An executor's workers, who check samples; None without one. Raises ConfigError."""
    if executor is None:
        return None
    from penstock.readers.index.executor_indexing import ExecutorChecker

    return ExecutorChecker.of(
        executor, url, options=options, filesystem=filesystem, cache=cache, verify=verify
    )


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
    """Build the index of a dataset where it lies, write it, and return a summary, as the command
    `penstock index` does.

    Everything is read and checked, whatever an earlier index says: the samples of image folders and
    tar files are decoded once, of formats with chunks (Zarr, Parquet, …) the metadata is read. A
    Dataset builds the same index at its first use; this function does so before the job starts.

    out: folder for the index, of remote data also a URL of the same store; None is beside local
    data, else the cache folder, else the user's cache directory. format, sample, stride, dtype,
    documents, vocabulary, manifest, schema, allow_empty, max_pixels, cache, storage_options,
    filesystem: as for Dataset. fields: where each field lies. workers: threads, None is all usable
    cores. verify: decodes images; None finds the installed decoder. progress: called as
    progress(done samples, total samples, done bytes). executor: whose workers check the samples of
    a shard each (docs/packs.md says what they must see); verify is importable then, or a name.

    Raises ConfigError for arguments that don't fit and for a pack, which carries its index;
    DatasetNotFoundError, DatasetError for data that can't be read; FetchError,
    MissingDependencyError; WriteError where the index can't be written.
    """
    checker = _checker(executor, url, storage_options, filesystem, cache, verify=verify)
    began, scratch = time.monotonic(), Scratch(cache)
    origin, _ = locate_fields(
        url,
        storage_options=storage_options,
        scratch=scratch,
        filesystem=filesystem,
        arrangement=arrangement_of(
            url,
            manifest=manifest,
            fields=fields,
            schema=schema,
            filesystem=filesystem,
            sampling=check_sampling(
                sample=sample,
                stride=stride,
                dtype=dtype,
                documents=documents,
                vocabulary=vocabulary,
            ),
            allow_empty=allow_empty,
            max_pixels=max_pixels,
        ),
        index=out,
        format=format,
    )
    opener = IndexOpener(
        origin=origin,
        scratch=scratch,
        index=out,
        verify=named_verify(verify) if isinstance(verify, str) else verify,
        workers=workers or usable_cores(),
        progress=progress,
        checker=checker,
    )
    try:
        built = opener.rebuild(format)
        return IndexSummary(
            samples=built.samples,
            shards=len(built.sizes),
            bytes=int(built.shard_bytes.sum()),
            quarantined=built.quarantined,
            seconds=time.monotonic() - began,
            place=built.place,
            left_out={reason: each.samples for reason, each in built.left_out().items()},
        )
    finally:
        origin.close()
        scratch.close()


build_index = index
"""The name of `index` in `penstock.readers`, where `index` is a package."""
