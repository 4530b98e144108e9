"""A range of an object: what one request for data asks a store for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.cache.base.store import Answer, Store


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectRange:
    """An object range is bytes [start, end) of an object.

    version: what the object must be; None for whatever is there. may_lack: where the object isn't
    there, the answer is `ABSENT`.
    """

    path: str
    start: int
    end: int
    version: str | None
    may_lack: bool = False

    def read(self, store: Store) -> Answer:
        """Ask a store for it once. Raises RequestError."""
        return store.read(self.path, (self.start, self.end), version=self.version)
