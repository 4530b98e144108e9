"""Open a dataset's index, or build it on first use.

The format is `format=`, or else what the index or the dataset's root shows. A pack has its manifest
in its own folder. The index of other data is looked for in `index=`, or else next to the data
(`photos.penstock`), in the cache folder and in the user's cache directory. A new index is built in
the first of these places that is writable. If the data has changed, the index is updated. A remote
dataset isn't listed again on opening (stores list a page at a time) if its index is next to it, in
the cache folder or in `index=`; `penstock index` updates that index. Nothing is written to a remote
store except by `penstock index --out`.
"""

from __future__ import annotations

import time
import warnings
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.cache import (
    ConfigError,
    CorruptShardError,
    DatasetNotFoundError,
    FetchError,
    PenstockWarning,
)
from penstock.cache.base import usable_cores
from penstock.readers.files import OWN_FOLDER, printable
from penstock.readers.formats import (
    AUTO,
    FALLBACK,
    format_named,
    format_of_manifest,
    recognised_format,
    shows_own_index,
)
from penstock.readers.index.dataset_description import BuildOptions, DatasetDescription, Folder
from penstock.readers.index.index import Index
from penstock.readers.index.manifest import MANIFEST, DatasetSummary, Manifest, read_manifest_of
from penstock.readers.origin import DEFAULT_ARRANGEMENT, Origin, Scratch, Url

if TYPE_CHECKING:
    from collections.abc import Mapping
    from concurrent.futures import Executor

    from penstock.cache.disk import DiskCache
    from penstock.readers.fieldtypes import FieldTypes
    from penstock.readers.formats import DocumentMode, Format, ManifestFile, WindowArgument
    from penstock.readers.index.building import IndexBuilder
    from penstock.readers.index.index_folders import IndexPlaces
    from penstock.readers.types import Progress, Verify

OWN_MANIFEST = OWN_FOLDER + b"/" + MANIFEST
"""The name of a pack's manifest, relative to its root."""

REPACK = "Run `penstock pack SRC DST` again into an empty folder, or fetch the pack again."

_MANY_SAMPLES = 2**18


