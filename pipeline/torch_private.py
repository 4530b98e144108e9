"""Wrap each undocumented torch name that this library uses.

No other module uses one, except for the process group's store (`cache.channel`). Each name is
used in one function, and `tests/pipeline/test_torch_private.py` states for each what breaks if a
release of torch changes it. torch is imported when it is needed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from penstock.cache import leave_to_parent

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from multiprocessing.process import BaseProcess

# -- the loader


def show_as_stream(loader: Any) -> None:
    """Make trainers treat a loader as one over a stream: they rebuild loaders over map datasets."""
    from torch.utils.data.dataloader import _DatasetKind

    object.__setattr__(loader, "_dataset_kind", _DatasetKind.Iterable)


def without_worker_context(loader: Any) -> None:
    """Set `multiprocessing_context` in a loader whose torch constructor never ran."""
    object.__setattr__(loader, "_DataLoader__multiprocessing_context", None)


def overwrite(loader: Any, name: str, value: object) -> None:
    """Set an attribute that torch's loader protects once it is made."""
    object.__setattr__(loader, name, value)


def kept_iterator(loader: Any) -> Any:
    """Return the iterator that torch's loader keeps for persistent workers; None before the
    first."""
    return getattr(loader, "_iterator", None)


# -- its iterator


def base_seed_of(iterator: Any) -> int | None:
    """Return the seed from which an iterator's workers seed themselves; None if unknown."""
    seed = getattr(iterator, "_base_seed", None)
    return seed if isinstance(seed, int) else None


def workers_of(iterator: Any) -> Sequence[BaseProcess]:
    """Return the worker processes of an iterator, by number; none if it reads in this process."""
    workers: Sequence[BaseProcess] = getattr(iterator, "_workers", ())
    return workers


def tasks_of(iterator: Any) -> Mapping[int, Sequence[Any]]:
    """Return the requests of an iterator's workers: task -> (worker,), or (worker, batch) if
    returned."""
    tasks: Mapping[int, Sequence[Any]] = getattr(iterator, "_task_info", {})
    return tasks


def shut_down(iterator: Any) -> None:
    """End an iterator's workers now, instead of when nothing refers to the iterator any more."""
    shutdown = getattr(iterator, "_shutdown_workers", None)
    if shutdown is not None:
        shutdown()


def stop_watching(iterator: Any) -> None:
    """Remove an iterator's workers from torch's handler of dead children.

    The handler raises in any code that runs when a signal comes: the clean-up and the next job
    included.
    """
    if getattr(iterator, "_worker_pids_set", False):
        from torch.utils.data._utils import signal_handling

        signal_handling._remove_worker_pids(id(iterator))  # type: ignore[attr-defined]
        iterator._worker_pids_set = False


def disown(iterator: Any) -> None:
    """Keep a forked child from ending the workers of its parent's iterator.

    At the child's exit, torch would end them by an event that the processes share, and Python's
    multiprocessing by a signal to each of its children.
    """
    if not workers_of(iterator):  # none yet, as this is the fork of the first; or no more
        return
    iterator._shutdown = True
    for worker in workers_of(iterator):
        leave_to_parent(worker)


# -- its workers


def numpy_seed(base_seed: int, worker: int) -> Any:
    """Return the seed that torch gives to numpy's global generator in a worker."""
    from torch.utils.data._utils.worker import _generate_state

    return _generate_state(base_seed, worker)  # type: ignore[no-untyped-call]


def set_worker_info(info: Any, *, dataset: Any, seed: int | None) -> None:
    """Change the result of `torch.utils.data.get_worker_info()` in this worker.

    torch refuses assignment to it. seed: None leaves it unchanged.
    """
    object.__setattr__(info, "dataset", dataset)
    if seed is not None:
        object.__setattr__(info, "seed", seed)


def pinned(batch: Any) -> Any:
    """Return the batch with every tensor in pinned memory, in the containers that torch's loader
    knows."""
    from torch.utils.data._utils.pin_memory import pin_memory

    return pin_memory(batch)  # type: ignore[no-untyped-call]
