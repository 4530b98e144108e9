"""Define the files of a cache folder, lock its keys, and check that the folder may be used.

format.json          version of this layout, with a checksum
catalogue.db         SQLite: sizes, states, jobs; never read for a hit
blobs/<key>          whole blobs
fills/<key>.part     blobs that are being filled, and .map: marks of their present pieces
trash/<key>-<inode>  removed blobs that a process may still have mapped
unverified/<key>     blobs from before a reboot, whose checksums must be checked
boot                 the machine's boot in which blobs/ were written, with a checksum
limit                the most bytes that the folder may use, with a checksum, for a lost catalogue
peers/<name>.lock    of a server for other nodes, and .sock, see `cache.peers`
*.lock               see `cache.base.locks`
indexes/, …          files of other modules, which count towards the limit

A process that fills, publishes or drops a blob holds the lock of the blob's key in keys.lock.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from typing import TYPE_CHECKING

from crc32c import crc32c

from penstock.cache.base import ByteLocks, Folder, StrangeFileError, refuse_network
from penstock.cache.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

FORMAT = 1
"""Version of the layout. A folder with a higher version is refused."""

BLOCK = 4096
_FOLDERS = ("blobs", "fills", "trash", "unverified")
CATALOGUE_FILES = ("catalogue.db", "catalogue.db-wal", "catalogue.db-shm", "catalogue.db-journal")
_FILES = (
    "format.json", "boot", "limit", "catalogue.lock", "jobs.lock", "keys.lock", "readers.lock"
)  # fmt: skip
_BLOB = re.compile(r"[0-9a-f]+")
_NAMES = {
    "blobs": _BLOB,
    "unverified": _BLOB,
    "fills": re.compile(r"[0-9a-f]+\.(part|map)"),
    "trash": re.compile(r"[0-9a-f]+-[0-9]+"),
}
_BOOT_ID = "/proc/sys/kernel/random/boot_id"
_TIMEOUT_S = 30.0


def part_name(key: str) -> str:
    """Return the name of the file that holds a blob's bytes while it is filled."""
    return f"{key}.part"


def map_name(key: str) -> str:
    """Return the name of the file that has a mark for each piece."""
    return f"{key}.map"