@dataclass(frozen=True, kw_only=True)
class IndexOpener:
    """Open or build the index of one dataset: its own, or one in the folders that may hold it.

    format, index: as for `Dataset`. options: for building. renames: new names of fields, each
    mapped to its name in the index.
    """

    origin: Origin
    scratch: Scratch
    format: str = AUTO
    index: Folder | None = None
    options: BuildOptions
    renames: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        data: DatasetDescription,
        scratch: Scratch,
        *,
        verify: Verify | str | None = None,
        workers: int | None = None,
        progress: Progress | None = None,
        executor: Executor | None = None,
    ) -> IndexOpener:
        """Open the files of a dataset. workers: None means all cores. verify: a function or a name,
        which workers of an executor must be able to import.

        A place in `fields=` is a folder, a pattern or a column that holds a field. If the data has
        no such place but fields of their own names, the place is such a name: these fields are
        renamed, and the index is that of the data without `fields=`. Raises the same errors as
        `locate` and `open_index`.
        """
        checker = None
        if executor is not None:
            from penstock.cache import check_executor
            from penstock.readers.fieldtypes import verify_name
            from penstock.readers.index.candidate_checks import check_by_executor

            check_executor(executor)
            sent, named = data.for_workers(), verify_name(verify)
            checker = partial(check_by_executor, executor, sent, verify=named)
        arrangement = data.arrangement()
        options = BuildOptions(verify, workers or usable_cores(), progress, checker)
        origin = data.locate(scratch, arrangement)
        # First, as errors about arguments and formats would mislead.
        if origin.is_local and origin.selection is None and origin.root_kind() is None:
            from penstock.readers.origin import not_found_message

            raise DatasetNotFoundError(not_found_message(origin.url))
        opener = cls(
            origin=origin, scratch=scratch, format=data.format, index=data.index, options=options
        )
        if not (names := dict(arrangement.places)):
            return opener
        try:
            own = opener.open_own()
            if own is None and not opener.recognise().has_default_names(opener.origin):
                return opener
        except BaseException:
            opener.origin.close()
            raise
        opener.origin.close()
        origin = data.locate(scratch, arrangement.renamed(names))
        return replace(opener, origin=origin, renames=names)

    # -- recognition

    @cached_property
    def places(self) -> IndexPlaces:
        """The folders that may hold the index, which packs don't have."""
        from penstock.readers.index.index_folders import IndexPlaces

        return IndexPlaces(origin=self.origin, scratch=self.scratch, index=self.index)

    @cached_property
    def own(self) -> Manifest | None:
        """The manifest in the dataset's own folder, as packs have. Raises FetchError,
        CorruptShardError if it is damaged, DatasetError if a newer version wrote it."""
        origin = self.origin
        if origin.selection is not None:
            return None
        try:
            found = origin.entry(OWN_MANIFEST)
        except FetchError as error:
            if self.places.local_manifest is None:
                raise
            warnings.warn(
                f"{origin.url}: the remote can't be reached, so the cached index is used without a "
                f"check. {error}",
                PenstockWarning,
                stacklevel=6,
            )
            return None
        if found is None:
            return None
        try:
            manifest = read_manifest_of(origin, found, remedy=REPACK)
        except CorruptShardError:
            if shows_own_index(origin):
                raise
            return None
        return manifest if manifest.format.has_own_index else None

    def open_own(self) -> Index | None:
        """Return the index that the dataset carries, as a pack does, or None. Raises
        DatasetNotFoundError for an incomplete pack, and the same errors as `open_index`."""
        if self.format != AUTO and not format_named(self.format).has_own_index:
            return None
        origin, own = self.origin, self.own
        if own is None:
            if self.format == AUTO and (self.places.manifest or not shows_own_index(origin)):
                return None
            raise DatasetNotFoundError(
                f"{origin.url}: this pack isn't complete: its manifest ({OWN_MANIFEST.decode()}), "
                "which is written last, is missing. Run the same `penstock pack` again to resume "
                "it, or copy the pack again with its `_penstock` folder."
            )
        self._check_large(own)
        if self.index is not None:
            raise ConfigError(f"{origin.url} is a pack and has its own index. Leave index= out.")
        # Places of fields in a pack are names; see `of`.
        if replace(origin.arrangement, max_pixels=None, places=()) != DEFAULT_ARRANGEMENT:
            raise ConfigError(
                f"{origin.url} is a pack, which contains its schema: manifest=, schema=, "
                "allow_empty= and split= are for other data. Pass them when you pack that data."
            )
        return Index(own, origin=origin, scratch=self.scratch)

    def _check_large(self, own: Manifest) -> None:
        """Check that the files of very large shards exist, before anything is sized by the
        manifest."""
        if not self.origin.is_local:
            return
        for shard in np.flatnonzero(own.samples > _MANY_SAMPLES).tolist():
            name, size_bytes = own.names[shard], int(own.shard_bytes[shard])
            found = self.origin.entry(name)
            if found is None or found.size_bytes != size_bytes:
                raise CorruptShardError(
                    f"{self.origin.url}: {printable(name)} is missing or doesn't have the size in "
                    f"the manifest ({size_bytes:,} bytes). {REPACK}"
                )

    def recognise(self) -> Format:
        """Return the format of a dataset that doesn't carry its index. Raises ConfigError if the
        format is ambiguous or unknown, and FetchError."""
        found = self._recognise()
        if self.origin.arrangement.sampling:
            from penstock.readers.formats import Sampling  # most datasets don't use it

            Sampling.of(self.origin.arrangement).check_used(found, url=self.origin.url)
        if self.origin.arrangement.split is not None and not found.has_splits:
            raise ConfigError(
                f"split: got {self.origin.arrangement.split!r}, but {self.origin.url} has the "
                f"format {found.name!r}, whose files name no parts. Give the part's own folder as "
                "the URL, or use dataset.split(…) for random parts."
            )
        return found

    def _recognise(self) -> Format:
        origin, format = self.origin, self.format
        if (manifest := origin.arrangement.manifest) is not None:
            found = format_of_manifest(manifest)
            if format in (AUTO, found.name) and origin.selection is None:
                return found
            raise ConfigError(
                f"manifest: a table lists the files of a folder, but {origin.url} names files, or "
                f'is given with format="{format}". Leave one out, or pass format="{found.name}".'
            )
        # Formats of folders can't be chosen for files.
        if format != AUTO and (
            origin.selection is None
            or not (format == FALLBACK or format_named(format).has_own_index)
        ):
            return format_named(format)
        if origin.selection is None and not origin.is_local:
            known = self.places.manifest
            if known is not None:
                return known.format
        found = recognised_format(origin)
        if format not in (AUTO, found.name):
            raise ConfigError(
                f"format: got {format!r} for {origin.url}, which names {found.name} files. "
                "Leave format out."
            )
        return found

    # -- opening

    def open(self, *, warns: bool = True) -> Index:
        """Open the index, or build it; see `open_index`. warns: False if the data is read once, so
        that no copy needs to be kept."""
        if warns and not self.origin.is_local and not self.scratch.is_kept:
            warnings.warn(
                f"{self.origin.url} is remote and cache= isn't given: downloads are stored in a "
                "temporary folder and aren't kept for the next run. Pass cache=, a folder on a "
                "local disk.",
                PenstockWarning,
                stacklevel=3,
            )
        if (own := self.open_own()) is not None:
            return own
        found = self.recognise()
        remote, place = self.places.remote_manifest, self.places.remote()
        if remote is not None and place is not None and remote.about.kind == found.name:
            from penstock.readers.index.index_folders import check_arrangement

            check_arrangement(remote, self.origin, shown=place.url)
            beside = self.origin.index_place(None)
            if beside is None or beside.url != place.url:  # else its name identifies the data
                self._builder(found).check_source(remote, shown=place.url)
            return self._index(remote, place)
        return self._index(*self._builder(found).open())

    def unindexed_bytes(self) -> int:
        """Return the bytes of remote data that building the index would read; 0 if there is an
        index, or if only metadata is read. Lists the data. Raises the errors of `open`."""
        origin = self.origin
        if origin.is_local or self.own is not None or self.places.manifest is not None:
            return 0
        found = self.recognise()
        if found.has_own_index or not found.reads_samples:
            return 0
        if origin.selection is not None:
            return sum(entry.size_bytes for entry in origin.entries(lambda _: True))
        listed = (entry for _, entry in origin.list_below(""))
        return sum(entry.size_bytes for entry in listed if entry is not None)

    def rebuild(self) -> Index:
        """Build the index even if a valid one exists; see `index`."""
        is_pack = self.format != AUTO and format_named(self.format).has_own_index
        if is_pack or self.own is not None or shows_own_index(self.origin):
            raise ConfigError(
                f"{self.origin.url} is a pack, or format= says so: a pack has its own index, so "
                "there is nothing to build."
            )
        to = None  # nothing is written to a store unasked; next to mounted data the place is a path
        if self.index is not None or self.origin.folder is not None:
            to = self.places.remote()
        # An existing index in `index=` is replaced, even if it is of another format.
        found = replace(self, index=None).recognise()
        opener = self if to is None else replace(self, index=None)
        built, place = opener._builder(found).build(reuse=False)
        if to is None:
            return self._index(built, place)
        from penstock.readers.index.index_folders import upload_index

        upload_index(built, place, to)
        return self._index(built, to)

    def _builder(self, format: Format) -> IndexBuilder:
        from penstock.readers.index.building import IndexBuilder

        return IndexBuilder(self.places, format, self.options)

    def _index(self, manifest: Manifest, place: bytes | Origin) -> Index:
        from penstock.readers.index.index_folders import Sidecars, is_cached

        is_repaired = isinstance(place, bytes) and is_cached(place)
        rebuild = self._builder(manifest.format).rebuild if is_repaired else None
        sidecars = Sidecars(manifest, place, url=self.origin.url, rebuild=rebuild)
        if self.origin.remote is not None:
            self.origin.remote.fetcher.reindex = self.places.command(place)
        return Index(manifest, origin=self.origin, scratch=self.scratch, sidecars=sidecars)


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexSummary(DatasetSummary):
    """The counts of a finished index.

    bytes: of all samples. quarantined: samples that are left out and listed in quarantine.jsonl.
    seconds: wall time. place: the index's folder. left_out: the number of left-out samples by
    reason.
    """

    place: str


