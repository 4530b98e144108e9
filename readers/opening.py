"""Opening a dataset's index, or building it on first use.

A pack has its manifest beside its shards. A folder's index is looked for in `index=`, else in
`<dataset>/_penstock`, else in the cache folder, and built in the first of these that can be
written. A local folder's index notes the time of each folder that was listed: where one differs,
files came or went, and the index is brought up to date; facts of unchanged files are kept. A file
that changed in place is found when it is read, by size and CRC-32C. A remote folder isn't listed
again on opening (stores list a page at a time), and nothing is written to it unasked: `penstock
index` does both.
"""

from __future__ import annotations

import logging
import os
import time
import warnings
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, get_args

from cache.errors import (
    ConfigError,
    CorruptShardError,
    DatasetError,
    DatasetNotFoundError,
    FetchError,
    IndexChangedError,
    PenstockWarning,
)
from readers.atomic import locked, make_folder
from readers.build import build_folder_index, known_files, refresh_directories
from readers.folder import changed_directories, list_folder
from readers.index import opened
from readers.manifest import MANIFEST, Manifest, read_manifest
from readers.names import OWN_FOLDER, printable
from readers.origin import LocalFolder, locate
from readers.places import Folder as Folder
from readers.places import Places, read_own
from readers.scratch import Scratch
from readers.tar_listing import holds_tars
from readers.tar_opening import TarOpener
from readers.verify import default_workers, find_verify

if TYPE_CHECKING:
    from collections.abc import Mapping

    from cache.disk_cache import DiskCache
    from readers.build import Known
    from readers.folder import Listing
    from readers.index import Index
    from readers.origin import Origin, Url
    from readers.types import Progress, Verify

_log = logging.getLogger("penstock")

Format = Literal["auto", "folder", "tar", "arrow"]

MANIFEST_NAME = OWN_FOLDER + b"/" + MANIFEST
PACK_NAME = OWN_FOLDER + b"/pack.json"
_FIRST_SHARD = b"shard-000000.arrow"
_REPACK = "Run the same `penstock pack` again into an empty folder, or fetch the pack again."


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexSummary:
    """What build_index did. bytes: of all samples; seconds: wall time; place: the
    index's folder."""

    samples: int
    shards: int
    bytes: int
    quarantined: int
    seconds: float
    place: str


def open_index(
    url: Url,
    *,
    index: Folder | None = None,
    cache: DiskCache | Folder | None = None,
    storage_options: Mapping[str, Any] | None = None,
    filesystem: Any | None = None,
    verify: Verify | None = None,
    format: Format = "auto",
    workers: int | None = None,
) -> Index:
    """The index of a dataset; a folder's is built on first use, or brought up to date.

    index: folder that holds or gets it. cache: what remote data is read through, and for an index
    that has no better place; it, storage_options and filesystem: as for Dataset. verify: decodes
    images while building; None finds the installed one. workers: threads for building, None is all
    cores.

    Raises DatasetNotFoundError, ConfigError, CorruptShardError (a torn pack manifest), DatasetError
    (a newer version), IndexChangedError (index= of another dataset), FetchError,
    MissingDependencyError, WriteError.
    """
    scratch = Scratch(cache)
    opener = Opener(
        origin=locate(url, storage_options=storage_options, scratch=scratch, filesystem=filesystem),
        scratch=scratch,
        index=index,
        verify=verify,
        workers=workers or default_workers(),
    )
    return opener.open(format)


