"""Blobs that nobody finds any more, but someone may still have mapped, so that they take room."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from penstock.cache.disk.fill_marks import part_name
from penstock.cache.disk.fills import discard

if TYPE_CHECKING:
    from penstock.cache.base.folders import Folder
    from penstock.cache.base.locks import ByteLocks
    from penstock.cache.disk.catalogue import Catalogue
    from penstock.cache.disk.keys import KeyLocks
    from penstock.cache.disk.layout import Layout


class Trash:
    """The Trash has blobs that nobody finds any more, until nobody has them mapped.

    inodes: the readers' locks, to be tried exclusively.
    """

    def __init__(
        self, layout: Layout, catalogue: Catalogue, *, keys: KeyLocks, inodes: ByteLocks
    ) -> None:
        self._layout, self._catalogue = layout, catalogue
        self._keys, self._inodes = keys, inodes

    def move(self, key: str, folder: Folder, name: str) -> None:
        """Move a blob's file here; in a transaction. Raises FileNotFoundError."""
        new = f"{key}-{folder.stat(name).st_ino}"
        folder.rename(name, self._layout.trash, new)
        self._catalogue.blobs.to_trash(key, new)

    def empty(self) -> None:
        """Remove what nobody has mapped any more."""
        trash = self._layout.trash
        for name in self._layout.names("trash"):
            try:
                inode = trash.stat(name).st_ino
            except FileNotFoundError:
                continue
            if self._inodes.lock(inode):
                trash.remove(name)
                self._inodes.unlock(inode)
                self._catalogue.blobs.remove(name)

    def drop(self, key: str, *, inode: int | None = None) -> bool:
        """Forget a blob whose bytes are wrong; those who have it mapped keep their map. inode: of
        the wrong file, so that another's fresh one stays. False if it wasn't there."""
        dropped = False
        with self._keys.holding(key), self._catalogue.writing():
            at = self._layout
            for folder, name in (
                (at.blobs, key),
                (at.fills, part_name(key)),
                (at.unverified, key),
            ):
                with contextlib.suppress(FileNotFoundError):
                    if inode not in (None, folder.stat(name).st_ino):
                        continue
                    self.move(key, folder, name)
                    dropped = True
            if dropped:
                discard(at.fills, key)
                self._catalogue.blobs.remove(key)
            self.empty()
        return dropped
