"""Run tasks on the workers of any executor with the interface of `concurrent.futures`.

Dask's `client.get_executor()`, MPI's pool, a process pool and Ray (`RayExecutor`) are such
executors. They decide which worker runs a task and whether they repeat a task whose worker died.
Tasks are plain values that may run twice, only a few are submitted ahead, and an error names its
worker: a worker returns its error as a value. Ray is imported when a RayExecutor is created.
"""

from __future__ import annotations

import hashlib
import logging
import os
import pickle
import socket
import threading
import time
from collections import OrderedDict
from concurrent.futures import BrokenExecutor, CancelledError, Executor, Future, wait
from typing import TYPE_CHECKING, Any, ClassVar, Generic, NamedTuple, TypeVar

from penstock.cache.errors import ConfigError, MissingDependencyError, PenstockError, WorkerError
from penstock.version import __version__

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable

T = TypeVar("T")
R = TypeVar("R")

MANY_WORKERS = 64
"""The assumed number of workers of an executor that doesn't report it."""

_AHEAD_PER_WORKER = 2  # one task runs, one waits
_WAIT_S = 1.0  # Python handles an interrupt between two waits
_MOST_KEPT = 4
_QUIET_S = 60.0  # time without a result after which a warning is logged


class _Result(NamedTuple, Generic[R]):
    """The answer of a worker to a task: a value, or an error whose message begins with the worker's
    name. It has a class of its own to distinguish it from other values of an executor."""

    value: R | None
    error: PenstockError | None = None


def _run(task: Callable[[], R], version: str) -> _Result[R]:
    """Run a task in a worker. version: of the Penstock that created it."""
    try:
        if version != __version__:
            raise ConfigError(
                f"it has Penstock {__version__}, and the process that submits the tasks has "
                f"{version}. Install the same version on all machines."
            )
        return _Result(task())
    except PenstockError as error:
        error.args = (f"{worker_name()}: {error}",)
        return _Result(None, error)
    except OSError as error:  # many others can't be pickled
        return _Result(None, WorkerError(f"{worker_name()}: {error}"))


def worker_name() -> str:
    """Return a name by which a person can find this process among several machines."""
    return f"Worker {socket.gethostname()} (process {os.getpid()})"


def worker_count(executor: Executor) -> int | None:
    """Return how many tasks an executor runs at a time; None if it doesn't report that."""
    client = dask_client(executor)
    if client is not None:
        return max(1, sum(map(int, client.nthreads().values())))
    for name in ("num_workers", "_max_workers"):
        if isinstance(count := getattr(executor, name, None), int) and count > 0:
            return int(count)
    return None


def dask_client(executor: Executor) -> Any | None:
    """Return the client of a Dask executor, which has no public name; None for other executors."""
    if type(executor).__module__.partition(".")[0] != "distributed":
        return None
    return getattr(executor, "_client", None)


def check_executor(executor: object) -> None:
    """Raise ConfigError if the object is no executor."""
    if isinstance(executor, type) or not callable(getattr(executor, "submit", None)):
        raise ConfigError(
            f"executor: got {executor!r}, wanted an Executor of concurrent.futures, such as a "
            "ProcessPoolExecutor or Dask's Client(…).get_executor()."
        )


def run_tasks(
    executor: Executor, tasks: Iterable[tuple[T, Callable[[], R]]], *, what: str, total: int
) -> Generator[tuple[T, R], None, None]:
    """Run tasks on an executor's workers; yield (key, result) as they end, in any order.

    tasks: the key and the function of each, a `partial` of a module's function and plain values, so
    that it can be pickled. They are read from the iterable when they are submitted, two per worker
    ahead. what: the tasks' name in messages, a plural such as "shards". total: the number of tasks,
    for messages. Closing the generator cancels the tasks that haven't begun.

    Raises the errors of tasks, their messages preceded by the worker's name, and WorkerError if
    workers died.
    """
    ahead = max(4, _AHEAD_PER_WORKER * (worker_count(executor) or MANY_WORKERS))
    waiting = iter(tasks)
    pending: dict[Future[Any], T] = {}
    done, last_s = 0, time.monotonic()  # of the last result or warning

    def progress() -> str:
        return f"{done} of {total} {what} of this run are done and kept"

    try:
        while True:
            while len(pending) < ahead and (task := next(waiting, None)) is not None:
                key, function = task
                pending[_submitted(executor, function, progress())] = key
            if not pending:
                return
            ended, _ = wait(pending, timeout=_WAIT_S, return_when="FIRST_COMPLETED")
            if ended:
                last_s = time.monotonic()
            elif time.monotonic() - last_s > _QUIET_S:
                last_s = time.monotonic()
                logging.getLogger("penstock").warning(
                    "No worker has finished a task for %.0f s: %s. Check in the executor's own "
                    "dashboard or log whether workers are running.",
                    _QUIET_S,
                    progress(),
                )
            for future in ended:
                key = pending.pop(future)
                result = _result(future, progress())
                done += 1
                yield key, result
    finally:
        for future in pending:
            future.cancel()


def _submitted(executor: Executor, task: Callable[[], R], progress: str) -> Future[Any]:
    try:
        future = executor.submit(_run, task, __version__)
    except BrokenExecutor as error:
        raise _died(error, progress) from error
    except RuntimeError as error:  # it was shut down, or its cluster has ended
        raise WorkerError(
            f"executor: {type(executor).__name__} accepts no tasks ({_reason(error)}). {progress}: "
            "repeat the call with a running executor to continue from there."
        ) from error
    if not isinstance(future, Future):
        raise ConfigError(
            f"executor: {type(executor).__name__}.submit returned {type(future).__name__}, wanted "
            "a Future of concurrent.futures."
        )
    return future


