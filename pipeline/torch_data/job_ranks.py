"""Compare plans, states and waits between the ranks whose loaders read one torch dataset.

Only loaders whose samples Penstock orders have such ranks; with torch's own order, each rank's
loader is independent. Torch datasets have no fingerprint, so their type and length are compared.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.cache import JobStore
from penstock.pipeline.members import (
    FirstBatchBarrier,
    JobWaits,
    SharedChannel,
    SharedFacts,
    check_replicas,
    check_same_plan,
    open_channel,
    recipe_facts,
)
from penstock.pipeline.torch_data.index_order import PlannedOrder

if TYPE_CHECKING:
    from penstock.pipeline.report import Meter
    from penstock.pipeline.torch_data.mark import Mark
    from penstock.pipeline.torch_data.pass_setup import PassSetup


class JobRanks:
    """The membership of one loader over a torch dataset in the ranks of its job.

    The thread that iterates calls it.
    """

    def __init__(self, channel: SharedChannel, barrier: FirstBatchBarrier, waits: JobWaits) -> None:
        self._channel = channel
        self._barrier = barrier
        self._waits = waits

    @classmethod
    def join(cls, setup: PassSetup, meter: Meter) -> JobRanks | None:
        """Join this process's loader to the job's, and compare it with the others' without waiting.

        None without a process group. Raises PlanError if the loaders differ.
        """
        world = setup.world
        store = JobStore.of_group() if setup.options.agrees and world.processes > 1 else None
        if store is None:
            return None
        facts, shuffles = _facts(setup), bool(setup.options.shuffle)
        # Numbered separately from native loaders.
        channel = open_channel(
            dataset=facts.dataset, shuffle=shuffles, world=world, store=store.under("torch")
        )
        check_same_plan(channel, facts, label=world.label)
        check_replicas(channel, world)
        channel.follow_first(world, is_expected=shuffles)
        barrier = FirstBatchBarrier(
            channel,
            facts,
            world=world,
            waits=shuffles and world.size > 1,
            timeout_s=float(setup.options.timeout),
        )
        barrier.arrive()
        waits = JobWaits(channel, meter, world)
        meter.job = waits.statistics
        return cls(channel, barrier, waits)

    @property
    def channel(self) -> SharedChannel:
        """The channel of this loader to the other ranks."""
        return self._channel

    def begin_pass(self) -> None:
        """Record that a pass begins, and withdraw this rank's refusal."""
        self._channel.begin_pass()
        self._barrier.come_back()

    def before_batch(self, epoch: int) -> None:
        """Check for failures of other ranks before a batch of an epoch; wait for them at the first
        batch.

        Raises RankFailedError if a rank has stopped the job, and what `FirstBatchBarrier.begin`
        raises.
        """
        self._barrier.check(epoch)
        if self._barrier.begin():
            self._barrier.check(epoch)

    def count_batch(self, *, ended: int | None) -> None:
        """Count a delivered batch. ended: the epoch whose last batch it is."""
        self._waits.count_batch(ended=ended)

    def close(self) -> None:
        """Publish that the loader is closed. Safe to call twice."""
        self._channel.close()

    def fail(self, error: Exception) -> None:
        """Publish that this rank failed, so that the others stop."""
        self._channel.fail(f"{type(error).__name__}: {error}")

    def compare_state(self, mark: Mark) -> None:
        """Raise PlanError unless all ranks load the same state."""
        self._barrier.compare_state(f"epoch {mark.epoch}, position {mark.position}")

    def restart(self) -> None:
        """Publish that this rank has loaded a state."""
        self._channel.begin()
        self._barrier.arrive()

    def refuse(self, error: Exception) -> None:
        """Publish that this rank can't load a state, to the ranks that wait for it."""
        self._barrier.refuse(f"{type(error).__name__}: {error}")


def _facts(setup: PassSetup) -> SharedFacts:
    options, order = setup.options, setup.order
    assert isinstance(order, PlannedOrder)
    kind, samples = type(setup.dataset).__name__, order.walk.samples
    shuffles = bool(options.shuffle)
    recipe, recipe_words = recipe_facts(options.augment)
    return SharedFacts(
        dataset=f"{kind}-{samples}",
        samples=samples,
        seed=options.plan_seed,
        plan=order.name,
        size=options.world.size,
        batch=str(order.walk.schedule.size),
        ends=f"drop_last={order.walk.drop_last}, pad={options.pad}",
        recipe=recipe,
        recipe_words=recipe_words,
        reshuffle=float(options.order.reshuffle) if shuffles else 0.0,
    )
