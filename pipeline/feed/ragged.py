"""Represent samples of different shapes as one batch: `Ragged`.

It stores the values end to end, with the offset at which each sample begins.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, overload

import torch

from penstock.cache import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Ragged:
    """A batch of n samples of different shapes: a sequence of tensors, stored end to end.

    values: shape (total, *rest) where only the first length differs between samples, and flat,
    (total,), where others do too. offsets: int64, shape (n + 1,): sample i is values[offsets[i] :
    offsets[i + 1]]. shapes: int64, shape (n, dimensions), of each sample, where values are flat;
    else None. longest: length of the longest sample in values, where that is known. All lie on one
    device. `torch.nested.nested_tensor_from_jagged(values, offsets)`
    takes the first two as they are.

    len(), iterating and indexing give a tensor a sample, each a view of values. On CUDA that waits
    for the device, once for a loop and once for each index.
    """

    values: torch.Tensor
    offsets: torch.Tensor
    shapes: torch.Tensor | None = None
    longest: int | None = None

    def __post_init__(self) -> None:
        """Raises ConfigError for tensors that don't fit one another; it looks at shapes alone."""
        if self.offsets.ndim != 1 or not len(self.offsets) or self.offsets.dtype != torch.int64:
            raise ConfigError(
                f"Ragged: got offsets of {self.offsets.dtype} and shape "
                f"{tuple(self.offsets.shape)}, wanted int64 of shape (samples + 1,)."
            )
        if self.shapes is not None and (
            self.shapes.ndim != 2 or len(self.shapes) != len(self) or self.values.ndim != 1
        ):
            raise ConfigError(
                f"Ragged: got shapes of shape {tuple(self.shapes.shape)} and values of shape "
                f"{tuple(self.values.shape)}, wanted ({len(self)}, dimensions) and flat values."
            )

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> torch.Tensor:
        """Of each sample in values, int64, shape (n,)."""
        return self.offsets.diff()

    @property
    def cu_seqlens(self) -> torch.Tensor:
        """Cumulative lengths as kernels of attention over variable lengths take them: offsets as
        int32, shape (n + 1,)."""
        return self.offsets.to(torch.int32)

    @property
    def max_length(self) -> int:
        """Length of the longest sample in values, as those kernels take it. Of what a loader handed
        out it was found before anything went to a device; else this waits for the device."""
        if self.longest is not None:
            return self.longest
        return int(self.lengths.max()) if len(self) else 0

    @property
    def dtype(self) -> torch.dtype:
        """The type of the values."""
        return self.values.dtype

    @property
    def device(self) -> torch.device:
        """The device on which everything lies."""
        return self.values.device

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(self.to_list())

    def to_list(self) -> list[torch.Tensor]:
        """A tensor a sample, each a view of values."""
        bounds = self.offsets.tolist()
        parts = [self.values[begin:end] for begin, end in itertools.pairwise(bounds)]
        if self.shapes is None:
            return parts
        shapes = self.shapes.tolist()
        return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]

    @overload
    def __getitem__(self, index: int) -> torch.Tensor: ...
    @overload
    def __getitem__(self, index: slice) -> Ragged: ...
    def __getitem__(self, index: int | slice) -> torch.Tensor | Ragged:
        """One sample, or with a slice of step 1 some of them, as views."""
        if isinstance(index, slice):
            return self._slice(index)
        place = range(len(self))[index]  # raises IndexError, and counts from the end
        begin, end = self.offsets[place : place + 2].tolist()
        part = self.values[begin:end]
        return part if self.shapes is None else part.view(self.shapes[place].tolist())

    def _slice(self, some: slice) -> Ragged:
        begin, end, step = some.indices(len(self))
        if step != 1:
            raise ConfigError(f"Ragged: got a slice of step {step}, wanted 1.")
        end = max(begin, end)
        offsets = self.offsets[begin : end + 1]
        first, last = offsets[[0, -1]].tolist()
        shapes = None if self.shapes is None else self.shapes[begin:end]
        return Ragged(self.values[first:last], offsets - first, shapes)

    def to(self, device: torch.device | str | int, *, non_blocking: bool = False) -> Ragged:
        """The same on a device, as `torch.Tensor.to`."""
        shapes = self.shapes
        return Ragged(
            self.values.to(device, non_blocking=non_blocking),
            self.offsets.to(device, non_blocking=non_blocking),
            None if shapes is None else shapes.to(device, non_blocking=non_blocking),
            self.longest,
        )

    def pin_memory(self) -> Ragged:
        """The same in page-locked memory, as `torch.Tensor.pin_memory`."""
        shapes = None if self.shapes is None else self.shapes.pin_memory()
        values, offsets = self.values.pin_memory(), self.offsets.pin_memory()
        return Ragged(values, offsets, shapes, self.longest)

    def __repr__(self) -> str:
        many = "" if self.shapes is None else f", shapes {tuple(self.shapes.shape)}"
        return (
            f"Ragged({len(self)} samples, values {tuple(self.values.shape)} {self.dtype}{many}, "
            f"{self.device})"
        )
