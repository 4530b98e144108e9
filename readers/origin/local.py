"""A dataset in a folder of this machine's file systems."""

from __future__ import annotations

import errno
import os
import stat
from typing import TYPE_CHECKING

from penstock.cache.errors import DatasetError
from penstock.readers.files.names import INDEX_SUFFIX
from penstock.readers.origin.absent import NOT_THERE, not_seen
from penstock.readers.origin.arrangement import AS_IT_LIES
from penstock.readers.origin.origin import Entry, TopLevel

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.readers.origin.arrangement import Arrangement
    from penstock.readers.origin.tar_urls import TarSelection


class LocalFolder:
    """A dataset in a folder of this machine's file systems (NFS too)."""

    is_local = True

    def __init__(
        self,
        root: bytes,
        selection: TarSelection | None = None,
        arrangement: Arrangement = AS_IT_LIES,
    ) -> None:
        self.root = os.path.abspath(root)
        self.url = self.key = os.fsdecode(self.root)
        self.selection: tuple[bytes, ...] | None = None
        self._index_name: bytes | None = None
        if selection is not None:
            self.selection, self._index_name = selection.names, selection.index_name
            self.url = os.path.join(self.url, selection.pattern)
            self.key = f"{self.key}\0{selection.key}"
        self.arrangement, self.variant = arrangement, arrangement.key
        if self.variant:
            self.key = f"{self.key}\0{self.variant}"

    def index_folders(self) -> list[bytes]:
        """Folders beside the data for their index, best first: beside the name that was given, and
        if that is a link, beside what it leads to."""
        roots = dict.fromkeys((self.root, os.path.realpath(self.root)))
        if self._index_name is not None:
            folders = [os.path.join(root, self._index_name) for root in roots]
        else:
            folders = [root + INDEX_SUFFIX for root in roots if os.path.basename(root)]
        if not self.variant:
            return folders
        variant = os.fsencode(self.variant)
        return [b"%s-%s%s" % (f[: -len(INDEX_SUFFIX)], variant, INDEX_SUFFIX) for f in folders]

    def file(self, name: bytes, *, size_bytes: int | None, version: str) -> bytes:
        del size_bytes, version
        return os.path.join(self.root, name)

    def drop(self, name: bytes, *, size_bytes: int | None, version: str) -> bool:
        del name, size_bytes, version
        return False

    def find(self, name: bytes) -> tuple[int, str] | None:
        try:
            found = os.stat(os.path.join(self.root, name))
        except OSError as error:
            if error.errno in NOT_THERE:
                return None
            raise not_seen(os.path.join(self.root, name), error) from error
        return (found.st_size, str(found.st_mtime_ns)) if stat.S_ISREG(found.st_mode) else None

    def top(self, wanted: Callable[[bytes], bool]) -> TopLevel:
        top = TopLevel(entries=[], missing=[], others=[], folders=[])
        try:
            with os.scandir(self.root) as found:
                inside = sorted((entry.name, leads_to_folder(entry)) for entry in found)
        except (FileNotFoundError, NotADirectoryError):
            return top
        except OSError as error:
            if error.errno == errno.ELOOP:
                return top
            raise DatasetError(
                f"{self.url}: the folder can't be listed ({error.strerror}). Give this user the "
                "right to read it."
            ) from error
        for name, is_folder in inside:
            if is_folder or not wanted(name):
                (top.folders if is_folder else top.others).append(name)
            elif (entry := self.entry(name)) is not None:
                top.entries.append(entry)
            else:
                top.missing.append(name)
        return top

    def entry(self, name: bytes) -> Entry | None:
        try:
            found = os.stat(os.path.join(self.root, name))
        except OSError as error:
            if error.errno in NOT_THERE:
                return None
            raise not_seen(os.path.join(self.root, name), error) from error
        if not stat.S_ISREG(found.st_mode):
            return None
        return Entry(name=name, size_bytes=found.st_size, mtime_ns=found.st_mtime_ns, version="")

    def close(self) -> None:
        """There is nothing to let go."""


def leads_to_folder(entry: os.DirEntry[bytes]) -> bool:
    """Whether it is a folder or leads to one; a link that loops leads to none."""
    try:
        return entry.is_dir()
    except OSError:  # whoever looks at it as a file says why it can't be
        return False
