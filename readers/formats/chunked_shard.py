"""A shard of chunks, as the metadata of its files tell it: no sample is looked at."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from crc32c import crc32c

from penstock.readers.formats.summary import FieldSummary, ShardSummary, Sums

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from penstock.readers.fields.schema import Schema
    from penstock.readers.origin.origin import Entry


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Extents:
    """Where the bytes of a shard's samples lie in its files, part by part; a part has a number.

    An extent is what is fetched together: an encoded chunk, or all the rows of a field whose
    samples can be had alone. All int64, shape (extents,). files: numbers among the shard's files;
    starts, sizes: bytes in that file; fields: number in the schema of the field that they are of.
    """

    files: NDArray[np.int64]
    starts: NDArray[np.int64]
    sizes: NDArray[np.int64]
    fields: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.sizes)

    @property
    def size_bytes(self) -> int:
        """The bytes of all."""
        return int(self.sizes.sum())

    def field_bytes(self, fields: int) -> tuple[int, ...]:
        """The bytes of each field of a schema that has so many."""
        found: list[int] = [0] * fields
        for field_number in np.unique(self.fields).tolist():
            found[field_number] = int(self.sizes[self.fields == field_number].sum())
        return tuple(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkedShard:
    """What metadata say of one shard.

    A shard is a file, a contiguous part of a large one, or several small ones. samples: at least
    one. files: that its bytes lie in; extents: which of their bytes. units: rows of each decode
    unit, in order; empty where a sample can be had alone. checksum: CRC-32C of what the metadata
    say; it changes with the content as far as they tell. fields: what is known of some, such as how
    many samples lack it. notes: what the format itself wants to know again when the shard is
    opened.
    """

    samples: int
    files: Sequence[Entry]
    extents: Extents
    checksum: int
    units: Sequence[int] = ()
    fields: Mapping[str, FieldSummary] = field(default_factory=dict)
    notes: bytes = b""

    def summary(self, schema: Schema) -> ShardSummary:
        """Its contribution to the manifest."""
        units = np.array(self.units, "<u4")
        return ShardSummary(
            samples=self.samples,
            size_bytes=self.extents.size_bytes,
            sums=Sums(samples=self.checksum, columns=crc32c(units)),
            labels=None,
            fields={name: self.fields.get(name, FieldSummary(storage="chunks")) for name in schema},
            files=len(self.files),
            units=tuple(self.units),
            field_bytes=self.extents.field_bytes(len(schema)),
        )
