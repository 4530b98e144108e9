"""Read the fields that shards return by rows: values in tables, and samples in chunks."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Protocol

import numpy as np

from penstock.cache import CorruptShardError, PenstockError
from penstock.cache.base import refuse_shortage
from penstock.readers.fieldtypes import (
    PRESENT,
    DenseColumn,
    EncodedColumn,
    RaggedColumn,
    joined_columns,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import NDArray

    from penstock.cache.base import ReadMode
    from penstock.cache.blobs import Remote
    from penstock.readers.blocks import Blocks
    from penstock.readers.fieldtypes import Column, ColumnCrop
    from penstock.readers.formats import OpenShard, Places
    from penstock.readers.index import Index
    from penstock.readers.reading.batch_plan import BatchFields, BatchRows
    from penstock.readers.reading.open_shards import OpenShards
    from penstock.readers.reading.parallel_copies import CopyThreads

    Ints = NDArray[np.int64]
    _Found = tuple[Mapping[str, Column], dict[int, str]]

LARGE_BATCH_BYTES = 2**23  # smaller batches are read by one thread
WRONG_CRC = "its bytes aren't those that were indexed: its CRC-32C is wrong"


class ShardAccess(Protocol):
    """The part of `SampleReader` that this module needs."""

    index: Index
    shards: OpenShards

    def copy_threads(self) -> CopyThreads:
        """Return the threads that copy large arrays."""

    def corruption(self, number: int, row: int, reason: str) -> Exception:
        """Return the error for a sample that can't be read."""


def read_by_rows(
    visit: BatchRows,
    choice: BatchFields,
    back: Ints | None,
    *,
    mode: ReadMode,
    reader: ShardAccess,
    blocks: Blocks,
    marks: dict[int, str] | None,
    crops: Mapping[str, ColumnCrop],
) -> dict[str, Column]:
    """Read the columns of a batch in its order, and which samples have the fields of
    `BatchFields.masked`, as "x.present".

    back: as `BatchRows.back` returns it. crops: of fields whose samples have one shape, by field.
    mode, marks: as in `SampleReader.read`; marks by the visit's samples. Raises what reading
    raises.
    """
    outs = {}
    for name, form in choice.dense.items():
        shape = crops[name].shape if name in crops else form.fixed_shape
        outs[name] = blocks.array((len(visit.rows), *shape), form.dtype)
    crops = {name: crop for name, crop in crops.items() if name in outs}
    parts: dict[str, dict[int, Column]] = {name: {} for name in choice.rows}
    parts |= {name + PRESENT: {} for name in choice.masked}
    pieces = _pieces(visit, choice, crops, mode, reader)
    if reader.index.remote is not None and outs:
        _fetch_missing(visit, tuple(outs), reader.index.remote)
    small, large_wrong = outs, None
    if len(visit.rows) > 1 and sum(out.nbytes for out in outs.values()) >= LARGE_BATCH_BYTES:
        large = _large({n: out for n, out in outs.items() if n not in crops}, reader)
        if large:
            from penstock.readers.reading.parallel_copies import gather_large  # few need it

            as_read = replace(visit, shards=[shard for shard, *_ in pieces])
            large_wrong = gather_large(as_read, large, threads=reader.copy_threads())
            small = {name: out for name, out in outs.items() if name not in large}
    # Chunks that another thread is decoding come last.
    chunks = reader.index.shards.chunks if choice.has_chunks and len(pieces) > 1 else None
    in_order = range(len(pieces)) if chunks is None else chunks.shards_in_order(visit.numbers)
    for piece in in_order:
        shard, a, b, mine = pieces[piece]
        rows, places = visit.rows[a:b], visit.places(a, b)
        read = partial(_read, rows=rows, choice=choice, outs=small, places=places, crops=mine)
        found, wrong = _read_or_refetch(read, shard, visit, piece, mode, reader)
        if large_wrong is not None:
            wrong = large_wrong[piece] | wrong
        for place, reason in wrong.items():
            if marks is None:
                raise reader.corruption(visit.numbers[piece], int(visit.rows[a + place]), reason)
            marks.setdefault(a + place, reason)
        for name, some in parts.items():
            is_read = name in found or name in choice.rows
            some[piece] = found[name] if is_read else DenseColumn(np.ones(b - a, np.bool_))
    columns: dict[str, Column] = {name: DenseColumn(out) for name, out in outs.items()}
    for name, some in parts.items():
        by_piece = [some[piece] for piece in sorted(some)]  # they may be read in another order
        joined = joined_columns(by_piece) if by_piece else _empty_column(choice, name)
        columns[name] = joined if back is None else joined.take(back)
    return columns


