"""Run a loader over a native dataset: passes over epochs, state, rejoining, statistics.

`NativeEngine` serves the loader's facade. It holds the current options, and the order and the
assembly that were built from them, and rebuilds them for a state or another world.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import time
import weakref
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from penstock.cache import (
    ClosedError,
    ConfigError,
    NotPicklableError,
    PenstockError,
    PlanError,
    check_process,
)
from penstock.pipeline.feed.assembly import Assembly, build_assembly, checked_order
from penstock.pipeline.feed.frozen_order import freeze_order
from penstock.pipeline.feed.position import Position
from penstock.pipeline.options import check_count, check_epoch
from penstock.pipeline.plan import Cursor, WeightSettings, first_slot
from penstock.readers import reweighted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import numpy as np
    from numpy.typing import NDArray

    from penstock.cache import JobStore
    from penstock.pipeline.feed.batch import Output
    from penstock.pipeline.feed.position import PassId
    from penstock.pipeline.members import Membership
    from penstock.pipeline.options import LoaderOptions
    from penstock.pipeline.plan import (
        JobOrder,
        JobPlan,
        LaneOrder,
        LoaderState,
        PlanSettings,
        World,
    )
    from penstock.pipeline.report import Statistics
    from penstock.readers import Source


class NativeEngine:
    """Delivers the batches of a dataset or another source. The loader's facade forwards to it.

    Its `Position` holds how far the user is. options: those in use: the user's, as overridden by a
    state. order: the order frozen from them. world_is_known: the options have the final world;
    otherwise they are only checked, and `take_over` builds the assembly.
    """

    shards_itself = True

    def __init__(self, dataset: Source, options: LoaderOptions, *, world_is_known: bool) -> None:
        self.dataset = dataset
        self.has_begun = False  # a batch was delivered
        self.closed = False  # close() was called
        self._pid = os.getpid()
        self._position = Position()
        self.options = self._user_options = options  # the user's aren't overridden by a state
        self._state: LoaderState | None = None  # the loaded one
        self._assembly: Assembly | None = None
        self._samples_plan: tuple[JobOrder, JobPlan] | None = None
        self._is_agreed = False  # the ranks have agreed on their lanes
        if world_is_known:
            self._install(build_assembly(dataset, options, self._position))
        else:
            self.order = checked_order(dataset, options)

    def __getstate__(self) -> NoReturn:
        """Always raises NotPicklableError."""
        raise NotPicklableError(
            "A DataLoader over a native dataset can't be pickled (or deep-copied): its threads "
            "and DALI's belong to this process. Pickle its dataset and its state_dict(), and make "
            'the loader where it is used: with a trainer that spawns (strategy="ddp_spawn"), in '
            "train_dataloader()."
        )

    @property
    def assembly(self) -> Assembly:
        """The parts that make batches. Raises PlanError while the world isn't known."""
        if self._assembly is None:
            raise PlanError("This loader's world isn't known yet: begin with iter(loader).")
        return self._assembly

    @property
    def batch_size(self) -> int:
        """The largest rank's batch size at the beginning of the next pass; a state may set it."""
        if (buckets := self.order.settings.buckets) is not None:
            return self.world.share(buckets.batch, buckets.bins)
        return self.options.rank_share(self.order.walk.full_size(self._position.start))

    @property
    def world(self) -> World:
        """The world for which batches are made, as far as it is known."""
        return self.options.world

    def __len__(self) -> int:
        """Return the batches of the whole current epoch on this rank, which all ranks have."""
        return self.order.walk.left(Cursor(self.epoch, 0))

    # -- passes

    def begin(self) -> Iterator[Output]:
        """Begin a pass over the current epoch, at its start or at a restored position.

        Nothing is consumed before the first next(), because some trainers call iter() an extra time
        without iterating.
        """
        self._check_open()
        self._agree()
        self.assembly.runner.start(self._position.request_pass())
        return _PassIterator(self)

    def begin_pass(self) -> PassId:
        """Move to the beginning of a pass, and end the passes before it."""
        self._check_open()
        self._begin_epoch(self._position.start)
        return self._position.begin_pass()

    def deliver(self, pass_id: PassId, *, step_s: float) -> Output | None:
        """Return the next batch of a pass; None when its epoch is over. step_s: the time that the
        training loop spent on the batch before."""
        self._check_open()
        assembly, position = self._assembly or self.assembly, self._position
        assembly.pipeline.meter.step_s += step_s
        assembly.runner.check()
        if position.is_over(pass_id):
            return None
        position.check(pass_id)
        assembly.membership.meet(has_begun=self.has_begun)
        output = assembly.runner.next_output()
        self.has_begun = True
        return output

    def _agree(self) -> None:
        """Agree with the other ranks on the lanes that each reads, when a pass begins.

        It does nothing if they have agreed since the loader was made or got a state. It waits for
        the other ranks if the lanes follow the data. Raises the errors of the exchange; the engine
        is then unchanged.
        """
        membership = self.assembly.membership
        membership.begin_pass()
        if self._is_agreed or not membership.follows_data:
            return
        from penstock.pipeline.members import agreed_lane_order

        lane_order = agreed_lane_order(membership, self.order, self._position.start)
        self._rebuild(self.options, self.order.settings, lane_order)
        self._is_agreed = True

    def _begin_epoch(self, start: Cursor) -> None:
        """Use this loader's batch sizes from a cursor on, if it lies before the state's position.

        The state's history has the batch sizes before its position, which may differ from this
        loader's. Raises the errors of building; the engine is then unchanged.
        """
        state, walk = self._state, self.order.walk
        begun = walk.schedule.entries[walk.schedule.history][0]
        if state is None or self._assembly is None or walk.sample(start) >= begun:
            return
        state = state.moved(start)
        options = self._user_options.resumed(state, warns=False)
        self._rebuild(options, state.plan, self.order.lane_order)
        self._state = state

    # -- epochs and state

    @property
    def epoch(self) -> int:
        """The epoch of the next batch. It changes when the last batch of an epoch is delivered."""
        return self._position.cursor.epoch

    def set_epoch(self, epoch: int) -> None:
        """Move to the start of an epoch. The current epoch keeps a restored position.

        Raises ConfigError for a negative epoch.
        """
        check_epoch(epoch)
        if int(epoch) != self.epoch:
            self._begin_epoch(Cursor(int(epoch), 0))
        self._position.set_epoch(int(epoch))

    def state_dict(self) -> dict[str, Any]:
        """Return the state as JSON types, under 10 kB. It is the same on every rank."""
        check_process(self._pid, "This loader")
        return self._state_here().to_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue exactly after the last batch that the saved loader delivered.

        The state's plan applies (seed, lanes, window); the world and the batch size may differ.
        Raises ResumeError for a state of another dataset, seed, plan or version; the loader is then
        unchanged.
        """
        self._check_open()
        from penstock.pipeline.plan import LoaderState

        try:
            self._resume(LoaderState.from_dict(state))
        except PenstockError as error:
            if self._assembly is not None:  # the other ranks may wait for this one
                self._assembly.membership.refuse(error)
            raise

    def _resume(self, state: LoaderState) -> None:
        """Continue from a state, with its plan, after the last batch that it counts.

        Raises ResumeError for a state of another dataset, seed or plan, and the errors of building;
        the engine is then unchanged.
        """
        lane_order = state.check(self.dataset.contents, wanted=self.options.wanted())
        if self._assembly is not None:
            self._assembly.membership.compare_state(_describe(state))
            options = self._user_options.resumed(state)
            self._rebuild(options, state.plan, lane_order)
        self._position.restore(state.cursor)
        if self._assembly is not None:
            self._settle(state)
        self._state, self._is_agreed = state, False

    def _state_here(self, *, is_shared: bool = True) -> LoaderState:
        """Return the state at the user's position.

        is_shared: with the count of bad samples on which all ranks agree; otherwise with the count
        that this rank read last.
        """
        cursor, order = self._position.cursor, self.order
        if self._assembly is None and self._state is not None:  # the world isn't known yet
            return self._state if cursor == self._state.cursor else self._state.moved(cursor)
        bad, fingerprint = 0, None
        if self._assembly is not None:
            counted = self._assembly.pipeline.bad_count
            bad = counted.count_before(cursor) if is_shared else counted.known
            fingerprint = self._assembly.fingerprint
        from penstock.pipeline.plan import LoaderState  # not needed for batches

        return LoaderState(
            dataset=self.dataset.contents.fingerprint,
            fingerprint=fingerprint or order.fingerprint(),
            samples=order.walk.samples,
            plan=order.settings,
            epoch=cursor.epoch,
            position=cursor.position,
            step=self._known_step(),
            schedule=order.walk.schedule,
            drop_last=order.walk.drop_last,
            bad=bad,
            lane_order=None if order.lane_order is None else order.lane_order.text,
        )

    def _known_step(self) -> int | None:
        """Return the number of the next global batch; None if counting it would take too long."""
        try:
            return self.order.walk.step_number(self._position.cursor)
        except PlanError:
            return None

    # -- steps of the job

    @property
    def step(self) -> int:
        """The number of the next global batch, counted from the job's start.

        Raises PlanError while the world isn't known, and if counting it would take too long.
        """
        return self.assembly.order.walk.step_number(self._position.cursor)

    def samples_of(self, step: int, *, rank: int | None = None) -> NDArray[np.int64]:
        """Return the ids of a global batch by its number, in the order of its slots.

        rank: only this rank's ids. Raises PlanError for a step or a rank that doesn't exist.
        """
        self._check_open()
        step = check_count("step", step, least=0)
        order, world = self.assembly.order, self.options.world
        begin = order.walk.cursor_of(step)
        size = order.walk.step_size(begin)
        if self._samples_plan is None or self._samples_plan[0] is not order:
            self._samples_plan = order, order.plan()  # separate, as a plan caches one position
        plan, low, high = self._samples_plan[1], 0, size
        if rank is not None:
            if check_count("rank", rank, least=0) >= world.size:
                raise PlanError(f"rank: got {rank}, wanted one within [0, {world.size}).")
            low, high = (first_slot(size, r, world.size, plan.bins) for r in (rank, rank + 1))
        rows = plan.places(begin.epoch, begin.position, size, low=low, high=high).rows
        return self.dataset.ids(rows)

    def skip(self, steps: int) -> None:
        """Skip a number of global batches.

        Raises ConfigError for a negative number, and PlanError if counting would take too long.
        """
        self._check_open()
        steps = check_count("steps", steps, least=0)
        if steps:
            self._position.skip_to(self.assembly.order.walk.cursor_of(self.step + steps))

    def set_weights(self, weights: object, *, step: int | None) -> None:
        """Change the weights of a mixture's parts from a global batch on. Passes continue.

        It waits for the other ranks. Raises ConfigError for a dataset that is no mixture and for
        invalid weights, PlanError for a step that was delivered and if the ranks differ, and the
        errors of the exchange; the engine is then unchanged.
        """
        self._check_open()
        self._change_weights("set_weights", lambda: self._weight_change(weights, step=step))

    def _weight_change(self, weights: object, *, step: int | None) -> _WeightChange:
        """Return the change to other weights of parts. Raises as `set_weights`."""
        settings, walk = self.order.settings, self.order.walk
        mixture = self.dataset.contents.mixture
        if mixture is None or settings.mixture is None:
            raise ConfigError(
                f"set_weights: {self.dataset!r} is no mixture, which penstock.mix makes."
            )
        here = self.step
        step = here if step is None else check_count("step", step, least=0)
        if step < here:
            raise PlanError(
                f"set_weights: step {step:,} was delivered; the next one is {here:,}. Pass "
                "that step or a later one, the same on every rank."
            )
        shares = mixture.shares_of(weights)
        sample = walk.change_sample(walk.cursor_of(step))
        parts = settings.mixture.with_weights(mixture, shares, sample=sample)
        mixture.check_repeats(parts.samples, parts.stream(mixture))
        words = f"{weights!r:.200} from step {step:,} on"
        return _WeightChange(self.dataset, replace(settings, mixture=parts), parts.text, words)

    def set_sample_weights(self, weights: object) -> None:
        """Change the weights of the samples from the next epoch on. Passes continue.

        It waits for the other ranks. Raises ConfigError for a mixture and for invalid weights,
        PlanError for a job that isn't shuffled and if the ranks differ, and the errors of the
        exchange; the engine is then unchanged.
        """
        self._check_open()
        if self._assembly is None and self._state is None and not self._position.cursor.epoch:
            dataset = self._sample_weight_change(weights).dataset
            self.order = checked_order(dataset, self.options)  # the world isn't known yet
            self.dataset = dataset
            return
        self._change_weights("set_sample_weights", lambda: self._sample_weight_change(weights))

    def _sample_weight_change(self, weights: object) -> _WeightChange:
        """Return the change to other weights of samples. Raises as `set_sample_weights`."""
        settings, cursor = self.order.settings, self._position.cursor
        before, first = settings.weights, cursor.epoch + (cursor.position > 0)
        WeightSettings.check_shuffle(settings.shuffle)
        current = None if before is None else before.name_in(cursor.epoch)
        dataset = reweighted(self.dataset, weights, is_first=not first, keeps=current)
        known = dataset.contents.weights
        assert known is not None
        if before is None:
            before = WeightSettings(samples=known.samples, changes=((0, known.first),))
        changed = before.changed(first, known.latest)
        words = f"{known.latest[:12]} (the hash of an array) from epoch {first} on"
        return _WeightChange(dataset, replace(settings, weights=changed), repr(changed), words)

    def _change_weights(self, call: str, make: Callable[[], _WeightChange]) -> None:
        """Continue with other weights, of which all ranks agree. call: the user's, for messages."""
        membership = self.assembly.membership
        try:
            change = make()
        except Exception as error:  # of any kind, as the other ranks wait for this one
            membership.refuse_weights(error)
            raise
        membership.agree_on_weights(call, change.text, change.words)
        cursor, number, lanes = self._position.cursor, self._known_step(), self.order.lane_order
        self._rebuild(self.options, change.settings, lanes, membership, change.dataset)
        self.order.walk.know(cursor, number)
        if self._state is not None:
            fingerprint = self.assembly.fingerprint
            self._state = replace(self._state, plan=change.settings, fingerprint=fingerprint)

    def rejoin(self, user_options: LoaderOptions, *, step: int, store: JobStore | None) -> None:
        """Continue at a global batch of the job among other ranks. Passes that have begun continue.

        user_options: for the new world, without a batch size, because the job's applies. store: of
        the new ranks. Without one, the ranks are compared through the old store if it answers, and
        the lane order stays. Raises PlanError for an unknown step or if ranks differ, and the
        errors of building and of the exchange; the engine is then unchanged.
        """
        self._check_open()
        state = self._state_at(step)
        options = user_options.resumed(state, warns=False)
        lane_order = state.parsed_lane_order()
        order = freeze_order(self.dataset, options, state.plan, lane_order)
        old = None if self._assembly is None else self._assembly.membership
        from penstock.pipeline.members import agreed_lane_order, rejoin_ranks

        membership = rejoin_ranks(order, options, state, store=store, old=old)
        if membership.follows_data:
            lane_order = agreed_lane_order(membership, order, state.cursor)
        state = replace(state, bad=membership.first_value("bad", state.bad))
        self._rebuild(options, state.plan, lane_order, membership, self.dataset)
        self._position.rejoin(state.cursor)
        self._settle(state, is_new=False)
        self.assembly.pipeline.bad_count.restore(state.bad, before=state.position, begins=False)
        self._state, self._user_options, self._is_agreed = state, user_options, True

    def _state_at(self, step: int) -> LoaderState:
        """Return the state of the job at a step, as this rank knows it."""
        state = self._state
        if state is None or self._position.received is not None:
            state = self._state_here(is_shared=False)
        elif self._assembly is not None:  # the ranks may have agreed since it was loaded
            decided = self.order.lane_order
            state = replace(state, lane_order=None if decided is None else decided.text)
        walk = self.order.walk if state.plan.buckets is not None else state.walk
        cursor = walk.cursor_of(step)
        bad = state.bad if cursor.epoch == state.epoch and cursor.position else 0
        if bad and self._assembly is not None:
            bad = self._assembly.pipeline.bad_count.known_before(cursor)
        return replace(state, epoch=cursor.epoch, position=cursor.position, step=step, bad=bad)

    def epoch_batches(self) -> Iterator[list[int]]:
        """Yield the sample ids of each batch that this rank gets in the whole current epoch."""
        return self.order.batches(self.epoch, self.world)

    def epoch_samples(self) -> int:
        """Return the number of samples in all `epoch_batches`."""
        return self.order.samples(self.epoch, self.world)

    def statistics(self) -> Statistics:
        """Return the measurements so far, with their verdict."""
        return self.assembly.pipeline.meter.snapshot()

    # -- the options in use

    def take_over(self, user_options: LoaderOptions) -> None:
        """Use other options from the next pass on, for example for another world.

        The rest of a restored epoch keeps its samples. Raises the errors of building; the engine is
        then unchanged.
        """
        self._check_open()
        before, state = self._user_options, self._state
        if self._assembly is not None and user_options == before:
            return
        settings = None if state is None else state.plan
        is_same = user_options.world == before.world and user_options.schedule == before.schedule
        if settings is None and is_same:
            settings = self.order.settings  # a plan doesn't change once it is made
        parts, own = self.order.settings.mixture, self.order.settings.weights
        was_set = bool(parts and parts.changes) or bool(own and len(own.changes) > 1)
        if settings is None and was_set:
            raise PlanError(
                "Weights were set before this loader had its world and its batches, which have "
                "changed since. Set them when the first pass has begun."
            )
        old = self._assembly
        kept = None if state is None else state.parsed_lane_order()
        kept = kept if old is None else self.order.lane_order
        options = user_options if state is None else user_options.resumed(state)
        self._rebuild(options, settings, None if settings is None else kept)
        if state is not None and self._position.is_restored:
            membership = None if old is None else old.membership
            self._settle(state, is_new=self.assembly.membership is not membership)
        self._user_options = user_options

    def _rebuild(
        self,
        options: LoaderOptions,
        settings: PlanSettings | None,
        lane_order: LaneOrder | None,
        membership: Membership | None = None,
        dataset: Source | None = None,
    ) -> None:
        """Replace the assembly if anything differs.

        membership: None keeps the existing one for the same ranks and the same plan. dataset: with
        which passes that have begun continue, perhaps with other weights; None ends them.
        """
        old, before, at = self._assembly, self.order, self._position
        is_same = old is not None and settings == before.settings
        is_same = is_same and membership is None and options.world == self.options.world
        if is_same and options == self.options and lane_order == before.lane_order:
            return
        if is_same and old is not None:
            membership = old.membership
        source = self.dataset if dataset is None else dataset
        assembly = build_assembly(source, options, at, settings, lane_order, membership)
        assembly.order.walk.learn(before.walk)
        if old is not None:
            assembly.pipeline.bad_count.take_over(old.pipeline.bad_count)
            assembly.pipeline.meter.take_over(old.pipeline.meter)
            self._finalizer()
        self.options, self.dataset = options, source
        self._install(assembly)
        if not is_same:
            self._is_agreed = False
        if dataset is None:
            at.end_passes()

    def _install(self, assembly: Assembly) -> None:
        """Use an assembly; its runner is stopped when the loader is closed or collected."""
        self._assembly, self.order = assembly, assembly.order
        self._finalizer = weakref.finalize(self, assembly.runner.close)
        self._finalizer.atexit = False  # the runner has an exit hook, which runs in the right order

    def _settle(self, state: LoaderState, *, is_new: bool = True) -> None:
        """Move to the position of a state. is_new: all ranks do so now."""
        self.order.walk.know(state.cursor, state.step)
        self._position.normalise(self.order.walk)
        if is_new:
            self.assembly.pipeline.bad_count.restore(state.bad)
            self.assembly.membership.restart()

    # -- life

    def close(self) -> None:
        """Stop the threads, drop the batches in flight and release DALI. Safe to call twice."""
        self.closed = True
        if self._assembly is not None:
            self._assembly.membership.close()
            self._finalizer()

    def _check_open(self) -> None:
        check_process(self._pid, "This loader")
        if self.closed:
            raise ClosedError("This loader is closed; make a new one.")

    def __repr__(self) -> str:
        return (
            f"DataLoader({self.dataset!r}, batch_size={self.batch_size}, rank {self.world.rank} of "
            f"{self.world.size}, device={str(self.options.device)!r}, at {self._position.cursor})"
        )


