"""Run torch's own DataLoader for each pass: send requests, receive messages, and end its workers.

Worker processes end because this module ends them, or because they are killed. torch names the
process that died. The iterator's tasks show its requests that haven't returned; a batch that it had
read may be lost too. The error names these samples.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import threading
import warnings
import weakref
from dataclasses import dataclass
from functools import partial
from multiprocessing import connection
from typing import TYPE_CHECKING, Any

import torch
import torch.multiprocessing
import torch.utils.data

from penstock.cache import ConfigError, PenstockError, WorkerError, describe_exit
from penstock.pipeline.torch_data.image_split import SplitCollate
from penstock.pipeline.torch_data.owner_states import description_of
from penstock.pipeline.torch_data.torch_sources import IterableSource, MapSource, start_worker
from penstock.pipeline.torch_private import (
    base_seed_of,
    disown,
    kept_iterator,
    shut_down,
    stop_watching,
    tasks_of,
    workers_of,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from penstock.pipeline.torch_data.mark import Mark, WorkerMessage, WorkerRequest
    from penstock.pipeline.torch_data.pass_order import PassOrder

_END_S = 5.0  # to wait for a process that was terminated, or whose connection broke
_MOST_NAMED = 64
_MOST_BYTES = 107 - len("/pymp-12345678/listener-12345678")  # a socket's path; Python's names
_MEMORY = (
    "The machine may be short of memory (see `dmesg`): use fewer workers or smaller batches. "
    "Otherwise read those samples alone, with num_workers=0."
)


class Requests(torch.utils.data.Sampler[Any]):
    """The sampler of torch's loader: it iterates the requests of the current pass, and keeps each
    until its batch returns."""

    def __init__(self) -> None:
        """Skip torch's own constructor, which isn't needed."""
        self.begin(())

    def begin(self, requests: Iterable[WorkerRequest]) -> None:
        """Iterate these requests in the next pass."""
        self._coming = requests
        self._sent: dict[int, WorkerRequest] = {}
        self._completed = 0

    def __iter__(self) -> Iterator[WorkerRequest]:
        for number, request in enumerate(self._coming):
            self._sent[number] = request
            yield request

    def complete_oldest(self) -> None:
        """Forget the oldest request, whose batch has returned."""
        self._sent.pop(self._completed, None)
        self._completed += 1

    def samples(self, tasks: Iterable[int]) -> str:
        """Return the samples of some tasks as text."""
        requests = [self._sent.get(task) for task in tasks]
        wanted = [r.index for r in requests if r is not None and not r.void]
        flat = [i for index in wanted for i in (index if isinstance(index, list) else [index])]
        more = ", ..." if len(flat) > _MOST_NAMED else ""
        return f"samples {', '.join(map(repr, flat[:_MOST_NAMED]))}{more}" if flat else "nothing"


def end_workers(inner: Any) -> None:
    """End the workers of one of torch's iterators now.

    torch would end them only when nothing refers to the iterator any more, which the traceback of
    an error delays. torch's handler of dead children may raise in any code that runs meanwhile, its
    own clean-up included.
    """
    with contextlib.suppress(RuntimeError):
        shut_down(inner)
    stop_watching(inner)  # if shutting down was cut short, the handler must not see the rest
    alive = [worker for worker in workers_of(inner) if worker.is_alive()]
    for worker in alive:
        worker.terminate()
    for worker in alive:
        worker.join(_END_S)


@dataclass(frozen=True, slots=True, weakref_slot=True)
class TorchLoader:
    """One of torch's loaders, the source in it, and its requests.

    requests: None for an iterable dataset.
    """

    loader: Any
    source: Any
    requests: Requests | None

    def begin(self) -> Any:
        """Return torch's iterator of a new pass.

        Its workers end as soon as nothing refers to this object any more: neither a pass nor, if
        they are persistent, the engine. torch ends workers in the iterator's destructor; if the
        garbage collector calls that, it has closed the workers' queues before, and torch waits 5 s
        for each worker.
        """
        kept = kept_iterator(self.loader)
        iterator = iter(self.loader)
        if iterator is not kept and workers_of(iterator):
            end = weakref.finalize(self, _end_own_workers, iterator, os.getpid())
            end.atexit = False  # at exit, torch and multiprocessing end them
        return iterator


def _end_own_workers(iterator: Any, pid: int) -> None:
    """End an iterator's workers in the process that started them, and not in a fork of it."""
    if os.getpid() == pid:
        end_workers(iterator)


