"""Bytes of objects: remote stores and the node's cache. Nothing of samples."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from penstock.cache.secrets import SafeLog

if TYPE_CHECKING:
    from penstock.cache.disk.disk_cache import DiskCache as DiskCache

__all__ = ["DiskCache"]

logging.getLogger("penstock").addFilter(SafeLog())


def __getattr__(name: str) -> object:
    # SQLite and locks are imported where a cache is made, not with the package's errors.
    if name == "DiskCache":
        from penstock.cache.disk.disk_cache import DiskCache

        return DiskCache
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
