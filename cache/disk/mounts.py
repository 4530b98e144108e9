"""Which file system a folder lies on: a cache needs a local one."""

from __future__ import annotations

import contextlib
import os
import re

from penstock.cache.errors import ConfigError

_OCTAL = re.compile(r"\\([0-7]{3})")  # how the kernel writes blanks in paths
_MOUNTS = "/proc/self/mountinfo"
# fmt: off
_NETWORK = frozenset((
    "nfs", "nfs4", "cifs", "smb3", "smbfs", "lustre", "gpfs", "beegfs", "ceph",
    "glusterfs", "9p", "afs", "wekafs", "panfs", "orangefs",
    "fuse.sshfs", "fuse.s3fs", "fuse.gcsfuse", "fuse.goofys", "fuse.glusterfs",
    "fuse.mount-s3", "fuse.juicefs",
))
# fmt: on


def file_system(path: str) -> str:
    """Name the type of the file system that holds a path, such as "ext4"; "" where unknown."""
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
