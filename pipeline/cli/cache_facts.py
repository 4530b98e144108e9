"""The facts of a cache folder for `penstock doctor`. It changes nothing but a damaged catalogue.

So it doesn't open the cache as a job does, which repairs what the doctor is to report. Only a
catalogue that can't be read is rebuilt, with a warning, as it is by every job and command.
"""

from __future__ import annotations

import os
import sqlite3
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from penstock.cache.base.trust import StrangeFileError
from penstock.cache.disk import admin
from penstock.cache.disk.damage import UncountedError, is_damage
from penstock.cache.disk.layout import Layout, boot_id
from penstock.cache.disk.mounts import is_network
from penstock.cache.errors import ConfigError, StalledError

if TYPE_CHECKING:
    from pathlib import Path

    from penstock.cache.disk.blob_table import BlobRow
    from penstock.cache.disk.catalogue import Catalogue
    from penstock.cache.disk.job_table import JobRow


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFacts:
    """Live jobs on one dataset. label: its URL, without credentials; wanted_bytes: what they read
    of it in an epoch; share_bytes: what of that the cache may keep."""

    label: str
    processes: int
    share_bytes: int
    wanted_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheFacts:
    """A cache folder. problem: why it can't be used, None if it can, and the remedy. owner, user:
    numbers of the folder's user and of this one; mode: permission bits. network: whether it lies on
    a file system of another machine.

    max_bytes: its limit, None before the first job; used_bytes: of blobs, fills and what was
    dropped. unverified: blobs that nobody checked since the last boot.
    dead_fills, dead_jobs, strays, leftover_bytes: what a reconciliation would take away.
    """

    problem: str | None = None
    remedy: str = ""
    owner: int = 0
    user: int = 0
    mode: int = 0o700
    network: bool = False
    max_bytes: int | None = None
    used_bytes: int = 0
    blobs: int = 0
    unverified: int = 0
    dead_fills: int = 0
    dead_jobs: int = 0
    strays: int = 0
    leftover_bytes: int = 0
    jobs: tuple[JobFacts, ...] = ()


def cache_facts(path: Path) -> CacheFacts | None:
    """Facts of a cache folder; None if the folder isn't one."""
    root = os.path.abspath(path)
    if not Layout.is_cache(root):
        return None
    folder = os.stat(root)
    found: dict[str, Any] = {
        "owner": folder.st_uid,
        "user": os.geteuid(),
        "mode": folder.st_mode & 0o7777,
        "network": is_network(root),
    }
    try:
        layout = Layout(root)
        layout.check_format()
        try:
            found |= _books(layout)
        except sqlite3.DatabaseError as error:
            if not is_damage(error):
                raise
            admin.stat(root)
            found |= _books(layout)
    except ConfigError as error:
        found |= {"problem": str(error), "remedy": "Use another folder, or a newer penstock."}
    except StrangeFileError as error:
        found |= {
            "problem": f"{error.filename}: {error.strerror}",
            "remedy": "A job reads past such a folder. Give each user a folder of their own.",
        }
    except (OSError, sqlite3.Error, StalledError) as error:
        found |= {
            "problem": f"{root}: its catalogue can't be read ({error})",
            "remedy": "Check the folder's rights and disk. Jobs read past such a cache.",
        }
    return CacheFacts(**found)


def _books(layout: Layout) -> dict[str, Any]:
    from penstock.cache.disk.catalogue import Catalogue

    if not os.path.lexists(os.path.join(layout.root, "catalogue.db")):
        if layout.names("blobs"):
            raise UncountedError("its catalogue is missing")
        return {}
    catalogue = Catalogue(layout.top, mend=False)
    try:
        limit = catalogue.numbers.get("max_bytes")
        rows = catalogue.blobs.rows()
        blobs = sum(row.state == "ready" for row in rows)
        return {
            "max_bytes": limit,
            "used_bytes": catalogue.blobs.used_bytes,
            "blobs": blobs,
            "unverified": _unverified(layout, blobs),
            **_jobs(layout, catalogue),
            **_leftovers(layout, rows),
        }
    finally:
        catalogue.close()


def _unverified(layout: Layout, blobs: int) -> int:
    """After a boot that no job has seen yet it is all of them."""
    seen = layout.boot in (None, boot_id())
    return len(layout.names("unverified")) if seen else blobs


def _jobs(layout: Layout, catalogue: Catalogue) -> dict[str, Any]:
    locks = layout.locks("jobs")
    try:
        alive = [job for job in catalogue.jobs.rows() if locks.is_held(job.id + 1)]
    finally:
        locks.close()
    groups: dict[str, list[JobRow]] = defaultdict(list)
    for job in alive:
        groups[job.group].append(job)
    labels = catalogue.labels.all()
    jobs = [
        JobFacts(
            label=labels.get(group, ""),
            processes=len({job.pid for job in members}),
            share_bytes=max(job.share_bytes for job in members),
            wanted_bytes=max(job.wanted_bytes for job in members),
        )
        for group, members in sorted(groups.items())
    ]
    return {"jobs": tuple(jobs), "dead_jobs": len(catalogue.jobs.rows()) - len(alive)}


def _leftovers(layout: Layout, rows: list[BlobRow]) -> dict[str, int]:
    """Fills that nobody works on, what was dropped, and files that the books don't know."""
    known = {row.key for row in rows}
    dead_fills = strays = leftover_bytes = 0
    locks = layout.locks("readers")
    try:
        for folder in ("blobs", "fills", "trash", "unverified"):
            for name in layout.names(folder):
                is_stray = name.partition(".")[0] not in known
                if not is_stray and folder in ("blobs", "unverified"):
                    continue
                try:
                    stat = getattr(layout, folder).stat(name)
                except FileNotFoundError:
                    continue
                is_map = name.endswith(".map") and not is_stray  # counted with its fill
                if is_map or locks.is_held(stat.st_ino):
                    continue
                dead_fills += folder == "fills" and not is_stray
                strays += folder == "trash" or is_stray
                leftover_bytes += stat.st_blocks * 512
    finally:
        locks.close()
    return {"dead_fills": dead_fills, "strays": strays, "leftover_bytes": leftover_bytes}
