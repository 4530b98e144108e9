"""Blocks are returned when their last view is gone, and never earlier."""

from __future__ import annotations

import gc
import subprocess
import sys
import tempfile
import textwrap
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.readers import MAX_FREE, Blocks
from penstock.readers import blocks as module
from tests.properties import examples


def test_a_block_is_reused_when_its_last_view_is_gone() -> None:
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


def test_the_shared_array_is_read_only() -> None:
    _, shown = Blocks().take(10)
    with pytest.raises(ValueError, match="read-only"):
        shown[0] = 1
    with pytest.raises(ValueError, match="WRITEABLE"):
        shown.flags.writeable = True


def test_few_blocks_are_kept_and_much_larger_ones_arent_reused() -> None:
    blocks = Blocks()
    many = [blocks.take(100) for _ in range(3 * MAX_FREE)]
    many.clear()
    gc.collect()
    assert len(blocks._free) == MAX_FREE
    large = blocks.take(50 * 2**20)[0].ctypes.data
    gc.collect()
    assert blocks.take(100)[0].ctypes.data != large


@examples(50)
@given(
    steps=st.lists(st.tuples(st.integers(0, 3 * 2**20), st.integers(0, 5)), min_size=1, max_size=30)
)
def test_blocks_in_use_keep_their_bytes(steps: list[tuple[int, int]]) -> None:
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


def test_an_array_is_writable_and_its_memory_is_reused_after_its_last_tensor() -> None:
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


def test_free_blocks_are_bounded_in_bytes_and_the_newest_stay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "FREE_BYTES", 10 * 2**20)
    blocks, kind = Blocks(), np.dtype(np.uint8)
    for size in (2**20, 3 * 2**20, 5 * 2**20, 2**21, 40 * 2**20, 2**20, 7 * 2**20):
        held = [blocks.array((size + i,), kind) for i in range(3)]
        del held
        assert blocks.free_bytes <= 10 * 2**20 or len(blocks._free) == 1
        assert len(blocks._free) >= 1


def test_closed_blocks_keep_nothing_and_lent_memory_stays_valid() -> None:
    blocks = Blocks()
    lent, free = (blocks.array((2**20,), np.dtype(np.uint8)) for _ in range(2))
    lent[:] = 5
    del free
    assert blocks.free_bytes
    blocks.close()
    blocks.close()
    assert not blocks.free_bytes
    assert (lent == 5).all()
    del lent
    assert not blocks.free_bytes
    after = blocks.array((2**20,), np.dtype(np.uint8))
    after[:] = 1
    del after
    assert not blocks.free_bytes


def tensor_view(torch: Any, array: Any) -> Any:
    return torch.from_numpy(array)[1:][::2]


def view_of_a_view(torch: Any, array: Any) -> Any:
    return torch.from_numpy(array)[3:9].view(torch.int32).T[5:].unbind(1)[0]


def numpy_again(torch: Any, array: Any) -> Any:
    return torch.from_numpy(array)[2].numpy()


def dlpack(torch: Any, array: Any) -> Any:
    return np.from_dlpack(torch.utils.dlpack.from_dlpack(torch.from_numpy(array)[5]))


def capsule(torch: Any, array: Any) -> Any:
    return torch.utils.dlpack.to_dlpack(torch.from_numpy(array)[5])


def of_an_error(torch: Any, array: Any) -> Any:
    tensor = torch.from_numpy(array)

    def fails() -> None:
        local = tensor[4]
        raise ValueError(local.shape)

    try:
        fails()
    except ValueError as error:
        return error
    raise AssertionError


def memory(torch: Any, array: Any) -> Any:
    return memoryview(torch.from_numpy(array).numpy())


def of_autograd(torch: Any, array: Any) -> Any:
    tensor = torch.from_numpy(array)
    weight = torch.ones(tensor.shape[1], requires_grad=True)
    return (tensor * weight).sum()


@pytest.mark.parametrize(
    "keep",
    [tensor_view, view_of_a_view, numpy_again, dlpack, capsule, of_an_error, memory, of_autograd],
)
def test_every_kind_of_view_keeps_its_block(keep: Any) -> None:
    torch = pytest.importorskip("torch")
    blocks, shape = Blocks(), (20, 40_000)
    array = blocks.array(shape, np.dtype(np.float32))
    array[:] = 3
    address = array.ctypes.data
    kept = keep(torch, array)
    del array
    gc.collect()
    others = [blocks.array(shape, np.dtype(np.float32)) for _ in range(3)]
    for other in others:
        other[:] = 9
        assert other.ctypes.data != address
    del other, others
    if isinstance(kept, np.ndarray):
        assert (kept == 3).all()
    del kept
    gc.collect()
    again = [blocks.array(shape, np.dtype(np.float32)) for _ in range(5)]
    assert address in {each.ctypes.data for each in again}


def test_a_tensor_sent_to_another_process_is_unchanged_in_both() -> None:
    code = textwrap.dedent("""
        import gc, sys
        import numpy as np, torch
        import torch.multiprocessing as mp
        from penstock.readers.blocks import Blocks

        def work(given, back):
            tensor = given.get()
            back.put((float(tensor.min()), float(tensor.max())))
            given.get()

        if __name__ == "__main__":
            blocks = Blocks()
            spawn = mp.get_context("spawn")
            given, back = spawn.Queue(), spawn.Queue()
            child = spawn.Process(target=work, args=(given, back))
            child.start()
            array = blocks.array((20, 40_000), np.dtype(np.float32))
            array[:] = 3
            tensor = torch.from_numpy(array)[2:]
            del array
            given.put(tensor)
            found = back.get(timeout=120)
            others = [blocks.array((20, 40_000), np.dtype(np.float32)) for _ in range(4)]
            for other in others:
                other[:] = 9
            assert found == (3.0, 3.0), found
            assert bool((tensor == 3).all())
            given.put(None)
            child.join(60)
            at_exit = tensor  # alive when the interpreter ends
            print("well")
    """)
    script = Path(tempfile.mkdtemp()) / "child.py"
    script.write_text(code)
    run = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=180, check=False
    )
    script.unlink()
    script.parent.rmdir()
    assert (run.returncode, run.stdout.strip()) == (0, "well"), run.stderr
    assert not run.stderr
