"""The cache's books: which blob takes how much of the limit, and which jobs want what kept.

SQLite in WAL mode. Every change is one short transaction behind a flock, since under load SQLite's
own waiting reaches seconds. Nothing here is needed for a hit, and nothing here is the truth about
bytes: books that are lost or damaged are made anew from the files.

SQLite notices damage to its own structure only, so what must be right carries a checksum of its
own: wrong ones are sqlite3.DatabaseError, as a torn page is (`is_damage`). New books take the name
of the old: who has those open finds out before the next transaction.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
import sqlite3
import sys
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from crc32c import crc32c

from penstock.cache.base.folders import StrangeFileError
from penstock.cache.base.locks import wait_for

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from penstock.cache.base.folders import Folder

State = Literal["fill", "ready", "trash"]

_LOCK_TIMEOUT_S = 60.0
_NAME = "catalogue.db"
_FILES = (_NAME, f"{_NAME}-wal", f"{_NAME}-shm", f"{_NAME}-journal")
_VERSION = 2  # of the schema; books of another are made anew, without a word
_KEY = re.compile(r"[0-9a-f]+(-[0-9]+)?")
_STATES = ("fill", "ready", "trash")
# What SQLite says of a disk or of other processes: SQLITE_BUSY, LOCKED, NOMEM, READONLY, INTERRUPT,
# IOERR, FULL, CANTOPEN, PROTOCOL. All else is said of the file.
_DISK_CODES = frozenset((5, 6, 7, 8, 9, 10, 13, 14, 15))
_SHORT_READ, _FILE_MOVED = 522, 1032
_SCHEMA = """
CREATE TABLE IF NOT EXISTS facts (name TEXT PRIMARY KEY, value TEXT) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS labels (grp TEXT PRIMARY KEY, label TEXT) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS blobs (
    key TEXT PRIMARY KEY, grp TEXT, uri TEXT, size INTEGER, disk INTEGER, state TEXT, kept INTEGER,
    used REAL, crcs BLOB, sum INTEGER) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS by_use ON blobs (state, kept, used);
CREATE TABLE IF NOT EXISTS members (
    id INTEGER PRIMARY KEY, grp TEXT, reads TEXT, wanted INTEGER, share INTEGER, below TEXT,
    pid INTEGER, began REAL);
CREATE TABLE IF NOT EXISTS names (
    path TEXT PRIMARY KEY, size INTEGER, version TEXT, sum INTEGER) WITHOUT ROWID;
