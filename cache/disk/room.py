"""The limit of a cache folder, and what of it is left for blobs."""

from __future__ import annotations

import contextlib
import os
import sqlite3
from typing import TYPE_CHECKING

from penstock.cache.base.sizes import format_size
from penstock.cache.errors import ConfigError

if TYPE_CHECKING:
    from penstock.cache.disk.catalogue import Catalogue
    from penstock.cache.disk.layout import Layout

# What the books' log, the folders themselves and the small files take beside the blobs.
SLACK_BYTES = 320 * 2**10
_LEAST_OWN_BYTES = 512 * 2**10
_ENTRY_BYTES = 128  # of a folder, for each blob
_FREE_SHARE = 0.9


class Room:
    """Room tells how many bytes blobs may take. max_bytes: the limit, 0 until it is agreed on."""

    def __init__(self, layout: Layout, catalogue: Catalogue) -> None:
        self._layout, self._catalogue = layout, catalogue
        self._others_bytes = layout.others_bytes()
        self.max_bytes = 0

    def agree(self, wanted: int | None, *, alone: bool) -> str | None:
        """Take the folder's limit, or give it one; in a transaction. wanted: None takes what it
        has, or most of the free space; alone: no other process has the folder open. What was
        damaged, if anything. Raises ConfigError for a limit beside that of running jobs."""
        numbers, damage = self._catalogue.numbers, None
        try:
            known = numbers.get("max_bytes")
        except sqlite3.DatabaseError:
            known, damage = None, "its limit"
        noted = self._layout.limit_bytes
        if known is None:
            known = noted
            if known is not None:
                numbers.set("max_bytes", known)
        if known is not None and wanted in (None, known):
            if noted != known:
                self._note(known)
            self.max_bytes = known
            return damage
        if wanted is None:
            wanted = int(self._free_bytes() * _FREE_SHARE)
        if known is not None and not alone:
            raise ConfigError(
                f"{self._layout.root}: max_bytes: got {format_size(wanted)}, but running jobs use "
                f"this folder with {format_size(known)}: one folder, one limit. Give that one, "
                "give another folder, or wait until they end."
            )
        numbers.set("max_bytes", wanted)
        self._note(wanted)
        self.max_bytes = wanted
        return damage

    def _note(self, max_bytes: int) -> None:
        """Write the limit beside the books, which may be lost: who has none of his own would take
        most of the disk then. A disk that is full is no reason to use no cache."""
        with contextlib.suppress(OSError):
            self._layout.note_limit(max_bytes)

    @property
    def budget_bytes(self) -> int:
        """Bytes that blobs may take: the limit less what the folder needs itself."""
        return max(0, self.max_bytes - self._own_bytes())

    @property
    def steady_budget_bytes(self) -> int:
        """At most `budget_bytes`, and the same while the folder grows a little: what is pinned by
        it mustn't change with every blob."""
        own = max(_LEAST_OWN_BYTES, 1 << (self._own_bytes() - 1).bit_length())
        return max(0, self.max_bytes - own)

    def measure_others(self) -> None:
        """Look anew what other modules keep in the folder."""
        self._others_bytes = self._layout.others_bytes()

    def _own_bytes(self) -> int:
        blobs = sum(self._catalogue.blobs.counts().values())
        own = self._catalogue.own_bytes() + self._others_bytes
        return own + SLACK_BYTES + blobs * _ENTRY_BYTES

    def _free_bytes(self) -> int:
        found = os.statvfs(self._layout.root)
        return found.f_bavail * found.f_frsize
