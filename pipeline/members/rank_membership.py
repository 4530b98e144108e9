"""Join a loader to the ranks of its job: who they are, whether they agree, and who reads what.

A membership begins with a loader, and anew with `rejoin`. Its ranks compare at once what they were
built with, without waiting. They wait for one another only where slots follow the data, when a pass
begins.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from penstock.cache import JobStore, JobStoreError, PenstockError, PlanError
from penstock.pipeline.members.loader_channel import (
    LoaderChannel,
    built_key,
    open_channel,
    store_section,
)

if TYPE_CHECKING:
    from penstock.pipeline.members.handshake import FirstBatchBarrier, SharedFacts
    from penstock.pipeline.options import NativeOptions
    from penstock.pipeline.plan import Cursor, JobOrder, LaneOrder, LoaderState
    from penstock.readers import Source

_RECIPE_SHOWN = 200  # characters


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RankMembership:
    """A loader's place among the ranks of its job.

    follows_data: whether its ranks decide by what their caches hold which of them reads what; the
    same on all of them. meeting: of the ranks at their first batch; None where nobody can be asked.
    is_again: it began with `rejoin`.
    """

    agreement: LoaderChannel
    follows_data: bool
    meeting: FirstBatchBarrier | None = None
    is_again: bool = False

    def meet(self, *, has_begun: bool) -> None:
        """A batch is asked for: if it is the first, look whether all ranks are there and read the
        same. has_begun: this loader handed batches out, be it among other ranks.

        Raises what `Meeting.begin` raises."""
        if self.meeting is not None:
            self.meeting.begin(waits=not (has_begun and self.is_again))

    def refuse(self, error: Exception) -> None:
        """Tell the ranks that wait for this one that its user's wish couldn't be done."""
        if self.meeting is not None:
            self.meeting.refuse(f"{type(error).__name__}: {error}")

    def compare_state(self, state: LoaderState) -> None:
        """All ranks load a state now: the same. Raises PlanError."""
        if self.meeting is not None:
            self.meeting.compare_state(_state_words(state))

    def restart(self) -> None:
        """A state was loaded."""
        if self.meeting is not None:
            self.meeting.arrive()

    def begin_pass(self) -> None:
        """The user goes on, whatever was refused."""
        self.agreement.begin_pass()
        if self.meeting is not None:
            self.meeting.come_back()

    def lane_order(
        self, order: JobOrder, options: NativeOptions, at: Cursor, *, number: int
    ) -> LaneOrder | None:
        """The order of lanes that all its ranks go by; None for the identity. Waits for them.

        order: with the last one. at: where they go on. number: of such decisions in this
        membership. Raises what `exchange` raises, and what looking into the cache raises; then the
        other ranks stop too.
        """
        # Others need none of it.
        from penstock.pipeline.members.lane_agreement import agreed_lane_order, give_up

        store = self.agreement.store
        if store is None:  # nobody can be asked any more, which was said
            return order.lane_order
        if self.meeting is not None:
            self.meeting.check()
        asked = store.under(f"lanes-{number}")
        refusals = None if self.meeting is None else self.meeting.refusals
        try:
            return agreed_lane_order(asked, order, options, at, refusals=refusals)
        except BaseException as error:  # an interrupt, too: nobody waits for who doesn't come
            reason = f"{type(error).__name__}: {error}"
            with contextlib.suppress(JobStoreError):
                give_up(asked, f"{options.world.label}: {reason}")
            if isinstance(error, PenstockError):
                self.agreement.fail(reason)
            raise


def single_rank_membership(options: NativeOptions) -> RankMembership:
    """The membership of a rank that can't reach the others, or has none."""
    world = options.world
    return RankMembership(
        agreement=LoaderChannel(rank=world.rank, size=world.size), follows_data=False
    )


