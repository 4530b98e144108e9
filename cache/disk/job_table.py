"""The books' table of live jobs: what each reads in an epoch, and how much of it is pinned."""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from penstock.cache.disk.damage import reading, whole

if TYPE_CHECKING:
    from penstock.cache.disk.books import Books

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

    def __init__(self, books: Books) -> None:
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
        return whole(found[0]) if found else 0


@reading()
def _job(row: tuple[Any, ...]) -> JobRow:
    job, group, reads, wanted, share, below, pid = row
    if whole(job) > _MOST_JOB:
        raise ValueError(f"job {job}")
    return JobRow(
        id=job,
        group=str(group),
        reads=str(reads),
        wanted_bytes=whole(wanted),
        share_bytes=whole(share),
        below=str(below),
        pid=whole(pid),
    )


def new_job_id() -> int:
    """Draw a number for a job, as ids that begin anew with new books would meet older jobs'."""
    return secrets.randbits(60) + 1
