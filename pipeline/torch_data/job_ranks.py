"""Join a loader over a torch dataset to the ranks of its job.

Only loaders whose samples Penstock orders have such ranks; with torch's own order, each rank's
loader is independent. Torch datasets have no fingerprint, so their type and length are compared.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.cache import JobStore
from penstock.pipeline.members import JobMembership, SharedFacts, recipe_facts
from penstock.pipeline.torch_data.index_order import PlannedOrder

if TYPE_CHECKING:
    from penstock.pipeline.report import Meter
    from penstock.pipeline.torch_data.pass_setup import PassSetup


def join_ranks(setup: PassSetup, meter: Meter) -> JobMembership | None:
    """Join this process's loader to the job's, and compare it with the others' without waiting.

    None without a process group. Raises PlanError if the loaders differ.
    """
    options, order, world = setup.options, setup.order, setup.world
    store = JobStore.of_group() if options.agrees and world.processes > 1 else None
    if store is None:
        return None
    assert isinstance(order, PlannedOrder)
    samples, shuffles = order.walk.samples, bool(options.shuffle)
    recipe, recipe_words = recipe_facts(options.augment)
    facts = SharedFacts(
        dataset=f"{type(setup.dataset).__name__}-{samples}",
        samples=samples,
        seed=options.plan_seed,
        plan=order.name,
        size=world.size,
        batch=str(order.walk.schedule.size),
        ends=f"drop_last={order.walk.drop_last}, pad={options.pad}",
        recipe=recipe,
        recipe_words=recipe_words,
        reshuffle=float(options.order.reshuffle) if shuffles else 0.0,
    )
    membership = JobMembership(
        facts,
        world,
        store=store.under("torch"),  # numbered separately from native loaders
        label=facts.dataset,
        shuffles=shuffles,
        timeout_s=float(options.timeout),
    )
    membership.follow_first_process()
    membership.use_meter(meter)
    return membership
