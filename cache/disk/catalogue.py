"""Store the sizes, last uses and pins of blobs in the tables of the catalogue.

The tables hold blobs, live jobs, numbers of the folder, labels of groups, and the last answers of
stores about names. No hit reads them. The files are authoritative: a catalogue that is lost or
damaged is rebuilt from them.
"""

from __future__ import annotations

import os
import re
import secrets
import sqlite3
import time
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Literal

from crc32c import crc32c

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

Known = tuple[bool, tuple[int, str] | None]
"""(True if a store has answered for a name, its answer: (bytes, version), or None if the object
doesn't exist)."""


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


class Catalogue(CatalogueFile):
    """The tables of a cache's catalogue: blobs (whole, fills and trash), live jobs, numbers of the
    folder, labels of groups, and the last answers of stores about names.

    folder, mend: see CatalogueFile. Raises sqlite3.Error and OSError.
    """

    # -- numbers and labels

    def number(self, name: str) -> int | None:
        """Return the folder's limit ("max_bytes") or the used bytes ("used"); None if it isn't set.
        Raises sqlite3.DatabaseError if it is damaged."""
        found = self.row("SELECT value FROM facts WHERE name = ?", (name,))
        if found is None:
            return None
        number, _, _ = str(found[0]).partition(" ")
        if found[0] != with_checksum(name, number) or not number.isdecimal():
            raise sqlite3.DatabaseError(f"the number {name!r} has a wrong checksum")
        return int(number)

    def set_number(self, name: str, value: int) -> None:
        """Store a number."""
        row = (name, with_checksum(name, str(value)))
        self.change("INSERT OR REPLACE INTO facts VALUES (?, ?)", row)

    def set_label(self, group: str, text: str) -> None:
        """Store the label of a group."""
        self.change("INSERT OR REPLACE INTO labels VALUES (?, ?)", (group, text))

    def labels(self) -> dict[str, str]:
        """Return the label of each group."""
        found = self.rows("SELECT grp, label FROM labels")
        return {str(group): str(label) for group, label in found}

    # -- the last answers of stores about names, used while a store can't be reached

    def remember(self, path: str, found: tuple[int, str] | None) -> None:
        """Store an answer about a name: (bytes, version), or None if the object doesn't exist."""
        size, version = found or (-1, "")
        row = (path, size, version)
        self.change("INSERT OR REPLACE INTO names VALUES (?, ?, ?, ?)", (*row, row_checksum(row)))

    def recall(self, path: str) -> Known:
        """Return the last answer about a name."""
        return read_name_row(self.row(NAME_QUERY, (path,)), path)

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

    def kept_bytes(self, group: str) -> int:
        """Return the bytes of the manifests and sidecars of a group."""
        return self._total(
            "SELECT COALESCE(SUM(disk), 0) FROM blobs WHERE grp = ? AND kept = 1", group
        )

    def group_bytes(self, group: str) -> int:
        """Return the bytes of all blobs of a group."""
        return self._total("SELECT COALESCE(SUM(disk), 0) FROM blobs WHERE grp = ?", group)

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
            self.change(
                "INSERT INTO blobs VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", (*row, row_checksum(row))
            )
            self._count(blob.disk_bytes)

    def adopt(
        self, key: str, *, size_bytes: int, disk_bytes: int, state: State, used_s: float
    ) -> None:
        """Insert a file that the catalogue doesn't list. The row rescued from a damaged catalogue
        is used if it is right and of this size; otherwise the row has no group and no checksums.
        used_s: the file's last use."""
        raw = self.rescued.pop(key, None)
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
                self.change("DELETE FROM blobs WHERE key = ?", (key,))
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
        self.change_each(
            "UPDATE blobs SET used = ? WHERE key = ?",
            [(min(when, now), key) for key, when in uses.items()],
        )

    def remove_wrong(self) -> int:
        """Delete rows with wrong checksums; return their number."""
        with self.writing():
            found = self.rows("SELECT *, 0 FROM blobs")
            wrong = [(row[0],) for row in found if not _is_right(row[:-1])]
            self.change_each("DELETE FROM blobs WHERE key = ?", wrong)
        return len(wrong)

    # -- questions

    def blob(self, key: str) -> BlobRow | None:
        """Return a blob's row; None if there is none."""
        found = self.row(f"SELECT *, {_PINNED} FROM blobs WHERE key = ?", (key,))
        return None if found is None else _row(found)

    def blobs(self, *, state: State | None = None) -> list[BlobRow]:
        """Return all blobs, or those of a state, least recently used first."""
        return self._where("state = ?", state) if state else self._where("1")

    def _where(self, condition: str, *values: str) -> list[BlobRow]:
        found = self.rows(
            f"SELECT *, {_PINNED} FROM blobs WHERE {condition} ORDER BY kept, used", values
        )
        return [_row(row) for row in found]

    def victims(self) -> Iterator[BlobRow]:
        """Yield whole blobs that no job pins: data before manifests, least recently used first."""
        found = self.rows(
            f"SELECT *, 0 FROM blobs WHERE state = 'ready' AND NOT {_PINNED} ORDER BY kept, used"
        )
        yield from map(_row, found)

    def counts(self) -> dict[str, int]:
        """Count the blobs of each state."""
        return dict(self.rows("SELECT state, COUNT(*) FROM blobs GROUP BY state"))

    def sizes(self, state: State) -> dict[str, int]:
        """Return the recorded size on the disk of each blob of a state."""
        return dict(self.rows("SELECT key, disk FROM blobs WHERE state = ?", (state,)))

    # -- live jobs; a dead process's row stays until `Space.forget_dead_jobs` deletes it

    def jobs(self) -> list[JobRow]:
        """Return all jobs."""
        found = self.rows("SELECT id, grp, reads, wanted, share, below, pid FROM members")
        return [_job(one) for one in found]

    def add_job(self, job: JobRow) -> None:
        """Insert a job, or replace its row."""
        row = (job.id, job.group, job.reads, job.wanted_bytes, job.share_bytes, job.below, job.pid)
        self.change(
            "INSERT OR REPLACE INTO members VALUES (?, ?, ?, ?, ?, ?, ?, ?)", (*row, time.time())
        )

    def set_share(self, job: int, *, share_bytes: int, below: str) -> None:
        """Change the share that is pinned for a job."""
        self.change(
            "UPDATE members SET share = ?, below = ? WHERE id = ?", (share_bytes, below, job)
        )

    def remove_job(self, job: int) -> None:
        """Delete a job, which unpins its blobs."""
        self.change("DELETE FROM members WHERE id = ?", (job,))

    def owed_bytes(self, group: str) -> int:
        """Return the largest number of bytes that a job of a group lacks of its share."""
        return self._total(
            "SELECT MAX(0, COALESCE(MAX(MIN(share, wanted) - (SELECT COALESCE(SUM(disk), 0)"
            " FROM blobs WHERE grp = members.grp AND state != 'trash' AND kept = 0"
            " AND key < members.below)), 0)) FROM members WHERE grp = ?",
            group,
        )
