"""Statistics count batches and tiers, and their verdict names the planted limit."""

from __future__ import annotations

import pytest

from penstock.cache.base import Traffic, parse_size
from penstock.pipeline.report import Meter, TierFacts


def tiers(
    *,
    wait_s: float = 0.0,
    filled: int = 10**9,
    passed: int = 0,
    kept: int = 10**9,
    max_bytes: int = 2 * 10**9,
    throttled: int = 0,
) -> TierFacts:
    traffic = Traffic(
        bytes_remote=filled + passed,
        bytes_filled=filled,
        bytes_passed=passed,
        hits=30,
        misses=10,
        requests=100,
        throttled=throttled,
        remote_wait_s=wait_s,
    )
    return TierFacts(
        traffic=traffic,
        connections=64,
        request_p99_s=0.8,
        wanted_bytes=10**9,
        kept_bytes=kept,
        max_bytes=max_bytes,
    )


def meter(
    *, step_s: float, read_s: float, decode_s: float, remote: TierFacts | None = None
) -> Meter:
    planted = Meter(decode_threads=2, device="cpu", load_s=10 * read_s)
    if remote is not None:
        planted.remote = lambda: remote
    for _ in range(10):
        planted.count_batch(8, wait_s=read_s + decode_s, read_s=read_s, decode_s=decode_s)
        planted.step_s += step_s
    return planted


def waiting(remote: TierFacts) -> Meter:
    return meter(step_s=0.01, read_s=0.1, decode_s=0.01, remote=remote)


@pytest.mark.parametrize(
    ("planted", "limit"),
    [
        (meter(step_s=1.0, read_s=0.0, decode_s=0.001), "model"),
        (meter(step_s=0.01, read_s=0.001, decode_s=0.1), "decode"),
        (meter(step_s=0.01, read_s=0.1, decode_s=0.01), "disk"),
        (waiting(tiers(wait_s=0.9)), "remote"),
        (waiting(tiers(wait_s=0.1)), "disk"),
        (waiting(tiers(wait_s=0.9, passed=2 * 10**9, kept=4 * 10**8)), "cache"),
        (waiting(tiers(wait_s=0.9, passed=10**8, kept=4 * 10**8)), "cache"),
        (waiting(tiers(wait_s=0.9, passed=10**8, kept=6 * 10**8)), "remote"),
        (waiting(tiers(wait_s=0.9, passed=2 * 10**9, kept=0, max_bytes=0)), "remote"),
        (Meter(decode_threads=1, device="cpu"), "nothing yet"),
    ],
)
def test_the_verdict_names_the_planted_limit(planted: Meter, limit: str) -> None:
    found = planted.snapshot()
    assert found.limit == limit
    assert found.verdict in str(found)


def test_the_first_batch_counts_apart() -> None:
    found = meter(step_s=0.0, read_s=0.0, decode_s=0.5).snapshot()
    assert found.first_batch_s == 0.5
    assert found.samples == 80
    assert found.wait_s == pytest.approx(4.5)
    assert found.samples_per_s == pytest.approx(72 / 4.5)


def test_a_long_job_keeps_a_bounded_record() -> None:
    planted = Meter(decode_threads=1, device="cpu")
    for _ in range(10_000):
        planted.count_batch(1, wait_s=0.1, read_s=0.0, decode_s=0.1)
    assert len(planted.waits) == 4096


@pytest.mark.parametrize(
    ("remote", "told"),
    [
        (tiers(wait_s=0.9), ("penstock warm", "64 connections", "within 0.8 s")),
        (tiers(wait_s=0.9, throttled=40), ("throttled 40 of 100", "higher limit")),
        (tiers(wait_s=0.9, max_bytes=0, kept=0), ("cache=DiskCache",)),
        (tiers(wait_s=0.9, filled=0, passed=10**9, kept=480 * 10**6), ("keeps 48%", "max_bytes=")),
    ],
)
def test_the_verdict_names_the_one_change_that_would_move_it(
    remote: TierFacts, told: tuple[str, ...]
) -> None:
    verdict = waiting(remote).snapshot().verdict
    assert [text for text in told if text not in verdict] == []


def test_a_cache_of_the_size_that_the_verdict_names_holds_what_the_node_reads() -> None:
    small = tiers(wait_s=0.9, filled=0, passed=10**9, kept=480 * 10**6, max_bytes=500 * 10**6)
    verdict = waiting(small).snapshot().verdict
    named = parse_size(verdict.split('max_bytes="')[1].split('"')[0])
    assert 500 * 10**6 + 520 * 10**6 <= named <= 1.05 * (500 * 10**6 + 520 * 10**6)


def test_the_tiers_are_told() -> None:
    found = waiting(tiers(wait_s=0.9, passed=10**9)).snapshot()
    assert found.hit_ratio == 0.75
    assert found.bytes_remote == found.bytes_filled + found.bytes_passed
    assert "Hits: 75.0% of the samples" in str(found)
    assert "100 requests" in str(found)


def test_a_local_dataset_tells_of_no_tiers() -> None:
    planted = meter(step_s=0.01, read_s=0.1, decode_s=0.01)
    planted.bytes_disk = 77
    found = planted.snapshot()
    assert (found.bytes_disk, found.bytes_remote, found.requests) == (77, 0, 0)
    assert "Remote" not in str(found)