def _as_it_is(item: Any) -> Any:
    """Return the item: a collate function for batches that are collated already."""
    return item


def make_loader(order: PassOrder, mark: Mark, *, previous: Any) -> TorchLoader:
    """Make torch's loader for a pass from a mark on. previous: the source of the pass before, or
    None."""
    options, generator = order.options, order.options.generator
    if options.num_workers:
        _check_temporary_folder()
    source = _make_source(order, mark, previous=previous)
    arguments = options.worker_arguments()
    arguments["worker_init_fn"] = partial(start_worker, options.worker_init_fn, mark.base_seed)
    if options.num_workers and arguments["multiprocessing_context"] is None and _has_threads():
        arguments["multiprocessing_context"] = "forkserver"
    requests = None if order.is_stream else Requests()
    # torch draws its workers' base seed at the start of each pass. If the seed isn't needed, the
    # training loop's generator stays untouched.
    draws_seed = options.seed is None and (generator is not None or mark.base_seed is None)
    with warnings.catch_warnings():  # torch's constructor has warned once already
        warnings.simplefilter("ignore")
        loader = torch.utils.data.DataLoader(
            source,
            batch_size=None,
            sampler=requests,
            collate_fn=_as_it_is,
            generator=generator if draws_seed else torch.Generator(),
            **arguments,
        )
    return TorchLoader(loader, source, requests)


def _check_temporary_folder() -> None:
    """Raise ConfigError if workers couldn't send tensors: torch would wait for them without end."""
    folder = tempfile.gettempdir()
    length = len(os.fsencode(folder))
    sharing: Any = torch.multiprocessing
    if length > _MOST_BYTES and sharing.get_sharing_strategy() == "file_descriptor":
        raise ConfigError(
            f"num_workers: torch's workers send tensors through sockets in {folder}, whose path "
            f"has {length} bytes; sockets allow {_MOST_BYTES}. Set TMPDIR to a shorter path, such "
            'as /tmp, or call torch.multiprocessing.set_sharing_strategy("file_system") first.'
        )


def _make_source(order: PassOrder, mark: Mark, *, previous: Any) -> Any:
    options = order.options
    collate: Any = options.collate_fn
    dataset, batched, seed = order.dataset, options.is_batched, options.seed
    if order.augmenter is not None:
        collate = SplitCollate(collate, batched=batched)
    if not order.is_stream:
        parts = order.parts
        return MapSource(dataset=dataset, collate=collate, batched=batched, seed=seed, parts=parts)
    seeds = (mark.base_seed, options.generator, seed)
    return IterableSource(
        dataset=dataset,
        collate=collate,
        batch_size=options.rank_batch,
        drop_last=options.drop_last,
        epoch=mark.epoch,
        positions=mark.workers,
        first=mark.next_worker,
        seed=None if seed is None else (seed, options.world.rank),
        persistent=options.keeps_workers,
        draws_seeds=not options.num_workers and all(each is None for each in seeds),
        previous=None if options.num_workers else previous,
    )


def _has_threads() -> bool:
    """Return True if Penstock's threads run, for example after a native loader was used.

    Forking would copy the locks that they hold.
    """
    return any(thread.name.startswith("penstock-") for thread in threading.enumerate())