class _WeightChange(NamedTuple):
    """A change of weights. dataset: with the weights of its samples. settings: of the plan from now
    on. text: of the change, which all ranks make alike. words: for the user."""

    dataset: Source
    settings: PlanSettings
    text: str
    words: str


def _describe(state: LoaderState) -> str:
    """Return where and how a state continues, as text to show and to compare."""
    kept = {name: value for name, value in state.to_dict().items() if name != "bad"}
    digest = hashlib.sha256(json.dumps(kept, sort_keys=True, default=str).encode()).hexdigest()
    return f"epoch {state.epoch}, position {state.position} ({digest[:8]})"


class _PassIterator:
    """One pass over an epoch. It keeps the engine alive in `for x in DataLoader(...)`."""

    def __init__(self, engine: NativeEngine) -> None:
        self._engine = engine
        self._begun: PassId | None = None
        self._handed_out = math.inf  # when the training loop received a batch

    def __iter__(self) -> _PassIterator:
        return self

    def __len__(self) -> int:
        return len(self._engine)

    def __next__(self) -> Output:
        step_s, self._handed_out = time.perf_counter() - self._handed_out, math.inf
        self._begun = self._begun or self._engine.begin_pass()
        batch = self._engine.deliver(self._begun, step_s=max(0.0, step_s))
        if batch is None:
            raise StopIteration
        self._handed_out = time.perf_counter()
        return batch
