"""Warnings of what a job's settings can't reach: with figures where it is sure, else silence."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.pipeline.plan import default_lanes
from penstock.pipeline.plan.sizing import few_shards_warning, small_cache_warning

GIB = 2**30


def few(samples: int, shards: int, total_bytes: int, *, nodes: int, batch: int) -> str | None:
    return few_shards_warning(
        samples=samples,
        shards=shards,
        total_bytes=total_bytes,
        lanes=default_lanes(batch, shards),
        global_batch=batch,
        nodes=nodes,
    )


def test_few_large_shards_on_many_nodes_are_told_with_the_remedy() -> None:
    words = few(1_281_167, 140, 147 * 10**9, nodes=64, batch=16_384)
    assert words is not None
    assert "140 shards give 32 lanes" in words
    assert "by 2.9 nodes" in words
    assert "penstock pack --for-nodes 64 --for-batch 16384" in words


def test_enough_shards_one_node_and_a_batch_without_divisors_are_silent() -> None:
    assert few(1_281_167, 2_191, 147 * 10**9, nodes=64, batch=16_384) is None
    assert few(1_281_167, 10, 147 * 10**9, nodes=1, batch=256) is None
    # Smaller shards would bring no more lanes: that is the batch's to mend, and told elsewhere.
    assert few(1_281_167, 2_191, 147 * 10**9, nodes=64, batch=64 * 509) is None


@given(
    samples=st.integers(1, 100_000),
    shards=st.integers(1, 50),
    nodes=st.integers(1, 64),
    ranks=st.integers(1, 64),
)
def test_small_sets_are_silent(samples: int, shards: int, nodes: int, ranks: int) -> None:
    """A demo, a test: whatever is fetched twice there is nothing."""
    total = min(samples * 1000, GIB // 64)
    assert few(samples, shards, total, nodes=nodes, batch=nodes * ranks) is None
    assert small_cache_warning(total // 3, total) is None


def test_a_cache_that_keeps_little_is_told_with_the_figures() -> None:
    words = small_cache_warning(10 * GIB, 100 * GIB)
    assert words is not None
    assert "keeps 10% of the 100.0 GiB" in words
    assert "90.0 GiB come from the remote in each epoch" in words
    assert small_cache_warning(95 * GIB, 100 * GIB) is None
    assert small_cache_warning(GIB, int(1.5 * GIB)) is None
    assert small_cache_warning(200 * GIB, 100 * GIB) is None
