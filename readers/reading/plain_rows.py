"""Read rows that lie in memory at equal distances by one call for each field.

If samples are short (a sequence of tokens, a row of an array, a number), a batch takes 0.1 ms in
total, and a few microseconds for each shard that it touches would double that. So the address of
each shard's first row is recorded once, and one call copies a batch's rows from any number of
shards and files, of one dataset or of several (`joined_reader`).
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from penstock.readers.fieldtypes import DenseColumn, PartLoads, SampleBatch, from_bits
from penstock.readers.files import PageAdvice, advise_willneed
from penstock.readers.formats import OpenShard, StridedRows

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from penstock.cache.base import TrafficMeter
    from penstock.readers.blocks import Blocks
    from penstock.readers.reading.batch_plan import BatchFields
    from penstock.readers.reading.open_shards import Shards
    from penstock.readers.types import Ints


MAX_MAPS = 2**13
"""Maps that all datasets of a process keep for this; Linux allows 65,530 (vm.max_map_count)."""
_MAX_ROW_BYTES = 2**20  # larger rows are read faster by several threads
_MAX_INDEXED_BYTES = 2**15  # larger rows are read faster one by one than by an index expression
_LEAST_UNIT_BYTES = 64
"""Rows whose distances are multiples of such a unit are copied unit by unit, by `take`, which
writes into the batch; smaller units take longer than an index expression, which makes a copy."""
_STEP_BYTES = 2**17
"""Rows that an index expression copies at once: its own copy stays in the processor's cache."""

_MOST_SKIPPED = 1024
"""Batches after which rows that aren't plain, or that aren't checked yet, are tried again."""


class _KeptMaps:
    """Counts the maps that are kept. Beyond the limit a new round begins, in which no address of
    an earlier one is used: so all earlier maps end.

    It has no lock: a miscounted map changes no result.
    """

    def __init__(self) -> None:
        self.round, self._count = 0, 0

    def add(self, count: int) -> int:
        """Count more maps, and return the round."""
        if self._count + count > MAX_MAPS:
            self.end_round()
        self._count += count
        return self.round

    def end_round(self) -> None:
        """Drop all maps, as some dataset is closed."""
        self.round += 1
        self._count = 0


_maps = _KeptMaps()


class _RowAddresses(NamedTuple):
    """The address of the first row by field and shard, 0 if unknown, and the data that keeps the
    memory alive. Entries are never replaced, and a reader holds both, so that no map ends while it
    is read. round: of `_KeptMaps`."""

    starts: NDArray[np.int64]
    kept: dict[int, Any]
    round: int

    @classmethod
    def none(cls, fields: int, shards: int) -> _RowAddresses:
        """Return no addresses."""
        return cls(np.zeros((fields, shards), np.int64), {}, _maps.round)


class _Tries:
    """Decides when rows that weren't plain are tried again: less and less often."""

    def __init__(self) -> None:
        self._skipped, self._to_skip = 0, 1

    def is_due(self) -> bool:
        """Return True if they are tried now."""
        self._skipped += 1
        if self._skipped < self._to_skip:
            return False
        self._skipped = 0
        return True

    def count(self, is_plain: bool) -> None:
        """Count the result of a try."""
        self._to_skip = 1 if is_plain else min(2 * self._to_skip, _MOST_SKIPPED)


class _FoundColumn(NamedTuple):
    """The addresses of a field's rows, int64, shape (n,). shape: of a sample; None for a number of
    a table. dtype: as samples have it."""

    addresses: Ints
    plain: StridedRows
    shape: tuple[int, ...] | None
    dtype: np.dtype[Any]

    @property
    def layout(self) -> tuple[Any, ...]:
        """The properties that datasets must share for their rows to be copied together."""
        _, row_bytes, dtype, below = self.plain.layout
        return row_bytes, dtype, below, self.shape, self.dtype


