"""The cache that users make: a folder of the node's own disk, and a limit.

What is wrong with the arguments is an error; what is wrong with the disk never ends a job.
"""

from __future__ import annotations

import os
import tempfile
import weakref
from typing import TYPE_CHECKING, Any

from penstock.cache.base.folders import remove_own_folder
from penstock.cache.base.peer_settings import Peers
from penstock.cache.base.sizes import format_size, parse_size
from penstock.cache.disk.access import FolderAccess
from penstock.cache.disk.membership import Membership
from penstock.cache.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from penstock.cache.disk.lookup import Lookup
    from penstock.cache.disk.shelf import Shelf


class DiskCache:
    """A folder on a local disk that keeps remote objects, shared by every process of a node.

    path: the folder; it is made (mode) when it is first used. max_bytes: int or such as "1.5TB";
    never passed, by any number of processes and jobs. Several datasets and jobs may share one
    folder; all give the same limit. peers: has the nodes of a job serve one another what they hold.

    Raises ConfigError here for arguments that can't be; at first use for a folder on a network
    file system, of a newer format, or in use with another limit.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        max_bytes: int | str,
        mode: int = 0o700,
        peers: Peers | None = None,
    ) -> None:
        if not isinstance(path, str | os.PathLike) or not os.fspath(path):
            raise ConfigError(f"cache: got {path!r}, wanted the path of a folder on a local disk.")
        if not isinstance(peers, Peers | None):
            raise ConfigError(f'peers: got {peers!r}, wanted Peers("HOST:PORT") or None.')
        self.peers = peers
        self._begin(os.path.abspath(os.fspath(path)), parse_size(max_bytes, what="max_bytes"), mode)

    def _begin(self, path: str, max_bytes: int | None, mode: int) -> None:
        self.path = path
        self._max_bytes = max_bytes
        self._mode = mode
        self._access = FolderAccess(path, max_bytes=max_bytes, mode=mode)
        self._remove: weakref.finalize[..., DiskCache] | None = None

    @classmethod
    def at(cls, path: str | os.PathLike[str], *, peers: Peers | None = None) -> DiskCache:
        """The cache in a folder with the limit that it has; a new one gets 90 % of what is free."""
        return _unlimited(cls(path, max_bytes=1, peers=peers))

    @classmethod
    def temporary(cls) -> DiskCache:
        """Make a cache in a folder of its own, removed at close() or at the interpreter's exit."""
        path = tempfile.mkdtemp(prefix="penstock-")
        cache = cls.at(path)
        cache._remove = weakref.finalize(cache, remove_own_folder, path, os.getpid())
        return cache

    @property
    def is_temporary(self) -> bool:
        """Whether close() removes it."""
        return self._remove is not None

    @property
    def max_bytes(self) -> int | None:
        """The limit; None before the first use of a cache that takes the folder's own."""
        shelf = self._access.shelf
        return shelf.max_bytes if shelf is not None else self._max_bytes

    @property
    def mode(self) -> int:
        """The mode of the folder."""
        return self._mode

    def __repr__(self) -> str:
        limit = format_size(self.max_bytes) if self.max_bytes else "the folder's own"
        return f"DiskCache({self.path!r}, max_bytes={limit!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        """A spawned worker opens the folder anew."""
        return _again, (self.path, self._max_bytes, self._mode, self.peers)

    def open(self) -> None:
        """Open the folder now instead of at first use. Raises ConfigError; a disk that fails is one
        PenstockWarning."""
        self._access.open()

    def use(self, act: Callable[[Shelf], Any]) -> Any:
        """Return act(shelf), or None where the folder can't be written. Raises what act raises
        beside what a disk does."""
        return self._access.use(act)

    def look(self, act: Callable[[Lookup], Any]) -> Any:
        """Return act(lookup) for what a folder may still do that is full or can't be written; None
        where it can't be read. Raises as `use` does."""
        return self._access.look(act)

    def give_up(self, error: BaseException, *, reads: bool = False) -> None:
        """Write nothing for a while, and say so once. reads: read nothing, either."""
        self._access.give_up(error, reads=reads)

    @property
    def can_be_used(self) -> bool:
        """Whether the folder opens, and wasn't given up a moment ago."""
        return bool(self.use(lambda _: True))

    def folder(self, name: str, key: str) -> str | None:
        """Path of the folder NAME/KEY inside for other modules' files (indexes), NAME made; of a
        cache that can't be written only what is there. None if there is none."""

        def make(shelf: Shelf) -> str:
            return shelf.layout.top.folder(name, make=True).beneath(key)

        def find(lookup: Lookup) -> str | None:
            top = lookup.layout.top
            return top.folder(name).beneath(key) if top.is_folder(name) else None

        found: str | None = self.use(make) or self.look(find)
        return found

    def join(
        self, group: str, *, label: str, keys: Sequence[str], sizes: Iterable[int]
    ) -> Membership:
        """Make a live job of this process, whose share of the limit is pinned until leave().

        group: of the dataset. label: for people. keys, sizes: blobs that this node reads in an
        epoch, and their bytes.
        """
        return Membership(self.use, group=group, label=label, keys=keys, sizes=sizes)

    def close(self) -> None:
        """Let the folder go; open blobs stay readable. Safe to call twice."""
        self._access.close()
        if self._remove is not None:
            self._remove()


def _again(path: str, max_bytes: int | None, mode: int, peers: Peers | None) -> DiskCache:
    cache = DiskCache(path, max_bytes=max_bytes or 1, mode=mode, peers=peers)
    return cache if max_bytes is not None else _unlimited(cache)


def _unlimited(cache: DiskCache) -> DiskCache:
    """The same cache with the limit that its folder has."""
    cache._begin(cache.path, None, cache._mode)
    return cache
