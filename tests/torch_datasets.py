"""Torch datasets of every kind, for the tests of the loader."""

from __future__ import annotations

import random
from collections import namedtuple
from typing import Any

import numpy as np
import torch
import torch.utils.data

Pair = namedtuple("Pair", ["x", "y"])


class Squares(torch.utils.data.Dataset[Any]):
    """A dataset whose sample i has a shape of choice."""

    def __init__(self, samples: int, kind: str = "tuple") -> None:
        self.samples, self.kind = samples, kind

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < self.samples:
            raise IndexError(index)
        x, y = torch.full((2, 3), float(index)), index * index
        return {
            "tuple": (x, y),
            "dict": {"x": x, "name": f"sample {index}", "y": y},
            "namedtuple": Pair(x, y),
            "str": f"sample {index}",
            "int": index,
            "array": np.full((3,), index, np.int16),
            "float": index / 2,
        }[self.kind]


class Failing(Squares):
    """A dataset whose sample `at` raises KeyError."""

    at = 4

    def __getitem__(self, index: int) -> Any:
        if index == self.at:
            raise KeyError("gone")
        return super().__getitem__(index)


class Batched(Squares):
    """A dataset that reads a whole batch at once."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in indices]


class Noisy(torch.utils.data.Dataset[Any]):
    """A dataset of (index, draws of three generators)."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[int, float, float, float]:
        return index, random.random(), float(np.random.rand()), float(torch.rand(()))


class StatefulMap(torch.utils.data.Dataset[Any]):
    """A dataset that draws from torch's generator and keeps its state, like some augmenting
    datasets."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[int, int]:
        return index, int(torch.randint(10**6, (1,)))

    def state_dict(self) -> dict[str, Any]:
        return {"rng": torch.get_rng_state().tolist()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        torch.set_rng_state(torch.tensor(state["rng"], dtype=torch.uint8))


def own_part(sizes: list[int]) -> range:
    """Yield the numbers of this worker's part, or all numbers without workers."""
    info = torch.utils.data.get_worker_info()
    if info is None:
        return range(sum(sizes))
    start = sum(sizes[: info.id])
    return range(start, start + sizes[info.id])


class Streams(torch.utils.data.IterableDataset[Any]):
    """A dataset with a stream of its own size in each worker; no state."""

    def __init__(self, sizes: list[int]) -> None:
        self.sizes = sizes

    def __iter__(self) -> Any:
        yield from own_part(self.sizes)


class Random(Streams):
    """A stream that draws from the worker's generators; no state."""

    def __iter__(self) -> Any:
        for i in own_part(self.sizes):
            yield i, int(torch.randint(10**6, (1,)))


class Sized(Streams):
    """A stream that has a length."""

    def __init__(self, sizes: list[int], length: int | None = None) -> None:
        super().__init__(sizes)
        self.length = sum(sizes) if length is None else length

    def __len__(self) -> int:
        return self.length


class KeepsPlace:
    """A dataset, iterator or sampler whose state is the number of its samples that were read."""

    at: int

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


class ResumesPlace(KeepsPlace):
    """The same, where a loaded state is applied by the next iter()."""

    resume = 0

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.resume = state["at"]


class Remembering(ResumesPlace, Streams):
    """A generator whose dataset keeps the state."""

    def __init__(self, sizes: list[int]) -> None:
        super().__init__(sizes)
        self.at, self.resume, self.read = 0, 0, 0

    def __iter__(self) -> Any:
        self.at, self.resume = self.resume, 0
        for i in list(own_part(self.sizes))[self.at :]:
            self.at += 1
            self.read += 1
            yield i


class _Walker(KeepsPlace):
    def __init__(self, part: list[int]) -> None:
        self.part, self.at = part, 0

    def __iter__(self) -> _Walker:
        return self

    def __next__(self) -> int:
        if self.at == len(self.part):
            raise StopIteration
        self.at += 1
        return self.part[self.at - 1]


class Walked(Streams):
    """A stream whose iterator keeps the state."""

    def __iter__(self) -> Any:
        return _Walker(list(own_part(self.sizes)))


class _Drawing(_Walker):
    """An iterator that draws from torch's generator, whose state is part of its own."""

    def __next__(self) -> int:
        super().__next__()
        return int(torch.randint(10**6, (1,)))

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "rng": torch.get_rng_state().tolist()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]
        torch.set_rng_state(torch.tensor(state["rng"], dtype=torch.uint8))


class Drawn(Streams):
    """A stream whose iterator draws, and keeps the state of the draws."""

    def __iter__(self) -> Any:
        return _Drawing(list(own_part(self.sizes)))


class CountingSampler(KeepsPlace, torch.utils.data.Sampler[int]):
    """A sampler with state that it never resets itself."""

    def __init__(self, samples: int) -> None:
        self.samples, self.at = samples, 0

    def __len__(self) -> int:
        return self.samples

    def __iter__(self) -> Any:
        while self.at < self.samples:
            self.at += 1
            yield (self.at * 7) % self.samples
        self.at = 0


def same(a: Any, b: Any) -> bool:
    """Return True if two values are equal in value and type, including their items."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and np.array_equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)
