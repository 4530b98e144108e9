"""Where an index of foreign data is kept: `index=`, beside the data, or the cache folder."""

from __future__ import annotations

import hashlib
import logging
import os
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cache.errors import ConfigError, CorruptShardError, FetchError, PenstockWarning
from readers.atomic import make_folder, write_bytes
from readers.folder_shard import REINDEX
from readers.manifest import MANIFEST, Manifest, read_manifest
from readers.names import OWN_FOLDER, printable
from readers.origin import LocalFolder, RemoteFolder
from readers.quarantine import QUARANTINE

if TYPE_CHECKING:
    from readers.origin import Origin
    from readers.scratch import Scratch

_log = logging.getLogger("penstock")

Folder = str | os.PathLike[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """The folders that may hold one dataset's index. index: the one that the user named."""

    origin: Origin
    scratch: Scratch
    index: Folder | None

    @property
    def own(self) -> bytes:
        """The index's folder below the data's root; tar files that were picked from a folder have
        theirs apart, since other ones there may be another dataset."""
        key = self.origin.selection_key
        return OWN_FOLDER if key is None else OWN_FOLDER + b"/tar-" + key.encode()

    def candidates(self) -> list[bytes]:
        """Folders that may hold the index, best first."""
        if self.index is not None:
            return [os.path.abspath(os.fsencode(self.index))]
        places = []
        if isinstance(self.origin, LocalFolder):
            places.append(os.path.join(self.origin.root, self.own))
        if self.scratch.is_kept or not places:
            places.append(self._scratch_place())
        return places

    def _scratch_place(self) -> bytes:
        key = hashlib.sha256(self.origin.key.encode("utf-8", "surrogateescape")).hexdigest()[:32]
        return self.scratch.index_folder(key)

    def make(self) -> bytes:
        """The first that can be written, made; with a warning where it won't be kept. Raises
        WriteError."""
        place = next((p for p in self.candidates() if _can_write(p)), None)
        if place is None and self.index is not None:
            make_folder(self.candidates()[0])  # raises what is wrong with it
        if place is None:
            place = self._scratch_place()
            make_folder(place)
            if not self.scratch.is_kept:
                warnings.warn(
                    f"{self.origin.url} can't be written, so its index isn't kept. Pass index= or "
                    "cache=, a folder that can be written; or run `penstock index` with --out.",
                    PenstockWarning,
                    stacklevel=7,
                )
        return place

    def upload(self, built: Manifest, place: bytes) -> None:
        """Put an index beside a remote dataset, the manifest last. Raises FetchError."""
        if not isinstance(self.origin, RemoteFolder):
            return
        try:
            for name in (*built.names, QUARANTINE, MANIFEST):
                self.origin.upload(os.path.join(place, name), self.own + b"/" + name)
        except FetchError as error:
            raise FetchError(
                f"{error} The index is built, but can't be written to the dataset: run `penstock "
                "index` with --out FOLDER, and pass that as index=.",
                uri=self.origin.url,
            ) from None


def read_own(place: bytes) -> Manifest | None:
    """The index in `place`; None if there is none, or a torn one, which is ours to replace. Raises
    ConfigError (a pack's)."""
    try:
        manifest = read_manifest(os.path.join(place, MANIFEST), remedy=REINDEX)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except CorruptShardError as error:
        _log.warning("%s It is built anew.", error)
        return None
    if manifest.about.kind == "arrow":
        raise ConfigError(
            f"{printable(place)}: this is a pack's own folder, wanted one for an index. Give "
            "index= another folder."
        )
    return manifest


def _can_write(place: bytes) -> bool:
    try:
        os.makedirs(place, exist_ok=True)
        write_bytes(os.path.join(place, b"probe"), b"")
        os.unlink(os.path.join(place, b"probe"))
    except OSError:  # WriteError too
        return False
    return True
