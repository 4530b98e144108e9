"""Keep a cache folder within its limit: reserve space for fills, and evict blobs to free some.

Space for a fill is reserved in the catalogue before any byte of it is fetched. Eviction removes the
jobs and fills of dead processes first, then blobs that no live job pins, least recently used first.
A removed blob that a process still has mapped uses space until it is unmapped; it stays in the
trash until its readers' locks are free.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import time
from typing import TYPE_CHECKING

from penstock.cache.base import format_size
from penstock.cache.disk.catalogue import BlobRow
from penstock.cache.disk.fill_files import discard_fill, fill_disk_bytes
from penstock.cache.disk.fill_marks import map_name, part_name
from penstock.cache.disk.pieces import PIECE_BYTES
from penstock.cache.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from penstock.cache.base import BlobSource, ByteLocks, Folder
    from penstock.cache.disk.catalogue import Catalogue
    from penstock.cache.disk.folder_layout import FolderLayout, KeyLocks
    from penstock.cache.disk.lookup import UseLog

# Bytes of the catalogue's log, the folders and the small files, in addition to the blobs.
SLACK_BYTES = 320 * 2**10
_LEAST_OWN_BYTES = 512 * 2**10
_ENTRY_BYTES = 128  # of a folder, for each blob
_FREE_SHARE = 0.9


class SpaceLimit:
    """The limit of a cache folder, and the bytes of it that blobs may use.

    max_bytes: the limit; 0 before `agree`.
    """

    def __init__(self, layout: FolderLayout, catalogue: Catalogue) -> None:
        self._layout, self._catalogue = layout, catalogue
        self._others_bytes = layout.others_bytes()
        self.max_bytes = 0

    def agree(self, wanted: int | None, *, alone: bool) -> str | None:
        """Adopt the folder's recorded limit, or record one; call it in a transaction.

        wanted: the new limit; None adopts the recorded limit, or else most of the free bytes.
        alone: True if no other process has the folder open. Return a description of damage, or
        None. Raises ConfigError for a limit that differs from that of running jobs.
        """
        numbers, damage = self._catalogue.numbers, None
        try:
            known = numbers.get("max_bytes")
        except sqlite3.DatabaseError:
            known, damage = None, "its limit"
        noted = self._layout.limit_bytes
        if known is None:
            known = noted
            if known is not None:
                numbers.set("max_bytes", known)
        if known is not None and wanted in (None, known):
            if noted != known:
                self._note(known)
            self.max_bytes = known
            return damage
        if wanted is None:
            wanted = int(self._free_bytes() * _FREE_SHARE)
        if known is not None and not alone:
            raise ConfigError(
                f"{self._layout.root}: max_bytes: got {format_size(wanted)}, but running jobs use "
                f"this folder with {format_size(known)}; a folder has one limit. Pass that limit, "
                "pass another folder, or wait until the jobs end."
            )
        numbers.set("max_bytes", wanted)
        self._note(wanted)
        self.max_bytes = wanted
        return damage

    def _note(self, max_bytes: int) -> None:
        """Record the limit outside the catalogue, too: if that is lost, a process without a limit
        of its own would use most of the disk. Errors are ignored, because a cache on a full disk
        is still usable."""
        with contextlib.suppress(OSError):
            self._layout.note_limit(max_bytes)

    @property
    def budget_bytes(self) -> int:
        """The bytes that blobs may use: the limit minus the folder's own files."""
        return max(0, self.max_bytes - self._own_bytes())

    @property
    def steady_budget_bytes(self) -> int:
        """A budget ≤ `budget_bytes` that stays constant while the folder grows a little, so that
        the pinned set doesn't change with every blob."""
        own = max(_LEAST_OWN_BYTES, 1 << (self._own_bytes() - 1).bit_length())
        return max(0, self.max_bytes - own)

    def measure_others(self) -> None:
        """Measure again how many bytes other modules store in the folder."""
        self._others_bytes = self._layout.others_bytes()

    def _own_bytes(self) -> int:
        blobs = sum(self._catalogue.blobs.counts().values())
        own = self._catalogue.own_bytes() + self._others_bytes
        return own + SLACK_BYTES + blobs * _ENTRY_BYTES

    def _free_bytes(self) -> int:
        found = os.statvfs(self._layout.root)
        return found.f_bavail * found.f_frsize


