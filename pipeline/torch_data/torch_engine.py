"""Run a loader over a torch dataset: connect torch's loaders, passes and the state.

torch's DataLoader sends requests to its workers and receives batches (`torch_loaders`); none of its
code is copied. A mark counts what was delivered (`mark`), and a pass can begin at any mark. The
loader's state is written from a mark, and rejected if it doesn't fit this loader.
"""

from __future__ import annotations

import os
import warnings
import weakref
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch.utils.data

from penstock.cache import (
    ClosedError,
    ConfigError,
    DatasetError,
    PenstockError,
    PenstockWarning,
    ResumeError,
    watch,
)
from penstock.pipeline.feed import BadCount
from penstock.pipeline.members import Membership
from penstock.pipeline.options import check_epoch, fresh_seed
from penstock.pipeline.plan import not_a_torch_state
from penstock.pipeline.report import Meter, QuarantineFile
from penstock.pipeline.torch_data.epoch_pass import Bookmark, DatasetEpoch, Pass
from penstock.pipeline.torch_data.index_order import PlannedOrder, TorchOrder, planned_order
from penstock.pipeline.torch_data.mark import Mark, WorkerPosition, length_of
from penstock.pipeline.torch_data.occurrences import shards_by_rank
from penstock.pipeline.torch_data.pass_setup import PassSetup
from penstock.pipeline.torch_data.random_states import NAMES, freeze
from penstock.pipeline.torch_data.torch_loaders import TorchLoaders
from penstock.readers import Source

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.pipeline.options import LoaderOptions
    from penstock.pipeline.plan import World
    from penstock.pipeline.report import Statistics
    from penstock.pipeline.torch_data.augmenter import Augmenter
    from penstock.pipeline.torch_data.index_order import IndexOrder

_CHECKED_ELEMENTS = 64  # of a list or dict
_WRAPPERS_OF_SEVERAL = (
    torch.utils.data.ConcatDataset,
    torch.utils.data.ChainDataset,
    torch.utils.data.StackDataset,
)
_PART_REMEDY = (
    "pass dataset.subset(ids), or a part of dataset.split(0.9, 0.1, seed=0), to the DataLoader"
)
_SEVERAL_REMEDY = (
    "pass penstock.concat([a, b]) to one DataLoader to read them end to end, or make one "
    "DataLoader per dataset"
)


def check_dataset(dataset: Any) -> None:
    """Raise ConfigError if this isn't a dataset, DatasetError if it holds a native one.

    Torch datasets pass, and objects with samples by index, as with torch.
    """
    if isinstance(dataset, str | bytes | os.PathLike):
        shown = os.fsdecode(dataset)
        raise ConfigError(
            f"dataset: got the path {shown!r}, wanted a dataset. Pass "
            f"DataLoader(Dataset({shown!r}), ...), with penstock's Dataset."
        )
    if isinstance(dataset, type):
        raise ConfigError(
            f"dataset: got the class {dataset.__name__}, wanted an instance of it. Pass "
            f"{dataset.__name__}(...)."
        )
    if isinstance(dataset, torch.utils.data.DataLoader):
        raise ConfigError(
            f"dataset: got a {type(dataset).__name__}, wanted the dataset that it reads. Pass its "
            ".dataset."
        )
    if any(_is_native(part) for part in _inner_datasets(dataset)):
        name = type(dataset).__name__
        remedy = _PART_REMEDY if isinstance(dataset, torch.utils.data.Subset) else _SEVERAL_REMEDY
        raise DatasetError(
            f"{name} holds a native dataset (penstock.Dataset), which is read by shards and not by "
            f"index, so torch's wrappers and lists can't hold one. Instead {remedy}."
        )
    is_known = isinstance(dataset, torch.utils.data.Dataset)
    if not is_known and not any(hasattr(dataset, n) for n in ("__getitem__", "__getitems__")):
        remedy = (
            "An object that can only be iterated must be a torch.utils.data.IterableDataset: wrap "
            "it in one whose __iter__ yields its samples"
            if hasattr(dataset, "__iter__")
            else "Pass a penstock.Dataset, a torch dataset, or an object with __getitem__ and "
            "__len__"
        )
        raise ConfigError(
            f"dataset: got an object of type {type(dataset).__name__}, wanted a dataset. {remedy}."
        )


def _inner_datasets(dataset: Any) -> list[Any]:
    if isinstance(dataset, torch.utils.data.Subset):
        return [dataset.dataset]
    if isinstance(dataset, _WRAPPERS_OF_SEVERAL):
        inner: Any = dataset.datasets
        return list(inner.values() if isinstance(inner, dict) else inner)
    if type(dataset) in (list, tuple):
        return list(dataset[:_CHECKED_ELEMENTS])
    if type(dataset) is dict:
        return list(dataset.values())[:_CHECKED_ELEMENTS]
    return []


