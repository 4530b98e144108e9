"""Columns as what users get: tensors, `Ragged`s and lists."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from penstock.pipeline.feed.ragged import Ragged
from penstock.readers.fields.columns import DenseColumn, ListColumn, RaggedColumn

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from penstock.readers.fields.columns import Column


def tensor_of(values: NDArray[Any]) -> torch.Tensor:
    """Numbers as a tensor that is the user's: in their own memory where that may be written to,
    else in a copy."""
    if not values.flags.writeable:
        return torch.from_numpy(values.copy())
    inside = None if values.base is None else _in_storage(values)
    return torch.from_numpy(values) if inside is None else inside


def output_of(column: Column) -> Any:
    """A decoded column as a tensor, a `Ragged` or a list."""
    if isinstance(column, DenseColumn):
        return tensor_of(column.values)
    if isinstance(column, RaggedColumn):
        shapes = None if column.shapes is None else tensor_of(column.shapes)
        values, offsets = tensor_of(column.values), tensor_of(column.offsets)
        longest = int(np.diff(column.offsets).max(initial=0)) if shapes is None else None
        return Ragged(values, offsets, shapes, longest)
    assert isinstance(column, ListColumn), type(column)
    return column.samples


def on_each(value: Any, change: Callable[[Any], Any]) -> Any:
    """What is handed out for a field, changed where it consists of tensors."""
    return change(value) if isinstance(value, torch.Tensor | Ragged) else value


def _in_storage(values: NDArray[Any]) -> torch.Tensor | None:
    """The same numbers as a tensor of the storage that they lie in; None where that is no
    tensor's, or where they don't lie end to end."""
    base = values.base
    while base is not None and not isinstance(base, torch.Tensor):
        base = getattr(base, "base", None)
    if base is None or base.dtype != torch.uint8 or base.ndim != 1 or not values.flags.c_contiguous:
        return None
    begin = values.ctypes.data - base.data_ptr()
    dtype = torch.from_numpy(values.reshape(-1)[:0]).dtype
    return base[begin : begin + values.nbytes].view(dtype).view(values.shape)
