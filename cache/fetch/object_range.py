"""A range of an object: what one request for data asks a store for."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectRange:
    """Bytes [start, end) of an object. version: what it must be, None for whatever is there."""

    path: str
    start: int
    end: int
    version: str | None
