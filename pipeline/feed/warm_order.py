"""What a warm-up is for: a job that starts with given arguments, or goes on from a state."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from penstock.cache.errors import ConfigError
from penstock.pipeline.options.order_options import DEFAULT_ORDER, Order, shuffle_settings
from penstock.pipeline.options.sizes import batch_schedule
from penstock.pipeline.plan.job_order import JobOrder
from penstock.pipeline.plan.settings import ordered_settings, shuffled_settings
from penstock.pipeline.plan.steps import Cursor, Walk

if TYPE_CHECKING:
    from penstock.pipeline.options.sizes import GlobalBatch
    from penstock.pipeline.plan.batch_schedule import BatchSchedule
    from penstock.pipeline.plan.world import World
    from penstock.readers.source import Source

# Of one rank, where nobody says what the job's will be: as people train on images.
BATCH_PER_RANK = 256
# Shards at a time. Each is fetched by several ranges at once; several shards hide each one's ends.
FILLS_AT_ONCE = 4

_OF_STATES = ("epoch", "seed", "shuffle")


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmOrder:
    """What a warm-up was asked for, by the names of `warm`."""

    epoch: int = 0
    seed: int = 0
    global_batch_size: GlobalBatch | None = None
    shuffle: bool = True
    order: Order = DEFAULT_ORDER
    state: dict[str, Any] | None = None
    process: tuple[int, int] = (0, 1)
    workers: int = FILLS_AT_ONCE
    dry_run: bool = False

    def __post_init__(self) -> None:
        if self.state is None:
            return
        fields = type(self).__dataclass_fields__
        given = {name: getattr(self, name) for name in _OF_STATES}
        given = {name: value for name, value in given.items() if value != fields[name].default}
        for name, value in (given | shuffle_settings(self.order)).items():
            raise ConfigError(
                f"{name}: got {value!r} beside a state, which says it "
                "already: order and place come from the state. Leave one of them out."
            )

    def job(self, source: Source, world: World) -> tuple[JobOrder, Cursor]:
        """The job's order, and where its next batch begins. Raises ConfigError; ResumeError for a
        state of something else."""
        given = self.global_batch_size
        if self.state is not None:
            wanted = None if given is None else batch_schedule(given)
            return _resumed(source, self.state, wanted, world)
        schedule = batch_schedule(BATCH_PER_RANK * world.size if given is None else given)
        _check_batches(schedule, world)
        settings = ordered_settings(seed=self.seed)
        if self.shuffle:
            settings = shuffled_settings(
                source.contents,
                seed=self.seed,
                global_batch=schedule.first_size,
                lanes=self.order.lanes,
                window=self.order.window,
                reshuffle=self.order.reshuffle,
            )
        walk = Walk(samples=source.contents.samples, schedule=schedule, drop_last=False)
        return JobOrder(source=source, settings=settings, walk=walk), Cursor(self.epoch, 0)


def _check_batches(schedule: BatchSchedule, world: World) -> None:
    if (least := schedule.smallest) < world.size:
        raise ConfigError(
            f"global_batch_size: got {least}, wanted at least the world's {world.size} ranks."
        )


def _resumed(
    source: Source, told: dict[str, Any], wanted: BatchSchedule | None, world: World
) -> tuple[JobOrder, Cursor]:
    """As a loader goes on from the state. wanted: batches from there on; None: the state's."""
    # A job's first start needs none of it.
    from penstock.pipeline.plan.history import resumed_schedule
    from penstock.pipeline.plan.lane_order import LaneOrder
    from penstock.pipeline.plan.settings import order_fingerprint
    from penstock.pipeline.plan.state import LoaderState, check_resumable, other_order

    state, contents = LoaderState.from_dict(told), source.contents
    check_resumable(state, dataset=contents.fingerprint, samples=contents.samples, wanted={})
    fingerprint = order_fingerprint(contents, state.plan)
    if fingerprint != state.fingerprint:
        raise other_order(state.fingerprint, fingerprint)
    order = None
    if state.lane_order is not None:
        order = LaneOrder.parse(state.lane_order, lanes=state.plan.lanes)
    if state.plan.buckets is not None:
        from penstock.pipeline.feed.frozen_order import bucket_order

        job = bucket_order(source, state.plan, order)
        return job, job.walk.normalise(state.cursor)
    schedule = resumed_schedule(state, wanted, drop_last=state.drop_last)
    _check_batches(schedule, world)
    walk = Walk(samples=contents.samples, schedule=schedule, drop_last=state.drop_last)
    job = JobOrder(source=source, settings=state.plan, walk=walk, lane_order=order)
    return job, walk.normalise(state.cursor)
