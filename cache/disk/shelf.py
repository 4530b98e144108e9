"""A cache folder, open for writing: its parts put together, and what happens at opening.

A hit opens the published file, holds its inode for reading and looks whether it is still linked: no
database. Everything else holds the blob's key and changes the catalogue in one transaction. Lock
order: key, then catalogue; inside a transaction keys are only tried.
"""

from __future__ import annotations

import contextlib
import sqlite3
from typing import TYPE_CHECKING, TypeVar

from penstock.cache.base.locks import ReaderLocks
from penstock.cache.disk.catalogue import Catalogue
from penstock.cache.disk.damage import is_damage
from penstock.cache.disk.evictor import Evictor
from penstock.cache.disk.filling import Filling
from penstock.cache.disk.keys import KeyLocks
from penstock.cache.disk.layout import Layout
from penstock.cache.disk.leftovers import Leftovers
from penstock.cache.disk.lookup import LockedLookup
from penstock.cache.disk.reconciler import Reconciler
from penstock.cache.disk.reservations import Reservations
from penstock.cache.disk.room import Room
from penstock.cache.disk.trash import Trash
from penstock.cache.disk.uses import UseLog
from penstock.cache.disk.verifier import Verifier

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")

_OPEN_BYTE = 0


class Shelf:
    """A Shelf is one open of a cache folder by one process. Safe for several threads.

    It owns the parts, and who wants something of the folder asks the one whose duty it is.
    max_bytes: None takes the limit that the folder has, or most of the free space. Raises
    ConfigError (network file system, newer format, another limit in use), OSError, sqlite3.Error.
    damage: what was found damaged and was made anew.
    """

    def __init__(self, root: str, *, max_bytes: int | None, mode: int = 0o700) -> None:
        self.layout = layout = Layout(root, mode=mode, make=True)
        self.damage = layout.damage
        self.catalogue = catalogue = Catalogue(layout.top)
        self._readers = ReaderLocks(layout.top.open_or_create("readers.lock"))
        self._inodes = layout.locks("readers")
        self._jobs = layout.locks("jobs")
        self.keys = keys = KeyLocks(layout)
        self.room = Room(layout, catalogue)
        self.uses = UseLog(catalogue.blobs)
        self.trash = trash = Trash(layout, catalogue, keys=keys, inodes=self._inodes)
        self.leftovers = Leftovers(layout, catalogue, keys=keys, inodes=self._inodes)
        self.verifier = Verifier(layout, catalogue, keys=keys, trash=trash)
        self.lookup = LockedLookup(
            layout,
            catalogue=catalogue,
            readers=self._readers,
            uses=self.uses,
            drop=trash.drop,
            take_over=self.verifier.take_over,
        )
        self.evictor = Evictor(
            layout,
            catalogue,
            room=self.room,
            uses=self.uses,
            leftovers=self.leftovers,
            trash=trash,
            inodes=self._inodes,
        )
        self.filling = Filling(
            layout,
            catalogue,
            keys=keys,
            readers=self._readers,
            reservations=Reservations(catalogue, self.evictor),
        )
        self._reconciler = Reconciler(
            layout,
            catalogue,
            filling=self.filling,
            leftovers=self.leftovers,
            trash=trash,
            damage=self.damage,
        )
        self._open(max_bytes)

    def _open(self, max_bytes: int | None) -> None:
        try:
            self._begin(max_bytes)
        except sqlite3.DatabaseError as error:
            if not is_damage(error):
                raise
            self.catalogue.renew(error, lambda: None)
            self._begin(max_bytes, found=str(error))

    def _begin(self, max_bytes: int | None, *, found: str | None = None) -> None:
        """found: what was wrong with the books that were there."""
        with self.catalogue.writing():
            was_lost = not self.catalogue.is_counted and not self.catalogue.is_upgrade
            self._agree(max_bytes)
            if was_lost:
                self._note_rebuilt(found)

    def _agree(self, max_bytes: int | None) -> None:
        alone = self._is_alone()
        found = self.room.agree(max_bytes, alone=alone)
        noted = self.verifier.set_aside(alone=alone, leftovers=self.leftovers)
        self.damage += [what for what in (found, noted) if what is not None]
        self._jobs.lock(_OPEN_BYTE, shared=True)
        self.verifier.look_for_unverified()
        if not self._reconciler.books_are_right(look=alone):
            self.reconcile()
        if self.catalogue.blobs.used_bytes > self.room.budget_bytes:
            self.evictor.evict_to(self.room.budget_bytes)

    def _is_alone(self) -> bool:
        # Every process that has the folder open holds this byte; who changes the limit is alone.
        self._jobs.unlock(_OPEN_BYTE)
        alone = self._jobs.lock(_OPEN_BYTE)
        self._jobs.unlock(_OPEN_BYTE)
        return alone

    @property
    def max_bytes(self) -> int:
        """The limit."""
        return self.room.max_bytes

    def reconcile(self) -> int:
        """Bring books and files together; returns how many things were put right."""
        mended = self._reconciler.reconcile()
        self.room.measure_others()
        return mended

    def mending(self, act: Callable[[], T]) -> T:
        """Return act(); it is called again with new books if it finds these damaged."""
        try:
            return act()
        except sqlite3.DatabaseError as error:
            if not is_damage(error):
                raise
            self._heal(error)
            return act()

    def _heal(self, error: Exception) -> None:
        """Make the books anew, as they are damaged; the files are what counts."""

        def enter() -> None:
            self.catalogue.numbers.set("max_bytes", self.max_bytes)
            self.reconcile()

        if self.catalogue.renew(error, enter):
            self._note_rebuilt(str(error))

    def _note_rebuilt(self, found: str | None) -> None:
        """Note that the books are new, but of a folder that is new as well."""
        damage, moved = self.catalogue.take_damage()
        blobs = self.catalogue.blobs.counts().get("ready", 0)
        what = damage or found
        if what is None and not blobs:
            return
        old = f"; the old file is now {moved}" if moved else "; the old file was removed"
        unknown = self.catalogue.blobs.unknown()
        lost = (
            f"; {unknown:,} of them lost their dataset, which the next job that reads them gives "
            "back, and their checksums, without which a reboot has them fetched again"
        )
        self.damage.append(
            f"catalogue.db ({what or 'missing or empty'}), rebuilt from {blobs:,} blobs"
            f"{old if what else ''}{lost if unknown else ''}"
        )

    def take_damage(self) -> str | None:
        """Describe, once, what was found damaged and was repaired; None if nothing was."""
        damage, self.damage[:] = "; ".join(self.damage), ()
        if not damage:
            return None
        return (
            f"{self.layout.root}: the cache's own files were damaged ({damage}), and are repaired. "
            "Whole blobs stay. If that happens again, check the disk."
        )

    def close(self) -> None:
        """Write down last uses; let locks go. Maps stay valid. Safe to call twice."""
        with contextlib.suppress(OSError, sqlite3.Error):
            self.uses.flush()
        self._jobs.close()
        self._inodes.close()
        self.catalogue.close()
        if not self._readers.count:
            self._readers.close()
