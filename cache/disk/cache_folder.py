"""Open a cache folder for writing: publish blobs, verify them, and repair its catalogue.

A hit opens the published file, locks its inode for reading and checks that it is still linked; it
reads no database. Every other operation locks the blob's key and changes the catalogue in one
transaction. Lock order: key, then catalogue; inside a transaction keys are only tried.

`BlobWriter` reserves space, creates a fill, and publishes it as a blob. `Verifier` checks blobs
that are in doubt or were written before a reboot, and drops those with wrong checksums.
`Reconciler` compares the catalogue with the files; if they differ, the files are right."""

from __future__ import annotations

import contextlib
import logging
import os
import sqlite3
from typing import TYPE_CHECKING, Any, TypeVar

from penstock.cache.base import FileMap, ReaderLocks, StrangeFileError, refuse_shortage
from penstock.cache.disk.block_crcs import crcs_of, crcs_of_file
from penstock.cache.disk.catalogue import BlobRow, Catalogue
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


class BlobWriter:
    """The part of a cache folder that creates fills and publishes them as blobs.

    keys: the locks of blobs' keys. readers: the reader locks of this process. reservations: reserve
    the space of fills.
    """

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
        """Open or create the fill of a blob, and map it; None if no space is free, or the blob is
        already published. pinned: search for space even if a recent search found none. Raises
        OSError (the disk is full, …), StalledError."""
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
        readers.wait(inode, what=fill.part)
        try:
            return FileMap(fill.fd, on_unmap=lambda: readers.release(inode))
        except BaseException:
            readers.release(inode)
            raise

    def publish(self, source: BlobSource, fill: Fill, data: Any, *, group: str, kept: bool) -> None:
        """Publish a fill that has all its pieces; do nothing if another process has published it.
        data: the fill's map, as a buffer. kept: True for manifests and sidecars."""
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
        """Write and publish a small object; the caller holds its key. Return False if no space is
        free. kept: as for `publish`."""
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
        if self._layout.blobs.is_folder(key):  # made by another program
            self._layout.blobs.remove(key)
        self._layout.fills.rename(part_name(key), self._layout.blobs, key)

    def enter(self, source: BlobSource | BlobRow, *, group: str, kept: bool, crcs: bytes) -> None:
        """Record a published blob and its size on the disk in the catalogue."""
        status = self._layout.blobs.stat(source.key)
        self._catalogue.blobs.add(
            BlobRow(
                key=source.key,
                group=group,
                uri=source.uri,
                size_bytes=status.st_size,  # the source may not know it
                disk_bytes=allocated_bytes(status),
                state="ready",
                kept=kept,
                crcs=crcs,
            )
        )


_log = logging.getLogger("penstock")