class Trash:
    """The removed blobs, which stay until no process has them mapped.

    inodes: the readers' locks, which this class tries to acquire exclusively.
    """

    def __init__(
        self, layout: FolderLayout, catalogue: Catalogue, *, keys: KeyLocks, inodes: ByteLocks
    ) -> None:
        self._layout, self._catalogue = layout, catalogue
        self._keys, self._inodes = keys, inodes

    def move(self, key: str, folder: Folder, name: str) -> None:
        """Move a blob's file to the trash; call it in a transaction. Raises FileNotFoundError."""
        new = f"{key}-{folder.stat(name).st_ino}"
        folder.rename(name, self._layout.trash, new)
        self._catalogue.blobs.to_trash(key, new)

    def empty(self) -> None:
        """Remove the files that no process has mapped any more."""
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
        """Remove a blob whose bytes are wrong; existing maps stay valid. inode: remove only the
        file with this inode, not a newer one. Return False if there was none."""
        dropped = False
        with self._keys.holding(key), self._catalogue.writing():
            at = self._layout
            for folder, name in ((at.blobs, key), (at.fills, part_name(key)), (at.unverified, key)):
                with contextlib.suppress(FileNotFoundError):
                    if inode not in (None, folder.stat(name).st_ino):
                        continue
                    self.move(key, folder, name)
                    dropped = True
            if dropped:
                discard_fill(at.fills, key)
                self._catalogue.blobs.remove(key)
            self.empty()
        return dropped


PRIVATE = "private"
"""The group of files that only one process uses: no other process continues their fill."""


