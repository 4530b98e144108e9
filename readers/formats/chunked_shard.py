"""A shard of chunks, as the metadata of its files tell it: no sample is looked at."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from crc32c import crc32c

from penstock.readers.formats.summary import FieldSummary, ShardSummary, Sums

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from penstock.readers.fields.schema import Schema
    from penstock.readers.origin.origin import Entry


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkedShard:
    """What metadata say of one shard.

    files: that it lies in, in order. units: rows of each decode unit, in order, at least one.
    checksum: CRC-32C of what the metadata say; it changes with the content. fields: what is known
    of some, such as how many samples lack it. notes: what the format itself wants to know again
    when the shard is opened.
    """

    files: Sequence[Entry]
    units: Sequence[int]
    checksum: int
    fields: Mapping[str, FieldSummary] = field(default_factory=dict)
    notes: bytes = b""

    def summary(self, schema: Schema) -> ShardSummary:
        """Its contribution to the manifest."""
        units = np.array(self.units, "<u4")
        return ShardSummary(
            samples=sum(self.units),
            size_bytes=sum(entry.size_bytes for entry in self.files),
            sums=Sums(samples=self.checksum, columns=crc32c(units)),
            labels=None,
            fields={name: self.fields.get(name, FieldSummary(storage="chunks")) for name in schema},
            files=len(self.files),
            units=tuple(self.units),
        )
