"""Opening a dataset's index, or building it on first use.

A pack has its manifest in its own folder. A folder's index is looked for in `index=`, else beside
the data (`photos.penstock`), in the cache folder and in the user's cache directory, and built in
the first of these that can be written. A local folder's index notes the time of each folder that
was listed: where one differs, files came or went, and the index is brought up to date; facts of
unchanged files are kept. A file that changed in place is found when it is read, by size and
CRC-32C. A remote folder isn't listed again on opening (stores list a page at a time) if its index
lies beside it, in the cache folder or in `index=`: `penstock index` does that. Nothing remote is
written but where `penstock index --out` says.
"""

from __future__ import annotations

import logging
import os
import time
import warnings
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np

from penstock.cache.base.limits import usable_cores
from penstock.cache.errors import (
    ConfigError,
    CorruptShardError,
    DatasetError,
    DatasetNotFoundError,
    FetchError,
    IndexChangedError,
    PenstockWarning,
)
from penstock.readers.fields.verify import find_verify
from penstock.readers.files.atomic import locked
from penstock.readers.files.names import OWN_FOLDER, printable
from penstock.readers.formats.folder.building import (
    build_folder_index,
    known_files,
    refresh_directories,
)
from penstock.readers.formats.folder.listing import changed_directories, list_folder
from penstock.readers.formats.local_files import REINDEX
from penstock.readers.formats.tar.listing import holds_tars
from penstock.readers.formats.tar.opening import TarOpener
from penstock.readers.index.index import opened
from penstock.readers.index.manifest import MANIFEST, Manifest, read_manifest
from penstock.readers.index.mending import Mender
from penstock.readers.index.places import Folder as Folder
from penstock.readers.index.places import Places, is_kept, read_own, upload
from penstock.readers.origin.local import LocalFolder
from penstock.readers.origin.locate import locate
from penstock.readers.origin.scratch import Scratch

if TYPE_CHECKING:
    from collections.abc import Mapping

    from penstock.cache.disk.disk_cache import DiskCache
    from penstock.readers.formats.folder.building import Known
    from penstock.readers.formats.folder.listing import Listing
    from penstock.readers.index.index import Index
    from penstock.readers.origin.origin import Origin
    from penstock.readers.origin.remote import RemoteFolder
    from penstock.readers.origin.urls import Url
    from penstock.readers.types import Progress, Verify

_log = logging.getLogger("penstock")

Format = Literal["auto", "folder", "tar", "arrow"]

MANIFEST_NAME = OWN_FOLDER + b"/" + MANIFEST
PACK_NAME = OWN_FOLDER + b"/pack.json"
_MANY_SAMPLES = 2**18
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

    index: folder that holds or gets it; of remote data also a URL of the same store, that holds it.
    cache: what remote data is read through, and for an index that has no better place; it,
    storage_options and filesystem: as for Dataset. verify: decodes images while building; None
    finds the installed one. workers: threads for building, None is all cores.

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
        workers=workers or usable_cores(),
    )
    return opener.open(format)


