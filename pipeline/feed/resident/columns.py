"""What belongs to resident samples beside their images: as it was read, by sample id."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.readers.fields.columns import (
    DenseColumn,
    EncodedColumn,
    ListColumn,
    RaggedColumn,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from penstock.readers.fields.columns import Column, SampleBatch

    Present = dict[str, NDArray[np.bool_]]

NO_BYTES = np.empty(0, np.uint8)
"""Stands for the bytes of a resident sample, which aren't read."""
NO_BYTES.flags.writeable = False


class KeptColumns:
    """Columns of samples by id. One thread at a time keeps; any takes what was kept.

    Numbers of one shape lie in arrays, all else sample by sample, copied from what was read: a view
    would keep its file, or its batch.
    """

    def __init__(self, *, samples: int) -> None:
        """samples: above each id."""
        self._samples = samples
        self._dense: dict[str, NDArray[Any]] = {}
        self._single: dict[str, list[NDArray[Any] | None]] = {}
        self._dims: dict[str, NDArray[np.int32]] = {}
        self._like: dict[str, RaggedColumn] = {}
        self._present: dict[str, NDArray[np.bool_]] = {}

    def keep(self, content: SampleBatch, rows: Sequence[int], *, without: str) -> None:
        """Keep these rows. without: the field of images, which is kept elsewhere."""
        ids = content.ids[rows]
        for name, column in content.columns.items():
            if name != without:
                self._keep(name, column, rows, ids)
        for name, present in content.present.items():
            if name not in self._present:
                # What was kept before this has it: a part of several datasets, which nobody lacks.
                self._present[name] = np.ones(self._samples, np.bool_)
            self._present[name][ids] = present[rows]

    def _keep(self, name: str, column: Column, rows: Sequence[int], ids: NDArray[np.int64]) -> None:
        if isinstance(column, DenseColumn):
            values = column.values
            if name not in self._dense:
                self._dense[name] = np.zeros((self._samples, *values.shape[1:]), values.dtype)
            self._dense[name][ids] = values[rows]
            return
        kept = self._single.setdefault(name, [None] * self._samples)
        assert not isinstance(column, ListColumn), name  # decoded: behind what is kept
        if isinstance(column, RaggedColumn):
            self._like.setdefault(name, column.take([]))
            samples = [column.sample(row) for row in rows]
        else:
            samples = [column.samples[row] for row in rows]
            if column.dims is not None:
                if name not in self._dims:
                    self._dims[name] = np.zeros((self._samples, 2), np.int32)
                self._dims[name][ids] = column.dims[rows]
        for sample_id, sample in zip(ids.tolist(), samples, strict=True):
            kept[sample_id] = sample.copy()

    def take(
        self, ids: NDArray[np.int64]
    ) -> tuple[dict[str, Column], dict[str, NDArray[np.bool_]]]:
        """Columns of samples, and which have what some lack; nothing where none was kept."""
        columns: dict[str, Column] = {
            name: DenseColumn(values[ids]) for name, values in self._dense.items()
        }
        for name, kept in self._single.items():
            found = [kept[sample_id] for sample_id in ids.tolist()]
            like, dims = self._like.get(name), self._dims.get(name)
            if like is None:
                samples = [NO_BYTES if each is None else each for each in found]
                columns[name] = EncodedColumn(samples, None if dims is None else dims[ids])
            else:
                samples = [like.nothing if each is None else each for each in found]
                columns[name] = RaggedColumn.of(samples, like=like)
        return columns, {name: present[ids] for name, present in self._present.items()}
