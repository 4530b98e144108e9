"""Run a loader over a torch dataset: tie torch's loaders, passes and the state together.

torch's DataLoader carries requests to its workers and batches back (`torch_loaders`); nothing of it
is copied here. A mark counts what was delivered (`mark`), and a pass can begin anywhere a mark
says. The loader's state is written from a mark, and refused where it doesn't fit this loader.
"""

from __future__ import annotations

import warnings
import weakref
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch.utils.data

from penstock.cache import (
    ClosedError,
    ConfigError,
    PenstockError,
    PenstockWarning,
    ResumeError,
    watch,
)
from penstock.pipeline.options import check_epoch
from penstock.pipeline.plan import not_a_torch_state
from penstock.pipeline.report import Meter
from penstock.pipeline.torch_data.epoch_pass import Bookmark, DatasetEpoch, Pass
from penstock.pipeline.torch_data.index_order import PlannedOrder, TorchOrder, planned_order
from penstock.pipeline.torch_data.mark import Mark, WorkerPosition, length_of
from penstock.pipeline.torch_data.pass_setup import PassSetup
from penstock.pipeline.torch_data.random_states import NAMES, freeze
from penstock.pipeline.torch_data.sample_faults import BadTally
from penstock.pipeline.torch_data.torch_loaders import TorchLoaders
from penstock.pipeline.torch_data.worker import fresh_seed

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.pipeline.options import TorchDataOptions
    from penstock.pipeline.plan import World
    from penstock.pipeline.report import Statistics
    from penstock.pipeline.torch_data.augmenter import Augmenter
    from penstock.pipeline.torch_data.index_order import IndexOrder
    from penstock.pipeline.torch_data.job_ranks import JobRanks

STATE_VERSION = 1


def to_state(setup: PassSetup, mark: Mark) -> dict[str, Any]:
    """The state at a mark: JSON types, but for states of the user's own dataset and sampler."""
    return {
        "version": STATE_VERSION,
        "kind": "torch",
        **_identity(setup),
        "drop_last": setup.options.torch_options.drop_last,
        "streams": setup.streams,
        "draw_seed": None if setup.augmenter is None else setup.augmenter.seed,
        "mark": _shared_mark(setup, mark).to_dict(),
    }


def _shared_mark(setup: PassSetup, mark: Mark) -> Mark:
    """The mark as all ranks have it: they don't count bad samples together."""
    return mark if setup.world.size == 1 else replace(mark, bad=0)


def from_state(setup: PassSetup, state: Any) -> Mark:
    """The mark of a state. Raises ResumeError for what `to_state` didn't write for this loader."""
    if not isinstance(state, dict) or state.get("kind") != "torch":
        raise not_a_torch_state(state)
    if state.get("version") != STATE_VERSION:
        raise ResumeError(
            f"State version {state.get('version')!r} can't be read: this Penstock writes and "
            f"reads version {STATE_VERSION}. Resume with the release that wrote it."
        )
    for name, here in _identity(setup).items():
        saved = state.get(name)
        if saved != here:
            raise ResumeError(
                f"State was saved with {name}={saved!r}, this loader has {name}={here!r}, "
                "which gives other batches. Build the loader as it was, or start without a state."
            )
    mark = Mark.from_dict(state.get("mark"))
    is_tied = setup.order is None or any(worker.state for worker in mark.workers)
    if is_tied and state.get("streams") != setup.streams:
        raise ResumeError(
            f"State was saved with num_workers={state.get('streams')}, this loader has "
            f"num_workers={setup.num_workers}: each worker goes through a part of the "
            f"dataset of its own, and the parts would shift. Pass the saved num_workers."
        )
    saved = state.get("drop_last")
    return _with_ends_of(setup, mark, saved=saved) if isinstance(saved, bool) else mark


