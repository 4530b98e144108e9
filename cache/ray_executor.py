"""Ray's tasks behind the interface of `concurrent.futures`; Ray is imported where one is made."""

from __future__ import annotations

import threading
from concurrent.futures import Executor, Future
from typing import TYPE_CHECKING, Any, TypeVar

from penstock.cache.errors import ConfigError, MissingDependencyError

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")

RETRIES = 3
"""So often Ray runs a task anew whose worker died."""


class RayExecutor(Executor):
    """An executor over the tasks of Ray, for `executor=` of `pack`, `index` and `warm`.

    Raises MissingDependencyError without Ray, and ConfigError where no Ray runs: call ray.init()
    first, or give an address.
    """

    def __init__(self, address: str | None = None, *, num_cpus: float = 1, **options: Any) -> None:
        """address: as ray.init takes it, such as "auto" or "ray://host:10001"; None: Ray is
        initialised. num_cpus: cores that a task takes; options: others of ray.remote."""
        self._ray = ray = _import_ray()
        self._started = False
        if not ray.is_initialized():
            if address is None:
                raise ConfigError(
                    "RayExecutor: Ray isn't initialised here. Call ray.init(…) first, or pass an "
                    'address such as "auto" or "ray://HOST:10001".'
                )
            ray.init(address=address, log_to_driver=False)
            self._started = True
        told = {"max_retries": RETRIES, "num_cpus": num_cpus, **options}
        self._remote = ray.remote(**told)(_call)
        self._open: dict[Future[Any], Any] = {}
        self._lock, self._closed = threading.Lock(), False

    @property
    def num_workers(self) -> int:
        """How many tasks run at a time, by the cluster's cores."""
        return max(1, int(self._ray.cluster_resources().get("CPU", 1)))

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        """Run fn(*args, **kwargs) as a task of Ray."""
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
        """Let no more in; leave Ray, if it was joined here."""
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


def _call(fn: Callable[..., T], args: tuple[Any, ...], kwargs: dict[str, Any]) -> T:
    return fn(*args, **kwargs)


def _import_ray() -> Any:
    try:
        import ray
    except ImportError as error:
        raise MissingDependencyError(
            f"Ray isn't installed ({error}): pip install ray, on this machine and where its "
            "workers run."
        ) from error
    return ray
