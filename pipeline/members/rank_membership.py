"""Define a loader's membership in the ranks of its job, and its channel to them.

The classes are those of a loader that reaches no other rank. `joining` has the membership among
several ranks, and `shared_channel` the channel that they share, which a single process doesn't
load.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.cache import JobStore
    from penstock.pipeline.options import LoaderOptions
    from penstock.pipeline.plan import Cursor, JobOrder, LaneOrder, LoaderState


class LoaderChannel:
    """The channel of one loader to the same loader on other ranks. This one reaches none: counts
    and notices stay in the process."""

    store: JobStore | None = None  # this loader's part of the job's store
    number_of_rank = 1  # of this process, among those with its rank, in order of arrival

    def __init__(self, *, rank: int = 0, size: int = 1) -> None:
        """size: ranks of the job, reachable or not."""
        self.rank = rank
        self.size = size
        self._counts: dict[str, int] = {}
        self._notice: dict[str, Any] | None = None

    @property
    def is_shared(self) -> bool:
        """True if other ranks can read what this one publishes."""
        return self.store is not None

    @property
    def job_store(self) -> JobStore | None:
        """The job's store; None if it isn't known to answer."""
        return None

    @property
    def speaks_for_rank(self) -> bool:
        """True if this process is the first of those that have its rank."""
        return self.number_of_rank == 1

    def begin_pass(self) -> None:
        """Record that a pass begins."""

    def end_epoch(self, epoch: int) -> None:
        """Record that the last batch of an epoch is delivered."""

    def close(self) -> None:
        """Publish that this process has closed its loader. Safe to call twice."""

    def begin(self) -> None:
        """Start a new round of keys, because all ranks load a state. A notice of differing loaders
        stays."""
        self._counts.clear()
        notice = self.stop_notice()
        self._notice = notice if notice is not None and notice.get("differs") else None

    def add(self, name: str, count: int) -> int:
        """Add to a counter of all ranks and return its new value."""
        self._counts[name] = self._counts.get(name, 0) + count
        return self._counts[name]

    def count_at(self, place: str, name: str) -> int | None:
        """Return a counter's value at a place of the stream, the same on every rank at any time.

        The first rank that asks for a place decides the value from the additions so far, and the
        others use it, so no rank waits. None if the ranks can't reach one another.
        """
        del place
        return self._counts.get(name, 0) if self.size == 1 else None

    def first_value(self, name: str, value: int) -> int:
        """Return the value of the first rank that called this; this rank's own if the store is
        gone."""
        del name
        return value

    def stop(self, notice: dict[str, Any]) -> None:
        """Publish a notice that stops every rank at its next batch. Only the first one counts."""
        self._notice = self._notice or notice

    def fail(self, reason: str, *, differs: bool = False) -> None:
        """Publish that this rank failed: all ranks stop, at any step.

        differs: the loaders differ, so ranks that have loaded a state since stop too.
        """

    def stop_notice(self) -> dict[str, Any] | None:
        """Return the notice to stop, if a rank has published one."""
        return self._notice

    def end_together(self) -> None:
        """Wait until every rank that joined has called this, or for half a minute."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RankMembership:
    """A loader's membership in the ranks of its job; this one has no other ranks to wait for, or
    can't reach them.

    follows_data: the ranks decide by their caches' contents which of them reads what; the same on
    all ranks.
    """

    channel: LoaderChannel
    follows_data: bool = False

    def meet(self, *, has_begun: bool) -> None:
        """Wait for the other ranks and compare with them, if the first batch is asked for.

        has_begun: this loader has delivered batches, perhaps among other ranks. Raises what
        `FirstBatchBarrier.begin` raises.
        """

    def refuse(self, error: Exception) -> None:
        """Publish that this rank refused its user's request, to the ranks that wait for it."""

    def compare_state(self, state: LoaderState) -> None:
        """Raise PlanError unless all ranks load the same state."""

    def restart(self) -> None:
        """Publish that this rank has loaded a state."""

    def begin_pass(self) -> None:
        """Record that a pass begins, and withdraw this rank's refusal."""
        self.channel.begin_pass()

    def lane_order(
        self, order: JobOrder, options: LoaderOptions, at: Cursor, *, number: int
    ) -> LaneOrder | None:
        """Wait for all ranks, and return the lane order that they follow; None for the identity.

        order: with the latest lane order. at: where the ranks continue. number: of this decision
        within the membership. Raises what `exchange` raises and what reading the cache raises; the
        other ranks then stop too.
        """
        del options, at, number
        return order.lane_order
