"""Record which blob takes how much of the limit, which may go first, and what live jobs want kept.

The tables of the catalogue: blobs, live jobs, numbers of the folder, labels of groups, and what
stores last said of names. No hit needs them, and the files decide which bytes are there: a
catalogue that is lost or damaged is rebuilt from the files.
"""

from __future__ import annotations

import re
import secrets
import sqlite3
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from penstock.cache.disk.block_crcs import BLOCK_BYTES
from penstock.cache.disk.catalogue_file import (
    CatalogueFile,
    UncountedError,
    as_database_errors,
    checked_number,
    row_checksum,
    with_checksum,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager

    from penstock.cache.base import Folder

Known = tuple[bool, tuple[int, str] | None]
"""(whether a store was ever asked for a name, (bytes, version) that it said; None: not there)."""


class NumberTable:
    """A NumberTable has numbers of the folder as a whole: its limit, and what is used of it."""

    def __init__(self, books: CatalogueFile) -> None:
        self._books = books

    def get(self, name: str) -> int | None:
        """A number that was set. Raises sqlite3.DatabaseError for one that isn't what was set."""
        found = self._books.row("SELECT value FROM facts WHERE name = ?", (name,))
        if found is None:
            return None
        number, _, _ = str(found[0]).partition(" ")
        if found[0] != with_checksum(name, number) or not number.isdecimal():
            raise sqlite3.DatabaseError(f"the number {name!r} isn't what was written")
        return int(number)

    def has(self, name: str) -> bool:
        """Whether a number was set, whatever became of it."""
        return self._books.row("SELECT 1 FROM facts WHERE name = ?", (name,)) is not None

    def set(self, name: str, value: int) -> None:
        """Write a number down."""
        row = (name, with_checksum(name, str(value)))
        self._books.change("INSERT OR REPLACE INTO facts VALUES (?, ?)", row)


class LabelTable:
    """A LabelTable has what groups of blobs are called for people."""

    def __init__(self, books: CatalogueFile) -> None:
        self._books = books

    def set(self, group: str, text: str) -> None:
        """Name a group."""
        self._books.change("INSERT OR REPLACE INTO labels VALUES (?, ?)", (group, text))

    def all(self) -> dict[str, str]:
        """The label of each group."""
        found = self._books.rows("SELECT grp, label FROM labels")
        return {str(group): str(label) for group, label in found}


class NameTable:
    """A NameTable has what stores said of names, for the time when they can't be asked."""

    def __init__(self, books: CatalogueFile) -> None:
        self._books = books

    def remember(self, path: str, found: tuple[int, str] | None) -> None:
        """Write down what a store said: (bytes, version), None if it isn't there."""
        size, version = found or (-1, "")
        row = (path, size, version)
        self._books.change(
            "INSERT OR REPLACE INTO names VALUES (?, ?, ?, ?)", (*row, row_checksum(row))
        )

    def recall(self, path: str) -> Known:
        """What a store said last."""
        return read_name_row(self._books.row(NAME_QUERY, (path,)), path)


NAME_QUERY = "SELECT size, version, sum FROM names WHERE path = ?"


@as_database_errors()
def read_name_row(found: tuple[Any, ...] | None, path: str) -> Known:
    """Read a row of NAME_QUERY. One that isn't what was written says nothing."""
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
    """A BlobRow is what the books know of one blob.

    group: of the dataset that fetched it; size_bytes: of its content; disk_bytes: counted into the
    limit; kept: manifests and sidecars; used_s: since the epoch; crcs: CRC-32C of each MiB,
    little-endian, None where nobody computed them.
    """

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


class BlobTable:
    """A BlobTable has the rows of blobs, fills and trash, and the sum of what they take.

    numbers: has that sum.
    """

    def __init__(self, books: CatalogueFile, numbers: NumberTable) -> None:
        self._books, self._numbers = books, numbers

    # -- what is used

    @property
    def used_bytes(self) -> int:
        """Bytes that count towards the limit now. Raises UncountedError."""
        used = self._numbers.get("used")
        if used is None:
            raise UncountedError("what is used wasn't counted")
        return used

    def _count(self, more: int) -> None:
        if (used := self._numbers.get("used")) is not None:
            self._numbers.set("used", max(0, used + more))

    def recount(self) -> int:
        """Sum up what all rows take again; returns the bytes."""
        with self._books.writing():
            total = self._total("SELECT COALESCE(SUM(disk), 0) FROM blobs")
            self._numbers.set("used", total)
        return total

    def kept_bytes(self, group: str) -> int:
        """Bytes of the manifests and sidecars of a group."""
        return self._total(
            "SELECT COALESCE(SUM(disk), 0) FROM blobs WHERE grp = ? AND kept = 1", group
        )

    def group_bytes(self, group: str) -> int:
        """Bytes of all of a group."""
        return self._total("SELECT COALESCE(SUM(disk), 0) FROM blobs WHERE grp = ?", group)

    def _total(self, query: str, *values: str) -> int:
        found = self._books.row(query, values)
        return checked_number(found[0]) if found else 0

    # -- changes

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
        with self._books.writing():
            self.remove(key)
            row = (key, group, uri, size_bytes, disk_bytes, state, int(kept), when, crcs)
            self._books.change(
                "INSERT INTO blobs VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", (*row, row_checksum(row))
            )
            self._count(disk_bytes)

    def adopt(
        self, key: str, *, size_bytes: int, disk_bytes: int, state: State, used_s: float
    ) -> None:
        """Enter a file that the books don't know: by the row that damaged books had of it, if that
        is right and of this size; else without a group and checksums, as nobody vouches for it.
        used_s: what the file says of its last use."""
        raw = self._books.rescued.pop(key, None)
        row = _row((*raw, 0)) if raw is not None and _is_right(raw) else None
        if row is None or row.size_bytes != size_bytes:
            row = BlobRow(
                key=key,
                group="",
                uri="",
                size_bytes=size_bytes,
                disk_bytes=disk_bytes,
                state=state,
                kept=False,
                used_s=min(used_s, time.time()),
                crcs=None,  # samples are checked anyway; a reboot ends it
                pinned=False,
            )
        self._enter(replace(row, disk_bytes=disk_bytes, state=state))

    def forget_rescued(self) -> None:
        """Forget the rows of damaged books, as all files are entered."""
        self._books.rescued.clear()

    def claim(self, group: str, has: Callable[[str], bool]) -> None:
        """Give a group those of its blobs that have none, as the books are new. has: whether it
        reads the blob of a key."""
        for row in self._where("grp = ''"):
            if has(row.key):
                self._enter(replace(row, group=group))

    def unknown(self) -> int:
        """How many whole blobs were entered by their files alone."""
        return self._total("SELECT COUNT(*) FROM blobs WHERE state = 'ready' AND crcs IS NULL")

    def resize(self, row: BlobRow, disk_bytes: int) -> None:
        """Count a blob with another size on the disk."""
        self._enter(replace(row, disk_bytes=disk_bytes))

    def _enter(self, row: BlobRow) -> None:
        self.add(
            row.key,
            group=row.group,
            uri=row.uri,
            size_bytes=row.size_bytes,
            disk_bytes=row.disk_bytes,
            state=row.state,
            kept=row.kept,
            crcs=row.crcs,
            used_s=row.used_s,
        )

    def remove(self, key: str) -> None:
        """Forget a blob, if it is known."""
        with self._books.writing():
            row = self.row(key)
            if row is not None:
                self._books.change("DELETE FROM blobs WHERE key = ?", (key,))
                self._count(-row.disk_bytes)

    def to_trash(self, key: str, name: str) -> None:
        """Note that a blob's file became `name` in the trash; its bytes count on until it is
        gone."""
        with self._books.writing():
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

    def touch(self, uses: Mapping[str, float]) -> None:
        """Note last uses, seconds since the epoch. A clock that ran ahead is set back."""
        now = time.time()
        self._books.change_each(
            "UPDATE blobs SET used = ? WHERE key = ?",
            [(min(when, now), key) for key, when in uses.items()],
        )

    def remove_wrong(self) -> int:
        """Remove rows that aren't what was written; returns how many."""
        with self._books.writing():
            found = self._books.rows("SELECT *, 0 FROM blobs")
            wrong = [(one[0],) for one in found if not _is_right(one[:-1])]
            self._books.change_each("DELETE FROM blobs WHERE key = ?", wrong)
        return len(wrong)

    # -- questions

    def row(self, key: str) -> BlobRow | None:
        """What is known of a blob."""
        found = self._books.row(f"SELECT *, {_PINNED} FROM blobs WHERE key = ?", (key,))
        return None if found is None else _row(found)

    def rows(self, *, state: State | None = None) -> list[BlobRow]:
        """All blobs, or those of a state, least recently used first."""
        return self._where("state = ?", state) if state else self._where("1")

    def _where(self, condition: str, *values: str) -> list[BlobRow]:
        found = self._books.rows(
            f"SELECT *, {_PINNED} FROM blobs WHERE {condition} ORDER BY kept, used", values
        )
        return [_row(one) for one in found]

    def victims(self) -> Iterator[BlobRow]:
        """Whole blobs that no job pins: data before manifests, least recently used first."""
        found = self._books.rows(
            f"SELECT *, 0 FROM blobs WHERE state = 'ready' AND NOT {_PINNED} ORDER BY kept, used"
        )
        for one in found:
            yield _row(one)

    def counts(self) -> dict[str, int]:
        """How many blobs there are of each state."""
        return dict(self._books.rows("SELECT state, COUNT(*) FROM blobs GROUP BY state"))

    def sizes(self, state: State) -> dict[str, int]:
        """What each blob of a state is counted with, in bytes."""
        return dict(self._books.rows("SELECT key, disk FROM blobs WHERE state = ?", (state,)))


CRCS_QUERY = "SELECT * FROM blobs WHERE key = ? AND state = 'ready'"
HELD_QUERY = "SELECT key FROM blobs WHERE grp = ? AND state = 'ready' ORDER BY key LIMIT ?"
"""For those who only read the books: the row of a whole blob; the keys of a group's, sorted."""


@as_database_errors()
def read_crcs(found: tuple[Any, ...] | None, size_bytes: int) -> bytes | None:
    """The checksums of a whole blob's blocks by its row of CRCS_QUERY; None where the books don't
    have them, or the row isn't what was written, or of a blob of another size. Raises
    sqlite3.DatabaseError for books of other columns."""
    if found is None or not _is_right(found):
        return None
    size, crcs = found[3], found[8]
    wanted = -(-size_bytes // BLOCK_BYTES) * 4
    return crcs if size == size_bytes and isinstance(crcs, bytes) and len(crcs) == wanted else None


@as_database_errors()
def _row(found: tuple[Any, ...]) -> BlobRow:
    *row, pinned = found
    if not _is_right(row):
        raise sqlite3.DatabaseError("a blob's row isn't what was written")
    key, group, uri, size, disk, state, kept, used, crcs, _ = row
    return BlobRow(
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
    return bool(crc == row_checksum(plain) and _KEY.fullmatch(key) and state in _STATES)


_MOST_JOB = 2**60


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRow:
    """A JobRow is what the books know of one loader that uses the cache.

    reads: names the blobs that it reads in an epoch; wanted_bytes: all of them; share_bytes: what
    may be pinned for it; below: keys below this are pinned.
    """

    id: int
    group: str
    reads: str
    wanted_bytes: int
    share_bytes: int
    below: str
    pid: int


class JobTable:
    """A JobTable has the rows of live jobs; a dead process's stays until someone forgets it."""

    def __init__(self, books: CatalogueFile) -> None:
        self._books = books

    def rows(self) -> list[JobRow]:
        """All jobs."""
        found = self._books.rows("SELECT id, grp, reads, wanted, share, below, pid FROM members")
        return [_job(one) for one in found]

    def add(self, job: JobRow) -> None:
        """Enter a job, or write its row anew."""
        row = (job.id, job.group, job.reads, job.wanted_bytes, job.share_bytes, job.below, job.pid)
        self._books.change(
            "INSERT OR REPLACE INTO members VALUES (?, ?, ?, ?, ?, ?, ?, ?)", (*row, time.time())
        )

    def set_share(self, job: int, *, share_bytes: int, below: str) -> None:
        """Pin another share for a job."""
        self._books.change(
            "UPDATE members SET share = ?, below = ? WHERE id = ?", (share_bytes, below, job)
        )

    def remove(self, job: int) -> None:
        """Forget a job; what it pinned isn't pinned any more."""
        self._books.change("DELETE FROM members WHERE id = ?", (job,))

    def owed_bytes(self, group: str) -> int:
        """What a group's largest job lacks of its share."""
        found = self._books.row(
            "SELECT COALESCE(MAX(MIN(share, wanted) - (SELECT COALESCE(SUM(disk), 0) FROM blobs"
            " WHERE grp = members.grp AND state != 'trash' AND kept = 0"
            " AND key < members.below)), 0) FROM members WHERE grp = ?",
            (group,),
        )
        return checked_number(found[0]) if found else 0


@as_database_errors()
def _job(row: tuple[Any, ...]) -> JobRow:
    job, group, reads, wanted, share, below, pid = row
    if checked_number(job) > _MOST_JOB:
        raise ValueError(f"job {job}")
    return JobRow(
        id=job,
        group=str(group),
        reads=str(reads),
        wanted_bytes=checked_number(wanted),
        share_bytes=checked_number(share),
        below=str(below),
        pid=checked_number(pid),
    )


def new_job_id() -> int:
    """Draw a number for a job, as ids that begin anew with new books would meet older jobs'."""
    return secrets.randbits(60) + 1


class Catalogue:
    """A Catalogue puts the tables of a cache together over one file. Safe for several threads.

    folder: of the cache. mend: damaged books are replaced by empty ones here. Raises sqlite3.Error
    and OSError.
    """

    def __init__(self, folder: Folder, *, mend: bool = True) -> None:
        self._books = CatalogueFile(folder, mend=mend)
        self.numbers = NumberTable(self._books)
        self.blobs = BlobTable(self._books, self.numbers)
        self.jobs = JobTable(self._books)
        self.labels = LabelTable(self._books)
        self.names = NameTable(self._books)

    @property
    def is_upgrade(self) -> bool:
        """Whether the books were of an older version, and were made anew."""
        return self._books.is_upgrade

    def take_damage(self) -> tuple[str | None, str | None]:
        """What was wrong with the books that were made anew since the last call, and how the old
        file is called now if it was somebody else's."""
        books = self._books
        found, books.damage, books.moved = (books.damage, books.moved), None, None
        return found

    def writing(self) -> AbstractContextManager[None]:
        """One transaction over all tables; inside, one thread of the node is at work."""
        return self._books.writing()

    @property
    def is_counted(self) -> bool:
        """Whether somebody has put into the books what is there."""
        return self.numbers.has("used")

    def renew(self, error: Exception, enter: Callable[[], object]) -> bool:
        """Make damaged books anew, unless another process did meanwhile; whether this one did.
        error: what was found. enter: puts what is there into empty books, in the same transaction.
        """
        return self._books.renew(error, is_empty=lambda: not self.is_counted, enter=enter)

    def own_bytes(self) -> int:
        """What the books themselves take, without their log."""
        return self._books.size_bytes()

    def close(self) -> None:
        """Close the books. Safe to call twice."""
        self._books.close()
