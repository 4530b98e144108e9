"""torch's own loaders, which carry requests to the dataset and bring back what was message."""

from __future__ import annotations

import os
import threading
import warnings
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.utils.data

from penstock.pipeline.foreign.image_split import SplitCollate
from penstock.pipeline.foreign.iterable_source import IterableSource
from penstock.pipeline.foreign.map_source import MapSource
from penstock.pipeline.foreign.worker import WorkerInit, as_it_is
from penstock.pipeline.foreign.worker_loss import end_workers
from penstock.pipeline.torch_private import disown, kept_iterator, workers_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from penstock.pipeline.foreign.mark import Mark
    from penstock.pipeline.foreign.setup import PassSetup


class RequestSampler(torch.utils.data.Sampler[Any]):
    """What torch's loader takes for its sampler: the requests of the pass that begins."""

    current: Iterable[Any] = ()

    def __init__(self) -> None:
        """torch's own constructor takes what isn't needed here."""

    def __iter__(self) -> Iterator[Any]:
        return iter(self.current)


@dataclass(frozen=True, slots=True, weakref_slot=True)
class TorchLoader:
    """One of torch's loaders, the source in it, and what it is asked for.

    requests: None for an iterable dataset.
    """

    loader: Any
    source: Any
    requests: RequestSampler | None

    def begin(self) -> Any:
        """Return torch's iterator of a new pass. Its workers end as soon as nothing refers to this
        object any more: neither a pass nor, where they are persistent, the engine.

        torch ends workers in the iterator's destructor. Where the garbage collector calls that, it
        has closed the workers' queues before, and torch waits 5 s for each worker.
        """
        kept = kept_iterator(self.loader)
        iterator = iter(self.loader)
        if iterator is not kept and workers_of(iterator):
            end = weakref.finalize(self, _end_own_workers, iterator, os.getpid())
            end.atexit = False  # torch and multiprocessing end them then
        return iterator


class TorchLoaders:
    """Makes torch's loader for each pass, and keeps the one whose workers are persistent."""

    def __init__(self) -> None:
        self._kept: TorchLoader | None = None

    @property
    def keeps_workers(self) -> bool:
        """Whether persistent workers were started."""
        return self._kept is not None

    def let_go(self) -> None:
        """Forget the loader with persistent workers: they end with its last pass."""
        self._kept = None

    def disown(self) -> None:
        """Forget that loader in a forked child, and let its workers live on in the parent.

        Between two passes nobody else refers to its iterator: to drop it would end the workers.
        """
        if self._kept is not None:
            disown(kept_iterator(self._kept.loader))
        self.let_go()

    def for_pass(self, setup: PassSetup, mark: Mark, *, previous: Any) -> TorchLoader:
        """torch's loader for a pass from a mark on; the one with persistent workers again.

        previous: the source of the pass before, or None.
        """
        if self._kept is not None:
            if setup.order is None:
                self._kept.source.tell_epoch(mark.epoch)
            return self._kept
        torch_loader = _make(setup, mark, previous=previous)
        if setup.options.workers.persistent_workers:
            self._kept = torch_loader
        return torch_loader


def _end_own_workers(iterator: Any, pid: int) -> None:
    """End an iterator's workers in the process that started them, and in no fork of it."""
    if os.getpid() == pid:
        end_workers(iterator)


def _make(setup: PassSetup, mark: Mark, *, previous: Any) -> TorchLoader:
    workers, generator = setup.options.workers, setup.options.torch_options.generator
    source = _make_source(setup, mark, previous=previous)
    arguments = workers.arguments()
    arguments["worker_init_fn"] = WorkerInit(
        worker_init_fn=workers.worker_init_fn, base_seed=mark.base_seed
    )
    if workers.multiprocessing_context is None and _must_not_fork(setup):
        arguments["multiprocessing_context"] = "forkserver"
    requests = None if setup.order is None else RequestSampler()
    # torch draws its workers' base seed at the start of each pass; where nobody needs it, the
    # training loop's own generator is left alone.
    draws_seed = setup.options.seed is None and (generator is not None or mark.base_seed is None)
    with warnings.catch_warnings():  # torch's constructor has warned once already
        warnings.simplefilter("ignore")
        loader = torch.utils.data.DataLoader(
            source,
            batch_size=None,
            sampler=requests,
            collate_fn=as_it_is,
            generator=generator if draws_seed else torch.Generator(),
            **arguments,
        )
    return TorchLoader(loader, source, requests)


def _make_source(setup: PassSetup, mark: Mark, *, previous: Any) -> Any:
    options = setup.options
    collate: Any = options.torch_options.collate_fn
    if setup.augmenter is not None:
        collate = SplitCollate(collate, batched=options.is_batched)
    if setup.order is not None:
        return MapSource(
            setup.dataset,
            collate=collate,
            batched=options.is_batched,
            seed=options.seed,
            substitutes=setup.order.substitutes(options.own.max_bad),
        )
    is_ours = any(
        known is not None
        for known in (mark.base_seed, options.torch_options.generator, options.seed)
    )
    return IterableSource(
        setup.dataset,
        collate=collate,
        batch_size=options.batch_size,
        drop_last=options.torch_options.drop_last,
        epoch=mark.epoch,
        positions=mark.workers,
        first=mark.next_worker,
        seed=None if options.seed is None else (options.seed, setup.world.rank),
        persistent=bool(options.workers.persistent_workers),
        draws_seeds=not setup.num_workers and not is_ours,
        previous=None if setup.num_workers else previous,
    )


def _must_not_fork(setup: PassSetup) -> bool:
    """Whether threads of ours run, as after the use of a native loader: forking would copy the
    locks that they hold."""
    return setup.num_workers > 0 and any(
        thread.name.startswith("penstock-") for thread in threading.enumerate()
    )