def _fetch_missing(visit: BatchRows, fields: Sequence[str], remote: Remote) -> None:
    """Fetch all bytes that the batch still lacks of incomplete shards with one call. Raises
    FetchError."""
    wanted, cached = [], 0
    for shard, a, b in visit.pieces():
        cold_spans = getattr(shard, "cold_spans", None)
        spans = None if cold_spans is None else cold_spans(fields, visit.rows[a:b])
        if spans is not None:
            wanted.append(spans)
        elif cold_spans is not None:
            cached += b - a
    if wanted or cached:
        remote.bring(wanted, here=cached)


def _large(
    outs: Mapping[str, NDArray[np.generic]], reader: ShardAccess
) -> dict[str, NDArray[np.generic]]:
    """Return the arrays whose rows are divided between threads: their data is local, and each row
    can be read alone."""
    index = reader.index
    if index.remote is not None:
        return {}
    from penstock.readers.reading.parallel_copies import large_fields  # few need it

    large = large_fields(outs)
    if any(index.layout.storage[name] == "chunks" for name in large) and index.units is not None:
        return {}
    return {name: outs[name] for name in large}


def _read_or_refetch(
    read: Callable[[OpenShard], _Found],
    shard: OpenShard,
    visit: BatchRows,
    piece: int,
    mode: ReadMode,
    reader: ShardAccess,
) -> _Found:
    """Read one shard. If its bytes in the cache are wrong or unreadable, fetch them again, and then
    read past the cache."""
    remote = reader.index.remote
    before = visit.shards[piece]
    for attempt in range(3):
        try:
            found, wrong = read(shard)
            if not wrong or remote is None or attempt:
                return found, wrong
        except CorruptShardError:
            if remote is None or attempt:
                raise
        except (OSError, EOFError) as error:
            if remote is not None:
                refuse_shortage(error, remote.label)
            cache = None if remote is None else remote.cache
            if isinstance(error, PenstockError) or cache is None or attempt == 2:
                raise
            if attempt:
                # Bytes that were just written can't be read: stop using that disk for a while.
                cache.give_up(error, reads=True)
        before = reader.shards.replace(visit.numbers[piece], before)
        shard = _in_mode(before, mode, reader)
    raise AssertionError("not reached")


def _pieces(
    visit: BatchRows,
    choice: BatchFields,
    crops: Mapping[str, ColumnCrop],
    mode: ReadMode,
    reader: ShardAccess,
) -> list[tuple[OpenShard, int, int, Mapping[str, ColumnCrop]]]:
    """Return each shard as this batch reads it, its samples [a, b), and the parts of them that are
    wanted, by field."""
    shards, bounds = visit.shards, list(zip(visit.bounds, visit.bounds[1:], strict=False))
    parts = [
        {name: crop.take(visit.places(a, b)) for name, crop in crops.items()} for a, b in bounds
    ]
    if choice.has_chunks:
        from penstock.readers.reading.chunk_loading import (
            load_for_batch,  # packs and folders have none
        )

        fields = (*choice.dense, *choice.rows)
        remote = reader.index.remote
        shards = load_for_batch(visit, fields, parts, mode, remote=remote)
    return [(shard, a, b, mine) for shard, (a, b), mine in zip(shards, bounds, parts, strict=True)]


def _in_mode(shard: OpenShard, mode: ReadMode, reader: ShardAccess) -> OpenShard:
    if not reader.index.layout.stored("chunks"):
        return shard
    from penstock.readers.reading.chunk_loading import in_mode

    return in_mode(shard, mode)


def present_fields(
    choice: BatchFields, columns: Mapping[str, Column]
) -> dict[str, NDArray[np.bool_]]:
    """Return which samples have the fields of `BatchFields.masked`."""
    found = {}
    for name in choice.masked:
        column = columns[name + PRESENT]
        assert isinstance(column, DenseColumn)
        found[name] = column.values
    return found


def _empty_column(choice: BatchFields, name: str) -> Column:
    """Return a column of no samples, or a mask of none."""
    if name not in choice.rows:
        return DenseColumn(np.empty(0, np.bool_))
    form = choice.rows[name]
    if form is None:
        return EncodedColumn([])
    if not form.is_ragged:
        return DenseColumn(np.empty((0, *form.fixed_shape), form.dtype))
    shapes = None if form.rest is not None else np.empty((0, len(form.shape)), np.int64)
    return RaggedColumn(
        np.empty((0, *(form.rest or ())), form.dtype), np.zeros(1, np.int64), shapes
    )


def _read(
    shard: OpenShard,
    rows: Ints,
    choice: BatchFields,
    outs: Mapping[str, NDArray[np.generic]],
    places: Places,
    crops: Mapping[str, ColumnCrop],
) -> _Found:
    """Read the rows of one shard. Returns its columns, and the reasons against bad rows by position
    in rows."""
    wrong: dict[int, str] = {}
    for name, out in outs.items():
        corners = crops[name].corners if name in crops else None
        shard.gather(name, rows, out, places, wrong, corners=corners)
    return shard.read_rows(rows, tuple(choice.rows), wrong) if choice.rows else {}, wrong
