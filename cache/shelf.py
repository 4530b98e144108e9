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

import numpy as np
from crc32c import crc32c

from cache.catalogue import Catalogue, rebuilt
from cache.errors import ConfigError, StalledError
from cache.fills import Fill, Pieces, discard, fill_disk_bytes
from cache.layout import Layout, boot_id, disk_bytes, write_small
from cache.locks import ByteLocks, ReaderLocks, wait_for
from cache.mapping import Map
from cache.sizes import format_size

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from cache.blob import BlobSource
    from cache.catalogue import Row

_log = logging.getLogger("penstock")

CRC_BLOCK = 2**20
# What the books' log, the folders themselves and the small files take beside the blobs.
SLACK_BYTES = 320 * 2**10
_LEAST_OWN_BYTES = 512 * 2**10
_ENTRY_BYTES = 128  # of a folder, for each blob
_KEY_TIMEOUT_S = 30.0
_EVICTOR_S = 5.0
_FREE_SHARE = 0.9
_OPEN_BYTE = 0
_USES_KEPT = 256


class Shelf:
    """One open of a cache folder by one process; safe for several threads.

    max_bytes: None takes the limit that the folder has, or most of the free space. Raises
    ConfigError (network file system, newer format, another limit in use), OSError, sqlite3.Error.
    """

    def __init__(self, root: str, *, max_bytes: int | None, mode: int = 0o700) -> None:
        self.layout = Layout(root)
        self.evicted = 0
        self._used: dict[str, float] = {}
        self._full_until = 0.0
        self.layout.make(mode)
        self.catalogue = self._open_catalogue()
        self.readers = ReaderLocks(self.layout.lock("readers"))
        self._evictor = ByteLocks(self.layout.lock("readers"))
        self.jobs = ByteLocks(self.layout.lock("jobs"))
        self.max_bytes = self._agree_on_limit(max_bytes)
        self._others_bytes = self.layout.others_bytes()
        self._note_boot()
        self._has_old = bool(self.layout.names("unverified"))
        self._look_over()

    def _open_catalogue(self) -> Catalogue:
        paths = self.layout.catalogue, self.layout.lock("catalogue")
        try:
            return Catalogue(*paths)
        except sqlite3.DatabaseError as error:
            if isinstance(error, sqlite3.OperationalError):  # busy, full, read-only: not damage
                raise
            _log.warning("%s is damaged (%s): it is made anew", self.layout.catalogue, error)
            return rebuilt(*paths)

    def _agree_on_limit(self, wanted: int | None) -> int:
        # Every process that has the folder open holds this byte; who changes the limit is alone.
        with self.catalogue.writing():
            known = self.catalogue.fact("max_bytes")
            if wanted is None and known is None:
                wanted = int(self._free_bytes() * _FREE_SHARE)
            alone = self.jobs.lock(_OPEN_BYTE)
            self.jobs.unlock(_OPEN_BYTE)
            if wanted is not None and known != str(wanted):
                if known is not None and not alone:
                    raise ConfigError(
                        f"{self.layout.root}: max_bytes: got {format_size(wanted)}, and running "
                        f"jobs use this folder with {format_size(int(known))}: one folder, one "
                        "limit. Give that one, another folder, or wait until they end."
                    )
                self.catalogue.set_fact("max_bytes", str(wanted))
                known = str(wanted)
            self.jobs.lock(_OPEN_BYTE, shared=True)
        assert known is not None
        return int(known)

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
                self._to_trash(row.key, self.layout.blob(row.key))
                leaving += row.disk_bytes

    def _to_trash(self, key: str, path: str) -> None:
        trash = self.layout.trash(key, os.stat(path).st_ino)
        os.rename(path, trash)
        self.catalogue.to_trash(key, os.path.basename(trash))

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
        for path in (self.layout.blob(row.key), self.layout.unverified(row.key)):
            with contextlib.suppress(FileNotFoundError):
                inode = os.stat(path).st_ino
                if not self._evictor.lock(inode):
                    return False
                try:
                    os.unlink(path)
                    self.evicted += 1
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
        part = self.layout.part(row.key)
        keys = ByteLocks(self.layout.lock("keys"))
        try:
            if not keys.lock(_offset(row.key)):
                return False
            with contextlib.suppress(FileNotFoundError):
                inode = os.stat(part).st_ino
                if not self._evictor.lock(inode):
                    return False
                self._evictor.unlock(inode)  # nobody new can come: the key is ours
            discard(part, self.layout.map(row.key))
            if not os.path.exists(self.layout.blob(row.key)):
                self.catalogue.remove(row.key)
                return True
            return False
        finally:
            keys.close()

    def empty_trash(self) -> None:
        """Remove what was dropped and is mapped by nobody any more."""
        for name in self.layout.names("trash"):
            path = os.path.join(self.layout.root, "trash", name)
            try:
                inode = os.stat(path).st_ino
            except FileNotFoundError:
                continue
            if self._evictor.lock(inode):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(path)
                self._evictor.unlock(inode)
                self.catalogue.remove(name)

    def bury_dead_jobs(self) -> int:
        """Forget jobs whose process is gone; returns how many."""
        dead = 0
        probe = ByteLocks(self.layout.lock("jobs"))
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
        keys = ByteLocks(self.layout.lock("keys"))
        try:
            with keys.holding(_offset(key), timeout_s=timeout_s, what=f"blob {key}"):
                yield
        finally:
            keys.close()

    def published(self, key: str, size_bytes: int | None) -> Map | None:
        """Map a whole blob; None if it isn't there. One of another size is dropped."""
        path = self.layout.blob(key)
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            if self._has_old and self._verified(key):
                return self.published(key, size_bytes)
            return None
        try:
            found = os.fstat(fd)
            if found.st_size == 0 or (size_bytes is not None and found.st_size != size_bytes):
                self.drop(key)
                return None
            inode = found.st_ino
            # An evictor holds it for a moment only, whether it takes the file or not.
            try:
                wait_for(lambda: self.readers.hold(inode), timeout_s=_EVICTOR_S, what=path)
            except StalledError:
                return None
            if not os.fstat(fd).st_nlink:
                self.readers.let_go(inode)
                return None
            try:
                mapped = Map(fd, on_unmap=lambda: self.readers.let_go(inode))
            except BaseException:
                self.readers.let_go(inode)
                raise
        finally:
            os.close(fd)
        self._note_use(key)
        return mapped

    def _verified(self, key: str) -> bool:
        """Take over a blob of before the last boot if its checksums are right."""
        path = self.layout.unverified(key)
        if not os.path.exists(path):
            return False
        with self.holding(key):
            row = self.catalogue.row(key)
            try:
                fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            except FileNotFoundError:
                return os.path.exists(self.layout.blob(key))
            try:
                well = row is not None and row.crcs is not None and block_crcs(fd) == row.crcs
            except OSError:
                well = False
            finally:
                os.close(fd)
            if well:
                os.rename(path, self.layout.blob(key))
            else:
                _log.warning("%s: not whole after a reboot: it is fetched again", path)
                with self.catalogue.writing():
                    os.unlink(path)
                    self.catalogue.remove(key)
            return well

    def fill(self, source: BlobSource, *, group: str, pinned: bool) -> tuple[Fill, Map] | None:
        """Open the fill of a blob, or begin it; None if there is no room, or it is published by
        now. pinned: room is looked for even if there was none a moment ago. Raises OSError (the
        disk is full, …)."""
        key, pieces = source.key, Pieces(source)
        part, marks = self.layout.part(key), self.layout.map(key)
        with self.holding(key):
            if os.path.exists(self.layout.blob(key)) or not pieces.size_bytes:
                return None
            try:
                fill = Fill(part, marks, pieces)
            except (FileNotFoundError, ValueError):
                disk = fill_disk_bytes(pieces.size_bytes, pieces.count)
                if not self._reserve(source, group=group, disk=disk, insist=pinned):
                    return None
                try:
                    fill = Fill.make(part, marks, pieces)
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
            try:
                if os.stat(fill.part).st_ino != fill.inode or not fill.is_whole:
                    return
            except FileNotFoundError:
                return
            crcs = _crcs_of(memoryview(data))
            os.rename(fill.part, self.layout.blob(key))
            with contextlib.suppress(FileNotFoundError):
                os.unlink(fill.map_path)
            self._enter(source, group=group, kept=kept, crcs=crcs)

    def _enter(self, source: BlobSource | Row, *, group: str, kept: bool, crcs: bytes) -> None:
        size_bytes = os.stat(self.layout.blob(source.key)).st_size  # an object's wasn't known
        self.catalogue.add(
            source.key,
            group=group,
            uri=source.uri,
            size_bytes=size_bytes,
            disk_bytes=disk_bytes(size_bytes),
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
        part = self.layout.part(source.key)
        try:
            with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
                os.posix_fallocate(file.fileno(), 0, len(data))
                file.write(data)
            crcs = _crcs_of(data)
            os.rename(part, self.layout.blob(source.key))
        except BaseException:
            discard(part, self.layout.map(source.key))
            self.catalogue.remove(source.key)
            raise
        self._enter(source, group=group, kept=kept, crcs=crcs)
        return True

    def drop(self, key: str, *, inode: int | None = None) -> bool:
        """Forget a blob whose bytes are wrong; those who have it mapped keep their map. inode: of
        the wrong file, so that another's fresh one stays. False if it wasn't there."""
        dropped = False
        with self.holding(key), self.catalogue.writing():
            for path in (self.layout.blob(key), self.layout.part(key), self.layout.unverified(key)):
                with contextlib.suppress(FileNotFoundError):
                    found = os.stat(path).st_ino
                    if inode not in (None, found):
                        continue
                    self._to_trash(key, path)
                    dropped = True
            if dropped:
                discard(self.layout.part(key), self.layout.map(key))
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

    def _note_boot(self) -> None:
        """After a reboot blobs are to be verified at their first use, and fills are worth
        nothing: nothing was forced to the disk."""
        now = boot_id()
        with self.catalogue.writing():
            try:
                with open(self.layout.boot_file, encoding="ascii") as file:
                    before = file.read().strip()
            except FileNotFoundError:
                before = now
            if before != now:
                blobs = os.path.join(self.layout.root, "blobs")
                for name in self.layout.names("blobs"):
                    os.rename(os.path.join(blobs, name), self.layout.unverified(name))
                for row in self.catalogue.rows(state="fill"):
                    self._bury(row)
            if before != now or not os.path.exists(self.layout.boot_file):
                write_small(self.layout.boot_file, now)

    def _look_over(self) -> None:
        """Reconcile if something looks unfinished; cheap if all is well."""
        counts = self.catalogue.counts()
        names = [self.layout.names(folder) for folder in ("blobs", "unverified")]
        fills = self.layout.names("fills")
        trash = self.layout.names("trash")
        as_told = sum(map(len, names)) == counts.get("ready", 0)
        if not as_told or fills or trash or counts.get("fill") or counts.get("trash"):
            self.reconcile()
        if self.catalogue.used_bytes > self.budget_bytes:
            self.evict_to(self.budget_bytes)

    def reconcile(self) -> int:
        """Bring books and files together; returns how many things were put right. Fills that
        nobody works on stay, as the next who wants them goes on with them."""
        mended = 0
        with self.catalogue.writing():
            mended += self.bury_dead_jobs()
            for row in self.catalogue.rows():
                mended += self._mend_row(row)
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

    def _mend_row(self, row: Row) -> int:
        blob = self.layout.blob(row.key)
        if row.state == "trash":
            there = os.path.exists(os.path.join(self.layout.root, "trash", row.key))
        elif row.state == "ready":
            there = os.path.exists(blob) or os.path.exists(self.layout.unverified(row.key))
        elif os.path.exists(blob):  # killed between the rename and the books
            with open(blob, "rb") as file:
                crcs = block_crcs(file.fileno())
            self._enter(row, group=row.group, kept=row.kept, crcs=crcs)
            return 1
        else:
            there = os.path.exists(self.layout.part(row.key)) or not self._bury(row)
        if not there:
            self.catalogue.remove(row.key)
        return int(not there)

    def _adopt(self, name: str, folder: str) -> int:
        """Enter a file that the books don't know."""
        path = os.path.join(self.layout.root, folder, name)
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return 0
        try:
            size_bytes = os.fstat(fd).st_size
        finally:
            os.close(fd)
        self.catalogue.add(
            name,
            group="",
            uri="",
            size_bytes=size_bytes,
            disk_bytes=disk_bytes(size_bytes),
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
        keys = ByteLocks(self.layout.lock("keys"))
        try:
            path = os.path.join(self.layout.root, "fills", name)
            if not keys.lock(_offset(key)):
                return 0
            inode = os.stat(path).st_ino
            if not self._evictor.lock(inode):
                return 0
            self._evictor.unlock(inode)
            os.unlink(path)
        except FileNotFoundError:
            return 0
        finally:
            keys.close()
        return 1


def block_crcs(fd: int) -> bytes:
    """CRC-32C of each MiB of a file, little-endian uint32. Raises OSError."""
    size_bytes = os.fstat(fd).st_size
    room = bytearray(CRC_BLOCK)
    found: NDArray[np.uint32] = np.zeros(-(-size_bytes // CRC_BLOCK), "<u4")
    for i in range(len(found)):
        got = os.preadv(fd, [room], i * CRC_BLOCK)
        found[i] = crc32c(memoryview(room)[:got])
    return found.tobytes()


def _crcs_of(data: memoryview) -> bytes:
    blocks = (data[at : at + CRC_BLOCK] for at in range(0, len(data), CRC_BLOCK))
    return b"".join(int(crc32c(block)).to_bytes(4, "little") for block in blocks)


def _offset(key: str) -> int:
    """Where a key's lock is: 60 bits of it."""
    return int(key.partition("-")[0][:15], 16)
