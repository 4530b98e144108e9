"""A dataset whose samples are read whole and not looked at: what reading alone can do."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.cache.base.blob import READ_MODE
from penstock.readers.dataset import Dataset
from penstock.readers.fields.columns import SampleBatch
from penstock.readers.fields.selection import default_fields

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from penstock.cache.base.blob import ReadMode


class WholeSamples(Dataset):
    """A dataset that reads and checks the fields that batches have where nobody chooses, and hands
    out their ids alone."""

    def read(
        self,
        rows: NDArray[np.int64],
        *,
        mode: ReadMode = READ_MODE,
        bad: dict[int, str] | None = None,
        fields: Sequence[str] | None = None,
    ) -> SampleBatch:
        """Read rows as `Dataset.read` does, and drop the columns. fields: see there."""
        index = self.index
        wanted = default_fields(index.schema, index.lacking) if fields is None else fields
        batch = super().read(rows, mode=mode, bad=bad, fields=wanted)
        return SampleBatch(ids=batch.ids, columns={}, bytes_read=batch.bytes_read)
