"""Reads the rows of a shard of Arrow files."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.readers.formats.arrow.chunks import decode_chunk
from penstock.readers.formats.arrow.notes import read_notes
from penstock.readers.formats.arrow.unit_reader import UnitReader

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.readers.fields.field_types import FieldType
    from penstock.readers.formats.chunked import ShardFacts
    from penstock.readers.types import Encoded


class ArrowReader(UnitReader):
    """Makes arrays of buffers, without a copy where they aren't compressed."""

    def __init__(self, shard: ShardFacts) -> None:
        """Raises CorruptShardError."""
        self._notes, self._forms = read_notes(shard)
        self._fields = np.asarray(shard.extents.fields).tolist()
        super().__init__(shard, self._notes.units)

    def is_plain(self, extent: int) -> bool:
        """Whether its buffers aren't compressed, and it has no dictionary."""
        chunk = self._notes.chunks[extent]
        return not chunk.codec and not chunk.dictionaries

    def beside(self, extent: int) -> Sequence[int]:
        """The extents of its dictionary's values."""
        return self._notes.chunks[extent].dictionaries

    def decode(self, extent: int, type: FieldType, data: Encoded, beside: Sequence[Encoded]) -> Any:
        """A column's table."""
        chunk, field = self._notes.chunks[extent], self._fields[extent]
        others = [self._notes.chunks[number] for number in chunk.dictionaries]
        return decode_chunk(
            data,
            chunk,
            self._forms[chunk.form],
            type,
            self._notes.parts[field],
            [
                (each, other, self._forms[other.form])
                for each, other in zip(beside, others, strict=True)
            ],
            self._notes.tensors.get(field),
        )
