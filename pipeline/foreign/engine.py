"""What the loader does for a torch dataset: torch's own loader and workers inside, state around it.

torch's DataLoader moves requests to its workers and batches back (see `worker`); nothing of it is
copied here. What was handed out is counted by a mark (see `foreign_order`), and a pass can begin
anywhere a mark says.
"""

from __future__ import annotations

import threading
import warnings
import weakref
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.utils.data

from penstock.cache.errors import (
    ClosedError,
    ConfigError,
    DatasetError,
    PenstockWarning,
    ResumeError,
)
from penstock.cache.forks import watch
from penstock.pipeline.foreign.draws import NAMES, cannot_repeat, freeze
from penstock.pipeline.foreign.order import Mark, PlanOrder, TorchOrder
from penstock.pipeline.foreign.passes import Pass
from penstock.pipeline.foreign.state import has_state
from penstock.pipeline.foreign.stream import IterableSource, WorkerPosition
from penstock.pipeline.foreign.worker import MapSource, WorkerInit, as_it_is, fresh_seed
from penstock.pipeline.options.checks import check_epoch
from penstock.pipeline.plan.state import not_torchs
from penstock.pipeline.report.meter import Meter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from penstock.pipeline.foreign.order import Order
    from penstock.pipeline.foreign.pictures import Darkroom
    from penstock.pipeline.plan.world import World
    from penstock.pipeline.report.statistics import Statistics

STATE_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignSettings:
    """What torch's constructor has checked, and our own. order: None for an iterable dataset.
    darkroom: decodes and augments the images of each batch, if asked to.

    options: torch's arguments about workers and pinning. seed: None leaves randomness to torch.
    """

    dataset: Any
    order: Order | None
    batch_size: int | None
    drop_last: bool
    batched: bool
    collate_fn: Callable[[Any], Any]
    generator: torch.Generator | None
    options: dict[str, Any]
    seed: int | None
    world: World
    detected: bool
    device: torch.device
    darkroom: Darkroom | None = None

    @property
    def num_workers(self) -> int:
        return int(self.options["num_workers"])

    @property
    def streams(self) -> int:
        """Iterators of an iterable dataset, or copies of a map-style one."""
        return max(1, self.num_workers)

    @property
    def tracks_workers(self) -> bool:
        """Whether resuming needs to know how far each worker came."""
        return self.order is None or (self.num_workers > 0 and has_state(self.dataset))

    def own_generator(self) -> torch.Generator | None:
        """What the order is drawn from, if it isn't torch's default generator."""
        own = self.order.own_generator() if isinstance(self.order, TorchOrder) else None
        return own if own is not None else self.generator

    def identity(self) -> dict[str, Any]:
        """What a state must agree with, and what differs where it doesn't."""
        return {
            "style": "iterable" if self.order is None else "map",
            "order": "torch" if self.seed is None or self.order is None else "penstock",
            "seed": self.seed,
            "samples": _length(self.dataset),
            "batch_size": self.batch_size if self.seed is None or self.order is None else None,
            "drop_last": self.drop_last,
            "drawn_by": None if self.order is None else self.order.name,
        }


class _Requests(torch.utils.data.Sampler[Any]):
    """What torch's loader takes for its sampler: the requests of the pass that begins."""

    current: Iterable[Any] = ()

    def __init__(self) -> None:
        """torch's own constructor takes what isn't needed here."""

    def __iter__(self) -> Iterator[Any]:
        return iter(self.current)


@dataclass(frozen=True, slots=True)
class _Inner:
    """torch's loader, the source in it, and what it is asked for (None: an iterable dataset)."""

    loader: Any
    source: Any
    requests: _Requests | None