def build_index(
    url: Url,
    *,
    format: Format = "auto",
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

    format: "folder" or "tar", where a folder holds images and tar files. out: folder for the index,
    of remote data also a URL of the same store; None is beside local data, else the cache folder,
    else the user's cache directory. progress: called as progress(done samples, total samples, done
    bytes). The rest, and what is raised, as for open_index. A pack has its index already:
    ConfigError.
    """
    began = time.monotonic()
    scratch = Scratch(cache)
    origin = locate(url, storage_options=storage_options, scratch=scratch, filesystem=filesystem)
    opener = Opener(
        origin=origin,
        scratch=scratch,
        index=out,
        verify=verify,
        workers=workers or usable_cores(),
        progress=progress,
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
        )
    finally:
        origin.close()
        scratch.close()


def check_format(format: str) -> None:
    """Raises ConfigError for a format that isn't one."""
    if format not in get_args(Format):
        raise ConfigError(f"format: got {format!r}, wanted one of {list(get_args(Format))}.")


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
        check_format(format)
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
            known = self._known()
            if known is not None:
                return known.about.kind == "tar"
        return holds_tars(self.origin)

    def _open_tar(self) -> Index:
        there = self._there()
        if there is not None and there.about.kind == "tar":
            return self._opened(there, self.places.remote())
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
        packed = self._inside()
        if packed is not None:
            self._check_large(packed)
            if self.index is not None:
                raise ConfigError(
                    f"{self.origin.url} is a pack and has its own index: drop index=."
                )
            return self._opened(packed, None)
        if format == "arrow" or (self._known() is None and self._looks_packed()):
            raise DatasetNotFoundError(
                f"{self.origin.url}: no whole pack: its manifest ({MANIFEST_NAME.decode()}), which "
                "is written last, isn't there. Run the same `penstock pack` again, it goes on "
                "where it stopped; or copy the pack again with its `_penstock` folder."
            )
        return None

    def _check_large(self, packed: Manifest) -> None:
        """Shards that say they hold very much are looked at before anything is sized by that."""
        if not isinstance(self.origin, LocalFolder):
            return
        for shard in np.flatnonzero(packed.samples > _MANY_SAMPLES).tolist():
            name, wanted = packed.names[shard], int(packed.shard_bytes[shard])
            found = self.origin.find(name)
            if found is None or found[0] != wanted:
                raise CorruptShardError(
                    f"{self.origin.url}: {printable(name)} isn't there or has another size than "
                    f"the manifest says ({wanted:,} bytes). {_REPACK}"
                )

    def rebuild(self, format: Format) -> Index:
        """See build_index."""
        check_format(format)
        if format == "arrow":
            raise ConfigError('format: got "arrow", which is a pack, and a pack has its index.')
        if self._inside() is not None or self._looks_packed():
            raise ConfigError(
                f"{self.origin.url} is a pack, and a pack has its index: nothing to do."
            )
        places, to = self.places.for_upload()
        # What is at `index=` now is replaced, whatever it is.
        if replace(self, index=None, seen=dict(self.seen)).is_tar(format):
            built, place = replace(self._tar(), places=places).rebuild()
        else:
            place, listing = self._make_place(places, list_folder(self.origin))
            with locked(place):
                built = self._build(place, listing, {})
        if to is not None:
            upload(built, place, to)
        return self._opened(built, place if to is None else to)

    def _opened(self, manifest: Manifest, place: bytes | RemoteFolder | None) -> Index:
        mender = None
        if isinstance(place, bytes) and is_kept(place):
            mender = Mender(
                manifest,
                origin=self.origin,
                place=place,
                verify=self.verify,
                workers=self.workers,
            )
        return opened(
            manifest, origin=self.origin, place=place, scratch=self.scratch, mender=mender
        )

    def _warn_of_lost_copies(self) -> None:
        if not self.origin.is_local and not self.scratch.is_kept:
            warnings.warn(
                f"{self.origin.url} is remote and cache= isn't given: downloads go to a temporary "
                "folder and aren't kept for the next run. Pass cache=, a folder on a local disk.",
                PenstockWarning,
                stacklevel=4,
            )

    def _known(self) -> Manifest | None:
        """A remote dataset's index, wherever it is."""
        return self._there() or self._kept()

    def _kept(self) -> Manifest | None:
        """A remote dataset's index in a local folder; see read_own."""
        if self.origin.is_local:
            return None
        if "kept" not in self.seen:
            found = map(read_own, self.places.candidates())
            self.seen["kept"] = next((each for each in found if each is not None), None)
        return self.seen["kept"]

    def _there(self) -> Manifest | None:
        """A remote dataset's index in a remote folder; looked for once."""
        if "there" not in self.seen:
            self.seen["there"] = self._look_there()
        return self.seen["there"]

    def _look_there(self) -> Manifest | None:
        place = self.places.remote()
        if place is None:
            return None
        try:
            found = place.find(MANIFEST)
            if found is None and self.index is None:
                return None
            if found is None:
                raise DatasetNotFoundError(
                    f"{place.url}: there is no index. Write it: penstock index {self.origin.url} "
                    f"--out {place.url}."
                )
            manifest = self._read_manifest(place, MANIFEST, *found, remedy=REINDEX)
        except (FetchError, DatasetError) as error:
            if self.index is not None:
                raise
            # Who may read the data needn't be allowed to look beside it.
            _log.info("%s: no index is read there (%s)", place.url, error)
            return None
        if manifest.about.kind == "arrow":
            raise ConfigError(
                f"{place.url}: this is a pack's own folder, wanted one for an index. Give index= "
                "another folder."
            )
        return manifest

    def _inside(self) -> Manifest | None:
        """The manifest of a pack in its own folder; looked for once."""
        if "inside" not in self.seen:
            self.seen["inside"] = self._look_inside()
        return self.seen["inside"]

    def _look_inside(self) -> Manifest | None:
        if self.origin.selection is not None:
            return None
        try:
            found = self.origin.find(MANIFEST_NAME)
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
        try:
            manifest = self._read_manifest(self.origin, MANIFEST_NAME, *found, remedy=_REPACK)
        except CorruptShardError:
            if self._looks_packed():
                raise
            return None
        return manifest if manifest.about.kind == "arrow" else None

    def _read_manifest(
        self, origin: Origin, name: bytes, size_bytes: int, version: str, *, remedy: str
    ) -> Manifest:
        """A damaged copy in the cache is fetched once more."""
        path = origin.file(name, size_bytes=size_bytes, version=version)
        try:
            return read_manifest(path, remedy=remedy, mapped=origin.is_local)
        except (CorruptShardError, FileNotFoundError):  # gone since it was fetched
            if not origin.drop(name, size_bytes=size_bytes, version=version):
                raise
        path = origin.file(name, size_bytes=size_bytes, version=version)
        return read_manifest(path, remedy=remedy, mapped=origin.is_local)

    def _looks_packed(self) -> bool:
        return self.origin.selection is None and any(
            self.origin.find(name) is not None for name in (PACK_NAME, _FIRST_SHARD)
        )

    def _open_local(self, origin: LocalFolder) -> Index:
        for place in self.places.candidates():
            manifest = _read_folder(place)
            if manifest is not None and not changed_directories(origin, _directories(manifest)):
                return self._opened(manifest, place)
        place, listing = self._make_place(self.places, list_folder(origin))
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
        there = self._there()
        if there is not None and there.about.kind == "folder":
            return self._opened(there, self.places.remote())
        places = self.places
        listing: Listing | None = None
        for place in places.candidates():
            manifest = _read_folder(place)
            if manifest is None:
                continue
            if place == places.home():  # nobody said that this index shall stand
                listing = listing or list_folder(self.origin)
                if manifest.about.listing != listing.fingerprint():
                    continue
            return self._opened(manifest, place)
        listing = listing or list_folder(self.origin)
        place = places.make()
        with locked(place):
            manifest = _read_folder(place)  # who held the lock before may have built it
            if manifest is None:
                manifest = self._build(place, listing, {})
            elif place == places.home() and manifest.about.listing != listing.fingerprint():
                manifest = self._update(manifest, place, listing)
        return self._opened(manifest, place)

    def _make_place(self, places: Places, listing: Listing) -> tuple[bytes, Listing]:
        """The first place that can be written; the listing with the root's time after that."""
        origin = self.origin
        if not isinstance(origin, LocalFolder):
            return places.make(), listing
        before = os.stat(origin.root).st_mtime_ns
        place = places.make()
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
