"""Open the catalogue's SQLite file, run its transactions, and detect and replace a damaged one.

The file uses WAL mode. Every change is one short transaction under a flock, because SQLite's own
locks make writers wait for seconds under load. A new catalogue gets the name of the old one; a
process that has the old one open detects that before its next transaction.

SQLite detects damage only to its own structure, so rows and numbers carry a checksum. A wrong
checksum raises sqlite3.DatabaseError, as every other error of a damaged file does; SQLite's codes
distinguish damage from a failing disk."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import sqlite3
import stat
import sys
import threading
from typing import TYPE_CHECKING, Any

from crc32c import crc32c

from penstock.cache.base import StrangeFileError, wait_for

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from penstock.cache.base import Folder

# SQLite's codes for the disk or other processes: SQLITE_BUSY, LOCKED, NOMEM, READONLY, INTERRUPT,
# IOERR, FULL, CANTOPEN, PROTOCOL. All other codes are about the file.
_DISK_CODES = frozenset((5, 6, 7, 8, 9, 10, 13, 14, 15))
_SHORT_READ, _FILE_MOVED = 522, 1032


class UncountedError(sqlite3.DatabaseError):
    """The catalogue is new and doesn't list the folder's files yet."""


class OtherSchemaError(sqlite3.DatabaseError):
    """The catalogue has another version of the schema."""


class ForeignCatalogueError(sqlite3.DatabaseError):
    """The catalogue's file is another program's: it is renamed, not removed."""


def is_damage(error: BaseException) -> bool:
    """Return True if an error means a damaged catalogue, not a full or busy disk."""
    if not isinstance(error, sqlite3.DatabaseError) or isinstance(error, sqlite3.ProgrammingError):
        return False
    code = getattr(error, "sqlite_errorcode", None)
    if code is None:  # raised by Penstock
        return not isinstance(error, sqlite3.OperationalError)
    return code in (_SHORT_READ, _FILE_MOVED) or code & 0xFF not in _DISK_CODES


@contextlib.contextmanager
def as_database_errors() -> Iterator[None]:
    """Convert the errors that a damaged file causes into sqlite3.DatabaseError: sqlite3 raises
    UnicodeDecodeError if its message quotes a damaged schema, and rows may hold any values."""
    try:
        yield
    except UnicodeEncodeError:  # caused by the value to write, not by the file
        raise
    except UnicodeDecodeError as error:
        raise sqlite3.DatabaseError(f"its schema is damaged ({error.reason})") from error
    except (ValueError, TypeError, LookupError, OverflowError) as error:
        raise sqlite3.DatabaseError(f"a row has damaged values ({error})") from error


def row_checksum(row: Sequence[Any]) -> int:
    """Compute the checksum of a row; in a blob's row, of all columns but the last use."""
    return int(crc32c(repr((*row[:7], *row[8:])).encode("utf-8", "surrogateescape")))


def with_checksum(name: str, value: str) -> str:
    """Append the checksum of a named value to it."""
    return f"{value} {crc32c(f'{name} {value}'.encode()):08x}"


def checked_number(value: object) -> int:
    """Return a number ≥ 0. Raises sqlite3.DatabaseError for any other value."""
    if not isinstance(value, int) or value < 0:
        raise sqlite3.DatabaseError(f"got {value!r}, wanted a number")
    return value


_LOCK_TIMEOUT_S = 60.0
_NAME = "catalogue.db"
_FILES = (_NAME, f"{_NAME}-wal", f"{_NAME}-shm", f"{_NAME}-journal")
_VERSION = 2  # of the schema; a catalogue of another version is replaced without a warning
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


