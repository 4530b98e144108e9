"""The names of samples for people: in messages, reports and the quarantine."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from penstock.cache.errors import ConfigError, DatasetError, FetchError
from penstock.readers.files.names import printable

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

    from penstock.readers.index.index import Index
    from penstock.readers.reading.open_shards import OpenShards


def sample_names(
    index: Index, opened: OpenShards, ids: Iterable[int] | NDArray[np.int64]
) -> list[str]:
    """The names of samples: of files below the folder; of a pack those in what it was made from, or
    where it doesn't hold them, shard and row. Raises ConfigError for ids that don't exist."""
    wanted = np.asarray(list(ids), np.int64)
    if len(wanted) and not (wanted.min() >= 0 and wanted.max() < index.samples):
        raise ConfigError(f"ids: got {wanted.tolist()[:5]}…, wanted 0 to {index.samples - 1}.")
    shards = np.searchsorted(index.starts, wanted, side="right") - 1
    rows = wanted - index.starts[shards]
    if index.is_self_contained:
        return _source_names(index, opened, shards, rows)
    found = opened.get(shards.tolist())
    return [shard.name(row) for shard, row in zip(found, rows.tolist(), strict=True)]


def _source_names(
    index: Index, opened: OpenShards, shards: NDArray[np.int64], rows: NDArray[np.int64]
) -> list[str]:
    """A shard at a time: only one's names are in memory."""
    names = [""] * len(shards)
    for number in np.unique(shards).tolist():
        try:
            (shard,) = opened.get([number])
            known = shard.source_names()
        except (DatasetError, FetchError):  # the names of its samples are asked for a report
            known = None
        for place in np.flatnonzero(shards == number).tolist():
            row = int(rows[place])
            names[place] = (
                f"{index.shard_name(number)}[{row}]" if known is None else printable(known[row])
            )
    return names
