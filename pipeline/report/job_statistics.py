"""Describe the waits that the ranks of a job publish, and name the slowest rank. Pure.

A process that is alone never imports this module.
"""

from __future__ import annotations

import json
from dataclasses import astuple, dataclass, fields
from typing import TYPE_CHECKING, Any

from penstock.cache.base import format_size

if TYPE_CHECKING:
    from collections.abc import Sequence

MOST_TEXT = 300
"""Most bytes of one rank's published text."""

_MOST_CHARACTERS = 40  # of a limit or a cause
# A rank that waits less than this share of its time doesn't hold the others up.
_SLOW_SHARE = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class RankWaits:
    """The waits of one process, as it published them. Times are seconds.

    process: its number in the job. step: batches that had been delivered to it. wait_share: share
    of its time that it waited; wait_p50_s, wait_p99_s: wait for one batch. bytes_disk, bytes_peers,
    bytes_remote: bytes that it had read from each tier. limit, cause: its verdict.
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
        """Return all values as ASCII text of at most `MOST_TEXT` bytes, to be published."""
        values = [
            value[:_MOST_CHARACTERS] if isinstance(value, str) else round(value, 5)
            for value in astuple(self)
        ]
        return json.dumps(values, separators=(",", ":"))

    @classmethod
    def parse(cls, text: str) -> RankWaits | None:
        """Parse a published text; None if no rank of this release can have written it."""
        try:
            values = dict(zip(_FIELD_TYPES, json.loads(text), strict=True))
        except (ValueError, TypeError):
            return None
        fits = all(type(value) in _FIELD_TYPES[name] for name, value in values.items())
        return cls(**values) if fits else None


WAITS_OF_STATISTICS = (
    *("wait_share", "wait_p50_s", "wait_p99_s", "bytes_disk", "bytes_peers", "bytes_remote"),
    *("limit", "cause"),
)
"""The fields that a process publishes as its `Statistics` have them."""

_JSON_TYPES: dict[Any, tuple[type, ...]] = {"int": (int,), "float": (int, float), "str": (str,)}
_FIELD_TYPES = {field.name: _JSON_TYPES[field.type] for field in fields(RankWaits)}


@dataclass(frozen=True, slots=True, kw_only=True)
class JobStatistics:
    """The published waits of all processes of the job, for one loader.

    processes: of the job; heard: how many of them have published their waits. slowest: the process
    that waits for its batches the largest share of its time; None if none has published. How old
    that is: stale_steps counts the batches that were delivered to this process since, and stale_s
    estimates the seconds from them, because the clocks of nodes differ.
    """

    processes: int
    heard: int
    slowest: RankWaits | None
    stale_steps: int = 0
    stale_s: float = 0.0

    @classmethod
    def of(cls, published: Sequence[RankWaits], *, processes: int, step: int) -> JobStatistics:
        """Summarise published waits. step: batches that were delivered to this process."""
        if not published:
            return cls(processes=processes, heard=0, slowest=None)
        slowest = max(published, key=lambda each: (each.wait_share, each.wait_p99_s, -each.process))
        stale = max(0, step - slowest.step)
        return cls(
            processes=processes,
            heard=len(published),
            slowest=slowest,
            stale_steps=stale,
            stale_s=stale * slowest.step_s,
        )

    def __str__(self) -> str:
        reported = f"{self.heard:,} of {self.processes:,} processes reported"
        rank = self.slowest
        if rank is None:
            return f"Job: {reported} their waits so far."
        if rank.wait_share < _SLOW_SHARE:
            return f"Job: {reported}; none waits more than {rank.wait_share:.1%} of its time."
        process = "" if rank.process == rank.rank else f" (process {rank.process})"
        peers = f", {format_size(rank.bytes_peers)} from peers" if rank.bytes_peers else ""
        cause = f" ({rank.cause})" if rank.cause and rank.cause != rank.limit else ""
        return (
            f"Job: {reported}. Slowest: rank {rank.rank}{process}, which waits "
            f"{rank.wait_share:.1%} of its time (p50 {rank.wait_p50_s * 1e3:.1f} ms, p99 "
            f"{rank.wait_p99_s * 1e3:.1f} ms a batch); its limit: {rank.limit}{cause}; read "
            f"{format_size(rank.bytes_disk)} from local files{peers}, "
            f"{format_size(rank.bytes_remote)} from the remote. Reported {self.stale_steps:,} "
            f"steps (about {self.stale_s:.0f} s) ago."
        )
