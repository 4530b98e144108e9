"""Find a dataset's manifest, and choose the folder that holds its index.

That is its own folder, `index=`, beside the data, the cache folder or the user's cache directory.
Beside `photos/` means `photos.penstock/`, never inside: other tools take each folder inside for a
class. Nothing remote is written unasked; it is read beside the data, where whoever owns the bucket
may have put an index. Each place is looked at once, and an index that is damaged there is detected:
a damaged copy of a remote manifest in the cache is fetched again.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import warnings
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from penstock.cache import (
    ConfigError,
    CorruptShardError,
    DatasetError,
    DatasetNotFoundError,
    FetchError,
    IndexChangedError,
    OtherVersionError,
    PenstockWarning,
)
from penstock.cache.base import refuse_shortage
from penstock.readers.files import OWN_FOLDER, is_passed_over, printable
from penstock.readers.formats import REINDEX, self_indexed
from penstock.readers.index.manifest_file import MANIFEST, MAX_READ_BYTES, read_manifest
from penstock.readers.origin import QUARANTINE, LocalFolder, RemoteFolder, local_path, show

if TYPE_CHECKING:
    from penstock.readers.index.manifest import Manifest
    from penstock.readers.origin import Origin, Scratch

_log = logging.getLogger("penstock")

KEPT = b"indexes"
"""Folder of indexes in a cache folder, and in the user's cache directory."""

# Read at 1 GB/s or more.
_MOST_CHECKED_BYTES = 256 * 2**20


def read_index(place: bytes) -> Manifest | None:
    """Read the manifest in `place`; None if there is none, or one that is ours to replace: a torn
    one, and, where only we keep it, one of another version. Raises ConfigError (a pack's),
    OtherVersionError."""
    path = os.path.join(place, MANIFEST)
    try:
        # What we alone keep may be damaged under a live job, and is no part of the data.
        is_mapped = not is_kept(place) or _is_large(path)
        manifest = read_manifest(path, remedy=REINDEX, mapped=is_mapped)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except CorruptShardError as error:
        _log.warning("%s It is rebuilt.", error)
        return None
    except OtherVersionError as error:
        if not is_kept(place):
            raise
        _log.warning("%s It is rebuilt.", error)
        return None
    if manifest.format.indexing is None:
        raise ConfigError(
            f"{printable(place)}: this is a pack's own folder, wanted one for an index. Give "
            "index= another folder."
        )
    if is_kept(place) and (fault := _fault(manifest, place)) is not None:
        _log.warning("%s: a part of the index %s. It is rebuilt.", printable(place), fault)
        return None
    return manifest


def _is_large(path: bytes) -> bool:
    try:
        return os.stat(path).st_size > MAX_READ_BYTES
    except OSError:  # whoever reads it says what is wrong
        return False


def check_arrangement(manifest: Manifest, origin: Origin, *, shown: str) -> None:
    """Raise IndexChangedError for an index of the same data that was made with other arguments.
    shown: where it is."""
    if manifest.about.arrangement != origin.variant:
        raise IndexChangedError(
            f"{shown}: this index is of {origin.url} arranged otherwise: by another manifest=, "
            "fields= with places, schema=, allow_empty= or max_pixels=. Give the arguments that it "
            "was made with, or another folder as index=."
        )


def is_kept(place: bytes) -> bool:
    """Whether a place is in a cache folder or in the user's cache directory."""
    return os.path.basename(os.path.dirname(place)) == KEPT


def _fault(manifest: Manifest, place: bytes) -> str | None:
    """What keeps an index that nobody but us keeps from having all its parts as they were written;
    None for a whole one. Very large ones are taken at their word: reading them would delay the
    start."""
    from penstock.readers.formats import is_sidecar  # a pack has no sidecars

    paths = [os.path.join(place, name) for name in manifest.names]
    try:
        if sum(os.stat(path).st_size for path in paths) > _MOST_CHECKED_BYTES:
            return None
        return None if all(map(is_sidecar, paths, manifest.etags)) else "is damaged"
    except OSError as error:
        refuse_shortage(error, printable(place))
        return f"can't be read ({error.strerror})"


def warn_of_damage(url: str, error: Exception) -> None:
    """Warn that a part of an index in the cache was damaged."""
    warnings.warn(
        f"{url}: a part of its index in the cache was damaged or removed, and is fetched or "
        f"rebuilt; the job goes on. {error}",
        PenstockWarning,
        stacklevel=6,
    )


