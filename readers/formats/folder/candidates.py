"""A folder's files as candidates: samples by their names, grouped into virtual shards."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from penstock.readers.fields.columns import DenseColumn
from penstock.readers.fields.field_types import ClassLabel, Image
from penstock.readers.fields.schema import Schema
from penstock.readers.formats.candidates import Candidates, Spans
from penstock.readers.formats.folder.listing import VIRTUAL_SHARD_BYTES, virtual_shards
from penstock.readers.formats.format import Snapshot

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.readers.fields.field_types import FieldType
    from penstock.readers.formats.folder.listing import FolderListing

_IMAGE, _LABEL = "image", "label"


class FolderFiles:
    """The files of a folder, listed."""

    def __init__(self, listing: FolderListing) -> None:
        self._listing = listing

    def snapshot(self) -> Snapshot:
        """What an index notes of the files and of the folders' times."""
        return Snapshot.of(self._listing.files, self._listing.directories)

    def candidates(self, *, workers: int) -> Candidates:
        """What may be samples; nothing has to be read for that."""
        del workers
        return self._candidates

    @cached_property
    def _candidates(self) -> Candidates:
        listing = self._listing
        count = len(listing.files)
        schema: dict[str, FieldType] = {_IMAGE: Image()}
        values = {}
        if listing.labels is not None:
            schema[_LABEL] = ClassLabel(listing.classes)
            values[_LABEL] = DenseColumn(listing.labels)
        images = Spans(
            files=np.arange(count, dtype=np.int64),
            starts=np.zeros(count, np.int64),
            sizes=listing.sizes,
        )
        return Candidates(
            schema=Schema(schema),
            files=listing.files,
            names=[file.name for file in listing.files],
            spans={_IMAGE: images},
            values=values,
            shards=virtual_shards(listing),
            shard_bytes=VIRTUAL_SHARD_BYTES,
            quarantined=listing.quarantined,
            passed_over=listing.passed_over,
        )

    def counterparts(
        self, number: int, name: bytes, *, total: int, workers: int
    ) -> Iterator[tuple[Candidates, int]]:
        """The shard of that number, and those that it can be instead: virtual shards of which no
        file decodes aren't in the index."""
        del name, workers
        candidates = self._candidates
        without_samples = candidates.shards.shards - total
        for here in range(number, number + without_samples + 1):
            yield candidates, here
