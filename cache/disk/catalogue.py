"""Store the sizes, last uses and pins of blobs in the tables of the catalogue.

The tables hold blobs, live jobs, numbers of the folder, labels of groups, and the last answers of
stores about names. No hit reads them. The files are authoritative: a catalogue that is lost or
damaged is rebuilt from them.
"""

from __future__ import annotations

import re
import secrets
import sqlite3
import time
from dataclasses import dataclass, field, replace
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
"""(True if a store has answered for a name, its answer: (bytes, version), or None if the object
doesn't exist)."""


class NumberTable:
    """Numbers of the whole folder: its limit ("max_bytes"), and the used bytes ("used")."""

    def __init__(self, file: CatalogueFile) -> None:
        self._file = file

    def get(self, name: str) -> int | None:
        """Return a number; None if it isn't set. Raises sqlite3.DatabaseError if it is damaged."""
        found = self._file.row("SELECT value FROM facts WHERE name = ?", (name,))
        if found is None:
            return None
        number, _, _ = str(found[0]).partition(" ")
        if found[0] != with_checksum(name, number) or not number.isdecimal():
            raise sqlite3.DatabaseError(f"the number {name!r} has a wrong checksum")
        return int(number)

    def has(self, name: str) -> bool:
        """Return True if a number is set, even if it is damaged."""
        return self._file.row("SELECT 1 FROM facts WHERE name = ?", (name,)) is not None

    def set(self, name: str, value: int) -> None:
        """Store a number."""
        row = (name, with_checksum(name, str(value)))
        self._file.change("INSERT OR REPLACE INTO facts VALUES (?, ?)", row)


class LabelTable:
    """The names of groups of blobs in listings."""

    def __init__(self, file: CatalogueFile) -> None:
        self._file = file

    def set(self, group: str, text: str) -> None:
        """Store the label of a group."""
        self._file.change("INSERT OR REPLACE INTO labels VALUES (?, ?)", (group, text))

    def all(self) -> dict[str, str]:
        """Return the label of each group."""
        found = self._file.rows("SELECT grp, label FROM labels")
        return {str(group): str(label) for group, label in found}


class NameTable:
    """The last answers of stores about names, which are used while a store can't be reached."""

    def __init__(self, file: CatalogueFile) -> None:
        self._file = file

    def remember(self, path: str, found: tuple[int, str] | None) -> None:
        """Store an answer about a name: (bytes, version), or None if the object doesn't exist."""
        size, version = found or (-1, "")
        row = (path, size, version)
        self._file.change(
            "INSERT OR REPLACE INTO names VALUES (?, ?, ?, ?)", (*row, row_checksum(row))
        )

    def recall(self, path: str) -> Known:
        """Return the last answer about a name."""
        return read_name_row(self._file.row(NAME_QUERY, (path,)), path)


NAME_QUERY = "SELECT size, version, sum FROM names WHERE path = ?"


@as_database_errors()
def read_name_row(found: tuple[Any, ...] | None, path: str) -> Known:
    """Read a row of NAME_QUERY. A row with a wrong checksum counts as missing."""
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
    group: str
    uri: str
    size_bytes: int
    disk_bytes: int
    state: State
    kept: bool = False
    used_s: float = field(default_factory=time.time)
    crcs: bytes | None = None
    pinned: bool = False


