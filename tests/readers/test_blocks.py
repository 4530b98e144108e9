"""Blocks: memory that comes back when nobody looks into it, and never before."""

from __future__ import annotations

import gc
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.readers.blocks import MAX_FREE, Blocks


def test_a_block_is_used_again_when_its_last_view_is_gone() -> None:
    blocks = Blocks()
    room, shown = blocks.take(1000)
    address, view = room.ctypes.data, shown[10:20]
    room[10:20] = 7
    del room, shown
    gc.collect()
    other, seen = blocks.take(1000)
    assert other.ctypes.data != address  # the view is alive
    other[:] = 9
    assert view.tolist() == [7] * 10
    del view
    gc.collect()
    assert blocks.take(1000)[0].ctypes.data == address
    assert seen[0] == 9


def test_what_is_handed_out_cant_be_written() -> None:
    _, shown = Blocks().take(10)
    with pytest.raises(ValueError, match="read-only"):
        shown[0] = 1
    with pytest.raises(ValueError, match="WRITEABLE"):
        shown.flags.writeable = True


def test_few_blocks_are_kept_and_none_that_is_far_too_large() -> None:
    blocks = Blocks()
    many = [blocks.take(100) for _ in range(3 * MAX_FREE)]
    many.clear()
    gc.collect()
    assert len(blocks._free) == MAX_FREE
    large = blocks.take(50 * 2**20)[0].ctypes.data
    gc.collect()
    assert blocks.take(100)[0].ctypes.data != large


@settings(max_examples=50, deadline=None)
@given(
    steps=st.lists(st.tuples(st.integers(0, 3 * 2**20), st.integers(0, 5)), min_size=1, max_size=30)
)
def test_what_is_held_keeps_its_bytes(steps: list[tuple[int, int]]) -> None:
    blocks, held = Blocks(), dict[int, tuple[int, np.ndarray]]()
    for number, (size_bytes, place) in enumerate(steps):
        room, shown = blocks.take(size_bytes)
        assert len(room) >= size_bytes
        room[:size_bytes] = number
        held[place] = number, shown[:size_bytes]
        del room, shown
        for mark, view in held.values():
            assert (view == mark).all()


def test_threads_never_share_a_block() -> None:
    blocks, wrong = Blocks(), []

    def work(mark: int) -> None:
        for _ in range(200):
            room, shown = blocks.take(4096)
            room[:4096] = mark
            view = shown[:4096]
            del room, shown
            if not (view == mark).all():
                wrong.append(mark)

    threads = [threading.Thread(target=work, args=(mark,)) for mark in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong
    assert not any(thread.is_alive() for thread in threads)


def test_an_array_may_be_written_and_its_memory_comes_back_behind_its_last_tensor() -> None:
    torch = pytest.importorskip("torch")
    blocks, shape = Blocks(), (100, 4000)
    array = blocks.array(shape, np.dtype(np.float32))
    array[:] = 3
    address = array.ctypes.data
    tensor = torch.from_numpy(array)[7]
    del array
    gc.collect()
    assert blocks.array(shape, np.dtype(np.float32)).ctypes.data != address  # a view is alive
    assert tensor.tolist() == [3.0] * 4000
    del tensor
    gc.collect()
    again = [blocks.array(shape, np.dtype(np.float32)) for _ in range(2)]
    assert address in {each.ctypes.data for each in again}
    assert all(each.shape == shape and each.flags.c_contiguous for each in again)


def test_a_small_array_has_memory_of_its_own() -> None:
    array = Blocks().array((3, 2), np.dtype(np.int16))
    assert (array.shape, array.dtype) == ((3, 2), np.dtype(np.int16))
    assert array.base is None
