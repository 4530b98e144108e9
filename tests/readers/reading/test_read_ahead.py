"""Read-ahead: on while batches wait for the disk, off some batches after they don't."""

from __future__ import annotations

from penstock.readers.reading.read_ahead import ADVISED_BATCHES, ReadAhead


def warm(ahead: ReadAhead) -> None:
    ahead.note(samples=256, size_bytes=256 * 100_000, seconds=0.004)


def test_the_first_batches_are_read_ahead() -> None:
    ahead = ReadAhead()
    for _ in range(ADVISED_BATCHES):
        assert ahead.is_on
        warm(ahead)
    assert not ahead.is_on


def test_a_cold_batch_switches_it_on_for_some() -> None:
    ahead = ReadAhead()
    for _ in range(2 * ADVISED_BATCHES):
        warm(ahead)
    ahead.note(samples=256, size_bytes=256 * 100_000, seconds=0.4)
    for _ in range(ADVISED_BATCHES):
        assert ahead.is_on
        warm(ahead)
    assert not ahead.is_on


def test_small_samples_may_take_their_time_each() -> None:
    """A batch of tiny samples isn't cold because each costs some microseconds."""
    ahead = ReadAhead()
    for _ in range(ADVISED_BATCHES):
        ahead.note(samples=1000, size_bytes=1000, seconds=0.005)
    assert not ahead.is_on
