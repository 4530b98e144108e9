"""A local folder that holds an index: its manifest, and whether all of it is well."""

from __future__ import annotations

import logging
import os
import warnings
from typing import TYPE_CHECKING

from penstock.cache.base.machine import refuse_shortage
from penstock.cache.errors import (
    ConfigError,
    CorruptShardError,
    IndexChangedError,
    OtherVersionError,
    PenstockWarning,
)
from penstock.readers.files.names import printable
from penstock.readers.formats.local_files import REINDEX
from penstock.readers.formats.sidecar_file import is_sidecar
from penstock.readers.index.manifest_file import MANIFEST, MAX_READ_BYTES, read_manifest

if TYPE_CHECKING:
    from penstock.readers.index.manifest import Manifest
    from penstock.readers.origin.origin import Origin

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