class BlobTable:
    """The rows of blobs, fills and trash. numbers: the table that stores their total size."""

    def __init__(self, file: CatalogueFile, numbers: NumberTable) -> None:
        self._file, self._numbers = file, numbers

    # -- what is used

    @property
    def used_bytes(self) -> int:
        """The bytes that count towards the limit now. Raises UncountedError."""
        used = self._numbers.get("used")
        if used is None:
            raise UncountedError("the used bytes weren't counted")
        return used

    def _count(self, more: int) -> None:
        if (used := self._numbers.get("used")) is not None:
            self._numbers.set("used", max(0, used + more))

    def recount(self) -> int:
        """Compute and store the used bytes from all rows; return them."""
        with self._file.writing():
            total = self._total("SELECT COALESCE(SUM(disk), 0) FROM blobs")
            self._numbers.set("used", total)
        return total

    def kept_bytes(self, group: str) -> int:
        """Return the bytes of the manifests and sidecars of a group."""
        return self._total(
            "SELECT COALESCE(SUM(disk), 0) FROM blobs WHERE grp = ? AND kept = 1", group
        )

    def group_bytes(self, group: str) -> int:
        """Return the bytes of all blobs of a group."""
        return self._total("SELECT COALESCE(SUM(disk), 0) FROM blobs WHERE grp = ?", group)

    def _total(self, query: str, *values: str) -> int:
        found = self._file.row(query, values)
        return checked_number(found[0]) if found else 0

    # -- changes

    def add(self, blob: BlobRow) -> None:
        """Insert a blob, or replace the one with its key. `pinned` isn't stored."""
        with self._file.writing():
            self.remove(blob.key)
            row = (
                *(blob.key, blob.group, blob.uri, blob.size_bytes, blob.disk_bytes, blob.state),
                *(int(blob.kept), blob.used_s, blob.crcs),
            )
            self._file.change(
                "INSERT INTO blobs VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", (*row, row_checksum(row))
            )
            self._count(blob.disk_bytes)

    def adopt(
        self, key: str, *, size_bytes: int, disk_bytes: int, state: State, used_s: float
    ) -> None:
        """Insert a file that the catalogue doesn't list. The row rescued from a damaged catalogue
        is used if it is right and of this size; otherwise the row has no group and no checksums.
        used_s: the file's last use."""
        raw = self._file.rescued.pop(key, None)
        row = _row((*raw, 0)) if raw is not None and _is_right(raw) else None
        if row is None or row.size_bytes != size_bytes:
            # Samples have their own checksums; the next reboot drops the blob.
            row = BlobRow(
                key=key,
                group="",
                uri="",
                size_bytes=size_bytes,
                disk_bytes=disk_bytes,
                state=state,
                used_s=min(used_s, time.time()),
            )
        self.add(replace(row, disk_bytes=disk_bytes, state=state))

    def forget_rescued(self) -> None:
        """Forget the rows that were rescued from a damaged catalogue."""
        self._file.rescued.clear()

    def claim(self, group: str, has: Callable[[str], bool]) -> None:
        """Set the group of blobs that lost theirs in a rebuild. has: returns True for the keys of
        the group's blobs."""
        for row in self._where("grp = ''"):
            if has(row.key):
                self.add(replace(row, group=group))

    def unknown(self) -> int:
        """Count the whole blobs without checksums, of which a rebuild found only the files."""
        return self._total("SELECT COUNT(*) FROM blobs WHERE state = 'ready' AND crcs IS NULL")

    def resize(self, row: BlobRow, disk_bytes: int) -> None:
        """Change a blob's size on the disk."""
        self.add(replace(row, disk_bytes=disk_bytes))

    def remove(self, key: str) -> None:
        """Delete a blob's row, if there is one."""
        with self._file.writing():
            row = self.row(key)
            if row is not None:
                self._file.change("DELETE FROM blobs WHERE key = ?", (key,))
                self._count(-row.disk_bytes)

    def to_trash(self, key: str, name: str) -> None:
        """Record that a blob's file is now `name` in the trash; its bytes count until it is
        removed."""
        with self._file.writing():
            row = self.row(key)
            if row is not None:
                self.remove(key)
                self.add(replace(row, key=name, state="trash", crcs=None))

    def touch(self, uses: Mapping[str, float]) -> None:
        """Store last uses, seconds since the epoch; times in the future become now."""
        now = time.time()
        self._file.change_each(
            "UPDATE blobs SET used = ? WHERE key = ?",
            [(min(when, now), key) for key, when in uses.items()],
        )

    def remove_wrong(self) -> int:
        """Delete rows with wrong checksums; return their number."""
        with self._file.writing():
            found = self._file.rows("SELECT *, 0 FROM blobs")
            wrong = [(row[0],) for row in found if not _is_right(row[:-1])]
            self._file.change_each("DELETE FROM blobs WHERE key = ?", wrong)
        return len(wrong)

    # -- questions

    def row(self, key: str) -> BlobRow | None:
        """Return a blob's row; None if there is none."""
        found = self._file.row(f"SELECT *, {_PINNED} FROM blobs WHERE key = ?", (key,))
        return None if found is None else _row(found)

    def rows(self, *, state: State | None = None) -> list[BlobRow]:
        """Return all blobs, or those of a state, least recently used first."""
        return self._where("state = ?", state) if state else self._where("1")

    def _where(self, condition: str, *values: str) -> list[BlobRow]:
        found = self._file.rows(
            f"SELECT *, {_PINNED} FROM blobs WHERE {condition} ORDER BY kept, used", values
        )
        return [_row(row) for row in found]

    def victims(self) -> Iterator[BlobRow]:
        """Yield whole blobs that no job pins: data before manifests, least recently used first."""
        found = self._file.rows(
            f"SELECT *, 0 FROM blobs WHERE state = 'ready' AND NOT {_PINNED} ORDER BY kept, used"
        )
        yield from map(_row, found)

    def counts(self) -> dict[str, int]:
        """Count the blobs of each state."""
        return dict(self._file.rows("SELECT state, COUNT(*) FROM blobs GROUP BY state"))

    def sizes(self, state: State) -> dict[str, int]:
        """Return the recorded size on the disk of each blob of a state."""
        return dict(self._file.rows("SELECT key, disk FROM blobs WHERE state = ?", (state,)))


