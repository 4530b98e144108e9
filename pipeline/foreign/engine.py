"""The engine for torch datasets: it ties torch's loaders, passes and the loader's state together.

torch's DataLoader moves requests to its workers and batches back (see `torch_loaders`); nothing of
it is copied here. What was handed out is counted by a mark (see `mark`), and a pass can begin
anywhere a mark says.
"""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch.utils.data

from penstock.cache.errors import ClosedError, PenstockError
from penstock.cache.forks import watch
from penstock.pipeline.foreign.bad_tally import BadTally
from penstock.pipeline.foreign.bookmark import Bookmark
from penstock.pipeline.foreign.dataset_epoch import DatasetEpoch
from penstock.pipeline.foreign.epoch_pass import Pass
from penstock.pipeline.foreign.loader_state import (
    check_can_be_taken,
    decided,
    from_state,
    to_state,
    with_dataset_state,
)
from penstock.pipeline.foreign.planned_order import PlannedOrder, planned_order
from penstock.pipeline.foreign.setup import PassSetup
from penstock.pipeline.foreign.torch_loaders import TorchLoaders
from penstock.pipeline.foreign.torch_order import TorchOrder
from penstock.pipeline.options.checks import check_epoch
from penstock.pipeline.report.meter import Meter

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.pipeline.foreign.augmenter import Augmenter
    from penstock.pipeline.foreign.index_order import IndexOrder
    from penstock.pipeline.foreign.mark import Mark
    from penstock.pipeline.foreign.ranks import JoinRanks, Ranks
    from penstock.pipeline.options.foreign_options import ForeignOptions
    from penstock.pipeline.plan.world import World
    from penstock.pipeline.report.statistics import Statistics


class ForeignEngine:
    """Hands out batches of a torch dataset. The loader's facade forwards to it.

    shards_itself: Penstock orders the samples and shares them out over the ranks.
    """

    def __init__(
        self, dataset: Any, options: ForeignOptions, *, join_ranks: JoinRanks | None = None
    ) -> None:
        """join_ranks: what finds the loader's place among the job's ranks, and compares it."""
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
        self._join_ranks = join_ranks
        self._ranks: Ranks | None = None
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

    def take_over(self, options: ForeignOptions) -> None:
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
        if self.shards_itself and self._ranks is None and self._join_ranks is not None:
            self._ranks = self._join_ranks(self._setup, self.meter)

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
            mark = decided(setup, mark, keeps_workers=self.keeps_workers)
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


def _order_of(dataset: Any, options: ForeignOptions) -> IndexOrder | None:
    """The order of a map-style dataset: Penstock's with a seed, else torch's; None for a stream."""
    if isinstance(dataset, torch.utils.data.IterableDataset):
        return None
    if options.seed is not None:
        return planned_order(dataset, options.torch_options, options.own, world=options.world)
    generator = options.torch_options.generator
    return TorchOrder(options.indices, generator, is_numbered=options.own.augment is not None)


def _augmenter_of(options: ForeignOptions) -> Augmenter | None:
    """What augments the images of batches; None where nothing does."""
    if options.own.augment is None:
        return None
    from penstock.pipeline.foreign.augmenter import make_augmenter

    return make_augmenter(options)
