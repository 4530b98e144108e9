"""One line of the doctor's report."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "warn", "fail"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One line of the report. found: what is there. remedy: what to do, "" where all is well."""

    name: str
    status: Status
    found: str
    remedy: str = ""


def count(number: int, noun: str) -> str:
    """A number with its noun: 1 rank, 2 ranks, 2 processes."""
    plural = "es" if noun.endswith("s") else "s"
    return f"{number:,} {noun}{plural * (number != 1)}"