CRCS_QUERY = "SELECT * FROM blobs WHERE key = ? AND state = 'ready'"
HELD_QUERY = "SELECT key FROM blobs WHERE grp = ? AND state = 'ready' ORDER BY key LIMIT ?"
"""For read-only connections: the row of a whole blob; the sorted keys of a group's whole blobs."""


@as_database_errors()
def read_crcs(found: tuple[Any, ...] | None, size_bytes: int) -> bytes | None:
    """Return the checksums of a blob's blocks from its row of CRCS_QUERY; None if it has none, or
    the row is damaged or of another size. Raises sqlite3.DatabaseError if the columns are wrong."""
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
    """The catalogue's row of one loader that uses the cache.

    reads: a hash of the blobs that it reads in an epoch. wanted_bytes: the bytes of these blobs.
    share_bytes: the bytes that may be pinned for it. below: the threshold below which keys are
    pinned.
    """

    id: int
    group: str
    reads: str
    wanted_bytes: int
    share_bytes: int
    below: str
    pid: int


class JobTable:
    """The rows of live jobs; a dead process's row stays until `forget_dead_jobs` deletes it."""

    def __init__(self, file: CatalogueFile) -> None:
        self._file = file

    def rows(self) -> list[JobRow]:
        """Return all jobs."""
        found = self._file.rows("SELECT id, grp, reads, wanted, share, below, pid FROM members")
        return [_job(one) for one in found]

    def add(self, job: JobRow) -> None:
        """Insert a job, or replace its row."""
        row = (job.id, job.group, job.reads, job.wanted_bytes, job.share_bytes, job.below, job.pid)
        self._file.change(
            "INSERT OR REPLACE INTO members VALUES (?, ?, ?, ?, ?, ?, ?, ?)", (*row, time.time())
        )

    def set_share(self, job: int, *, share_bytes: int, below: str) -> None:
        """Change the share that is pinned for a job."""
        self._file.change(
            "UPDATE members SET share = ?, below = ? WHERE id = ?", (share_bytes, below, job)
        )

    def remove(self, job: int) -> None:
        """Delete a job, which unpins its blobs."""
        self._file.change("DELETE FROM members WHERE id = ?", (job,))

    def owed_bytes(self, group: str) -> int:
        """Return the largest number of bytes that a job of a group lacks of its share."""
        found = self._file.row(
            "SELECT MAX(0, COALESCE(MAX(MIN(share, wanted) - (SELECT COALESCE(SUM(disk), 0)"
            " FROM blobs WHERE grp = members.grp AND state != 'trash' AND kept = 0"
            " AND key < members.below)), 0)) FROM members WHERE grp = ?",
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
    """Draw a random id for a job: counted ids would repeat after a rebuild of the catalogue."""
    return secrets.randbits(60) + 1


class Catalogue:
    """The tables of a cache's catalogue, in one SQLite file. Safe for several threads.

    folder: the cache folder. mend: True replaces a damaged file by an empty one. Raises
    sqlite3.Error and OSError.
    """

    def __init__(self, folder: Folder, *, mend: bool = True) -> None:
        self._file = CatalogueFile(folder, mend=mend)
        self.numbers = NumberTable(self._file)
        self.blobs = BlobTable(self._file, self.numbers)
        self.jobs = JobTable(self._file)
        self.labels = LabelTable(self._file)
        self.names = NameTable(self._file)

    @property
    def is_upgrade(self) -> bool:
        """True if the catalogue had an older version and was replaced."""
        return self._file.is_upgrade

    def pop_damage(self) -> tuple[str | None, str | None]:
        """Return the damage of a catalogue that was replaced since the last call, and the new name
        of the old file if it was another program's."""
        file = self._file
        found, file.damage, file.moved = (file.damage, file.moved), None, None
        return found

    def writing(self) -> AbstractContextManager[None]:
        """Run one transaction over all tables; it excludes all other threads of the node."""
        return self._file.writing()

    @property
    def is_counted(self) -> bool:
        """True if the files have been entered into the catalogue."""
        return self.numbers.has("used")

    def renew(self, error: Exception, fill: Callable[[], object]) -> bool:
        """Replace a damaged catalogue; return False if another process did. error: the damage.
        fill: enters the files into the empty catalogue, in the same transaction."""
        return self._file.renew(error, is_empty=lambda: not self.is_counted, fill=fill)

    def own_bytes(self) -> int:
        """Return the size of the catalogue's file, without its log."""
        return self._file.size_bytes()

    def close(self) -> None:
        """Close the file. Safe to call twice."""
        self._file.close()
