"""The end of torch's worker processes: by us, or by a kill whose victims' samples are named.

torch says which process died. What it was asked for stands in the iterator's tasks: it was at one
of those that are not back; a batch that was read may have gone down with the process.
"""

from __future__ import annotations

import contextlib
from multiprocessing import connection
from typing import TYPE_CHECKING, Any

from penstock.cache.errors import WorkerError
from penstock.cache.processes import exit_words
from penstock.pipeline.torch_private import shut_down, stop_watching, tasks_of, workers_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from penstock.pipeline.foreign.worker import Request

_END_S = 5.0  # for a process that was told to end, or whose connection broke
_SHOWN = 64
_MEMORY = (
    "Often the machine is short of memory (see `dmesg`): use fewer workers or smaller batches; "
    "else read those samples alone, with num_workers=0."
)


class OutstandingRequests:
    """The requests of a pass by number, as long as their batches aren't back."""

    def __init__(self) -> None:
        self._requests: dict[int, Request] = {}
        self._sent = self._back = 0

    def recorded(self, requests: Iterator[Request]) -> Iterator[Request]:
        """Yield these requests, each kept until `came_back`."""
        for request in requests:
            self._requests[self._sent] = request
            self._sent += 1
            yield request

    def came_back(self) -> None:
        """Forget the request whose batch came back: the oldest that is kept."""
        self._requests.pop(self._back, None)
        self._back += 1

    def samples(self, tasks: Iterable[int]) -> str:
        """The samples that some tasks asked for, in words."""
        requests = [self._requests.get(task) for task in tasks]
        wanted = [r.index for r in requests if r is not None and not r.void]
        flat = [i for index in wanted for i in (index if isinstance(index, list) else [index])]
        more = ", ..." if len(flat) > _SHOWN else ""
        return f"samples {', '.join(map(repr, flat[:_SHOWN]))}{more}" if flat else "nothing"


def error_of(
    error: Exception,
    inner: Any,
    outstanding: OutstandingRequests | None,
    *,
    streams: Mapping[int, int],
    name: str,
) -> WorkerError | None:
    """A better error than that of torch's iterator `inner`, if one of its workers has died.

    outstanding: of a map-style dataset; else streams: batches that were handed out of each worker's
    stream. name: of the dataset.
    """
    workers = workers_of(inner)
    is_cut_off = isinstance(error, ConnectionError | EOFError)
    if not is_cut_off and not any(worker.exitcode for worker in workers):
        return None
    stop_watching(inner)
    if is_cut_off:  # it may not have ended yet
        ends = connection.wait([worker.sentinel for worker in workers], timeout=_END_S)
        for worker in workers:
            if worker.sentinel in ends:
                worker.join(_END_S)
    dead = {number: code for number, worker in enumerate(workers) if (code := worker.exitcode)}
    if not dead:
        return WorkerError(
            f"The connection to a DataLoader worker broke while it handed a batch over. {_MEMORY}"
        )
    losses = "; ".join(
        f"worker {number} (pid {workers[number].pid}) {exit_words(code)} while it was "
        f"reading {_at(inner, number, outstanding, streams)} of {name}"
        for number, code in dead.items()
    )
    return WorkerError(f"DataLoader {losses}. {_MEMORY}")


def _at(
    inner: Any, number: int, outstanding: OutstandingRequests | None, streams: Mapping[int, int]
) -> str:
    """What the worker was at, or had just read."""
    tasks = sorted(tasks_of(inner).items())
    mine = [(task, len(info) > 1) for task, info in tasks if info[0] == number]
    away = [task for task, is_back in mine if not is_back]
    if outstanding is not None:
        return outstanding.samples(away)
    first = streams.get(number, 0) + len(mine) - len(away)
    return f"batches {first} to {first + max(0, len(away) - 1)} of its stream"


def end_workers(inner: Any) -> None:
    """End the workers of one of torch's iterators now.

    By itself it does so when nothing refers to it any more, and the traceback of an error may for
    long. torch's handler of dead children raises in whatever runs then, its own clean-up included.
    """
    with contextlib.suppress(RuntimeError):
        shut_down(inner)
    stop_watching(inner)  # cut short: the handler mustn't see the rest
    alive = [worker for worker in workers_of(inner) if worker.is_alive()]
    for worker in alive:
        worker.terminate()
    for worker in alive:
        worker.join(_END_S)
