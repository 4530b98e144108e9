"""Define open shards whose samples are byte spans of files, and values that the index records."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from penstock.readers.fields import DenseColumn
from penstock.readers.files import printable

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from penstock.readers.fields import Column
    from penstock.readers.formats.byte_source import ByteSource
    from penstock.readers.formats.open_shard import Ints, Places


class SpanShard:
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

    def source_names(self) -> list[bytes] | None:
        """Return None: the shard isn't a copy of other data."""
        return None

    def gather(
        self,
        field: str,
        rows: Ints,
        out: NDArray[Any],
        places: Places,
        wrong: dict[int, str],
        *,
        corners: Ints | None = None,
    ) -> None:
        """Copy recorded values of some samples."""
        del wrong
        column = self._columns[field]
        assert isinstance(column, DenseColumn)
        if corners is None:
            out[places] = column.values[rows]
        else:
            from penstock.readers.fields import put_parts  # not needed for images

            put_parts(column.values[rows], corners, out, places)

    def read_rows(
        self, rows: Ints, fields: Sequence[str], wrong: dict[int, str]
    ) -> dict[str, Column]:
        """Return recorded values of some samples."""
        del wrong
        return {name: self._columns[name].take(rows) for name in fields}