"""
_PINNED = (
    "EXISTS (SELECT 1 FROM members WHERE members.grp = blobs.grp"
    " AND (blobs.kept = 1 OR blobs.key < members.below))"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One blob. group: of the dataset that fetched it; size_bytes: of its content; disk_bytes:
    counted into the limit; kept: manifests and sidecars; used_s: since the epoch; crcs: CRC-32C of
    each MiB, little-endian, None where nobody computed them."""

    key: str
    group: str
    uri: str
    size_bytes: int
    disk_bytes: int
    state: State
    kept: bool
    used_s: float
    crcs: bytes | None
    pinned: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A loader that uses the cache. reads: names the blobs that it reads in an epoch; wanted_bytes:
    all of them; share_bytes: what may be pinned for it; below: keys below this are pinned."""

    id: int
    group: str
    reads: str
    wanted_bytes: int
    share_bytes: int
    below: str
    pid: int


class Catalogue:
    """One connection; safe for several threads. Raises sqlite3.Error and OSError.

    folder: of the cache. mend: books that are damaged are made anew here, empty; `damage` says what
    was wrong.
    """

    def __init__(self, folder: Folder, *, mend: bool = True) -> None:
        self._mutex = threading.RLock()
        self._depth = 0
        self._folder = folder
        self._inode = 0
        self.damage: str | None = None
        self._lock = -1
        self._lock = folder.open_or_create("catalogue.lock")
        try:
            with self._holding():
                try:
                    self._db = self._connect()
                except sqlite3.Error as error:
                    if not mend or not is_damage(error):
                        raise
                    self.damage = None if isinstance(error, _OtherVersionError) else str(error)
                    self._remove()
                    self._db = self._connect()
        except BaseException:
            os.close(self._lock)
            self._lock = -1
            raise

    def _connect(self) -> sqlite3.Connection:
        """Open the books; the caller holds the flock. SQLite opens them by their path: what stands
        there is ours before and behind that."""
        folder = self._folder
        # Made before SQLite would, which takes the umask's mode.
        fd = folder.open_or_create(_NAME)
        try:
            self._inode = os.fstat(fd).st_ino
            is_new = not os.fstat(fd).st_size
        finally:
            os.close(fd)
        for name in _FILES[1:]:
            if folder.is_folder(name):
                folder.remove(name)
            folder.check(name)
        path = os.path.join(os.readlink(f"/proc/self/fd/{folder.fd}"), _NAME)
        db = sqlite3.connect(
            path, timeout=_LOCK_TIMEOUT_S, isolation_level=None, check_same_thread=False
        )
        try:
            db.text_factory = lambda data: data.decode("utf-8", "replace")
            (version,) = db.execute("PRAGMA user_version").fetchone()
            if (found := os.stat(path)).st_ino != self._inode or self._moved():
                raise StrangeFileError(
                    errno.EPERM, f"the folder was replaced meanwhile (inode {found.st_ino})", path
                )
            if not is_new and version != _VERSION:
                (tables,) = db.execute("SELECT COUNT(*) FROM sqlite_master").fetchone()
                if tables and not version:
                    raise _OtherVersionError("its books are of the first version")
                if tables:
                    raise sqlite3.DatabaseError(f"its books are of version {version}")
            db.execute("PRAGMA cell_size_check = ON")
            db.execute("PRAGMA journal_mode = WAL")
            db.execute("PRAGMA synchronous = NORMAL")
            db.execute("PRAGMA wal_autocheckpoint = 32")
            db.execute("PRAGMA journal_size_limit = 262144")
            db.executescript(_SCHEMA)
            db.execute(f"PRAGMA user_version = {_VERSION}")
            (well,) = db.execute("PRAGMA quick_check(1)").fetchone()
            if well != "ok":
                raise sqlite3.DatabaseError(well)
        except sqlite3.OperationalError as error:
            db.close()
            if is_damage(error) or not self._can_be_written(error):
                raise
            raise sqlite3.DatabaseError(str(error)) from error
        except BaseException:
            db.close()
            raise
        return db

    def _can_be_written(self, error: sqlite3.OperationalError) -> bool:
        """Whether books that SQLite takes for read-only are so by damage."""
        read_only = getattr(error, "sqlite_errorcode", 0) & 0xFF == 8
        return read_only and os.access(_NAME, os.W_OK, dir_fd=self._folder.fd)

    def _moved(self) -> bool:
        """Whether the books that are open aren't those of that name any more."""
        try:
            return self._folder.stat(_NAME).st_ino != self._inode
        except FileNotFoundError:
            return True

    def _remove(self) -> None:
        for name in _FILES:  # the books first: SQLite then leaves the other names alone at close
            self._folder.remove(name)

    def heal(self, error: Exception, enter: Callable[[], object]) -> None:
        """Make damaged books anew, unless another process did meanwhile. error: what was found.
        enter: puts what is there into empty books, in the same transaction."""
        with self._mutex, self._holding():
            self._depth = 0
            if self._moved():
                self._reopen()
            elif not isinstance(error, UncountedError):
                self._remove()
                self._reopen()
            if self.fact("used") is None:
                with self._transaction():
                    enter()

    def _reopen(self) -> None:
        old, self._db = self._db, self._connect()
        with contextlib.suppress(sqlite3.Error):
            old.close()

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Hold the flock, with the books that are in force now."""
        with self._holding():
            if self._moved():
                self._reopen()
            yield

    @contextlib.contextmanager
    def _holding(self) -> Iterator[None]:
        """Hold the flock: SQLite's own queue makes single writers wait for more than a second."""

        def locked() -> bool:
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            return True

        what = f"{self._folder.path}: the catalogue's lock"
        wait_for(locked, timeout_s=_LOCK_TIMEOUT_S, what=what)
        try:
            yield
        finally:
            fcntl.flock(self._lock, fcntl.LOCK_UN)

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """One transaction; inside, one thread of one process of the node is at work."""
        with self._mutex:
            if self._depth:
                yield
                return
            with self._alone(), self._transaction():
                yield

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        self._db.execute("BEGIN IMMEDIATE")
        self._depth = 1
        try:
            yield
            self._db.execute("COMMIT")
        except BaseException:
            with contextlib.suppress(sqlite3.Error):
                self._db.execute("ROLLBACK")
            raise
        finally:
            self._depth = 0

    # -- facts

    def fact(self, name: str) -> int | None:
        """A number that was set. Raises sqlite3.DatabaseError for one that wasn't."""
        with self._mutex:
            found = self._db.execute("SELECT value FROM facts WHERE name = ?", (name,)).fetchone()
        if found is None:
            return None
        number, _, _ = str(found[0]).partition(" ")
        if found[0] != _signed(name, number) or not number.isdecimal():
            raise sqlite3.DatabaseError(f"the fact {name} isn't what was written")
        return int(number)

    def set_fact(self, name: str, value: int) -> None:
        with self.writing():
            row = (name, _signed(name, str(value)))
            self._db.execute("INSERT OR REPLACE INTO facts VALUES (?, ?)", row)

    def label(self, group: str, text: str) -> None:
        """Name a group for people."""
        with self.writing():
            self._db.execute("INSERT OR REPLACE INTO labels VALUES (?, ?)", (group, text))

    def labels(self) -> dict[str, str]:
        with self._mutex:
            found = self._db.execute("SELECT grp, label FROM labels")
            return {str(group): str(label) for group, label in found}

    def own_bytes(self) -> int:
        """What the books themselves take, with room for the log."""
        with self._mutex:
            (pages,) = self._db.execute("PRAGMA page_count").fetchone()
        return int(pages) * 4096

    # -- blobs

    @property
    def used_bytes(self) -> int:
        """Counted into the limit now. Raises UncountedError."""
        used = self.fact("used")
        if used is None:
            raise UncountedError("what is used wasn't counted")
        return used

    def _use(self, more: int) -> None:
        if (used := self.fact("used")) is not None:
            self.set_fact("used", max(0, used + more))

    def recount(self) -> int:
        """Sum up anew; returns the bytes."""
        with self.writing():
            (total,) = self._db.execute("SELECT COALESCE(SUM(disk), 0) FROM blobs").fetchone()
            self.set_fact("used", _whole(total))
        return _whole(total)

    def add(
        self,
        key: str,
        *,
        group: str,
        uri: str,
        size_bytes: int,
        disk_bytes: int,
        state: State,
        kept: bool,
        crcs: bytes | None = None,
        used_s: float | None = None,
    ) -> None:
        """Enter a blob; one of that key is replaced."""
        when = time.time() if used_s is None else used_s
        with self.writing():
            self.remove(key)
            row = (key, group, uri, size_bytes, disk_bytes, state, int(kept), when, crcs)
            more = (*row, _sum_of(row))
            self._db.execute("INSERT INTO blobs VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", more)
            self._use(disk_bytes)

    def resize(self, row: Row, disk_bytes: int) -> None:
        """Count a blob with another size on the disk."""
        self.add(
            row.key,
            group=row.group,
            uri=row.uri,
            size_bytes=row.size_bytes,
            disk_bytes=disk_bytes,
            state=row.state,
            kept=row.kept,
            crcs=row.crcs,
            used_s=row.used_s,
        )

    def remove(self, key: str) -> None:
        with self.writing():
            row = self.row(key)
            if row is not None:
                self._db.execute("DELETE FROM blobs WHERE key = ?", (key,))
                self._use(-row.disk_bytes)

    def to_trash(self, key: str, name: str) -> None:
        """A blob's file became `name` in the trash; its bytes count on until it is gone."""
        with self.writing():
            row = self.row(key)
            if row is not None:
                self.remove(key)
                self.add(
                    name,
                    group=row.group,
                    uri=row.uri,
                    size_bytes=row.size_bytes,
                    disk_bytes=row.disk_bytes,
                    state="trash",
                    kept=row.kept,
                    used_s=row.used_s,
                )

    def touch(self, used: dict[str, float]) -> None:
        """Note last uses, seconds since the epoch. A clock that ran ahead is set back."""
        now = time.time()
        with self.writing():
            self._db.executemany(
                "UPDATE blobs SET used = ? WHERE key = ?",
                [(min(when, now), key) for key, when in used.items()],
            )

    def row(self, key: str) -> Row | None:
        with self._mutex:
            found = self._db.execute(
                f"SELECT *, {_PINNED} FROM blobs WHERE key = ?", (key,)
            ).fetchone()
        return None if found is None else _row(found)

    def rows(self, *, state: State | None = None) -> list[Row]:
        """All blobs, or those of a state, least recently used first."""
        where, values = ("WHERE state = ?", (state,)) if state else ("", ())
        with self._mutex:
            found = self._db.execute(
                f"SELECT *, {_PINNED} FROM blobs {where} ORDER BY kept, used", values
            ).fetchall()
        return [_row(one) for one in found]

    def counts(self) -> dict[str, int]:
        """Blobs by state."""
        with self._mutex:
            return dict(self._db.execute("SELECT state, COUNT(*) FROM blobs GROUP BY state"))

    def sizes(self, state: State) -> dict[str, int]:
        """What each blob of a state is counted with, in bytes."""
        with self._mutex:
            found = self._db.execute("SELECT key, disk FROM blobs WHERE state = ?", (state,))
            return dict(found)

    def remove_wrong(self) -> int:
        """Remove rows that aren't what was written; returns how many."""
        with self.writing():
            found = self._db.execute("SELECT *, 0 FROM blobs").fetchall()
            wrong = [one[0] for one in found if not _is_right(one[:-1])]
            self._db.executemany("DELETE FROM blobs WHERE key = ?", [(key,) for key in wrong])
        return len(wrong)

    def victims(self) -> Iterator[Row]:
        """Whole blobs that no job pins: data before manifests, least recently used first."""
        with self._mutex:
            found = self._db.execute(
                f"SELECT *, 0 FROM blobs WHERE state = 'ready' AND NOT {_PINNED} "
                "ORDER BY kept, used"
            ).fetchall()
        for one in found:
            yield _row(one)

    def kept_bytes(self, group: str) -> int:
        """Manifests and sidecars of a group."""
        with self._mutex:
            (total,) = self._db.execute(
                "SELECT COALESCE(SUM(disk), 0) FROM blobs WHERE grp = ? AND kept = 1", (group,)
            ).fetchone()
        return _whole(total)

    # -- jobs

    def owed_bytes(self, group: str) -> int:
        """What a group's largest job lacks of its share."""
        with self._mutex:
            (owed,) = self._db.execute(
                "SELECT COALESCE(MAX(MIN(share, wanted) - (SELECT COALESCE(SUM(disk), 0) FROM blobs"
                " WHERE grp = members.grp AND state != 'trash' AND kept = 0"
                " AND key < members.below)), 0) FROM members WHERE grp = ?",
                (group,),
            ).fetchone()
        return _whole(owed)

    def jobs(self) -> list[Job]:
        with self._mutex:
            found = self._db.execute(
                "SELECT id, grp, reads, wanted, share, below, pid FROM members"
            )
            return [
                Job(
                    id=_whole(one[0]),
                    group=str(one[1]),
                    reads=str(one[2]),
                    wanted_bytes=_whole(one[3]),
                    share_bytes=_whole(one[4]),
                    below=str(one[5]),
                    pid=_whole(one[6]),
                )
                for one in found
            ]

    def add_job(self, job: Job) -> None:
        """Enter a job, or write its row anew."""
        row = (job.id, job.group, job.reads, job.wanted_bytes, job.share_bytes, job.below, job.pid)
        with self.writing():
            self._db.execute(
                "INSERT OR REPLACE INTO members VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                (*row, time.time()),
            )

    def set_share(self, job: int, *, share_bytes: int, below: str) -> None:
        with self.writing():
            self._db.execute(
                "UPDATE members SET share = ?, below = ? WHERE id = ?", (share_bytes, below, job)
            )

    def remove_job(self, job: int) -> None:
        with self.writing():
            self._db.execute("DELETE FROM members WHERE id = ?", (job,))

    # -- names

    def remember(self, path: str, found: tuple[int, str] | None) -> None:
        """What a store said of a name: (bytes, version), None if it isn't there."""
        size, version = found or (-1, "")
        with self.writing():
            row = (path, size, version)
            more = (*row, _sum_of(row))
            self._db.execute("INSERT OR REPLACE INTO names VALUES (?, ?, ?, ?)", more)

    def recall(self, path: str) -> tuple[bool, tuple[int, str] | None]:
        """(whether it was ever asked, what the answer was)."""
        with self._mutex:
            return recalled(self._db, path)

    def close(self) -> None:
        """Safe to call twice."""
        with self._mutex:
            if self._lock >= 0:
                self._db.close()
                os.close(self._lock)
                self._lock = -1

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if getattr(self, "_lock", -1) >= 0 and not is_finalizing():
            self.close()


