"""Pages are advised while batches wait for the disk, and for some batches after."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING

from penstock.readers.files import ADVISED_BATCHES, PageAdvice, disk_reads

if TYPE_CHECKING:
    from pathlib import Path


def warm(advice: PageAdvice) -> None:
    advice.note(samples=256, size_bytes=256 * 100_000, seconds=0.004)


def slow(advice: PageAdvice) -> None:
    advice.note(samples=256, size_bytes=256 * 100_000, seconds=0.4)


def test_the_first_batches_are_read_ahead() -> None:
    advice = PageAdvice()
    for _ in range(ADVISED_BATCHES):
        assert advice.is_on
        warm(advice)
    assert not advice.is_on


def test_a_cold_batch_switches_it_on_for_some() -> None:
    reads = [0]
    advice = PageAdvice(reads=lambda: reads[0])
    for _ in range(2 * ADVISED_BATCHES):
        warm(advice)
    reads[0] += 3
    slow(advice)
    for _ in range(ADVISED_BATCHES):
        assert advice.is_on
        warm(advice)
    assert not advice.is_on


def test_a_batch_that_waits_for_a_core_isnt_cold() -> None:
    """On a loaded machine, batches are slow without reading from a disk."""
    advice = PageAdvice(reads=lambda: 7)
    slow(advice)  # the thread's earlier reads aren't known
    for _ in range(ADVISED_BATCHES):
        assert advice.is_on
        slow(advice)
    assert not advice.is_on


def test_each_thread_counts_its_own_reads() -> None:
    counts = {threading.get_ident(): 5}
    advice = PageAdvice(reads=lambda: counts.get(threading.get_ident(), 0))
    slow(advice)
    for _ in range(ADVISED_BATCHES):
        warm(advice)
    other = threading.Thread(target=slow, args=(advice,))
    other.start()
    other.join()
    assert not advice.is_on


def test_warm_batches_make_no_system_call() -> None:
    def never() -> int:
        raise AssertionError("asked")

    warm(PageAdvice(reads=never))


def test_pages_that_were_dropped_count_as_read(tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.write_bytes(bytes(2**20))
    before = disk_reads()
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        file.read()
    assert disk_reads() >= before  # greater if tmp_path is on a disk


def test_small_samples_may_take_a_fixed_time_each() -> None:
    """A batch of tiny samples isn't cold because each costs some microseconds."""
    advice = PageAdvice()
    for _ in range(ADVISED_BATCHES):
        advice.note(samples=1000, size_bytes=1000, seconds=0.005)
    assert not advice.is_on
