"""Load the bytes that a batch lacks of shards in chunks with one request for all of them.

Only jobs on chunk formats import it, because it loads the code of chunk data.
"""

from __future__ import annotations

import contextlib
import logging
from typing import TYPE_CHECKING

from penstock.cache import CorruptShardError, PenstockError
from penstock.cache.base import refuse_shortage
from penstock.readers.formats import BlobChunkData, ChunkBlob, ChunkShard

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.cache.base import ReadMode
    from penstock.cache.blobs import Remote
    from penstock.readers.formats import ChunkParts, Crops, OpenShard
    from penstock.readers.reading.batch_plan import BatchRows

_log = logging.getLogger("penstock")


def load_for_batch(
    visit: BatchRows,
    fields: Sequence[str],
    crops: Sequence[Crops],
    mode: ReadMode,
    *,
    remote: Remote | None,
) -> list[OpenShard]:
    """Return the shards of a batch, and load all bytes that these fields need of remote shards.

    If the local disk can't be read, the shards are returned as they are: reading them reports it.
    crops: the part of each sample that the batch needs, by shard. Raises FetchError.
    """
    ready = [in_mode(shard, mode) for shard in visit.shards]
    if remote is None:
        return ready
    loaded = list(ready)
    wanted: list[tuple[int, BlobChunkData, ChunkParts]] = []
    bounds = zip(ready, visit.bounds, visit.bounds[1:], strict=False)
    try:
        for place, (shard, a, b) in enumerate(bounds):
            if isinstance(shard, ChunkBlob) and isinstance(shard.data, BlobChunkData):
                parts = shard.missing_parts(shard.data, visit.rows[a:b], fields, crops[place])
                if parts is not None:
                    wanted.append((place, shard.data, parts))
        spans = [span for _, _, parts in wanted for span in parts.spans()]
        found = iter(remote.load(spans, mode=mode) if spans else ())
        for place, data, parts in wanted:
            mine = [next(found) for _ in parts.blobs]
            shard = ready[place]
            assert isinstance(shard, ChunkBlob)
            with contextlib.suppress(CorruptShardError):  # reading the shard raises it again
                brought = data.with_fetched(parts, mine)
                parts.settle(brought)
                loaded[place] = shard.with_data(brought)
        return loaded
    except (OSError, EOFError) as error:
        if isinstance(error, PenstockError):  # from the network
            raise
        refuse_shortage(error, remote.label)
        _log.warning("%s: the cache can't be read (%s)", remote.label, error)
        return ready
    finally:
        for _, _, parts in wanted:
            parts.settle(None)


def in_mode(shard: OpenShard, mode: ReadMode) -> OpenShard:
    """Return a shard that reads its files in this mode."""
    if mode != "pread" or not isinstance(shard, ChunkShard | ChunkBlob):
        return shard
    found: OpenShard = shard.with_data(shard.data.in_mode(mode))
    return found
