"""Open a cache folder for writing: publish blobs, verify them, and repair its catalogue.

A hit opens the published file, holds its inode for reading and checks that it is still linked: no
database. Everything else holds the blob's key and changes the catalogue in one transaction. Lock
order: key, then catalogue; inside a transaction keys are only tried.

`BlobWriter` takes a fill from reserved space to a whole file that every process finds. `Verifier`
keeps a blob that is in doubt, or was written before a reboot, if its checksums are right, and drops
it otherwise. `Reconciler` compares the catalogue with the files; the files decide.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sqlite3
from typing import TYPE_CHECKING, Any, TypeVar

from penstock.cache.base import FileMap, ReaderLocks, StrangeFileError, refuse_shortage
from penstock.cache.disk.block_crcs import crcs_of, crcs_of_file
from penstock.cache.disk.catalogue import Catalogue
from penstock.cache.disk.catalogue_file import is_damage
from penstock.cache.disk.eviction import DeadProcessFiles, Evictor, Reservations, SpaceLimit, Trash
from penstock.cache.disk.fill_files import Fill, discard_fill, fill_disk_bytes, map_bytes
from penstock.cache.disk.fill_marks import map_name, part_name
from penstock.cache.disk.folder_layout import FolderLayout, KeyLocks, allocated_bytes, boot_id
from penstock.cache.disk.lookup import LockedLookup, UseLog
from penstock.cache.disk.pieces import BlobPieces

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.cache.base import BlobSource, Folder
    from penstock.cache.disk.catalogue import BlobRow


class BlobWriter:
    """Filling begins fills, and makes whole blobs of them. readers: held by this process."""

    def __init__(
        self,
        layout: FolderLayout,
        catalogue: Catalogue,
        *,
        keys: KeyLocks,
        readers: ReaderLocks,
        reservations: Reservations,
    ) -> None:
        self._layout, self._catalogue = layout, catalogue
        self._keys, self._readers = keys, readers
        self._reservations = reservations

    def begin(self, source: BlobSource, *, group: str, pinned: bool) -> tuple[Fill, FileMap] | None:
        """Open the fill of a blob, or make it; None if there is no room, or it is published by
        now. pinned: room is looked for even if there was none a moment ago. Raises OSError (the
        disk is full, …)."""
        key, pieces = source.key, BlobPieces(source)
        fills = self._layout.fills
        with self._keys.holding(key):
            if self._layout.blobs.has(key) or not pieces.size_bytes:
                return None
            try:
                fill = Fill(fills, key, pieces)
            except (FileNotFoundError, ValueError, StrangeFileError):
                disk_bytes = fill_disk_bytes(
                    pieces.size_bytes, pieces.count, most_map_bytes=map_bytes(pieces)
                )
                if not self._reservations.reserve(
                    source, group=group, disk_bytes=disk_bytes, insist=pinned
                ):
                    return None
                try:
                    fill = Fill.make(fills, key, pieces)
                except BaseException:
                    self._catalogue.blobs.remove(key)
                    raise
            try:
                return fill, self._map(fill)
            except BaseException:
                fill.close()
                raise

    def _map(self, fill: Fill) -> FileMap:
        readers, inode = self._readers, fill.inode
        # An evictor holds it only while it holds the key, which is ours.
        if not readers.acquire(inode):
            raise BlockingIOError(f"{fill.part}: held by an evictor")
        try:
            return FileMap(fill.fd, on_unmap=lambda: readers.release(inode))
        except BaseException:
            readers.release(inode)
            raise

    def publish(self, source: BlobSource, fill: Fill, data: Any, *, group: str, kept: bool) -> None:
        """Make a blob whose pieces are all there a whole one. data: its map, as a buffer. Does
        nothing if another did."""
        key = source.key
        with self._keys.holding(key):
            fills = self._layout.fills
            try:
                if fills.stat(part_name(key)).st_ino != fill.inode or not fill.is_whole:
                    return
            except FileNotFoundError:
                return
            crcs = fill.block_crcs(memoryview(data))
            self._rename(key)
            fills.remove(map_name(key))
            self.enter(source, group=group, kept=kept, crcs=crcs)

    def put(self, source: BlobSource, data: memoryview, *, group: str, kept: bool) -> bool:
        """Keep a small whole object; the caller holds its key. False if there is no room."""
        disk_bytes = fill_disk_bytes(len(data), 1)
        if not len(data) or not self._reservations.reserve(
            source, group=group, disk_bytes=disk_bytes, insist=True, kept=kept
        ):
            return False
        fills = self._layout.fills
        try:
            discard_fill(fills, source.key)
            with open(fills.create(part_name(source.key)), "wb") as file:
                os.posix_fallocate(file.fileno(), 0, len(data))
                file.write(data)
            crcs = crcs_of(data)
            self._rename(source.key)
        except BaseException:
            discard_fill(fills, source.key)
            self._catalogue.blobs.remove(source.key)
            raise
        self.enter(source, group=group, kept=kept, crcs=crcs)
        return True

    def _rename(self, key: str) -> None:
        if self._layout.blobs.is_folder(key):  # nothing of ours
            self._layout.blobs.remove(key)
        self._layout.fills.rename(part_name(key), self._layout.blobs, key)

    def enter(self, source: BlobSource | BlobRow, *, group: str, kept: bool, crcs: bytes) -> None:
        """Write down that a blob is whole, and what it takes."""
        found = self._layout.blobs.stat(source.key)
        self._catalogue.blobs.add(
            source.key,
            group=group,
            uri=source.uri,
            size_bytes=found.st_size,  # an object's wasn't known
            disk_bytes=allocated_bytes(found),
            state="ready",
            kept=kept,
            crcs=crcs,
        )


_log = logging.getLogger("penstock")


class Verifier:
    """A Verifier compares whole blobs with the checksums that the books have of their blocks."""

    def __init__(
        self, layout: FolderLayout, catalogue: Catalogue, *, keys: KeyLocks, trash: Trash
    ) -> None:
        self._layout, self._catalogue = layout, catalogue
        self._keys, self._trash = keys, trash
        self._has_unverified = False

    def check(self, key: str) -> None:
        """Drop a blob whose checksums are wrong, or that has none, as a fill that was begun."""
        try:
            fd = self._layout.blobs.open(key)
        except (FileNotFoundError, StrangeFileError):
            self._trash.drop(key)
            return
        try:
            inode = os.fstat(fd).st_ino
            is_right = self._is_right(key, fd)
        finally:
            os.close(fd)
        if not is_right:
            self._trash.drop(key, inode=inode)

    def set_aside(self, *, alone: bool, leftovers: DeadProcessFiles) -> str | None:
        """After a reboot blobs are to be verified at their first use, and fills are worth nothing:
        nothing was forced to the disk. A note that can't be read may be of another boot, unless a
        process is here that has seen it (not alone). What was damaged, if anything."""
        layout, now, before = self._layout, boot_id(), self._layout.boot
        if before not in (None, now) and alone:
            for name in layout.names("blobs"):
                layout.blobs.rename(name, layout.unverified, name)
            leftovers.remove_fills()
        if before != now:
            layout.note_boot(now)
        return "boot" if before == "" else None

    def look_for_unverified(self) -> None:
        """Look whether there are any blobs of before a reboot; until then none is looked for."""
        self._has_unverified = bool(self._layout.names("unverified"))

    def take_over(self, key: str) -> bool:
        """Make a blob of before the last boot one of this, if its checksums are right."""
        old = self._layout.unverified
        if not self._has_unverified or not old.has(key):
            return False
        with self._keys.holding(key):
            try:
                fd = old.open(key)
            except FileNotFoundError:
                return self._layout.blobs.has(key)
            why = "its checksums are wrong since the last reboot"
            try:
                is_right = self._is_right(key, fd)
            except OSError as error:
                refuse_shortage(error, f"{old.path}/{key}")
                is_right, why = False, f"it can't be read since the last reboot ({error.strerror})"
            finally:
                os.close(fd)
            if is_right:
                old.rename(key, self._layout.blobs, key)
            else:
                _log.warning("%s/%s: %s, so it is fetched again", old.path, key, why)
                with self._catalogue.writing():
                    old.remove(key)
                    self._catalogue.blobs.remove(key)
            return is_right

    def _is_right(self, key: str, fd: int) -> bool:
        row = self._catalogue.blobs.row(key)
        return row is not None and row.crcs is not None and crcs_of_file(fd) == row.crcs


class Reconciler:
    """A Reconciler compares rows with files, and mends what differs.

    damage: what was found wrong goes there.
    """

    def __init__(
        self,
        layout: FolderLayout,
        catalogue: Catalogue,
        *,
        filling: BlobWriter,
        leftovers: DeadProcessFiles,
        trash: Trash,
        damage: list[str],
    ) -> None:
        self._layout, self._catalogue, self._blobs = layout, catalogue, catalogue.blobs
        self._filling, self._leftovers, self._trash = filling, leftovers, trash
        self._damage = damage

    def books_are_right(self, *, look: bool) -> bool:
        """Whether the books say what lies in the folder, and nothing looks unfinished. look: at
        each file; who has the folder open did that already. Counts anew what is used."""
        try:
            return self._compare(look=look)
        except sqlite3.DatabaseError as error:
            if not is_damage(error):
                raise
            return False

    def _compare(self, *, look: bool) -> bool:
        counts = self._blobs.counts()
        at = self._layout
        if at.names("fills") or at.names("trash") or counts.get("fill") or counts.get("trash"):
            return False
        if look:
            if at.blob_bytes() != self._blobs.sizes("ready"):
                return False
        elif len(at.names("blobs")) + len(at.names("unverified")) != counts.get("ready", 0):
            return False
        return self._catalogue.numbers.get("used") == self._blobs.recount()

    def reconcile(self) -> int:
        """Bring books and files together; returns how many things were put right. Fills that
        nobody works on stay, as the next who wants them goes on with them."""
        mended = 0
        with self._catalogue.writing():
            mended += self._leftovers.forget_dead_jobs() + self._leftovers.remove_private()
            mended += self._mend_rows()
            rows = self._blobs.rows()
            known = {row.key for row in rows}
            filling = {row.key for row in rows if row.state == "fill"}
            for folder in ("blobs", "unverified"):
                for name in self._layout.names(folder):
                    if name not in known:
                        mended += self._adopt(name, folder)
            for name in self._layout.names("fills"):
                if name.partition(".")[0] not in filling:
                    mended += self._leftovers.clear_file(name)
            for name in self._layout.names("trash"):
                if name not in known:
                    mended += self._adopt(name, "trash")
            self._trash.empty()
            self._blobs.forget_rescued()
            self._blobs.recount()
        return mended

    def _mend_rows(self) -> int:
        wrong = self._blobs.remove_wrong()
        if wrong:
            self._damage.append(f"catalogue.db ({wrong} of its rows), entered again from the files")
        sizes = self._layout.blob_bytes()
        return sum(self._mend_row(row, sizes) for row in self._blobs.rows()) + wrong

    def _mend_row(self, row: BlobRow, sizes: dict[str, int]) -> int:
        at = self._layout
        if row.state == "trash":
            there = at.trash.has(row.key)
        elif row.state == "ready":
            there = row.key in sizes
            if there and sizes[row.key] != row.disk_bytes:
                self._blobs.resize(row, sizes[row.key])
        elif at.blobs.has(row.key):  # killed between the rename and the books
            fd = at.blobs.open(row.key)
            try:
                crcs = crcs_of_file(fd)
            finally:
                os.close(fd)
            self._filling.enter(row, group=row.group, kept=row.kept, crcs=crcs)
            return 1
        else:
            there = at.fills.has(part_name(row.key)) or not self._leftovers.remove_fill(row)
        if not there:
            self._blobs.remove(row.key)
        return int(not there)

    def _adopt(self, name: str, folder: str) -> int:
        """Enter a file that the books don't know."""
        place: Folder = getattr(self._layout, folder)
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
        self._blobs.adopt(
            name,
            size_bytes=found.st_size,
            disk_bytes=allocated_bytes(found),
            state="trash" if folder == "trash" else "ready",
            used_s=max(found.st_atime, found.st_mtime),
        )
        return 1


