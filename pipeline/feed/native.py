"""What the loader does for a native dataset: cursor, passes, state around a run."""

from __future__ import annotations

import os
import time
import weakref
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from penstock.cache.errors import ClosedError, ConfigError, NotPicklableError, PlanError
from penstock.cache.forks import check_process
from penstock.pipeline.feed.build import (
    Built,
    build,
    check,
    make_plan,
    make_walk,
    order_fingerprint,
)
from penstock.pipeline.options.checks import check_epoch
from penstock.pipeline.plan.state import LoaderState, check_resumable, other_order
from penstock.pipeline.plan.steps import Cursor

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.pipeline.options.native_options import NativeOptions
    from penstock.pipeline.plan.state import PlanSettings
    from penstock.pipeline.plan.world import World
    from penstock.pipeline.report.statistics import Statistics
    from penstock.readers import Dataset

Batch = tuple[torch.Tensor, ...]


class NativeEngine:
    """Hands out batches of a `penstock.Dataset`. The loader's facade forwards to it.

    options: what it works by: the user's, as far as a state leaves them so. world_is_known: that of
    the options; otherwise these are checked, and nothing is built before `take_over`.
    """

    shards_itself = True

    def __init__(self, dataset: Dataset, options: NativeOptions, *, world_is_known: bool) -> None:
        self.dataset = dataset
        self.has_begun = False  # a batch was handed out
        self._pid = os.getpid()
        self.options = self._given = options  # given: by the user, whatever a state says
        self._cursor = Cursor(0, 0)
        self._restored = False
        self._iteration = 0
        self._loaded: LoaderState | None = None
        self._built: Built | None = None
        self._is_closed = False
        if world_is_known:
            self._install(build(dataset, options))
        else:
            self._frozen = check(dataset, options)
            self._walk = make_walk(dataset, options)

    def __getstate__(self) -> NoReturn:
        """Always raises NotPicklableError."""
        raise NotPicklableError(
            "A DataLoader over a native dataset can't be pickled (nor deep-copied): its threads "
            "and DALI's belong to this process. Pickle its dataset and its state_dict(), and make "
            'the loader where it is used: with a trainer that spawns (strategy="ddp_spawn"), in '
            "train_dataloader()."
        )

    @property
    def batch_size(self) -> int:
        """Of the largest rank; a state may have brought it."""
        return self.options.sizes.per_rank

    def _install(self, built: Built) -> None:
        """Take a run over; the finalizer stops it when the loader goes, whichever way."""
        self._built, self._frozen, self._walk = built, built.frozen, built.walk
        self._run_finalizer = weakref.finalize(self, built.run.close)
        self._run_finalizer.atexit = False  # the run has a hook of its own, in the right order

    def take_over(self, given: NativeOptions) -> None:
        """Work by other options from the next pass on: for another world, with other threads.

        What is left of a restored epoch stays what it is. Raises what building raises; the engine
        is then unchanged.
        """
        self._check_open()
        before = self._given
        if self._built is not None and given == before:
            return
        frozen = None if self._loaded is None else self._loaded.plan
        if frozen is None and (given.world, given.sizes) == (before.world, before.sizes):
            frozen = self._frozen  # a plan stays, once it is made
        self._build(given, self._loaded, frozen)
        self._given = given

    def _build(
        self, given: NativeOptions, state: LoaderState | None, frozen: PlanSettings | None
    ) -> None:
        """A run for what the user gave, as far as a state leaves it so."""
        options = given if state is None else given.resumed(state)
        if self._built is None or options != self.options or frozen != self._frozen:
            built = build(self.dataset, options, frozen=frozen)
            self._stop()
            self.options = options
            self._install(built)
            self._iteration += 1  # passes of the run before are over
        if state is not None and self._restored:
            self._cursor = self._walk.normalise(self._cursor)
            self._ready.run.restore_bad(state.bad)

    @property
    def _ready(self) -> Built:
        """The parts, which are there once the world is known."""
        if self._built is None:
            raise PlanError("This loader's world isn't known yet: begin with iter(loader).")
        return self._built

    @property
    def world(self) -> World:
        """Rank and size that the batches are for, as far as known."""
        return self.options.world

    def __len__(self) -> int:
        """Batches of a whole epoch on this rank; equal on all ranks."""
        return len(self._walk)

    def begin(self) -> Iterator[Batch]:
        """Begin the current epoch at its start, or at a restored position.

        Nothing is consumed before the first next(): some trainers call iter() once more to look.
        """
        self._check_open()
        self._ready.run.start(self._pass_start())
        return _Batches(self)

    def _pass_start(self) -> Cursor:
        return self._cursor if self._restored else Cursor(self._cursor.epoch, 0)

    def _begin_pass(self) -> tuple[int, int]:
        """Move to where a pass begins; (its number, its epoch)."""
        self._check_open()
        self._cursor = self._pass_start()
        self._iteration += 1
        return self._iteration, self._cursor.epoch

    def _deliver(self, iteration: int, epoch: int) -> Batch | None:
        """The batch at the cursor for the pass of that number; None when its epoch is over."""
        self._check_open()
        built = self._ready
        built.run.check()
        if self._cursor.epoch != epoch:
            return None
        if iteration != self._iteration:
            raise ConfigError(
                "This iterator was overtaken: another one of the same loader was begun, or the "
                "loader's position was set. Use one loader for each concurrent loop."
            )
        taken = built.run.take(self._cursor)
        self._cursor = taken.prepared.step.then
        self._restored = False
        self.has_begun = True
        return taken.tensors

    def _count_step(self, step_s: float) -> None:
        if self._built is not None:
            self._built.meter.step_s += step_s

    # -- epochs and state

    @property
    def closed(self) -> bool:
        """Whether close() was called."""
        return self._is_closed

    @property
    def epoch(self) -> int:
        """The epoch that the next batch belongs to; it moves on with the last batch of an epoch."""
        return self._cursor.epoch

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of an epoch. The current epoch again changes nothing, so that a restored
        position stays. Raises ConfigError for a negative epoch."""
        check_epoch(epoch)
        if epoch != self._cursor.epoch:
            self._cursor = Cursor(int(epoch), 0)
            self._restored = False
            self._iteration += 1

    def state_dict(self) -> dict[str, Any]:
        """What was handed out, as JSON types, under 1 kB. The same on every rank."""
        check_process(self._pid, "This loader")
        built = self._built
        loaded = self._loaded.bad if self._loaded is not None and self._restored else 0
        return LoaderState(
            dataset=self.dataset.index.fingerprint,
            fingerprint=order_fingerprint(self.dataset.index, self._frozen)
            if built is None
            else built.fingerprint,
            samples=self._walk.samples,
            plan=self._frozen,
            epoch=self._cursor.epoch,
            position=self._cursor.position,
            global_batch_size=self._walk.global_batch,
            drop_last=self._walk.drop_last,
            # Where nothing is built yet, nothing was handed out since the state came.
            bad=loaded if built is None else built.run.bad_before(self._cursor),
        ).to_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on exactly behind the last batch that the saved loader handed out.

        The state's plan is taken over (seed, lanes, window); the world and the batch size may
        differ.
        Raises ResumeError for a state of another dataset, seed, plan or version; the loader is then
        unchanged.
        """
        self._check_open()
        loaded = LoaderState.from_dict(state)
        index = self.dataset.index
        check_resumable(
            loaded,
            dataset=index.fingerprint,
            samples=index.samples,
            wanted={"shuffle": self.options.shuffle, **self.options.plan.spelt_out()},
        )
        fingerprint = order_fingerprint(index, loaded.plan)
        if fingerprint != loaded.fingerprint:
            raise other_order(loaded.fingerprint, fingerprint)
        before = (self._cursor, self._restored)
        self._cursor, self._restored = Cursor(loaded.epoch, loaded.position), True
        try:
            if self._built is not None:
                self._build(self._given, loaded, loaded.plan)
        except BaseException:
            self._cursor, self._restored = before
            raise
        self._loaded = loaded
        self._iteration += 1

    def epoch_batches(self) -> Iterator[list[int]]:
        """Sample ids that this rank is handed in a whole current epoch, a batch at a time."""
        walk, world = self._walk, self.world
        plan = make_plan(self.dataset.index, self._frozen)
        for step in walk.steps(Cursor(self._cursor.epoch, 0), endless=False):
            epoch, position = step.start.epoch, step.start.position
            batch = walk.global_batch
            ids = plan.ids(epoch, position, batch, rank=world.rank, world=world.size)
            yield ids.tolist()

    def epoch_samples(self) -> int:
        """Samples in all `epoch_batches`."""
        walk = self._walk
        whole, rest = divmod(walk.samples, walk.global_batch)
        mine = whole * self.world.share(walk.global_batch)
        return mine if walk.drop_last else mine + self.world.share(rest)

    def statistics(self) -> Statistics:
        """What was measured so far, and the one-line verdict."""
        return self._ready.meter.snapshot()

    # -- life

    def close(self) -> None:
        """Stop threads, drop what is in flight, release DALI. Safe to call twice."""
        self._is_closed = True
        self._stop()

    def _stop(self) -> None:
        if self._built is not None:
            self._run_finalizer()

    def _check_open(self) -> None:
        check_process(self._pid, "This loader")
        if self._is_closed:
            raise ClosedError("This loader is closed; make a new one.")

    def __repr__(self) -> str:
        return (
            f"DataLoader({self.dataset!r}, batch_size={self.batch_size}, rank {self.world.rank} of "
            f"{self.world.size}, device={str(self.options.device)!r}, at {self._cursor})"
        )


class _Batches:
    """One pass over an epoch. Holds the engine, so that `for x in DataLoader(...)` lives on."""

    def __init__(self, engine: NativeEngine) -> None:
        self._engine = engine
        self._begun: tuple[int, int] | None = None
        self._handed_out: float | None = None

    def __iter__(self) -> _Batches:
        return self

    def __len__(self) -> int:
        return len(self._engine)

    def __next__(self) -> Batch:
        if self._handed_out is not None:
            self._engine._count_step(time.perf_counter() - self._handed_out)
            self._handed_out = None
        self._begun = self._begun or self._engine._begin_pass()
        batch = self._engine._deliver(*self._begun)
        if batch is None:
            raise StopIteration
        self._handed_out = time.perf_counter()
        return batch
