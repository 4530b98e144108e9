"""Test how jobs share the room of a cache. Pure."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.cache.disk import ALL_KEYS, BlobRow, JobRow, ReadSet, disk_bytes, guess_threshold

BLOB = BlobRow(
    key="0",
    group="g",
    uri="mem://0",
    size_bytes=4096,
    disk_bytes=4096,
    state="ready",
    kept=False,
    used_s=0.0,
    crcs=None,
    pinned=False,
)
JOB = JobRow(id=1, group="g", reads="r", wanted_bytes=1000, share_bytes=1000, below=ALL_KEYS, pid=1)

blobs = st.dictionaries(
    st.text("0123456789abcdef", min_size=3, max_size=3), st.integers(0, 20_000), max_size=12
)


@given(blobs=blobs, share=st.integers(0, 300_000))
def test_what_is_pinned_are_the_lowest_keys_that_fit(blobs: dict[str, int], share: int) -> None:
    read_set = ReadSet("g", list(blobs), blobs.values())
    threshold = read_set.threshold(share)
    below = sorted(key for key in blobs if key < threshold)
    taken = sum(disk_bytes(blobs[key]) for key in below)
    assert read_set.bytes_below(threshold) == taken
    assert taken <= share or not taken
    assert below == sorted(blobs)[: len(below)]
    if len(below) < len(blobs):
        following = blobs[sorted(blobs)[len(below)]]
        assert taken + disk_bytes(following) > share
    else:
        assert threshold == ALL_KEYS


@given(blobs=blobs, key=st.text("0123456789abcdef", min_size=3, max_size=3))
def test_a_set_knows_its_keys_in_any_order(blobs: dict[str, int], key: str) -> None:
    read_set = ReadSet("g", list(blobs), blobs.values())
    assert read_set.has(key) == (key in blobs)
    again = ReadSet("g", list(reversed(blobs)), reversed(blobs.values()))
    assert again.reads == read_set.reads
    assert ReadSet("h", list(blobs), blobs.values()).reads != read_set.reads
    assert read_set.disk_bytes == sum(map(disk_bytes, blobs.values()))


@pytest.mark.parametrize(("share", "below"), [(1000, ALL_KEYS), (2000, ALL_KEYS), (0, "00000000")])
def test_a_threshold_is_guessed_from_the_share(share: int, below: str) -> None:
    assert guess_threshold(JOB, share) == below


@given(share=st.integers(0, 1000), below=st.sampled_from(["", "40000000", ALL_KEYS]))
def test_a_guess_never_pins_more_than_before(share: int, below: str) -> None:
    assert guess_threshold(replace(JOB, below=below), share) <= below
