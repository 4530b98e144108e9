"""The source for a map-style dataset: it fetches what a request asks for, where the dataset is."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.utils.data

from penstock.cache.base.hashing import keyed_hash
from penstock.pipeline.foreign.collating import collate_named
from penstock.pipeline.foreign.dataset_state import copy_of, description_of, has_state, state_of
from penstock.pipeline.foreign.worker import WorkerMessage, seed_all, worker_id

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.pipeline.foreign.collating import Collate
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
    """

    def __init__(
        self, dataset: Any, *, collate: Collate, batched: bool, seed: int | None = None
    ) -> None:
        self.dataset = dataset
        self._collate = collate
        self._batched = batched
        self._seed = seed
        self._has_state = has_state(dataset)

    def __getitem__(self, request: Request) -> WorkerMessage:
        if request.restore is not None:
            self.load(request.restore)
        worker = worker_id()
        if request.void:
            return WorkerMessage(worker=worker, void=True)
        in_main = torch.utils.data.get_worker_info() is None
        before = RandomState.now() if in_main and self._seed is not None else None
        try:
            batch = self._fetch(request)
        finally:
            if before is not None:
                before.restore()
        # Every time, unlike a stream's: what lies between two could not be read again.
        state = self.state() if self._has_state and not in_main else None
        ids = list(request.index) if self._batched else [request.index]
        return WorkerMessage(batch=batch, samples=len(ids), ids=ids, worker=worker, state=state)

    def _fetch(self, request: Request) -> Any:
        if not self._batched:
            (key,) = self._keys(request.epoch, [request.index])
            return self._collate(self._one(request.index, key))
        indices = list(request.index)
        keys = self._keys(request.epoch, indices)
        many = getattr(self.dataset, "__getitems__", None)
        if callable(many):
            if keys and keys[0] is not None:
                seed_all(keys[0])  # one call draws for all: keyed by its first sample
            samples = many(indices)
        else:
            samples = [self._one(index, key) for index, key in zip(indices, keys, strict=True)]
        return collate_named(self._collate, samples, indices)

    def _keys(self, epoch: int, indices: Sequence[Any]) -> list[int | None]:
        if self._seed is None:
            return [None] * len(indices)
        hashes = keyed_hash(self._seed, epoch, np.asarray(indices, np.int64))
        return [int(key) for key in hashes]

    def _one(self, index: Any, key: int | None) -> Any:
        if key is not None:
            seed_all(key)
        try:
            return self.dataset[index]
        except Exception as error:  # raised again, with the sample named
            error.add_note(f"while reading sample {index!r} of {description_of(self.dataset)}")
            raise

    def state(self) -> dict[str, Any]:
        """The dataset's own state as it is now, if it has one."""
        return {"dataset": state_of(self.dataset)} if self._has_state else {}

    def load(self, state: dict[str, Any]) -> None:
        """Hand a state back to the dataset."""
        if "dataset" in state and self._has_state:
            self.dataset.load_state_dict(copy_of(state["dataset"]))
