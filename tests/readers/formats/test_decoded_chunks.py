"""Test decoded chunks: one thread decodes each for all, and memory is bounded and reused."""

from __future__ import annotations

import gc
import itertools
import logging
import os
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.cache import StalledError, Workers
from penstock.cache.disk import DiskCache
from penstock.readers.formats import (
    FREE_BYTES,
    LEAST_LENT_BYTES,
    ChunkFiles,
    ChunkMemory,
    DecodedChunks,
    KeptChunk,
    KeptChunks,
    chunk_cache,
)
from tests.properties import examples
from tests.watchdog import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


ROWS = 4


def chunk(number: int, size: int = 8) -> Any:
    return np.full(size, number % 256, np.uint8)


class Decoder:
    """Counts decodings by chunk."""

    def __init__(self, size: int = 8) -> None:
        self.counts: dict[int, int] = {}
        self._size, self._lock = size, threading.Lock()

    def __call__(self, number: int) -> Callable[[], Any]:
        def decode() -> Any:
            with self._lock:
                self.counts[number] = self.counts.get(number, 0) + 1
            return chunk(number, self._size)

        return decode


def take(
    store: DecodedChunks,
    key: tuple[int, int],
    decode: Callable[[], Any],
    *,
    uses: int,
    taken: int,
    size_bytes: int = 0,
    is_view: bool = False,
) -> Any:
    """Take one chunk."""
    ((number, value),) = store.take(
        key[0],
        [key[1]],
        lambda _: [decode()],
        uses=[uses],
        taken=[taken],
        size_bytes=size_bytes,
        is_view=lambda _: is_view,
    )
    assert number == key[1]
    return value


def take_all(store: DecodedChunks, order: list[int], decoder: Decoder, *, uses: int = ROWS) -> None:
    """Take one row of a chunk after another."""
    for number in order:
        found = take(store, (0, number), decoder(number), uses=uses, taken=1)
        assert (found == number % 256).all()


def window(chunks: int, *, seed: int = 0, first: int = 0) -> list[int]:
    """Return the chunks of the rows of a window, in random order."""
    order = np.repeat(np.arange(first, first + chunks), ROWS)
    return [*map(int, np.random.default_rng(seed).permutation(order))]


# -- eviction


@examples(60)
@given(
    steps=st.lists(
        st.tuples(st.integers(0, 6), st.integers(1, 5), st.integers(0, 40)), max_size=60
    ),
    has_files=st.booleans(),
)
def test_memory_stays_within_its_limit_and_kept_chunks_are_unchanged(
    steps: list[tuple[int, int, int]], has_files: bool
) -> None:
    class File:
        size_bytes = 8

        def remove(self) -> None: ...

    kept, most_bytes = KeptChunks(), 0
    for number, taken, most in steps:
        key = (0, number)
        found = kept.find(key)
        if found is None:
            has_room = kept.make_room(8, most_bytes=most)
            assert not has_room or kept.memory_bytes + 8 <= most
            most_bytes = max(most_bytes, most)
            file: Any = None if has_room or not has_files else File()
            value = chunk(number, 8) if has_room or has_files else None
            found = KeptChunk(
                value=value, size_bytes=8, memory_bytes=8 * has_room, uses=10, left=10, file=file
            )
            kept.add(key, found)
        assert found.value is None or (found.value == number).all()
        kept.count_use(key, found, taken)
        kept.expire()
        del found
        assert kept.memory_bytes <= most_bytes
        chunks = [*kept._memory.values(), *kept._rest.values()]
        assert kept._left == sum(each.left for each in chunks)
        assert kept.disk_bytes + kept.memory_bytes == 8 * len(kept)
    kept.forget()
    assert (len(kept), kept.memory_bytes, kept.disk_bytes) == (0, 0, 0)


