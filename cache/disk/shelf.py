"""An open cache folder: finding, filling, publishing, evicting and dropping blobs.

A hit opens the published file, holds its inode for reading and looks whether it is still linked: no
database. Everything else holds the blob's key and changes the catalogue in one transaction. Lock
order: key, then catalogue; inside a transaction keys are only tried.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sqlite3
import time
from typing import TYPE_CHECKING, Any

from penstock.cache.base.folders import StrangeFileError
from penstock.cache.base.locks import ReaderLocks
from penstock.cache.base.mapping import Map
from penstock.cache.base.sizes import format_size
from penstock.cache.disk.catalogue import Catalogue, is_damage
from penstock.cache.disk.fills import (
    PIECE_BYTES,
    Fill,
    Pieces,
    discard,
    fill_disk_bytes,
    map_name,
    part_name,
)
from penstock.cache.disk.layout import Layout, boot_id, taken_bytes
from penstock.cache.disk.published import Published, block_crcs, crcs_of
from penstock.cache.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.cache.base.blob import BlobSource
    from penstock.cache.base.folders import Folder
    from penstock.cache.disk.catalogue import Row

_log = logging.getLogger("penstock")

# What the books' log, the folders themselves and the small files take beside the blobs.
SLACK_BYTES = 320 * 2**10
_LEAST_OWN_BYTES = 512 * 2**10
_ENTRY_BYTES = 128  # of a folder, for each blob
_KEY_TIMEOUT_S = 30.0
_FREE_SHARE = 0.9
_OPEN_BYTE = 0
_USES_KEPT = 256


class Shelf(Published):
    """One open of a cache folder by one process; safe for several threads.

    max_bytes: None takes the limit that the folder has, or most of the free space. Raises
    ConfigError (network file system, newer format, another limit in use), OSError, sqlite3.Error.
    damage: what was found damaged and was made anew.
    """

    can_write = True

    def __init__(self, root: str, *, max_bytes: int | None, mode: int = 0o700) -> None:
        super().__init__(Layout(root, mode=mode, make=True))
        self.damage = self.layout.damage
        self.evicted = 0
        self._used: dict[str, float] = {}
        self._full_until = 0.0
        self.catalogue = Catalogue(self.layout.top)
        if self.catalogue.damage is not None:
            self.damage.append(f"catalogue.db ({self.catalogue.damage})")
        self.readers: ReaderLocks = ReaderLocks(self.layout.top.open_or_create("readers.lock"))
        self._evictor = self.layout.locks("readers")
        self.jobs = self.layout.locks("jobs")
        self._limit = 0
        self._others_bytes = self.layout.others_bytes()
        self._has_old = False
        try:
            self._begin(max_bytes)
        except sqlite3.DatabaseError as error:
            if not is_damage(error):
                raise
            self.damage.append(f"catalogue.db ({error})")
            self.catalogue.heal(error, lambda: None)
            self._begin(max_bytes)

    def _begin(self, max_bytes: int | None) -> None:
        with self.catalogue.writing():
            alone = self._is_alone()
            self._limit = self._agree_on_limit(max_bytes, alone=alone)
            self._note_boot(alone=alone)
            self.jobs.lock(_OPEN_BYTE, shared=True)
            self._has_old = bool(self.layout.names("unverified"))
            self._look_over(alone=alone)

    @property
    def max_bytes(self) -> int:
        """The limit."""
        return self._limit

    def _is_alone(self) -> bool:
        # Every process that has the folder open holds this byte; who changes the limit is alone.
        self.jobs.unlock(_OPEN_BYTE)
        alone = self.jobs.lock(_OPEN_BYTE)
        self.jobs.unlock(_OPEN_BYTE)
        return alone

    def _agree_on_limit(self, wanted: int | None, *, alone: bool) -> int:
        try:
            known = self.catalogue.fact("max_bytes")
        except sqlite3.DatabaseError:
            self.damage.append("its limit")
            known = None
        if known is not None and wanted in (None, known):
            return known
        if wanted is None:
            wanted = int(self._free_bytes() * _FREE_SHARE)
        if known is not None and not alone:
            raise ConfigError(
                f"{self.layout.root}: max_bytes: got {format_size(wanted)}, and running "
                f"jobs use this folder with {format_size(known)}: one folder, one "
                "limit. Give that one, another folder, or wait until they end."
            )
        self.catalogue.set_fact("max_bytes", wanted)
        return wanted

    def heal(self, error: Exception) -> None:
        """Make the books anew, as they are damaged; the files are what counts."""
        self.damage.append(f"catalogue.db ({error})")

        def enter() -> None:
            self.catalogue.set_fact("max_bytes", self._limit)
            self.reconcile()

        self.catalogue.heal(error, enter)

    def _free_bytes(self) -> int:
        found = os.statvfs(self.layout.root)
        return found.f_bavail * found.f_frsize

    def close(self) -> None:
        """Write down last uses; let locks go. Maps stay valid. Safe to call twice."""
        with contextlib.suppress(OSError, sqlite3.Error):
            self.flush_uses()
        self.jobs.close()
        self._evictor.close()
        self.catalogue.close()
        if not self.readers.held:
            self.readers.close()

    # -- room

    @property
    def budget_bytes(self) -> int:
        """For blobs: the limit less what the folder needs itself."""
        return max(0, self.max_bytes - self._own_bytes())

    @property
    def steady_budget_bytes(self) -> int:
        """Not more than that, and the same while the folder grows a little: what is pinned by it
        mustn't change with every blob."""
        own = max(_LEAST_OWN_BYTES, 1 << (self._own_bytes() - 1).bit_length())
        return max(0, self.max_bytes - own)

    def _own_bytes(self) -> int:
        blobs = sum(self.catalogue.counts().values())
        return self.catalogue.own_bytes() + self._others_bytes + SLACK_BYTES + blobs * _ENTRY_BYTES

    def _reserve(
        self, source: BlobSource, *, group: str, disk: int, insist: bool, kept: bool = False
    ) -> bool:
        """Enter a fill into the books if there is room, or room can be made."""
        if not insist and time.monotonic() < self._full_until:
            return False
        with self.catalogue.writing():
            row = self.catalogue.row(source.key)
            had = row.disk_bytes if row is not None else 0
            if not self._make_room(disk - had, group=group if insist else None):
                self._full_until = time.monotonic() + 1.0  # the search isn't free
                return False
            self.catalogue.add(
                source.key,
                group=group,
                uri=source.uri,
                size_bytes=source.size_bytes,
                disk_bytes=disk,
                state="fill",
                kept=kept,
            )
        return True

    def _make_room(self, need: int, *, group: str | None) -> bool:
        """group: whose share is to be had, by taking it from those who have more mapped."""
        budget = self.budget_bytes
        if self.catalogue.used_bytes + need <= budget:
            return True
        if need > budget:
            return False
        self.bury_dead_jobs()
        self.empty_trash()
        for clean in (self._evict_fills, self._evict_ready):
            if self.catalogue.used_bytes + need > budget:
                clean(budget - need)
        free = budget - self.catalogue.used_bytes
        if group is not None and free < need:
            self._take_names(max(need, self.catalogue.owed_bytes(group)) - free)
        return free >= need

    def _take_names(self, short_bytes: int) -> None:
        """Move blobs that no job pins, but someone has mapped, to the trash: nobody finds them any
        more, and their room is free when they are let go. A job that has more mapped than its share
        would else keep it for ever, as all that it reads is mapped anew with each batch."""
        leaving = sum(row.disk_bytes for row in self.catalogue.rows(state="trash"))
        for row in self.catalogue.victims():
            if leaving >= short_bytes:
                return
            if row.kept:  # manifests and sidecars are small, and needed to read at all
                continue
            with contextlib.suppress(FileNotFoundError):
                self._to_trash(row.key, self.layout.blobs, row.key)
                leaving += row.disk_bytes

    def _to_trash(self, key: str, folder: Folder, name: str) -> None:
        trash = f"{key}-{folder.stat(name).st_ino}"
        folder.rename(name, self.layout.trash, trash)
        self.catalogue.to_trash(key, trash)

    def evict_to(self, most_bytes: int, *, group: str | None = None) -> tuple[int, int]:
        """Take out blobs that no job pins or reads until at most so many bytes are left (of a
        group, if given): (blobs, bytes) that went."""
        self.flush_uses()
        with self.catalogue.writing():
            self.bury_dead_jobs()
            self.empty_trash()
            before, blobs = self.catalogue.used_bytes, self.evicted
            if group is None:
                self._evict_fills(most_bytes)
                self._evict_ready(most_bytes)
            else:
                rows = [row for row in self.catalogue.rows() if row.group == group]
                left = sum(row.disk_bytes for row in rows)
                for row in rows:
                    if left > most_bytes and row.state != "trash" and not row.pinned:
                        gone = self._evict(row) if row.state == "ready" else self._bury(row)
                        left -= row.disk_bytes if gone else 0
            return self.evicted - blobs, before - self.catalogue.used_bytes

    def _evict_ready(self, most_bytes: int) -> None:
        self.catalogue.touch(self._take_uses())
        for row in self.catalogue.victims():
            if self.catalogue.used_bytes <= most_bytes:
                return
            self._evict(row)

    def _evict_fills(self, most_bytes: int) -> None:
        for row in self.catalogue.rows(state="fill"):
            if self.catalogue.used_bytes <= most_bytes:
                return
            if not row.pinned:
                self._bury(row)

    def _evict(self, row: Row) -> bool:
        """Remove a whole blob, unless someone has it mapped."""
        for folder in (self.layout.blobs, self.layout.unverified):
            with contextlib.suppress(FileNotFoundError):
                inode = folder.stat(row.key).st_ino
                if not self._evictor.lock(inode):
                    return False
                try:
                    self.evicted += folder.remove(row.key)
                finally:
                    self._evictor.unlock(inode)
        self.catalogue.remove(row.key)
        return True

    def bury_fills(self) -> int:
        """Remove all fills that nobody works on; returns how many."""
        with self.catalogue.writing():
            return sum(self._bury(row) for row in self.catalogue.rows(state="fill"))

    def _bury(self, row: Row) -> bool:
        """Remove a fill that nobody works on."""
        fills = self.layout.fills
        keys = self.layout.locks("keys")
        try:
            if not keys.lock(_offset(row.key)):
                return False
            with contextlib.suppress(FileNotFoundError):
                inode = fills.stat(part_name(row.key)).st_ino
                if not self._evictor.lock(inode):
                    return False
                self._evictor.unlock(inode)  # nobody new can come: the key is ours
            discard(fills, row.key)
            if not self.has(row.key):
                self.catalogue.remove(row.key)
                return True
            return False
        finally:
            keys.close()

    def empty_trash(self) -> None:
        """Remove what was dropped and is mapped by nobody any more."""
        for name in self.layout.names("trash"):
            try:
                inode = self.layout.trash.stat(name).st_ino
            except FileNotFoundError:
                continue
            if self._evictor.lock(inode):
                self.layout.trash.remove(name)
                self._evictor.unlock(inode)
                self.catalogue.remove(name)

    def bury_dead_jobs(self) -> int:
        """Forget jobs whose process is gone; returns how many."""
        dead = 0
        probe = self.layout.locks("jobs")
        try:
            for job in self.catalogue.jobs():
                if probe.lock(job.id + 1):
                    probe.unlock(job.id + 1)
                    self.catalogue.remove_job(job.id)
                    dead += 1
        finally:
            probe.close()
        return dead

    # -- blobs

    @contextlib.contextmanager
    def holding(self, key: str, *, timeout_s: float = _KEY_TIMEOUT_S) -> Iterator[None]:
        """Hold a blob's key. Raises StalledError."""
        keys = self.layout.locks("keys")
        try:
            with keys.holding(_offset(key), timeout_s=timeout_s, what=f"blob {key}"):
                yield
        finally:
            keys.close()

    def _wrong(self, key: str) -> None:
        self.drop(key)

    def _from_before(self, key: str) -> bool:
        """Take over a blob of before the last boot if its checksums are right."""
        old = self.layout.unverified
        if not self._has_old or not old.has(key):
            return False
        with self.holding(key):
            row = self.catalogue.row(key)
            try:
                fd = old.open(key)
            except FileNotFoundError:
                return self.has(key)
            try:
                well = row is not None and row.crcs is not None and block_crcs(fd) == row.crcs
            except OSError:
                well = False
            finally:
                os.close(fd)
            if well:
                old.rename(key, self.layout.blobs, key)
            else:
                _log.warning("%s/%s: not whole after a reboot: fetched again", old.path, key)
                with self.catalogue.writing():
                    old.remove(key)
                    self.catalogue.remove(key)
            return well

    def check(self, key: str) -> None:
        """Drop a blob whose checksums are wrong, or that has none, as a fill that was begun."""
        try:
            fd = self.layout.blobs.open(key)
        except (FileNotFoundError, StrangeFileError):
            self.drop(key)
            return
        try:
            row, inode = self.catalogue.row(key), os.fstat(fd).st_ino
            well = row is not None and row.crcs is not None and block_crcs(fd) == row.crcs
        finally:
            os.close(fd)
        if not well:
            self.drop(key, inode=inode)

    def recall(self, path: str) -> tuple[bool, tuple[int, str] | None]:
        """See Published."""
        return self.catalogue.recall(path)

    def fill(self, source: BlobSource, *, group: str, pinned: bool) -> tuple[Fill, Map] | None:
        """Open the fill of a blob, or begin it; None if there is no room, or it is published by
        now. pinned: room is looked for even if there was none a moment ago. Raises OSError (the
        disk is full, …)."""
        key, pieces = source.key, Pieces(source)
        fills = self.layout.fills
        with self.holding(key):
            if self.has(key) or not pieces.size_bytes:
                return None
            try:
                fill = Fill(fills, key, pieces)
            except (FileNotFoundError, ValueError, StrangeFileError):
                disk = fill_disk_bytes(pieces.size_bytes, pieces.count)
                if not self._reserve(source, group=group, disk=disk, insist=pinned):
                    return None
                try:
                    fill = Fill.make(fills, key, pieces)
                except BaseException:
                    self.catalogue.remove(key)
                    raise
            try:
                return fill, self._map_fill(fill)
            except BaseException:
                fill.close()
                raise

    def _map_fill(self, fill: Fill) -> Map:
        inode = fill.inode
        # An evictor holds it only while it holds the key, which is ours.
        if not self.readers.hold(inode):
            raise BlockingIOError(f"{fill.part}: held by an evictor")
        try:
            return Map(fill.fd, on_unmap=lambda: self.readers.let_go(inode))
        except BaseException:
            self.readers.let_go(inode)
            raise

    def publish(self, source: BlobSource, fill: Fill, data: Any, *, group: str, kept: bool) -> None:
        """Make a blob whose pieces are all there a whole one. data: its map, as a buffer. Does
        nothing if another did."""
        key = source.key
        with self.holding(key):
            fills = self.layout.fills
            try:
                if fills.stat(part_name(key)).st_ino != fill.inode or not fill.is_whole:
                    return
            except FileNotFoundError:
                return
            crcs = crcs_of(memoryview(data))
            self._publish(key)
            fills.remove(map_name(key))
            self._enter(source, group=group, kept=kept, crcs=crcs)

    def _publish(self, key: str) -> None:
        if self.layout.blobs.is_folder(key):  # nothing of ours
            self.layout.blobs.remove(key)
        self.layout.fills.rename(part_name(key), self.layout.blobs, key)

    def _enter(self, source: BlobSource | Row, *, group: str, kept: bool, crcs: bytes) -> None:
        found = self.layout.blobs.stat(source.key)
        self.catalogue.add(
            source.key,
            group=group,
            uri=source.uri,
            size_bytes=found.st_size,  # an object's wasn't known
            disk_bytes=taken_bytes(found),
            state="ready",
            kept=kept,
            crcs=crcs,
        )

    def put(self, source: BlobSource, data: memoryview, *, group: str, kept: bool) -> bool:
        """Keep a small whole object; the caller holds its key. False if there is no room."""
        disk = fill_disk_bytes(len(data), 1)
        if not len(data) or not self._reserve(
            source, group=group, disk=disk, insist=True, kept=kept
        ):
            return False
        fills = self.layout.fills
        try:
            discard(fills, source.key)
            with open(fills.create(part_name(source.key)), "wb") as file:
                os.posix_fallocate(file.fileno(), 0, len(data))
                file.write(data)
            crcs = crcs_of(data)
            self._publish(source.key)
        except BaseException:
            discard(fills, source.key)
            self.catalogue.remove(source.key)
            raise
        self._enter(source, group=group, kept=kept, crcs=crcs)
        return True

    def drop(self, key: str, *, inode: int | None = None) -> bool:
        """Forget a blob whose bytes are wrong; those who have it mapped keep their map. inode: of
        the wrong file, so that another's fresh one stays. False if it wasn't there."""
        dropped = False
        with self.holding(key), self.catalogue.writing():
            at = self.layout
            for folder, name in (
                (at.blobs, key),
                (at.fills, part_name(key)),
                (at.unverified, key),
            ):
                with contextlib.suppress(FileNotFoundError):
                    if inode not in (None, folder.stat(name).st_ino):
                        continue
                    self._to_trash(key, folder, name)
                    dropped = True
            if dropped:
                discard(at.fills, key)
                self.catalogue.remove(key)
            self.empty_trash()
        return dropped

    # -- uses

    def _note_use(self, key: str) -> None:
        self._used[key] = time.time()
        if len(self._used) >= _USES_KEPT:
            with contextlib.suppress(OSError, sqlite3.Error):
                self.flush_uses()

    def _take_uses(self) -> dict[str, float]:
        used, self._used = self._used, {}
        return used

    def flush_uses(self) -> None:
        """Write last uses down."""
        if self._used:
            self.catalogue.touch(self._take_uses())

    # -- order in the house

    def _note_boot(self, *, alone: bool) -> None:
        """After a reboot blobs are to be verified at their first use, and fills are worth
        nothing: nothing was forced to the disk. A note that can't be read may be of another boot,
        unless a process is here that has seen it."""
        now, before = boot_id(), self.layout.boot
        if before == "":
            self.damage.append("boot")
        if before not in (None, now) and alone:
            at = self.layout
            for name in at.names("blobs"):
                at.blobs.rename(name, at.unverified, name)
            for row in self.catalogue.rows(state="fill"):
                self._bury(row)
        if before != now:
            self.layout.note_boot(now)

    def _look_over(self, *, alone: bool) -> None:
        """Count anew what is used, and reconcile if something looks unfinished."""
        try:
            as_told = self._is_as_told(look=alone)
        except sqlite3.DatabaseError as error:
            if not is_damage(error):
                raise
            as_told = False
        if not as_told:
            self.reconcile()
        if self.catalogue.used_bytes > self.budget_bytes:
            self.evict_to(self.budget_bytes)

    def _is_as_told(self, *, look: bool) -> bool:
        """Whether the books say what lies in the folder. look: at each file; who has the folder
        open did that already."""
        counts = self.catalogue.counts()
        at, books = self.layout, self.catalogue
        if at.names("fills") or at.names("trash") or counts.get("fill") or counts.get("trash"):
            return False
        if look:
            if at.blob_bytes() != books.sizes("ready"):
                return False
        elif len(at.names("blobs")) + len(at.names("unverified")) != counts.get("ready", 0):
            return False
        return books.fact("used") == books.recount()

    def reconcile(self) -> int:
        """Bring books and files together; returns how many things were put right. Fills that
        nobody works on stay, as the next who wants them goes on with them."""
        mended = 0
        with self.catalogue.writing():
            mended += self.bury_dead_jobs()
            mended += self._check_rows()
            rows = self.catalogue.rows()
            known = {row.key for row in rows}
            filling = {row.key for row in rows if row.state == "fill"}
            for folder in ("blobs", "unverified"):
                for name in self.layout.names(folder):
                    if name not in known:
                        mended += self._adopt(name, folder)
            for name in self.layout.names("fills"):
                mended += self._clear_fill(name, filling)
            for name in self.layout.names("trash"):
                if name not in known:
                    mended += self._adopt(name, "trash")
            self.empty_trash()
            self.catalogue.recount()
        self._others_bytes = self.layout.others_bytes()
        return mended

    def _check_rows(self) -> int:
        wrong = self.catalogue.remove_wrong()
        if wrong:
            self.damage.append(f"catalogue.db ({wrong} of its rows)")
        at = self.layout
        sizes = at.blob_bytes()
        return sum(self._mend_row(row, sizes) for row in self.catalogue.rows()) + wrong

    def _mend_row(self, row: Row, sizes: dict[str, int]) -> int:
        at = self.layout
        if row.state == "trash":
            there = at.trash.has(row.key)
        elif row.state == "ready":
            there = row.key in sizes
            if there and sizes[row.key] != row.disk_bytes:
                self.catalogue.resize(row, sizes[row.key])
        elif at.blobs.has(row.key):  # killed between the rename and the books
            fd = at.blobs.open(row.key)
            try:
                crcs = block_crcs(fd)
            finally:
                os.close(fd)
            self._enter(row, group=row.group, kept=row.kept, crcs=crcs)
            return 1
        else:
            there = at.fills.has(part_name(row.key)) or not self._bury(row)
        if not there:
            self.catalogue.remove(row.key)
        return int(not there)

    def _adopt(self, name: str, folder: str) -> int:
        """Enter a file that the books don't know."""
        place: Folder = getattr(self.layout, folder)
        try:
            fd = place.open(name)
        except FileNotFoundError:
            return 0
        except StrangeFileError:
            return int(place.remove(name))
        try:
            found = os.fstat(fd)
        finally:
            os.close(fd)
        self.catalogue.add(
            name,
            group="",
            uri="",
            size_bytes=found.st_size,
            disk_bytes=taken_bytes(found),
            state="trash" if folder == "trash" else "ready",
            kept=False,
            crcs=None,  # nobody vouches for it: samples are checked anyway, a reboot ends it
        )
        return 1

    def _clear_fill(self, name: str, filling: set[str]) -> int:
        """Remove files of fills that the books don't know, unless someone is at work on them."""
        key = name.partition(".")[0]
        if key in filling:
            return 0
        keys, fills = self.layout.locks("keys"), self.layout.fills
        try:
            found = fills.stat(name)
            if not keys.lock(_offset(key)) or not self._evictor.lock(found.st_ino):
                unknown = name == part_name(key) and self.catalogue.row(key) is None
                return self._adopt_fill(key, found.st_size) if unknown else 0
            self._evictor.unlock(found.st_ino)
            return int(fills.remove(name))
        except FileNotFoundError:
            return 0
        finally:
            keys.close()

    def _adopt_fill(self, key: str, size_bytes: int) -> int:
        """Enter a fill that someone is at work on, and that new books don't know."""
        self.catalogue.add(
            key,
            group="",
            uri="",
            size_bytes=size_bytes,
            disk_bytes=fill_disk_bytes(size_bytes, size_bytes // PIECE_BYTES + 1),
            state="fill",
            kept=False,
        )
        return 1


def _offset(key: str) -> int:
    """Where a key's lock is: 60 bits of it."""
    return int(key.partition("-")[0][:15], 16)
