"""Read rows that lie in memory at equal distances by one call for each field.

If samples are short (a sequence of tokens, a row of an array, a number), a batch takes 0.1 ms in
total, and a few microseconds for each shard that it touches would double that. So the address of
each shard's first row is recorded once, and one call copies a batch's rows from any number of
shards and files.
"""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from penstock.readers.fieldtypes import DenseColumn, SampleBatch, from_bits
from penstock.readers.files import PageAdvice, advise_willneed
from penstock.readers.formats import StridedRows

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from penstock.readers.blocks import Blocks
    from penstock.readers.formats import OpenShard
    from penstock.readers.index import Index
    from penstock.readers.reading.batch_plan import BatchFields
    from penstock.readers.reading.open_shards import OpenShards

    Ints = NDArray[np.int64]

MAX_MAPS = 2**12
_MAX_ROW_BYTES = 2**20  # larger rows are read faster by several threads
_MAX_INDEXED_BYTES = 2**15  # larger rows are read faster one by one than by an index expression
_LEAST_UNIT_BYTES = 64
"""Rows whose distances are multiples of such a unit are copied unit by unit, by `take`, which
writes into the batch; smaller units take longer than an index expression, which makes a copy."""
_STEP_BYTES = 2**17
"""Rows that an index expression copies at once: its own copy stays in the processor's cache."""

_MOST_SKIPPED = 1024
"""Batches after which rows that aren't plain, or that aren't checked yet, are tried again."""


class _RowAddresses(NamedTuple):
    """The address of the first row by field and shard, 0 if unknown, and the data that keeps the
    memory alive. Entries are never replaced, and a reader holds both, so that no map ends while it
    is read."""

    starts: NDArray[np.int64]
    kept: dict[int, list[NDArray[Any]]]


class PlainRows:
    """Reads fields of a local dataset whose rows are plain: of one shape, each at the same distance
    from the one before it. Safe for several threads."""

    def __init__(self, choice: BatchFields, index: Index, shards: OpenShards) -> None:
        """choice: with dense fields and numbers of tables only."""
        self._choice, self._index, self._shards = choice, index, shards
        self._known = self._no_addresses()
        self._plain: dict[str, StridedRows] = {}
        self._is_off = False
        self._skipped, self._to_skip = 0, 1
        self._advice = PageAdvice()

    def read(self, rows: Ints, *, blocks: Blocks) -> SampleBatch | None:
        """Return samples; None if they must be read in another way, because they aren't plain, or
        aren't checked yet, or some are bad. rows: checked."""
        if self._is_off or not len(rows):
            return None
        began = time.perf_counter()
        shards, inside = rows[:, 0], rows[:, 1]
        known = self._addresses(shards)  # held to the end: another thread may drop the addresses
        if known is None:
            return None
        columns, size_bytes = dict[str, DenseColumn](), 0
        for number, name in enumerate(self._choice.fields):
            plain, form = self._plain[name], self._choice.dense.get(name)
            addresses = known.starts[number][shards] + inside * plain.stride_bytes
            if form is None:
                bits = np.empty(len(rows), np.int64)
                _gather(addresses, plain, bits)
                columns[name] = DenseColumn(from_bits(bits, self._choice.values_of[name][1]))
                continue
            if self._advice.is_on:
                advise_willneed(addresses, addresses + plain.row_bytes)
            out = blocks.array((len(rows), *form.fixed_shape), form.dtype)
            if not _gather(addresses, plain, out):
                return None
            columns[name] = DenseColumn(out)
            size_bytes += len(rows) * plain.row_bytes
        seconds = time.perf_counter() - began
        self._advice.note(samples=len(rows), size_bytes=size_bytes, seconds=seconds)
        return SampleBatch(
            ids=self._index.starts[shards] + inside, columns=columns, bytes_read=size_bytes
        )

    def close(self) -> None:
        """Release all maps. Safe to call twice."""
        self._is_off = True
        self._known = self._no_addresses()

    def _no_addresses(self) -> _RowAddresses:
        shape = len(self._choice.fields), len(self._index.sizes)
        return _RowAddresses(np.zeros(shape, np.int64), {})

    def _addresses(self, shards: Ints) -> _RowAddresses | None:
        """Return the addresses of all of these shards; None if some aren't plain."""
        known = self._known
        if known.starts[0][shards].all():
            return known
        self._skipped += 1
        if self._skipped < self._to_skip:
            return None
        self._skipped = 0
        known = self.add_shards(shards, known)
        if self._is_off or not known.starts[0][shards].all():
            self._to_skip = min(2 * self._to_skip, _MOST_SKIPPED)
            return None
        self._to_skip = 1
        return known

    def add_shards(self, shards: Ints, known: _RowAddresses) -> _RowAddresses:
        """Record the addresses of these shards, and drop those of others if there are too many."""
        every = np.unique(shards)
        wanted = every[known.starts[0][every] == 0].tolist()
        if len(known.kept) + len(wanted) > MAX_MAPS:
            self._known = known = self._no_addresses()
            wanted = every.tolist()
        for shard, opened in zip(wanted, self._shards.get(wanted), strict=True):
            found = self._strided(opened, int(self._index.sizes[shard]))
            if found is None:
                break
            # Another thread may have opened the shard meanwhile and read its map: that one stays.
            kept = known.kept.setdefault(shard, found)
            for number in reversed(range(len(kept))):  # the first field shows that all are known
                known.starts[number, shard] = kept[number].ctypes.data
        return known

    def _strided(self, shard: OpenShard, rows: int) -> list[NDArray[Any]] | None:
        """Return the data of a shard's fields; None if a field isn't plain, or differs in layout
        from those of the first shard."""
        found = []
        for name in self._choice.fields:
            place = self._choice.values_of.get(name)
            plain = shard.strided(name) if place is None else _cells(shard, place[0])
            if plain is None or plain.row_bytes > _MAX_ROW_BYTES:
                return None
            like = self._plain.setdefault(name, plain)
            apart = plain.data.ctypes.data - like.data.ctypes.data
            unit = _lowest_bit(apart | plain.stride_bytes | plain.row_bytes)
            if plain.row_bytes > _MAX_INDEXED_BYTES and unit < _LEAST_UNIT_BYTES:
                return None
            if plain.layout != like.layout:
                return None
            assert (rows - 1) * plain.stride_bytes + plain.row_bytes <= plain.data.nbytes
            found.append(plain.data)
        return found


