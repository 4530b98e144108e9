"""Join a loader over a native dataset to the ranks of its job, when it is built or rejoins.

The ranks compare what they were built with at once, without waiting.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from penstock.cache import JobStore, JobStoreError
from penstock.pipeline.members.comparison import SharedFacts, recipe_facts
from penstock.pipeline.members.job_membership import JobMembership, post_refusal, section_name
from penstock.pipeline.members.membership import Membership

if TYPE_CHECKING:
    from penstock.pipeline.options import LoaderOptions
    from penstock.pipeline.plan import JobOrder, LoaderState
    from penstock.readers import Source


def join_ranks(order: JobOrder, options: LoaderOptions, *, plan: str) -> Membership:
    """Join this rank's loader to the job's, and compare it with the others' without waiting.

    plan: the order's fingerprint. Raises PlanError if the loaders differ.
    """
    store = JobStore.of_group()
    if store is None:
        return Membership(options.world)
    membership = _join(order, options, store, plan=plan)
    membership.follow_first_process()
    return membership


def rejoin_ranks(
    order: JobOrder,
    options: LoaderOptions,
    state: LoaderState,
    *,
    store: JobStore | None,
    old: Membership | None,
) -> Membership:
    """Join this rank to a changed set of ranks, and compare it with them without waiting.

    state: where they continue. store: of the new ranks. old: the membership before, whose store is
    used if no other is given and it still answers. Raises PlanError if the loaders differ.
    """
    job_store = store or (None if old is None else old.job_store)
    if job_store is None:
        return Membership(options.world)
    schedule = order.walk.schedule
    sizes = ", ".join(str(size) for _, size in schedule.entries[schedule.history :][:4])
    return _join(
        order,
        options,
        job_store.under("rejoined"),
        plan=state.fingerprint,
        at=f"step {state.step} ({state.cursor}) with global batches of {sizes}",
        meets=store is not None,  # the old store may hold what earlier ranks published
    )


def refuse_unbuilt(source: Source, options: LoaderOptions, error: Exception) -> None:
    """Publish that this rank's next loader can't be built, because the other ranks would wait for
    it."""
    world = options.world
    store = JobStore.of_group() if options.agrees and world.processes > 1 else None
    if store is None:
        return
    section = store.under(section_name(_label(source), shuffles=bool(options.shuffle)))
    with contextlib.suppress(JobStoreError):
        number = int(section.get(f"loaders-{world.process}") or 0) + 1
        post_refusal(section.under(str(number)), world, error)


def _join(
    order: JobOrder,
    options: LoaderOptions,
    store: JobStore,
    *,
    plan: str,
    at: str = "",
    meets: bool = True,
) -> JobMembership:
    """Join a loader to a store's ranks. at: where a loader that rejoins continues."""
    source, settings, walk, world = order.source, order.settings, order.walk, options.world
    batch = ", ".join(
        f"{size} from sample {first} on" if first else str(size)
        for first, size in walk.schedule.entries[walk.schedule.history :]
    )
    recipe, recipe_words = recipe_facts(options.augment)
    facts = SharedFacts(
        dataset=source.contents.fingerprint,
        samples=source.contents.samples,
        seed=settings.seed,
        plan=plan,
        size=world.size,
        at=at,
        url=source.url,
        lanes=settings.lanes,
        window=settings.window,
        reshuffle=float(settings.reshuffle),
        batch="" if at else batch,  # ranks that rejoin know only the batches to come (`at`)
        ends=f"drop_last={walk.drop_last}, pad={options.pad}",
        recipe=recipe,
        recipe_words=recipe_words,
    )
    remote = source.remote_shards
    has_kept_caches = (
        options.order.slots == "data"
        and settings.shuffle
        and settings.lanes > 1
        and world.nodes > 1
        and remote is not None
        and any(not cache.is_temporary for cache in remote.caches)
    )
    return JobMembership(
        facts,
        world,
        store=store,
        label=_label(source),
        shuffles=settings.shuffle,
        timeout_s=options.timeout,
        follows_data=has_kept_caches and meets,
        meets=meets,
    )


def _label(source: Source) -> str:
    """Return the name by which loaders in index order belong together.

    Parts of one dataset count as that dataset, because each rank may have cut its own.
    """
    whole = source.part_of
    return source.contents.fingerprint if whole is None else f"part-{whole}"
