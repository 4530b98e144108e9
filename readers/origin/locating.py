"""Open the origin of any URL. No other code decides how a dataset is reached."""

from __future__ import annotations

import os
import stat
from typing import TYPE_CHECKING, Any

from penstock.cache import FetchError
from penstock.readers.origin.arrangement import DEFAULT_ARRANGEMENT, Arrangement
from penstock.readers.origin.origin import LocalFolder, Origin, Url, local_path, status_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from penstock.readers.origin.scratch import Scratch


def locate(
    url: Url,
    *,
    storage_options: Mapping[str, Any] | None,
    scratch: Scratch,
    filesystem: Any | None = None,
    arrangement: Arrangement = DEFAULT_ARRANGEMENT,
) -> Origin:
    """Open the origin of a URL. filesystem: an fsspec file system; url is then a path in it.
    arrangement: the user's arguments on how the files make up samples.

    If a URL may name a file or a folder (x.parquet), the store is asked. A local path on a network
    file system is read through the cache if the user gave one.

    Raises ConfigError, MissingDependencyError, FetchError.
    """
    if filesystem is None and not scratch.is_kept:  # else the path may be a network mount
        path = None if isinstance(url, list | tuple) else local_path(url)
        status = status_of(path) if path and b"\0" not in path else None
        if path is not None and status is not None and stat.S_ISDIR(status.st_mode):
            return LocalFolder(path, arrangement=arrangement)
    from penstock.readers.origin.dataset_place import place_of
    from penstock.readers.origin.remote_folder import RemoteFolder, StoreAccess

    place = place_of(url, is_path=filesystem is not None)
    root, selection = place.root, place.selection
    if isinstance(root, bytes):
        mount = os.path.abspath(root)
        if scratch.is_kept:
            from penstock.cache.base import is_network

            if is_network(os.fsdecode(mount)):
                from fsspec.implementations.local import LocalFileSystem

                access = StoreAccess(options={}, scratch=scratch, filesystem=LocalFileSystem())
                mounted = RemoteFolder(os.fsdecode(mount), access, selection, arrangement)
                mounted.folder = mount
                return mounted
        return LocalFolder(root, selection, arrangement)
    access = StoreAccess(options=storage_options or {}, scratch=scratch, filesystem=filesystem)
    found = RemoteFolder(root, access, selection, arrangement)
    if place.may_be_folder and selection is not None and not isinstance(url, list | tuple):
        try:
            is_file = found.remote.find(selection.parts[0]) is not None
        except FetchError:  # reading the file raises the precise error
            is_file = True
        if not is_file:
            found.close()
            return RemoteFolder(os.fsdecode(url), access, None, arrangement)
    return found