class CatalogueFile:
    """The open SQLite file of a cache. Safe for several threads.

    folder: the cache folder. mend: True replaces a damaged file by an empty one. is_upgrade:
    True if the old file had an older version. rescued: the unchecked rows of
    blobs, by key, that could still be read from the damaged file. Raises sqlite3.Error and OSError.
    """

    def __init__(self, folder: Folder, *, mend: bool = True) -> None:
        self._mutex = threading.RLock()
        self._depth = 0
        self._folder = folder
        self._mend = mend
        self._inode = 0
        self._damage: str | None = None
        self._moved: str | None = None
        self.rescued: dict[str, tuple[Any, ...]] = {}
        self.is_upgrade = False
        self._lock = -1
        self._lock = folder.open_or_create("catalogue.lock")
        try:
            with self._locked():
                self._db, self._inode = self._open()
        except BaseException:
            os.close(self._lock)
            self._lock = -1
            raise

    # -- queries and changes

    def row(self, query: str, values: Sequence[Any] = ()) -> tuple[Any, ...] | None:
        """Return the first row that a query finds; None if there is none."""
        return next(iter(self.rows(query, values)), None)

    def rows(self, query: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """Return all rows that a query finds."""
        with self._mutex, self._converting_errors():
            return self._db.execute(query, values).fetchall()

    def change(self, statement: str, values: Sequence[Any] = ()) -> None:
        """Execute a statement in a transaction: the current one, if this thread has one."""
        with self.writing(), self._converting_errors():
            self._db.execute(statement, values)

    def change_each(self, statement: str, values: Iterable[Sequence[Any]]) -> None:
        """Execute a statement once for each of `values`, in one transaction."""
        with self.writing(), self._converting_errors():
            self._db.executemany(statement, values)

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Run one transaction; it excludes all other threads of the node."""
        with self._mutex:
            if self._depth:
                yield
                return
            with self._locked():
                if self._is_replaced():
                    self._reopen()
                with self._transaction():
                    yield

    @property
    def is_counted(self) -> bool:
        """True if the folder's files have been entered into the catalogue."""
        return self.row("SELECT 1 FROM facts WHERE name = 'used'") is not None

    def pop_damage(self) -> tuple[str | None, str | None]:
        """Return the damage of a catalogue that was replaced since the last call, and the new name
        of the old file if it was another program's."""
        found, self._damage, self._moved = (self._damage, self._moved), None, None
        return found

    def own_bytes(self) -> int:
        """Return the size of the file, without its log."""
        found = self.row("PRAGMA page_count")
        return int(found[0]) * 4096 if found else 0

    def renew(self, error: Exception, fill: Callable[[], object]) -> bool:
        """Replace a damaged catalogue; return False if another process did. error: the damage.
        fill: enters the files into the empty catalogue, in the same transaction."""
        with self._mutex, self._locked():
            self._depth = 0
            if not isinstance(error, UncountedError) and not self._is_replaced():
                self._rescue()
                self._remove()
            if self._is_replaced():
                self._reopen()
            is_new = not self.is_counted
            if is_new:
                with self._transaction():
                    fill()
            return is_new

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
    def _locked(self) -> Iterator[None]:
        """Hold the flock: with SQLite's own locks some writers wait for more than a second."""

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
        with self._converting_errors():
            self._db.execute("BEGIN IMMEDIATE")
        self._depth = 1
        try:
            yield
            with self._converting_errors():
                self._db.execute("COMMIT")
        except BaseException:
            with contextlib.suppress(sqlite3.Error), self._converting_errors():
                self._db.execute("ROLLBACK")
            raise
        finally:
            self._depth = 0

    @contextlib.contextmanager
    def _converting_errors(self) -> Iterator[None]:
        """Convert every error that a damaged file causes into sqlite3.DatabaseError."""
        try:
            with as_database_errors():
                yield
        except sqlite3.OperationalError as error:
            # SQLite reports a file with a damaged header as read-only.
            read_only = getattr(error, "sqlite_errorcode", 0) & 0xFF == 8
            if not read_only or not os.access(_NAME, os.W_OK, dir_fd=self._folder.fd):
                raise
            raise sqlite3.DatabaseError(str(error)) from error

    # -- the file

    def _open(self) -> tuple[sqlite3.Connection, int]:
        """Open the catalogue, or replace a damaged one; the caller holds the flock. Return the
        connection and the file's inode."""
        try:
            self._clear_names()
            return self._connect()
        except sqlite3.DatabaseError as error:
            if not self._mend or not is_damage(error):
                raise
            self.is_upgrade = isinstance(error, OtherSchemaError)
            self._damage = None if self.is_upgrade else str(error)
            is_foreign = isinstance(error, ForeignCatalogueError)
            if not is_foreign and not self.is_upgrade:
                self._rescue()
            self._remove(keep=is_foreign)
            return self._connect()

    def _clear_names(self) -> None:
        """Raise ForeignCatalogueError if a folder or a link has the name of one of the files, and
        StrangeFileError for files of other users."""
        folder = self._folder
        for name in _FILES:
            try:
                found = folder.stat(name)
            except FileNotFoundError:
                continue
            if not stat.S_ISREG(found.st_mode) or found.st_nlink > 1:
                raise ForeignCatalogueError(f"{name} is a folder or a link")
            folder.check(name)
            if not os.access(name, os.R_OK | os.W_OK, dir_fd=folder.fd):
                mode = stat.S_IMODE(found.st_mode)
                raise sqlite3.DatabaseError(f"{name} has mode {mode:04o}, wanted 0600")

    def _rescue(self) -> None:
        """Read the rows of blobs from both ends of a damaged file up to the damage; `adopt` checks
        their checksums."""
        query = "SELECT * FROM blobs ORDER BY key {} LIMIT ?"  # damaged pages may form a cycle
        self.rescued.clear()
        with contextlib.suppress(sqlite3.Error, OSError):
            most = 1000 + 2 * len(self._folder.folder("blobs").names())
            with contextlib.closing(self._connection()) as db:
                db.execute("PRAGMA busy_timeout = 0")
                db.execute("PRAGMA cell_size_check = ON")
                for order in ("ASC", "DESC"):
                    with contextlib.suppress(sqlite3.Error), as_database_errors():
                        for row in db.execute(query.format(order), (most,)):
                            self.rescued[str(row[0])] = row

    def _connection(self) -> sqlite3.Connection:
        path = os.path.join(os.readlink(f"/proc/self/fd/{self._folder.fd}"), _NAME)
        db = sqlite3.connect(
            path, timeout=_LOCK_TIMEOUT_S, isolation_level=None, check_same_thread=False
        )
        db.text_factory = lambda data: data.decode("utf-8", "replace")
        return db

    def _connect(self) -> tuple[sqlite3.Connection, int]:
        """Open the file with SQLite, which opens it by path, and check before and after that the
        path is this folder's file. No other code opens the file: closing it would end the locks
        that SQLite holds in this process."""
        folder = self._folder
        if not folder.has(_NAME):
            os.close(folder.create(_NAME))  # SQLite would create it with the umask's mode
        for name in _FILES:
            folder.check(name)
        found = folder.stat(_NAME)
        db = self._connection()
        try:
            with self._converting_errors():
                self._prepare(db, found)
        except BaseException:
            db.close()
            raise
        return db, found.st_ino

    def _prepare(self, db: sqlite3.Connection, before: os.stat_result) -> None:
        """Check a file that was just opened, and create its tables."""
        path = os.path.join(os.readlink(f"/proc/self/fd/{self._folder.fd}"), _NAME)
        (version,) = db.execute("PRAGMA user_version").fetchone()
        for found in (os.stat(path), self._folder.stat(_NAME)):
            if found.st_ino != before.st_ino:
                raise StrangeFileError(
                    errno.EPERM, f"the folder was replaced (inode {found.st_ino})", path
                )
        tables = {name for (name,) in db.execute("SELECT name FROM sqlite_master")}
        if tables and not tables & {"blobs", "facts"}:
            raise ForeignCatalogueError(
                f"another program's database, with {', '.join(sorted(tables))}"
            )
        if tables and version != _VERSION:
            if not version:
                raise OtherSchemaError("it has schema version 1")
            raise sqlite3.DatabaseError(f"it has schema version {version}, wanted {_VERSION}")
        for pragma in _PRAGMAS:
            db.execute(f"PRAGMA {pragma}")
        db.executescript(_SCHEMA)
        db.execute(f"PRAGMA user_version = {_VERSION}")
        # quick_check doesn't check the index; this takes 1.4 ms more for 1,000 blobs.
        (verdict,) = db.execute("PRAGMA integrity_check(1)").fetchone()
        if verdict != "ok":
            raise sqlite3.DatabaseError(verdict)

    def _is_replaced(self) -> bool:
        """Return True if the open file no longer has the catalogue's name."""
        try:
            return self._folder.stat(_NAME).st_ino != self._inode
        except FileNotFoundError:
            return True

    def _remove(self, *, keep: bool = False) -> None:
        """Remove the catalogue's files. keep: rename them instead."""
        for name in _FILES:  # catalogue.db first: SQLite then keeps the other names at close
            if not keep:
                self._folder.remove(name)
                continue
            with contextlib.suppress(FileNotFoundError):
                new = f"moved-{self._folder.stat(name).st_ino}-{name}"
                self._folder.rename(name, self._folder, new)
                if name == _NAME:
                    self._moved = new

    def _reopen(self) -> None:
        old, (self._db, self._inode) = self._db, self._open()
        with contextlib.suppress(sqlite3.Error):
            old.close()
