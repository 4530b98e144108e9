"""Wrap each undocumented torch name that this library uses.

No other module uses one, except for the process group's store (`cache.job_store`). Each stands in
a function of its own, and `tests/pipeline/test_torch_private.py` says of each what breaks when a
release of torch changes it. torch is imported where it is needed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from penstock.cache import leave_to_parent

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from multiprocessing.process import BaseProcess

# -- the loader


def show_as_stream(loader: Any) -> None:
    """Have trainers take a loader for one over a stream: they rebuild those over map datasets."""
    from torch.utils.data.dataloader import _DatasetKind

    object.__setattr__(loader, "_dataset_kind", _DatasetKind.Iterable)


def without_worker_context(loader: Any) -> None:
    """Give `multiprocessing_context` a value in a loader whose torch constructor never ran."""
    object.__setattr__(loader, "_DataLoader__multiprocessing_context", None)


def overwrite(loader: Any, name: str, value: object) -> None:
    """Set one of the attributes that torch's loader refuses to change once it is made."""
    object.__setattr__(loader, name, value)


def kept_iterator(loader: Any) -> Any:
    """The iterator that torch's loader keeps for its persistent workers; None before its first."""
    return getattr(loader, "_iterator", None)


# -- its iterator


def base_seed_of(iterator: Any) -> int | None:
    """The seed that an iterator's workers seed themselves from; None where it isn't known."""
    seed = getattr(iterator, "_base_seed", None)
    return seed if isinstance(seed, int) else None


def workers_of(iterator: Any) -> Sequence[BaseProcess]:
    """The worker processes of an iterator, by number; none where it reads in this process."""
    workers: Sequence[BaseProcess] = getattr(iterator, "_workers", ())
    return workers


def tasks_of(iterator: Any) -> Mapping[int, Sequence[Any]]:
    """What an iterator's workers were asked for: task -> (worker,), or (worker, batch) if back."""
    tasks: Mapping[int, Sequence[Any]] = getattr(iterator, "_task_info", {})
    return tasks


def shut_down(iterator: Any) -> None:
    """End an iterator's workers now, not when nothing refers to the iterator any more."""
    shutdown = getattr(iterator, "_shutdown_workers", None)
    if shutdown is not None:
        shutdown()


def stop_watching(iterator: Any) -> None:
    """Tell torch's handler of dead children no more of an iterator's workers.

    It raises in whatever runs when a signal comes: the clean-up and the next job included.
    """
    if getattr(iterator, "_worker_pids_set", False):
        from torch.utils.data._utils import signal_handling

        signal_handling._remove_worker_pids(id(iterator))  # type: ignore[attr-defined]
        iterator._worker_pids_set = False


def disown(iterator: Any) -> None:
    """Keep a forked child from ending the workers of its parent's iterator.

    torch would at the child's exit, by an event that the processes share, and Python's own
    multiprocessing by a signal to each of its children.
    """
    if not workers_of(iterator):  # none yet, as this is the fork of the first; or no more
        return
    iterator._shutdown = True
    for worker in workers_of(iterator):
        leave_to_parent(worker)


# -- its workers


def numpy_seed(base_seed: int, worker: int) -> Any:
    """What torch seeds numpy's global generator with in a worker."""
    from torch.utils.data._utils.worker import _generate_state

    return _generate_state(base_seed, worker)  # type: ignore[no-untyped-call]


def tell_worker(info: Any, *, dataset: Any, seed: int | None) -> None:
    """Change what `torch.utils.data.get_worker_info()` says in this worker; it refuses assignment.

    seed: None leaves it.
    """
    object.__setattr__(info, "dataset", dataset)
    if seed is not None:
        object.__setattr__(info, "seed", seed)


def pinned(batch: Any) -> Any:
    """The batch with every tensor in pinned memory, in the containers that torch's loader knows."""
    from torch.utils.data._utils.pin_memory import pin_memory

    return pin_memory(batch)  # type: ignore[no-untyped-call]
