"""Making room: which blobs go, in which order, and taking them out."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from penstock.cache.base.locks import ByteLocks
    from penstock.cache.disk.blob_table import BlobRow
    from penstock.cache.disk.catalogue import Catalogue
    from penstock.cache.disk.layout import Layout
    from penstock.cache.disk.leftovers import Leftovers
    from penstock.cache.disk.room import Room
    from penstock.cache.disk.trash import Trash
    from penstock.cache.disk.uses import UseLog


class Evictor:
    """An Evictor makes room by taking out what no live job pins.

    First go fills that nobody works on, then whole blobs that nobody has mapped, least recently
    used first. inodes: the readers' locks, to be tried exclusively; evicted: blobs that went.
    """

    def __init__(
        self,
        layout: Layout,
        catalogue: Catalogue,
        *,
        room: Room,
        uses: UseLog,
        leftovers: Leftovers,
        trash: Trash,
        inodes: ByteLocks,
    ) -> None:
        self._layout, self._blobs = layout, catalogue.blobs
        self._catalogue = catalogue
        self._room, self._uses = room, uses
        self._leftovers, self._trash = leftovers, trash
        self._inodes = inodes
        self.evicted = 0

    def make_room(self, need_bytes: int, *, group: str | None) -> bool:
        """Whether so many bytes more fit, now or by taking others out; in a transaction. group:
        whose share is to be had, by taking it from those who have more mapped."""
        budget = self._room.budget_bytes
        if self._blobs.used_bytes + need_bytes <= budget:
            return True
        if need_bytes > budget:
            return False
        self._leftovers.forget_dead_jobs()
        self._trash.empty()
        for clean in (self._evict_fills, self._evict_whole):
            if self._blobs.used_bytes + need_bytes > budget:
                clean(budget - need_bytes)
        free = budget - self._blobs.used_bytes
        if group is not None and free < need_bytes:
            owed = self._catalogue.jobs.owed_bytes(group)
            self._take_from_readers(max(need_bytes, owed) - free)
        return free >= need_bytes

    def evict_to(self, most_bytes: int, *, group: str | None = None) -> tuple[int, int]:
        """Take out blobs that no job pins or reads until at most so many bytes are left (of a
        group, if given): (blobs, bytes) that went."""
        self._uses.flush()
        with self._catalogue.writing():
            self._leftovers.forget_dead_jobs()
            self._trash.empty()
            before, blobs = self._blobs.used_bytes, self.evicted
            if group is None:
                self._evict_fills(most_bytes)
                self._evict_whole(most_bytes)
            else:
                self._evict_group(group, most_bytes)
            return self.evicted - blobs, before - self._blobs.used_bytes

    def _evict_fills(self, most_bytes: int) -> None:
        for row in self._blobs.rows(state="fill"):
            if self._blobs.used_bytes <= most_bytes:
                return
            if not row.pinned:
                self._leftovers.remove_fill(row)

    def _evict_whole(self, most_bytes: int) -> None:
        self._uses.flush()
        for row in self._blobs.victims():
            if self._blobs.used_bytes <= most_bytes:
                return
            self._evict(row)

    def _evict_group(self, group: str, most_bytes: int) -> None:
        rows = [row for row in self._blobs.rows() if row.group == group]
        left = sum(row.disk_bytes for row in rows)
        for row in rows:
            if left > most_bytes and row.state != "trash" and not row.pinned:
                is_whole = row.state == "ready"
                gone = self._evict(row) if is_whole else self._leftovers.remove_fill(row)
                left -= row.disk_bytes if gone else 0

    def _evict(self, row: BlobRow) -> bool:
        """Remove a whole blob, unless someone has it mapped."""
        for folder in (self._layout.blobs, self._layout.unverified):
            with contextlib.suppress(FileNotFoundError):
                inode = folder.stat(row.key).st_ino
                if not self._inodes.lock(inode):
                    return False
                try:
                    self.evicted += folder.remove(row.key)
                finally:
                    self._inodes.unlock(inode)
        self._blobs.remove(row.key)
        return True

    def _take_from_readers(self, short_bytes: int) -> None:
        """Move blobs that no job pins, but someone has mapped, to the trash: nobody finds them any
        more, and their room is free when they are let go. A job that has more mapped than its share
        would else keep it for ever, as all that it reads is mapped anew with each batch."""
        in_trash = sum(row.disk_bytes for row in self._blobs.rows(state="trash"))
        blobs = self._layout.blobs
        there = (row for row in self._blobs.victims() if blobs.has(row.key))
        for row in enough(there, short_bytes - in_trash):
            with contextlib.suppress(FileNotFoundError):
                self._trash.move(row.key, blobs, row.key)


def enough(rows: Iterable[BlobRow], short_bytes: int) -> Iterator[BlobRow]:
    """Choose data blobs from the first on, until they take so many bytes together. Pure."""
    for row in rows:
        if short_bytes <= 0:
            return
        if row.kept:  # manifests and sidecars are small, and needed to read at all
            continue
        yield row
        short_bytes -= row.disk_bytes
