"""torch's iterator of one pass: what it brings back, and what its workers were asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from penstock.cache.errors import PenstockError
from penstock.pipeline.foreign.dataset_state import description_of
from penstock.pipeline.foreign.worker_loss import OutstandingRequests, end_workers, error_of
from penstock.pipeline.torch_private import base_seed_of, disown

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.cache.errors import WorkerError
    from penstock.pipeline.foreign.mark import Mark
    from penstock.pipeline.foreign.setup import PassSetup
    from penstock.pipeline.foreign.torch_loaders import TorchLoader
    from penstock.pipeline.foreign.worker import Request, WorkerMessage


class TorchIterator:
    """torch's iterator of one pass, whose errors name the samples that a dead worker was reading.

    base_seed: what its workers seed themselves from, if that is known. failed: batches that never
    came, as reading raised; whoever moves the mark behind them sets it back.
    """

    def __init__(
        self, torch_loader: TorchLoader, requests: Iterator[Request] | None, setup: PassSetup
    ) -> None:
        """requests: None for an iterable dataset."""
        self._setup = setup
        self._outstanding: OutstandingRequests | None = None
        if torch_loader.requests is not None and requests is not None:
            self._outstanding = OutstandingRequests()
            torch_loader.requests.current = self._outstanding.recorded(requests)
        self._torch_loader: TorchLoader | None = torch_loader  # its workers live as long
        self._inner: Any = torch_loader.begin()
        self.base_seed = base_seed_of(self._inner)
        self.failed = 0
        self._lost: WorkerError | None = None

    def next_message(self, mark: Mark) -> WorkerMessage:
        """The next that a worker brings: a batch, or what it has to say between two.

        mark: of what was handed out so far. Raises WorkerError where a worker has died, else what
        reading raised: who goes on behind that goes on with the next batch.
        """
        if self._lost is not None:  # what its worker was to read will never come
            self.failed += 1
            raise self._lost
        try:
            message: WorkerMessage = next(self._inner)
        except StopIteration:
            raise
        except Exception as error:  # raised again, or a better one
            self.failed += 1
            better = self._better(error, mark)
            if self._outstanding is not None:
                self._outstanding.came_back()
            if better is None:
                raise
            self._lost = better
            raise better from error
        if self._outstanding is not None:
            self._outstanding.came_back()
        if message.error is not None:
            self.failed += 1
            raise message.error
        return message

    def loss_behind(self, error: RuntimeError, mark: Mark) -> WorkerError | None:
        """What to raise in place of an error that didn't come from `next_message`, where it tells
        of a dead worker."""
        if self._lost is None and not isinstance(error, PenstockError):
            self._lost = self._better(error, mark)
            return self._lost
        return None

    def _better(self, error: Exception, mark: Mark) -> WorkerError | None:
        """An error that names the samples that a dead worker was reading, if one has died."""
        setup = self._setup
        if setup.num_workers == 0:
            return None
        return error_of(
            error,
            self._inner,
            self._outstanding,
            streams={number: worker.batches for number, worker in enumerate(mark.workers)},
            name=description_of(setup.dataset),
        )

    def stop(self) -> None:
        """Drop torch's iterator, and end its workers."""
        inner, self._inner = self._inner, iter(())
        end_workers(inner)
        self._torch_loader = None

    def disown(self) -> None:
        """Drop torch's iterator in a forked child, and let its workers live on."""
        inner, self._inner = self._inner, iter(())
        disown(inner)