class FolderLayout:
    """An open cache folder and its subfolders.

    make: create what is missing. Raises OSError (StrangeFileError for files of others), ConfigError
    (a newer format, a network file system).
    """

    def __init__(
        self, root: str, *, mode: int = 0o700, make: bool = False, reads_roots: bool = False
    ) -> None:
        self.root = root
        self.damage: list[str] = []
        self.top = Folder.at(root, mode=mode, make=make, reads_roots=reads_roots)
        if make:
            refuse_network(root)
            self.check_format()
            self._clear()
        self.blobs, self.fills, self.trash, self.unverified = (
            self.top.folder(name, make=make) for name in _FOLDERS
        )
        if make:
            self._note_format()

    def _clear(self) -> None:
        """Remove files that have a folder's name, and folders that have a file's name."""
        wrong = [name for name in _FOLDERS if self.top.has(name)]
        # Catalogue checks the catalogue's own files.
        wrong += [name for name in _FILES if self.top.is_folder(name)]
        for name in wrong:
            self.top.remove(name)
        self.damage += wrong

    def check_format(self) -> None:
        """Raise ConfigError if a newer version made the cache. A format.json that no version can
        have written counts as damage."""
        try:
            data = self.top.read("format.json")
            found = json.loads(data)
        except (FileNotFoundError, StrangeFileError, ValueError, RecursionError):
            return
        version = found.get("format") if isinstance(found, dict) else None
        if not isinstance(version, int) or version <= FORMAT:
            return
        if data == format_text(version) or found == {"format": version}:
            raise ConfigError(
                f"{self.root}: the cache has format {version}, wanted {FORMAT} or older: a newer "
                "Penstock made it. Upgrade penstock, or pass another folder. Nothing was changed."
            )

    def _note_format(self) -> None:
        """Record the format, unless it is recorded."""
        found = None
        with contextlib.suppress(FileNotFoundError):
            found = self.top.read("format.json")
        if found != format_text(FORMAT):
            if found is not None:
                self.damage.append("format.json")
            self.top.write_whole("format.json", format_text(FORMAT))

    @property
    def boot(self) -> str | None:
        """The boot in which the blobs were written; None without a file, "" if it is damaged."""
        try:
            found, _, crc = self.top.read("boot").decode("ascii", "replace").rpartition(" ")
        except FileNotFoundError:
            return None
        return found if crc == _crc(found) else ""

    def note_boot(self, boot: str) -> None:
        """Record the boot in which the blobs are written."""
        self.top.write_whole("boot", f"{boot} {_crc(boot)}".encode())

    @property
    def limit_bytes(self) -> int | None:
        """The recorded limit; None if there is none or it is damaged."""
        with contextlib.suppress(FileNotFoundError):
            return read_number("limit", self.top.read("limit").decode("ascii", "replace"))
        return None

    def note_limit(self, max_bytes: int) -> None:
        """Record the limit, for processes that find the catalogue damaged."""
        self.top.write_whole("limit", with_checksum("limit", max_bytes).encode())

    def locks(self, name: str) -> ByteLocks:
        """Return locks on one of the lock files."""
        return ByteLocks(self.top.open_or_create(f"{name}.lock"))

    @contextlib.contextmanager
    def holding(self, key: str, *, timeout_s: float = _TIMEOUT_S) -> Iterator[None]:
        """Hold the lock of a blob's key, waiting up to timeout_s. Raises StalledError.

        Every holder opens the lock file separately, so that threads exclude each other, too."""
        with (
            contextlib.closing(self.locks("keys")) as locks,
            locks.holding(_offset(key), timeout_s=timeout_s, what=f"blob {key}"),
        ):
            yield

    @contextlib.contextmanager
    def trying(self, key: str) -> Iterator[bool]:
        """Hold the lock of a blob's key if it is free; yield False if it isn't."""
        with contextlib.closing(self.locks("keys")) as locks:
            yield locks.lock(_offset(key))

    def blob(self, key: str) -> str:
        """Return the path of a whole blob, for messages and for readers that need a path."""
        return os.path.join(self.root, "blobs", key)

    def places(self, key: str) -> tuple[tuple[Folder, str], ...]:
        """Return the folders, and the names in them, that a blob's file has one after the other."""
        return (self.blobs, key), (self.fills, part_name(key)), (self.unverified, key)

    def names(self, folder: str) -> list[str]:
        """List the cache's own files in one of the folders; other files are ignored."""
        pattern = _NAMES[folder]
        return [name for name in getattr(self, folder).names() if pattern.fullmatch(name)]

    def blob_bytes(self) -> dict[str, int]:
        """Return the bytes on the disk of each whole blob."""
        found = self.blobs.files() | self.unverified.files()
        names = filter(_BLOB.fullmatch, found)
        return {name: self.allocated_bytes(found[name]) for name in names}

    @staticmethod
    def allocated_bytes(found: os.stat_result) -> int:
        """Return the bytes that a file uses on the disk, or will use once it is written out."""
        return max(disk_bytes(found.st_size), found.st_blocks * 512)

    @staticmethod
    def is_cache(root: str) -> bool:
        """Return True if a folder is a cache, even one that has lost some of its files."""
        return any(
            os.path.lexists(os.path.join(root, name)) for name in ("format.json", *CATALOGUE_FILES)
        )

    def others_bytes(self) -> int:
        """Return the bytes of other modules' files in the folder: indexes and reports."""
        total = 0
        for folder, inner, files in os.walk(self.root):
            if folder == self.root:
                inner[:] = [name for name in inner if name not in _FOLDERS]
                continue
            for name in files:
                with contextlib.suppress(OSError):
                    total += os.lstat(os.path.join(folder, name)).st_blocks * 512
        return total

    def others_may_write(self) -> str | None:
        """Name the first subfolder, with its mode, that users outside `mode` may write to; None if
        there is none."""
        for folder in (self.top, self.blobs, self.fills, self.trash, self.unverified):
            mode = folder.others_may_write
            if mode is not None:
                return f"{folder.path} (mode {mode:04o})"
        return None


def _crc(text: str) -> str:
    return f"{crc32c(text.encode()):08x}"


def with_checksum(name: str, number: int | str) -> str:
    """Append the checksum of a named number to it."""
    return f"{number} {_crc(f'{name} {number}')}"


def read_number(name: str, text: str) -> int | None:
    """Return the number of a text that `with_checksum` made; None if it is damaged."""
    number = text.partition(" ")[0]
    is_right = number.isdecimal() and text == with_checksum(name, number)
    return int(number) if is_right else None


def format_text(version: int) -> bytes:
    """Return the content of format.json: a version and its checksum."""
    return json.dumps({"crc32c": _crc(f"format {version}"), "format": version}).encode()


def disk_bytes(size_bytes: int) -> int:
    """Round a file's size up to whole blocks of the disk."""
    return -(-size_bytes // BLOCK) * BLOCK


def _offset(key: str) -> int:
    """Return the offset of a key's lock: the key's first 60 bits."""
    return int(key.partition("-")[0][:15], 16)


def boot_id() -> str:
    """Read the id of the machine's current boot; "" if the system has none."""
    try:
        with open(_BOOT_ID, encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return ""
