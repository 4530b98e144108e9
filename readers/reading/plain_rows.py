"""Read rows that lie in mapped files at equal distances by one index expression.

Where samples are short (a sequence of tokens, a row of a large array) a batch takes 0.1 ms in all,
and a few microseconds for each shard that it meets would double that. So the address where each
shard's rows begin is noted once, and a batch's rows are one index into memory, whatever shards and
files they lie in.
"""

from __future__ import annotations

import ctypes
import time
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from penstock.readers.fields import DenseColumn, SampleBatch
from penstock.readers.files import PageAdvice, advise_willneed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from penstock.readers.blocks import Blocks
    from penstock.readers.fields import ArrayForm
    from penstock.readers.formats import StridedRows
    from penstock.readers.index import Index
    from penstock.readers.reading.open_shards import OpenShards

    Ints = NDArray[np.int64]

_MOST_MAPS = 2**12
_MOST_BYTES = 2**20  # of a row: larger ones had better be read by several threads
_MOST_SPAN = 2**62
_LARGE_BYTES = (
    2**13
)  # of a row: a call each costs less than the copy that an index expression makes


class _RowAddresses(NamedTuple):
    """Where rows begin, by shard, 0 where that isn't known; and what keeps their maps: what is
    there is never replaced, and whoever reads holds on to both, so nothing is unmapped under it."""

    starts: Ints
    kept: dict[int, NDArray[Any]]


class PlainRows:
    """Reads one field of a local dataset. Safe for several threads."""

    def __init__(self, name: str, form: ArrayForm, index: Index, shards: OpenShards) -> None:
        self._name, self._form, self._index, self._shards = name, form, index, shards
        self._noted = self._nothing()
        self._plain: StridedRows | None = None
        self._is_off = False
        self._advice = PageAdvice()

    def read(
        self, rows: Ints, bounds: Sequence[int], *, blocks: Blocks
    ) -> list[SampleBatch] | None:
        """The samples between bounds, each part in memory of its own; None where they have to be
        read in another way: they don't lie so, or some are bad. rows: checked."""
        if self._is_off or not len(rows):
            return None
        began = time.perf_counter()
        found = self._addresses(rows)
        plain = self._plain
        if found is None or plain is None:
            return None
        addresses, _maps = found  # held to the end: another thread may forget what is noted
        ids = self._index.starts[rows[:, 0]] + rows[:, 1]
        parts = []
        for a, b in pairwise(bounds):
            out = blocks.array((b - a, *self._form.fixed_shape), self._form.dtype)
            if not _gather(addresses[a:b], plain, out):
                return None
            parts.append(
                SampleBatch(
                    ids=ids[a:b].copy() if len(bounds) > 2 else ids,
                    columns={self._name: DenseColumn(out)},
                    bytes_read=(b - a) * plain.row_bytes,
                )
            )
        seconds = time.perf_counter() - began
        size_bytes = sum(part.columns[self._name].size_bytes for part in parts)
        self._advice.note(samples=len(rows), size_bytes=size_bytes, seconds=seconds)
        return parts

    def close(self) -> None:
        """Let go of all maps. Safe to call twice."""
        self._is_off = True
        self._noted = self._nothing()

    def _nothing(self) -> _RowAddresses:
        return _RowAddresses(np.zeros(len(self._index.sizes), np.int64), {})

    def _addresses(self, rows: Ints) -> tuple[Ints, _RowAddresses] | None:
        """Where rows begin in this process's memory, and what keeps them there."""
        noted = self._noted
        begins = noted.starts[rows[:, 0]]
        if not begins.all():
            noted = self._note(rows[:, 0], noted)
            if self._is_off:
                return None
            begins = noted.starts[rows[:, 0]]
        plain = self._plain
        assert plain is not None
        addresses: Ints = begins + rows[:, 1] * plain.stride_bytes
        if self._advice.is_on:
            advise_willneed(addresses, addresses + plain.row_bytes)
        return addresses, noted

    def _note(self, shards: Ints, noted: _RowAddresses) -> _RowAddresses:
        """Note where the rows of these shards begin; of many others that is forgotten."""
        every = np.unique(shards)
        wanted = every[noted.starts[every] == 0].tolist()
        if len(noted.kept) + len(wanted) > _MOST_MAPS:
            self._noted = noted = self._nothing()
            wanted = every.tolist()
        for shard, opened in zip(wanted, self._shards.get(wanted), strict=True):
            tell = getattr(opened, "plain", None)
            plain: StridedRows | None = None if tell is None else tell(self._name)
            if plain is None or plain.row_bytes > _MOST_BYTES or not self._is_like(plain):
                self._is_off = True
                return noted
            rows = int(self._index.sizes[shard])
            assert (rows - 1) * plain.stride_bytes + plain.row_bytes <= plain.data.nbytes
            # Another thread may have opened it meanwhile, and read there: the first map stays.
            kept = noted.kept.setdefault(shard, plain.data)
            noted.starts[shard] = kept.ctypes.data
        return noted

    def _is_like(self, plain: StridedRows) -> bool:
        """Whether a shard's rows lie as those of the others."""
        if self._plain is None:
            self._plain = plain
        first = self._plain
        return (plain.stride_bytes, plain.row_bytes, plain.dtype, plain.below) == (
            first.stride_bytes,
            first.row_bytes,
            first.dtype,
            first.below,
        )


class _Memory:
    """This process's memory from an address on, as numpy takes it: at each byte a row begins."""

    def __init__(self, address: int, span: int, row_bytes: int) -> None:
        self.__array_interface__ = {
            "data": (address, True),
            "shape": (span,),
            "strides": (1,),
            "typestr": f"|V{row_bytes}",
            "version": 3,
        }


def _gather(addresses: Ints, plain: StridedRows, out: NDArray[Any]) -> bool:
    """Copy the rows that begin there into out, which is contiguous; False where some are bad."""
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
    """Copy the bytes at some addresses: memory that is known to be there."""
    if row_bytes >= _LARGE_BYTES:
        into = out.ctypes.data
        for address in addresses.tolist():
            ctypes.memmove(into, address, row_bytes)
            into += row_bytes
        return
    rows = out.reshape(len(addresses), -1).view(f"V{row_bytes}")[:, 0]
    low = int(addresses.min())
    span = int(addresses.max()) - low + 1
    if span * row_bytes < _MOST_SPAN:
        rows[:] = np.asarray(_Memory(low, span, row_bytes))[addresses - low]
        return
    for place, address in enumerate(addresses.tolist()):
        rows[place] = np.asarray(_Memory(address, 1, row_bytes))[0]
