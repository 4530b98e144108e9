"""List, verify, evict and repair the content of a cache folder while jobs use it."""

from __future__ import annotations

import contextlib
import errno
import os
import sqlite3
from collections import Counter
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, TypeVar

from penstock.cache.base import ByteLocks, StrangeFileError, read_error
from penstock.cache.disk.cache_folder import CacheFolder, read_fault
from penstock.cache.disk.catalogue import BlobRow, Catalogue, State, is_damage
from penstock.cache.disk.folder_layout import FolderLayout, boot_id
from penstock.cache.disk.space import Space, live_and_dead_jobs
from penstock.cache.errors import ConfigError, warn

if TYPE_CHECKING:
    from collections.abc import Callable


T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class BlobRecord:
    """The description of one blob of a cache, for listings.

    label: the name of its dataset. uri: the object's URI without credentials. disk_bytes: the bytes
    that count towards the limit. pinned: True if it is kept for a live job. in_use: True if a
    process has it mapped. used_s: the last use, in seconds since the epoch.
    """

    key: str
    label: str
    uri: str
    size_bytes: int
    disk_bytes: int
    state: State
    pinned: bool
    in_use: bool
    used_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRecord:
    """The description of a live job that uses a cache, for listings.

    wanted_bytes: the bytes that this node reads in an epoch. share_bytes: the most of them that may
    be pinned.
    """

    pid: int
    label: str
    wanted_bytes: int
    share_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheSummary:
    """The limit, use and jobs of a cache.

    max_bytes: 0 if no job has set the limit. used_bytes: the bytes of blobs, fills and trash.
    overhead_bytes: the bytes of the catalogue, its log and indexes. free_bytes: the free bytes of
    the disk. blobs, fills, trash, unverified: the numbers of files. dead_fills, dead_jobs: the
    numbers of fills and jobs of dead processes. strays: the number of dropped and unknown files
    that no process has mapped. leftover_bytes: the bytes of dead fills and strays. labels: the
    bytes of each dataset.
    """

    path: str
    max_bytes: int = 0
    used_bytes: int = 0
    overhead_bytes: int = 0
    pinned_bytes: int = 0
    free_bytes: int = 0
    blobs: int = 0
    fills: int = 0
    trash: int = 0
    unverified: int = 0
    dead_fills: int = 0
    dead_jobs: int = 0
    strays: int = 0
    leftover_bytes: int = 0
    jobs: tuple[JobRecord, ...] = ()
    labels: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """The result of verifying a cache.

    checked, checked_bytes: the number and the bytes of the blobs that were read. bad: the blobs
    with wrong or unreadable bytes, which were dropped. why: the fault of each of them. unknown: the
    number of blobs without checksums, of which only the size was checked.
    """

    checked: int
    checked_bytes: int
    bad: tuple[BlobRecord, ...]
    why: tuple[str, ...] = ()
    unknown: int = 0


def on_folder(path: str | os.PathLike[str], act: Callable[[CacheFolder], T]) -> T:
    """Return act(cache) for an existing cache, and report repairs by one PenstockWarning. If `act`
    finds the catalogue damaged, it is called again after the repair. Raises ConfigError, OSError,
    sqlite3.Error."""
    root = os.path.abspath(os.fspath(path))
    if not FolderLayout.is_cache(root):
        found = "it has no format.json" if os.path.isdir(root) else "it doesn't exist"
        raise ConfigError(
            f"{root}: this isn't a cache folder: {found}. Pass the folder that was passed as "
            "cache= (or --cache)."
        )
    cache = CacheFolder(root, max_bytes=None)
    try:
        return cache.repairing(lambda: act(cache))
    finally:
        if (damage := cache.pop_damage()) is not None:
            warn(damage, stacklevel=2)
        cache.close()


def list_blobs(path: str | os.PathLike[str]) -> list[BlobRecord]:
    """List all blobs of a cache, least recently used first. Raises as `on_folder` does."""
    return on_folder(path, lambda cache: _records(cache.layout, cache.catalogue))