def _cells(shard: OpenShard, column: int) -> StridedRows | None:
    """Return the places of a column of a shard's table."""
    table = shard.table
    if not table.flags.c_contiguous:
        return None
    data = table.reshape(-1)[column:].view(np.uint8)
    return StridedRows(
        data=data, stride_bytes=table.strides[0], row_bytes=table.itemsize, dtype=table.dtype
    )


def _memory(address: int, count: int, size_bytes: int, *, stride_bytes: int) -> NDArray[np.void]:
    """Return this process's memory from an address on as elements of some bytes, one every
    stride_bytes."""
    interface = {
        "data": (address, True),
        "shape": (count,),
        "strides": (stride_bytes,),
        "typestr": f"|V{size_bytes}",
        "version": 3,
    }
    return np.asarray(SimpleNamespace(__array_interface__=interface))


def _gather(addresses: Ints, plain: StridedRows, out: NDArray[Any]) -> bool:
    """Copy the rows at some addresses into out, which is contiguous; return False if some are
    bad."""
    if not len(addresses):
        return True
    if plain.dtype == out.dtype:
        _copy(addresses, plain.row_bytes, out)
        return plain.fits(out)
    raw = np.empty(out.shape, plain.dtype)
    _copy(addresses, plain.row_bytes, raw)
    np.copyto(out, raw, casting="unsafe")
    return plain.fits(raw)


def _copy(addresses: Ints, row_bytes: int, out: NDArray[Any]) -> None:
    """Copy the bytes at some addresses, which must be mapped."""
    low = int(addresses.min())
    places = addresses - low
    end = int(places.max()) + row_bytes
    unit = _lowest_bit(int(np.bitwise_or.reduce(places)) | row_bytes)
    if unit == row_bytes or unit >= _LEAST_UNIT_BYTES:
        places //= unit
        parts = row_bytes // unit
        wanted = places if parts == 1 else (places[:, None] + np.arange(parts)).reshape(-1)
        memory = _memory(low, end // unit, unit, stride_bytes=unit)
        memory.take(wanted, out=out.reshape(-1).view(memory.dtype), mode="clip")
        return
    rows = out.reshape(len(addresses), -1).view(f"V{row_bytes}")[:, 0]
    # At most 2^47 elements of 2^15 bytes, whose product numpy can represent.
    memory = _memory(low, end - row_bytes + 1, row_bytes, stride_bytes=1)
    step = max(1, _STEP_BYTES // row_bytes)
    for begin in range(0, len(rows), step):
        rows[begin : begin + step] = memory[places[begin : begin + step]]


def _lowest_bit(bits: int) -> int:
    """Return the largest power of two that divides all numbers whose bits were joined by `|`."""
    return bits & -bits
