"""The cache's books: which blob takes how much of the limit, and which jobs want what kept.

SQLite in WAL mode. Every change is one short transaction behind a flock, since under load SQLite's
own waiting reaches seconds. Nothing here is needed for a hit, and nothing here is the truth about
bytes: a catalogue that is lost or damaged is made anew from the files.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import sqlite3
import sys
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from cache.locks import wait_for

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

State = Literal["fill", "ready", "trash"]

_LOCK_TIMEOUT_S = 60.0
_SCHEMA = """
CREATE TABLE IF NOT EXISTS facts (name TEXT PRIMARY KEY, value TEXT) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS labels (grp TEXT PRIMARY KEY, label TEXT) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS blobs (
    key TEXT PRIMARY KEY, grp TEXT, uri TEXT, size INTEGER, disk INTEGER, state TEXT, kept INTEGER,
    used REAL, crcs BLOB) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS by_use ON blobs (state, kept, used);
CREATE TABLE IF NOT EXISTS members (
    id INTEGER PRIMARY KEY, grp TEXT, reads TEXT, wanted INTEGER, share INTEGER, below TEXT,
    pid INTEGER, began REAL);
CREATE TABLE IF NOT EXISTS names (path TEXT PRIMARY KEY, size INTEGER, version TEXT) WITHOUT ROWID;
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
    """One connection; safe for several threads. Raises sqlite3.Error and OSError."""

    def __init__(self, path: str, lock_path: str) -> None:
        self._mutex = threading.RLock()
        self._depth = 0
        self._path = path
        self._lock = -1
        self._lock = os.open(lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            self._db = self._connect()
        except BaseException:
            os.close(self._lock)
            self._lock = -1
            raise

    def _connect(self) -> sqlite3.Connection:
        # Made before SQLite would, which takes the umask's mode.
        os.close(os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        db = sqlite3.connect(
            self._path, timeout=_LOCK_TIMEOUT_S, isolation_level=None, check_same_thread=False
        )
        try:
            with self._alone():
                db.execute("PRAGMA journal_mode = WAL")
                db.execute("PRAGMA synchronous = NORMAL")
                db.execute("PRAGMA wal_autocheckpoint = 32")
                db.execute("PRAGMA journal_size_limit = 262144")
                db.executescript(_SCHEMA)
                (well,) = db.execute("PRAGMA quick_check(1)").fetchone()
                if well != "ok":
                    raise sqlite3.DatabaseError(well)
        except BaseException:
            db.close()
            raise
        return db

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Hold the flock: SQLite's own queue makes single writers wait for more than a second."""

        def locked() -> bool:
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            return True

        wait_for(locked, timeout_s=_LOCK_TIMEOUT_S, what=f"{self._path}: the catalogue's lock")
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
            with self._alone():
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

    def fact(self, name: str) -> str | None:
        with self._mutex:
            found = self._db.execute("SELECT value FROM facts WHERE name = ?", (name,)).fetchone()
        return None if found is None else str(found[0])

    def set_fact(self, name: str, value: str) -> None:
        with self.writing():
            self._db.execute("INSERT OR REPLACE INTO facts VALUES (?, ?)", (name, value))

    def label(self, group: str, text: str) -> None:
        """Name a group for people."""
        with self.writing():
            self._db.execute("INSERT OR REPLACE INTO labels VALUES (?, ?)", (group, text))

    def labels(self) -> dict[str, str]:
        with self._mutex:
            return dict(self._db.execute("SELECT grp, label FROM labels"))

    def own_bytes(self) -> int:
        """What the books themselves take, with room for the log."""
        with self._mutex:
            (pages,) = self._db.execute("PRAGMA page_count").fetchone()
        return int(pages) * 4096

    # -- blobs

    @property
    def used_bytes(self) -> int:
        """Counted into the limit now."""
        return int(self.fact("used") or 0)

    def _use(self, more: int) -> None:
        self.set_fact("used", str(self.used_bytes + more))

    def recount(self) -> int:
        """Sum up anew; returns the bytes."""
        with self.writing():
            (total,) = self._db.execute("SELECT COALESCE(SUM(disk), 0) FROM blobs").fetchone()
            self.set_fact("used", str(total))
        return int(total)

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
            self._db.execute("INSERT INTO blobs VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", row)
            self._use(disk_bytes)

    def remove(self, key: str) -> None:
        with self.writing():
            row = self.row(key)
            if row is not None:
                self._db.execute("DELETE FROM blobs WHERE key = ?", (key,))
                self._use(-row.disk_bytes)

    def to_trash(self, key: str, name: str) -> None:
        """A blob's file became `name` in the trash; its bytes count on until it is gone."""
        with self.writing():
            self._db.execute("DELETE FROM blobs WHERE key = ?", (name,))
            self._db.execute(
                "UPDATE blobs SET key = ?, state = 'trash', crcs = NULL WHERE key = ?", (name, key)
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
        return int(total)

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
        return int(owed)

    def jobs(self) -> list[Job]:
        with self._mutex:
            found = self._db.execute(
                "SELECT id, grp, reads, wanted, share, below, pid FROM members"
            )
            return [
                Job(
                    id=one[0],
                    group=one[1],
                    reads=one[2],
                    wanted_bytes=one[3],
                    share_bytes=one[4],
                    below=one[5],
                    pid=one[6],
                )
                for one in found
            ]

    def add_job(self, job: int, group: str, *, reads: str, wanted_bytes: int) -> None:
        """Enter a job that pins nothing yet."""
        with self.writing():
            self._db.execute(
                "INSERT OR REPLACE INTO members VALUES (?, ?, ?, ?, 0, '', ?, ?)",
                (job, group, reads, wanted_bytes, os.getpid(), time.time()),
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
            self._db.execute("INSERT OR REPLACE INTO names VALUES (?, ?, ?)", (path, size, version))

    def recall(self, path: str) -> tuple[bool, tuple[int, str] | None]:
        """(whether it was ever asked, what the answer was)."""
        with self._mutex:
            found = self._db.execute(
                "SELECT size, version FROM names WHERE path = ?", (path,)
            ).fetchone()
        if found is None:
            return False, None
        return True, None if found[0] < 0 else (int(found[0]), str(found[1]))

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


def _row(found: tuple[object, ...]) -> Row:
    key, group, uri, size, disk, state, kept, used, crcs, pinned = found
    return Row(
        key=str(key),
        group=str(group),
        uri=str(uri),
        size_bytes=int(size),  # type: ignore[call-overload]
        disk_bytes=int(disk),  # type: ignore[call-overload]
        state=state,  # type: ignore[arg-type]
        kept=bool(kept),
        used_s=float(used),  # type: ignore[arg-type]
        crcs=crcs,  # type: ignore[arg-type]
        pinned=bool(pinned),
    )


def new_job() -> int:
    """A number for a job. By chance: ids that begin anew with new books would meet older jobs'."""
    return secrets.randbits(60) + 1


def rebuilt(path: str, lock_path: str) -> Catalogue:
    """An empty catalogue in the place of a damaged one; a reconcile enters the files."""
    for suffix in ("", "-wal", "-shm"):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path + suffix)
    return Catalogue(path, lock_path)