@given(chunks=st.integers(1, 12), windows=st.integers(1, 5), seed=st.integers(0, 99))
def test_each_chunk_of_a_window_is_decoded_once_and_evicted(
    chunks: int, windows: int, seed: int
) -> None:
    store, decoder = DecodedChunks(max_bytes=8 * chunks + 8 * 2), Decoder()
    for number in range(windows):
        take_all(store, window(chunks, seed=seed, first=number * chunks), decoder)
    assert set(decoder.counts.values()) == {1}
    counts = store.counts()
    assert counts.chunks == chunks * windows
    assert counts.again == 0
    assert counts.decoded_bytes == counts.delivered_bytes == 8 * chunks * windows
    assert counts.memory_bytes <= 8 * (1 + chunks // 16 + 1)  # except briefly
    assert counts.most_memory_bytes <= 8 * chunks + 8 * 3


@pytest.mark.parametrize("chunks", [6, 40])
def test_chunks_of_epochs_that_end_early_neither_accumulate_nor_are_decoded_twice(
    chunks: int,
) -> None:
    store, decoder = DecodedChunks(max_bytes=8 * chunks * 3), Decoder()
    for epoch in range(20):
        take_all(store, window(chunks, seed=epoch)[: -ROWS * chunks // 8], decoder)
    assert store.counts().memory_bytes <= 8 * chunks
    assert store.counts().ratio < 1.3


def test_partly_used_chunks_are_evicted_even_if_there_is_room() -> None:
    store, decoder = DecodedChunks(max_bytes=2**30), Decoder()
    store.expect(10)
    for number in range(100):
        take_all(store, [number] * (ROWS - 1), decoder)
    assert store.counts().memory_bytes <= 8 * 20


# -- threads


def test_one_thread_decodes_and_the_others_wait() -> None:
    store, decodings = DecodedChunks(max_bytes=2**20), list[int]()
    begun, go = threading.Event(), threading.Event()

    def decode() -> Any:
        decodings.append(1)
        begun.set()
        assert go.wait(PATIENCE_S)
        return chunk(7)

    pool = Workers(4, name="test")
    outcomes = [
        pool.submit(lambda _: take(store, (0, 0), decode, uses=8, taken=1), n) for n in range(4)
    ]
    assert begun.wait(PATIENCE_S)
    assert take(store, (0, 1), lambda: chunk(8), uses=1, taken=1)[0] == 8  # other chunks don't wait
    assert [*store.shards_in_order([0, 5, 0, 4])][2:] in ([0, 2], [2, 0])
    go.set()
    assert all((outcome.result(PATIENCE_S) == 7).all() for outcome in outcomes)
    assert decodings == [1]
    assert store.counts().delivered_bytes == 8 * 4 // 8 + 8
    pool.close()


def test_several_small_chunks_are_decoded_at_a_time_and_a_damaged_one_fails_alone() -> None:
    store, groups = DecodedChunks(max_bytes=2**24), list[list[int]]()

    def decode(numbers: list[int]) -> list[Any]:
        groups.append(numbers)
        return [ValueError("damaged") if number == 3 else chunk(number) for number in numbers]

    size_bytes = chunk_cache.GROUP_BYTES // 4
    for _ in range(2):
        found = dict(
            store.take(0, range(9), decode, uses=[4] * 9, taken=[2] * 9, size_bytes=size_bytes)
        )
        assert sorted(found) == [*range(9)]
        assert str(found.pop(3)) == "damaged"
        assert all(value[0] == number for number, value in found.items())
    assert sorted(map(len, groups)) == [1, 1, 4, 4]  # the damaged one is decoded again
    assert sorted(itertools.chain(*groups)) == sorted([*range(9), 3])
    assert store.counts().decoded_bytes == store.counts().delivered_bytes == 8 * 8


def test_threads_that_need_the_same_groups_decode_each_chunk_once() -> None:
    store, decoded, lock = DecodedChunks(max_bytes=2**24), list[int](), threading.Lock()

    def decode(numbers: list[int]) -> list[Any]:
        with lock:
            decoded.extend(numbers)
        return [chunk(number) for number in numbers]

    def take_some(_: int) -> None:
        size_bytes = chunk_cache.GROUP_BYTES // 4
        found = store.take(
            0, range(40), decode, uses=[8] * 40, taken=[1] * 40, size_bytes=size_bytes
        )
        assert {number: int(value[0]) for number, value in found} == {n: n for n in range(40)}

    pool = Workers(8, name="test")
    for outcome in [pool.submit(take_some, n) for n in range(8)]:
        outcome.result(PATIENCE_S)
    assert sorted(decoded) == [*range(40)]
    assert store.counts().decoded_bytes == store.counts().delivered_bytes == 8 * 40
    pool.close()


def test_an_error_reaches_all_that_wait_and_is_not_kept() -> None:
    store, tries = DecodedChunks(max_bytes=2**20), list[int]()
    begun, go = threading.Event(), threading.Event()

    def decode() -> Any:
        tries.append(1)
        begun.set()
        assert go.wait(PATIENCE_S)
        raise ValueError("damaged")

    pool = Workers(3, name="test")
    outcomes = [
        pool.submit(lambda _: take(store, (0, 0), decode, uses=8, taken=1), n) for n in range(3)
    ]
    assert begun.wait(PATIENCE_S)
    go.set()
    for outcome in outcomes:
        with pytest.raises(ValueError, match="damaged"):
            outcome.result(PATIENCE_S)
    assert 1 <= len(tries) <= 3
    assert take(store, (0, 0), lambda: chunk(1), uses=1, taken=1)[0] == 1
    pool.close()


def test_an_interrupted_thread_leaves_no_other_waiting() -> None:
    store = DecodedChunks(max_bytes=2**20)
    begun, go = threading.Event(), threading.Event()

    def interrupted() -> Any:
        begun.set()
        assert go.wait(PATIENCE_S)
        raise KeyboardInterrupt

    pool = Workers(2, name="test")
    first = pool.submit(lambda _: take(store, (0, 0), interrupted, uses=8, taken=1), 0)
    assert begun.wait(PATIENCE_S)
    second = pool.submit(lambda _: take(store, (0, 0), lambda: chunk(3), uses=8, taken=1), 0)
    go.set()
    with pytest.raises(KeyboardInterrupt):
        first.result(PATIENCE_S)
    assert second.result(PATIENCE_S)[0] == 3
    pool.close()


def test_the_error_of_a_long_wait_names_the_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunk_cache, "STALL_TIMEOUT_S", 0.01)
    store, go, begun = DecodedChunks(max_bytes=2**20, url="a/set"), threading.Event(), list[int]()

    def decode() -> Any:
        with pytest.raises(StalledError, match=r"a/set: another thread .* chunk 5 of shard 2"):
            pool.submit(lambda _: take(store, (2, 5), lambda: chunk(0), uses=1, taken=1), 0).result(
                PATIENCE_S
            )
        begun.append(1)
        return chunk(0)

    pool = Workers(1, name="test")
    take(store, (2, 5), decode, uses=1, taken=1)
    assert begun
    assert not go.is_set()
    pool.close()


def test_the_number_of_decoding_threads_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunk_cache, "usable_cores", lambda: 1)
    store, at_work, most = DecodedChunks(max_bytes=2**20), list[int](), list[int]()
    full, lock = threading.Event(), threading.Lock()

    def decode() -> Any:
        with lock:
            at_work.append(1)
            most.append(len(at_work))
            if len(at_work) == chunk_cache.LEAST_DECODERS:
                full.set()
        assert full.wait(PATIENCE_S)
        with lock:
            at_work.pop()
        return chunk(1)

    pool = Workers(9, name="test")
    outcomes = [
        pool.submit(lambda n: take(store, (0, n), decode, uses=1, taken=1), n) for n in range(18)
    ]
    assert all(outcome.result(PATIENCE_S)[0] == 1 for outcome in outcomes)
    assert max(most) == chunk_cache.LEAST_DECODERS
    pool.close()


def test_many_threads_decode_each_chunk_once_within_the_bound() -> None:
    chunks, size = 24, 4096
    store, decoder = DecodedChunks(max_bytes=size * chunks), Decoder(size)
    pool = Workers(8, name="test")
    orders = np.array_split(np.array(window(chunks, seed=5)), 8)
    outcomes = [
        pool.submit(lambda order: take_all(store, order.tolist(), decoder), order)
        for order in orders
    ]
    for outcome in outcomes:
        outcome.result(PATIENCE_S)
    assert set(decoder.counts.values()) == {1}
    counts = store.counts()
    assert counts.decoded_bytes == counts.delivered_bytes == size * chunks
    assert counts.most_memory_bytes <= size * chunks
    pool.close()


# -- little room


def test_without_room_chunks_are_decoded_again_with_one_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    store, decoder = DecodedChunks(max_bytes=8 * 4, url="a/set"), Decoder()
    with caplog.at_level(logging.WARNING, "penstock"):
        take_all(store, window(16), decoder)
    counts = store.counts()
    assert counts.again > 8
    assert counts.chunks == sum(decoder.counts.values())
    assert counts.most_memory_bytes <= 8 * 5
    assert counts.ratio == pytest.approx(counts.chunks / 16)
    (message,) = [record.getMessage() for record in caplog.records]
    assert "a/set: the decoded chunks of a window take more than the 32 B" in message
    assert "there is no cache=" in message


def test_a_chunk_that_is_needed_is_not_evicted_for_another() -> None:
    store, decoder = DecodedChunks(max_bytes=8), Decoder()
    for number in (0, 1, 0, 2, 0):
        take_all(store, [number], decoder)
    assert decoder.counts == {0: 1, 1: 1, 2: 1}
    assert store.counts().memory_bytes == store.counts().most_memory_bytes == 8
    take_all(store, [0, 1, 1, 1], decoder)  # the first is over, and the second takes its place
    assert decoder.counts == {0: 1, 1: 2, 2: 1}
    assert store.counts().again == 1


def test_a_remainder_makes_room() -> None:
    store, decoder = DecodedChunks(max_bytes=8), Decoder()
    store.expect(8)
    take_all(store, [0], decoder)
    for number in range(1, 5):
        take_all(store, [number] * ROWS, decoder)
    assert decoder.counts == {0: 1, 1: 4, 2: 4, 3: 2, 4: 1}


def test_room_is_made_in_advance_if_the_size_is_known() -> None:
    store = DecodedChunks(max_bytes=100)
    store.expect(ROWS * 100)
    seen = []

    def decode(number: int) -> Callable[[], Any]:
        def decoded() -> Any:
            seen.append(store.counts().memory_bytes)
            return chunk(number, 60)

        return decoded

    for number in range(3):
        take(store, (0, number), decode(number), uses=ROWS, taken=ROWS, size_bytes=60)
    assert seen == [0, 0, 0]
    assert store.counts().most_memory_bytes == 60


def test_views_of_a_map_take_no_memory() -> None:
    store = DecodedChunks(max_bytes=100)
    for number in range(5):
        for _ in range(2):
            take(store, (0, number), lambda: chunk(1, 60), uses=4, taken=1, is_view=True)
        take(store, (1, number), lambda: chunk(1, 60), uses=4, taken=1)
    counts = store.counts()
    assert (counts.chunks, counts.decoded_bytes) == (5, 300)
    assert counts.memory_bytes == 60
    assert counts.disk_bytes == 0
    for number in range(5):
        take(store, (0, number), lambda: chunk(2, 60), uses=4, taken=2, is_view=True)
    assert len(store._kept) <= 1 + 1
    store.close()
    assert len(store._kept) == 0


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[DiskCache]:
    found = DiskCache(tmp_path / "cache", max_bytes="64MiB")
    yield found
    found.close()


def used_bytes(cache: DiskCache) -> int:
    return int(cache.use(lambda folder: folder.catalogue.used_bytes))


def test_chunks_that_exceed_memory_are_moved_to_files_of_the_cache(cache: DiskCache) -> None:
    size = 2**16
    files = ChunkFiles(lambda: cache, uri="a/set", least_bytes=1)
    store, decoder = DecodedChunks(max_bytes=size * 4, files=files), Decoder(size)
    order = window(16, seed=2)
    take_all(store, order[:40], decoder)
    counts = store.counts()
    assert counts.disk_bytes > 0
    assert counts.most_memory_bytes <= size * 5
    parts = [path for path in os.scandir(os.path.join(cache.path, "fills"))]
    assert {path.stat().st_mode & 0o777 for path in parts} == {0o600}
    assert used_bytes(cache) >= counts.disk_bytes
    take_all(store, order[40:], decoder)
    assert set(decoder.counts.values()) == {1}
    assert store.counts().again == 0
    store.close()
    assert os.listdir(os.path.join(cache.path, "fills")) == []
    assert used_bytes(cache) == 0


def test_files_of_a_dead_process_are_removed(cache: DiskCache) -> None:
    size = 2**16
    lost = ChunkFiles(lambda: cache, uri="a/set", least_bytes=1)
    kept = lost.write(chunk(1, size))
    assert kept is not None
    kept.value = None  # unmapped, as the kernel does for a killed process
    assert used_bytes(cache) > size
    files = ChunkFiles(lambda: cache, uri="a/set", least_bytes=1)
    again = files.write(chunk(2, size))
    assert again is not None
    assert len(os.listdir(os.path.join(cache.path, "fills"))) == 2  # the new one and its map
    again.remove()
    assert used_bytes(cache) == 0


def test_files_stay_within_their_share_of_the_limit(
    cache: DiskCache, caplog: pytest.LogCaptureFixture
) -> None:
    size = 4 * 2**20
    files = ChunkFiles(lambda: cache, uri="a/set")
    store, decoder = DecodedChunks(max_bytes=size, files=files), Decoder(size)
    with caplog.at_level(logging.WARNING, "penstock"):
        take_all(store, window(16, seed=3), decoder)
    counts = store.counts()
    assert 20 * 2**20 < counts.most_disk_bytes <= 32 * 2**20
    assert counts.again > 0
    assert len(caplog.records) == 1
    assert "no room for the rest" in caplog.records[0].getMessage()
    store.close()
    assert used_bytes(cache) == 0


def test_small_chunks_are_not_worth_a_file(cache: DiskCache) -> None:
    files = ChunkFiles(lambda: cache, uri="a/set")
    assert files.write(chunk(1)) is None
    assert files.write(chunk(1, 0)) is None


def test_a_full_disk_costs_files_but_not_the_job(
    cache: DiskCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = 2**16
    files = ChunkFiles(lambda: cache, uri="a/set", least_bytes=1)
    store, decoder = DecodedChunks(max_bytes=size * 2, files=files), Decoder(size)

    pwrite = os.pwrite

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    def full_of_data(fd: int, data: bytes, at: int) -> int:
        if len(data) > 1:
            full()
        return pwrite(fd, data, at)  # the fill's map, whose space is allocated in advance

    monkeypatch.setattr(os, "pwrite", full_of_data)
    take_all(store, window(8), decoder)
    assert store.counts().disk_bytes == 0
    monkeypatch.undo()
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.warns(match="No space left"):
        take_all(store, window(8, first=8), decoder)
    assert sum(decoder.counts.values()) > 16
    store.close()


VALUES = {
    "C": np.arange(24, dtype=np.float32).reshape(2, 3, 4),
    "F": np.asfortranarray(np.arange(24, dtype=np.int16).reshape(4, 6)),
    "strided": np.arange(48, dtype=np.int64).reshape(4, 12)[:, ::2],
    "bool": np.array([True, False, True]),
    "table": pa.table({"a": [1, 2, None], "b": ["x", "yy", ""], "c": [[1.5], [], [2.0, 3.0]]}),
    "chunked table": pa.concat_tables([pa.table({"a": [1]}), pa.table({"a": [2, 3]})]),
    "dictionary": pa.table({"a": pa.array(["a", "b", "a"]).dictionary_encode()}),
}


@pytest.mark.parametrize("kind", VALUES)
def test_a_file_returns_the_value_that_was_written(kind: str, cache: DiskCache) -> None:
    value = VALUES[kind]
    files = ChunkFiles(lambda: cache, uri="a/set", least_bytes=1)
    file = files.write(value)
    assert file is not None
    if isinstance(value, np.ndarray):
        assert file.value.dtype == value.dtype
        np.testing.assert_array_equal(file.value, value)
        assert not file.value.flags.writeable
    else:
        assert type(file.value) is type(value)
        assert file.value.equals(value)
    file.remove()
    assert used_bytes(cache) == 0


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
        take(store, (0, chunk), decode, uses=2, taken=1, size_bytes=LEAST_LENT_BYTES)
        assert store.counts().memory_bytes + store.memory.free_bytes <= 4 * LEAST_LENT_BYTES
    store.close()
    gc.collect()
    assert store.memory.free_bytes == 0


class Holder:
    """The holder of fetched bytes."""


def test_one_batch_claims_and_others_wait_until_it_settles() -> None:
    store = DecodedChunks(max_bytes=0)
    mine, others = store.claim(0, [1, 2])
    assert not others
    again, waiting = store.claim(0, [2, 3])
    assert list(waiting) == [2]
    assert not store.claim(1, [2])[1]
    holder: Any = Holder()
    found = list[Any]()
    thread = threading.Thread(target=lambda: found.append(waiting[2].wait(30)))
    thread.start()
    mine.settle(holder)
    mine.settle(None)  # too late
    again.settle(None)
    thread.join(30)
    assert found == [holder]
    # If the fetch failed or the holder is gone, the next batch that needs the extent fetches it.
    assert list(store.claim(0, [1, 2, 3])[1]) == [1, 2]
    del holder
    found.clear()
    gc.collect()
    assert waiting[2].wait(30) is None
    assert not store.claim(0, [2])[1]


def test_a_wait_ends_at_its_timeout() -> None:
    store = DecodedChunks(max_bytes=0)
    store.claim(0, [1])
    assert store.claim(0, [1])[1][1].wait(0) is None
