"""Open a cache folder: find, publish and verify blobs, and repair the catalogue.

A hit opens the published file, locks its inode for reading and checks that it is still linked; it
reads no database. Every other operation locks the blob's key and changes the catalogue in one
transaction. Lock order: key, then catalogue; inside a transaction keys are only tried.

If the catalogue and the files differ, the files are right.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from penstock.cache.base import FileMap, ReaderLocks, StrangeFileError, refuse_shortage
from penstock.cache.disk.catalogue import BlobRow, Catalogue, crcs_of, crcs_of_file, is_damage
from penstock.cache.disk.fill_files import HEADER_BYTES, Fill, discard_fill, fill_disk_bytes
from penstock.cache.disk.folder_layout import FolderLayout, boot_id, map_name, part_name
from penstock.cache.disk.pieces import BlobPieces
from penstock.cache.disk.space import PRIVATE, Space
from penstock.cache.errors import StalledError, log

if TYPE_CHECKING:
    from collections.abc import Callable, Container

    from penstock.cache.base import BlobSource, Folder
    from penstock.cache.disk.catalogue import Known, State

T = TypeVar("T")

_OPEN_BYTE = 0
_MOST_MARKS = 2**20  # of a fill, that are counted


class ReadableFolder:
    """The whole blobs of a folder that this process can't write and from which no process evicts.

    It acquires no locks and changes nothing.
    """

    def __init__(self, layout: FolderLayout) -> None:
        self.layout = layout

    @classmethod
    def at(cls, root: str, *, mode: int = 0o700) -> ReadableFolder | None:
        """Open a folder that belongs to this user or root; None if it isn't a cache or can't be
        read. Raises ConfigError for a newer format."""
        try:
            layout = FolderLayout(root, mode=mode, reads_roots=True)
            layout.check_format()
        except OSError:
            return None
        return ReadableFolder(layout)

    def has(self, key: str) -> bool:
        """Return True if the folder has a whole blob."""
        return self.layout.blobs.has(key)

    def held(self) -> dict[str, float]:
        """Return the present share of each blob by key, in [0, 1]. Unverified blobs count as whole,
        because most of them are right. Lists names, and opens only files that are being filled."""
        layout, found = self.layout, dict[str, float]()
        for key in (n.removesuffix(".map") for n in layout.names("fills") if n.endswith(".map")):
            found[key] = 0.0
            with contextlib.suppress(FileNotFoundError, PermissionError):
                marks = layout.fills.read(map_name(key), _MOST_MARKS)[HEADER_BYTES:]
                found[key] = marks.count(1) / max(1, len(marks))
        found |= dict.fromkeys(layout.names("unverified"), 1.0)
        return found | dict.fromkeys(layout.names("blobs"), 1.0)

    def find(self, key: str, size_bytes: int | None) -> FileMap | None:
        """Map a whole blob; None if the folder has none of this size."""
        fd = self._open(key)
        if fd is None:
            return None
        try:
            found = os.fstat(fd)
            if found.st_size == 0 or (size_bytes is not None and found.st_size != size_bytes):
                self._refuse(key)
                return None
            return self._map(key, fd, found.st_ino)
        finally:
            os.close(fd)

    def recall(self, path: str) -> Known:
        """Return a store's last answer about a name."""
        return Catalogue.recall_unlocked(self.layout.top, path)

    def _open(self, key: str) -> int | None:
        """Open a whole blob; None if there is none that may be read."""
        with contextlib.suppress(FileNotFoundError, PermissionError):
            return self.layout.blobs.open(key)
        return None

    def _map(self, key: str, fd: int, inode: int) -> FileMap | None:
        """Map an open file; None if it was removed."""
        return FileMap(fd)

    def _refuse(self, key: str) -> None:
        """Handle a file that has a blob's name and isn't that blob."""