def _is_native(part: Any) -> bool:
    return isinstance(part, Source) or any(_is_native(inner) for inner in _inner_datasets(part))


STATE_VERSION = 1


def to_state(setup: PassSetup, mark: Mark, *, bad: int) -> dict[str, Any]:
    """Return the state at a mark: JSON types, except for states of the user's own dataset and
    sampler.

    bad: samples of the epoch before the mark that were replaced.
    """
    return {
        "version": STATE_VERSION,
        "kind": "torch",
        **_identity(setup),
        "drop_last": setup.options.drop_last,
        "streams": setup.streams,
        "draw_seed": None if setup.augmenter is None else setup.augmenter.seed,
        "mark": replace(mark, bad=bad).to_dict(),
    }


def from_state(setup: PassSetup, state: Any) -> Mark:
    """Return the mark of a state. Raises ResumeError if `to_state` didn't write it for this
    loader."""
    if not isinstance(state, dict) or state.get("kind") != "torch":
        raise not_a_torch_state(state)
    if state.get("version") != STATE_VERSION:
        raise ResumeError(
            f"State version {state.get('version')!r} can't be read: this release of Penstock reads "
            f"and writes version {STATE_VERSION}. Resume with the release that wrote the state."
        )
    for name, here in _identity(setup).items():
        saved = state.get(name)
        if saved != here:
            raise ResumeError(
                f"State was saved with {name}={saved!r}, but this loader has {name}={here!r}, so "
                "its batches differ. Build the loader with the saved value, or start without a "
                "state."
            )
    mark = Mark.from_dict(state.get("mark"))
    is_tied = setup.order is None or any(worker.state for worker in mark.workers)
    if is_tied and state.get("streams") != setup.streams:
        raise ResumeError(
            f"State was saved with num_workers={state.get('streams')}, but this loader has "
            f"num_workers={setup.num_workers}. Each worker reads its own part of the dataset, and "
            "the parts would shift. Pass the saved num_workers."
        )
    saved = state.get("drop_last")
    return _with_ends_of(setup, mark, saved=saved) if isinstance(saved, bool) else mark


def _with_ends_of(setup: PassSetup, mark: Mark, *, saved: bool) -> Mark:
    """Return the mark in a loader whose epochs may end otherwise than those of the saved job.

    Warns, as for native datasets. The next epoch begins if this one has nothing left. saved: that
    job's drop_last.
    """
    here = bool(setup.options.drop_last)
    rest = setup.last_samples()
    if saved == here or rest == 0:
        return mark
    these = "last samples, fewer than a batch," if rest is None else f"last {rest} samples,"
    change = f"leaves out its {these} which the saved job delivered"
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
    """Return the values that must be equal in the state and in this loader."""
    options, order = setup.options, setup.order
    is_torchs = options.seed is None or order is None
    return {
        "style": "iterable" if order is None else "map",
        "order": "torch" if is_torchs else "penstock",
        "seed": options.seed,
        "samples": length_of(setup.dataset),
        "batch_size": options.rank_batch if is_torchs else None,
        "drawn_by": None if order is None else order.name,
    }


def check_can_be_taken(setup: PassSetup, mark: Mark) -> None:
    """Raise ConfigError if no state can hold what was delivered, or repeat its order."""
    if not setup.options.in_order:
        raise ConfigError(
            "in_order=False delivers batches as they are ready, so no position says which ones "
            "were delivered, and there is no state. Pass in_order=True."
        )
    if mark.mixed is not None:
        name = NAMES.get(mark.mixed, mark.mixed)
        raise ConfigError(
            f"The sampler draws from {name} batch by batch, and other code drew from it in "
            "between, so no state can repeat its order. Let the sampler draw all of an epoch's "
            "indices first, or use its own generator that its state_dict() and load_state_dict() "
            "keep; or pass seed= instead of a sampler."
        )


def with_decided_draws(setup: PassSetup, mark: Mark, *, keeps_workers: bool) -> Mark:
    """Return the mark of an epoch that begins, with the seeds and states of its draws.

    They are drawn now instead of when the pass begins, in torch's order; nothing else changes.
    keeps_workers: persistent workers were seeded earlier.
    """
    generator = setup.own_generator()
    if generator is not None and mark.generator is None:
        mark = replace(mark, generator=freeze(generator.get_state()))
    if setup.options.generator is None and mark.base_seed is None and not keeps_workers:
        mark = replace(mark, base_seed=fresh_seed())
    return mark if setup.order is None else setup.order.decided(mark)