class DeadProcessFiles:
    """The jobs and files of dead processes, whose locks are free.

    inodes: the readers' locks, which this class tries to acquire exclusively.
    """

    def __init__(
        self, layout: FolderLayout, catalogue: Catalogue, *, keys: KeyLocks, inodes: ByteLocks
    ) -> None:
        self._layout, self._catalogue = layout, catalogue
        self._keys, self._inodes = keys, inodes

    def forget_dead_jobs(self) -> int:
        """Delete the jobs of dead processes; return their number."""
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
        """Remove all fills that no process works on; return their number."""
        with self._catalogue.writing():
            return sum(map(self.remove_fill, self._catalogue.blobs.rows(state="fill")))

    def remove_private(self) -> int:
        """Remove the private files of dead processes; return their number."""
        with self._catalogue.writing():
            rows = [row for row in self._catalogue.blobs.rows(state="fill") if row.group == PRIVATE]
            return sum(map(self.remove_fill, rows))

    def remove_fill(self, row: BlobRow) -> bool:
        """Remove a fill and its row, unless a process works on it."""
        fills = self._layout.fills
        with self._keys.trying(row.key) as is_free:
            if not is_free:
                return False
            with contextlib.suppress(FileNotFoundError):
                inode = fills.stat(part_name(row.key)).st_ino
                if not self._inodes.lock(inode):
                    return False
                self._inodes.unlock(inode)  # holding the key keeps new readers out
            discard_fill(fills, row.key)
            if self._layout.blobs.has(row.key):
                return False
            self._catalogue.blobs.remove(row.key)
            return True

    def clear_file(self, name: str) -> int:
        """Record a fill that the catalogue doesn't list, or remove an incomplete one; return the
        number of corrections, 0 or 1."""
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
        # The next reader of the blob continues the fill.
        self._catalogue.blobs.adopt(
            key,
            size_bytes=found.st_size,
            disk_bytes=fill_disk_bytes(found.st_size, found.st_size // PIECE_BYTES + 1),
            state="fill",
            used_s=found.st_mtime,
        )
        return 1


class Evictor:
    """The part of a cache folder that frees space by removing what no live job pins.

    It removes fills that no process works on first, then whole blobs that no process has mapped,
    least recently used first. inodes: the readers' locks, which this class tries to acquire
    exclusively. evicted: the number of blobs that were removed.
    """

    def __init__(
        self,
        layout: FolderLayout,
        catalogue: Catalogue,
        *,
        limit: SpaceLimit,
        uses: UseLog,
        dead_files: DeadProcessFiles,
        trash: Trash,
        inodes: ByteLocks,
    ) -> None:
        self._layout, self._blobs = layout, catalogue.blobs
        self._catalogue = catalogue
        self._limit, self._uses = limit, uses
        self._dead_files, self._trash = dead_files, trash
        self._inodes = inodes
        self.evicted = 0

    def make_space(self, need_bytes: int, *, group: str | None) -> bool:
        """Return True if need_bytes are free, evicting blobs if necessary; call it in a
        transaction. group: claim this group's share, even from blobs that readers of other groups
        have mapped."""
        budget = self._limit.budget_bytes
        if self._blobs.used_bytes + need_bytes <= budget:
            return True
        if need_bytes > budget:
            return False
        self._dead_files.forget_dead_jobs()
        self._trash.empty()
        for clean in (self._evict_fills, self._evict_whole):
            if self._blobs.used_bytes + need_bytes > budget:
                clean(budget - need_bytes)
        free = budget - self._blobs.used_bytes
        if group is not None and free < need_bytes:
            owed = self._catalogue.jobs.owed_bytes(group)
            self._evict_mapped(max(need_bytes, owed) - free)
        return free >= need_bytes

    def evict_to(self, most_bytes: int, *, group: str | None = None) -> tuple[int, int]:
        """Evict blobs that no job pins or reads until at most `most_bytes` are left (of a group, if
        given). Return the evicted (blobs, bytes)."""
        self._uses.flush()
        with self._catalogue.writing():
            self._dead_files.forget_dead_jobs()
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
                self._dead_files.remove_fill(row)

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
                gone = self._evict(row) if is_whole else self._dead_files.remove_fill(row)
                left -= row.disk_bytes if gone else 0

    def _evict(self, row: BlobRow) -> bool:
        """Remove a whole blob, unless a process has it mapped."""
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

    def _evict_mapped(self, short_bytes: int) -> None:
        """Move blobs that no job pins, but some process has mapped, to the trash, where no reader
        finds them; their space is free once they are unmapped. Otherwise a job that maps more than
        its share would keep it forever, because each batch maps its blobs again."""
        in_trash = sum(row.disk_bytes for row in self._blobs.rows(state="trash"))
        blobs = self._layout.blobs
        published = (row for row in self._blobs.victims() if blobs.has(row.key))
        for row in choose_victims(published, short_bytes - in_trash):
            with contextlib.suppress(FileNotFoundError):
                self._trash.move(row.key, blobs, row.key)


def choose_victims(rows: Iterable[BlobRow], short_bytes: int) -> Iterator[BlobRow]:
    """Yield data blobs in the given order until they sum up to `short_bytes`. Pure."""
    for row in rows:
        if short_bytes <= 0:
            return
        if row.kept:  # manifests and sidecars are small, and every read needs them
            continue
        yield row
        short_bytes -= row.disk_bytes


_FULL_S = 1.0  # a search for free space costs time, so it isn't repeated at once


class Reservations:
    """The reservation of space for fills. After a failed search it searches again only after
    _FULL_S."""

    def __init__(self, catalogue: Catalogue, evictor: Evictor) -> None:
        self._catalogue, self._evictor = catalogue, evictor
        self._full_until_s = 0.0

    def reserve(
        self, source: BlobSource, *, group: str, disk_bytes: int, insist: bool, kept: bool = False
    ) -> bool:
        """Record a fill in the catalogue if its space is free or can be freed; return False if not.
        insist: search for space even if a recent search found none."""
        if not insist and time.monotonic() < self._full_until_s:
            return False
        blobs = self._catalogue.blobs
        with self._catalogue.writing():
            row = blobs.row(source.key)
            need = disk_bytes - (row.disk_bytes if row is not None else 0)
            if not self._evictor.make_space(need, group=group if insist else None):
                self._full_until_s = time.monotonic() + _FULL_S
                return False
            blobs.add(
                BlobRow(
                    key=source.key,
                    group=group,
                    uri=source.uri,
                    size_bytes=source.size_bytes,
                    disk_bytes=disk_bytes,
                    state="fill",
                    kept=kept,
                )
            )
        return True
