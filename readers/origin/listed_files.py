"""Describe the files of a dataset as a listing shows them."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A file in a listing. name: relative to the root. mtime_ns: 0 for a remote file. version: an
    etag or the like, "" if unknown."""

    name: bytes
    size_bytes: int
    mtime_ns: int
    version: str

    @property
    def identity(self) -> str:
        """Return 32 hex digits that change with every fact of the entry."""
        facts = f"{self.size_bytes}\0{self.mtime_ns}\0{self.version}\0".encode()
        return hashlib.sha256(facts + self.name).hexdigest()[:32]


@dataclass(frozen=True, slots=True, kw_only=True)
class RootNames:
    """The names of the files and folders at a dataset's root, or of the files its URL selects."""

    files: tuple[bytes, ...]
    folders: tuple[bytes, ...]