def with_dataset_state(setup: PassSetup, mark: Mark, source: Any, *, is_live: bool) -> Mark:
    """Return the mark with the state of a dataset that is read in this process, behind the last
    batch.

    Workers send theirs with their batches. source: of the latest pass. is_live: that pass is
    active.
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
        f"{type(setup.dataset).__name__} draws from {NAMES[name]} as it is read, and other code "
        "drew from it in between. After a resume its random numbers differ, and so does the order "
        "of its samples if it is drawn from them. Give the dataset its own generator that its "
        "state_dict() keeps, or pass num_workers=1.",
        PenstockWarning,
        stacklevel=5,
    )


class TorchEngine:
    """Delivers batches of a torch dataset; DataLoader forwards to it.

    shards_itself: Penstock orders the samples and shares them out over the ranks.
    """

    def __init__(self, dataset: Any, options: LoaderOptions, *, indices: Any) -> None:
        """indices: the sampler or batch sampler of torch's loader over the dataset."""
        self._indices = indices
        augmenter = _augmenter_of(options, indices)
        order = _order_of(dataset, options, indices)
        # Replaced when the loader gets other options; a pass keeps those with which it began.
        self._setup = PassSetup(dataset=dataset, options=options, order=order, augmenter=augmenter)
        self.shards_itself = isinstance(order, PlannedOrder)
        self.meter = Meter(
            decode_threads=0 if augmenter is None else augmenter.threads,
            device=str(options.device),
            workers=self._setup.num_workers,
        )
        self._bad_count: BadCount | None = None
        self._ranks, self._has_joined = Membership(options.world), False
        self._join()
        self._bookmark = Bookmark()
        self._loaders = TorchLoaders()
        self._dataset_epoch = DatasetEpoch(dataset)
        self._latest: weakref.ref[Pass] | None = None
        self.closed = False  # close() was called
        watch(self)

    def disown(self) -> None:
        """Leave passes and workers to the parent, in a forked child; new ones may begin."""
        self._loaders.disown()
        self._latest = None

    def take_over(self, options: LoaderOptions) -> None:
        """Use other options from the next pass on: for another world, with other workers.

        Raises ConfigError and PlanError for options that don't fit; the engine is then unchanged.
        """
        before = self._setup
        order, augmenter = before.order, before.augmenter
        has_moved = options.world != before.world
        if has_moved or isinstance(order, TorchOrder):
            order = _order_of(before.dataset, options, self._indices)
        if has_moved and augmenter is not None:
            stale, augmenter = augmenter, _augmenter_of(options, self._indices)
            stale.close()
        self._setup = replace(before, options=options, order=order, augmenter=augmenter)
        if has_moved:
            self._ranks, self._has_joined = Membership(options.world), False
            self._bad_count = None
            self._join()

    def _join(self) -> None:
        """Join the job's ranks, if there are any by now, and count bad samples with them. Raises
        PlanError."""
        setup, world = self._setup, self.world
        if not self.shards_itself or self._has_joined:
            return
        if world.processes > 1:
            # A process that is alone needs none of it.
            from penstock.pipeline.torch_data.job_ranks import join_ranks

            if (joined := join_ranks(setup, self.meter)) is not None:
                self._ranks, self._has_joined = joined, True
        max_bad, before = setup.options.max_bad, self._bad_count
        if max_bad is None or (before is not None and not self._has_joined):
            return
        self._bad_count = BadCount(
            samples=len(setup.dataset),
            names=None,
            bad_samples=None,
            remedy="See the reasons; then remove them from the dataset, or raise max_bad=.",
            max_bad=max_bad,
            membership=self._ranks,
            report=QuarantineFile(
                None, name=f"{type(setup.dataset).__name__}-{world.file_label}.jsonl"
            ),
            meter=self.meter,
        )
        if before is not None:
            self._bad_count.take_over(before)

    @property
    def world(self) -> World:
        """Rank and size of the batches."""
        return self._setup.world

    @property
    def batch_size(self) -> int | None:
        """The size of this rank's largest batch, if torch batches by a number."""
        return self._setup.options.rank_batch

    @property
    def keeps_workers(self) -> bool:
        """True if persistent workers were started."""
        return self._loaders.keeps_workers

    # -- passes

    def __len__(self) -> int:
        """Return the number of batches of a whole epoch on this rank. Raises TypeError if
        unknown."""
        return self._setup.length()

    def begin(self) -> Iterator[Any]:
        """Begin a pass over the current epoch; several may run at once, as with torch."""
        self._check_open()
        self._setup.warn_if_unsharded()
        self._join()
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
            bad_count=self._bad_count,
            ranks=self._ranks,
        )
        self._latest = weakref.ref(started)
        return started

    def _live_pass(self) -> Pass | None:
        """Return the latest pass, if the loader's mark follows it."""
        live = self._latest() if self._latest is not None else None
        if live is None or live.number != self._bookmark.number or live.is_over:
            return None
        return live

    def epoch_batches(self) -> Iterator[list[int]]:
        """Return this rank's indices in a whole current epoch, batch by batch."""
        order = self._setup.order
        assert isinstance(order, PlannedOrder)
        return order.batches(self.epoch)

    def epoch_samples(self) -> int:
        """Return the number of samples in all `epoch_batches`."""
        order = self._setup.order
        assert isinstance(order, PlannedOrder)
        return order.samples()

    # -- epochs and state

    @property
    def has_begun(self) -> bool:
        """True if a batch was delivered."""
        return self._bookmark.has_begun

    @property
    def epoch(self) -> int:
        """The epoch of the next batch."""
        return self._bookmark.mark.epoch

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of an epoch; sets it in a dataset and a sampler that have set_epoch."""
        check_epoch(epoch)
        self._dataset_epoch.set(epoch, self._setup.sampler)
        self._bookmark.go_to(int(epoch), self._setup)

    def state_dict(self) -> dict[str, Any]:
        """Return what was delivered, and fix the seeds and states of the epoch's draws if they are
        open."""
        setup, bookmark = self._setup, self._bookmark
        live = self._live_pass()
        mark = bookmark.mark
        if mark.batches == 0 and setup.options.seed is None and setup.options.in_order:
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
        bad = 0 if self._bad_count is None else self._bad_count.count_before(mark.cursor)
        return to_state(setup, mark, bad=bad)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue exactly behind the last batch that was delivered before the state was read."""
        self._check_open()
        mark = self._mark_of(state)
        self._dataset_epoch.restore(mark.dataset_epoch)
        if self._setup.augmenter is not None and isinstance(state.get("draw_seed"), int):
            self._setup.augmenter.seed = state["draw_seed"]
        self._loaders.forget()  # their workers are at other positions
        source = self._bookmark.source
        if self._setup.order is None and source is not None:
            source.forget()
        self._bookmark.restore(mark)
        self._ranks.restart()
        if self._bad_count is not None:
            self._bad_count.restore(mark.bad)

    def _mark_of(self, state: dict[str, Any]) -> Mark:
        """Return the mark of a state, which all ranks must load. Raises ResumeError, PlanError."""
        try:
            mark = from_state(self._setup, state)
            self._ranks.compare_state(f"epoch {mark.epoch}, position {mark.position}")
        except PenstockError as error:
            self._ranks.refuse(error)
            raise
        return mark

    def statistics(self) -> Statistics:
        """Return what was measured so far, and the one-line verdict."""
        return self.meter.snapshot()

    # -- life

    def _check_open(self) -> None:
        if self.closed:
            raise ClosedError("This loader is closed; make a new one.")

    def close(self) -> None:
        """End torch's workers. Safe to call twice."""
        self.closed = True
        self._ranks.close()
        live = self._latest() if self._latest is not None else None
        if live is not None:
            live.stop()
        self._loaders.forget()
        self._bookmark.source = None
        if self._setup.augmenter is not None:
            self._setup.augmenter.close()

    def __repr__(self) -> str:
        setup, mark = self._setup, self._bookmark.mark
        return (
            f"DataLoader({type(setup.dataset).__name__}, batch_size={self.batch_size}, rank "
            f"{self.world.rank} of {self.world.size}, at epoch {mark.epoch}, batch {mark.batches})"
        )


def _order_of(dataset: Any, options: LoaderOptions, indices: Any) -> IndexOrder | None:
    """Return the order of a map-style dataset: Penstock's with a seed, else torch's; None for a
    stream."""
    if options.kind == "stream":
        return None
    if options.is_planned:
        return planned_order(dataset, options)
    return TorchOrder(indices, options.generator, is_numbered=options.augment is not None)


def _augmenter_of(options: LoaderOptions, indices: Any) -> Augmenter | None:
    """Return the augmenter of the batches' images; None without augment=.

    Raises ConfigError if several ranks would draw their own crops of the same samples.
    """
    if options.augment is None:
        return None
    seed = options.drawn_seed if options.seed is None else options.seed
    assert seed is not None
    # If a sampler shares the samples out, each rank has its own crops and its own state.
    if options.seed is None and options.world.size > 1 and not shards_by_rank(indices):
        raise ConfigError(
            f"augment= on {options.world.size} ranks needs seed=, the same on every rank. Penstock "
            "then orders the samples and shares them out, so leave sampler= out. Or pass a sampler "
            "that shares them out, such as torch's DistributedSampler, and no seed=."
        )
    from penstock.pipeline.torch_data.augmenter import Augmenter

    return Augmenter(options, seed=seed)