T = TypeVar("T")

_OPEN_BYTE = 0


class CacheFolder:
    """A CacheFolder is one open of a cache folder by one process. Safe for several threads.

    It owns the parts, and who wants something of the folder asks the one whose duty it is.
    max_bytes: None takes the limit that the folder has, or most of the free space. Raises
    ConfigError (network file system, newer format, another limit in use), OSError, sqlite3.Error.
    damage: what was found damaged and was made anew.
    """

    def __init__(self, root: str, *, max_bytes: int | None, mode: int = 0o700) -> None:
        self.layout = layout = FolderLayout(root, mode=mode, make=True)
        self.damage = layout.damage
        self.catalogue = catalogue = Catalogue(layout.top)
        self._readers = ReaderLocks(layout.top.open_or_create("readers.lock"))
        self._inodes = layout.locks("readers")
        self._jobs = layout.locks("jobs")
        self.keys = keys = KeyLocks(layout)
        self.room = SpaceLimit(layout, catalogue)
        self.uses = UseLog(catalogue.blobs)
        self.trash = trash = Trash(layout, catalogue, keys=keys, inodes=self._inodes)
        self.leftovers = DeadProcessFiles(layout, catalogue, keys=keys, inodes=self._inodes)
        self.verifier = Verifier(layout, catalogue, keys=keys, trash=trash)
        self.lookup = LockedLookup(
            layout,
            catalogue=catalogue,
            readers=self._readers,
            uses=self.uses,
            drop=trash.drop,
            take_over=self.verifier.take_over,
        )
        self.evictor = Evictor(
            layout,
            catalogue,
            room=self.room,
            uses=self.uses,
            leftovers=self.leftovers,
            trash=trash,
            inodes=self._inodes,
        )
        self.filling = BlobWriter(
            layout,
            catalogue,
            keys=keys,
            readers=self._readers,
            reservations=Reservations(catalogue, self.evictor),
        )
        self._reconciler = Reconciler(
            layout,
            catalogue,
            filling=self.filling,
            leftovers=self.leftovers,
            trash=trash,
            damage=self.damage,
        )
        self._open(max_bytes)

    def _open(self, max_bytes: int | None) -> None:
        try:
            self._begin(max_bytes)
        except sqlite3.DatabaseError as error:
            if not is_damage(error):
                raise
            self.catalogue.renew(error, lambda: None)
            self._begin(max_bytes, found=str(error))

    def _begin(self, max_bytes: int | None, *, found: str | None = None) -> None:
        """found: what was wrong with the books that were there."""
        with self.catalogue.writing():
            was_lost = not self.catalogue.is_counted and not self.catalogue.is_upgrade
            self._agree(max_bytes)
            if was_lost:
                self._note_rebuilt(found)

    def _agree(self, max_bytes: int | None) -> None:
        alone = self._is_alone()
        found = self.room.agree(max_bytes, alone=alone)
        noted = self.verifier.set_aside(alone=alone, leftovers=self.leftovers)
        self.damage += [what for what in (found, noted) if what is not None]
        self._jobs.lock(_OPEN_BYTE, shared=True)
        self.verifier.look_for_unverified()
        if not self._reconciler.books_are_right(look=alone):
            self.reconcile()
        if self.catalogue.blobs.used_bytes > self.room.budget_bytes:
            self.evictor.evict_to(self.room.budget_bytes)

    def _is_alone(self) -> bool:
        # Every process that has the folder open holds this byte; who changes the limit is alone.
        self._jobs.unlock(_OPEN_BYTE)
        alone = self._jobs.lock(_OPEN_BYTE)
        self._jobs.unlock(_OPEN_BYTE)
        return alone

    @property
    def max_bytes(self) -> int:
        """The limit."""
        return self.room.max_bytes

    def reconcile(self) -> int:
        """Bring books and files together; returns how many things were put right."""
        mended = self._reconciler.reconcile()
        self.room.measure_others()
        return mended

    def repairing(self, act: Callable[[], T]) -> T:
        """Return act(); it is called again with new books if it finds these damaged."""
        try:
            return act()
        except sqlite3.DatabaseError as error:
            if not is_damage(error):
                raise
            self._heal(error)
            return act()

    def _heal(self, error: Exception) -> None:
        """Make the books anew, as they are damaged; the files are what counts."""

        def enter() -> None:
            self.catalogue.numbers.set("max_bytes", self.max_bytes)
            self.reconcile()

        if self.catalogue.renew(error, enter):
            self._note_rebuilt(str(error))

    def _note_rebuilt(self, found: str | None) -> None:
        """Note that the books are new, but of a folder that is new as well."""
        damage, moved = self.catalogue.take_damage()
        blobs = self.catalogue.blobs.counts().get("ready", 0)
        what = damage or found
        if what is None and not blobs:
            return
        old = f"; the old file is now {moved}" if moved else "; the old file was removed"
        unknown = self.catalogue.blobs.unknown()
        lost = (
            f"; {unknown:,} of them lost their dataset, which the next job that reads them gives "
            "back, and their checksums, without which a reboot has them fetched again"
        )
        self.damage.append(
            f"catalogue.db ({what or 'missing or empty'}), rebuilt from {blobs:,} blobs"
            f"{old if what else ''}{lost if unknown else ''}"
        )

    def take_damage(self) -> str | None:
        """Describe, once, what was found damaged and was repaired; None if nothing was."""
        damage, self.damage[:] = "; ".join(self.damage), ()
        if not damage:
            return None
        return (
            f"{self.layout.root}: the cache's own files were damaged ({damage}), and are repaired. "
            "Whole blobs stay. If that happens again, check the disk."
        )

    def close(self) -> None:
        """Write down last uses; let locks go. Maps stay valid. Safe to call twice."""
        with contextlib.suppress(OSError, sqlite3.Error):
            self.uses.flush()
        self._jobs.close()
        self._inodes.close()
        self.catalogue.close()
        if not self._readers.count:
            self._readers.close()
