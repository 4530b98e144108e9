"""What a native loader works by at the moment: options, order, and the things made from them."""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import TYPE_CHECKING

from penstock.cache.errors import PlanError
from penstock.pipeline.feed.build import Assembly, build, check
from penstock.pipeline.feed.frozen_order import freeze_order
from penstock.pipeline.feed.membership import join_again
from penstock.pipeline.plan.lane_order import LaneOrder
from penstock.pipeline.plan.settings import order_fingerprint
from penstock.pipeline.plan.state import LoaderState, check_resumable, other_order
from penstock.pipeline.plan.world import first_slot

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from penstock.cache.job_store import JobStore
    from penstock.pipeline.feed.membership import Membership
    from penstock.pipeline.feed.position import Position
    from penstock.pipeline.options.native_options import NativeOptions
    from penstock.pipeline.plan.job_order import JobOrder
    from penstock.pipeline.plan.job_plan import JobPlan
    from penstock.pipeline.plan.settings import PlanSettings
    from penstock.pipeline.plan.steps import Cursor
    from penstock.readers.source import Source


class NativeSetup:
    """Fits a loader's assembly to the user's options, to a state and to the world.

    options: what it works by: the user's, as far as a state leaves them so. order: what these were
    frozen to. assembly: None while the world isn't known; then the options are checked only.
    """

    def __init__(
        self, dataset: Source, options: NativeOptions, position: Position, *, world_is_known: bool
    ) -> None:
        self._dataset = dataset
        self._position = position
        self.options = self._user_options = options  # as given, whatever a state says
        self._state: LoaderState | None = None  # that was loaded
        self.assembly: Assembly | None = None
        self._looked_up: tuple[JobOrder, JobPlan] | None = None
        self._is_agreed, self._agreements = False, 0  # on who reads what: now, and how often
        if world_is_known:
            self._install(build(dataset, options, position))
        else:
            self.order = check(dataset, options)

    @property
    def ready(self) -> Assembly:
        """The assembly, which is there once the world is known. Raises PlanError before."""
        if self.assembly is None:
            raise PlanError("This loader's world isn't known yet: begin with iter(loader).")
        return self.assembly

    def state(self, *, is_shared: bool = True) -> LoaderState:
        """What was handed out. is_shared: the same on all ranks; else as far as this one heard."""
        cursor, order = self._position.cursor, self.order
        if self.assembly is None and self._state is not None:  # nothing is built for it yet
            return self._state if cursor == self._state.cursor else _moved(self._state, cursor)
        bad, fingerprint = 0, None
        if self.assembly is not None:
            counted = self.assembly.road.bad_count
            bad = counted.count_before(cursor) if is_shared else counted.known
            fingerprint = self.assembly.fingerprint
        return LoaderState(
            dataset=self._dataset.contents.fingerprint,
            fingerprint=fingerprint or order.fingerprint(),
            samples=order.walk.samples,
            plan=order.settings,
            epoch=cursor.epoch,
            position=cursor.position,
            step=self.step(),
            schedule=order.walk.schedule,
            drop_last=order.walk.drop_last,
            bad=bad,
            lane_order=None if order.lane_order is None else order.lane_order.text,
        )

    def step(self) -> int | None:
        """The number of the next global batch; None where counting it would take too long."""
        try:
            return self.order.walk.step_number(self._position.cursor)
        except PlanError:
            return None

    def samples_of(self, step: int, rank: int | None) -> NDArray[np.int64]:
        """Ids of a global batch by its number, in the order of its slots; rank: of one rank's.

        Raises PlanError for a step that isn't there, or a rank.
        """
        order, world = self.ready.order, self.options.world
        begin = order.walk.cursor_of(step)
        size = order.walk.step_size(begin)
        low, high = 0, size
        if rank is not None and not 0 <= rank < world.size:
            raise PlanError(f"rank: got {rank}, wanted one within [0, {world.size}).")
        if self._looked_up is None or self._looked_up[0] is not order:
            self._looked_up = order, order.plan()  # one of its own: a plan remembers one place
        plan = self._looked_up[1]
        if rank is not None:
            low, high = (first_slot(size, r, world.size, plan.bins) for r in (rank, rank + 1))
        rows = plan.places(begin.epoch, begin.position, size, low=low, high=high).rows
        return self._dataset.ids(rows)

    def go_back(self, start: Cursor) -> None:
        """An epoch begins there. Where that is before the place of a state, and its batches there
        were others than this loader's, those of this loader count from there on.

        Raises what building raises; nothing is changed then.
        """
        state, walk = self._state, self.order.walk
        begun = walk.schedule.entries[walk.schedule.history][0]
        if state is None or self.assembly is None or walk.sample(start) >= begun:
            return
        state = _moved(state, start)
        self._fit(self._user_options, state, state.plan, self.order.lane_order, warns=False)
        self._state = state

    def agree(self) -> None:
        """A pass begins: have the ranks decide which of them reads what, unless they have since
        this loader was made or given a state. Waits for the others where that matters.

        Raises what `exchange` raises; nothing is changed then.
        """
        membership = self.ready.membership
        membership.begin_pass()
        if self._is_agreed or not membership.follows_data:
            return
        self._agreements += 1
        at, number = self._position.start, self._agreements
        lane_order = membership.lane_order(self.order, self.options, at, number=number)
        self._rebuild(self.options, self.order.settings, lane_order=lane_order)
        self._is_agreed = True

    def change(self, user_options: NativeOptions) -> None:
        """Work by other options from the next pass on: for another world, with other threads.

        What is left of a restored epoch stays what it is. Raises what building raises; nothing is
        changed then.
        """
        before, state = self._user_options, self._state
        if self.assembly is not None and user_options == before:
            return
        settings = None if state is None else state.plan
        if settings is None and (user_options.world, user_options.sizes) == (
            before.world,
            before.sizes,
        ):
            settings = self.order.settings  # a plan stays, once it is made
        before_it = self.assembly
        kept = self.order.lane_order if before_it is not None else _lane_order_of(state)
        self._fit(user_options, state, settings, None if settings is None else kept)
        if state is not None and self._position.is_restored:
            membership = None if before_it is None else before_it.membership
            self._settle(state, is_new=self.ready.membership is not membership)
        self._user_options = user_options

    def rejoin(self, user_options: NativeOptions, *, step: int, store: JobStore | None) -> None:
        """Go on at a global batch of the job among other ranks; passes that have begun go on too.

        user_options: for the new world, without a batch: the job's stays. store: of the new ranks;
        without one they are compared, if the old one answers, and the order of lanes stays.
        Raises PlanError for a step that isn't known and where ranks differ, and what building and
        `exchange` raise; nothing is changed then.
        """
        state = self._state_at(step)
        options = user_options.resumed(state, warns=False)
        lane_order = _lane_order_of(state)
        order = freeze_order(self._dataset, options, state.plan, lane_order)
        old = None if self.assembly is None else self.assembly.membership.agreement
        membership = join_again(order, options, state, store=store, old=old)
        if membership.follows_data and store is not None:
            lane_order = membership.lane_order(order, options, state.cursor, number=0)
        state = replace(state, bad=membership.agreement.first_told("bad", state.bad))
        self._rebuild(
            options,
            state.plan,
            lane_order=lane_order,
            membership=membership,
            goes_on=True,
        )
        self._position.rejoin(state.cursor)
        self._settle(state, is_new=False)
        self.ready.road.bad_count.restore(state.bad, before=state.position, begins=False)
        self._state, self._user_options, self._is_agreed = state, user_options, True

    def _state_at(self, step: int) -> LoaderState:
        """The state of a job that has come to a step, as far as this rank knows it."""
        state = self._state
        if state is None or self._position.received is not None:
            state = self.state(is_shared=False)
        elif self.assembly is not None:  # the ranks may have decided since it was loaded
            decided = self.order.lane_order
            state = replace(state, lane_order=None if decided is None else decided.text)
        walk = self.order.walk if state.plan.buckets is not None else state.walk
        cursor = walk.cursor_of(step)
        bad = state.bad if cursor.epoch == state.epoch and cursor.position else 0
        if bad and self.assembly is not None:
            bad = self.assembly.road.bad_count.known_before(cursor)
        return replace(state, epoch=cursor.epoch, position=cursor.position, step=step, bad=bad)

    def resume(self, state: LoaderState) -> None:
        """Go on from a state: by its plan, behind the last batch that it counts.

        Raises ResumeError for a state of another dataset, seed or plan, and what building raises;
        nothing is changed then.
        """
        contents = self._dataset.contents
        check_resumable(
            state,
            dataset=contents.fingerprint,
            samples=contents.samples,
            wanted=self.options.wanted(),
        )
        fingerprint = order_fingerprint(contents, state.plan)
        if fingerprint != state.fingerprint:
            raise other_order(state.fingerprint, fingerprint)
        lane_order = _lane_order_of(state)
        if self.assembly is not None:
            self.assembly.membership.compare_state(state)
            self._fit(self._user_options, state, state.plan, lane_order)
        self._position.restore(state.cursor)
        if self.assembly is not None:
            self._settle(state)
        self._state, self._is_agreed = state, False

    def refuse(self, error: Exception) -> None:
        """Tell the other ranks that a state was refused here: they may wait for this one."""
        if self.assembly is not None:
            self.assembly.membership.refuse(error)

    def leave(self) -> None:
        """Let the other ranks know that the loader is closed."""
        if self.assembly is not None:
            self.assembly.membership.agreement.close()

    def stop(self) -> None:
        """Stop what runs and release it. Safe to call twice."""
        if self.assembly is not None:
            self._finalizer()

    def _fit(
        self,
        user_options: NativeOptions,
        state: LoaderState | None,
        settings: PlanSettings | None,
        lane_order: LaneOrder | None,
        *,
        warns: bool = True,
    ) -> None:
        """An assembly for what the user gave, as far as a state leaves it so."""
        options = user_options if state is None else user_options.resumed(state, warns=warns)
        self._rebuild(options, settings, lane_order=lane_order)

    def _rebuild(
        self,
        options: NativeOptions,
        settings: PlanSettings | None,
        *,
        lane_order: LaneOrder | None,
        membership: Membership | None = None,
        goes_on: bool = False,
    ) -> None:
        """Work by another assembly, if anything differs. membership: None keeps the one that there
        is, among the same ranks with the same plan. goes_on: passes that have begun do."""
        old, before = self.assembly, self.order
        is_same = old is not None and settings == before.settings
        is_same = is_same and membership is None and options.world == self.options.world
        if is_same and options == self.options and lane_order == before.lane_order:
            return
        if is_same and old is not None:
            membership = old.membership
        assembly = build(
            self._dataset,
            options,
            self._position,
            settings=settings,
            lane_order=lane_order,
            membership=membership,
        )
        assembly.order.walk.learn(before.walk)
        if old is not None:
            assembly.road.bad_count.take_over(old.road.bad_count)
        self.stop()
        self.options = options
        self._install(assembly)
        if not is_same:
            self._is_agreed, self._agreements = False, 0
        if not goes_on:
            self._position.end_passes()

    def _install(self, assembly: Assembly) -> None:
        """Take it over; the finalizer stops its feed when the loader goes, whichever way."""
        self.assembly, self.order = assembly, assembly.order
        self._finalizer = weakref.finalize(self, assembly.feed.close)
        self._finalizer.atexit = False  # the feed has a hook of its own, in the right order

    def _settle(self, state: LoaderState, *, is_new: bool = True) -> None:
        """Go to the place of a state. is_new: all ranks do so now."""
        self.order.walk.know(state.cursor, state.step)
        self._position.settle(self.order.walk)
        if is_new:
            self.ready.road.bad_count.restore(state.bad)
            self.ready.membership.restart()


def _lane_order_of(state: LoaderState | None) -> LaneOrder | None:
    """The order of lanes that a state has; None is the identity. Raises ResumeError."""
    if state is None or state.lane_order is None:
        return None
    return LaneOrder.parse(state.lane_order, lanes=state.plan.lanes)


def _moved(state: LoaderState, cursor: Cursor) -> LoaderState:
    from penstock.pipeline.plan.history import moved_state  # a job's first start needs none of it

    return moved_state(state, cursor)
