"""Decide whether an error is a sample's fault, and which samples stand in for a bad one.

This applies only where the user asked for it (`max_bad=`). Code that raises is then taken for a bad
sample, whatever it raises, except errors that no sample's bytes can cause.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from penstock.cache import BadSampleError, CorruptShardError, PenstockError
from penstock.cache.base import machine_remedy
from penstock.pipeline.plan import ATTEMPTS, substitute

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_REASON_CHARACTERS = 300
# The program's, the machine's or the network's.
_OTHERS_FAULT: tuple[type[BaseException], ...] = (
    NameError,
    ImportError,
    SyntaxError,
    NotImplementedError,
    torch.OutOfMemoryError,
    RecursionError,
    ConnectionError,
    TimeoutError,
    PermissionError,
    StopIteration,
)


def is_sample_fault(error: Exception) -> bool:
    """Whether what reading a sample raised says that the sample is bad."""
    if isinstance(error, BadSampleError | CorruptShardError):
        return True
    if isinstance(error, (PenstockError, *_OTHERS_FAULT)):
        return False
    return machine_remedy(error) is None


def reason_of(error: Exception) -> str:
    """Why a sample is bad, on one line."""
    text = " ".join(str(error).split())
    if isinstance(error, BadSampleError) and text:
        return text[:_REASON_CHARACTERS]
    return f"{type(error).__name__}: {text}".removesuffix(": ")[:_REASON_CHARACTERS]


@dataclass(frozen=True, slots=True)
class BadRow:
    """A place in a batch whose own sample is bad. sample_id: that one; reason: why."""

    sample_id: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Substitutes:
    """Which samples may stand in for a bad one: as for native data, functions of seed, epoch and
    sample id. starts, sizes: first index and samples of each part, int64, shape (parts,)."""

    seed: int
    starts: Any
    sizes: Any

    @classmethod
    def among(cls, sizes: Sequence[int], *, seed: int) -> Substitutes:
        """Of a dataset in parts of these sizes."""
        ends = np.cumsum(np.asarray(sizes, np.int64))
        return cls(seed=seed, starts=ends - sizes, sizes=np.asarray(sizes, np.int64))

    def of(self, sample_id: int, *, epoch: int) -> Iterator[int]:
        """The samples to try, in order."""
        for attempt in range(ATTEMPTS):
            candidate = substitute(
                sample_id,
                attempt,
                seed=self.seed,
                epoch=epoch,
                starts=self.starts,
                sizes=self.sizes,
            )
            if candidate != sample_id:
                yield candidate
