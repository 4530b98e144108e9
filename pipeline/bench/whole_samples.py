"""A dataset whose samples are read whole and not looked at: what reading alone can do."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.cache.base.blob import READ_MODE
from penstock.readers.dataset import Dataset
from penstock.readers.fields.columns import SampleBatch
from penstock.readers.fields.field_types import ID

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from penstock.cache.base.blob import ReadMode
    from penstock.readers.blocks import Blocks
    from penstock.readers.fields.crops import Crop


class WholeSamples(Dataset):
    """A dataset whose batches read and check its fields, and hand out ids alone.

    Its arguments are those of `Dataset`.
    """

    @property
    def fields(self) -> tuple[str, ...]:
        """What a batch has."""
        return (ID,)

    def read(
        self,
        rows: NDArray[np.int64],
        *,
        mode: ReadMode = READ_MODE,
        bad: dict[int, str] | None = None,
        fields: Sequence[str] | None = None,
        crops: Mapping[str, Crop] | None = None,
        blocks: Blocks | None = None,
    ) -> SampleBatch:
        """Read rows as `Dataset.read` does; without fields= the columns are dropped."""
        batch = super().read(rows, mode=mode, bad=bad, fields=fields, crops=crops, blocks=blocks)
        if fields is not None:
            return batch
        return SampleBatch(ids=batch.ids, columns={}, bytes_read=batch.bytes_read)