def build_index(
    url: Url,
    *,
    out: Folder | None = None,
    cache: DiskCache | Folder | None = None,
    storage_options: Mapping[str, Any] | None = None,
    filesystem: Any | None = None,
    verify: Verify | None = None,
    workers: int | None = None,
    progress: Progress | None = None,
) -> IndexSummary:
    """Index an image folder or tar files anew: everything is read and decoded, whatever an earlier
    index says.

    out: folder for the index; None is `<dataset>/_penstock`, of a remote dataset too. progress:
    called as progress(done samples, total samples, done bytes). The rest, and what is raised, as
    for open_index. A pack has its index already: ConfigError.
    """
    began = time.monotonic()
    scratch = Scratch(cache)
    origin = locate(url, storage_options=storage_options, scratch=scratch, filesystem=filesystem)
    opener = Opener(
        origin=origin,
        scratch=scratch,
        index=out,
        verify=verify,
        workers=workers or default_workers(),
        progress=progress,
    )
    try:
        built = opener.rebuild()
        return IndexSummary(
            samples=built.samples,
            shards=len(built.sizes),
            bytes=int(built.shard_bytes.sum()),
            quarantined=built.quarantined,
            seconds=time.monotonic() - began,
            place=built.place,
        )
    finally:
        origin.close()
        scratch.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class Opener:
    """The steps: pack or folder, which place, still true or not, build."""

    origin: Origin
    scratch: Scratch
    index: Folder | None
    verify: Verify | None
    workers: int
    progress: Progress | None = None
    seen: dict[str, Manifest | None] = field(default_factory=dict)

    @property
    def places(self) -> Places:
        return Places(origin=self.origin, scratch=self.scratch, index=self.index)

    def open(self, format: Format) -> Index:
        """See open_index."""
        if format not in get_args(Format):
            raise ConfigError(f"format: got {format!r}, wanted one of {list(get_args(Format))}.")
        self._warn_of_lost_copies()
        packed = self.open_pack(format) if format in ("auto", "arrow") else None
        if packed is not None:
            return packed
        if self.is_tar(format):
            return self._open_tar()
        if isinstance(self.origin, LocalFolder):
            return self._open_local(self.origin)
        return self._open_remote()

    def is_tar(self, format: Format) -> bool:
        """Whether to read a dataset that isn't a pack as tar files. Raises ConfigError where that
        can't be told, FetchError."""
        if self.origin.selection is not None:
            if format not in ("auto", "tar"):
                raise ConfigError(
                    f"format: got {format!r} for {self.origin.url}, which names tar files. Leave "
                    "format out."
                )
            return True
        if format != "auto":
            return format == "tar"
        if not self.origin.is_local:
            known = self._beside() if self.index is None else None
            known = known or self._kept()
            if known is not None:
                return known.about.kind == "tar"
        return holds_tars(self.origin)

    def _open_tar(self) -> Index:
        if not self.origin.is_local and self.index is None:
            beside = self._beside()
            if beside is not None and beside.about.kind == "tar":
                return self._opened(beside, None)
        return self._opened(*self._tar().open())

    def _tar(self) -> TarOpener:
        return TarOpener(
            places=self.places,
            origin=self.origin,
            verify=self.verify,
            workers=self.workers,
            progress=self.progress,
        )

    def open_pack(self, format: Format) -> Index | None:
        """The index of a pack; None if it is a folder. Raises as open_index does."""
        beside = self._beside()
        if beside is not None and beside.about.kind == "arrow":
            if self.index is not None:
                raise ConfigError(
                    f"{self.origin.url} is a pack and has its own index: drop index=."
                )
            return self._opened(beside, None)
        if format == "arrow" or (beside is None and self._kept() is None and self._looks_packed()):
            raise DatasetNotFoundError(
                f"{self.origin.url}: no whole pack: its manifest ({MANIFEST_NAME.decode()}), which "
                "is written last, isn't there. Run the same `penstock pack` again, it goes on "
                "where it stopped; or copy the pack again with its `_penstock` folder."
            )
        return None

    def rebuild(self) -> Index:
        """See build_index."""
        beside = self._beside()
        if (beside is None and self._looks_packed()) or (beside and beside.about.kind == "arrow"):
            raise ConfigError(
                f"{self.origin.url} is a pack, and a pack has its index: nothing to do."
            )
        if self.is_tar("auto"):
            manifest, place = self._tar().rebuild()
            if self.index is None:
                self.places.upload(manifest, place)
            return self._opened(manifest, place)
        listing = list_folder(self.origin)
        if isinstance(self.origin, LocalFolder):
            place, listing = self._make_place(self.origin, listing)
        else:
            place = self.places.candidates()[0]
            make_folder(place)
        with locked(place):
            built = self._build(place, listing, {})
        if self.index is None:
            self.places.upload(built, place)
        return self._opened(built, place)

    def _opened(self, manifest: Manifest, folder: bytes | None) -> Index:
        return opened(
            manifest,
            origin=self.origin,
            folder=folder,
            own=self.places.own,
            scratch=self.scratch,
        )

    def _warn_of_lost_copies(self) -> None:
        if not self.origin.is_local and not self.scratch.is_kept:
            warnings.warn(
                f"{self.origin.url} is remote and cache= isn't given: downloads go to a temporary "
                "folder and aren't kept for the next run. Pass cache=, a folder on a local disk.",
                PenstockWarning,
                stacklevel=4,
            )

    def _kept(self) -> Manifest | None:
        """A remote dataset's index in the cache folder or in `index=`; see read_own."""
        if self.origin.is_local:
            return None
        if "kept" not in self.seen:
            self.seen["kept"] = read_own(self.places.candidates()[0])
        return self.seen["kept"]

    def _beside(self) -> Manifest | None:
        """The manifest beside the data, of any kind; looked for once."""
        if "beside" not in self.seen:
            self.seen["beside"] = self._look_beside()
        return self.seen["beside"]

    def _look_beside(self) -> Manifest | None:
        name = self.places.own + b"/" + MANIFEST
        try:
            found = self.origin.find(name)
        except FetchError as error:
            if self._kept() is None:
                raise
            warnings.warn(
                f"{self.origin.url}: the remote can't be asked, so the index that was kept is used "
                f"as it is. {error}",
                PenstockWarning,
                stacklevel=6,
            )
            return None
        if found is None:
            return None
        size_bytes, version = found
        try:
            return self._read_manifest(name, size_bytes, version)
        except CorruptShardError:
            if self._looks_packed():
                raise
            _log.warning("%s: its index is torn or damaged; it is built anew", self.origin.url)
            return None

    def _read_manifest(self, name: bytes, size_bytes: int, version: str) -> Manifest:
        """A damaged copy in the cache is fetched once more."""
        path = self.origin.file(name, size_bytes=size_bytes, version=version)
        try:
            return read_manifest(path, remedy=_REPACK, mapped=self.origin.is_local)
        except CorruptShardError:
            if not self.origin.drop(name, size_bytes=size_bytes, version=version):
                raise
        path = self.origin.file(name, size_bytes=size_bytes, version=version)
        return read_manifest(path, remedy=_REPACK, mapped=self.origin.is_local)

    def _looks_packed(self) -> bool:
        return self.origin.selection is None and any(
            self.origin.find(name) is not None for name in (PACK_NAME, _FIRST_SHARD)
        )

    def _open_local(self, origin: LocalFolder) -> Index:
        for place in self.places.candidates():
            manifest = _read_folder(place)
            if manifest is not None and not changed_directories(origin, _directories(manifest)):
                return self._opened(manifest, place)
        place, listing = self._make_place(origin, list_folder(origin))
        with locked(place):
            manifest = _read_folder(place)  # who held the lock before may have built it
            if manifest is None:
                return self._opened(self._build(place, listing, {}), place)
            if _directories(manifest) != listing.directories:
                manifest = self._update(manifest, place, listing)
            return self._opened(manifest, place)

    def _update(self, manifest: Manifest, place: bytes, listing: Listing) -> Manifest:
        try:
            known = known_files(manifest, place)
        except DatasetError:
            _log.warning("%s: parts of the index are damaged; it is built anew", printable(place))
            known = {}
        names = {file.name for file in listing.files}
        if self.index is not None and known and not names & known.keys():
            raise IndexChangedError(
                f"{printable(place)}: this index knows none of the files in {self.origin.url}; it "
                "is of another dataset. Give that dataset's own folder as index=, or an empty one."
            )
        as_before = len(listing.files) == len(known) and all(
            file.name in known and known[file.name].is_same(file) for file in listing.files
        )
        if as_before and len(listing.quarantined) == manifest.about.quarantined:
            return refresh_directories(manifest, listing, place)
        return self._build(place, listing, known)

    def _open_remote(self) -> Index:
        beside = self._beside() if self.index is None else None
        if beside is not None and beside.about.kind == "folder":
            return self._opened(beside, None)
        place = self.places.candidates()[0]
        make_folder(place)
        with locked(place):
            manifest = _read_folder(place)
            if manifest is None:
                manifest = self._build(place, list_folder(self.origin), {})
        return self._opened(manifest, place)

    def _make_place(self, origin: LocalFolder, listing: Listing) -> tuple[bytes, Listing]:
        """The first place that can be written; the listing with the root's time after that."""
        before = os.stat(origin.root).st_mtime_ns
        place = self.places.make()
        if listing.directories[b""] == before:  # else files came meanwhile: stale at next opening
            times = {**listing.directories, b"": os.stat(origin.root).st_mtime_ns}
            listing = replace(listing, directories=times)
        return place, listing

    def _build(self, place: bytes, listing: Listing, known: Mapping[bytes, Known]) -> Manifest:
        if not known:
            _log.info(
                "Indexing %s: each of %d files is decoded once", self.origin.url, len(listing.files)
            )
        return build_folder_index(
            self.origin,
            listing,
            place,
            verify=self.verify or find_verify(workers=self.workers),
            workers=self.workers,
            known=known,
            progress=self.progress,
        )


def _directories(manifest: Manifest) -> dict[bytes, int]:
    return {os.fsencode(name): mtime_ns for name, mtime_ns in manifest.about.directories}


def _read_folder(place: bytes) -> Manifest | None:
    """A folder's index in `place`; see read_own."""
    manifest = read_own(place)
    return manifest if manifest is None or manifest.about.kind == "folder" else None
