"""What the loader does for a native dataset: passes over epochs, state, statistics."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any, NoReturn

from penstock.cache.errors import ClosedError, NotPicklableError, PenstockError
from penstock.cache.forks import check_process
from penstock.pipeline.feed.native_setup import NativeSetup
from penstock.pipeline.feed.position import Position
from penstock.pipeline.options.checks import check_count, check_epoch
from penstock.pipeline.plan.state import LoaderState
from penstock.pipeline.plan.steps import Cursor

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy as np
    from numpy.typing import NDArray

    from penstock.cache.job_store import JobStore
    from penstock.pipeline.feed.batch import Output
    from penstock.pipeline.feed.position import PassId
    from penstock.pipeline.options.native_options import NativeOptions
    from penstock.pipeline.plan.world import World
    from penstock.pipeline.report.statistics import Statistics
    from penstock.readers.source import Source


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
