"""A dataset in a folder of this machine's file systems."""

from __future__ import annotations

import errno
import os
import stat
from typing import TYPE_CHECKING

from penstock.readers.files.names import INDEX_SUFFIX, is_passed_over
from penstock.readers.origin.absent import not_seen, status_of
from penstock.readers.origin.arrangement import AS_IT_LIES
from penstock.readers.origin.origin import Entry, RootNames, TopLevel

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from penstock.readers.origin.arrangement import Arrangement
    from penstock.readers.origin.url_patterns import Selection


class LocalFolder:
    """A dataset in a folder of this machine's file systems (NFS too)."""

    is_local = True

    def __init__(
        self,
        root: bytes,
        selection: Selection | None = None,
        arrangement: Arrangement = AS_IT_LIES,
    ) -> None:
        self.root = os.path.abspath(root)
        self.url = self.key = os.fsdecode(self.root)
        self.selection = selection
        self._names: RootNames | None = None
        if selection is not None:
            self.url = os.path.join(self.url, selection.pattern)
            self.key = f"{self.key}\0{selection.key}"
        self.arrangement, self.variant = arrangement, arrangement.key
        if self.variant:
            self.key = f"{self.key}\0{self.variant}"

    def index_folders(self) -> list[bytes]:
        """Folders beside the data for their index, best first: beside the name that was given, and
        if that is a link, beside what it leads to."""
        roots = dict.fromkeys((self.root, os.path.realpath(self.root)))
        if self.selection is not None:
            folders = [os.path.join(root, self.selection.index_name) for root in roots]
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
        found = status_of(os.path.join(self.root, name))
        if found is None or not stat.S_ISREG(found.st_mode):
            return None
        return found.st_size, str(found.st_mtime_ns)

    def names(self) -> RootNames:
        if self._names is None:
            if self.selection is not None:
                names, folders = self._selected(), list[bytes]()
            else:
                inside = self._inside(b"")
                names = [name for name, is_folder in inside if not is_folder]
                folders = [name for name, is_folder in inside if is_folder]
            self._names = RootNames(files=tuple(names), folders=tuple(folders))
        return self._names

    def top(self, wanted: Callable[[bytes], bool]) -> TopLevel:
        top = TopLevel(entries=[], missing=[], others=[], folders=[])
        if self.selection is not None:
            inside = [(name, False) for name in self._selected()]
        else:
            inside = self._inside(b"")
        for name, is_folder in inside:
            if is_folder or not wanted(name):
                (top.folders if is_folder else top.others).append(name)
            elif (entry := self.entry(name)) is not None:
                top.entries.append(entry)
            else:
                top.missing.append(name)
        return top

    def _selected(self) -> list[bytes]:
        from penstock.readers.origin.wildcards import Tree, selected  # a folder needs none

        def top(folder: str) -> tuple[list[tuple[str, bool]], list[str]]:
            here = os.path.join(os.fsencode(folder), b"")
            inside = self._inside(here)
            files = [
                (os.fsdecode(here + name), True) for name, is_folder in inside if not is_folder
            ]
            return files, [os.fsdecode(name) for name, is_folder in inside if is_folder]

        def find(name: str) -> bool | None:
            return None if self.find(os.fsencode(name)) is None else True

        def walk(folder: str) -> Iterator[tuple[str, bool]]:
            waiting = [(folder, frozenset[bytes]())]
            while waiting:
                folder, above = waiting.pop()
                real = os.path.realpath(os.path.join(self.root, os.fsencode(folder)))
                if real in above:  # a link back to a folder above it
                    continue
                files, folders = top(folder)
                yield from files
                here = os.path.join(folder, "")
                inside = (n for n in folders if not is_passed_over(os.fsencode(n)))
                waiting += [(f"{here}{name}", above | {real}) for name in inside]

        assert self.selection is not None
        tree = Tree(top=top, walk=walk, find=find, at_once=1)
        return [os.fsencode(name) for name, _ in selected(tree, self.selection, url=self.url)]

    def _inside(self, folder: bytes) -> list[tuple[bytes, bool]]:
        """Names in a folder, sorted, and whether each is a folder or leads to one."""
        try:
            with os.scandir(os.path.join(self.root, folder)) as found:
                return sorted((entry.name, leads_to_folder(entry)) for entry in found)
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            if error.errno == errno.ELOOP:
                return []
            raise not_seen(os.path.join(self.root, folder), error, is_folder=True) from error

    def entry(self, name: bytes) -> Entry | None:
        found = status_of(os.path.join(self.root, name))
        if found is None or not stat.S_ISREG(found.st_mode):
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
