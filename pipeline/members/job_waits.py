"""Publish how long this process waits for data, and read what the job's other processes published.

The training thread publishes at most 300 bytes a minute and never waits. The other processes' texts
are read only when statistics are asked for.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from penstock.pipeline.report import JobStatistics, RankWaits

if TYPE_CHECKING:
    from penstock.pipeline.members.shared_channel import SharedChannel
    from penstock.pipeline.plan import World
    from penstock.pipeline.report import Meter

PUBLISH_EVERY_S = 60.0
# Waits are also published at an epoch's end, unless epochs are shorter than this.
_LEAST_INTERVAL_S = 5.0


class JobWaits:
    """The waiting times of one loader on all processes of its job.

    The training thread counts batches; any thread may call `statistics`.
    """

    def __init__(self, channel: SharedChannel, meter: Meter, world: World) -> None:
        self._channel = channel
        self._meter = meter
        self._world = world
        self._published_s: float | None = None
        self._due_s = time.monotonic() + PUBLISH_EVERY_S

    def count_batch(self, *, ended: int | None) -> None:
        """Publish this process's waiting times if they are due. ended: the epoch whose last batch
        it is."""
        if ended is not None:
            self._channel.end_epoch(ended)
        now = time.monotonic()
        if now < self._due_s and ended is None:
            return
        if self._published_s is not None and now < self._published_s + _LEAST_INTERVAL_S:
            return
        self._published_s, self._due_s = now, now + PUBLISH_EVERY_S
        found, world = self._meter.snapshot(briefly=True), self._world
        waits = RankWaits(
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
        self._channel.publish_waits(waits.text())

    def statistics(self) -> JobStatistics | None:
        """Return what all processes have published; None if the job's store can't be reached."""
        texts = self._channel.all_waits()
        if texts is None:
            return None
        return JobStatistics.of(
            [waits for text in texts if (waits := RankWaits.parse(text)) is not None],
            processes=self._world.processes,
            step=self._meter.batches,
        )
