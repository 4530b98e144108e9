"""What the doctor asks of a folder: is it there, whose is it, how much room, which file system."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderFacts:
    """A folder that data shall lie in. kind: of its file system, such as ext4; "" if unknown."""

    path: str
    exists: bool
    is_folder: bool
    readable: bool
    writable: bool
    free_bytes: int
    total_bytes: int
    free_files: int | None
    kind: str


def folder_facts(path: Path, *, mounts: str | None = None) -> FolderFacts:
    """Facts of a folder. mounts: instead of /proc/self/mountinfo's text."""
    exists = path.exists()
    space = os.statvfs(path) if exists else None
    return FolderFacts(
        path=str(path),
        exists=exists,
        is_folder=path.is_dir(),
        readable=os.access(path, os.R_OK | os.X_OK),
        writable=os.access(path, os.W_OK),
        free_bytes=space.f_bavail * space.f_frsize if space else 0,
        total_bytes=space.f_blocks * space.f_frsize if space else 0,
        free_files=space.f_favail if space and space.f_files else None,
        kind=file_system_kind(path, _mounts() if mounts is None else mounts) if exists else "",
    )


def file_system_kind(path: Path, mounts: str) -> str:
    """Kind of the file system that a path lies on, by the longest mount point above it.

    mounts: lines of /proc/self/mountinfo (proc(5)): the fifth word is the mount point with octal
    escapes, the first word after " - " the kind. A later line lies over an earlier one.
    """
    place, kind, longest = os.path.realpath(path), "", -1
    for line in mounts.splitlines():
        left, dash, right = line.partition(" - ")
        words = left.split()
        if not dash or len(words) < 5 or not right.split():
            continue
        mount = re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), words[4])
        if f"{place}/".startswith(f"{mount.rstrip('/')}/") and len(mount) >= longest:
            kind, longest = right.split()[0], len(mount)
    return kind


def _mounts() -> str:
    try:
        return Path("/proc/self/mountinfo").read_text(errors="surrogateescape")
    except OSError:
        return ""
