"""The verdict names what was planted."""

from __future__ import annotations

import pytest

from pipeline.statistics import Meter


def meter(*, step_s: float, read_s: float, decode_s: float, remote: int = 0) -> Meter:
    planted = Meter(decode_threads=2, device="cpu", bytes_remote=remote)
    for _ in range(10):
        planted.delivered(8, wait_s=read_s + decode_s, read_s=read_s, decode_s=decode_s)
        planted.step_s += step_s
    return planted


@pytest.mark.parametrize(
    ("planted", "limit"),
    [
        (meter(step_s=1.0, read_s=0.0, decode_s=0.001), "model"),
        (meter(step_s=0.01, read_s=0.001, decode_s=0.1), "decode"),
        (meter(step_s=0.01, read_s=0.1, decode_s=0.01), "disk"),
        (meter(step_s=0.01, read_s=0.1, decode_s=0.01, remote=10**9), "remote"),
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
        planted.delivered(1, wait_s=0.1, read_s=0.0, decode_s=0.1)
    assert len(planted.waits) == 4096
