"""The source for a map-style dataset: it fetches what a request asks for, where the dataset is."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.utils.data

from penstock.cache.errors import TooManyBadSamplesError
from penstock.pipeline.foreign.collating import collate_named
from penstock.pipeline.foreign.dataset_state import copy_of, has_state, state_of
from penstock.pipeline.foreign.samples import SampleReader
from penstock.pipeline.foreign.worker import WorkerMessage, worker_id

if TYPE_CHECKING:
    from penstock.pipeline.foreign.collating import Collate
    from penstock.pipeline.foreign.faults import Substitutes
    from penstock.pipeline.foreign.samples import Samples
    from penstock.pipeline.foreign.worker import Request


@dataclass(frozen=True, slots=True)
class RandomState:
    """States of the three generators that datasets draw from."""

    python: Any
    numpy: Any
    torch: torch.Tensor

    @classmethod
    def now(cls) -> RandomState:
        return cls(random.getstate(), np.random.get_state(), torch.get_rng_state())

    def restore(self) -> None:
        random.setstate(self.python)
        np.random.set_state(self.numpy)
        torch.set_rng_state(self.torch)


class MapSource(torch.utils.data.Dataset[WorkerMessage]):
    """A dataset for torch's loader whose items are requests to the user's map-style dataset.

    seed: None, or what each sample's random numbers are keyed by, with epoch and index.
    substitutes: what stands in for bad samples; None where one is an error.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        collate: Collate,
        batched: bool,
        seed: int | None = None,
        substitutes: Substitutes | None = None,
    ) -> None:
        self.dataset = dataset
        self._collate = collate
        self._batched = batched
        self._reader = SampleReader(dataset, seed, substitutes)
        self._has_state = has_state(dataset)

    def __getitem__(self, request: Request) -> WorkerMessage:
        if request.restore is not None:
            self.load(request.restore)
        worker = worker_id()
        if request.void:
            return WorkerMessage(worker=worker, void=True)
        in_main = torch.utils.data.get_worker_info() is None
        before = RandomState.now() if in_main and self._reader.seed is not None else None
        try:
            read, batch = self._fetch(request)
        except TooManyBadSamplesError as error:  # torch would raise it without its sample_ids
            return WorkerMessage(worker=worker, error=error)
        finally:
            if before is not None:
                before.restore()
        # Every time, unlike a stream's: what lies between two could not be read again.
        state = self.state() if self._has_state and not in_main else None
        return WorkerMessage(
            batch=batch,
            samples=len(read.ids),
            ids=read.ids,
            occurrences=request.occurrences,
            worker=worker,
            state=state,
            bad=read.bad,
        )

    def _fetch(self, request: Request) -> tuple[Samples, Any]:
        if not self._batched:
            read = self._reader.read([request.index], request.epoch, together=False)
            return read, self._collate(read.samples[0])
        read = self._reader.read(list(request.index), request.epoch, together=True)
        return read, collate_named(self._collate, read.samples, read.ids)

    def state(self) -> dict[str, Any]:
        """The dataset's own state as it is now, if it has one."""
        return {"dataset": state_of(self.dataset)} if self._has_state else {}

    def load(self, state: dict[str, Any]) -> None:
        """Hand a state back to the dataset."""
        if "dataset" in state and self._has_state:
            self.dataset.load_state_dict(copy_of(state["dataset"]))