def _with_ends_of(setup: PassSetup, mark: Mark, *, saved: bool) -> Mark:
    """The mark in a loader whose epochs may end otherwise than those of the saved job: it warns, as
    for native datasets, and the next epoch begins where this one has nothing left.

    saved: that job's drop_last.
    """
    here = bool(setup.options.torch_options.drop_last)
    rest = setup.last_samples()
    if saved == here or rest == 0:
        return mark
    these = "last samples, fewer than a batch," if rest is None else f"last {rest} samples,"
    change = f"leaves out its {these} which the saved job handed out"
    if saved:
        change = f"ends with its {these} which the saved job left out"
    warnings.warn(
        f"State was saved with drop_last={saved}, this loader has drop_last={here}: the batches "
        f"before an epoch's end stay the same, but each epoch now {change}. For the same epochs "
        f"pass drop_last={saved}.",
        PenstockWarning,
        stacklevel=5,
    )
    return setup.after(mark) if setup.order is not None and setup.order.is_over(mark) else mark


def _identity(setup: PassSetup) -> dict[str, Any]:
    """What a state must agree with, and what differs where it doesn't."""
    options, order = setup.options, setup.order
    is_torchs = options.seed is None or order is None
    return {
        "style": "iterable" if order is None else "map",
        "order": "torch" if is_torchs else "penstock",
        "seed": options.seed,
        "samples": length_of(setup.dataset),
        "batch_size": options.batch_size if is_torchs else None,
        "drawn_by": None if order is None else order.name,
    }


def check_can_be_taken(setup: PassSetup, mark: Mark) -> None:
    """Raise ConfigError where no state can say what was handed out, or how to repeat it."""
    if not setup.options.workers.in_order:
        raise ConfigError(
            "in_order=False hands batches out as they come, so no position tells which ones were "
            "handed out, and a state can't be taken. Pass in_order=True."
        )
    if mark.mixed is not None:
        name = NAMES.get(mark.mixed, mark.mixed)
        raise ConfigError(
            f"The sampler draws from {name} batch by batch, and others drew from it in between, so "
            "no state can repeat its order. Let it draw all of an epoch's indices first, or from a "
            "generator of its own that its state_dict() and load_state_dict() keep, or pass seed= "
            "in place of a sampler."
        )


def with_decided_draws(setup: PassSetup, mark: Mark, *, keeps_workers: bool) -> Mark:
    """The mark of an epoch that begins, with what the epoch will be drawn from.

    Drawn now instead of when the pass begins, and in torch's order: nothing else changes.
    keeps_workers: persistent ones were seeded long ago.
    """
    generator = setup.own_generator()
    if generator is not None and mark.generator is None:
        mark = replace(mark, generator=freeze(generator.get_state()))
    if (
        setup.options.torch_options.generator is None
        and mark.base_seed is None
        and not keeps_workers
    ):
        mark = replace(mark, base_seed=fresh_seed())
    return mark if setup.order is None else setup.order.decided(mark)


def with_dataset_state(setup: PassSetup, mark: Mark, source: Any, *, is_live: bool) -> Mark:
    """The mark with the state, just behind the last batch, of a dataset that is read here.

    Workers send theirs with their batches. source: of the latest pass. is_live: whether that is
    under way.
    """
    if setup.num_workers or source is None:
        return mark
    if setup.order is None:
        if source.mixed is not None:
            _warn_of_mixed(setup, source.mixed)
        position = source.position(mark.batches, is_live=is_live)
        return mark if position is None else replace(mark, workers=(position,))
    state = source.state()
    if not state:
        return mark
    return replace(mark, workers=(WorkerPosition(batches=mark.batches, state=state),))


def _warn_of_mixed(setup: PassSetup, name: str) -> None:
    warnings.warn(
        f"{type(setup.dataset).__name__} draws from {NAMES[name]} as it is read, and others drew "
        "from it in between. After a resume its random numbers differ, and so do its samples if "
        "it draws their order there: give it a generator of its own that its state_dict() keeps, "
        "or num_workers=1.",
        PenstockWarning,
        stacklevel=5,
    )


