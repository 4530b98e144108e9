"""Define open shards whose samples are byte spans of files, and values that the index records."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.readers.fieldtypes import DenseColumn
from penstock.readers.files import printable
from penstock.readers.formats.open_shard import OpenShard

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from penstock.readers.byte_source import ByteSource
    from penstock.readers.fieldtypes import Column
    from penstock.readers.formats.open_shard import RowRequest, RowsOut


class SpanShard(OpenShard):
    """A shard whose samples are byte spans of its files.

    names: of the samples. columns: values of recorded fields that aren't in the table.
    """

    def __init__(
        self,
        source: ByteSource,
        table: NDArray[np.int64],
        *,
        names: Sequence[bytes],
        columns: Mapping[str, Column],
    ) -> None:
        self.source, self.table = source, table
        self._names, self._columns = names, columns

    def name(self, row: int) -> str:
        """Return a sample's name for messages, such as "cat/17.jpg" or
        "train-000003.tar/dog.jpg"."""
        return printable(self._names[row])

    def read(self, request: RowRequest, out: RowsOut) -> None:
        """Copy recorded values."""
        rows = request.rows
        for name in request.dense:
            column, crop = self._columns[name], request.crops.get(name)
            assert isinstance(column, DenseColumn)
            if crop is None:
                out.arrays[name][out.places] = column.values[rows]
            else:
                from penstock.readers.fieldtypes import put_parts  # not needed for images

                put_parts(column.values[rows], crop.corners, out.arrays[name], out.places)
        out.columns.update({name: self._columns[name].take(rows) for name in request.others})
