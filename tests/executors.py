"""Executors and verifiers for tests of packing and indexing: workers that are killed, recorded
tasks."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests import images

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from penstock.readers import Encoded, ImageFacts, Rejection

KILLS = "PENSTOCK_TEST_KILLS"
"""A folder: each file in it is a worker that has yet to be killed."""


def plan_kills(folder: Path, count: int, set_variable: Callable[[str, str], None]) -> None:
    """Kill this many workers, one after the other, in the middle of a task."""
    folder.mkdir()
    for number in range(count):
        (folder / str(number)).touch()
    set_variable(KILLS, str(folder))


def verify(samples: Sequence[Encoded]) -> list[ImageFacts | Rejection]:
    """Verify by Pillow, but kill the process while kills are left."""
    folder = os.environ.get(KILLS)
    for marker in sorted(Path(folder).iterdir()) if folder else ():
        with contextlib.suppress(FileNotFoundError):
            marker.unlink()
            os.kill(os.getpid(), signal.SIGKILL)
    return images.verify(samples)


class RecordingExecutor(Executor):
    """An executor that runs each task at once in this process, from its pickled bytes."""

    def __init__(self) -> None:
        self.tasks: list[bytes] = []

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        self.tasks.append(pickle.dumps((fn, args, kwargs)))
        fn, args, kwargs = pickle.loads(self.tasks[-1])
        future: Future[Any] = Future()
        try:
            future.set_result(pickle.loads(pickle.dumps(fn(*args, **kwargs))))
        except BaseException as error:
            future.set_exception(error)
        return future
