"""Read rows that lie in mapped files at equal distances with one index expression.

If samples are short (a sequence of tokens, a row of a large array), a batch takes 0.1 ms in total,
and a few microseconds for each shard that it touches would double that. So the address of each
shard's first row is recorded once, and a batch's rows are one index into memory, in any number of
shards and files.
"""

from __future__ import annotations

import ctypes
import time
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from penstock.readers.fieldtypes import DenseColumn, SampleBatch
from penstock.readers.files import PageAdvice, advise_willneed

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from penstock.readers.blocks import Blocks
    from penstock.readers.fieldtypes import ArrayForm
    from penstock.readers.formats import StridedRows
    from penstock.readers.index import Index
    from penstock.readers.reading.open_shards import OpenShards

    Ints = NDArray[np.int64]

MAX_MAPS = 2**12
_MAX_ROW_BYTES = 2**20  # larger rows are read faster by several threads
_LARGE_ROW_BYTES = 2**13  # a call for each row costs less than the copy of an index expression


class _RowAddresses(NamedTuple):
    """The address of the first row by shard, 0 if unknown, and the data that keeps the maps alive.
    Entries are never replaced, and a reader holds both, so that no map ends while it is read."""

    starts: Ints
    kept: dict[int, NDArray[Any]]


class PlainRows:
    """Reads one field of a local dataset. Safe for several threads."""

    def __init__(self, name: str, form: ArrayForm, index: Index, shards: OpenShards) -> None:
        self._name, self._form, self._index, self._shards = name, form, index, shards
        self._known = self._no_addresses()
        self._plain: StridedRows | None = None
        self._is_off = False
        self._advice = PageAdvice()

    def read(self, rows: Ints, *, blocks: Blocks) -> SampleBatch | None:
        """Return samples; None if they must be read in another way, because they don't lie at equal
        distances or some are bad. rows: checked."""
        if self._is_off or not len(rows):
            return None
        began = time.perf_counter()
        found = self._addresses(rows)
        plain = self._plain
        if found is None or plain is None:
            return None
        addresses, _maps = found  # held to the end: another thread may drop the known addresses
        out = blocks.array((len(rows), *self._form.fixed_shape), self._form.dtype)
        if not _gather(addresses, plain, out):
            return None
        seconds = time.perf_counter() - began
        self._advice.note(samples=len(rows), size_bytes=out.nbytes, seconds=seconds)
        return SampleBatch(
            ids=self._index.starts[rows[:, 0]] + rows[:, 1],
            columns={self._name: DenseColumn(out)},
            bytes_read=len(rows) * plain.row_bytes,
        )

    def close(self) -> None:
        """Release all maps. Safe to call twice."""
        self._is_off = True
        self._known = self._no_addresses()

    def _no_addresses(self) -> _RowAddresses:
        return _RowAddresses(np.zeros(len(self._index.sizes), np.int64), {})

    def _addresses(self, rows: Ints) -> tuple[Ints, _RowAddresses] | None:
        """Return the addresses of rows, and the data that keeps them mapped."""
        known = self._known
        begins = known.starts[rows[:, 0]]
        if not begins.all():
            known = self.add_shards(rows[:, 0], known)
            if self._is_off:
                return None
            begins = known.starts[rows[:, 0]]
        plain = self._plain
        assert plain is not None
        addresses: Ints = begins + rows[:, 1] * plain.stride_bytes
        if self._advice.is_on:
            advise_willneed(addresses, addresses + plain.row_bytes)
        return addresses, known

    def add_shards(self, shards: Ints, known: _RowAddresses) -> _RowAddresses:
        """Record the addresses of these shards, and drop those of others if there are too many."""
        every = np.unique(shards)
        wanted = every[known.starts[every] == 0].tolist()
        if len(known.kept) + len(wanted) > MAX_MAPS:
            self._known = known = self._no_addresses()
            wanted = every.tolist()
        for shard, opened in zip(wanted, self._shards.get(wanted), strict=True):
            plain = opened.strided(self._name)
            if plain is None or plain.row_bytes > _MAX_ROW_BYTES or not self._is_like(plain):
                self._is_off = True
                return known
            rows = int(self._index.sizes[shard])
            assert (rows - 1) * plain.stride_bytes + plain.row_bytes <= plain.data.nbytes
            # Another thread may have opened the shard meanwhile and read its map: that one stays.
            kept = known.kept.setdefault(shard, plain.data)
            known.starts[shard] = kept.ctypes.data
        return known

    def _is_like(self, plain: StridedRows) -> bool:
        """Return True if a shard's rows have the same layout as those of the first shard."""
        if self._plain is None:
            self._plain = plain
        a, b = self._plain, plain
        return (a.stride_bytes, a.row_bytes, a.dtype, a.below) == (
            b.stride_bytes,
            b.row_bytes,
            b.dtype,
            b.below,
        )


class _Memory:
    """This process's memory from an address on, as a numpy array with a row at each byte."""

    def __init__(self, address: int, span: int, row_bytes: int) -> None:
        self.__array_interface__ = {
            "data": (address, True),
            "shape": (span,),
            "strides": (1,),
            "typestr": f"|V{row_bytes}",
            "version": 3,
        }


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
    if row_bytes >= _LARGE_ROW_BYTES:
        into = out.ctypes.data
        for address in addresses.tolist():
            ctypes.memmove(into, address, row_bytes)
            into += row_bytes
        return
    rows = out.reshape(len(addresses), -1).view(f"V{row_bytes}")[:, 0]
    low = int(addresses.min())
    span = int(addresses.max()) - low + 1  # at most 2^47, so that span * row_bytes < 2^60
    rows[:] = np.asarray(_Memory(low, span, row_bytes))[addresses - low]
