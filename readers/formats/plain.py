"""Rows of a shard that lie in a map at equal distances, as they are stored."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from penstock.readers.types import Encoded


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Plain:
    """Where one field's rows lie, for those who read rows of many shards at once.

    data: a view of the shard's bytes, which keeps their map alive; the first row begins where it
    does. stride_bytes: from one row to the next; row_bytes: of one; dtype: of its numbers. below:
    rows whose numbers aren't all from 0 to this are bad; None: any may be.
    """

    data: Encoded
    stride_bytes: int
    row_bytes: int
    dtype: np.dtype[Any]
    below: int | None = None

    def fits(self, rows: NDArray[Any]) -> bool:
        """Whether no row is bad."""
        if self.below is None:
            return True
        is_small = int(rows.max()) < self.below
        return is_small and (self.dtype.kind == "u" or int(rows.min()) >= 0)
