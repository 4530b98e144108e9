"""Finding a dataset's manifest: in its own folder, in a remote folder for its index, or kept by
this host.

Each place is looked at once. A damaged copy of a remote manifest in the cache is fetched again.
"""

from __future__ import annotations

import logging
import warnings
from functools import cached_property
from typing import TYPE_CHECKING

from penstock.cache.errors import (
    ConfigError,
    CorruptShardError,
    DatasetError,
    DatasetNotFoundError,
    FetchError,
    OtherVersionError,
    PenstockWarning,
)
from penstock.readers.files.names import OWN_FOLDER, printable
from penstock.readers.formats.local_files import REINDEX
from penstock.readers.formats.registry import self_indexed
from penstock.readers.index.index_folder import read_index
from penstock.readers.index.manifest_file import MANIFEST, read_manifest

if TYPE_CHECKING:
    from penstock.readers.index.manifest import Manifest
    from penstock.readers.index.places import Places
    from penstock.readers.origin.origin import Origin

_log = logging.getLogger("penstock")

OWN_MANIFEST = OWN_FOLDER + b"/" + MANIFEST
"""Of a pack, below its root."""

REPACK = "Run `penstock pack SRC DST` again into an empty folder, or fetch the pack again."


class ManifestLookup:
    """Looks for the manifests of one dataset. places: where an index of it may be."""

    def __init__(self, origin: Origin, places: Places) -> None:
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
