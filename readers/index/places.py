"""Where an index of foreign data is kept: `index=`, beside the data, the cache folder, or the
user's cache directory.

Beside `photos/` means `photos.penstock/`, never inside: other tools take each folder inside for a
class. Nothing remote is written unasked; it is read beside the data, where whoever owns the bucket
may have put an index.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import warnings
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from penstock.cache.base.folders import make_private_folder
from penstock.cache.base.home import user_cache
from penstock.cache.errors import ConfigError, FetchError, OtherVersionError, PenstockWarning
from penstock.readers.files.atomic import make_folder, write_bytes
from penstock.readers.files.names import is_passed_over, printable
from penstock.readers.index.index_folder import KEPT, read_index
from penstock.readers.index.manifest_file import MANIFEST
from penstock.readers.origin.local import LocalFolder
from penstock.readers.origin.quarantine import QUARANTINE
from penstock.readers.origin.remote import RemoteFolder
from penstock.readers.origin.urls import local_path, show

if TYPE_CHECKING:
    from penstock.readers.index.manifest import Manifest
    from penstock.readers.origin.origin import Origin
    from penstock.readers.origin.scratch import Scratch

_log = logging.getLogger("penstock")

Folder = str | os.PathLike[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
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
        try:
            if place == self.home():
                make_private_folder(os.fsdecode(place))
            os.makedirs(place, exist_ok=True)
            write_bytes(os.path.join(place, b"probe"), b"")
            os.unlink(os.path.join(place, b"probe"))
        except OSError:  # WriteError too
            return False
        return True

    def for_upload(self) -> tuple[Places, RemoteFolder | None]:
        """Where to build an index, and the remote folder that is asked to have it, or None."""
        origin = self.origin
        if isinstance(origin, RemoteFolder):
            if self.index is not None and self._named() is None:
                return replace(self, index=None), self.remote()
            if self.index is None and origin.mount is not None:  # beside it is a local path
                return self, self.remote()
        return self, None


def upload(built: Manifest, place: bytes, to: RemoteFolder) -> None:
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
