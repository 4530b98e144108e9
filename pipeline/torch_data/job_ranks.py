"""Compare plans, states and waits between the ranks whose loaders read one torch dataset.

It applies only where Penstock orders the samples: with torch's own order each rank's loader
stands alone. Torch datasets have no fingerprint, so their type and length are compared. A process
that is alone never imports this module.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from penstock.cache import JobStore
from penstock.pipeline.members import (
    FirstBatchBarrier,
    JobWaits,
    LoaderChannel,
    SharedFacts,
    check_replicas,
    check_same_plan,
    open_channel,
    recipe_text,
)
from penstock.pipeline.torch_data.index_order import PlannedOrder

if TYPE_CHECKING:
    from penstock.pipeline.report import Meter
    from penstock.pipeline.torch_data.mark import Mark
    from penstock.pipeline.torch_data.pass_setup import PassSetup

_RECIPE_SHOWN = 200  # characters


class JobRanks:
    """One loader's place among the ranks of its job. The thread that iterates calls."""

    def __init__(self, channel: LoaderChannel, barrier: FirstBatchBarrier, waits: JobWaits) -> None:
        self._channel = channel
        self._barrier = barrier
        self._waits = waits

    @classmethod
    def join(cls, setup: PassSetup, meter: Meter) -> JobRanks | None:
        """Speak for this process's loader, and compare it with the others'. Waits for nobody; None
        where no process group stands. Raises PlanError where they differ."""
        world = setup.world
        store = JobStore.of_group() if setup.options.agrees and world.processes > 1 else None
        if store is None:
            return None
        facts, shuffles = _facts(setup), bool(setup.options.torch_options.shuffle)
        # Apart from native loaders, which number theirs.
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
            timeout_s=float(setup.options.torch_options.timeout),
        )
        barrier.arrive()
        waits = JobWaits(channel, meter, world)
        meter.job = waits.statistics
        return cls(channel, barrier, waits)

    def begin_pass(self) -> None:
        """The user goes on, whatever was refused."""
        self._channel.begin_pass()
        self._barrier.come_back()

    def ask(self, epoch: int) -> None:
        """A batch of an epoch is asked for. Raises RankFailedError where a rank told all to stop,
        and what `FirstBatchBarrier.begin` raises."""
        self._barrier.check(epoch)
        if self._barrier.begin():
            self._barrier.check(epoch)

    def count_batch(self, *, ended: int | None) -> None:
        """A batch is handed out. ended: the epoch whose last one it is."""
        self._waits.count_batch(ended=ended)

    def close(self) -> None:
        """The loader is closed. Safe to call twice."""
        self._channel.close()

    def fail(self, error: Exception) -> None:
        """Tell the other ranks that this one can't go on."""
        self._channel.fail(f"{type(error).__name__}: {error}")

    def compare_state(self, mark: Mark) -> None:
        """All ranks load a state now: the same. Raises PlanError."""
        self._barrier.compare_state(f"epoch {mark.epoch}, position {mark.position}")

    def restart(self) -> None:
        """A state was loaded."""
        self._channel.begin()
        self._barrier.arrive()

    def refuse(self, error: Exception) -> None:
        """Tell the ranks that wait for this one that a state was refused."""
        self._barrier.refuse(f"{type(error).__name__}: {error}")


def _facts(setup: PassSetup) -> SharedFacts:
    options, order = setup.options, setup.order
    assert isinstance(order, PlannedOrder)
    recipe = recipe_text(options.own.augment)
    kind, samples = type(setup.dataset).__name__, order.walk.samples
    shuffles = bool(options.torch_options.shuffle)
    return SharedFacts(
        dataset=f"{kind}-{samples}",
        samples=samples,
        seed=order.seed,
        plan=order.name,
        size=options.world.size,
        batch=str(order.walk.schedule.size),
        ends=f"drop_last={order.walk.drop_last}, pad={'mask' if order.is_padded else None}",
        recipe=hashlib.sha256(recipe.encode()).hexdigest(),
        recipe_words=recipe[:_RECIPE_SHOWN],
        reshuffle=float(options.own.order.reshuffle) if shuffles else 0.0,
    )
