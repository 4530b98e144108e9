"""What a job's windows of chunks need, against the room that there is to keep them decoded."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from penstock.cache.base.sizes import format_size
from penstock.pipeline.plan.advice import shards_of_a_rank
from penstock.pipeline.plan.unit_window import live_share, open_units, unit_count
from penstock.pipeline.report.facts import ChunkFacts
from penstock.readers.formats.decoded_counts import joined_counts

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.pipeline.plan.settings import PlanSettings
    from penstock.pipeline.plan.world import World
    from penstock.readers.source import Source

# Batches that reading threads may have in hand at a time, several in a turn: a chunk that nobody
# takes while those are read isn't left over for that.
_IN_FLIGHT = 32

_log = logging.getLogger("penstock")


def watch_chunks(
    source: Source, settings: PlanSettings, world: World, *, batch_size: int
) -> Callable[[], ChunkFacts] | None:
    """Share the machine's memory among the ranks' chunks, say what the windows need, and return
    what tells how it goes; None where samples can be had alone. batch_size: of this rank."""
    stores = source.chunks
    if not stores:
        return None
    for store in stores:
        store.share(world.local_size * len(stores))
    contents, mixed, rows = source.contents, 1.0, 1.0
    if contents.units is not None:
        rows = contents.samples / max(1, unit_count(contents))
    needed = contents.unit_bytes
    mine = rows
    if settings.shuffle and contents.units is not None:
        units = open_units(contents, lanes=settings.lanes, window=settings.window)
        mixed = shards_of_a_rank(units, lanes=settings.lanes, ranks=world.size)
        needed *= mixed * live_share(rows)
        mine *= min(1.0, settings.lanes / world.size)  # of a lane's rows that are this rank's
    for store in stores:
        store.expect(max(round(mixed * mine), _IN_FLIGHT * batch_size))
    memory = sum(store.max_bytes for store in stores)
    files = sum(store.file_room_bytes() for store in stores) if needed > memory else 0
    if needed:
        _say(source.url, units=mixed, needed=needed, memory=memory, files=files)

    def facts() -> ChunkFacts:
        counts = joined_counts(store.counts() for store in stores)
        return ChunkFacts(
            counts=counts, open_chunks=mixed, window=settings.window, file_bytes=files
        )

    return facts


def _say(url: str, *, units: float, needed: float, memory: int, files: int) -> None:
    """One line at the start: what the windows need, and what there is."""
    wanted = (
        f"{url}: this rank's windows mix {units:,.0f} decode units, which "
        f"take about {format_size(needed)} decoded"
    )
    if needed <= memory:
        _log.info("%s; memory has room for %s", wanted, format_size(memory))
    elif needed <= memory + files:
        _log.info(
            "%s; memory keeps %s of that, the cache folder the rest",
            wanted,
            format_size(memory),
        )
    else:
        _log.warning(
            "%s; memory keeps %s and the cache folder %s, so some are decoded again and again. "
            "Give Dataset(decoded_bytes=…), a cache=DiskCache(…) with more room, or "
            "order=Order(window=…).",
            wanted,
            format_size(memory),
            format_size(files),
        )
