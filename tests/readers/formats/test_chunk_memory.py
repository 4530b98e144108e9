"""Memory of decoded chunks is reused."""

from __future__ import annotations

import gc

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from penstock.readers.formats import FREE_BYTES, LEAST_LENT_BYTES, ChunkMemory, DecodedChunks

BYTES = np.dtype(np.uint8)


def test_memory_is_reused_once_no_view_is_left():
    memory = ChunkMemory()
    chunk = memory.array((8, LEAST_LENT_BYTES), BYTES)
    address, row = chunk.ctypes.data, chunk[3]
    row[:] = 7
    del chunk
    other = memory.array((8, LEAST_LENT_BYTES), BYTES)
    assert other.ctypes.data != address
    other[:] = 0
    assert (row == 7).all()
    del row
    gc.collect()
    assert memory.free_bytes == 8 * LEAST_LENT_BYTES
    again = memory.array((8 * LEAST_LENT_BYTES - 5,), BYTES)
    assert again.ctypes.data == address
    assert memory.free_bytes == 0


def test_small_arrays_have_memory_of_their_own():
    memory = ChunkMemory()
    memory.array((LEAST_LENT_BYTES - 1,), BYTES)
    assert memory.free_bytes == 0


def test_free_memory_is_bounded():
    memory = ChunkMemory()
    memory.limit(3 * LEAST_LENT_BYTES)
    held = [memory.array((LEAST_LENT_BYTES,), BYTES) for _ in range(5)]
    held.clear()
    assert memory.free_bytes == 3 * LEAST_LENT_BYTES
    memory.limit(2 * LEAST_LENT_BYTES)
    assert memory.free_bytes <= 2 * LEAST_LENT_BYTES
    memory.limit(-1)
    assert memory.free_bytes == 0
    memory.array((LEAST_LENT_BYTES,), BYTES)
    assert memory.free_bytes == 0
    memory.limit(2 * FREE_BYTES)
    memory.array((FREE_BYTES + 1,), BYTES)
    assert memory.free_bytes == 0


@given(st.lists(st.integers(0, 4 * LEAST_LENT_BYTES), max_size=8))
def test_arrays_in_use_share_no_memory(sizes):
    memory = ChunkMemory()
    for _ in range(2):
        held = [memory.array((size,), BYTES) for size in sizes]
        for number, array in enumerate(held):
            array[:] = number
        assert all((array == number).all() for number, array in enumerate(held))
        assert [len(array) for array in held] == sizes
        held.clear()


def test_free_memory_and_chunks_share_one_limit_and_end_with_the_store():
    store = DecodedChunks(max_bytes=4 * LEAST_LENT_BYTES)

    def decode():
        return store.memory.array((LEAST_LENT_BYTES,), BYTES)

    for chunk in range(12):
        store.take((0, chunk), decode, uses=2, taken=1, size_bytes=LEAST_LENT_BYTES)
        assert store.counts().memory_bytes + store.memory.free_bytes <= 4 * LEAST_LENT_BYTES
    store.close()
    gc.collect()
    assert store.memory.free_bytes == 0