def new_job() -> int:
    """A number for a job. By chance: ids that begin anew with new books would meet older jobs'."""
    return secrets.randbits(60) + 1


def recalled(books: sqlite3.Connection, path: str) -> tuple[bool, tuple[int, str] | None]:
    """See Catalogue.recall. A row that isn't what was written says nothing."""
    question = "SELECT size, version, sum FROM names WHERE path = ?"
    found = books.execute(question, (path,)).fetchone()
    if found is None or found[2] != _sum_of((path, *found[:2])):
        return False, None
    return True, None if found[0] < 0 else (int(found[0]), str(found[1]))


def is_damage(error: BaseException) -> bool:
    """Whether an error says that the books are damaged, and not that the disk is full or busy."""
    if not isinstance(error, sqlite3.DatabaseError) or isinstance(error, sqlite3.ProgrammingError):
        return False
    code = getattr(error, "sqlite_errorcode", None)
    if code is None:  # ours
        return not isinstance(error, sqlite3.OperationalError)
    return code in (_SHORT_READ, _FILE_MOVED) or code & 0xFF not in _DISK_CODES


class UncountedError(sqlite3.DatabaseError):
    """New books, into which nobody has put what is there."""


class _OtherVersionError(sqlite3.DatabaseError):
    """Books of another version of the schema."""