@dataclass(frozen=True, slots=True, eq=False)
class FoundRows:
    """The places in memory of a batch's plain rows, in one dataset or in several.

    ids: of the samples, int64, shape (n,). kept: keeps the memory alive. meters: count the bytes
    that are read, with the number of samples of each. advice: decides whether pages are requested
    ahead.
    """

    ids: Ints
    columns: dict[str, _FoundColumn]
    kept: list[object]
    meters: list[tuple[TrafficMeter, int]]
    advice: PageAdvice

    @classmethod
    def joined(
        cls, parts: Sequence[tuple[Ints | slice, FoundRows]], count: int
    ) -> FoundRows | None:
        """Return the rows of several datasets as those of one batch; None if they differ in form.

        parts: the positions in the batch of each dataset's rows. count: of all rows.
        """
        first = parts[0][1]
        forms = {name: column.layout for name, column in first.columns.items()}
        for _, found in parts[1:]:
            if {name: column.layout for name, column in found.columns.items()} != forms:
                return None
        ids = np.empty(count, np.int64)
        columns = {
            name: column._replace(addresses=np.empty(count, np.int64))
            for name, column in first.columns.items()
        }
        for at, found in parts:
            ids[at] = found.ids
            for name, column in found.columns.items():
                columns[name].addresses[at] = column.addresses
        return cls(
            ids,
            columns,
            [kept for _, each in parts for kept in each.kept],
            [meter for _, each in parts for meter in each.meters],
            first.advice,
        )

    def read(self, blocks: Blocks, *, loads: PartLoads | None = None) -> SampleBatch | None:
        """Copy the rows; return None if some are bad. loads: of the parts, which get the bytes."""
        began = time.perf_counter()
        columns, size_bytes, count = dict[str, DenseColumn](), 0, len(self.ids)
        for name, (addresses, plain, shape, dtype) in self.columns.items():
            if shape is None:
                bits = np.empty(count, np.int64)
                _gather(addresses, plain, bits)
                columns[name] = DenseColumn(from_bits(bits, dtype))
                continue
            if self.advice.is_on:
                advise_willneed(addresses, addresses + plain.row_bytes)
            out = blocks.array((count, *shape), dtype)
            if not _gather(addresses, plain, out):
                return None
            columns[name] = DenseColumn(out)
            size_bytes += count * plain.row_bytes
        seconds = time.perf_counter() - began
        for meter, samples in self.meters:
            meter.add(bytes_disk=size_bytes * samples // count)
        self.advice.note(samples=count, size_bytes=size_bytes, seconds=seconds)
        if loads is not None:
            loads.amounts[:, 1] = loads.amounts[:, 0] * (size_bytes / count)
        return SampleBatch(ids=self.ids, columns=columns, bytes_read=size_bytes, loads=loads)


class PlainRows:
    """Finds fields of local shards whose rows are plain: of one shape, each at the same distance
    from the one before it. Safe for several threads."""

    def __init__(
        self,
        choice: BatchFields,
        shards: Shards,
        *,
        sizes: Ints,
        starts: Ints,
        meter: TrafficMeter | None,
    ) -> None:
        """choice: with dense fields and numbers of tables only. sizes, starts: the samples of each
        shard, and the id of its first one. meter: counts the bytes read; None if the caller
        does."""
        self._choice, self._shards, self._meter = choice, shards, meter
        self._sizes, self._starts = sizes, starts
        self._known = self._no_addresses()
        self._plain: dict[str, StridedRows] = {}
        self._is_off = False
        self._tries, self._advice = _Tries(), PageAdvice()

    def find(self, rows: Ints) -> FoundRows | None:
        """Return where samples lie in memory; None if they must be read in another way, because
        they aren't plain, or aren't checked yet. rows: checked."""
        if self._is_off or not len(rows):
            return None
        shards, inside = rows[:, 0], rows[:, 1]
        known = self._addresses(shards)
        if known is None:
            return None
        columns = {
            name: column._replace(
                addresses=known.starts[number][shards] + inside * column.plain.stride_bytes
            )
            for number, (name, column) in enumerate(self._columns.items())
        }
        ids = self._starts[shards] + inside
        meters = [] if self._meter is None else [(self._meter, len(ids))]
        # Held to the end, because another thread may drop the addresses.
        return FoundRows(ids, columns, [known], meters, self._advice)

    @property
    def _columns(self) -> dict[str, _FoundColumn]:
        """The fields without any addresses. Some shard must be known."""
        found, choice = dict[str, _FoundColumn](), self._choice
        for name in choice.fields:
            form = choice.dense.get(name)
            shape = None if form is None else form.fixed_shape
            dtype = choice.values_of[name][1] if form is None else form.dtype
            found[name] = _FoundColumn(_NONE, self._plain[name], shape, dtype)
        return found

    def close(self) -> None:
        """Release all maps. Safe to call twice."""
        if not self._is_off:
            self._is_off = True
            _maps.end_round()  # others may hold addresses of this dataset
        self._known = self._no_addresses()

    def _no_addresses(self) -> _RowAddresses:
        return _RowAddresses.none(len(self._choice.fields), len(self._sizes))

    def _addresses(self, shards: Ints) -> _RowAddresses | None:
        """Return the addresses of all of these shards; None if some aren't plain."""
        known = self._known
        if known.round != _maps.round:
            self._known = known = self._no_addresses()
        if known.starts[0][shards].all():
            return known
        if not self._tries.is_due():
            return None
        known = self.add_shards(shards, known)
        is_plain = not self._is_off and bool(known.starts[0][shards].all())
        self._tries.count(is_plain)
        return known if is_plain else None

    def add_shards(self, shards: Ints, known: _RowAddresses) -> _RowAddresses:
        """Record the addresses of these shards, and drop those of others if there are too many."""
        every = np.unique(shards)
        wanted = every[known.starts[0][every] == 0].tolist()
        if _maps.add(len(wanted)) != known.round:
            self._known = known = self._no_addresses()
            _maps.add(len(every) - len(wanted))
            wanted = every.tolist()
        for shard, opened in zip(wanted, self._shards.get(wanted), strict=True):
            found = self._strided(opened, int(self._sizes[shard]))
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


_NONE = np.empty(0, np.int64)


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
