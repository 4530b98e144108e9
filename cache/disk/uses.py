"""When blobs were last used: noted at each hit, written to the books now and then."""

from __future__ import annotations

import contextlib
import sqlite3
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.cache.disk.blob_table import BlobTable

_MOST_NOTED = 256


class UseLog:
    """A UseLog has the last uses by this process that the books don't have yet."""

    def __init__(self, blobs: BlobTable) -> None:
        self._blobs = blobs
        self._used_s: dict[str, float] = {}

    def note(self, key: str) -> None:
        """Note that a blob is used now. Books that can't be written miss it."""
        self._used_s[key] = time.time()
        if len(self._used_s) >= _MOST_NOTED:
            with contextlib.suppress(OSError, sqlite3.Error):
                self.flush()

    def flush(self) -> None:
        """Write last uses down. Raises OSError, sqlite3.Error."""
        if self._used_s:
            used_s, self._used_s = self._used_s, {}
            self._blobs.touch(used_s)
