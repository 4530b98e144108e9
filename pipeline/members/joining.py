"""Join a loader to the ranks of its job: compare the loaders, and agree on which rank reads what.

A membership begins with a loader, and a new one with each `rejoin`. Its ranks compare what they
were built with at once, without waiting. They wait for one another when a pass begins only if slots
follow the data.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from penstock.cache import JobStore, JobStoreError, PenstockError, PlanError
from penstock.pipeline.members.rank_membership import LoaderChannel, RankMembership
from penstock.pipeline.members.shared_channel import built_key, open_channel, store_section

if TYPE_CHECKING:
    from penstock.pipeline.members.handshake import FirstBatchBarrier, SharedFacts
    from penstock.pipeline.options import LoaderOptions
    from penstock.pipeline.plan import Cursor, JobOrder, LaneOrder, LoaderState
    from penstock.readers import Source


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class JoinedMembership(RankMembership):
    """A loader's membership among ranks that it can reach.

    barrier: at the first batch; None if no other rank can be reached any more. is_again: it began
    with `rejoin`.
    """

    barrier: FirstBatchBarrier | None = None
    is_again: bool = False

    def meet(self, *, has_begun: bool) -> None:
        if self.barrier is not None:
            self.barrier.begin(waits=not (has_begun and self.is_again))

    def refuse(self, error: Exception) -> None:
        if self.barrier is not None:
            self.barrier.refuse(f"{type(error).__name__}: {error}")

    def compare_state(self, state: LoaderState) -> None:
        if self.barrier is not None:
            self.barrier.compare_state(_describe_state(state))

    def restart(self) -> None:
        if self.barrier is not None:
            self.barrier.arrive()

    def begin_pass(self) -> None:
        self.channel.begin_pass()
        if self.barrier is not None:
            self.barrier.come_back()

    def lane_order(
        self, order: JobOrder, options: LoaderOptions, at: Cursor, *, number: int
    ) -> LaneOrder | None:
        from penstock.pipeline.members.lane_agreement import agreed_lane_order, give_up

        store = self.channel.store
        if store is None:  # lost since; the channel has reported it
            return order.lane_order
        if self.barrier is not None:
            self.barrier.check()
        lanes_store = store.under(f"lanes-{number}")
        refusals = None if self.barrier is None else self.barrier.refusals
        try:
            return agreed_lane_order(lanes_store, order, options, at, refusals=refusals)
        except BaseException as error:  # an interrupt too: the other ranks must not wait
            reason = f"{type(error).__name__}: {error}"
            with contextlib.suppress(JobStoreError):
                give_up(lanes_store, f"{options.world.label}: {reason}")
            if isinstance(error, PenstockError):
                self.channel.fail(reason)
            raise


def join_ranks(
    order: JobOrder,
    options: LoaderOptions,
    *,
    plan: str,
    store: JobStore | None = None,
    at: str = "",
) -> RankMembership:
    """Join this rank's loader to the job's, and compare it with the others' without waiting.

    plan: the order's fingerprint. store: the membership's own store; None is the process group's.
    at: where a loader that rejoins continues. Raises PlanError if the loaders differ.
    """
    world = options.world
    channel = open_channel(
        dataset=_dataset_label(order.source),
        shuffle=order.settings.shuffle,
        world=world,
        store=store,
    )
    if not channel.is_shared:
        return RankMembership(channel=channel)
    from penstock.pipeline.members.handshake import (
        FirstBatchBarrier,
        check_replicas,
        check_same_plan,
    )

    facts = _shared_facts(order, options, plan=plan, at=at)
    follows_data = _follows_data(order, options)
    try:
        follows = check_same_plan(channel, facts, label=world.label, follows_data=follows_data)
        check_replicas(channel, world)
    except PlanError as error:
        _give_up(channel, str(error))
        raise
    if store is None:
        channel.follow_first(world, is_expected=order.settings.shuffle)
    barrier = FirstBatchBarrier(
        channel,
        facts,
        world=world,
        waits=order.settings.shuffle and world.size > 1,
        timeout_s=None if at else options.timeout,
    )
    barrier.arrive()
    return JoinedMembership(
        channel=channel, follows_data=follows, barrier=barrier, is_again=bool(at)
    )


def refuse_unbuilt(source: Source, options: LoaderOptions, error: Exception) -> None:
    """Publish that this rank's next loader can't be built, because the other ranks would wait for
    it."""
    world = options.world
    store = JobStore.of_group() if options.agrees and world.processes > 1 else None
    if store is None:
        return
    from penstock.pipeline.members.handshake import RankRefusals  # a process alone needs none of it

    kind = store.under(store_section(_dataset_label(source), shuffle=bool(options.shuffle)))
    with contextlib.suppress(JobStoreError):
        number = int(kind.get(built_key(world.process)) or 0) + 1
        RankRefusals(kind.under(str(number)), world).publish(f"{type(error).__name__}: {error}")


def _dataset_label(source: Source) -> str:
    """Return the name by which loaders in index order belong together.

    Parts of one dataset count as that dataset, because each rank may have cut its own.
    """
    whole = source.part_of
    return source.contents.fingerprint if whole is None else f"part-{whole}"


def _give_up(channel: LoaderChannel, reason: str) -> None:
    """Publish that this rank won't come to the first pass or to a rejoin."""
    from penstock.pipeline.members.lane_agreement import give_up  # others need none of it

    if (store := channel.store) is not None:
        with contextlib.suppress(JobStoreError):
            for number in range(2):
                give_up(store.under(f"lanes-{number}"), reason)


