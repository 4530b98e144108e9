"""Run a loader over a native dataset: passes over epochs, state, rejoining, statistics.

`NativeEngine` serves the loader's facade. `NativeSetup` holds what it works by at the moment
(options, order, and the things built from them) and rebuilds that for a state or another world.
"""

from __future__ import annotations

import os
import time
import weakref
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn

from penstock.cache import ClosedError, NotPicklableError, PenstockError, PlanError, check_process
from penstock.pipeline.feed.assembly import Assembly, build_assembly, checked_order
from penstock.pipeline.feed.frozen_order import freeze_order
from penstock.pipeline.feed.position import Position
from penstock.pipeline.members import rejoin_ranks
from penstock.pipeline.options import check_count, check_epoch
from penstock.pipeline.plan import Cursor, LaneOrder, first_slot, order_fingerprint

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy as np
    from numpy.typing import NDArray

    from penstock.cache import JobStore
    from penstock.pipeline.feed.batch import Output
    from penstock.pipeline.feed.position import PassId
    from penstock.pipeline.members import RankMembership
    from penstock.pipeline.options import NativeOptions
    from penstock.pipeline.plan import JobOrder, JobPlan, LoaderState, PlanSettings, World
    from penstock.pipeline.report import Statistics
    from penstock.readers import Source


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
            self._install(build_assembly(dataset, options, position))
        else:
            self.order = checked_order(dataset, options)

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
        from penstock.pipeline.plan import LoaderState  # no batch needs a state

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
        old = None if self.assembly is None else self.assembly.membership.channel
        membership = rejoin_ranks(order, options, state, store=store, old=old)
        if membership.follows_data and store is not None:
            lane_order = membership.lane_order(order, options, state.cursor, number=0)
        state = replace(state, bad=membership.channel.first_value("bad", state.bad))
        self._rebuild(
            options, state.plan, lane_order=lane_order, membership=membership, goes_on=True
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
        from penstock.pipeline.plan import check_resumable, other_order

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
            self.assembly.membership.channel.close()

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
        membership: RankMembership | None = None,
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
        assembly = build_assembly(
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
    from penstock.pipeline.plan import moved_state  # a job's first start needs none of it

    return moved_state(state, cursor)


class NativeEngine:
    """Hands out batches of a dataset or another source. The loader's facade forwards to it.

    Where the job is says its `Position`, what it works by its `NativeSetup`; the stages of a batch
    are in `road`. world_is_known: that of the options; otherwise these are checked, and nothing is
    built before `take_over`.
    """

    shards_itself = True

    def __init__(self, dataset: Source, options: NativeOptions, *, world_is_known: bool) -> None:
        self.dataset = dataset
        self.has_begun = False  # a batch was handed out
        self._pid = os.getpid()
        self._position = Position()
        self._setup = NativeSetup(dataset, options, self._position, world_is_known=world_is_known)
        self.closed = False  # close() was called

    def __getstate__(self) -> NoReturn:
        """Always raises NotPicklableError."""
        raise NotPicklableError(
            "A DataLoader over a native dataset can't be pickled (or deep-copied): its threads "
            "and DALI's belong to this process. Pickle its dataset and its state_dict(), and make "
            'the loader where it is used: with a trainer that spawns (strategy="ddp_spawn"), in '
            "train_dataloader()."
        )

    @property
    def options(self) -> NativeOptions:
        """The options that it works by: the user's, but for what a state overrules."""
        return self._setup.options

    @property
    def batch_size(self) -> int:
        """The batch size of the largest rank where a pass would begin now; a state may have brought
        it."""
        order = self._setup.order
        if (told := order.settings.buckets) is not None:
            return self.world.share(told.batch, told.bins)
        return self.options.sizes.share(order.walk.full_size(self._position.start))

    @property
    def world(self) -> World:
        """Rank and size that the batches are for, as far as known."""
        return self.options.world

    def take_over(self, user_options: NativeOptions) -> None:
        """Work by other options from the next pass on: for another world, with other threads.

        What is left of a restored epoch stays what it is. Raises what building raises; the engine
        is then unchanged.
        """
        self._check_open()
        self._setup.change(user_options)

    def __len__(self) -> int:
        """Batches of the whole current epoch on this rank; equal on all ranks."""
        return self._setup.order.walk.left(Cursor(self.epoch, 0))

    # -- passes

    def begin(self) -> Iterator[Output]:
        """Begin the current epoch at its start, or at a restored position.

        Nothing is consumed before the first next(): some trainers call iter() once more to look.
        """
        self._check_open()
        self._setup.agree()
        self._setup.ready.feed.start(self._position.ask())
        return _PassIterator(self)

    def begin_pass(self) -> PassId:
        """Move to where a pass begins; the ones before it are over."""
        self._check_open()
        self._setup.go_back(self._position.start)
        return self._position.begin_pass()

    def deliver(self, pass_id: PassId) -> Output | None:
        """The next batch of a pass; None when its epoch is over."""
        self._check_open()
        feed, position = self._setup.ready.feed, self._position
        feed.check()
        if position.is_over(pass_id):
            return None
        position.check(pass_id)
        self._setup.ready.membership.meet(has_begun=self.has_begun)
        output = feed.take()
        self.has_begun = True
        return output

    def count_step(self, step_s: float) -> None:
        """Count the time that the training loop had a batch."""
        if self._setup.assembly is not None:
            self._setup.assembly.road.meter.step_s += step_s

    # -- epochs and state

    @property
    def epoch(self) -> int:
        """The epoch that the next batch belongs to; it moves on with the last batch of an epoch."""
        return self._position.cursor.epoch

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of an epoch. The current epoch again changes nothing, so that a restored
        position stays. Raises ConfigError for a negative epoch."""
        check_epoch(epoch)
        if int(epoch) != self.epoch:
            self._setup.go_back(Cursor(int(epoch), 0))
        self._position.go_to(int(epoch))

    def state_dict(self) -> dict[str, Any]:
        """What was handed out, as JSON types, under 10 kB. The same on every rank."""
        check_process(self._pid, "This loader")
        return self._setup.state().to_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on exactly behind the last batch that the saved loader handed out.

        The state's plan is taken over (seed, lanes, window); the world and the batch size may
        differ.
        Raises ResumeError for a state of another dataset, seed, plan or version; the loader is then
        unchanged.
        """
        self._check_open()
        from penstock.pipeline.plan import LoaderState

        try:
            self._setup.resume(LoaderState.from_dict(state))
        except PenstockError as error:
            self._setup.refuse(error)
            raise

    @property
    def step(self) -> int:
        """The number of the next global batch, counted from the job's start.

        Raises PlanError while the world isn't known, and where counting it would take too long.
        """
        return self._setup.ready.order.walk.step_number(self._position.cursor)

    def samples_of(self, step: int, *, rank: int | None = None) -> NDArray[np.int64]:
        """Ids of the samples of a global batch by its number, past or future, in the order of its
        slots. rank: of one rank's alone. Raises ConfigError, PlanError for what isn't there."""
        self._check_open()
        step = check_count("step", step, least=0)
        return self._setup.samples_of(
            step, None if rank is None else check_count("rank", rank, least=0)
        )

    def skip(self, steps: int) -> None:
        """Go on so many global batches later. Raises ConfigError for a negative number, PlanError
        where counting them would take too long."""
        self._check_open()
        steps = check_count("steps", steps, least=0)
        if steps:
            self._position.move_to(self._setup.ready.order.walk.cursor_of(self.step + steps))

    def rejoin(self, user_options: NativeOptions, *, step: int, store: JobStore | None) -> None:
        """Go on at a global batch of the job among other ranks, in a pass that has begun too.

        Raises as `NativeSetup.rejoin`, and is then unchanged.
        """
        self._check_open()
        self._setup.rejoin(user_options, step=step, store=store)

    def epoch_batches(self) -> Iterator[list[int]]:
        """Sample ids that this rank is handed in a whole current epoch, a batch at a time."""
        return self._setup.order.batches(self.epoch, self.world)

    def epoch_samples(self) -> int:
        """Samples in all `epoch_batches`."""
        return self._setup.order.samples(self.epoch, self.world)

    def statistics(self) -> Statistics:
        """What was measured so far, and the one-line verdict."""
        return self._setup.ready.road.meter.snapshot()

    # -- life

    def close(self) -> None:
        """Stop threads, drop what is in flight, release DALI. Safe to call twice."""
        self.closed = True
        self._setup.leave()
        self._setup.stop()

    def _check_open(self) -> None:
        check_process(self._pid, "This loader")
        if self.closed:
            raise ClosedError("This loader is closed; make a new one.")

    def __repr__(self) -> str:
        return (
            f"DataLoader({self.dataset!r}, batch_size={self.batch_size}, rank {self.world.rank} of "
            f"{self.world.size}, device={str(self.options.device)!r}, at {self._position.cursor})"
        )


class _PassIterator:
    """One pass over an epoch. Holds the engine, so that `for x in DataLoader(...)` lives on."""

    def __init__(self, engine: NativeEngine) -> None:
        self._engine = engine
        self._begun: PassId | None = None
        self._handed_out: float | None = None

    def __iter__(self) -> _PassIterator:
        return self

    def __len__(self) -> int:
        return len(self._engine)

    def __next__(self) -> Output:
        if self._handed_out is not None:
            self._engine.count_step(time.perf_counter() - self._handed_out)
            self._handed_out = None
        self._begun = self._begun or self._engine.begin_pass()
        batch = self._engine.deliver(self._begun)
        if batch is None:
            raise StopIteration
        self._handed_out = time.perf_counter()
        return batch
