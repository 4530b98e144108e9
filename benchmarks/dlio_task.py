"""The tasks of the loaders of `benchmarks.dlio`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from benchmarks.dlio_data import Kind

Work = Literal["bytes", "decode", "detect", "arrays", "columns"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """The data and settings from which a loader is built."""

    work: Work
    files: str
    pack: str
    sample_bytes: int
    batch_size: int
    workers: int
    kind: Kind
    seed: int = 7