class TorchEngine:
    """Hands out batches of a torch dataset. The loader's facade forwards to it.

    shards_itself: Penstock orders the samples and shares them out over the ranks.
    """

    def __init__(self, dataset: Any, options: TorchDataOptions) -> None:
        augmenter = _augmenter_of(options)
        order = _order_of(dataset, options)
        # Replaced when the loader works by other options: a pass takes those of its beginning.
        self._setup = PassSetup(dataset=dataset, options=options, order=order, augmenter=augmenter)
        self.shards_itself = isinstance(order, PlannedOrder)
        self.meter = Meter(
            decode_threads=0 if augmenter is None else augmenter.threads,
            device=str(options.device),
            workers=self._setup.num_workers,
        )
        max_bad = options.own.max_bad
        self._tally = (
            BadTally(dataset, max_bad=max_bad, meter=self.meter)
            if max_bad is not None and self.shards_itself
            else None
        )
        self._ranks: JobRanks | None = None
        self._join()
        self._bookmark = Bookmark()
        self._loaders = TorchLoaders()
        self._dataset_epoch = DatasetEpoch(dataset)
        self._latest: weakref.ref[Pass] | None = None
        self._closed = False
        watch(self)

    def disown(self) -> None:
        """Leave passes and workers to the parent, in a forked child; new ones may begin."""
        self._loaders.disown()
        self._latest = None

    def take_over(self, options: TorchDataOptions) -> None:
        """Work by other options from the next pass on: for another world, with other workers.

        Raises ConfigError and PlanError for what doesn't fit; the engine is then unchanged.
        """
        before = self._setup
        order, augmenter = before.order, before.augmenter
        has_moved = options.world != before.world
        if has_moved or isinstance(order, TorchOrder):
            order = _order_of(before.dataset, options)
        if has_moved and augmenter is not None:
            stale, augmenter = augmenter, _augmenter_of(options)
            stale.close()
        self._setup = replace(before, options=options, order=order, augmenter=augmenter)
        if has_moved:
            self._ranks = None
            self._join()

    def _join(self) -> None:
        """Have a place among the job's ranks, if there is any by now. Raises PlanError."""
        if self.shards_itself and self._ranks is None and self.world.processes > 1:
            # A process that is alone needs none of it.
            from penstock.pipeline.torch_data.job_ranks import JobRanks

            self._ranks = JobRanks.join(self._setup, self.meter)

    @property
    def world(self) -> World:
        """Rank and size that the batches are for."""
        return self._setup.world

    @property
    def batch_size(self) -> int | None:
        """The size of this rank's largest batch, where torch batches by a number."""
        return self._setup.options.batch_size

    @property
    def keeps_workers(self) -> bool:
        """Whether persistent workers were started."""
        return self._loaders.keeps_workers

    # -- passes

    def __len__(self) -> int:
        """Batches of a whole epoch on this rank. Raises TypeError if nobody knows."""
        return self._setup.length()

    def begin(self) -> Iterator[Any]:
        """A pass over the current epoch; several may run at once, as with torch."""
        self._check_open()
        self._setup.warn_if_unsharded()
        self._join()
        if self._ranks is not None:
            self._ranks.begin_pass()
        bookmark = self._bookmark
        number = bookmark.open(self._setup)
        if self._setup.augmenter is not None:
            self._setup.augmenter.drain()
        started = Pass(
            self._setup,
            number=number,
            bookmark=bookmark,
            loaders=self._loaders,
            dataset_epoch=self._dataset_epoch,
            meter=self.meter,
            tally=self._tally,
            ranks=self._ranks,
        )
        self._latest = weakref.ref(started)
        return started

    def _live_pass(self) -> Pass | None:
        """The latest pass, while it is the one whose place is the loader's."""
        live = self._latest() if self._latest is not None else None
        if live is None or live.number != self._bookmark.number or live.is_over:
            return None
        return live

    def epoch_batches(self) -> Iterator[list[int]]:
        """Indices that this rank is handed in a whole current epoch, a batch at a time."""
        order = self._setup.order
        assert isinstance(order, PlannedOrder)
        return order.batches(self.epoch)

    def epoch_samples(self) -> int:
        """Samples in all `epoch_batches`."""
        order = self._setup.order
        assert isinstance(order, PlannedOrder)
        return order.samples()

    # -- epochs and state

    @property
    def has_begun(self) -> bool:
        """Whether a batch was handed out."""
        return self._bookmark.has_begun

    @property
    def epoch(self) -> int:
        """The epoch that the next batch belongs to."""
        return self._bookmark.mark.epoch

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of an epoch; a dataset and a sampler that know epochs are told."""
        check_epoch(epoch)
        self._dataset_epoch.tell(epoch, self._setup.sampler)
        self._bookmark.go_to(int(epoch), self._setup)

    def state_dict(self) -> dict[str, Any]:
        """What was handed out. Decides what the epoch is drawn from, if that is still open."""
        setup, bookmark = self._setup, self._bookmark
        live = self._live_pass()
        mark = bookmark.mark
        if mark.batches == 0 and setup.options.seed is None and setup.options.workers.in_order:
            mark = live.mark() if live is not None else mark
            mark = with_decided_draws(setup, mark, keeps_workers=self.keeps_workers)
            bookmark.decide(mark)
            if live is not None:
                live.decide(mark)
        check_can_be_taken(setup, mark)
        if not bookmark.is_restored:
            if not mark.batches:
                mark = replace(mark, dataset_epoch=self._dataset_epoch.now())
            mark = with_dataset_state(setup, mark, bookmark.source, is_live=live is not None)
        return to_state(setup, mark)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on exactly behind the last batch that was handed out when the state was taken."""
        self._check_open()
        mark = self._mark_of(state)
        self._dataset_epoch.restore(mark.dataset_epoch)
        if self._setup.augmenter is not None and isinstance(state.get("draw_seed"), int):
            self._setup.augmenter.seed = state["draw_seed"]
        self._loaders.let_go()  # their workers stand elsewhere
        source = self._bookmark.source
        if self._setup.order is None and source is not None:
            source.forget()
        self._bookmark.restore(mark)
        if self._ranks is not None:
            self._ranks.restart()

    def _mark_of(self, state: dict[str, Any]) -> Mark:
        """The mark of a state, which all ranks load alike. Raises ResumeError, PlanError."""
        try:
            mark = from_state(self._setup, state)
            if self._ranks is not None:
                self._ranks.compare_state(mark)
        except PenstockError as error:
            if self._ranks is not None:
                self._ranks.refuse(error)
            raise
        return mark

    def statistics(self) -> Statistics:
        """What was measured so far, and the one-line verdict."""
        return self.meter.snapshot()

    # -- life

    @property
    def closed(self) -> bool:
        """Whether close() was called."""
        return self._closed

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("This loader is closed; make a new one.")

    def close(self) -> None:
        """Let torch's workers go. Safe to call twice."""
        self._closed = True
        if self._ranks is not None:
            self._ranks.close()
        live = self._latest() if self._latest is not None else None
        if live is not None:
            live.stop()
        self._loaders.let_go()
        self._bookmark.source = None
        if self._setup.augmenter is not None:
            self._setup.augmenter.close()

    def __repr__(self) -> str:
        setup, mark = self._setup, self._bookmark.mark
        return (
            f"DataLoader({type(setup.dataset).__name__}, batch_size={self.batch_size}, rank "
            f"{self.world.rank} of {self.world.size}, at epoch {mark.epoch}, batch {mark.batches})"
        )


def _order_of(dataset: Any, options: TorchDataOptions) -> IndexOrder | None:
    """The order of a map-style dataset: Penstock's with a seed, else torch's; None for a stream."""
    if isinstance(dataset, torch.utils.data.IterableDataset):
        return None
    if options.seed is not None:
        return planned_order(dataset, options.torch_options, options.own, world=options.world)
    generator = options.torch_options.generator
    return TorchOrder(options.indices, generator, is_numbered=options.own.augment is not None)


def _augmenter_of(options: TorchDataOptions) -> Augmenter | None:
    """What augments the images of batches; None where nothing does."""
    if options.own.augment is None:
        return None
    from penstock.pipeline.torch_data.augmenter import make_augmenter

    return make_augmenter(options)