class Verifier:
    """The part of a cache folder that checks whole blobs by the checksums in the catalogue."""

    def __init__(
        self, layout: FolderLayout, catalogue: Catalogue, *, keys: KeyLocks, trash: Trash
    ) -> None:
        self._layout, self._catalogue = layout, catalogue
        self._keys, self._trash = keys, trash
        self._has_unverified = False

    def check(self, key: str) -> None:
        """Drop a blob, or its fill, unless its checksums are known and right."""
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

    def move_unverified(self, *, alone: bool, dead_files: DeadProcessFiles) -> str | None:
        """After a reboot, move blobs to unverified/ and remove fills, because no data was synced.
        Return the name of a damaged file, or None.

        alone: True if no other process has the folder open; a damaged boot file then counts as that
        of another boot.
        """
        layout, now, before = self._layout, boot_id(), self._layout.boot
        if before not in (None, now) and alone:
            for name in layout.names("blobs"):
                layout.blobs.rename(name, layout.unverified, name)
            dead_files.remove_fills()
        if before != now:
            layout.note_boot(now)
        return "boot" if before == "" else None

    def look_for_unverified(self) -> None:
        """Check if unverified/ has blobs. Before this call, `adopt` does nothing."""
        self._has_unverified = bool(self._layout.names("unverified"))

    def adopt(self, key: str) -> bool:
        """Verify a blob that was written before the last reboot, and publish it again if its
        checksums are right; otherwise remove it. Return True if the blob is published."""
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
    """The part of a cache folder that corrects the catalogue if it differs from the files.

    damage: a list to which descriptions of the damage are appended.
    """

    def __init__(
        self,
        layout: FolderLayout,
        catalogue: Catalogue,
        *,
        writer: BlobWriter,
        dead_files: DeadProcessFiles,
        trash: Trash,
        damage: list[str],
    ) -> None:
        self._layout, self._catalogue, self._blobs = layout, catalogue, catalogue.blobs
        self._writer, self._dead_files, self._trash = writer, dead_files, trash
        self._damage = damage

    def is_consistent(self, *, compares_sizes: bool) -> bool:
        """Return True if the catalogue agrees with the folder, and there are no fills and no trash.
        Recounts the used bytes. compares_sizes: compare the size of each file, too, which isn't
        necessary if another process has the folder open."""
        at = self._layout
        try:
            counts = self._blobs.counts()
            if at.names("fills") or at.names("trash") or counts.get("fill") or counts.get("trash"):
                return False
            if compares_sizes:
                if at.blob_bytes() != self._blobs.sizes("ready"):
                    return False
            elif len(at.names("blobs")) + len(at.names("unverified")) != counts.get("ready", 0):
                return False
            return self._catalogue.numbers.get("used") == self._blobs.recount()
        except sqlite3.DatabaseError as error:
            if not is_damage(error):
                raise
            return False

    def reconcile(self) -> int:
        """Correct the catalogue according to the files; return the number of corrections. Fills
        that no process works on stay, so that the next reader can continue them."""
        corrected = 0
        with self._catalogue.writing():
            corrected += self._dead_files.forget_dead_jobs() + self._dead_files.remove_private()
            if wrong := self._blobs.remove_wrong():
                self._damage.append(
                    f"catalogue.db ({wrong} of its rows), read again from the files"
                )
            sizes = self._layout.blob_bytes()
            corrected += wrong
            corrected += sum(self._correct_row(row, sizes) for row in self._blobs.rows())
            rows = self._blobs.rows()
            known = {row.key for row in rows}
            filling = {row.key for row in rows if row.state == "fill"}
            for folder in ("blobs", "unverified"):
                for name in self._layout.names(folder):
                    if name not in known:
                        corrected += self._adopt(name, folder)
            for name in self._layout.names("fills"):
                if name.partition(".")[0] not in filling:
                    corrected += self._dead_files.clear_file(name)
            for name in self._layout.names("trash"):
                if name not in known:
                    corrected += self._adopt(name, "trash")
            self._trash.empty()
            self._blobs.forget_rescued()
            self._blobs.recount()
        return corrected

    def _correct_row(self, row: BlobRow, sizes: dict[str, int]) -> int:
        at = self._layout
        if row.state == "trash":
            exists = at.trash.has(row.key)
        elif row.state == "ready":
            exists = row.key in sizes
            if exists and sizes[row.key] != row.disk_bytes:
                self._blobs.resize(row, sizes[row.key])
        elif at.blobs.has(row.key):  # killed between the rename and the catalogue's change
            fd = at.blobs.open(row.key)
            try:
                crcs = crcs_of_file(fd)
            finally:
                os.close(fd)
            self._writer.enter(row, group=row.group, kept=row.kept, crcs=crcs)
            return 1
        else:
            exists = at.fills.has(part_name(row.key)) or not self._dead_files.remove_fill(row)
        if not exists:
            self._blobs.remove(row.key)
        return int(not exists)

    def _adopt(self, name: str, folder: str) -> int:
        """Record a file that the catalogue doesn't list."""
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
    """A cache folder that this process has open for writing. Safe for several threads.

    Callers use its parts directly: writer, lookup, verifier, evictor, trash, limit, catalogue.
    max_bytes: the limit; None uses the recorded one, or most of the free bytes. damage:
    descriptions of damaged files that were repaired. Raises ConfigError (network file system, newer
    format, another limit in use), OSError, sqlite3.Error.
    """

    def __init__(self, root: str, *, max_bytes: int | None, mode: int = 0o700) -> None:
        self.layout = layout = FolderLayout(root, mode=mode, make=True)
        self.damage = layout.damage
        self.catalogue = catalogue = Catalogue(layout.top)
        self._readers = ReaderLocks(layout.top.open_or_create("readers.lock"))
        self._inodes = layout.locks("readers")
        self._jobs = layout.locks("jobs")
        self.keys = keys = KeyLocks(layout)
        self.limit = SpaceLimit(layout, catalogue)
        self.uses = UseLog(catalogue.blobs)
        self.trash = trash = Trash(layout, catalogue, keys=keys, inodes=self._inodes)
        self.dead_files = DeadProcessFiles(layout, catalogue, keys=keys, inodes=self._inodes)
        self.verifier = Verifier(layout, catalogue, keys=keys, trash=trash)
        self.lookup = LockedLookup(
            layout,
            catalogue=catalogue,
            readers=self._readers,
            uses=self.uses,
            drop=trash.drop,
            adopt=self.verifier.adopt,
        )
        self.evictor = Evictor(
            layout,
            catalogue,
            limit=self.limit,
            uses=self.uses,
            dead_files=self.dead_files,
            trash=trash,
            inodes=self._inodes,
        )
        self.writer = BlobWriter(
            layout,
            catalogue,
            keys=keys,
            readers=self._readers,
            reservations=Reservations(catalogue, self.evictor),
        )
        self._reconciler = Reconciler(
            layout,
            catalogue,
            writer=self.writer,
            dead_files=self.dead_files,
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
        """Agree on the limit, and rebuild a lost catalogue. found: a description of its damage."""
        with self.catalogue.writing():
            was_lost = not self.catalogue.is_counted and not self.catalogue.is_upgrade
            # Every process that has the folder open holds this byte; only a single one may change
            # the limit.
            self._jobs.unlock(_OPEN_BYTE)
            alone = self._jobs.lock(_OPEN_BYTE)
            self._jobs.unlock(_OPEN_BYTE)
            of_limit = self.limit.agree(max_bytes, alone=alone)
            of_boot = self.verifier.move_unverified(alone=alone, dead_files=self.dead_files)
            self.damage += [what for what in (of_limit, of_boot) if what is not None]
            self._jobs.lock(_OPEN_BYTE, shared=True)
            self.verifier.look_for_unverified()
            if not self._reconciler.is_consistent(compares_sizes=alone):
                self.reconcile()
            if self.catalogue.blobs.used_bytes > self.limit.budget_bytes:
                self.evictor.evict_to(self.limit.budget_bytes)
            if was_lost:
                self._note_rebuilt(found)

    @property
    def max_bytes(self) -> int:
        """The limit in bytes."""
        return self.limit.max_bytes

    def reconcile(self) -> int:
        """Correct the catalogue according to the files; return the number of corrections."""
        corrected = self._reconciler.reconcile()
        self.limit.measure_others()
        return corrected

    def repairing(self, act: Callable[[], T]) -> T:
        """Return act(). If it finds the catalogue damaged, rebuild the catalogue and call it
        again."""
        try:
            return act()
        except sqlite3.DatabaseError as error:
            if not is_damage(error):
                raise
            self._rebuild(error)
            return act()

    def _rebuild(self, error: Exception) -> None:
        """Replace a damaged catalogue by one that is read from the files."""

        def fill() -> None:
            self.catalogue.numbers.set("max_bytes", self.max_bytes)
            self.reconcile()

        if self.catalogue.renew(error, fill):
            self._note_rebuilt(str(error))

    def _note_rebuilt(self, found: str | None) -> None:
        """Describe in `damage` that the catalogue was rebuilt, unless the folder is new as well."""
        damage, moved = self.catalogue.pop_damage()
        blobs = self.catalogue.blobs.counts().get("ready", 0)
        what = damage or found
        if what is None and not blobs:
            return
        old = f"; the old file is now {moved}" if moved else "; the old file was removed"
        unknown = self.catalogue.blobs.unknown()
        lost = (
            f"; {unknown:,} of them lost their dataset's name until a job reads them, and their "
            "checksums, so they are fetched again after a reboot"
        )
        self.damage.append(
            f"catalogue.db ({what or 'missing or empty'}), rebuilt from {blobs:,} blobs"
            f"{old if what else ''}{lost if unknown else ''}"
        )

    def pop_damage(self) -> str | None:
        """Describe the damage that was repaired since the last call; None if there was none."""
        damage, self.damage[:] = "; ".join(self.damage), ()
        if not damage:
            return None
        return (
            f"{self.layout.root}: the cache's own files were damaged ({damage}) and have been "
            "repaired. Cached data is kept. If this happens again, check the disk."
        )

    def close(self) -> None:
        """Record the last uses and release the locks. Maps stay valid. Safe to call twice."""
        with contextlib.suppress(OSError, sqlite3.Error):
            self.uses.flush()
        self._jobs.close()
        self._inodes.close()
        self.catalogue.close()
        if not self._readers.count:
            self._readers.close()