def stat(path: str | os.PathLike[str]) -> CacheSummary:
    """Return the limit, use and jobs of a cache. Raises as `on_folder` does."""

    def act(cache: CacheFolder) -> CacheSummary:
        cache.space.forget_dead_jobs()
        return _summary(cache.layout, cache.catalogue, cache.space)

    return on_folder(path, act)


def inspect(path: str | os.PathLike[str]) -> CacheSummary:
    """Return the limit, use and jobs of a cache without repairing it, and count what dead processes
    left there. Only a damaged catalogue is rebuilt.

    Raises ConfigError for a newer format, StalledError, OSError, sqlite3.Error.
    """
    root = os.path.abspath(os.fspath(path))
    layout = FolderLayout(root)
    layout.check_format()
    if not os.path.lexists(os.path.join(root, "catalogue.db")) and not layout.names("blobs"):
        return CacheSummary(path=root)
    try:
        with (
            contextlib.closing(Catalogue(layout.top, mend=False)) as catalogue,
            contextlib.closing(Space(layout, catalogue)) as space,
        ):
            return _summary(layout, catalogue, space)
    except sqlite3.DatabaseError as error:
        if not is_damage(error):
            raise
        return stat(root)


def _summary(layout: FolderLayout, catalogue: Catalogue, space: Space) -> CacheSummary:
    records, labels = _records(layout, catalogue), catalogue.labels()
    live, dead = live_and_dead_jobs(layout, catalogue)
    by_label = Counter[str]()
    for record in records:
        by_label[record.label] += record.disk_bytes
    max_bytes = catalogue.number("max_bytes") or 0
    disk = os.statvfs(layout.root)
    states = Counter(record.state for record in records)
    # Before a job has run since the last boot, all blobs are unverified.
    was_seen = layout.boot in (None, boot_id())
    dead_fills = [one.disk_bytes for one in records if one.state == "fill" and not one.in_use]
    strays = _stray_bytes(layout, {one.key for one in records if one.state != "trash"})
    return CacheSummary(
        path=layout.root,
        max_bytes=max_bytes,
        used_bytes=catalogue.used_bytes,
        overhead_bytes=min(max_bytes, space.own_bytes),
        pinned_bytes=sum(record.disk_bytes for record in records if record.pinned),
        free_bytes=disk.f_bavail * disk.f_frsize,
        blobs=states["ready"],
        fills=states["fill"],
        trash=states["trash"],
        unverified=len(layout.names("unverified")) if was_seen else states["ready"],
        dead_fills=len(dead_fills),
        dead_jobs=len(dead),
        strays=len(strays),
        leftover_bytes=sum(dead_fills) + sum(strays),
        jobs=tuple(
            JobRecord(label=labels.get(job.group, ""), **_common(JobRecord, job)) for job in live
        ),
        labels=dict(by_label),
    )


def _stray_bytes(layout: FolderLayout, known: set[str]) -> list[int]:
    """Return the bytes of each file that isn't of a known blob and that no process has mapped."""
    found = []
    with contextlib.closing(layout.locks("readers")) as locks:
        for folder in (layout.blobs, layout.fills, layout.trash, layout.unverified):
            for name in layout.names(os.path.basename(folder.path)):
                if name.partition(".")[0] not in known:
                    with contextlib.suppress(FileNotFoundError):
                        status = folder.stat(name)
                        if not locks.is_held(status.st_ino):
                            found.append(status.st_blocks * 512)
    return found