def _row(found: tuple[Any, ...]) -> Row:
    *row, pinned = found
    if not _is_right(row):
        raise sqlite3.DatabaseError("a blob's row isn't what was written")
    key, group, uri, size, disk, state, kept, used, crcs, _ = row
    return Row(
        key=key,
        group=group,
        uri=uri,
        size_bytes=size,
        disk_bytes=disk,
        state=state,
        kept=bool(kept),
        used_s=float(used) if isinstance(used, int | float) else 0.0,
        crcs=crcs,
        pinned=bool(pinned),
    )


def _is_right(row: Sequence[Any]) -> bool:
    *plain, crc = row
    key, state = str(plain[0]), plain[5]
    return bool(crc == _sum_of(plain) and _KEY.fullmatch(key) and state in _STATES)


def _sum_of(row: Sequence[Any]) -> int:
    """Checksum of a row; of a blob's, all but its last use."""
    return int(crc32c(repr((*row[:7], *row[8:])).encode("utf-8", "surrogateescape")))


def _signed(name: str, value: str) -> str:
    return f"{value} {crc32c(f'{name} {value}'.encode()):08x}"


def _whole(value: object) -> int:
    if not isinstance(value, int):
        raise sqlite3.DatabaseError(f"{value!r} stands where a number was written")
    return value
