"""Report the progress of a long task to a callable, or to the log if there is none."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from penstock.cache import log
from penstock.cache.base import format_size

if TYPE_CHECKING:
    from penstock.readers.types import Progress


_LOG_EVERY_S = 10.0
_LONG_S = 60.0


class ProgressReporter:
    """Counts samples and bytes; logs every 10 s, and warns once with `remedy` after a minute."""

    def __init__(self, what: str, *, total: int, progress: Progress | None, remedy: str) -> None:
        self._what, self._total, self._progress, self._remedy = what, total, progress, remedy
        self._samples = self._bytes = 0
        self._began = self._logged = time.monotonic()
        self._warned = progress is not None  # a caller that shows progress needs no warning

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began

    def done(self, samples: int, size_bytes: int) -> None:
        """Add samples and bytes, and report progress."""
        self._samples += samples
        self._bytes += size_bytes
        if self._progress is not None:
            self._progress(self._samples, self._total, self._bytes)
        now = time.monotonic()
        if now - self._logged < _LOG_EVERY_S:
            return
        self._logged = now
        counts = (self._what, self._samples, self._total, format_size(self._bytes))
        if not self._warned and now - self._began > _LONG_S:
            self._warned = True
            log.warning("%s: %d of %d samples (%s). %s", *counts, self._remedy)
        else:
            log.info("%s: %d of %d samples (%s)", *counts)
