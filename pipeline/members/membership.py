"""Define a loader's membership in its job; this one reaches no other rank.

A process that is alone loads nothing else of this package. `job_membership` has the membership
among several ranks, and lists what they exchange.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from penstock.cache import RankFailedError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from penstock.cache import JobStore
    from penstock.pipeline.plan import World
    from penstock.pipeline.report import Meter

T = TypeVar("T")


class Membership:
    """A loader's membership in its job. This one reaches no other rank: counts and notices stay in
    the process.

    store: this loader's part of the job's store; None if other ranks can't be reached.
    follows_data: the ranks decide by their caches' contents which of them reads what; the same on
    all ranks. speaks_for_rank: this process is the first of those that have its rank.
    """

    store: JobStore | None = None
    follows_data = False
    speaks_for_rank = True

    def __init__(self, world: World) -> None:
        self.world = world
        self._counts: dict[str, int] = {}
        self._notice: dict[str, Any] | None = None

    @property
    def job_store(self) -> JobStore | None:
        """The job's store; None if it isn't known to answer."""
        return None

    # -- passes and states

    def begin_pass(self) -> None:
        """Record that a pass begins, and withdraw this rank's refusal."""

    def meet(self, *, has_begun: bool = False) -> None:
        """Wait for the other ranks at the first batch, if all train.

        has_begun: this loader has delivered batches, perhaps among other ranks. Raises
        StalledError, which names the absent ranks; RankFailedError if one of them failed or
        published a refusal; PlanError if ranks read different datasets in index order.
        """

    def compare_state(self, described: str) -> None:
        """Raise PlanError unless all ranks load the same state. described: where and how it
        continues."""

    def agree_on_weights(self, call: str, change: str, words: str) -> None:
        """Wait until all ranks change weights; raise PlanError on each of them unless all changes
        are the same. call: the method that does it. change: compared. words: for messages, the
        weights, and from where on they hold.

        Raises StalledError, which names the absent ranks, and RankFailedError.
        """

    def refuse_weights(self, error: Exception) -> None:
        """Publish that this rank refused to change the weights: the ranks that wait for it in
        `agree_on_weights` raise PlanError."""

    def restart(self) -> None:
        """Record that this rank has loaded a state, as all ranks do."""
        self._counts.clear()
        self._notice = None

    def refuse(self, error: Exception) -> None:
        """Publish that this rank refused its user's request, to the ranks that wait for it."""

    def close(self) -> None:
        """Publish that this process has closed its loader. Safe to call twice."""

    # -- batches

    def use_meter(self, meter: Meter) -> None:
        """Publish this process's waiting times from a meter, and show those of all in it."""

    def count_batch(self, *, ended: int | None) -> None:
        """Record that a batch is delivered. ended: the epoch whose last batch it is."""

    def add(self, name: str, count: int, *, place: int = 0) -> int:
        """Add to a counter of all ranks and return its new value. place: of the addition in the
        epoch."""
        del place
        self._counts[name] = self._counts.get(name, 0) + count
        return self._counts[name]

    def additions(self, name: str) -> list[tuple[int, int]] | None:
        """Return the place and the count of each addition of all ranks; None if they can't be
        reached, or if one isn't published yet."""
        del name
        return None

    def count_at(self, place: str, name: str) -> int | None:
        """Return a counter's value at a place of the stream, the same on every rank at any time.

        The first rank that asks for a place decides the value from the additions so far, and the
        others use it, so no rank waits. None if the ranks can't reach one another.
        """
        del place, name
        return None

    def first_value(self, name: str, value: T) -> T:
        """Return the value, of JSON types, of the first rank that called this; this rank's own if
        the store is gone."""
        del name
        return value

    # -- the end

    def stop(self, notice: dict[str, Any]) -> None:
        """Publish a notice that stops every rank at its next batch. Only the first one counts.

        notice["last"]: the epoch and the position at which the last batch begins that all deliver.
        """
        self._notice = self._notice or notice

    def stop_notice(self) -> dict[str, Any] | None:
        """Return the notice to stop, if a rank has published one."""
        return self._notice

    def check(self, epoch: int | None = None) -> None:
        """Raise RankFailedError if a rank has published that it failed.

        epoch: of the batch that is asked for. Batches before the place of the failure are still
        delivered.
        """

    def fail(self, error: BaseException) -> None:
        """Publish that this rank failed: all ranks stop, at any step."""

    def end_together(self) -> None:
        """Wait until every rank that has this loader has called this, or for half a minute."""


def rank_failure(notice: Mapping[str, Any]) -> RankFailedError:
    """Return the error of a notice that a rank failed."""
    rank = int(notice.get("rank", 0))
    return RankFailedError(
        f"Rank {rank} failed, so every rank stops here: {notice['failed']}", rank=rank
    )
