"""What dead processes left in a cache folder: their jobs, and fills that nobody works on."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from penstock.cache.disk.fill_marks import map_name, part_name
from penstock.cache.disk.fills import discard, fill_disk_bytes
from penstock.cache.disk.pieces import PIECE_BYTES

if TYPE_CHECKING:
    from penstock.cache.base.locks import ByteLocks
    from penstock.cache.disk.blob_table import BlobRow
    from penstock.cache.disk.catalogue import Catalogue
    from penstock.cache.disk.keys import KeyLocks
    from penstock.cache.disk.layout import Layout

PRIVATE = "private"
"""The group of files that one process keeps for itself: nobody goes on with those of a dead one."""


class Leftovers:
    """Leftovers finds what dead processes left, by locks that nobody holds, and removes it.

    inodes: the readers' locks, to be tried exclusively.
    """

    def __init__(
        self, layout: Layout, catalogue: Catalogue, *, keys: KeyLocks, inodes: ByteLocks
    ) -> None:
        self._layout, self._catalogue = layout, catalogue
        self._keys, self._inodes = keys, inodes

    def forget_dead_jobs(self) -> int:
        """Forget jobs whose process is gone; returns how many."""
        dead = 0
        probe = self._layout.locks("jobs")
        try:
            for job in self._catalogue.jobs.rows():
                if probe.lock(job.id + 1):
                    probe.unlock(job.id + 1)
                    self._catalogue.jobs.remove(job.id)
                    dead += 1
        finally:
            probe.close()
        return dead

    def remove_fills(self) -> int:
        """Remove all fills that nobody works on; returns how many."""
        with self._catalogue.writing():
            return sum(map(self.remove_fill, self._catalogue.blobs.rows(state="fill")))

    def remove_private(self) -> int:
        """Remove what dead processes kept for themselves; returns how many files."""
        with self._catalogue.writing():
            rows = [row for row in self._catalogue.blobs.rows(state="fill") if row.group == PRIVATE]
            return sum(map(self.remove_fill, rows))

    def remove_fill(self, row: BlobRow) -> bool:
        """Remove a fill and its row, unless someone works on it."""
        fills = self._layout.fills
        with self._keys.trying(row.key) as is_free:
            if not is_free:
                return False
            with contextlib.suppress(FileNotFoundError):
                inode = fills.stat(part_name(row.key)).st_ino
                if not self._inodes.lock(inode):
                    return False
                self._inodes.unlock(inode)  # nobody new can come: the key is ours
            discard(fills, row.key)
            if self._layout.blobs.has(row.key):
                return False
            self._catalogue.blobs.remove(row.key)
            return True

    def clear_file(self, name: str) -> int:
        """Enter a fill that the books don't know, or remove a file that is only a part of one; how
        many things were put right."""
        key = name.partition(".")[0]
        fills = self._layout.fills
        try:
            found = fills.stat(name)
        except FileNotFoundError:
            return 0
        is_fill = fills.has(part_name(key)) and fills.has(map_name(key))
        with self._keys.trying(key) as is_free:
            if is_free and self._inodes.lock(found.st_ino):
                self._inodes.unlock(found.st_ino)
                if not is_fill or self._layout.blobs.has(key):
                    return int(fills.remove(name))
        if name != part_name(key) or self._catalogue.blobs.row(key) is not None:
            return 0
        # The next who wants it goes on with it.
        self._catalogue.blobs.adopt(
            key,
            size_bytes=found.st_size,
            disk_bytes=fill_disk_bytes(found.st_size, found.st_size // PIECE_BYTES + 1),
            state="fill",
            used_s=found.st_mtime,
        )
        return 1
