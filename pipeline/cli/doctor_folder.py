"""The doctor judges a folder that data shall lie in: its rights, its room, its file system."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.cache.base.sizes import format_size
from penstock.pipeline.cli.check import Check

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.pipeline.cli.folder_facts import FolderFacts

SMALL_FREE_BYTES = 2**30
_NETWORK = ("nfs", "nfs4", "cifs", "smb3", "9p")


def folder_checks(folder: FolderFacts) -> Iterator[Check]:
    """Judge a folder: whether it is there, and if so, the rest."""
    yield _folder(folder)
    if folder.is_folder:
        yield _space(folder)
        yield _file_system(folder)


def _folder(folder: FolderFacts) -> Check:
    if not folder.exists or not folder.is_folder:
        found = f"{folder.path}: {'not a folder' if folder.exists else 'not there'}"
        return Check(name="folder", status="fail", found=found, remedy=f"mkdir -p {folder.path}")
    if not folder.readable:
        return Check(
            name="folder",
            status="fail",
            found=f"{folder.path}: not readable",
            remedy="Give this user the rights to read and enter it.",
        )
    if not folder.writable:
        return Check(
            name="folder",
            status="warn",
            found=f"{folder.path}: read-only",
            remedy="Fine for data: its index lies beside it, or where penstock index --out "
            "says. A cache needs a folder to write to.",
        )
    return Check(name="folder", status="ok", found=f"{folder.path}: writable")


def _space(folder: FolderFacts) -> Check:
    found = f"{format_size(folder.free_bytes)} of {format_size(folder.total_bytes)} free"
    if folder.free_files == 0:
        return Check(
            name="space",
            status="fail",
            found=f"{found}, but not one file more may be made (no inodes)",
            remedy="Delete or pack small files: penstock pack makes one file of thousands.",
        )
    if folder.free_bytes >= SMALL_FREE_BYTES:
        return Check(name="space", status="ok", found=found)
    return Check(
        name="space",
        status="warn",
        found=found,
        remedy="Too little for a pack or a cache: make room or choose another disk.",
    )


def _file_system(folder: FolderFacts) -> Check:
    kind = folder.kind
    if kind in _NETWORK:
        return Check(
            name="file system",
            status="warn",
            found=kind,
            remedy='Files that change under a map kill the process: DataLoader(read="pread"); a '
            "pack reads faster here than a folder of small files.",
        )
    if kind.startswith("fuse"):
        return Check(
            name="file system",
            status="warn",
            found=kind,
            remedy="Each read is a round trip: pack the data, or read it by its URL with cache=.",
        )
    if kind == "tmpfs":
        return Check(
            name="file system",
            status="warn",
            found="tmpfs",
            remedy="What lies here takes memory and is gone after a restart.",
        )
    return Check(name="file system", status="ok", found=kind or "unknown")
