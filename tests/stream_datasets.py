"""Iterable datasets that keep, lose or count state in every way, for the tests of resuming.

Each yields the samples of its worker's part. sizes: of each worker's part; without workers, one
process reads all. A sample is a number; datasets that count epochs add 100 times the epoch.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
import torch.utils.data

from tests.torch_datasets import (
    Drawn,
    KeepsPlace,
    Remembering,
    ResumesPlace,
    Sized,
    Streams,
    Walked,
    own_part,
)


class Restarting(torch.utils.data.IterableDataset[Any]):
    """A dataset that is its own iterator, restarted by each iter(); no state."""

    def __init__(self, sizes: list[int]) -> None:
        self.sizes = sizes

    def __iter__(self) -> Any:
        self.part, self.at = list(own_part(self.sizes)), 0
        return self

    def __next__(self) -> int:
        if self.at == len(self.part):
            raise StopIteration
        self.at += 1
        return self.part[self.at - 1]


class RestartingStateful(Restarting):
    """A dataset that is its own iterator, with state: iter() must be called before the state is
    loaded."""

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert self.part is not None
        self.at = state["at"]


class RestartingCounted(RestartingStateful):
    """A dataset that is its own iterator and counts its epochs."""

    epoch = -1

    def __iter__(self) -> Any:
        self.epoch += 1
        return super().__iter__()

    def __next__(self) -> int:
        return super().__next__() + 100 * self.epoch

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "epoch": self.epoch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at, self.epoch = state["at"], state["epoch"]


class TakingOver(ResumesPlace, Restarting):
    """A dataset that is its own iterator; the next iter() applies a loaded state."""

    def __iter__(self) -> Any:
        super().__iter__()
        self.at, self.resume = self.resume, 0
        return self


class Wrapping(torch.utils.data.IterableDataset[Any]):
    """A generator that counts epochs and is at the start of the next epoch when it ends."""

    def __init__(self, sizes: list[int]) -> None:
        self.sizes, self.at, self.epoch, self.resume = sizes, 0, 0, 0

    def __iter__(self) -> Any:
        part = own_part(self.sizes)
        self.at, self.resume = self.resume, 0
        for number in list(part)[self.at :]:
            self.at += 1
            yield number + 100 * self.epoch
        self.at = 0
        self.epoch += 1

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "epoch": self.epoch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.resume, self.epoch = state["at"], state["epoch"]


class Shuffling(torch.utils.data.IterableDataset[Any]):
    """A generator that counts epochs when it starts, each in an order of its own."""

    def __init__(self, sizes: list[int]) -> None:
        self.sizes, self.at, self.epoch, self.resumed = sizes, 0, -1, False

    def __iter__(self) -> Any:
        if not self.resumed:
            self.at, self.epoch = 0, self.epoch + 1
        self.resumed = False
        part = list(own_part(self.sizes))
        random.Random(self.epoch).shuffle(part)
        while self.at < len(part):
            self.at += 1
            yield part[self.at - 1] + 100 * self.epoch

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "epoch": self.epoch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at, self.epoch, self.resumed = state["at"], state["epoch"], True


class LiveDict(Shuffling):
    """A dataset that returns the dict that it goes on to change, and keeps the dict that it is
    given."""

    def __init__(self, sizes: list[int]) -> None:
        super().__init__(sizes)
        self.live: dict[str, Any] = {"at": 0, "epoch": -1, "seen": []}

    def __iter__(self) -> Any:
        if not self.resumed:
            self.live |= {"at": 0, "epoch": self.live["epoch"] + 1}
        self.resumed = False
        part = list(own_part(self.sizes))
        random.Random(self.live["epoch"]).shuffle(part)
        while self.live["at"] < len(part):
            number = part[self.live["at"]]
            self.live["at"] += 1
            self.live["seen"].append(number)
            yield number + 100 * self.live["epoch"]

    def state_dict(self) -> dict[str, Any]:
        return self.live

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.live, self.resumed = state, True


class Eager(KeepsPlace, torch.utils.data.IterableDataset[Any]):
    """A dataset whose __iter__ restarts at once; the iterator reads the dataset's position."""

    def __init__(self, sizes: list[int]) -> None:
        self.sizes, self.at = sizes, 0

    def __iter__(self) -> Any:
        self.at = 0
        return self._rest(list(own_part(self.sizes)))

    def _rest(self, part: list[int]) -> Any:
        while self.at < len(part):
            self.at += 1
            yield part[self.at - 1]


class EagerOnce(ResumesPlace, Eager):
    """A dataset whose __iter__ applies a loaded state once."""

    def __iter__(self) -> Any:
        self.at, self.resume = self.resume, 0
        return self._rest(list(own_part(self.sizes)))


