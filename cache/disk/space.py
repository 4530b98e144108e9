"""Keep a cache folder within its limit: reserve space for fills, and evict blobs to free some.

Space for a fill is reserved in the catalogue before any byte of it is fetched. Eviction removes the
jobs and fills of dead processes first, then blobs that no live job pins, least recently used first.
A removed blob that a process still has mapped uses space until it is unmapped; it stays in the
trash until its readers' locks are free.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import sqlite3
import time
from typing import TYPE_CHECKING

from penstock.cache.base import Folder, format_size
from penstock.cache.disk.fill_files import discard_fill, fill_disk_bytes
from penstock.cache.disk.folder_layout import FolderLayout, map_name, part_name
from penstock.cache.errors import ConfigError

if TYPE_CHECKING:
    from penstock.cache.disk.catalogue import BlobRow, Catalogue, JobRow

PRIVATE = "private"
"""The group of files that only one process uses: no other process continues their fill."""

# Bytes of the catalogue's log, the folders and the small files, in addition to the blobs.
SLACK_BYTES = 320 * 2**10
_LEAST_OWN_BYTES = 512 * 2**10
_ENTRY_BYTES = 128  # of a folder, for each blob
_FREE_SHARE = 0.9
_FULL_S = 1.0  # a search for free space costs time, so it isn't repeated at once
_MOST_NOTED = 256  # uses of blobs that aren't in the catalogue yet


class Space:
    """The limit of a cache folder, and what is removed to stay below it.

    max_bytes: the limit; 0 before `agree`. others_bytes: the bytes that other modules stored in the
    folder when they were last measured.
    """

    def __init__(self, layout: FolderLayout, catalogue: Catalogue) -> None:
        self._layout, self._catalogue = layout, catalogue
        self._inodes = layout.locks("readers")  # only tried, and only in a transaction
        self.others_bytes = layout.others_bytes()
        self._full_until_s = 0.0
        self._used_s: dict[str, float] = {}
        self.max_bytes = 0

    def close(self) -> None:
        """Release the locks. Safe to call twice."""
        self._inodes.close()

    # -- the limit

    def agree(self, wanted: int | None, *, alone: bool) -> None:
        """Adopt the folder's recorded limit, or record one; call it in a transaction.

        wanted: the new limit; None adopts the recorded limit, or else most of the free bytes.
        alone: True if no other process has the folder open. Raises ConfigError for a limit that
        differs from that of running jobs.

        The limit is recorded outside the catalogue, too: if that is lost, a process without a limit
        of its own would use most of the disk. Errors of that file are ignored, because a cache on a
        full disk is still usable.
        """
        known, noted = None, self._layout.limit_bytes
        try:
            known = self._catalogue.number("max_bytes")
        except sqlite3.DatabaseError:
            self._layout.damage.append("its limit")
        limit = noted if known is None else known
        if limit is None or wanted not in (None, limit):
            if wanted is None:
                disk = os.statvfs(self._layout.root)
                wanted = int(disk.f_bavail * disk.f_frsize * _FREE_SHARE)
            if limit is not None and not alone:
                raise ConfigError(
                    f"{self._layout.root}: max_bytes: got {format_size(wanted)}, but running jobs "
                    f"use this folder with {format_size(limit)}; a folder has one limit. Pass that "
                    "limit, pass another folder, or wait until the jobs end."
                )
            limit = wanted
        if limit != known:
            self._catalogue.set_number("max_bytes", limit)
        if limit != noted:
            with contextlib.suppress(OSError):
                self._layout.note_limit(limit)
        self.max_bytes = limit

    @property
    def budget_bytes(self) -> int:
        """The bytes that blobs may use: the limit minus the folder's own files."""
        return max(0, self.max_bytes - self.own_bytes)

    @property
    def steady_budget_bytes(self) -> int:
        """A budget ≤ `budget_bytes` that stays constant while the folder grows a little, so that
        the pinned set doesn't change with every blob."""
        own = max(_LEAST_OWN_BYTES, 1 << (self.own_bytes - 1).bit_length())
        return max(0, self.max_bytes - own)

    @property
    def own_bytes(self) -> int:
        """The bytes of the folder's own files, and of other modules' files in it."""
        blobs = sum(self._catalogue.counts().values())
        own = self._catalogue.own_bytes() + self.others_bytes
        return own + SLACK_BYTES + blobs * _ENTRY_BYTES

    # -- the last uses by this process, many of which are written to the catalogue at once

    def note_use(self, key: str) -> None:
        """Record that a blob is used now. Errors of the catalogue are ignored."""
        self._used_s[key] = time.time()
        if len(self._used_s) >= _MOST_NOTED:
            with contextlib.suppress(OSError, sqlite3.Error):
                self.flush_uses()

    def flush_uses(self) -> None:
        """Write the last uses to the catalogue. Raises OSError, sqlite3.Error."""
        if self._used_s:
            used_s, self._used_s = self._used_s, {}
            self._catalogue.touch(used_s)

    # -- removed blobs, which stay in the trash until no process has them mapped

    def drop(self, key: str, *, inode: int | None = None) -> bool:
        """Remove a blob whose bytes are wrong; existing maps stay valid. inode: remove only the
        file with this inode, not a newer one. Return False if there was none."""
        dropped = False
        with self._layout.holding(key), self._catalogue.writing():
            for folder, name in self._layout.places(key):
                with contextlib.suppress(FileNotFoundError):
                    found = folder.stat(name).st_ino
                    if inode in (None, found):
                        self._move_to_trash(folder, name, key=key, inode=found)
                        dropped = True
            if dropped:
                discard_fill(self._layout.fills, key)
                self._catalogue.remove(key)
            self.empty_trash()
        return dropped

    def _move_to_trash(self, folder: Folder, name: str, *, key: str, inode: int) -> None:
        new = f"{key}-{inode}"
        folder.rename(name, self._layout.trash, new)
        self._catalogue.to_trash(key, new)

    def empty_trash(self) -> None:
        """Remove the files that no process has mapped any more; call it in a transaction."""
        for name in self._layout.names("trash"):
            if self._remove_unmapped(self._layout.trash, name):
                self._catalogue.remove(name)

    def _remove_unmapped(self, folder: Folder, name: str) -> bool:
        """Remove a file, unless a process has it mapped; return False then."""
        with contextlib.suppress(FileNotFoundError):
            inode = folder.stat(name).st_ino
            if not self._inodes.lock(inode):
                return False
            try:
                folder.remove(name)
            finally:
                self._inodes.unlock(inode)
        return True

    # -- jobs and fills of dead processes, whose locks are free

    def forget_dead_jobs(self) -> int:
        """Delete the jobs of dead processes; return their number."""
        _, dead = live_and_dead_jobs(self._layout, self._catalogue)
        for job in dead:
            self._catalogue.remove_job(job.id)
        return len(dead)

    def remove_fills(self, *, group: str | None = None) -> int:
        """Remove the fills that no process works on, all or those of a group; return their
        number."""
        with self._catalogue.writing():
            fills = self._catalogue.blobs(state="fill")
            return sum(self.remove_fill(row.key) for row in fills if group in (None, row.group))

    def remove_fill(self, key: str) -> bool:
        """Remove a fill and its row, unless a process works on it; call it in a transaction."""
        fills = self._layout.fills
        with self._layout.trying(key) as is_free:
            if not is_free:
                return False
            with contextlib.suppress(FileNotFoundError):
                inode = fills.stat(part_name(key)).st_ino
                if not self._inodes.lock(inode):
                    return False
                self._inodes.unlock(inode)  # holding the key keeps new readers out
            discard_fill(fills, key)
            if self._layout.blobs.has(key):
                return False
            self._catalogue.remove(key)
            return True

    def record_fill(self, name: str) -> int:
        """Record a fill that the catalogue doesn't list, or remove an incomplete one; return the
        number of corrections, 0 or 1. name: of one of its files."""
        key = name.partition(".")[0]
        fills = self._layout.fills
        try:
            found = fills.stat(name)
        except FileNotFoundError:
            return 0
        is_fill = fills.has(part_name(key)) and fills.has(map_name(key))
        with self._layout.trying(key) as is_free:
            if is_free and self._inodes.lock(found.st_ino):
                self._inodes.unlock(found.st_ino)
                if not is_fill or self._layout.blobs.has(key):
                    return int(fills.remove(name))
        if name != part_name(key) or self._catalogue.blob(key) is not None:
            return 0
        # The next reader of the blob continues the fill.
        disk_bytes = fill_disk_bytes(found.st_size)
        self._catalogue.adopt(key, found, disk_bytes=disk_bytes, state="fill")
        return 1

    # -- reserving and evicting

    def reserve(self, fill: BlobRow, *, insist: bool) -> bool:
        """Record a fill in the catalogue if its space is free or can be freed; return False if not.
        insist: search for space even if a search within the last _FULL_S found none."""
        if not insist and time.monotonic() < self._full_until_s:
            return False
        with self._catalogue.writing():
            row = self._catalogue.blob(fill.key)
            need = fill.disk_bytes - (row.disk_bytes if row is not None else 0)
            if not self.make_space(need, group=fill.group if insist else None):
                self._full_until_s = time.monotonic() + _FULL_S
                return False
            self._catalogue.add(fill)
        return True

    def make_space(self, need_bytes: int, *, group: str | None) -> bool:
        """Return True if need_bytes are free, evicting blobs if necessary; call it in a
        transaction. group: claim this group's share, even from blobs that readers of other groups
        have mapped."""
        budget = self.budget_bytes
        if self._catalogue.used_bytes + need_bytes <= budget:
            return True
        if need_bytes > budget:
            return False
        self.forget_dead_jobs()
        self.empty_trash()
        self._evict(budget - need_bytes)
        free = budget - self._catalogue.used_bytes
        if group is not None and free < need_bytes:
            owed = self._catalogue.owed_bytes(group)
            self._evict_mapped(max(need_bytes, owed) - free)
        return free >= need_bytes

    def evict_to(self, most_bytes: int, *, group: str | None = None) -> tuple[int, int]:
        """Evict blobs that no job pins or reads until at most `most_bytes` are left (of a group, if
        given). Return the evicted (blobs, bytes)."""
        with self._catalogue.writing():
            self.forget_dead_jobs()
            self.empty_trash()
            before = self._catalogue.used_bytes
            blobs = self._evict(most_bytes, group=group)
            return blobs, before - self._catalogue.used_bytes

    def _evict(self, most_bytes: int, *, group: str | None = None) -> int:
        """Remove fills that no process works on, then whole blobs that no process has mapped, until
        at most `most_bytes` are left; return the number of these blobs."""
        evicted = 0
        left = self._catalogue.used_bytes if group is None else self._catalogue.group_bytes(group)
        fills = (row for row in self._catalogue.blobs(state="fill") if not row.pinned)
        self.flush_uses()
        for row in itertools.chain(fills, self._catalogue.victims()):
            if left <= most_bytes:
                break
            if group not in (None, row.group):
                continue
            is_whole = row.state == "ready"
            remove = self._remove_whole if is_whole else self.remove_fill
            if remove(row.key):
                left -= row.disk_bytes
                evicted += is_whole
        return evicted

    def _remove_whole(self, key: str) -> bool:
        """Remove a whole blob, unless a process has it mapped."""
        folders = (self._layout.blobs, self._layout.unverified)
        if not all(self._remove_unmapped(folder, key) for folder in folders):
            return False
        self._catalogue.remove(key)
        return True

    def _evict_mapped(self, short_bytes: int) -> None:
        """Move blobs that no job pins, but some process has mapped, to the trash, where no reader
        finds them; their space is free once they are unmapped. Otherwise a job that maps more than
        its share would keep it forever, because each batch maps its blobs again."""
        short_bytes -= sum(row.disk_bytes for row in self._catalogue.blobs(state="trash"))
        blobs = self._layout.blobs
        for row in self._catalogue.victims():
            if short_bytes <= 0:
                break
            # Manifests and sidecars are small, and every read needs them.
            if not row.kept and blobs.has(row.key):
                short_bytes -= row.disk_bytes
                with contextlib.suppress(FileNotFoundError):
                    inode = blobs.stat(row.key).st_ino
                    self._move_to_trash(blobs, row.key, key=row.key, inode=inode)


def live_and_dead_jobs(
    layout: FolderLayout, catalogue: Catalogue
) -> tuple[list[JobRow], list[JobRow]]:
    """Return the jobs whose processes live, and hold a lock, and those of dead processes."""
    jobs = catalogue.jobs()
    with contextlib.closing(layout.locks("jobs")) as probe:
        live = [job for job in jobs if probe.is_held(job.id + 1)]
    return live, [job for job in jobs if job not in live]
