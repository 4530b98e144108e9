"""Store the sizes, last uses and pins of blobs in a SQLite file, the catalogue of a cache folder.

The tables hold blobs, live jobs, numbers of the folder, labels of groups, and the last answers of
stores about names. No hit reads them. The files are authoritative: a catalogue that is lost or
damaged is rebuilt from them.

The file uses WAL mode. Every change is one short transaction under a lock on a file of its own,
because SQLite's own locks make writers wait for seconds under load. A new catalogue gets the name
of the old one; a process that has the old one open detects that before its next transaction.

SQLite detects damage only to its own structure, so rows and numbers carry a checksum. A wrong
checksum raises sqlite3.DatabaseError, as every other error of a damaged file does; SQLite's codes
distinguish damage from a failing disk.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import sqlite3
import stat
import sys
import threading
import time
from dataclasses import astuple, dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import quote

from crc32c import crc32c

from penstock.cache.base import ByteLocks, Folder, StrangeFileError
from penstock.cache.disk.folder_layout import CATALOGUE_FILES, read_number, with_checksum

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager


# SQLite's codes for the disk or other processes: SQLITE_BUSY, LOCKED, NOMEM, READONLY, INTERRUPT,
# IOERR, FULL, CANTOPEN, PROTOCOL. All other codes are about the file.
_DISK_CODES = frozenset((5, 6, 7, 8, 9, 10, 13, 14, 15))
_SHORT_READ, _FILE_MOVED = 522, 1032


class UncountedError(sqlite3.DatabaseError):
    """The catalogue is new and doesn't list the folder's files yet."""


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


def checked_number(value: object) -> int:
    """Return a number ≥ 0. Raises sqlite3.DatabaseError for any other value."""
    if not isinstance(value, int) or value < 0:
        raise sqlite3.DatabaseError(f"got {value!r}, wanted a number")
    return value


_LOCK_TIMEOUT_S = 60.0
_NAME = "catalogue.db"
_VERSION = 2  # of the schema
_PRAGMAS = (
    "cell_size_check = ON", "journal_mode = WAL", "synchronous = NORMAL", "wal_autocheckpoint = 32",
    "journal_size_limit = 262144",
)  # fmt: skip
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


Known = tuple[bool, tuple[int, str] | None]
"""(True if a store has answered for a name, its answer: (bytes, version), or None if the object
doesn't exist)."""


_NAME_QUERY = "SELECT size, version, sum FROM names WHERE path = ?"


def open_read_only(folder: Folder, option: str) -> sqlite3.Connection:
    """Open the catalogue of a cache folder for queries by any thread, without waiting for writers.
    option: "mode=ro", or "immutable=1" to ignore its log, which can't be replayed in a read-only
    folder. Raises sqlite3.Error, OSError."""
    folder.check(_NAME)
    uri = f"file:{quote(_path(folder))}?{option}"
    return sqlite3.connect(uri, uri=True, timeout=0.1, check_same_thread=False)


def _path(folder: Folder) -> str:
    return os.path.join(os.readlink(f"/proc/self/fd/{folder.fd}"), _NAME)


@as_database_errors()
def _name_row(found: tuple[Any, ...] | None, path: str) -> Known:
    """Read a row of _NAME_QUERY. A row with a wrong checksum counts as missing."""
    if found is None or found[2] != row_checksum((path, *found[:2])):
        return False, None
    return True, None if found[0] < 0 else (int(found[0]), str(found[1]))


State = Literal["fill", "ready", "trash"]

_KEY = re.compile(r"[0-9a-f]+(-[0-9]+)?")
_STATES = ("fill", "ready", "trash")
_PINNED = (
    "EXISTS (SELECT 1 FROM members WHERE members.grp = blobs.grp"
    " AND (blobs.kept = 1 OR blobs.key < members.below))"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlobRow:
    """The catalogue's row of one blob.

    group: the group of the dataset that fetched it. size_bytes: the size of its content.
    disk_bytes: the bytes that count towards the limit. kept: True for manifests and sidecars.
    used_s: the last use, in seconds since the epoch. crcs: the CRC-32C of each MiB, little-endian;
    None if unknown. pinned: True if it is kept for a live job.
    """

    key: str
    group: str = ""
    uri: str = ""
    size_bytes: int
    disk_bytes: int = 0
    state: State = "fill"
    kept: bool = False
    used_s: float = field(default_factory=time.time)
    crcs: bytes | None = None
    pinned: bool = False


BLOCK_BYTES = 2**20


def crcs_of_file(fd: int) -> bytes:
    """Compute the CRC-32C of each MiB of a file, little-endian uint32. Raises OSError."""
    size_bytes = os.fstat(fd).st_size
    buffer = bytearray(BLOCK_BYTES)
    found = []
    for at in range(0, size_bytes, BLOCK_BYTES):
        got = os.preadv(fd, [buffer], at)
        found.append(int(crc32c(memoryview(buffer)[:got])).to_bytes(4, "little"))
    return b"".join(found)


def crcs_of(data: memoryview, *, known: Mapping[int, int] | None = None) -> bytes:
    """Compute the CRC-32C of each MiB of bytes in memory, little-endian uint32. known: checksums
    that are already known, by block number."""
    crcs = dict(known or {})
    for number, at in enumerate(range(0, len(data), BLOCK_BYTES)):
        if number not in crcs:
            crcs[number] = int(crc32c(data[at : at + BLOCK_BYTES]))
    return b"".join([crcs[number].to_bytes(4, "little") for number in range(len(crcs))])


_COLUMNS = tuple(each.name for each in fields(BlobRow))[:-1]  # all but `pinned`
_KEPT = _COLUMNS.index("kept")


@as_database_errors()
def read_crcs(db: sqlite3.Connection, key: str, size_bytes: int) -> bytes | None:
    """Return the checksums of a whole blob's blocks; None if it has none, or the row is damaged or
    of another size. db: from `open_read_only`. Raises sqlite3.Error."""
    found = db.execute("SELECT * FROM blobs WHERE key = ? AND state = 'ready'", (key,)).fetchone()
    if found is None or not _is_right(found):
        return None
    size, crcs = found[3], found[8]
    wanted = -(-size_bytes // BLOCK_BYTES) * 4
    return crcs if size == size_bytes and isinstance(crcs, bytes) and len(crcs) == wanted else None


@as_database_errors()
def _row(found: tuple[Any, ...]) -> BlobRow:
    *row, pinned = found
    if not _is_right(row):
        raise sqlite3.DatabaseError("a blob's row has a wrong checksum")
    values = dict(zip(_COLUMNS, row, strict=False))
    values["kept"] = bool(values["kept"])
    if not isinstance(values["used_s"], int | float):  # it has no checksum
        values["used_s"] = 0.0
    return BlobRow(**values, pinned=bool(pinned))


def _is_right(row: Sequence[Any]) -> bool:
    *plain, crc = row
    key, state = str(plain[0]), plain[5]
    return bool(crc == row_checksum(plain) and _KEY.fullmatch(key) and state in _STATES)


_MOST_JOB = 2**60


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRow:
    """The catalogue's row of one loader that uses the cache.

    id: 0 before it joins. reads: a hash of the blobs that it reads in an epoch. wanted_bytes: the
    bytes of these blobs. share_bytes: the bytes that may be pinned for it. below: the threshold
    below which keys are pinned.
    """

    id: int = 0
    group: str
    reads: str
    wanted_bytes: int
    share_bytes: int = 0
    below: str = ""
    pid: int


@as_database_errors()
def _job(row: tuple[Any, ...]) -> JobRow:
    values: dict[str, Any] = {
        each.name: str(value) if each.type == "str" else checked_number(value)
        for each, value in zip(fields(JobRow), row, strict=True)
    }
    if values["id"] > _MOST_JOB:
        raise ValueError(f"job {values['id']}")
    return JobRow(**values)


def new_job_id() -> int:
    """Draw a random id for a job: counted ids would repeat after a rebuild of the catalogue."""
    return secrets.randbits(60) + 1


class Catalogue:
    """The open SQLite file of a cache and its tables: blobs (whole, fills and trash), live jobs,
    numbers of the folder, labels of groups, and the last answers of stores about names.

    folder: the cache folder. mend: True replaces a damaged file by an empty one. rescued: the
    unchecked rows of blobs, by key, that could still be read from the damaged file. Safe for
    several threads. Raises sqlite3.Error and OSError.
    """

    def __init__(self, folder: Folder, *, mend: bool = True) -> None:
        self._mutex = threading.RLock()
        self._depth = 0
        self._folder = folder
        self._mend = mend
        self._damage: str | None = None
        self._moved: str | None = None
        self.rescued: dict[str, tuple[Any, ...]] = {}
        self._lock = ByteLocks(folder.open_or_create("catalogue.lock"))
        with self._locked():
            self._db, self._inode = self._open()

    # -- queries and changes

    def row(self, query: str, values: Sequence[Any] = ()) -> tuple[Any, ...] | None:
        """Return the first row that a query finds; None if there is none."""
        return next(iter(self.rows(query, values)), None)

    def rows(self, query: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """Return all rows that a query finds."""
        with self._mutex, self._converting_errors():
            return self._db.execute(query, values).fetchall()

    def change(self, statement: str, rows: Iterable[Sequence[Any]]) -> None:
        """Execute a statement once for each of `rows`, in one transaction: the current one, if this
        thread has one."""
        with self.writing(), self._converting_errors():
            for row in rows:
                self._db.execute(statement, row)

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

    def renew(self, error: Exception, fill: Callable[[], object]) -> None:
        """Replace a damaged catalogue, unless another process did. error: the damage. fill: enters
        the files into the empty catalogue, in the same transaction."""
        with self._mutex, self._locked():
            self._depth = 0
            if not isinstance(error, UncountedError) and not self._is_replaced():
                self._rescue()
                self._remove()
            if self._is_replaced():
                self._reopen()
            if not self.is_counted:
                with self._transaction():
                    fill()

    def close(self) -> None:
        """Close the file and its lock. Safe to call twice."""
        with self._mutex:
            if self._lock.is_open:
                self._db.close()
                self._lock.close()

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if hasattr(self, "_db") and not is_finalizing():
            self.close()

    # -- the lock and the transaction

    def _locked(self) -> AbstractContextManager[None]:
        """Hold the lock: with SQLite's own locks some writers wait for more than a second."""
        what = f"{self._folder.path}: the catalogue's lock"
        return self._lock.holding(0, timeout_s=_LOCK_TIMEOUT_S, what=what)

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
        """Open the catalogue, or replace a damaged one; the caller holds the lock. Return the
        connection and the file's inode."""
        try:
            self._clear_names()
            return self._connect()
        except sqlite3.DatabaseError as error:
            if not self._mend or not is_damage(error):
                raise
            self._damage = str(error)
            is_foreign = isinstance(error, ForeignCatalogueError)
            if not is_foreign:
                self._rescue()
            self._remove(keep=is_foreign)
            return self._connect()

    def _clear_names(self) -> None:
        """Raise ForeignCatalogueError if a folder or a link has the name of one of the files, and
        StrangeFileError for files of other users."""
        folder = self._folder
        for name in CATALOGUE_FILES:
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
        path, timeout_s = _path(self._folder), _LOCK_TIMEOUT_S
        db = sqlite3.connect(path, timeout_s, isolation_level=None, check_same_thread=False)
        db.text_factory = lambda data: data.decode("utf-8", "replace")
        return db

    def _connect(self) -> tuple[sqlite3.Connection, int]:
        """Open the file with SQLite, which opens it by path, and check before and after that the
        path is this folder's file. No other code opens the file: closing it would end the locks
        that SQLite holds in this process."""
        folder = self._folder
        if not folder.has(_NAME):
            os.close(folder.create(_NAME))  # SQLite would create it with the umask's mode
        for name in CATALOGUE_FILES:
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
        path = _path(self._folder)
        (version,) = db.execute("PRAGMA user_version").fetchone()
        for found in (os.stat(path), self._folder.stat(_NAME)):
            if found.st_ino != before.st_ino:
                reason = f"the folder was replaced (inode {found.st_ino})"
                raise StrangeFileError(errno.EPERM, reason, path)
        tables = {name for (name,) in db.execute("SELECT name FROM sqlite_master")}
        if tables and not tables & {"blobs", "facts"}:
            names = ", ".join(sorted(tables))
            raise ForeignCatalogueError(f"another program's database, with {names}")
        if tables and version != _VERSION:
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
        # catalogue.db first: SQLite then keeps the other names at close.
        for name in CATALOGUE_FILES:
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

    # -- numbers and labels

    def number(self, name: str) -> int | None:
        """Return the folder's limit ("max_bytes") or the used bytes ("used"); None if it isn't set.
        Raises sqlite3.DatabaseError if it is damaged."""
        found = self.row("SELECT value FROM facts WHERE name = ?", (name,))
        if found is None:
            return None
        number = read_number(name, str(found[0]))
        if number is None:
            raise sqlite3.DatabaseError(f"the number {name!r} has a wrong checksum")
        return number

    def set_number(self, name: str, value: int) -> None:
        """Store a number."""
        row = (name, with_checksum(name, value))
        self.change("INSERT OR REPLACE INTO facts VALUES (?, ?)", [row])

    def set_label(self, group: str, text: str) -> None:
        """Store the label of a group."""
        self.change("INSERT OR REPLACE INTO labels VALUES (?, ?)", [(group, text)])

    def labels(self) -> dict[str, str]:
        """Return the label of each group."""
        return {str(grp): str(label) for grp, label in self.rows("SELECT grp, label FROM labels")}

    # -- the last answers of stores about names, used while a store can't be reached

    def remember(self, path: str, found: tuple[int, str] | None) -> None:
        """Store an answer about a name: (bytes, version), or None if the object doesn't exist."""
        size, version = found or (-1, "")
        row = (path, size, version)
        self.change("INSERT OR REPLACE INTO names VALUES (?, ?, ?, ?)", [(*row, row_checksum(row))])

    def recall(self, path: str) -> Known:
        """Return the last answer about a name."""
        return _name_row(self.row(_NAME_QUERY, (path,)), path)

    @staticmethod
    def recall_unlocked(folder: Folder, path: str) -> Known:
        """Return the last answer about a name from the catalogue of a folder that this process
        can't write; none if it can't be read."""
        with (
            contextlib.suppress(sqlite3.Error, OSError),
            as_database_errors(),
            contextlib.closing(open_read_only(folder, "immutable=1")) as db,
        ):
            return _name_row(db.execute(_NAME_QUERY, (path,)).fetchone(), path)
        return False, None

    # -- what is used

    @property
    def used_bytes(self) -> int:
        """The bytes that count towards the limit now. Raises UncountedError."""
        used = self.number("used")
        if used is None:
            raise UncountedError("the used bytes weren't counted")
        return used

    def _count(self, more: int) -> None:
        if (used := self.number("used")) is not None:
            self.set_number("used", max(0, used + more))

    def recount(self) -> int:
        """Compute and store the used bytes from all rows; return them."""
        with self.writing():
            total = self._total("SELECT COALESCE(SUM(disk), 0) FROM blobs")
            self.set_number("used", total)
        return total

    def group_bytes(self, group: str, *, kept: bool = False) -> int:
        """Return the bytes of a group's blobs. kept: of its manifests and sidecars alone."""
        condition = "grp = ? AND kept = 1" if kept else "grp = ?"
        return self._total(f"SELECT COALESCE(SUM(disk), 0) FROM blobs WHERE {condition}", group)

    def _total(self, query: str, *values: str) -> int:
        found = self.row(query, values)
        return checked_number(found[0]) if found else 0

    # -- changes

    def add(self, blob: BlobRow) -> None:
        """Insert a blob, or replace the one with its key. `pinned` isn't stored."""
        with self.writing():
            self.remove(blob.key)
            row = [getattr(blob, name) for name in _COLUMNS]
            row[_KEPT] = int(blob.kept)
            row.append(row_checksum(row))
            self.change("INSERT INTO blobs VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", [row])
            self._count(blob.disk_bytes)

    def adopt(self, key: str, found: os.stat_result, *, disk_bytes: int, state: State) -> None:
        """Insert a file that the catalogue doesn't list. The row rescued from a damaged catalogue
        is used if it is right and of this size; otherwise the row has no group and no checksums.
        found: the file's status."""
        raw = self.rescued.pop(key, None)
        row = _row((*raw, 0)) if raw is not None and _is_right(raw) else None
        if row is None or row.size_bytes != found.st_size:
            # Samples have their own checksums; the next reboot drops the blob.
            used_s = min(max(found.st_atime, found.st_mtime), time.time())
            row = BlobRow(key=key, size_bytes=found.st_size, used_s=used_s)
        self.add(replace(row, disk_bytes=disk_bytes, state=state))

    def claim(self, group: str, has: Callable[[str], bool]) -> None:
        """Set the group of blobs that lost theirs in a rebuild. has: returns True for the keys of
        the group's blobs."""
        for row in self._where("grp = ''"):
            if has(row.key):
                self.add(replace(row, group=group))

    def unknown(self) -> int:
        """Count the whole blobs without checksums, of which a rebuild found only the files."""
        return self._total("SELECT COUNT(*) FROM blobs WHERE state = 'ready' AND crcs IS NULL")

    def remove(self, key: str) -> None:
        """Delete a blob's row, if there is one."""
        with self.writing():
            row = self.blob(key)
            if row is not None:
                self.change("DELETE FROM blobs WHERE key = ?", [(key,)])
                self._count(-row.disk_bytes)

    def to_trash(self, key: str, name: str) -> None:
        """Record that a blob's file is now `name` in the trash; its bytes count until it is
        removed."""
        with self.writing():
            row = self.blob(key)
            if row is not None:
                self.remove(key)
                self.add(replace(row, key=name, state="trash", crcs=None))

    def touch(self, uses: Mapping[str, float]) -> None:
        """Store last uses, seconds since the epoch; times in the future become now."""
        now = time.time()
        rows = [(min(when, now), key) for key, when in uses.items()]
        self.change("UPDATE blobs SET used = ? WHERE key = ?", rows)

    def remove_wrong(self) -> int:
        """Delete rows with wrong checksums; return their number."""
        with self.writing():
            found = self.rows("SELECT *, 0 FROM blobs")
            wrong = [(row[0],) for row in found if not _is_right(row[:-1])]
            self.change("DELETE FROM blobs WHERE key = ?", wrong)
        return len(wrong)

    # -- questions

    def blob(self, key: str) -> BlobRow | None:
        """Return a blob's row; None if there is none."""
        found = self.row(f"SELECT *, {_PINNED} FROM blobs WHERE key = ?", (key,))
        return None if found is None else _row(found)

    def blobs(self, *, state: State | None = None) -> list[BlobRow]:
        """Return all blobs, or those of a state, least recently used first."""
        return list(self._where("state = ?", state) if state else self._where("1"))

    def _where(self, condition: str, *values: str) -> Iterator[BlobRow]:
        query = f"SELECT *, {_PINNED} FROM blobs WHERE {condition} ORDER BY kept, used"
        return map(_row, self.rows(query, values))

    def victims(self) -> Iterator[BlobRow]:
        """Return whole blobs that no job pins: data before manifests, least recently used first."""
        return self._where(f"state = 'ready' AND NOT {_PINNED}")

    def counts(self) -> dict[str, int]:
        """Count the blobs of each state."""
        return dict(self.rows("SELECT state, COUNT(*) FROM blobs GROUP BY state"))

    def sizes(self, state: State) -> dict[str, int]:
        """Return the recorded size on the disk of each blob of a state."""
        return dict(self.rows("SELECT key, disk FROM blobs WHERE state = ?", (state,)))

    # -- live jobs; a dead process's row stays until `Space.forget_dead_jobs` deletes it

    def jobs(self) -> list[JobRow]:
        """Return all jobs."""
        query = "SELECT id, grp, reads, wanted, share, below, pid FROM members"
        return [_job(row) for row in self.rows(query)]

    def add_job(self, job: JobRow) -> None:
        """Insert a job, or replace its row."""
        row = (*astuple(job), time.time())
        self.change("INSERT OR REPLACE INTO members VALUES (?, ?, ?, ?, ?, ?, ?, ?)", [row])

    def set_share(self, job: int, *, share_bytes: int, below: str) -> None:
        """Change the share that is pinned for a job."""
        row = (share_bytes, below, job)
        self.change("UPDATE members SET share = ?, below = ? WHERE id = ?", [row])

    def remove_job(self, job: int) -> None:
        """Delete a job, which unpins its blobs."""
        self.change("DELETE FROM members WHERE id = ?", [(job,)])

    def owed_bytes(self, group: str) -> int:
        """Return the largest number of bytes that a job of a group lacks of its share."""
        return self._total(
            "SELECT MAX(0, COALESCE(MAX(MIN(share, wanted) - (SELECT COALESCE(SUM(disk), 0)"
            " FROM blobs WHERE grp = members.grp AND state != 'trash' AND kept = 0"
            " AND key < members.below)), 0)) FROM members WHERE grp = ?",
            group,
        )
