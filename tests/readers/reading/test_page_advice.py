"""Advice to the kernel: given while batches wait for the disk, and some batches longer."""

from __future__ import annotations

from penstock.readers.reading.page_advice import ADVISED_BATCHES, PageAdvice


def warm(advice: PageAdvice) -> None:
    advice.note(samples=256, size_bytes=256 * 100_000, seconds=0.004)


def test_the_first_batches_are_read_ahead() -> None:
    advice = PageAdvice()
    for _ in range(ADVISED_BATCHES):
        assert advice.is_on
        warm(advice)
    assert not advice.is_on


def test_a_cold_batch_switches_it_on_for_some() -> None:
    advice = PageAdvice()
    for _ in range(2 * ADVISED_BATCHES):
        warm(advice)
    advice.note(samples=256, size_bytes=256 * 100_000, seconds=0.4)
    for _ in range(ADVISED_BATCHES):
        assert advice.is_on
        warm(advice)
    assert not advice.is_on


def test_small_samples_may_take_their_time_each() -> None:
    """A batch of tiny samples isn't cold because each costs some microseconds."""
    advice = PageAdvice()
    for _ in range(ADVISED_BATCHES):
        advice.note(samples=1000, size_bytes=1000, seconds=0.005)
    assert not advice.is_on