Folder = str | os.PathLike[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexPlaces:
    """The folders that may hold one dataset's index. index: the one that the user named, a local
    path or, of remote data, a URL of the same store."""

    origin: Origin
    scratch: Scratch
    index: Folder | None

    def candidates(self) -> list[bytes]:
        """Local folders that may hold the index, best first; at least one. Raises ConfigError."""
        if self.index is not None and (path := self._named()) is not None:
            return [path]
        places = []
        if isinstance(self.origin, LocalFolder):
            places += [
                p for p in self.origin.index_folders() if _may_be_trusted(p, self.origin.root)
            ]
        if self.scratch.is_kept:
            places.append(self._temporary())
        home = self.home()
        if home is not None:
            places.append(home)
        return places or [self._temporary()]

    def remote(self) -> RemoteFolder | None:
        """The remote folder that may hold a remote dataset's index: the one named, or beside the
        data; None for local data, or where there is no such place. Raises ConfigError."""
        origin = self.origin
        if not isinstance(origin, RemoteFolder):
            return None
        if self.index is not None:
            return None if self._named() is not None else origin.folder_at(os.fspath(self.index))
        return None if origin.index_url is None else origin.folder_at(origin.index_url)

    def home(self) -> bytes | None:
        """The folder in the user's cache directory; None where there is none, or where this data
        can't be told from other data by its URL."""
        from penstock.cache.base import user_cache  # a pack looks into no such folder

        base = user_cache()
        if base is None or (
            isinstance(self.origin, RemoteFolder) and not self.origin.is_known_by_url
        ):
            return None
        return os.path.join(base, KEPT, os.fsencode(self._key()))

    def is_own(self, place: bytes) -> bool:
        """Whether a place is in a folder of this node's: nobody named it, and it isn't beside the
        data."""
        origin = self.origin
        beside = origin.index_folders() if isinstance(origin, LocalFolder) else ()
        return self.index is None and place not in beside

    def _named(self) -> bytes | None:
        """The local path that `index` names; None if it is a URL."""
        assert self.index is not None
        path = local_path(os.fspath(self.index))
        if path is None and not isinstance(self.origin, RemoteFolder):
            raise ConfigError(
                f"index: got {show(self.index)} for {self.origin.url}, wanted a local folder for "
                "the index of local data."
            )
        if path == b"" or (path is not None and b"\0" in path):
            raise ConfigError(f"index: got {self.index!r}, wanted a folder.")
        return None if path is None else os.path.abspath(path)

    def _check_outside(self, place: bytes) -> None:
        """Raise ConfigError for a named place inside of a local dataset: the index's folders would
        be taken for classes there."""
        if not isinstance(self.origin, LocalFolder) or self.origin.selection is not None:
            return
        parts = os.path.relpath(os.path.realpath(place), os.path.realpath(self.origin.root)).split(
            os.sep.encode()
        )
        if parts[0] != b".." and not any(is_passed_over(p) for p in parts if p != b"."):
            raise ConfigError(
                f"index: {printable(place)} lies in the dataset's own folder, where it would "
                "be taken for samples and classes. Give a folder outside of it, or none: the index "
                "then goes beside the dataset."
            )

    def _key(self) -> str:
        """Names the data: its URL and store, and of a local folder its inode, since another disk
        may be mounted there."""
        named = self.origin.key.encode("utf-8", "surrogateescape")
        if isinstance(self.origin, LocalFolder):
            with contextlib.suppress(OSError):  # whoever lists it says what is wrong
                named += b"\0%d" % os.stat(self.origin.root).st_ino
        return hashlib.sha256(named).hexdigest()[:32]

    def _temporary(self) -> bytes:
        """In the cache folder, or in a temporary one."""
        key = hashlib.sha256(self.origin.key.encode("utf-8", "surrogateescape")).hexdigest()[:32]
        return self.scratch.index_folder(key)

    def make(self) -> bytes:
        """Make the first place that can be written; with a warning where it won't be kept. Raises
        WriteError, ConfigError."""
        from penstock.readers.files import make_folder

        if self.index is not None:
            self._check_outside(self.candidates()[0])
        place = next((p for p in self.candidates() if self._can_write(p)), None)
        if place is not None:
            with contextlib.suppress(OtherVersionError):  # it is replaced
                read_index(place)  # a pack's own folder is refused
            return place
        if self.index is not None:
            make_folder(self.candidates()[0])  # raises what is wrong with it
        place = self._temporary()
        make_folder(place)
        if not self.scratch.is_kept:
            warnings.warn(
                f"{self.origin.url}: neither the folder beside it nor the user's cache directory "
                "can be written, so its index isn't kept. Pass index= or cache=, a folder that can "
                "be written; or run `penstock index` with --out.",
                PenstockWarning,
                stacklevel=6,
            )
        return place

    def _can_write(self, place: bytes) -> bool:
        from penstock.cache.base import make_private_folder
        from penstock.readers.files import write_bytes

        try:
            if place == self.home():
                make_private_folder(os.fsdecode(place))
            os.makedirs(place, exist_ok=True)
            write_bytes(os.path.join(place, b"probe"), b"")
            os.unlink(os.path.join(place, b"probe"))
        except OSError:  # WriteError too
            return False
        return True

    def for_upload(self) -> tuple[IndexPlaces, RemoteFolder | None]:
        """Where to build an index, and the remote folder that is asked to have it, or None."""
        origin = self.origin
        if isinstance(origin, RemoteFolder):
            if self.index is not None and self._named() is None:
                return replace(self, index=None), self.remote()
            if self.index is None and origin.mount is not None:  # beside it is a local path
                return self, self.remote()
        return self, None


def upload_index(built: Manifest, place: bytes, to: RemoteFolder) -> None:
    """Put an index into a remote folder, the manifest last. Raises FetchError."""
    try:
        for name in (*built.names, QUARANTINE, MANIFEST):
            to.upload(os.path.join(place, name), name)
    except FetchError as error:
        raise FetchError(
            f"{error} The index is built, but can't be written there: run `penstock index` with "
            "--out FOLDER, a local one, and pass that as index=.",
            uri=to.url,
        ) from None


def _may_be_trusted(place: bytes, root: bytes) -> bool:
    """Whether an index there is of this user, the data's owner or root: in a folder that all may
    write, as /tmp, anybody could have put one beside the data."""
    try:
        owners = {os.lstat(place).st_uid, os.stat(place).st_uid}
    except OSError:
        return True  # nothing there
    try:
        trusted = {os.geteuid(), 0, os.stat(root).st_uid}
    except OSError:
        return True
    if owners <= trusted:
        return True
    _log.warning(
        "%s: belongs to another user than the data and is left alone; the index goes elsewhere",
        printable(place),
    )
    return False


OWN_MANIFEST = OWN_FOLDER + b"/" + MANIFEST
"""Of a pack, below its root."""

REPACK = "Run `penstock pack SRC DST` again into an empty folder, or fetch the pack again."


class ManifestLookup:
    """Looks for the manifests of one dataset. places: where an index of it may be."""

    def __init__(self, origin: Origin, places: IndexPlaces) -> None:
        self._origin, self._places = origin, places

    @cached_property
    def own(self) -> Manifest | None:
        """The manifest that a dataset carries in its own folder, as packs do. Raises FetchError,
        CorruptShardError (torn), DatasetError (a newer version)."""
        origin = self._origin
        if origin.selection is not None:
            return None
        try:
            found = origin.find(OWN_MANIFEST)
        except FetchError as error:
            if self.local is None:
                raise
            warnings.warn(
                f"{origin.url}: the remote can't be reached, so the index that was kept is used as "
                f"it is. {error}",
                PenstockWarning,
                stacklevel=6,
            )
            return None
        if found is None:
            return None
        try:
            manifest = _read(origin, OWN_MANIFEST, *found, remedy=REPACK)
        except CorruptShardError:
            if self.is_begun:
                raise
            return None
        return manifest if manifest.format.indexing is None else None

    @property
    def is_begun(self) -> bool:
        """Whether the dataset's own folder shows traces of a format that carries its index, whole
        or not."""
        return any(format.recognises(self._origin) for format in self_indexed())

    @property
    def separate(self) -> Manifest | None:
        """The manifest of a remote dataset's index, wherever that lies apart from the data."""
        return self.remote or self.local

    @cached_property
    def remote(self) -> Manifest | None:
        """The manifest of a remote dataset's index in a remote folder: the one named, or beside the
        data. Raises DatasetNotFoundError, ConfigError, FetchError and DatasetError for the one
        named."""
        place, is_named = self._places.remote(), self._places.index is not None
        if place is None:
            return None
        try:
            found = place.find(MANIFEST)
            if found is None and not is_named:
                return None
            if found is None:
                raise DatasetNotFoundError(
                    f"{place.url}: there is no index. Write it: penstock index {self._origin.url} "
                    f"--out {place.url}."
                )
            manifest = _read(place, MANIFEST, *found, remedy=REINDEX)
        except (FetchError, DatasetError) as error:
            if is_named:
                raise
            if isinstance(error, OtherVersionError):
                warnings.warn(
                    f"{error} Until then an index of our own is used.",
                    PenstockWarning,
                    stacklevel=6,
                )
                return None
            # Who may read the data needn't be allowed to look beside it.
            _log.info("%s: no index is read there (%s)", place.url, error)
            return None
        if manifest.format.indexing is None:
            raise ConfigError(
                f"{place.url}: this is a pack's own folder, wanted one for an index. Give index= "
                "another folder."
            )
        return manifest

    @cached_property
    def local(self) -> Manifest | None:
        """The manifest of a remote dataset's index in a local folder; see `read_index`."""
        if self._origin.is_local:
            return None
        found = map(read_index, self._places.candidates())
        return next((each for each in found if each is not None), None)


def _read(origin: Origin, name: bytes, size_bytes: int, version: str, *, remedy: str) -> Manifest:
    """A damaged copy in the cache is fetched once more."""
    url = None if origin.is_local else f"{origin.url.rstrip('/')}/{printable(name)}"
    path = origin.file(name, size_bytes=size_bytes, version=version)
    try:
        return read_manifest(path, remedy=remedy, mapped=origin.is_local, url=url)
    except (CorruptShardError, FileNotFoundError):  # gone since it was fetched
        if not origin.drop(name, size_bytes=size_bytes, version=version):
            raise
    path = origin.file(name, size_bytes=size_bytes, version=version)
    return read_manifest(path, remedy=remedy, mapped=origin.is_local, url=url)
