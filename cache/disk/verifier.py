"""Blobs that somebody doubts, or that are of before a reboot: right by their checksums, or gone."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING

from penstock.cache.base.machine import refuse_shortage
from penstock.cache.base.trust import StrangeFileError
from penstock.cache.disk.block_crcs import crcs_of_file
from penstock.cache.disk.layout import boot_id

if TYPE_CHECKING:
    from penstock.cache.disk.catalogue import Catalogue
    from penstock.cache.disk.keys import KeyLocks
    from penstock.cache.disk.layout import Layout
    from penstock.cache.disk.leftovers import Leftovers
    from penstock.cache.disk.trash import Trash

_log = logging.getLogger("penstock")


class Verifier:
    """A Verifier compares whole blobs with the checksums that the books have of their blocks."""

    def __init__(
        self, layout: Layout, catalogue: Catalogue, *, keys: KeyLocks, trash: Trash
    ) -> None:
        self._layout, self._catalogue = layout, catalogue
        self._keys, self._trash = keys, trash
        self._has_unverified = False

    def check(self, key: str) -> None:
        """Drop a blob whose checksums are wrong, or that has none, as a fill that was begun."""
        try:
            fd = self._layout.blobs.open(key)
        except (FileNotFoundError, StrangeFileError):
            self._trash.drop(key)
            return
        try:
            inode = os.fstat(fd).st_ino
            is_right = self._is_right(key, fd)
        finally:
            os.close(fd)
        if not is_right:
            self._trash.drop(key, inode=inode)

    def set_aside(self, *, alone: bool, leftovers: Leftovers) -> str | None:
        """After a reboot blobs are to be verified at their first use, and fills are worth nothing:
        nothing was forced to the disk. A note that can't be read may be of another boot, unless a
        process is here that has seen it (not alone). What was damaged, if anything."""
        layout, now, before = self._layout, boot_id(), self._layout.boot
        if before not in (None, now) and alone:
            for name in layout.names("blobs"):
                layout.blobs.rename(name, layout.unverified, name)
            leftovers.remove_fills()
        if before != now:
            layout.note_boot(now)
        return "boot" if before == "" else None

    def look_for_unverified(self) -> None:
        """Look whether there are any blobs of before a reboot; until then none is looked for."""
        self._has_unverified = bool(self._layout.names("unverified"))

    def take_over(self, key: str) -> bool:
        """Make a blob of before the last boot one of this, if its checksums are right."""
        old = self._layout.unverified
        if not self._has_unverified or not old.has(key):
            return False
        with self._keys.holding(key):
            try:
                fd = old.open(key)
            except FileNotFoundError:
                return self._layout.blobs.has(key)
            why = "its checksums are wrong since the last reboot"
            try:
                is_right = self._is_right(key, fd)
            except OSError as error:
                refuse_shortage(error, f"{old.path}/{key}")
                is_right, why = False, f"it can't be read since the last reboot ({error.strerror})"
            finally:
                os.close(fd)
            if is_right:
                old.rename(key, self._layout.blobs, key)
            else:
                _log.warning("%s/%s: %s, so it is fetched again", old.path, key, why)
                with self._catalogue.writing():
                    old.remove(key)
                    self._catalogue.blobs.remove(key)
            return is_right

    def _is_right(self, key: str, fd: int) -> bool:
        row = self._catalogue.blobs.row(key)
        return row is not None and row.crcs is not None and crcs_of_file(fd) == row.crcs
