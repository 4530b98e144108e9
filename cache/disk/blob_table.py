"""The books' table of blobs: what each takes of the limit, and which may go first."""

from __future__ import annotations

import re
import sqlite3
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from penstock.cache.disk.block_crcs import BLOCK_BYTES
from penstock.cache.disk.damage import UncountedError, reading, row_checksum, whole

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from penstock.cache.disk.books import Books
    from penstock.cache.disk.tables import NumberTable

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

    def __init__(self, books: Books, numbers: NumberTable) -> None:
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
        return whole(found[0]) if found else 0

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
                "INSERT INTO blobs VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (*row, row_checksum(row)),
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


@reading()
def read_crcs(found: tuple[Any, ...] | None, size_bytes: int) -> bytes | None:
    """The checksums of a whole blob's blocks by its row of CRCS_QUERY; None where the books don't
    have them, or the row isn't what was written, or of a blob of another size. Raises
    sqlite3.DatabaseError for books of other columns."""
    if found is None or not _is_right(found):
        return None
    size, crcs = found[3], found[8]
    wanted = -(-size_bytes // BLOCK_BYTES) * 4
    return crcs if size == size_bytes and isinstance(crcs, bytes) and len(crcs) == wanted else None


@reading()
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
