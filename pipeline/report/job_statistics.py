"""Describe what the ranks of a job publish of their waits, and name the slowest rank. Pure.

A process that is alone never imports this module.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from penstock.cache.base import format_size

if TYPE_CHECKING:
    from collections.abc import Sequence

MOST_TEXT = 300
"""Bytes of what one rank tells."""

_MOST_WORDS = 40  # characters of a cause
# A rank that waits less than that isn't what others wait for.
_SLOW_SHARE = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class RankWaits:
    """What one process told of its waits. process: its number; times are seconds.

    step: batches that it had been handed by then. wait_share: of its time; wait_p50_s, wait_p99_s:
    of a batch. bytes_disk, bytes_peers, bytes_remote: that it had read from each tier. limit,
    cause: what holds it back.
    """

    rank: int
    process: int
    step: int
    step_s: float
    wait_share: float
    wait_p50_s: float
    wait_p99_s: float
    bytes_disk: int
    bytes_peers: int
    bytes_remote: int
    limit: str
    cause: str

    def text(self) -> str:
        """All of it as a short text."""
        values = [
            self.rank,
            self.process,
            self.step,
            round(self.step_s, 4),
            round(self.wait_share, 4),
            round(self.wait_p50_s, 5),
            round(self.wait_p99_s, 5),
            self.bytes_disk,
            self.bytes_peers,
            self.bytes_remote,
            self.limit[:_MOST_WORDS],
            self.cause[:_MOST_WORDS],
        ]
        return json.dumps(values, separators=(",", ":"))

    @classmethod
    def parse(cls, text: str) -> RankWaits | None:
        """What a rank told; None for what no rank of this release tells."""
        try:
            values = json.loads(text)
        except ValueError:
            return None
        if not isinstance(values, list) or len(values) != len(_FIELD_TYPES):
            return None
        if not all(
            isinstance(value, kind) and not isinstance(value, bool)
            for value, kind in zip(values, _FIELD_TYPES.values(), strict=True)
        ):
            return None
        return cls(**dict(zip(_FIELD_TYPES, values, strict=True)))


_FIELD_TYPES: dict[str, Any] = {
    "rank": int,
    "process": int,
    "step": int,
    "step_s": (int, float),
    "wait_share": (int, float),
    "wait_p50_s": (int, float),
    "wait_p99_s": (int, float),
    "bytes_disk": int,
    "bytes_peers": int,
    "bytes_remote": int,
    "limit": str,
    "cause": str,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class JobStatistics:
    """What all processes of the job told of one loader.

    processes: of the job; heard: of how many. slowest: who waits for its batches the largest share
    of its time; None where nobody told. stale_steps: batches that this process has had since the
    slowest told, and stale_s about how long ago that is (by steps, as nodes' clocks differ).
    """

    processes: int
    heard: int
    slowest: RankWaits | None
    stale_steps: int = 0
    stale_s: float = 0.0

    @classmethod
    def of(cls, told: Sequence[RankWaits], *, processes: int, step: int) -> JobStatistics:
        """What follows from what was told. step: batches that this process was handed."""
        if not told:
            return cls(processes=processes, heard=0, slowest=None)
        slowest = max(told, key=lambda one: (one.wait_share, one.wait_p99_s, -one.process))
        stale = max(0, step - slowest.step)
        return cls(
            processes=processes,
            heard=len(told),
            slowest=slowest,
            stale_steps=stale,
            stale_s=stale * slowest.step_s,
        )

    @property
    def is_slowed(self) -> bool:
        """Whether the slowest waits enough to hold the others up."""
        return self.slowest is not None and self.slowest.wait_share >= _SLOW_SHARE

    def __str__(self) -> str:
        heard = f"{self.heard:,} of {self.processes:,} processes told"
        one = self.slowest
        if one is None:
            return f"Job: {heard} of their waits so far."
        age = f"{self.stale_steps:,} steps (about {self.stale_s:.0f} s) ago"
        if not self.is_slowed:
            return f"Job: {heard}; none waits more than {one.wait_share:.1%} of its time."
        process = "" if one.process == one.rank else f" (process {one.process})"
        peers = f", {format_size(one.bytes_peers)} from peers" if one.bytes_peers else ""
        cause = f" ({one.cause})" if one.cause and one.cause != one.limit else ""
        return (
            f"Job: {heard}. Slowest: rank {one.rank}{process}, which waits {one.wait_share:.1%} of "
            f"its time (p50 {one.wait_p50_s * 1e3:.1f} ms, p99 {one.wait_p99_s * 1e3:.1f} ms a "
            f"batch); its limit: {one.limit}{cause}; read {format_size(one.bytes_disk)} from local "
            f"files{peers}, {format_size(one.bytes_remote)} from the remote. Told {age}."
        )
