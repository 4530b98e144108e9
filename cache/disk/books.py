"""The file of the cache's books: one SQLite connection, its transactions, and damage to it.

WAL mode. Every change is one short transaction behind a flock, since under load SQLite's own
waiting reaches seconds. New books take the name of the old: who has those open finds out before the
next transaction.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import sqlite3
import sys
import threading
from typing import TYPE_CHECKING, Any

from penstock.cache.base.locks import wait_for
from penstock.cache.base.trust import StrangeFileError
from penstock.cache.disk.damage import OtherVersionError, UncountedError, is_damage

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from penstock.cache.base.folders import Folder

_LOCK_TIMEOUT_S = 60.0
_NAME = "catalogue.db"
_FILES = (_NAME, f"{_NAME}-wal", f"{_NAME}-shm", f"{_NAME}-journal")
_VERSION = 2  # of the schema; books of another are made anew, without a word
_PRAGMAS = (
    "cell_size_check = ON",
    "journal_mode = WAL",
    "synchronous = NORMAL",
    "wal_autocheckpoint = 32",
    "journal_size_limit = 262144",
)
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


class Books:
    """Books are the open SQLite file of a cache. Safe for several threads.

    folder: of the cache. mend: books that are damaged are made anew here, empty; `damage` says what
    was wrong. Raises sqlite3.Error and OSError.
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
            with self._locked():
                try:
                    self._db = self._connect()
                except sqlite3.Error as error:
                    if not mend or not is_damage(error):
                        raise
                    self.damage = None if isinstance(error, OtherVersionError) else str(error)
                    self._remove()
                    self._db = self._connect()
        except BaseException:
            os.close(self._lock)
            self._lock = -1
            raise

    # -- questions and changes

    def row(self, query: str, values: Sequence[Any] = ()) -> tuple[Any, ...] | None:
        """The first row that a query finds."""
        with self._mutex:
            found: tuple[Any, ...] | None = self._db.execute(query, values).fetchone()
        return found

    def rows(self, query: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """All rows that a query finds."""
        with self._mutex:
            return self._db.execute(query, values).fetchall()

    def change(self, statement: str, values: Sequence[Any] = ()) -> None:
        """Execute a statement in a transaction: this thread's, if it has one."""
        with self.writing():
            self._db.execute(statement, values)

    def change_each(self, statement: str, values: Iterable[Sequence[Any]]) -> None:
        """Execute a statement with each of some values, in one transaction."""
        with self.writing():
            self._db.executemany(statement, values)

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """One transaction; inside, one thread of one process of the node is at work."""
        with self._mutex:
            if self._depth:
                yield
                return
            with self._current(), self._transaction():
                yield

    def size_bytes(self) -> int:
        """What the books themselves take, without their log."""
        found = self.row("PRAGMA page_count")
        return int(found[0]) * 4096 if found else 0

    def renew(
        self, error: Exception, *, is_empty: Callable[[], bool], enter: Callable[[], object]
    ) -> None:
        """Make damaged books anew, unless another process did meanwhile. error: what was found.
        enter: puts what is there into empty books, in the same transaction."""
        with self._mutex, self._locked():
            self._depth = 0
            if self._is_replaced():
                self._reopen()
            elif not isinstance(error, UncountedError):
                self._remove()
                self._reopen()
            if is_empty():
                with self._transaction():
                    enter()

    def close(self) -> None:
        """Close the file and its lock. Safe to call twice."""
        with self._mutex:
            if self._lock >= 0:
                self._db.close()
                os.close(self._lock)
                self._lock = -1

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if getattr(self, "_lock", -1) >= 0 and not is_finalizing():
            self.close()

    # -- the lock and the transaction

    @contextlib.contextmanager
    def _current(self) -> Iterator[None]:
        """Hold the flock, with the books that are in force now."""
        with self._locked():
            if self._is_replaced():
                self._reopen()
            yield

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
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

    # -- the file

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
            self._prepare(db, path, is_new=is_new)
        except sqlite3.OperationalError as error:
            db.close()
            if is_damage(error) or not self._can_be_written(error):
                raise
            raise sqlite3.DatabaseError(str(error)) from error
        except BaseException:
            db.close()
            raise
        return db

    def _prepare(self, db: sqlite3.Connection, path: str, *, is_new: bool) -> None:
        """Check books that were just opened, and make their tables."""
        db.text_factory = lambda data: data.decode("utf-8", "replace")
        (version,) = db.execute("PRAGMA user_version").fetchone()
        if (found := os.stat(path)).st_ino != self._inode or self._is_replaced():
            raise StrangeFileError(
                errno.EPERM, f"the folder was replaced meanwhile (inode {found.st_ino})", path
            )
        if not is_new and version != _VERSION:
            (tables,) = db.execute("SELECT COUNT(*) FROM sqlite_master").fetchone()
            if tables and not version:
                raise OtherVersionError("its books are of the first version")
            if tables:
                raise sqlite3.DatabaseError(f"its books are of version {version}")
        for pragma in _PRAGMAS:
            db.execute(f"PRAGMA {pragma}")
        db.executescript(_SCHEMA)
        db.execute(f"PRAGMA user_version = {_VERSION}")
        (verdict,) = db.execute("PRAGMA quick_check(1)").fetchone()
        if verdict != "ok":
            raise sqlite3.DatabaseError(verdict)

    def _can_be_written(self, error: sqlite3.OperationalError) -> bool:
        """Whether books that SQLite takes for read-only are so by damage."""
        read_only = getattr(error, "sqlite_errorcode", 0) & 0xFF == 8
        return read_only and os.access(_NAME, os.W_OK, dir_fd=self._folder.fd)

    def _is_replaced(self) -> bool:
        """Whether the books that are open aren't those of that name any more."""
        try:
            return self._folder.stat(_NAME).st_ino != self._inode
        except FileNotFoundError:
            return True

    def _remove(self) -> None:
        for name in _FILES:  # the books first: SQLite then leaves the other names alone at close
            self._folder.remove(name)

    def _reopen(self) -> None:
        old, self._db = self._db, self._connect()
        with contextlib.suppress(sqlite3.Error):
            old.close()