class ForeignEngine:
    """Hands out batches of a torch dataset. The loader's facade forwards to it."""

    def __init__(self, settings: ForeignSettings) -> None:
        self.settings = settings  # the facade replaces them: a pass takes those of its beginning
        self.has_begun = False  # a batch was handed out
        self.shards_itself = settings.order is not None and settings.seed is not None
        threads = 0 if settings.darkroom is None else settings.darkroom.threads
        self.meter = Meter(
            decode_threads=threads, device=str(settings.device), workers=settings.num_workers
        )
        self._next = Mark()  # what was handed out
        self._restored = False  # from a state: the next pass begins just there
        self._decided = False  # a state says what the epoch will be drawn from
        self._latest: weakref.ref[Pass] | None = None
        self._number = 0  # of the latest pass: the one whose place is the loader's
        self._source: Any = None  # of the latest pass: without workers it has the dataset's state
        self._kept: _Inner | None = None  # torch's loader with persistent workers
        self._told_epoch: int | None = None  # what a dataset with set_epoch was told last
        self._closed = False
        watch(self)

    def disown(self) -> None:
        """In a forked child: passes and persistent workers are the parent's; new ones may begin."""
        self._kept = self._latest = None

    def __len__(self) -> int:
        steps = self.steps()
        if steps is None:
            raise TypeError(f"object of type {type(self.settings.dataset).__name__} has no len()")
        return steps

    def steps(self) -> int | None:
        """Batches of an epoch, None if nobody knows."""
        settings = self.settings
        if settings.order is not None:
            return settings.order.steps()
        length = _length(settings.dataset)
        if length is None or settings.batch_size is None:
            return length
        whole, rest = divmod(length, settings.batch_size)
        return whole + (rest > 0 and not settings.drop_last)

    # -- passes

    def begin(self) -> Iterator[Any]:
        """A pass over the current epoch; several may run at once, as with torch."""
        if self._closed:
            raise ClosedError("This loader is closed; make a new one.")
        self._warn_if_unsharded()
        if not self._restored and not self._decided:
            self._next = self._fresh()
        self._number += 1
        if (darkroom := self.settings.darkroom) is not None:
            darkroom.drain()
        started = Pass(self, self._next, number=self._number, restored=self._restored)
        self._latest = weakref.ref(started)
        return started

    def _fresh(self) -> Mark:
        """The start of an epoch, with nothing known of what it is drawn from: each pass draws its
        own. One that was left in the middle begins again, but where all that was promised came."""
        if self._is_counted_out():
            return self.after(self._next)
        workers = () if self._next.batches else self._next.workers
        return Mark(epoch=self._next.epoch, workers=workers)

    def _is_counted_out(self) -> bool:
        """Whether a stream gave what its length promises: there may be more, but who never asks
        past the length means the next epoch by the next iter()."""
        if self.settings.order is not None or self._restored:
            return False
        steps = self.steps()
        return steps is not None and 0 < steps <= self._next.batches

    def inner(self, mark: Mark) -> _Inner:
        """torch's loader for a pass from a mark on; the one with persistent workers again."""
        settings = self.settings
        if self._kept is not None:
            if settings.order is None:
                self._kept.source.tell_epoch(mark.epoch)
            return self._kept
        source = self._make_source(mark)
        options = {
            **settings.options,
            "worker_init_fn": WorkerInit(
                worker_init_fn=settings.options["worker_init_fn"], base_seed=mark.base_seed
            ),
        }
        if options["multiprocessing_context"] is None and self._must_not_fork():
            options["multiprocessing_context"] = "forkserver"
        requests = None if settings.order is None else _Requests()
        # torch draws its workers' base seed at the start of each pass; where nobody needs it, the
        # training loop's own generator is left alone.
        draws_seed = settings.seed is None and (
            settings.generator is not None or mark.base_seed is None
        )
        generator = settings.generator if draws_seed else torch.Generator()
        with warnings.catch_warnings():  # torch's constructor has warned once already
            warnings.simplefilter("ignore")
            loader = torch.utils.data.DataLoader(
                source,
                batch_size=None,
                sampler=requests,
                collate_fn=as_it_is,
                generator=generator,
                **options,
            )
        made = _Inner(loader, source, requests)
        if settings.options["persistent_workers"]:
            self._kept = made
        return made

    def _make_source(self, mark: Mark) -> Any:
        settings = self.settings
        if settings.order is not None:
            return MapSource(
                settings.dataset,
                collate=settings.collate_fn,
                batched=settings.batched,
                seed=settings.seed,
            )
        return IterableSource(
            settings.dataset,
            collate=settings.collate_fn,
            batch_size=settings.batch_size,
            drop_last=settings.drop_last,
            epoch=mark.epoch,
            positions=mark.workers,
            first=mark.next_worker,
            seed=None if settings.seed is None else (settings.seed, settings.world.rank),
            persistent=bool(settings.options["persistent_workers"]),
            draws_seeds=not settings.num_workers
            and all(known is None for known in (mark.base_seed, settings.generator, settings.seed)),
            behind=None if settings.num_workers else self._source,
        )

    def _must_not_fork(self) -> bool:
        """Forking copies locks that other threads hold, and threads of ours run once a native
        loader was used."""
        return self.settings.num_workers > 0 and any(
            thread.name.startswith("penstock-") for thread in threading.enumerate()
        )

    def began(self, number: int, mark: Mark, source: Any) -> None:
        """A pass stands at a mark, and reads from a source."""
        if number == self._number:
            self._next, self._source = mark, source

    def moved(self, number: int, mark: Mark) -> None:
        """A pass handed a batch out, or its epoch ended; the latest pass is the loader's place."""
        self.has_begun = True
        if number == self._number:
            self._next = mark
            self._restored = self._decided = False

    def after(self, mark: Mark) -> Mark:
        """Where the next epoch begins. Persistent workers keep their datasets over epochs, and so
        what is known of those."""
        workers: tuple[WorkerPosition, ...] = ()
        if self.settings.options["persistent_workers"]:
            is_map = self.settings.order is not None
            workers = tuple(
                WorkerPosition(state=worker.state) if is_map else worker.next_epoch()
                for worker in mark.workers
            )
        return Mark(epoch=mark.epoch + 1, workers=workers)

    def check_length(self, batches: int) -> None:
        """As torch: warn where an iterable dataset has more than its length says."""
        steps = self.steps() if self.settings.order is None else None
        if steps is not None and batches == steps + 1:
            warnings.warn(
                f"{type(self.settings.dataset).__name__} has {steps} batches by its __len__, and "
                "more have come. With several workers each iterates a copy of the dataset: share "
                "the samples out by torch.utils.data.get_worker_info().",
                PenstockWarning,
                stacklevel=4,
            )

    def check_short(self, batches: int) -> None:
        """An iterable dataset that ends before its length would leave other ranks waiting."""
        settings = self.settings
        steps = self.steps() if settings.order is None else None
        if steps is not None and batches < steps and settings.world.size > 1:
            raise DatasetError(
                f"{type(settings.dataset).__name__} ended after {batches} batches on rank "
                f"{settings.world.rank}; its __len__ promises {steps}, and the other ranks would "
                "wait for the rest for ever. Let __len__ say what this rank really gives."
            )

    def _warn_if_unsharded(self) -> None:
        settings = self.settings
        sampler = getattr(settings.order, "sampler", None)
        kinds = (torch.utils.data.RandomSampler, torch.utils.data.SequentialSampler)
        if settings.world.size > 1 and settings.detected and type(sampler) in kinds:
            warnings.warn(
                f"Each of {settings.world.size} ranks reads the whole dataset: there is neither "
                "seed= (Penstock shards then) nor a DistributedSampler (torch shards).",
                PenstockWarning,
                stacklevel=4,
            )

    # -- epochs and state

    def epoch_batches(self) -> Iterator[list[int]]:
        """Indices that this rank is handed in a whole current epoch, a batch at a time."""
        order = self.settings.order
        assert isinstance(order, PlanOrder)
        return order.batches(self.epoch)

    def epoch_samples(self) -> int:
        """Samples in all `epoch_batches`."""
        order = self.settings.order
        assert isinstance(order, PlanOrder)
        return order.samples()

    @property
    def world(self) -> World:
        """Rank and size that the batches are for."""
        return self.settings.world

    @property
    def keeps_workers(self) -> bool:
        """Whether persistent workers were started."""
        return self._kept is not None

    @property
    def closed(self) -> bool:
        """Whether close() was called."""
        return self._closed

    @property
    def epoch(self) -> int:
        """The epoch that the next batch belongs to."""
        return self._next.epoch

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of an epoch; a dataset and a sampler that know epochs are told."""
        check_epoch(epoch)
        for target in (self.settings.dataset, getattr(self.settings.order, "sampler", None)):
            tell = getattr(target, "set_epoch", None)
            if callable(tell):
                tell(epoch)
        self._told_epoch = int(epoch)
        if epoch != self._next.epoch or self._is_counted_out():
            # Datasets of workers that go on have their states whatever the epoch's number is.
            self._next = replace(self.after(self._next), epoch=int(epoch))
            self._restored = self._decided = False
            self._number += 1

    def dataset_epoch(self) -> int | None:
        """The epoch that a dataset with set_epoch stands at, by its attribute `epoch` or by what it
        was told here."""
        dataset = self.settings.dataset
        if not callable(getattr(dataset, "set_epoch", None)):
            return None
        epoch = getattr(dataset, "epoch", self._told_epoch)
        return epoch if isinstance(epoch, int) else self._told_epoch

    def tell_next_epoch(self, epoch: int) -> None:
        """A pass goes on with the epoch behind this one by itself: a dataset that is told each
        epoch's number by the loop is told this one's too."""
        is_told = epoch > 0 or self._told_epoch == epoch
        if is_told and self.dataset_epoch() == epoch:
            self.settings.dataset.set_epoch(epoch + 1)
            self._told_epoch = epoch + 1

    def state_dict(self) -> dict[str, Any]:
        """What was handed out. Decides what the epoch is drawn from, if that is still open."""
        settings = self.settings
        if not settings.options["in_order"]:
            raise ConfigError(
                "in_order=False hands batches out as they come, so no position says which ones "
                "were: a state can't be taken. Pass in_order=True."
            )
        live = self._latest() if self._latest is not None else None
        if live is not None and (live.number != self._number or live.is_over):
            live = None
        if self._next.batches == 0 and settings.seed is None:
            self._next = self._drawn(live.mark() if live is not None else self._next)
            self._decided = True
            if live is not None:
                live.decide(self._next)
        if self._next.mixed is not None:
            raise cannot_repeat(self._next.mixed)
        return {
            "version": STATE_VERSION,
            "kind": "torch",
            **settings.identity(),
            "streams": settings.streams,
            "draw_seed": None if settings.darkroom is None else settings.darkroom.seed,
            "mark": self._with_dataset_state(self._next, is_live=live is not None).to_dict(),
        }

    def _drawn(self, mark: Mark) -> Mark:
        """The mark with what its epoch will be drawn from."""
        settings = self.settings
        generator = settings.own_generator()
        if generator is not None and mark.generator is None:
            mark = replace(mark, generator=freeze(generator.get_state()))
        # Drawn now instead of when the pass begins, and in torch's order: nothing else changes.
        if settings.generator is None and mark.base_seed is None and self._kept is None:
            mark = replace(mark, base_seed=fresh_seed())
        return mark if settings.order is None else settings.order.decided(mark)

    def _with_dataset_state(self, mark: Mark, *, is_live: bool) -> Mark:
        """Without workers the dataset is here, just behind the last batch: it is asked now."""
        if not mark.batches and not self._restored:
            mark = replace(mark, dataset_epoch=self.dataset_epoch())
        if self.settings.num_workers or self._source is None or self._restored:
            return mark
        if self.settings.order is None:
            self._warn_if_mixed(self._source.mixed)
            position = self._source.position(mark.batches, is_live=is_live)
            return mark if position is None else replace(mark, workers=(position,))
        state = self._source.state()
        if not state:
            return mark
        return replace(mark, workers=(WorkerPosition(batches=mark.batches, state=state),))

    def _warn_if_mixed(self, name: str | None) -> None:
        if name is not None:
            warnings.warn(
                f"{type(self.settings.dataset).__name__} draws from {NAMES[name]} as it is read, "
                "and others drew from it in between. Behind a resume its random numbers are "
                "others, and so are its samples if it draws their order there: give it a generator "
                "of its own that its state_dict() keeps, or num_workers=1.",
                PenstockWarning,
                stacklevel=5,
            )

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on exactly behind the last batch that was handed out when the state was taken."""
        if self._closed:
            raise ClosedError("This loader is closed; make a new one.")
        self._next = mark = self._checked(state)
        if mark.dataset_epoch is not None and callable(
            tell := getattr(self.settings.dataset, "set_epoch", None)
        ):
            tell(mark.dataset_epoch)
            if not hasattr(self.settings.dataset, "epoch"):
                self._told_epoch = mark.dataset_epoch
        if self.settings.darkroom is not None and isinstance(state.get("draw_seed"), int):
            self.settings.darkroom.seed = state["draw_seed"]
        self._restored, self._decided = True, False
        self._kept = None  # their workers stand elsewhere
        if self.settings.order is None and self._source is not None:
            self._source.forget()
        self._number += 1

    def _checked(self, state: Any) -> Mark:
        settings = self.settings
        if not isinstance(state, dict) or state.get("kind") != "torch":
            raise not_torchs(state)
        if state.get("version") != STATE_VERSION:
            raise ResumeError(
                f"State version {state.get('version')!r} can't be read: this Penstock writes and "
                f"reads version {STATE_VERSION}. Resume with the release that wrote it."
            )
        for name, here in settings.identity().items():
            saved = state.get(name)
            if saved != here:
                raise ResumeError(
                    f"State was saved with {name}={saved!r}, this loader has {name}={here!r}, "
                    "which gives other batches. Build it as it was, or start without a state."
                )
        mark = Mark.from_dict(state.get("mark"))
        tied = settings.order is None or any(worker.state for worker in mark.workers)
        if tied and state.get("streams") != settings.streams:
            raise ResumeError(
                f"State was saved with num_workers={state.get('streams')}, this loader has "
                f"num_workers={settings.num_workers}: each worker goes through a part of the "
                f"dataset of its own, and the parts would shift. Pass the saved num_workers."
            )
        return mark

    def statistics(self) -> Statistics:
        """What was measured so far, and the one-line verdict."""
        return self.meter.snapshot()

    def close(self) -> None:
        """Let torch's workers go."""
        self._closed = True
        live = self._latest() if self._latest is not None else None
        if live is not None:
            live.stop()
        self._kept = self._source = None
        if self.settings.darkroom is not None:
            self.settings.darkroom.close()

    def __repr__(self) -> str:
        settings = self.settings
        return (
            f"DataLoader({type(settings.dataset).__name__}, batch_size={settings.batch_size}, rank "
            f"{settings.world.rank} of {settings.world.size}, at epoch {self._next.epoch}, batch "
            f"{self._next.batches})"
        )


def _length(dataset: Any) -> int | None:
    try:
        return len(dataset)
    except (TypeError, NotImplementedError):
        return None
