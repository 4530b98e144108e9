"""`penstock doctor DIR`, where DIR is a cache: its limit, disk, owner, jobs and leftovers.

`cache_checks` is a pure function of what `cache_facts` collected.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.cache.base.sizes import format_size
from penstock.pipeline.cli.check import Check, count

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.pipeline.cli.cache_facts import CacheFacts
    from penstock.pipeline.cli.folder_facts import FolderFacts

# A blob is a file, and one more while it is filled.
FEW_FREE_FILES = 10_000


def cache_checks(cache: CacheFacts, folder: FolderFacts) -> Iterator[Check]:
    """Judge a cache folder; jobs and leftovers only where there are any."""
    if cache.problem is not None:
        yield Check(name="cache", status="fail", found=cache.problem, remedy=cache.remedy)
        return
    yield _cache(cache)
    yield _owner(cache)
    yield _limit(cache, folder)
    yield _files(folder)
    if cache.network:
        yield Check(
            name="cache disk",
            status="fail",
            found=f"{folder.kind}: not a local file system",
            remedy="A cache must lie on a disk of this node: NVMe, or /dev/shm for a small one.",
        )
    yield _boot(cache)
    yield _leftovers(cache)
    yield from _jobs(cache)


def _cache(cache: CacheFacts) -> Check:
    found = f"{count(cache.blobs, 'blob')}, {format_size(cache.used_bytes)}"
    return Check(name="cache", status="ok", found=found)


def _owner(cache: CacheFacts) -> Check:
    found = f"user {cache.owner}, mode {cache.mode:04o}"
    if cache.owner != cache.user:
        return Check(
            name="owner",
            status="fail",
            found=f"{found}; this is user {cache.user}",
            remedy="Jobs of this user would read past it: give them a cache folder of their own.",
        )
    if cache.mode & 0o022:
        return Check(
            name="owner",
            status="warn",
            found=f"{found}: others may write here",
            remedy="chmod go-w: whoever may write here can put bytes into a training job.",
        )
    return Check(name="owner", status="ok", found=found)


def _limit(cache: CacheFacts, folder: FolderFacts) -> Check:
    if cache.max_bytes is None:
        return Check(name="limit", status="ok", found="none yet: the first job sets it")
    found = f"{format_size(cache.used_bytes)} of {format_size(cache.max_bytes)} used"
    if cache.used_bytes > cache.max_bytes:
        return Check(
            name="limit",
            status="warn",
            found=f"{found}: more than the limit",
            remedy="penstock cache evict DIR --to SIZE, when no job has them mapped.",
        )
    room = folder.free_bytes + cache.used_bytes
    if cache.max_bytes > room:
        return Check(
            name="limit",
            status="warn",
            found=f"{found}, but the disk has room for {format_size(room)} only",
            remedy="Set max_bytes= to what the disk has, or make room: when it is full, samples "
            "come from the remote each epoch.",
        )
    return Check(name="limit", status="ok", found=found)


def _files(folder: FolderFacts) -> Check:
    if folder.free_files is None:
        return Check(name="inodes", status="ok", found="as many as there is room for")
    found = f"{folder.free_files:,} more files may be made"
    if folder.free_files >= FEW_FREE_FILES:
        return Check(name="inodes", status="ok", found=found)
    return Check(
        name="inodes",
        status="warn",
        found=found,
        remedy="A blob is a file: delete small files on this disk, or choose another.",
    )


def _boot(cache: CacheFacts) -> Check:
    if not cache.unverified:
        return Check(name="boot", status="ok", found="all blobs were checked since the last boot")
    return Check(
        name="boot",
        status="ok",
        found=f"{count(cache.unverified, 'blob')} not yet checked since the last boot: a job "
        "checks each when it opens it (all at once: penstock cache verify DIR)",
    )


def _leftovers(cache: CacheFacts) -> Check:
    found = [
        count(number, noun)
        for number, noun in (
            (cache.dead_fills, "fill of a dead process"),
            (cache.dead_jobs, "dead job"),
            (cache.strays, "stray file"),
        )
        if number
    ]
    if not found:
        return Check(name="leftovers", status="ok", found="none")
    return Check(
        name="leftovers",
        status="warn",
        found=f"{', '.join(found)}, {format_size(cache.leftover_bytes)}",
        remedy="The next job uses or frees them; at once: penstock cache gc DIR.",
    )


def _jobs(cache: CacheFacts) -> Iterator[Check]:
    if not cache.jobs:
        yield Check(name="jobs", status="ok", found="none runs on this cache")
    for job in cache.jobs:
        part = job.share_bytes / job.wanted_bytes if job.wanted_bytes else 1.0
        found = (
            f"{job.label}: {count(job.processes, 'process')}, share {format_size(job.share_bytes)} "
            f"for {format_size(job.wanted_bytes)}"
        )
        if part >= 1:
            yield Check(name="job", status="ok", found=found)
            continue
        yield Check(
            name="job",
            status="warn",
            found=f"{found}: {100 * part:.0f} % stays here",
            remedy="The rest is fetched each epoch; a larger max_bytes or fewer jobs at once on "
            "this cache would keep it.",
        )
