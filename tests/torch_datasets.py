"""Torch datasets of every kind, for the tests of the loader in front of them."""

from __future__ import annotations

import random
from collections import namedtuple
from typing import Any

import numpy as np
import torch
import torch.utils.data

Pair = namedtuple("Pair", ["x", "y"])


class Squares(torch.utils.data.Dataset[Any]):
    """Sample i in a shape of choice."""

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


class Batched(Squares):
    """Reads a batch at once."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in indices]


class Noisy(torch.utils.data.Dataset[Any]):
    """(index, draws of three generators)."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[int, float, float, float]:
        return index, random.random(), float(np.random.rand()), float(torch.rand(()))


class StatefulMap(torch.utils.data.Dataset[Any]):
    """Draws from torch's generator and keeps its state, as some augmenting datasets do."""

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
    """Numbers of this worker's part; all in this process."""
    info = torch.utils.data.get_worker_info()
    if info is None:
        return range(sum(sizes))
    start = sum(sizes[: info.id])
    return range(start, start + sizes[info.id])


class Streams(torch.utils.data.IterableDataset[Any]):
    """Each worker has a stream of its own size; no state."""

    def __init__(self, sizes: list[int]) -> None:
        self.sizes = sizes

    def __iter__(self) -> Any:
        yield from own_part(self.sizes)


class Random(Streams):
    """Draws from the worker's generators; no state."""

    def __iter__(self) -> Any:
        for i in own_part(self.sizes):
            yield i, int(torch.randint(10**6, (1,)))


class Sized(Streams):
    """Says how long it is."""

    def __init__(self, sizes: list[int], length: int | None = None) -> None:
        super().__init__(sizes)
        self.length = sum(sizes) if length is None else length

    def __len__(self) -> int:
        return self.length


class Remembering(Streams):
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

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.resume = state["at"]


class _Walker:
    def __init__(self, part: list[int]) -> None:
        self.part, self.at = part, 0

    def __iter__(self) -> _Walker:
        return self

    def __next__(self) -> int:
        if self.at == len(self.part):
            raise StopIteration
        self.at += 1
        return self.part[self.at - 1]

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


class Walked(Streams):
    """Its iterator keeps the state."""

    def __iter__(self) -> Any:
        return _Walker(list(own_part(self.sizes)))


class _Drawing(_Walker):
    """Draws from torch's generator, and keeps the generator's state as its own."""

    def __next__(self) -> int:
        super().__next__()
        return int(torch.randint(10**6, (1,)))

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "rng": torch.get_rng_state().tolist()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]
        torch.set_rng_state(torch.tensor(state["rng"], dtype=torch.uint8))


class Drawn(Streams):
    """Its iterator draws, and keeps the state of the draws."""

    def __iter__(self) -> Any:
        return _Drawing(list(own_part(self.sizes)))


class CountingSampler(torch.utils.data.Sampler[int]):
    """A sampler with state that never goes back by itself."""

    def __init__(self, samples: int) -> None:
        self.samples, self.at = samples, 0

    def __len__(self) -> int:
        return self.samples

    def __iter__(self) -> Any:
        while self.at < self.samples:
            self.at += 1
            yield (self.at * 7) % self.samples
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


def same(a: Any, b: Any) -> bool:
    """Equal in value and type, through containers."""
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
