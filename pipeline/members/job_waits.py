"""Publish what this process waits for to the job's other processes, and read what they published.

The training thread publishes rarely and never waits: a text of less than 300 bytes a minute. What
the others published is read only when somebody asks for statistics.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from penstock.pipeline.report import JobStatistics, RankWaits

if TYPE_CHECKING:
    from penstock.pipeline.members.loader_channel import LoaderChannel
    from penstock.pipeline.plan import World
    from penstock.pipeline.report import Meter, Statistics

TELL_EVERY_S = 60.0
# Also at an epoch's end, but not of epochs that end all the time.
_TELL_AT_MOST_EVERY_S = 5.0


class JobWaits:
    """Speaks of one loader's waits with the job's other processes. The training thread counts;
    any thread may ask."""

    def __init__(self, agreement: LoaderChannel, meter: Meter, world: World) -> None:
        self._agreement = agreement
        self._meter = meter
        self._world = world
        self._told_s: float | None = None
        self._due_s = time.monotonic() + TELL_EVERY_S

    def count_batch(self, *, ended: int | None) -> None:
        """Tell now, if it is time to. ended: the epoch whose last batch it is."""
        if ended is not None:
            self._agreement.end_epoch(ended)
        now = time.monotonic()
        if now < self._due_s and ended is None:
            return
        if self._told_s is not None and now < self._told_s + _TELL_AT_MOST_EVERY_S:
            return
        self._told_s, self._due_s = now, now + TELL_EVERY_S
        found = self._meter.snapshot(briefly=True)
        own = _waits_of(found, self._world)
        self._agreement.tell_waits(own.text())

    def statistics(self) -> JobStatistics | None:
        """What all have told; None where they can't be reached."""
        told = self._agreement.all_waits()
        if told is None:
            return None
        return JobStatistics.of(
            [one for text in told if (one := RankWaits.parse(text)) is not None],
            processes=self._world.processes,
            step=self._meter.batches,
        )


def _waits_of(found: Statistics, world: World) -> RankWaits:
    """What a process has to tell. found: its own statistics."""
    return RankWaits(
        rank=world.rank,
        process=world.process,
        step=found.batches,
        step_s=(found.step_s + found.wait_s) / max(1, found.batches - 1),
        wait_share=found.wait_share,
        wait_p50_s=found.wait_p50_s,
        wait_p99_s=found.wait_p99_s,
        bytes_disk=found.bytes_disk,
        bytes_peers=found.bytes_peers,
        bytes_remote=found.bytes_remote,
        limit=found.limit,
        cause=found.cause,
    )
