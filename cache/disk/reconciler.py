"""Bringing the books and the files of a cache folder together: the files are what counts."""

from __future__ import annotations

import os
import sqlite3
from typing import TYPE_CHECKING

from penstock.cache.base.trust import StrangeFileError
from penstock.cache.disk.block_crcs import crcs_of_file
from penstock.cache.disk.damage import is_damage
from penstock.cache.disk.fill_marks import part_name
from penstock.cache.disk.layout import allocated_bytes

if TYPE_CHECKING:
    from penstock.cache.base.folders import Folder
    from penstock.cache.disk.blob_table import BlobRow
    from penstock.cache.disk.catalogue import Catalogue
    from penstock.cache.disk.filling import Filling
    from penstock.cache.disk.layout import Layout
    from penstock.cache.disk.leftovers import Leftovers
    from penstock.cache.disk.trash import Trash


class Reconciler:
    """A Reconciler compares rows with files, and mends what differs.

    damage: what was found wrong goes there.
    """

    def __init__(
        self,
        layout: Layout,
        catalogue: Catalogue,
        *,
        filling: Filling,
        leftovers: Leftovers,
        trash: Trash,
        damage: list[str],
    ) -> None:
        self._layout, self._catalogue, self._blobs = layout, catalogue, catalogue.blobs
        self._filling, self._leftovers, self._trash = filling, leftovers, trash
        self._damage = damage

    def books_are_right(self, *, look: bool) -> bool:
        """Whether the books say what lies in the folder, and nothing looks unfinished. look: at
        each file; who has the folder open did that already. Counts anew what is used."""
        try:
            return self._compare(look=look)
        except sqlite3.DatabaseError as error:
            if not is_damage(error):
                raise
            return False

    def _compare(self, *, look: bool) -> bool:
        counts = self._blobs.counts()
        at = self._layout
        if at.names("fills") or at.names("trash") or counts.get("fill") or counts.get("trash"):
            return False
        if look:
            if at.blob_bytes() != self._blobs.sizes("ready"):
                return False
        elif len(at.names("blobs")) + len(at.names("unverified")) != counts.get("ready", 0):
            return False
        return self._catalogue.numbers.get("used") == self._blobs.recount()

    def reconcile(self) -> int:
        """Bring books and files together; returns how many things were put right. Fills that
        nobody works on stay, as the next who wants them goes on with them."""
        mended = 0
        with self._catalogue.writing():
            mended += self._leftovers.forget_dead_jobs() + self._leftovers.remove_private()
            mended += self._mend_rows()
            rows = self._blobs.rows()
            known = {row.key for row in rows}
            filling = {row.key for row in rows if row.state == "fill"}
            for folder in ("blobs", "unverified"):
                for name in self._layout.names(folder):
                    if name not in known:
                        mended += self._adopt(name, folder)
            for name in self._layout.names("fills"):
                if name.partition(".")[0] not in filling:
                    mended += self._leftovers.clear_file(name)
            for name in self._layout.names("trash"):
                if name not in known:
                    mended += self._adopt(name, "trash")
            self._trash.empty()
            self._blobs.forget_rescued()
            self._blobs.recount()
        return mended

    def _mend_rows(self) -> int:
        wrong = self._blobs.remove_wrong()
        if wrong:
            self._damage.append(f"catalogue.db ({wrong} of its rows), entered again from the files")
        sizes = self._layout.blob_bytes()
        return sum(self._mend_row(row, sizes) for row in self._blobs.rows()) + wrong

    def _mend_row(self, row: BlobRow, sizes: dict[str, int]) -> int:
        at = self._layout
        if row.state == "trash":
            there = at.trash.has(row.key)
        elif row.state == "ready":
            there = row.key in sizes
            if there and sizes[row.key] != row.disk_bytes:
                self._blobs.resize(row, sizes[row.key])
        elif at.blobs.has(row.key):  # killed between the rename and the books
            fd = at.blobs.open(row.key)
            try:
                crcs = crcs_of_file(fd)
            finally:
                os.close(fd)
            self._filling.enter(row, group=row.group, kept=row.kept, crcs=crcs)
            return 1
        else:
            there = at.fills.has(part_name(row.key)) or not self._leftovers.remove_fill(row)
        if not there:
            self._blobs.remove(row.key)
        return int(not there)

    def _adopt(self, name: str, folder: str) -> int:
        """Enter a file that the books don't know."""
        place: Folder = getattr(self._layout, folder)
        try:
            fd = place.open(name)
        except FileNotFoundError:
            return 0
        except StrangeFileError:
            return int(place.remove(name))
        try:
            found = os.fstat(fd)
        finally:
            os.close(fd)
        self._blobs.adopt(
            name,
            size_bytes=found.st_size,
            disk_bytes=allocated_bytes(found),
            state="trash" if folder == "trash" else "ready",
            used_s=max(found.st_atime, found.st_mtime),
        )
        return 1