def join_ranks(
    order: JobOrder,
    options: NativeOptions,
    *,
    plan: str,
    store: JobStore | None = None,
    at: str = "",
) -> RankMembership:
    """Speak for this rank's loader, and compare it with the others'. Waits for nobody.

    plan: the order's fingerprint. store: of a membership of its own; None is the process group's.
    at: where the loader goes on with others. Raises PlanError where they differ.
    """
    world = options.world
    if store is None and not options.agrees:
        return single_rank_membership(options)
    agreement = open_channel(
        dataset=_dataset_label(order.source),
        shuffle=order.settings.shuffle,
        world=world,
        store=store,
    )
    if not agreement.is_shared:
        return RankMembership(agreement=agreement, follows_data=False)
    from penstock.pipeline.members.handshake import (
        FirstBatchBarrier,
        check_replicas,
        check_same_plan,
    )

    facts = _shared_facts(order, options, plan=plan, at=at)
    follows_data = _follows_data(order, options)
    try:
        follows = check_same_plan(agreement, facts, label=world.label, follows_data=follows_data)
        check_replicas(agreement, world)
    except PlanError as error:
        _give_up(agreement, str(error))
        raise
    if store is None:
        agreement.follow_first(world, is_expected=order.settings.shuffle)
    meeting = FirstBatchBarrier(
        agreement,
        facts,
        world=world,
        waits=order.settings.shuffle and world.size > 1,
        timeout_s=None if at else options.timeout_s,
    )
    meeting.arrive()
    return RankMembership(
        agreement=agreement, follows_data=follows, meeting=meeting, is_again=bool(at)
    )


def refuse_unbuilt(source: Source, options: NativeOptions, error: Exception) -> None:
    """Tell the other ranks that this one's loader, its next, can't be made: they would wait."""
    world = options.world
    store = JobStore.of_group() if options.agrees and world.processes > 1 else None
    if store is None:
        return
    from penstock.pipeline.members.handshake import RankRefusals  # a process alone needs none of it

    kind = store.under(store_section(_dataset_label(source), shuffle=options.shuffle))
    with contextlib.suppress(JobStoreError):
        number = int(kind.get(built_key(world.process)) or 0) + 1
        RankRefusals(kind.under(str(number)), world).tell(f"{type(error).__name__}: {error}")


def _dataset_label(source: Source) -> str:
    """What loaders in order belong together by: parts may be what each rank has cut for itself."""
    whole = source.part_of
    return source.contents.fingerprint if whole is None else f"part-{whole}"


def _give_up(agreement: LoaderChannel, reason: str) -> None:
    """Have nobody wait for this rank, at the first pass or in a rejoin."""
    from penstock.pipeline.members.lane_agreement import give_up  # others need none of it

    if (store := agreement.store) is not None:
        with contextlib.suppress(JobStoreError):
            for number in range(2):
                give_up(store.under(f"lanes-{number}"), reason)


def _shared_facts(order: JobOrder, options: NativeOptions, *, plan: str, at: str) -> SharedFacts:
    from penstock.pipeline.members.handshake import SharedFacts, recipe_text

    contents, settings, walk = order.source.contents, order.settings, order.walk
    recipe = recipe_text(options.augment)
    batch = ", ".join(
        f"{size} from sample {first} on" if first else str(size)
        for first, size in walk.schedule.entries[walk.schedule.history :]
    )
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
        batch="" if at else batch,  # of those that join later only what is to come is sure
        ends=f"drop_last={walk.drop_last}, pad={'mask' if options.pad else None}",
        recipe=hashlib.sha256(recipe.encode()).hexdigest(),
        recipe_words=recipe[:_RECIPE_SHOWN],
    )


def _follows_data(order: JobOrder, options: NativeOptions) -> bool:
    """Whether it matters who reads what: on several nodes with caches that stay. As far as this
    rank knows."""
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
    options: NativeOptions,
    state: LoaderState,
    *,
    store: JobStore | None,
    old: LoaderChannel | None,
) -> RankMembership:
    """Speak for this rank among others than before, and compare it with them. Waits for nobody.

    state: where they go on. store: of the new ranks. old: of the ranks before; if it still answers,
    it serves where no other store is given. Raises PlanError where they differ.
    """
    whole = store or (None if old is None else old.whole_store)
    if whole is None:
        return single_rank_membership(options)
    schedule = order.walk.schedule
    sizes = ", ".join(str(size) for _, size in schedule.entries[schedule.history :][:4])
    found = join_ranks(
        order,
        options,
        plan=state.fingerprint,
        store=whole.under("rejoined"),
        at=f"step {state.step} ({state.cursor}) with global batches of {sizes}",
    )
    return found if store is not None else replace(found, follows_data=False, meeting=None)


def _state_words(state: LoaderState) -> str:
    """Where and how a state goes on, for people and for comparing."""
    kept = {name: value for name, value in state.to_dict().items() if name != "bad"}
    digest = hashlib.sha256(json.dumps(kept, sort_keys=True, default=str).encode()).hexdigest()
    return f"epoch {state.epoch}, position {state.position} ({digest[:8]})"
