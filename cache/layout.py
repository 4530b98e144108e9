"""A cache folder: what lies where, and whether it may be used.

format.json          version of this layout
catalogue.db         SQLite: sizes, states, jobs; never read for a hit
blobs/<key>          whole blobs; fills/<key>.part, .map: being filled
trash/<key>-<inode>  dropped, but perhaps still mapped by someone
unverified/<key>     blobs of before a reboot: their checksums are due
*.lock               see `cache.locks`
indexes/, …          other modules' own, counted into the limit
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cache.errors import ConfigError
from cache.folders import make_private_folder

if TYPE_CHECKING:
    from collections.abc import Iterator

FORMAT = 1
"""Version of the layout. A higher one is refused."""

BLOCK = 4096
_OCTAL = re.compile(r"\\([0-7]{3})")  # how the kernel writes blanks in paths
_OURS = re.compile(r"[0-9a-f]+(\.part|\.map|-[0-9]+)?")
_BOOT_ID = "/proc/sys/kernel/random/boot_id"
_MOUNTS = "/proc/self/mountinfo"
# fmt: off
_NETWORK = frozenset((
    "nfs", "nfs4", "cifs", "smb3", "smbfs", "lustre", "gpfs", "beegfs", "ceph",
    "glusterfs", "9p", "afs", "wekafs", "panfs", "orangefs",
    "fuse.sshfs", "fuse.s3fs", "fuse.gcsfuse", "fuse.goofys", "fuse.glusterfs",
    "fuse.mount-s3", "fuse.juicefs",
))
# fmt: on


@dataclass(frozen=True, slots=True)
class Layout:
    """Paths of one cache folder."""

    root: str

    @property
    def catalogue(self) -> str:
        return os.path.join(self.root, "catalogue.db")

    @property
    def format_file(self) -> str:
        return os.path.join(self.root, "format.json")

    @property
    def boot_file(self) -> str:
        return os.path.join(self.root, "boot")

    def lock(self, name: str) -> str:
        return os.path.join(self.root, f"{name}.lock")

    def blob(self, key: str) -> str:
        return os.path.join(self.root, "blobs", key)

    def unverified(self, key: str) -> str:
        return os.path.join(self.root, "unverified", key)

    def part(self, key: str) -> str:
        return os.path.join(self.root, "fills", f"{key}.part")

    def map(self, key: str) -> str:
        return os.path.join(self.root, "fills", f"{key}.map")

    def trash(self, key: str, inode: int) -> str:
        return os.path.join(self.root, "trash", f"{key}-{inode}")

    def make(self, mode: int) -> None:
        """Make the folders. Raises OSError, ConfigError (a newer format, a network file system)."""
        make_private_folder(self.root)
        refuse_network(self.root)
        self.check_format()
        for name in ("blobs", "fills", "trash", "unverified"):
            with contextlib.suppress(FileExistsError):
                os.mkdir(os.path.join(self.root, name), mode)
        if not os.path.exists(self.format_file):
            write_small(self.format_file, json.dumps({"format": FORMAT}))

    def check_format(self) -> None:
        """Raise ConfigError for a cache of a newer version."""
        try:
            with open(self.format_file, encoding="utf-8") as file:
                found = json.load(file)["format"]
        except FileNotFoundError:
            return
        except (ValueError, KeyError, TypeError):
            found = None
        if found is None or int(found) > FORMAT:
            raise ConfigError(
                f"{self.root}: a cache of format {found}, wanted {FORMAT} or older: a newer "
                "Penstock made it. Upgrade penstock, or give another folder. Nothing was touched."
            )

    def names(self, folder: str) -> list[str]:
        """Names of our own files in one of the folders; whatever else lies there is left alone."""
        return [
            name for name in os.listdir(os.path.join(self.root, folder)) if _OURS.fullmatch(name)
        ]

    def is_cache(self) -> bool:
        """Whether this folder is one."""
        return os.path.exists(self.format_file)

    def others_bytes(self) -> int:
        """What other modules keep in the folder: indexes and reports."""
        own = {"blobs", "fills", "trash", "unverified"}
        total = 0
        with contextlib.suppress(OSError), os.scandir(self.root) as found:
            for entry in found:
                if entry.is_dir(follow_symlinks=False) and entry.name not in own:
                    total += sum(_tree_bytes(entry.path))
        return total


def write_small(path: str, text: str) -> None:
    """Write a small file whole."""
    temp = f"{path}.{os.getpid()}-{threading.get_ident()}"
    with open(os.open(temp, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        file.write(text)
    os.replace(temp, path)


def disk_bytes(size_bytes: int) -> int:
    """What a file of that size takes of the disk, in whole blocks."""
    return -(-size_bytes // BLOCK) * BLOCK


def boot_id() -> str:
    """Changes with every boot of the machine; "" where the system doesn't tell."""
    try:
        with open(_BOOT_ID, encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return ""


def file_system(path: str) -> str:
    """The type of the file system that holds a path, such as "ext4"; "" where unknown."""
    path = os.path.realpath(path)
    best, found = "", ""
    with contextlib.suppress(OSError), open(_MOUNTS, encoding="utf-8", errors="replace") as file:
        for line in file:
            mount, _, rest = line.partition(" - ")
            fields = mount.split()
            if len(fields) < 5 or not rest:
                continue
            place = _OCTAL.sub(lambda found: chr(int(found[1], 8)), fields[4])
            inside = path == place or path.startswith(place.rstrip("/") + "/")
            if inside and len(place) >= len(best):
                best, found = place, rest.split()[0]
    return found


def is_network(path: str) -> bool:
    """Whether a path lies on a file system of another machine."""
    return file_system(path) in _NETWORK


def refuse_network(root: str) -> None:
    """Raise ConfigError for a folder on a network file system."""
    if is_network(root):
        raise ConfigError(
            f"{root}: this folder is on a network file system ({file_system(root)}), wanted a "
            "local disk: a cache there would be no faster than the data, and its locks don't hold. "
            "Give a folder on the node's own NVMe."
        )


def _tree_bytes(root: str) -> Iterator[int]:
    for folder, _, files in os.walk(root):
        for name in files:
            with contextlib.suppress(OSError):
                yield os.lstat(os.path.join(folder, name)).st_blocks * 512