class LateState(ResumesPlace, Eager):
    """A dataset that has a state only after iter() was called."""

    def __init__(self, sizes: list[int]) -> None:
        self.sizes, self.resume = sizes, 0

    def __iter__(self) -> Any:
        self.at, self.resume = self.resume, 0
        yield from self._rest(list(own_part(self.sizes)))


class OwnRandom(torch.utils.data.IterableDataset[Any]):
    """A dataset that shuffles each epoch with its own generator, which is part of its state."""

    def __init__(self, sizes: list[int]) -> None:
        self.sizes, self.at, self.resumed = sizes, 0, False
        self.random = torch.Generator().manual_seed(3)
        self.before = self.random.get_state()

    def __iter__(self) -> Any:
        if not self.resumed:
            self.at, self.before = 0, self.random.get_state()
        self.random.set_state(self.before)
        self.resumed = False
        part = list(own_part(self.sizes))
        order = torch.randperm(len(part), generator=self.random).tolist()
        while self.at < len(part):
            self.at += 1
            yield part[order[self.at - 1]]

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "before": self.before}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at, self.before, self.resumed = state["at"], state["before"], True


class _Place(KeepsPlace):
    def __init__(self, dataset: BothStates, part: list[int]) -> None:
        self.dataset, self.part, self.at = dataset, part, 0

    def __next__(self) -> int:
        if self.at == len(self.part):
            self.dataset.epoch += 1
            raise StopIteration
        self.at += 1
        return self.part[self.at - 1] + 100 * self.dataset.epoch


class BothStates(torch.utils.data.IterableDataset[Any]):
    """A dataset that keeps the epoch, with an iterator that keeps the position."""

    def __init__(self, sizes: list[int]) -> None:
        self.sizes, self.epoch = sizes, 0

    def __iter__(self) -> Any:
        return _Place(self, list(own_part(self.sizes)))

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch = state["epoch"]


class Asking(Streams):
    """A dataset whose methods have the names of the state interface but other parameters."""

    def state_dict(self, samples: int) -> dict[str, Any]:
        raise AssertionError(samples)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError(state)


class Chancy(Streams):
    """A dataset that shuffles with Python's generator and draws for each sample from numpy's; no
    state."""

    def __iter__(self) -> Any:
        part = list(own_part(self.sizes))
        random.shuffle(part)
        for number in part:
            yield number + 100 * int(np.random.randint(1000))


class Told(Streams):
    """A dataset that receives its epoch by set_epoch() and has no state."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Any:
        part = list(own_part(self.sizes))
        random.Random(self.epoch).shuffle(part)
        yield from part


class _Buffered(torch.utils.data.IterableDataset[Any]):
    """A stand-in for the streaming datasets of `datasets`: a shuffle buffer that isn't part of the
    state, a loaded state that each later pass of its epoch starts with, and errors if there are
    more states than shards."""

    def __init__(self, sizes: list[int]) -> None:
        self.sizes, self.epoch, self.read = sizes, 0, 0
        self.start: dict[str, Any] | None = None

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Any:
        applies = self.start is not None and self.start["epoch"] == self.epoch
        self.read = self.start["read"] if self.start is not None and applies else 0
        chance = random.Random(self.epoch)
        buffer: list[int] = []
        for number in list(own_part(self.sizes))[self.read :]:
            self.read += 1
            buffer.append(number)
            if len(buffer) == 4:
                yield buffer.pop(chance.randrange(4))
        chance.shuffle(buffer)
        yield from buffer

    def state_dict(self) -> dict[str, Any]:
        if torch.utils.data.get_worker_info() is not None:
            raise IndexError("list index out of range")
        return {"read": self.read, "epoch": self.epoch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.start = state


# It is recognised by the name of its class.
_Buffered.__module__, _Buffered.__qualname__ = "datasets.iterable_dataset", "IterableDataset"


class Buffered(_Buffered):
    """The stand-in as a class that can be pickled for workers."""


KINDS: dict[str, Any] = {
    "stateless": Streams,
    "sized": Sized,
    "remembering": Remembering,
    "walked": Walked,
    "drawn": Drawn,
    "restarting": Restarting,
    "restarting stateful": RestartingStateful,
    "restarting counted": RestartingCounted,
    "taking over": TakingOver,
    "wrapping": Wrapping,
    "shuffling": Shuffling,
    "live dict": LiveDict,
    "eager": Eager,
    "eager once": EagerOnce,
    "late state": LateState,
    "own random": OwnRandom,
    "both states": BothStates,
    "asking": Asking,
    "told": Told,
    "buffered": Buffered,
}
