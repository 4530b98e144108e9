"""One pass over a torch dataset: torch's iterator inside, and how much of it was handed out."""

from __future__ import annotations

import contextlib
import os
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from penstock.cache.forks import check_process, watch
from penstock.pipeline.foreign.draws import freeze, thaw
from penstock.pipeline.foreign.lost_workers import Asked, error_of
from penstock.pipeline.foreign.state import has_state
from penstock.pipeline.foreign.stream import WorkerPosition
from penstock.pipeline.foreign.worker import Fetched, Request, described
from penstock.pipeline.torch_private import (
    base_seed_of,
    disown,
    shut_down,
    stop_watching,
    workers_of,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from penstock.cache.errors import WorkerError
    from penstock.pipeline.foreign.engine import ForeignEngine
    from penstock.pipeline.foreign.order import Mark, Stream

_END_S = 5.0  # for a worker that is told to end
_FED_AHEAD = 2  # batches in DALI, as for native datasets


class Pass:
    """One pass over an epoch: torch's iterator, and how much of it was handed out."""

    def __init__(self, engine: ForeignEngine, mark: Mark, *, number: int, restored: bool) -> None:
        self.number = number
        self._engine = engine
        self._handed_out_at: float | None = None
        self._decode_s = 0.0  # of the latest batch
        self._said: list[Fetched] = []  # by workers, in front of the next batch that is read
        self._fed: deque[tuple[list[Fetched], Fetched]] = deque()
        self.is_over = False
        self._pid = os.getpid()
        self._inner: Any = None
        watch(self)
        self._start(mark, restored=restored)

    def disown(self) -> None:
        """In a forked child: torch's workers are the parent's, and must live on."""
        if self._settings.num_workers:
            inner, self._inner = self._inner, iter(())
            disown(inner)

    def _start(self, mark: Mark, *, restored: bool) -> None:
        engine = self._engine
        # Of this pass to its end: attributes that are set meanwhile count for the next one.
        self._settings = settings = engine.settings
        self._fresh_restore = restored and mark.batches > 0
        generator = settings.own_generator()
        if generator is not None and settings.seed is None:
            if restored and mark.generator is not None:
                generator.set_state(thaw(mark.generator))
            else:
                mark = replace(mark, generator=freeze(generator.get_state()))
        sampler_epoch = getattr(getattr(settings.order, "sampler", None), "epoch", None)
        if mark.sampler_epoch is None and isinstance(sampler_epoch, int):
            mark = replace(mark, sampler_epoch=sampler_epoch)
        mark = replace(mark, dataset_epoch=engine.dataset_epoch())
        inner = engine.inner(mark)
        self._stream: Stream | None = None
        self._asked: Asked | None = None
        if settings.order is not None and inner.requests is not None:
            self._stream = settings.order.begin(mark)
            # Workers that go on have their datasets' states already.
            current = restoring(self._stream, mark) if restored else iter(self._stream)
            self._asked = Asked()
            inner.requests.current = self._asked.noted(current)
        self._inner = iter(inner.loader)
        self._is_drained = False
        self._failed = 0
        self._failure: Exception | None = None
        self._lost: WorkerError | None = None
        if mark.base_seed is None:
            mark = replace(mark, base_seed=base_seed_of(self._inner))
        if not mark.workers and settings.tracks_workers:
            mark = replace(mark, workers=(WorkerPosition(),) * settings.streams)
        self._mark = mark
        engine.began(self.number, self.mark(), inner.source)

    def mark(self) -> Mark:
        """Where the pass stands, with what its order turned out to be drawn from."""
        return self._mark if self._stream is None else self._stream.noted(self._mark)

    def decide(self, mark: Mark) -> None:
        """Draw the order from what the mark says, unless it has begun."""
        self._mark = mark
        if self._stream is not None:
            self._stream.mark = mark

    def stop(self) -> None:
        """Drop torch's iterator, and end its workers."""
        inner, self._inner = self._inner, iter(())
        self.is_over = True
        end_workers(inner)

    def __iter__(self) -> Pass:
        return self

    def __len__(self) -> int:
        return len(self._engine)

    def __next__(self) -> Any:
        engine = self._engine
        if self._settings.num_workers or self._settings.darkroom is not None:
            check_process(self._pid, "This iterator")
        if self._handed_out_at is not None:
            engine.meter.step_s += time.perf_counter() - self._handed_out_at
            self._handed_out_at = None
        began = time.perf_counter()
        self._decode_s = 0.0
        try:
            fetched = self._fetch()
        except StopIteration:
            if not self._restart():
                raise
            return next(self)
        batch = self._moved(fetched)
        now = time.perf_counter()
        engine.meter.count_batch(
            fetched.samples, wait_s=now - began, read_s=now - began, decode_s=0.0
        )
        self._handed_out_at = now
        return batch

    def _fetch(self) -> Fetched:
        """The next batch from torch's iterator, its images decoded and augmented if asked for."""
        settings = self._settings
        darkroom = settings.darkroom
        if darkroom is None:
            fetched = self._next_fetched()
            self._note_all()
            return fetched
        # Reading ahead would leave the state of a dataset in this process ahead of the batch, and
        # an iterable one's iterator may have one.
        keeps = settings.order is None or has_state(settings.dataset)
        ahead = 1 if settings.num_workers == 0 and keeps else _FED_AHEAD
        while len(self._fed) < ahead and not self._is_drained and self._failure is None:
            try:
                fetched = self._next_fetched()
            except StopIteration:
                self._is_drained = True
                break
            except Exception as error:  # kept, and raised where its own batch is due
                self._failure = error
                break
            ids = np.asarray(fetched.ids, np.int64)
            darkroom.feed(fetched.batch, ids=ids, epoch=self._mark.epoch)
            self._fed.append((self._said, fetched))
            self._said = []
        if not self._fed:
            failure, self._failure = self._failure, None
            raise failure or StopIteration
        said, fetched = self._fed.popleft()
        self._note(said)
        began = time.perf_counter()
        batch = darkroom.outputs(fetched.batch)
        self._decode_s = time.perf_counter() - began
        return replace(fetched, batch=batch)

    def _next_fetched(self) -> Fetched:
        try:
            fetched = self._received()
            while fetched.void:
                self._said.append(fetched)
                fetched = self._received()
        except StopIteration:
            raise
        except Exception as error:  # raised again; who goes on behind it goes on with the next
            self._failed += 1
            better = self._better(error)
            if self._asked is not None:
                self._asked.came_back()
            if better is None:
                raise
            self._lost = better
            raise better from error
        return fetched

    def _received(self) -> Fetched:
        if self._lost is not None:  # what its worker was to read will never come
            raise self._lost
        fetched: Fetched = next(self._inner)
        if self._asked is not None:
            self._asked.came_back()
        return fetched

    def _better(self, error: Exception) -> WorkerError | None:
        """An error that names the samples that a dead worker was reading, if one has died."""
        settings = self._settings
        if settings.num_workers == 0:
            return None
        handed_out = {number: worker.batches for number, worker in enumerate(self._mark.workers)}
        return error_of(
            error, self._inner, self._asked, streams=handed_out, name=described(settings.dataset)
        )

    def _note(self, said: list[Fetched]) -> None:
        """What workers said in front of a batch that is handed out now."""
        if not said or not self._settings.tracks_workers:
            return
        workers = list(self._mark.workers)
        for fetched in said:
            workers[fetched.worker] = workers[fetched.worker].noted(fetched)
        self._mark = replace(self._mark, workers=tuple(workers))

    def _note_all(self) -> None:
        self._note(self._said)
        self._said = []

    def _moved(self, fetched: Fetched) -> Any:
        engine, settings, mark = self._engine, self._settings, self._mark
        batch = fetched.batch
        if self._stream is not None:
            for _ in range(self._failed):  # requests whose batches never came
                mark = self._stream.moved(mark)
            self._failed = 0
            valid = self._stream.valid()
            if valid is not None:
                batch = with_valid(batch, torch.from_numpy(valid))
            mark = self._stream.moved(mark)
        else:
            mark = replace(mark, batches=mark.batches + 1)
        if settings.tracks_workers:
            moved = mark.workers[fetched.worker].moved(fetched)
            workers = list(mark.workers)
            workers[fetched.worker] = moved
            mark = replace(
                mark,
                workers=tuple(workers),
                next_worker=(fetched.worker + 1) % settings.streams,
            )
        self._mark = mark
        self._fresh_restore = False
        engine.check_length(mark.batches)
        if not self.is_over:
            # A stream's length is a promise: it is over when it ends.
            steps = None if settings.order is None else engine.steps()
            self.is_over = steps is not None and mark.batches >= steps
            engine.moved(self.number, engine.after(mark) if self.is_over else mark)
        return batch if settings.device.type == "cpu" else to_device(batch, settings.device)

    def _restart(self) -> bool:
        """At the end of torch's iterator: whether there is more, as the pass was restored at an end
        that nobody could see."""
        self._note_all()
        mark, engine = self._mark, self._engine
        if self._fresh_restore:
            engine.tell_next_epoch(mark.epoch)
            self._start(engine.after(mark), restored=False)
            return True
        if not self.is_over:
            self.is_over = True
            engine.moved(self.number, engine.after(mark))
            engine.check_short(mark.batches)
        return False


def end_workers(inner: Any) -> None:
    """End the workers of one of torch's iterators now: by itself it does so when nothing refers to
    it any more, and the traceback of an error may for long.

    torch's handler of dead children raises in whatever runs then, its own clean-up included.
    """
    with contextlib.suppress(RuntimeError):
        shut_down(inner)
    stop_watching(inner)  # cut short: the handler mustn't see the rest
    alive = [worker for worker in workers_of(inner) if worker.is_alive()]
    for worker in alive:
        worker.terminate()
    for worker in alive:
        worker.join(_END_S)


def restoring(stream: Iterable[Request], mark: Mark) -> Iterator[Request]:
    """The stream's requests, with the dataset's state for each worker's first one.

    torch asks its workers in turn, from the first: empty requests come before those of the worker
    whose turn it is.
    """
    states = [worker.state for worker in mark.workers]
    if not any(states):
        yield from stream
        return
    for state in states[: mark.next_worker]:
        yield Request(restore=state, void=True)
    later = iter(states[mark.next_worker :])
    for request in stream:
        yield replace(request, restore=next(later, None))


def to_device(batch: Any, device: torch.device) -> Any:
    """The batch with every tensor on the device, in containers of the same kind."""
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, Mapping):
        return type(batch)({key: to_device(value, device) for key, value in batch.items()})  # type: ignore[call-arg]
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(to_device(value, device) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(to_device(value, device) for value in batch)
    return batch


def with_valid(batch: Any, valid: torch.Tensor) -> Any:
    """The batch with the mask of padded slots: last in a list or tuple, "valid" in a dict, else the
    second of a pair."""
    if isinstance(batch, Mapping):
        return {**batch, "valid": valid}
    if isinstance(batch, list):
        return [*batch, valid]
    if isinstance(batch, tuple):
        return (*batch, valid)
    return batch, valid