def _shared_facts(order: JobOrder, options: LoaderOptions, *, plan: str, at: str) -> SharedFacts:
    from penstock.pipeline.members.handshake import SharedFacts, recipe_facts

    contents, settings, walk = order.source.contents, order.settings, order.walk
    batch = ", ".join(
        f"{size} from sample {first} on" if first else str(size)
        for first, size in walk.schedule.entries[walk.schedule.history :]
    )
    recipe, recipe_words = recipe_facts(options.augment)
    return SharedFacts(
        dataset=contents.fingerprint,
        samples=contents.samples,
        seed=settings.seed,
        plan=plan,
        size=options.world.size,
        at=at,
        url=order.source.url,
        lanes=settings.lanes,
        window=settings.window,
        reshuffle=float(settings.reshuffle),
        batch="" if at else batch,  # ranks that rejoin know only the batches to come (`at`)
        ends=f"drop_last={walk.drop_last}, pad={options.pad}",
        recipe=recipe,
        recipe_words=recipe_words,
    )


def _follows_data(order: JobOrder, options: LoaderOptions) -> bool:
    """Return True if the ranks' caches matter, as far as this rank knows: several nodes with caches
    that are kept."""
    world, remote, settings = options.world, order.source.remote_shards, order.settings
    return (
        options.order.slots == "data"
        and settings.shuffle
        and settings.lanes > 1
        and world.nodes > 1
        and remote is not None
        and any(not cache.is_temporary for cache in remote.caches)
    )


def rejoin_ranks(
    order: JobOrder,
    options: LoaderOptions,
    state: LoaderState,
    *,
    store: JobStore | None,
    old: LoaderChannel | None,
) -> RankMembership:
    """Join this rank to a changed set of ranks, and compare it with them without waiting.

    state: where they continue. store: of the new ranks. old: the channel of the ranks before, whose
    store is used if no other is given and it still answers. Raises PlanError if the loaders differ.
    """
    job_store = store or (None if old is None else old.job_store)
    if job_store is None:
        world = options.world
        return RankMembership(channel=LoaderChannel(rank=world.rank, size=world.size))
    schedule = order.walk.schedule
    sizes = ", ".join(str(size) for _, size in schedule.entries[schedule.history :][:4])
    membership = join_ranks(
        order,
        options,
        plan=state.fingerprint,
        store=job_store.under("rejoined"),
        at=f"step {state.step} ({state.cursor}) with global batches of {sizes}",
    )
    if store is not None or not isinstance(membership, JoinedMembership):
        return membership
    return replace(membership, follows_data=False, barrier=None)


def _describe_state(state: LoaderState) -> str:
    """Return where and how a state continues, as text to show and to compare."""
    kept = {name: value for name, value in state.to_dict().items() if name != "bad"}
    digest = hashlib.sha256(json.dumps(kept, sort_keys=True, default=str).encode()).hexdigest()
    return f"epoch {state.epoch}, position {state.position} ({digest[:8]})"