def open_index(
    url: Url,
    *,
    verify: Verify | str | None = None,
    workers: int | None = None,
    executor: Executor | None = None,
    **description: Any,
) -> Index:
    """Open the index of a dataset. The index of data that doesn't carry one is built on first use,
    and updated if the data has changed.

    verify: decodes images while the index is built; None means the installed decoder. workers:
    threads for building; None means all cores. executor: its workers check the samples, one shard
    per task (docs/howto/packs.md lists what they must see); verify must then be importable, or a
    name. description: the other arguments that identify a dataset; see `DatasetDescription`.

    Raises DatasetNotFoundError, ConfigError, CorruptShardError for a damaged manifest of a pack,
    DatasetError for a newer version, IndexChangedError if index= holds the index of another
    dataset, FetchError, MissingDependencyError, WriteError.
    """
    data = DatasetDescription(url=url, **description)
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
    schema: FieldTypes | None = None,
    allow_empty: bool = False,
    max_pixels: int | None = None,
    split: str | None = None,
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

    ```python
    from penstock import index

    index("photos/train")  # every image is decoded once; those that fail are listed
    ```

    All data is read and checked, even if an index exists: the samples of image folders and tar
    files are decoded once, and of formats with chunks (Zarr, Parquet, …) only the metadata is read.
    A Dataset builds the same index at its first use; this function does so before the job starts.

    out: the folder for the index; for remote data also a URL of the same store. None means next to
    local data, else the cache folder, else the user's cache directory. format, sample, stride,
    dtype, documents, vocabulary, manifest, schema, allow_empty, max_pixels, split, cache,
    storage_options, filesystem: as for Dataset. fields: the place of each field. workers: threads;
    None means all usable cores. verify: decodes images; None means the installed decoder. progress:
    called as progress(done samples, total samples, done bytes). executor: its workers check the
    samples, one shard per task (docs/howto/packs.md lists what they must see); verify must then be
    importable, or a name.

    Raises ConfigError for invalid arguments and for a pack, which carries its index;
    DatasetNotFoundError and DatasetError for data that can't be read; FetchError;
    MissingDependencyError; WriteError if the index can't be written.
    """
    from penstock.readers.formats import check_sampling

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
        split=split,
    )
    with closing(Scratch(cache)) as scratch:
        opener = IndexOpener.of(
            data, scratch, verify=verify, workers=workers, progress=progress, executor=executor
        )
        with closing(opener.origin):
            built = opener.rebuild()
            seconds = time.monotonic() - began
            return IndexSummary.of(built.manifest, seconds=seconds, place=built.place)


build_index = index
"""The name of `index` in `penstock.readers`, where `index` is a package."""
