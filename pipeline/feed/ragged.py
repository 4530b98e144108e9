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
    from collections.abc import Callable, Iterator


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Ragged:
    """A batch of n samples of different shapes: a sequence of tensors, stored end to end.

    values: shape (total, *rest) if the samples differ in their first length only, and flat,
    (total,), if they differ in others, too. offsets: int64, shape (n + 1,); sample i is
    values[offsets[i] : offsets[i + 1]]. shapes: int64, shape (n, dimensions), of each sample, if
    values are flat; otherwise None. longest: length of the longest sample in values, if it is
    known. All tensors are on one device. `torch.nested.nested_tensor_from_jagged(values, offsets)`
    accepts the first two unchanged.

    Iterating and indexing return one tensor per sample, each a view of values. On CUDA this waits
    for the device: once for a loop, and once for each index. Raises ConfigError for tensors that
    don't fit one another.
    """

    values: torch.Tensor
    offsets: torch.Tensor
    shapes: torch.Tensor | None = None
    longest: int | None = None

    def __post_init__(self) -> None:
        """Check the shapes and the dtype of the offsets, which needs no wait for the device."""
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
        """The length of each sample in values, int64, shape (n,)."""
        return self.offsets.diff()

    @property
    def cu_seqlens(self) -> torch.Tensor:
        """The offsets as int32, shape (n + 1,), for variable-length attention kernels."""
        return self.offsets.to(torch.int32)

    @property
    def max_length(self) -> int:
        """The length of the longest sample in values, for variable-length attention kernels.

        A loader computes it before it moves a batch to a device; otherwise this waits for the
        device.
        """
        if self.longest is not None:
            return self.longest
        return int(self.lengths.max()) if len(self) else 0

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the values."""
        return self.values.dtype

    @property
    def device(self) -> torch.device:
        """The device of all tensors."""
        return self.values.device

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(self.to_list())

    def to_list(self) -> list[torch.Tensor]:
        """Return one tensor per sample, each a view of values."""
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
        """Return one sample, or several for a slice of step 1, as views."""
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
        """Move all tensors to a device, as `torch.Tensor.to` does."""
        return self._mapped(lambda each: each.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Ragged:
        """Copy all tensors to page-locked memory, as `torch.Tensor.pin_memory` does."""
        return self._mapped(torch.Tensor.pin_memory)

    def _mapped(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Ragged:
        shapes = None if self.shapes is None else change(self.shapes)
        return Ragged(change(self.values), change(self.offsets), shapes, self.longest)

    def __repr__(self) -> str:
        many = "" if self.shapes is None else f", shapes {tuple(self.shapes.shape)}"
        return (
            f"Ragged({len(self)} samples, values {tuple(self.values.shape)} {self.dtype}{many}, "
            f"{self.device})"
        )