class CacheFolder(ReadableFolder):
    """A cache folder that this process has open for writing. Safe for several threads.

    max_bytes: the limit; None uses the recorded one, or most of the free bytes. space: the limit
    and the eviction. damage: descriptions of damaged files that were repaired. Raises ConfigError
    (network file system, newer format, another limit in use), OSError, sqlite3.Error.
    """

    def __init__(self, root: str, *, max_bytes: int | None, mode: int = 0o700) -> None:
        layout = FolderLayout(root, mode=mode, make=True)
        super().__init__(layout)
        self.damage = layout.damage
        self.catalogue = Catalogue(layout.top)
        self._readers = ReaderLocks(layout.top.open_or_create("readers.lock"))
        self._jobs = layout.locks("jobs")
        self.space = Space(layout, self.catalogue)
        self._wanted_bytes = max_bytes
        self._has_unverified = False
        self.repairing(self._begin)

    def _begin(self, *, found: str | None = None) -> None:
        """Agree on the limit, and rebuild a lost catalogue. found: a description of its damage."""
        with self.catalogue.writing():
            was_lost = not self.catalogue.is_counted
            # Every process that has the folder open holds this byte; only a single one may change
            # the limit.
            self._jobs.unlock(_OPEN_BYTE)
            alone = self._jobs.lock(_OPEN_BYTE)
            self._jobs.unlock(_OPEN_BYTE)
            self.space.agree(self._wanted_bytes, alone=alone)
            self._wanted_bytes = self.max_bytes
            self._move_unverified(alone=alone)
            self._jobs.lock(_OPEN_BYTE, shared=True)
            self._has_unverified = bool(self.layout.names("unverified"))
            if not self._is_consistent(compares_sizes=alone):
                self.reconcile()
            if self.catalogue.used_bytes > self.space.budget_bytes:
                self.space.evict_to(self.space.budget_bytes)
            if was_lost:
                self._note_rebuilt(found)

    @property
    def max_bytes(self) -> int:
        """The limit in bytes."""
        return self.space.max_bytes

    def close(self) -> None:
        """Record the last uses and release the locks. Maps stay valid. Safe to call twice."""
        with contextlib.suppress(OSError, sqlite3.Error):
            self.space.flush_uses()
        self._jobs.close()
        self.space.close()
        self.catalogue.close()
        if not self._readers.count:
            self._readers.close()

    # -- whole blobs, each locked while it is mapped

    def recall(self, path: str) -> Known:
        """Return a store's last answer about a name."""
        return self.catalogue.recall(path)

    def _open(self, key: str) -> int | None:
        try:
            return self.layout.blobs.open(key)
        except FileNotFoundError:
            return self._open(key) if self._adopt(key) else None
        except StrangeFileError:
            self._refuse(key)
            return None

    def _map(self, key: str, fd: int, inode: int) -> FileMap | None:
        try:
            mapped = self._map_locked(fd, inode, what=self.layout.blob(key))
        except StalledError:
            return None
        if mapped is not None:
            self.space.note_use(key)
        return mapped

    def _map_locked(self, fd: int, inode: int, *, what: str) -> FileMap | None:
        """Map an open file, and lock it while it is mapped; None if it was removed. Raises
        StalledError."""
        readers = self._readers
        readers.wait(inode, what=what)
        try:
            if os.fstat(fd).st_nlink:
                return FileMap(fd, on_unmap=lambda: readers.release(inode))
        except BaseException:
            readers.release(inode)
            raise
        readers.release(inode)
        return None

    def _refuse(self, key: str) -> None:
        self.space.drop(key)

    # -- fills, and the blobs that they become

    def begin(self, source: BlobSource, *, group: str, pinned: bool) -> tuple[Fill, FileMap] | None:
        """Open or create the fill of a blob, and map it; None if no space is free, or the blob is
        already published. pinned: search for space even if a recent search found none. Raises
        OSError (the disk is full, …), StalledError."""
        key, pieces = source.key, BlobPieces(source)
        fills = self.layout.fills
        with self.layout.holding(key):
            if self.layout.blobs.has(key) or not pieces.size_bytes:
                return None
            try:
                fill = Fill(fills, key, pieces)
            except (FileNotFoundError, ValueError, StrangeFileError):
                row = _fill_row(source, group, pieces.count)
                if not self.space.reserve(row, insist=pinned):
                    return None
                try:
                    fill = Fill.make(fills, key, pieces)
                except BaseException:
                    self.catalogue.remove(key)
                    raise
            mapped = self._map_locked(fill.fd, fill.inode, what=fill.part)
            return None if mapped is None else (fill, mapped)

    def publish(self, source: BlobSource, fill: Fill, data: Any, *, group: str) -> None:
        """Publish a fill that has all its pieces; do nothing if another process has published it.
        data: the fill's map, as a buffer."""
        key = source.key
        with self.layout.holding(key):
            fills = self.layout.fills
            try:
                if fills.stat(part_name(key)).st_ino != fill.inode or not fill.is_whole:
                    return
            except FileNotFoundError:
                return
            crcs = fill.block_crcs(memoryview(data))
            self._rename(key)
            fills.remove(map_name(key))
            self._enter(_fill_row(source, group), crcs)

    def put(self, source: BlobSource, data: memoryview, *, group: str, kept: bool) -> bool:
        """Write and publish a small object; the caller holds its key. Return False if no space is
        free. kept: True for manifests and sidecars."""
        row = replace(_fill_row(replace(source, size_bytes=len(data)), group), kept=kept)
        if not len(data) or not self.space.reserve(row, insist=True):
            return False
        fills = self.layout.fills
        try:
            discard_fill(fills, source.key)
            with open(fills.create(part_name(source.key)), "wb") as file:
                os.posix_fallocate(file.fileno(), 0, len(data))
                file.write(data)
            crcs = crcs_of(data)
            self._rename(source.key)
        except BaseException:
            discard_fill(fills, source.key)
            self.catalogue.remove(source.key)
            raise
        self._enter(row, crcs)
        return True

    def _rename(self, key: str) -> None:
        if self.layout.blobs.is_folder(key):  # made by another program
            self.layout.blobs.remove(key)
        self.layout.fills.rename(part_name(key), self.layout.blobs, key)

    def _enter(self, row: BlobRow, crcs: bytes) -> None:
        """Record a published blob and its size on the disk in the catalogue. row: of its fill."""
        status = self.layout.blobs.stat(row.key)
        size_bytes, disk_bytes = status.st_size, self.layout.allocated_bytes(status)
        published = replace(row, size_bytes=size_bytes, disk_bytes=disk_bytes, state="ready")
        self.catalogue.add(replace(published, crcs=crcs, used_s=time.time()))

    # -- blobs in doubt, and those from before a reboot

    def check(self, key: str) -> None:
        """Drop a blob, or its fill, unless its checksums are known and right."""
        row = self.catalogue.blob(key)
        inode: int | None = None
        if row is not None and row.crcs is not None:
            with contextlib.suppress(FileNotFoundError, StrangeFileError):
                inode, fault = read_fault(self.layout.blobs, row)
                if not fault:
                    return
        self.space.drop(key, inode=inode)

    def _move_unverified(self, *, alone: bool) -> None:
        """After a reboot, move blobs to unverified/ and remove fills, because no data was synced.

        alone: True if no other process has the folder open; a damaged boot file then counts as that
        of another boot.
        """
        layout, now, before = self.layout, boot_id(), self.layout.boot
        if before not in (None, now) and alone:
            for name in layout.names("blobs"):
                layout.blobs.rename(name, layout.unverified, name)
            self.space.remove_fills()
        if before != now:
            layout.note_boot(now)
        if before == "":
            self.damage.append("boot")

    def _adopt(self, key: str) -> bool:
        """Verify a blob that was written before the last reboot, and publish it again if its
        checksums are right; otherwise remove it. Return True if the blob is published."""
        old = self.layout.unverified
        if not self._has_unverified or not old.has(key):
            return False
        with self.layout.holding(key):
            row, fault = self.catalogue.blob(key), "its checksums are unknown"
            try:
                if row is not None and row.crcs is not None:
                    _, fault = read_fault(old, row)
            except FileNotFoundError:
                return self.layout.blobs.has(key)
            except StrangeFileError:
                raise
            except OSError as error:
                refuse_shortage(error, f"{old.path}/{key}")
                fault = f"it can't be read ({error.strerror})"
            if not fault:
                old.rename(key, self.layout.blobs, key)
                return True
            log.warning(
                "%s/%s: after the last reboot %s, so it is fetched again", old.path, key, fault
            )
            with self.catalogue.writing():
                old.remove(key)
                self.catalogue.remove(key)
            return False

    # -- the catalogue follows the files

    def _is_consistent(self, *, compares_sizes: bool) -> bool:
        """Return True if the catalogue agrees with the folder, and there are no fills and no trash.
        Recounts the used bytes. compares_sizes: compare the size of each file, too, which isn't
        necessary if another process has the folder open."""
        at, catalogue = self.layout, self.catalogue
        try:
            counts = catalogue.counts()
            if at.names("fills") or at.names("trash") or counts.get("fill") or counts.get("trash"):
                return False
            if compares_sizes:
                if at.blob_bytes() != catalogue.sizes("ready"):
                    return False
            elif len(at.names("blobs")) + len(at.names("unverified")) != counts.get("ready", 0):
                return False
            return catalogue.number("used") == catalogue.recount()
        except sqlite3.DatabaseError as error:
            if not is_damage(error):
                raise
            return False

    def reconcile(self) -> int:
        """Correct the catalogue according to the files; return the number of corrections. Fills
        that no process works on stay, so that the next reader can continue them."""
        at, catalogue, space = self.layout, self.catalogue, self.space
        with catalogue.writing():
            corrected = space.forget_dead_jobs() + space.remove_fills(group=PRIVATE)
            if wrong := catalogue.remove_wrong():
                self.damage.append(f"catalogue.db ({wrong} of its rows), read again from the files")
            sizes = at.blob_bytes()
            corrected += wrong + sum(self._correct_row(row, sizes) for row in catalogue.blobs())
            states = {row.key: row.state for row in catalogue.blobs()}
            for folder in ("blobs", "unverified", "trash"):
                corrected += self._record_files(folder, states)
            for name in at.names("fills"):
                if states.get(name.partition(".")[0]) != "fill":
                    corrected += space.record_fill(name)
            space.empty_trash()
            catalogue.rescued.clear()
            catalogue.recount()
        space.others_bytes = at.others_bytes()
        return corrected

    def _correct_row(self, row: BlobRow, sizes: dict[str, int]) -> int:
        """Correct a row if its file was changed, published or removed; return 1 if it was wrong."""
        at, catalogue = self.layout, self.catalogue
        if row.state == "trash":
            exists = at.trash.has(row.key)
        elif row.state == "ready":
            exists = row.key in sizes
            if exists and sizes[row.key] != row.disk_bytes:
                catalogue.add(replace(row, disk_bytes=sizes[row.key]))
        elif at.blobs.has(row.key):  # killed between the rename and the catalogue's change
            with open(at.blobs.open(row.key), "rb", buffering=0) as file:
                self._enter(row, crcs_of_file(file.fileno()))
            return 1
        else:
            exists = at.fills.has(part_name(row.key)) or not self.space.remove_fill(row.key)
        if not exists:
            catalogue.remove(row.key)
        return int(not exists)

    def _record_files(self, folder: str, known: Container[str]) -> int:
        """Record the files of a subfolder that the catalogue doesn't list, and remove links; return
        their number."""
        place: Folder = getattr(self.layout, folder)
        corrected = 0
        for name in self.layout.names(folder):
            if name in known:
                continue
            try:
                with open(place.open(name), "rb", buffering=0) as file:
                    status = os.fstat(file.fileno())
            except FileNotFoundError:
                continue
            except StrangeFileError:
                corrected += place.remove(name)
                continue
            state: State = "trash" if folder == "trash" else "ready"
            disk_bytes = self.layout.allocated_bytes(status)
            self.catalogue.adopt(name, status, disk_bytes=disk_bytes, state=state)
            corrected += 1
        return corrected

    # -- a damaged catalogue

    def repairing(self, act: Callable[[], T]) -> T:
        """Return act(). If it finds the catalogue damaged, rebuild the catalogue and call it
        again."""
        try:
            return act()
        except sqlite3.DatabaseError as error:
            if not is_damage(error):
                raise
            damage = str(error)
            self.catalogue.renew(error, lambda: self._begin(found=damage))
            return act()

    def _note_rebuilt(self, found: str | None) -> None:
        """Describe in `damage` that the catalogue was rebuilt, unless the folder is new as well."""
        damage, moved = self.catalogue.pop_damage()
        blobs = self.catalogue.counts().get("ready", 0)
        what = damage or found
        if what is None and not blobs:
            return
        old = f"; the old file is now {moved}" if moved else "; the old file was removed"
        unknown = self.catalogue.unknown()
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


def read_fault(folder: Folder, row: BlobRow) -> tuple[int, str]:
    """Compare a whole blob's file with its row; return the file's inode and its fault, "" if it has
    none. Raises FileNotFoundError, StrangeFileError, OSError."""
    with open(folder.open(row.key), "rb", buffering=0) as file:
        status, fault = os.fstat(file.fileno()), ""
        if status.st_size != row.size_bytes:
            fault = f"it has {status.st_size:,} bytes, wanted {row.size_bytes:,}"
        elif row.crcs is not None and crcs_of_file(file.fileno()) != row.crcs:
            fault = "its checksums are wrong"
        return status.st_ino, fault


def _fill_row(source: BlobSource, group: str, pieces: int = 0) -> BlobRow:
    """Return the catalogue's row of a fill. pieces: see `fill_disk_bytes`."""
    size_bytes = source.size_bytes
    disk_bytes = fill_disk_bytes(size_bytes, pieces)
    return BlobRow(
        key=source.key, group=group, uri=source.uri, size_bytes=size_bytes, disk_bytes=disk_bytes
    )