def _result(future: Future[Any], progress: str) -> Any:
    try:
        result = future.result()
    except (BrokenExecutor, CancelledError) as error:
        raise _died(error, progress) from error
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "penstock":
            raise
        raise MissingDependencyError(
            f"A worker has no Penstock ({error}). Install Penstock {__version__} on the workers' "
            "machines, too."
        ) from error
    except Exception as error:
        # Each engine has its own errors for dead workers, which only their names identify.
        if type(error).__name__ in _DEAD_WORKER_ERRORS:
            raise _died(error, progress) from error
        raise
    if not isinstance(result, _Result):
        raise WorkerError(
            f"The executor answered a task with {type(result).__name__}, which isn't what the task "
            f"returned. {progress}. Pass an executor that runs fn(*args) and returns its result."
        )
    if result.error is not None:
        raise result.error
    return result.value


_DEAD_WORKER_ERRORS = frozenset((
    "KilledWorker", "FutureCancelledError", "CommClosedError",  # Dask
    "WorkerCrashedError", "NodeDiedError", "ActorDiedError",  # Ray
    "TerminatedWorkerError",  # loky
))  # fmt: skip


def _reason(error: BaseException) -> str:
    return str(error).strip().split("\n")[0] or type(error).__name__


def _died(error: BaseException, progress: str) -> WorkerError:
    return WorkerError(
        f"A worker died, or the executor dropped its tasks ({_reason(error)}). {progress}: repeat "
        "the call with a new executor to continue from there. Read the worker's output where the "
        "executor stores it; a process that was killed has often run out of memory."
    )


class OpenResources:
    """The objects that a worker process keeps open for its next task."""

    lock = threading.Lock()
    made: ClassVar[OrderedDict[str, Any]] = OrderedDict()

    @classmethod
    def forget(cls) -> None:
        """Forget all objects in a forked child, because they belong to its parent."""
        cls.lock, cls.made = threading.Lock(), OrderedDict()


os.register_at_fork(after_in_child=OpenResources.forget)


def keep_open(value: object, make: Callable[[], T]) -> T:
    """Return the result of make(), called once per process and value, which is compared by its
    pickled bytes; the last few are kept."""
    key = hashlib.sha256(pickle.dumps(value)).hexdigest()
    with OpenResources.lock:
        if key not in OpenResources.made:
            OpenResources.made[key] = make()
            while len(OpenResources.made) > _MOST_KEPT:
                OpenResources.made.popitem(last=False)
        OpenResources.made.move_to_end(key)
        kept: T = OpenResources.made[key]
        return kept


RETRIES = 3
"""How often Ray repeats a task whose worker died."""


class RayExecutor(Executor):
    """An executor that runs tasks by Ray, for `executor=` of `pack`, `index` and `warm`.

    Raises MissingDependencyError without Ray, and ConfigError if Ray isn't initialised: call
    ray.init() first, or give an address.
    """

    def __init__(self, address: str | None = None, *, num_cpus: float = 1, **options: Any) -> None:
        """address: the address for ray.init, such as "auto" or "ray://host:10001"; None if Ray is
        initialised. num_cpus: the number of cores that a task uses. options: other arguments of
        ray.remote."""
        try:
            import ray
        except ImportError as error:
            raise MissingDependencyError(
                f"Ray isn't installed ({error}): pip install ray, on this machine and where its "
                "workers run."
            ) from error
        self._ray, self._started = ray, False
        if not ray.is_initialized():
            if address is None:
                raise ConfigError(
                    "RayExecutor: Ray isn't initialised here. Call ray.init(…) first, or pass an "
                    'address such as "auto" or "ray://HOST:10001".'
                )
            ray.init(address=address, log_to_driver=False)
            self._started = True
        arguments = {"max_retries": RETRIES, "num_cpus": num_cpus, **options}
        self._remote = ray.remote(**arguments)(_call_task)
        self._open: dict[Future[Any], Any] = {}
        self._lock, self._closed = threading.Lock(), False

    @property
    def num_workers(self) -> int:
        """The number of tasks that run at a time, which is the number of the cluster's cores."""
        return max(1, int(self._ray.cluster_resources().get("CPU", 1)))

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        """Run fn(*args, **kwargs) as a Ray task."""
        with self._lock:
            if self._closed:
                raise RuntimeError("cannot schedule new futures after shutdown")
            task = self._remote.remote(fn, args, kwargs)
            future: Future[T] = task.future()
            self._open[future] = task
        future.add_done_callback(self._ended)
        return future

    def _ended(self, future: Future[Any]) -> None:
        task = self._open.pop(future, None)
        if task is not None and future.cancelled():
            self._ray.cancel(task)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Accept no more tasks; shut Ray down if this object initialised it."""
        with self._lock:
            self._closed = True
            pending = list(self._open)
        if cancel_futures:
            for future in pending:
                future.cancel()
        if wait:
            tasks = [task for future, task in list(self._open.items()) if not future.cancelled()]
            if tasks:
                self._ray.wait(tasks, num_returns=len(tasks))
        if self._started:
            self._ray.shutdown()
            self._started = False


def _call_task(fn: Callable[..., T], args: tuple[Any, ...], kwargs: dict[str, Any]) -> T:
    return fn(*args, **kwargs)