class TorchIterator:
    """torch's iterator of one pass; its errors name the samples that a dead worker was reading.

    base_seed: from which its workers seed themselves, if known. failed: the number of batches that
    never came, because reading raised; the caller resets it when it moves the mark behind them.
    """

    def __init__(
        self, torch_loader: TorchLoader, requests: Iterable[WorkerRequest], dataset: Any
    ) -> None:
        self._dataset, self._requests = dataset, torch_loader.requests
        if self._requests is not None:
            self._requests.begin(requests)
        self._torch_loader: TorchLoader | None = torch_loader  # keeps its workers alive
        self._inner: Any = torch_loader.begin()
        self.base_seed = base_seed_of(self._inner)
        self.failed = 0
        self._lost: WorkerError | None = None

    def next_message(self, mark: Mark) -> WorkerMessage:
        """Return a worker's next message: a batch, or a message without one.

        mark: of what was delivered so far. Raises WorkerError if a worker has died, otherwise what
        reading raised; the next call then returns the next batch.
        """
        if self._lost is not None:  # the batches of its worker will never come
            self._complete(has_failed=True)
            raise self._lost
        try:
            message: WorkerMessage = next(self._inner)
        except StopIteration:
            raise
        except Exception as error:  # raised again, or as WorkerError
            loss = self._find_loss(error, mark)
            self._complete(has_failed=True)
            if loss is None:
                raise
            self._lost = loss
            raise loss from error
        self._complete(has_failed=message.error is not None)
        if message.error is not None:
            raise message.error
        return message

    def _complete(self, *, has_failed: bool) -> None:
        """Forget the oldest request, if batches are requested. has_failed: its batch won't come."""
        if self._requests is not None:
            self._requests.complete_oldest()
            self.failed += has_failed

    def worker_loss(self, error: RuntimeError, mark: Mark) -> WorkerError | None:
        """Return the error of a dead worker that caused an error outside of `next_message`, or
        None."""
        if self._lost is None and not isinstance(error, PenstockError):
            self._lost = self._find_loss(error, mark)
            return self._lost
        return None

    def _find_loss(self, error: Exception, mark: Mark) -> WorkerError | None:
        """Return an error that names the samples that a dead worker was reading, if one has died.

        mark: as in `next_message`.
        """
        inner, workers = self._inner, workers_of(self._inner)
        is_cut_off = isinstance(error, ConnectionError | EOFError)
        if not workers or not (is_cut_off or any(worker.exitcode for worker in workers)):
            return None
        stop_watching(inner)
        if is_cut_off:  # the worker may not have ended yet
            ends = connection.wait([worker.sentinel for worker in workers], timeout=_END_S)
            for worker in workers:
                if worker.sentinel in ends:
                    worker.join(_END_S)
        dead = {number: code for number, worker in enumerate(workers) if (code := worker.exitcode)}
        if not dead:
            what = "The connection to a DataLoader worker broke while it sent a batch."
            return WorkerError(f"{what} {_MEMORY}")
        losses = "; ".join(
            f"worker {number} (pid {workers[number].pid}) {describe_exit(code)} while it was "
            f"reading {self._last_request(number, mark)} of {description_of(self._dataset)}"
            for number, code in dead.items()
        )
        return WorkerError(f"DataLoader {losses}. {_MEMORY}")

    def _last_request(self, number: int, mark: Mark) -> str:
        """Return, as text, what a worker was reading or had just read."""
        tasks = sorted(tasks_of(self._inner).items())
        mine = [(task, len(info) > 1) for task, info in tasks if info[0] == number]
        open_tasks = [task for task, has_returned in mine if not has_returned]
        if self._requests is not None:
            return self._requests.samples(open_tasks)
        delivered = mark.workers[number].batches if number < len(mark.workers) else 0
        first = delivered + len(mine) - len(open_tasks)
        return f"batches {first} to {first + max(0, len(open_tasks) - 1)} of its stream"

    def stop(self) -> None:
        """Drop torch's iterator, and end its workers."""
        inner, self._inner = self._inner, iter(())
        end_workers(inner)
        self._torch_loader = None

    def disown(self) -> None:
        """Drop torch's iterator in a forked child, and let its workers live on."""
        inner, self._inner = self._inner, iter(())
        disown(inner)
