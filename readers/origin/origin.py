"""Where a dataset's bytes lie: what a local folder and a folder of a remote store have in common.

Names are bytes, below the dataset's root: they need not be UTF-8, and a name that a remote gave
never becomes a local path.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.readers.origin.arrangement import Arrangement
    from penstock.readers.origin.url_patterns import Selection


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """What a listing says of a file. name: below the root; mtime_ns: 0 for remote ones; version:
    etag or the like."""

    name: bytes
    size_bytes: int
    mtime_ns: int
    version: str

    @property
    def identity(self) -> str:
        """Changes with anything that the listing says of the file: 32 hex digits."""
        facts = f"{self.size_bytes}\0{self.mtime_ns}\0{self.version}\0".encode()
        return hashlib.sha256(facts + self.name).hexdigest()[:32]


@dataclass(frozen=True, slots=True, kw_only=True)
class TopLevel:
    """What lies directly in a folder. entries: of wanted files; missing: names of wanted ones that
    aren't files or lead nowhere; others, folders: names of other files and of folders."""

    entries: list[Entry]
    missing: list[bytes]
    others: list[bytes]
    folders: list[bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class RootNames:
    """Names of what lies directly in a dataset's folder, or of the files that its URL selects."""

    files: tuple[bytes, ...]
    folders: tuple[bytes, ...]


class Origin(Protocol):
    """Where a dataset lies, and what can be asked of that place.

    url: for people, without credentials; key: names this dataset in a cache.
    selection: the files below the root that the URL names, None for all that is there.
    arrangement: what the user says of how the files make up samples; variant: names it in this
    place, "" where nothing is said.
    """

    url: str
    key: str
    is_local: bool
    selection: Selection | None
    arrangement: Arrangement
    variant: str

    def file(self, name: bytes, *, size_bytes: int | None, version: str) -> bytes:
        """Local path of a file below the root; a small remote one is fetched whole. Raises
        FetchError."""

    def drop(self, name: bytes, *, size_bytes: int | None, version: str) -> bool:
        """Forget what was fetched of a small remote file; False where there is none."""

    def find(self, name: bytes) -> tuple[int, str] | None:
        """(bytes, version) of a file below the root, or None if it isn't there."""

    def entry(self, name: bytes) -> Entry | None:
        """A regular file below the root, or None if it isn't there. Raises FetchError."""

    def names(self) -> RootNames:
        """The names of what `top` tells of, looked up once: so that each format can be asked
        whether the dataset is its own. Raises what `top` raises."""

    def top(self, wanted: Callable[[bytes], bool]) -> TopLevel:
        """What lies directly below the root, sorted by name; empty where there is no such folder.
        Of a selection its files, in its order, wherever they lie below the root.

        wanted: tells by its name whether a file is looked at. Raises FetchError, DatasetError; of a
        selection DatasetNotFoundError (one isn't there) and ConfigError (one is named twice)."""

    def close(self) -> None:
        """Let connections go. Safe to call twice."""
