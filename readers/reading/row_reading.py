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

from penstock.readers.fieldtypes import PRESENT, DenseColumn, EncodedColumn, joined_columns
from penstock.readers.formats import RowRequest, RowsOut

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

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

_Part = tuple[int, int, int]
"""The place of a shard in a batch, and its samples [start, end)."""


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
    parts = [(piece, a, b) for piece, (_, a, b) in enumerate(visit.pieces())]
    is_divided = all(shard.can_divide for shard in visit.shards) and any(
        out.nbytes >= LARGE_BATCH_BYTES and out.nbytes // len(out) >= LARGE_ROW_BYTES
        for out in outs.values()
    )
    if is_divided:
        parts = [(piece, row, row + 1) for piece, a, b in parts for row in range(a, b)]
    elif choice.has_chunks and len(parts) > 1 and (chunks := opened.index.chunks) is not None:
        # Chunks that another thread is decoding come last.
        parts = [parts[piece] for piece in chunks.shards_in_order(visit.numbers)]
    found: dict[_Part, RowsOut] = {}

    def read(part: _Part) -> None:
        piece, a, b = part
        request, first = requests[piece], visit.bounds[piece]
        if is_divided:
            some = slice(a - first, b - first)
            own = {name: crop.take(some) for name, crop in request.crops.items()}
            request = replace(request, rows=visit.rows[a:b], crops=own)
        shard = visit.shards[piece]
        each = partial(_read, first=shard, request=request, arrays=outs, places=visit.places(a, b))
        found[part] = opened.read(visit.numbers[piece], shard, each)

    if is_divided:
        opened.copy_threads().run(read, parts)
    else:
        for part in parts:
            read(part)
    columns: dict[str, Column] = {name: DenseColumn(out) for name, out in outs.items()}
    others: dict[str, list[Column]] = {
        name: [] for name in (*choice.rows, *(name + PRESENT for name in choice.masked))
    }
    for part in sorted(found):
        (piece, a, b), out = part, found[part]
        for place, reason in out.wrong.items():
            if marks is None:
                raise opened.corruption(visit.numbers[piece], int(visit.rows[a + place]), reason)
            marks.setdefault(a + place, reason)
        for name, some_columns in others.items():
            column = out.columns.get(name)
            some_columns.append(DenseColumn(np.ones(b - a, np.bool_)) if column is None else column)
    for name, some_columns in others.items():
        joined = joined_columns(some_columns) if some_columns else _empty_column(choice, name)
        columns[name] = joined if visit.back is None else joined.take(visit.back)
    return columns


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
