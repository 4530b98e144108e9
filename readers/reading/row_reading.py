"""Read the fields that are stored by rows, in one gather over all shards of a batch.

Each shard gets a request for its rows. What the requests need is fetched by one call, and then each
shard reads its rows into the arrays of the batch. Rows of large arrays are read one by one, on
several threads.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Protocol

import numpy as np

from penstock.cache import CorruptShardError
from penstock.readers.fieldtypes import PRESENT, DenseColumn, EncodedColumn, joined_columns
from penstock.readers.formats import RowRequest, RowsOut

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from penstock.cache.base import ReadMode
    from penstock.readers.blocks import Blocks
    from penstock.readers.fieldtypes import Column, ColumnCrop
    from penstock.readers.formats import OpenShard, Places
    from penstock.readers.index import Index
    from penstock.readers.reading.batch_plan import BatchFields, BatchRows
    from penstock.readers.reading.open_shards import OpenShards
    from penstock.readers.reading.parallel_copies import CopyThreads

    Ints = NDArray[np.int64]
    Arrays = Mapping[str, NDArray[np.generic]]

LARGE_BATCH_BYTES = 2**23  # smaller batches are read by one thread
WRONG_CRC = "its bytes aren't those that were indexed: its CRC-32C is wrong"


class ShardAccess(Protocol):
    """The part of `SampleReader` that this package's other modules need."""

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

    back: as `BatchRows.back` returns it. crops: by field; those of fields whose samples differ in
    shape are ignored. mode, marks: as in `SampleReader.read`; marks by the visit's samples. Raises
    what reading raises.
    """
    outs: Arrays = {
        name: blocks.array(
            (len(visit.rows), *(crops[name].shape if name in crops else form.fixed_shape)),
            form.dtype,
        )
        for name, form in choice.dense.items()
    }
    crops = {name: crop for name, crop in crops.items() if name in outs}
    small, others = tuple(outs), tuple(choice.rows)
    large: Arrays = {}
    can_divide = len(visit.rows) > 1 and all(shard.can_divide for shard in visit.shards)
    if can_divide and sum(out.nbytes for out in outs.values()) >= LARGE_BATCH_BYTES:
        from penstock.readers.reading.parallel_copies import large_fields  # few need it

        large = {name: outs[name] for name in large_fields(outs) if name not in crops}
    wanted = [
        RowRequest(
            rows=visit.rows[a:b],
            dense=small,
            others=others,
            crops={name: crop.take(visit.places(a, b)) for name, crop in crops.items()},
            mode=mode,
        )
        for _, a, b in visit.pieces()
    ]
    requests = _fetched(visit.shards, wanted)
    large_wrong: list[dict[int, str]] = [{} for _ in requests]
    if large and _gather_large(visit, requests, large, large_wrong, reader.copy_threads()):
        small = tuple(name for name in small if name not in large)
        requests = [replace(request, dense=small) for request in requests]
    # Chunks that another thread is decoding come last.
    chunks = reader.index.chunks if choice.has_chunks and len(requests) > 1 else None
    numbers = visit.numbers
    order = range(len(requests)) if chunks is None else chunks.shards_in_order(numbers)
    parts: dict[str, dict[int, Column]] = {name: {} for name in choice.rows}
    parts |= {name + PRESENT: {} for name in choice.masked}
    for piece in order:
        a, b = visit.bounds[piece], visit.bounds[piece + 1]
        shard, request = visit.shards[piece], requests[piece]
        read = partial(_read, first=shard, request=request, arrays=outs, places=visit.places(a, b))
        out = reader.shards.read(numbers[piece], shard, read)
        for place, reason in (large_wrong[piece] | out.wrong).items():
            if marks is None:
                raise reader.corruption(numbers[piece], int(visit.rows[a + place]), reason)
            marks.setdefault(a + place, reason)
        for name, some in parts.items():
            found = out.columns.get(name)
            some[piece] = DenseColumn(np.ones(b - a, np.bool_)) if found is None else found
    columns: dict[str, Column] = {name: DenseColumn(out) for name, out in outs.items()}
    for name, some in parts.items():
        by_piece = [some[piece] for piece in sorted(some)]  # they may be read in another order
        joined = joined_columns(by_piece) if by_piece else _empty_column(choice, name)
        columns[name] = joined if back is None else joined.take(back)
    return columns


def _gather_large(
    visit: BatchRows,
    requests: Sequence[RowRequest],
    outs: Arrays,
    wrong: Sequence[dict[int, str]],
    threads: CopyThreads,
) -> bool:
    """Read large rows on several threads; return False if they must be read again."""
    from penstock.readers.reading.parallel_copies import gather_large  # few need it

    source = visit.shards[0].source
    try:
        gather_large(visit, requests, outs, wrong, threads=threads)
    except (CorruptShardError, OSError, EOFError) as error:
        source.refuse(error, 0)
        return False
    if not any(wrong) or not source.is_fetched:
        return True
    for each in wrong:
        each.clear()
    return False


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
    return EncodedColumn([]) if form is None else form.column([])
