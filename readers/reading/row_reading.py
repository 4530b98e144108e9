"""Read the fields that are stored by rows, in one gather over all shards of a batch.

Each shard gets a request for its rows. What the requests need is fetched by one call, and then each
shard reads its rows into the arrays of the batch. Rows of large arrays are read one by one, on
several threads.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from penstock.cache import CorruptShardError
from penstock.readers.fieldtypes import PRESENT, DenseColumn, EncodedColumn, joined_columns
from penstock.readers.formats import RowRequest, RowsOut

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from numpy.typing import NDArray

    from penstock.cache.base import ReadMode
    from penstock.readers.blocks import Blocks
    from penstock.readers.fieldtypes import Column, ColumnCrop
    from penstock.readers.formats import OpenShard, Places
    from penstock.readers.reading.batch_plan import BatchFields, BatchRows
    from penstock.readers.reading.open_shards import OpenShards

    Arrays = Mapping[str, NDArray[np.generic]]

LARGE_BATCH_BYTES = 2**23  # smaller batches are read by one thread
LARGE_ROW_BYTES = 2**20  # smaller rows aren't worth a call of their own, which costs 20 us


def read_by_rows(
    visit: BatchRows,
    choice: BatchFields,
    opened: OpenShards,
    *,
    mode: ReadMode,
    marks: dict[int, str] | None,
    crops: Mapping[str, ColumnCrop],
    blocks: Blocks,
) -> dict[str, Column]:
    """Read the columns of a batch in its order, and which samples have the fields of
    `BatchFields.masked`, as "x.present".

    crops: by field; those of fields whose samples differ in shape are ignored. mode, marks: as in
    `SampleReader.read`; marks by the visit's samples. Raises what reading raises.
    """
    outs: Arrays = {
        name: blocks.array(
            (len(visit.rows), *(crops[name].shape if name in crops else form.fixed_shape)),
            form.dtype,
        )
        for name, form in choice.dense.items()
    }
    crops = {name: crop for name, crop in crops.items() if name in outs}
    wanted = [
        RowRequest(
            rows=visit.rows[a:b],
            dense=tuple(outs),
            others=tuple(choice.rows),
            crops={name: crop.take(visit.places(a, b)) for name, crop in crops.items()},
            mode=mode,
        )
        for _, a, b in visit.pieces()
    ]
    requests = _fetched(visit.shards, wanted)
    wrong: list[dict[int, str]] = [{} for _ in requests]
    can_divide = len(visit.rows) > 1 and all(shard.can_divide for shard in visit.shards)
    if can_divide and sum(out.nbytes for out in outs.values()) >= LARGE_BATCH_BYTES:
        whole = {name: out for name, out in outs.items() if name not in crops}
        done = _gather_large(visit, requests, whole, wrong, opened)
        left = tuple(name for name in outs if name not in done)
        requests = [replace(request, dense=left) for request in requests]
    numbers = visit.numbers
    order: Iterable[int] = range(len(requests))
    if choice.has_chunks and len(requests) > 1 and (chunks := opened.index.chunks) is not None:
        order = chunks.shards_in_order(numbers)  # chunks that another thread is decoding come last
    parts: dict[str, dict[int, Column]] = {
        name: {} for name in (*choice.rows, *(name + PRESENT for name in choice.masked))
    }
    for piece in order:
        a, b = visit.bounds[piece], visit.bounds[piece + 1]
        shard, request = visit.shards[piece], requests[piece]
        read = partial(_read, first=shard, request=request, arrays=outs, places=visit.places(a, b))
        out = opened.read(numbers[piece], shard, read)
        for place, reason in (wrong[piece] | out.wrong).items():
            if marks is None:
                raise opened.corruption(numbers[piece], int(visit.rows[a + place]), reason)
            marks.setdefault(a + place, reason)
        for name, some in parts.items():
            found = out.columns.get(name)
            some[piece] = DenseColumn(np.ones(b - a, np.bool_)) if found is None else found
    columns: dict[str, Column] = {name: DenseColumn(out) for name, out in outs.items()}
    for name, some in parts.items():
        by_piece = [some[piece] for piece in sorted(some)]  # they may be read in another order
        joined = joined_columns(by_piece) if by_piece else _empty_column(choice, name)
        columns[name] = joined if visit.back is None else joined.take(visit.back)
    return columns


def _gather_large(
    visit: BatchRows,
    requests: Sequence[RowRequest],
    outs: Arrays,
    wrong: Sequence[dict[int, str]],
    opened: OpenShards,
) -> Collection[str]:
    """Read large rows one by one, on several threads. Return the fields that were read; none if
    bytes from a cache are wrong, which must be fetched and read again.

    outs: the batch's arrays, by field. wrong: receives the reasons against bad samples, for each
    shard by position in it. Raises what reading raises.
    """
    large = [
        name
        for name, out in outs.items()
        if out.nbytes >= LARGE_BATCH_BYTES and out.nbytes // len(out) >= LARGE_ROW_BYTES
    ]
    if not large:
        return ()
    pieces, positions = list(visit.pieces()), visit.positions

    def gather(part: tuple[str, int, int]) -> None:
        name, piece, row = part
        shard, begin, _ = pieces[piece]
        rows, place = visit.rows[row : row + 1], int(positions[row])
        request = replace(requests[piece], rows=rows, dense=(name,), others=())
        out = RowsOut(arrays=outs, places=slice(place, place + 1))
        shard.read(request, out)
        if out.wrong:
            wrong[piece].setdefault(row - begin, out.wrong[0])

    rows = [(piece, row) for piece, (_, a, b) in enumerate(pieces) for row in range(a, b)]
    source = visit.shards[0].source
    try:
        opened.copy_threads().run(gather, [(name, *each) for name in large for each in rows])
    except (CorruptShardError, OSError, EOFError) as error:
        source.refuse(error, 0)
        return ()
    if any(wrong) and source.is_fetched:
        for each in wrong:
            each.clear()
        return ()
    return large


def _read(
    shard: OpenShard, *, first: OpenShard, request: RowRequest, arrays: Arrays, places: Places
) -> tuple[RowsOut, bool]:
    """Read the rows of one shard; return also False if some are wrong. first: the shard that was
    asked for what the request needs; a shard that was reopened since is asked again."""
    if shard is not first:
        (request,) = _fetched([shard], [request])
    out = RowsOut(arrays=arrays, places=places)
    shard.read(request, out)
    return out, not out.wrong


def _fetched(shards: Sequence[OpenShard], wanted: Sequence[RowRequest]) -> list[RowRequest]:
    """Return the requests of shards after what they need was fetched."""
    requests: list[RowRequest] = []
    try:
        for shard, each in zip(shards, wanted, strict=True):
            requests.append(shard.request(each))
        if requests:
            shards[0].fetch(list(zip(shards, requests, strict=True)))
    finally:
        for each in requests:
            each.release()
    return requests


def _empty_column(choice: BatchFields, name: str) -> Column:
    """Return a column of no samples, or a mask of none."""
    if name not in choice.rows:
        return DenseColumn(np.empty(0, np.bool_))
    form = choice.rows[name]
    return EncodedColumn([]) if form is None else form.column([])