def verify(
    path: str | os.PathLike[str], *, progress: Callable[[int, int], None] | None = None
) -> Verification:
    """Read every whole blob and compare its checksums; drop those that are wrong, so that they are
    fetched again.

    progress: called with (bytes done, total bytes). Raises as `on_folder` does, and ReadError for
    faults of the machine: no memory, no open files, no permission, a failing mount.
    """

    def act(cache: CacheFolder) -> Verification:
        rows = cache.catalogue.blobs(state="ready")
        total = sum(row.size_bytes for row in rows)
        records = {record.key: record for record in _records(cache.layout, cache.catalogue)}
        done, faults = 0, dict[str, str | None]()
        for row in rows:
            faults[row.key] = fault = _fault(cache, row)
            if fault:
                cache.space.drop(row.key)
            done += row.size_bytes
            if progress is not None:
                progress(done, total)
        bad = {key: fault for key, fault in faults.items() if fault}
        return Verification(
            checked=sum(fault is not None for fault in faults.values()),
            checked_bytes=done,
            bad=tuple(records[key] for key in bad),
            why=tuple(bad.values()),
            unknown=sum(row.crcs is None and faults[row.key] == "" for row in rows),
        )

    return on_folder(path, act)


def _fault(cache: CacheFolder, row: BlobRow) -> str | None:
    """Return a blob's fault, "" if it has none; None if it was evicted meanwhile."""
    for folder in (cache.layout.blobs, cache.layout.unverified):
        path = f"{folder.path}/{row.key}"
        try:
            return read_fault(folder, row)[1]
        except FileNotFoundError:
            continue
        except StrangeFileError as error:
            return str(error.strerror)
        except OSError as error:
            if error.errno != errno.EIO:
                raise read_error(path, error) from error
            return f"its disk can't read it ({error.strerror}; see `dmesg`)"
    return None


def evict(
    path: str | os.PathLike[str], *, to_bytes: int | None = None, label: str | None = None
) -> tuple[int, int, int]:
    """Evict blobs that no live job pins or has mapped, least recently used first, until at most
    to_bytes (None: 0) are left. Return the evicted blobs and bytes, and the bytes that are left.

    label: evict only blobs of this dataset. Raises ConfigError for an unknown label; otherwise as
    `on_folder` does.
    """

    def act(cache: CacheFolder) -> tuple[int, int, int]:
        groups: list[str | None] = [None]
        if label is not None:
            labels = cache.catalogue.labels()
            groups = [group for group, text in labels.items() if text == label]
            if not groups:
                known = ", ".join(sorted(set(labels.values()))) or "none: the cache is empty"
                raise ConfigError(
                    f"{cache.layout.root}: the cache has no dataset {label!r}. It has: {known}."
                )
        evicted = [cache.space.evict_to(to_bytes or 0, group=group) for group in groups]
        blobs, freed_bytes = map(sum, zip(*evicted, strict=True))
        return blobs, freed_bytes, cache.catalogue.used_bytes

    return on_folder(path, act)


def gc(path: str | os.PathLike[str]) -> tuple[int, int]:
    """Remove dead jobs, fills that no process works on and trash, and record files that the
    catalogue doesn't list. Return (corrections, bytes freed). Raises as `on_folder` does."""

    def act(cache: CacheFolder) -> tuple[int, int]:
        with cache.catalogue.writing():
            before = cache.catalogue.used_bytes
            corrected = cache.reconcile() + cache.space.remove_fills()
        return corrected, before - cache.catalogue.used_bytes

    return on_folder(path, act)


def _records(layout: FolderLayout, catalogue: Catalogue) -> list[BlobRecord]:
    labels = catalogue.labels()
    with contextlib.closing(layout.locks("readers")) as probe:
        return [
            BlobRecord(
                label=labels.get(row.group, ""),
                in_use=_in_use(layout, row, probe),
                **_common(BlobRecord, row),
            )
            for row in catalogue.blobs()
        ]


def _common(kind: type[Any], row: object) -> dict[str, Any]:
    """Return the fields of a record that a row of the catalogue has, too."""
    return {one.name: getattr(row, one.name) for one in fields(kind) if hasattr(row, one.name)}


def _in_use(layout: FolderLayout, row: BlobRow, probe: ByteLocks) -> bool:
    for folder, name in (*layout.places(row.key), (layout.trash, row.key)):
        with contextlib.suppress(FileNotFoundError):
            if probe.is_held(folder.stat(name).st_ino):
                return True
    return False
