"""Recognise and read datasets of Arrow IPC files: a folder of them, or those that a URL names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from penstock.readers.formats.arrow.ipc_chunks import decode_chunk, read_notes
from penstock.readers.formats.tables import TableFormat, UnitReader

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.readers.fieldtypes import FieldType
    from penstock.readers.formats.chunked import ChunkedShardFacts, ChunkReader
    from penstock.readers.formats.tables import TableMetadata
    from penstock.readers.origin import Entry, Origin
    from penstock.readers.types import Encoded


class ArrowReader(UnitReader):
    """Reads rows of a shard; buffers that aren't compressed become arrays without a copy."""

    def __init__(self, shard: ChunkedShardFacts) -> None:
        """Raises CorruptShardError."""
        self._notes, self._types = read_notes(shard)
        self._fields = np.asarray(shard.extents.fields).tolist()
        super().__init__(shard, self._notes.units)

    def is_plain(self, extent: int) -> bool:
        """Return True if the chunk isn't compressed and has no dictionary."""
        chunk = self._notes.chunks[extent]
        return not chunk.codec and not chunk.dictionaries

    def dictionaries(self, extent: int) -> Sequence[int]:
        """Return the extents that hold the values of a chunk's dictionary."""
        return self._notes.chunks[extent].dictionaries

    def decode(
        self, extent: int, type: FieldType, data: Encoded, dictionaries: Sequence[Encoded]
    ) -> Any:
        """Return a chunk's table. Raises ValueError if its bytes are damaged."""
        chunk, field = self._notes.chunks[extent], self._fields[extent]
        others = [self._notes.chunks[number] for number in chunk.dictionaries]
        return decode_chunk(
            data,
            chunk,
            self._types[chunk.form],
            type,
            self._notes.parts[field],
            [
                (each, other, self._types[other.form])
                for each, other in zip(dictionaries, others, strict=True)
            ],
            self._notes.tensors.get(field),
        )


class ArrowFormat(TableFormat):
    """Arrow IPC files and streams. Packs consist of such files too, but are recognised first."""

    name: ClassVar[str] = "arrow"
    kind: ClassVar[str] = "Arrow"
    extensions: ClassVar[frozenset[str]] = frozenset(("arrow", "feather", "ipc", "arrows"))

    def metadata(self, origin: Origin, files: Sequence[Entry], *, workers: int) -> TableMetadata:
        """Read the metadata of all files."""
        from penstock.readers.formats.arrow.arrow_listing import ArrowMetadata

        return ArrowMetadata(origin, files, workers=workers)

    def reader(self, shard: ChunkedShardFacts) -> ChunkReader:
        """Open a shard. Raises CorruptShardError."""
        return ArrowReader(shard)


FORMAT = ArrowFormat()
