"""Ranks publish their waits as short texts, which are parsed strictly; the slowest is named."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.pipeline.report import MOST_TEXT, JobStatistics, RankWaits

ONE = RankWaits(
    rank=3,
    process=3,
    step=100,
    step_s=0.25,
    wait_share=0.4,
    wait_p50_s=0.08,
    wait_p99_s=0.5,
    bytes_disk=10**6,
    bytes_peers=0,
    bytes_remote=2 * 10**6,
    limit="remote",
    cause="slow store",
)


@given(
    rank=st.integers(0, 10**6),
    times=st.floats(0, 1e6),
    share=st.floats(0, 1),
    size=st.integers(0, 2**60),
    words=st.text(max_size=200),
)
def test_what_a_rank_tells_is_short_and_read_back(
    rank: int, times: float, share: float, size: int, words: str
) -> None:
    one = replace(
        ONE,
        rank=rank,
        process=rank,
        step_s=times,
        wait_share=share,
        bytes_remote=size,
        cause=words if words.isascii() and words.isprintable() else "cause",
    )
    text = one.text()
    assert len(text.encode()) <= MOST_TEXT
    read = RankWaits.parse(text)
    assert read is not None
    assert (read.rank, read.bytes_remote) == (rank, size)
    assert read.wait_share == pytest.approx(share, abs=1e-4)


@pytest.mark.parametrize(
    "text", ["", "{}", "[]", "null", "x" * 50, json.dumps([1] * 12), json.dumps([True] * 12)]
)
def test_what_no_rank_tells_is_left_out(text: str) -> None:
    assert RankWaits.parse(text) is None


def test_the_slowest_is_named_with_the_reason_and_how_old_that_is() -> None:
    others = [replace(ONE, rank=r, process=r, wait_share=0.01, limit="model") for r in range(3)]
    job = JobStatistics.of([*others, ONE], processes=8, step=140)
    assert job.slowest == ONE
    assert (job.heard, job.stale_steps, job.stale_s) == (4, 40, 10.0)
    text = str(job)
    for words in (
        "4 of 8",
        "rank 3",
        "40.0%",
        "remote",
        "slow store",
        "1.9 MiB",
        "40 steps",
        "10 s",
    ):
        assert words in text, text
    assert "\n" not in text
    assert "none waits more than 1.0%" in str(JobStatistics.of(others, processes=3, step=1))
    assert "0 of 2" in str(JobStatistics.of([], processes=2, step=1))
    assert "(process 9)" in str(JobStatistics.of([replace(ONE, process=9)], processes=16, step=100))
