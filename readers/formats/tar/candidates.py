"""The samples of tar files as candidates: an archive is a shard, its members are read in place."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from penstock.readers.fields.columns import DenseColumn
from penstock.readers.fields.field_types import ClassLabel, Image
from penstock.readers.fields.schema import Schema
from penstock.readers.formats.candidates import Candidates, Spans
from penstock.readers.formats.data_file import drop_copy
from penstock.readers.formats.format import Snapshot
from penstock.readers.formats.grouping import Grouping
from penstock.readers.formats.tar.samples import list_samples

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from penstock.readers.fields.field_types import FieldType
    from penstock.readers.origin.origin import Entry, Origin

_IMAGE, _LABEL = "image", "label"


class TarListing:
    """The tar files of a dataset, in order; nothing of them was read."""

    def __init__(self, origin: Origin, archives: Sequence[Entry]) -> None:
        self._origin, self._archives = origin, archives

    def snapshot(self) -> Snapshot:
        """What an index notes of the archives."""
        return Snapshot.of(self._archives, {})

    def candidates(self, *, workers: int) -> Candidates:
        """Read all headers and labels; remote archives are fetched whole for that."""
        return self._candidates(self._archives, workers=workers)

    def counterparts(
        self, number: int, name: bytes, *, total: int, workers: int
    ) -> Iterator[tuple[Candidates, int]]:
        """The archive by itself first, then without the cache's copy; then with all others, where
        what they hold says what is a sample here. See `Listing`."""
        del number, total
        ending = b"-%s.arrow"
        here = [e for e in self._archives if name.endswith(ending % e.identity.encode())]
        if not here:
            return
        entry = here[0]
        yield self._candidates([entry], workers=workers, warns=False), 0
        drop_copy(self._origin, entry)
        yield self._candidates([entry], workers=workers, warns=False), 0
        together = self._candidates(self._archives, workers=workers, warns=False)
        yield together, self._archives.index(entry)

    def _candidates(
        self, archives: Sequence[Entry], *, workers: int, warns: bool = True
    ) -> Candidates:
        found = list_samples(self._origin, archives, workers=workers, warns=warns)
        count = len(found.names)
        schema: dict[str, FieldType] = {_IMAGE: Image()}
        values = {}
        if found.labels is not None:
            schema[_LABEL] = ClassLabel()
            values[_LABEL] = DenseColumn(found.labels)
        images = Spans(
            files=np.repeat(np.arange(len(archives)), np.diff(found.bounds)),
            starts=found.starts,
            sizes=found.sizes,
        )
        return Candidates(
            schema=Schema(schema),
            files=archives,
            names=[found.shown(position) for position in range(count)],
            spans={_IMAGE: images},
            values=values,
            # One shard an archive, also where it holds no sample.
            shards=Grouping(order=np.arange(count, dtype=np.int64), bounds=found.bounds),
            shard_bytes=None,
            quarantined=found.quarantined,
            passed_over=found.passed_over,
        )
