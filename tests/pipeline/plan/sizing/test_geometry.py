"""Test the size of shards for a job, and warnings about what its settings can't reach."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.pipeline.plan import Plan, default_lanes, readers_of
from penstock.pipeline.plan.sizing import (
    LEAST_SHARD_BYTES,
    MOST_READERS,
    SHARD_BYTES,
    geometry_of,
    readers_warning,
    shard_bytes_for,
    small_cache_warning,
)
from tests.pipeline.plan.sizing.setups import setup
from tests.properties import examples

# The table of docs/explanation/order.md, walked: by shards, then by nodes of 8 GPUs with 32
# samples each.
WALKED = {
    2_000: {8: 1.01, 64: 1.06, 512: 2.5, 660: 2.9, 1024: 5.0, 4096: 20},
    10_000: {8: 1.00, 64: 1.01, 512: 1.10, 660: 1.38, 1024: 1.20, 4096: 2.8},
    100_000: {8: 1.00, 64: 1.00, 512: 1.01, 660: 1.01, 1024: 1.02, 4096: 1.08},
}


@pytest.mark.parametrize("shards", WALKED)
def test_readers_are_those_that_were_walked(shards: int) -> None:
    for nodes, readers in WALKED[shards].items():
        found = readers_of(shards, lanes=default_lanes(256 * nodes, shards), nodes=nodes)
        assert found == pytest.approx(readers, rel=0.02)


@examples(25)
@given(
    shards=st.integers(16, 400),
    nodes=st.sampled_from([1, 2, 4, 8]),
    ranks=st.sampled_from([1, 4]),
    seed=st.integers(0, 99),
)
def test_readers_and_open_shards_are_the_plans(
    shards: int, nodes: int, ranks: int, seed: int
) -> None:
    """Of uneven shards: of even ones a strand may end where a shard does."""
    batch = nodes * ranks * 32
    sizes = np.random.default_rng(seed).integers(301, 501, shards)
    data = {"samples": int(sizes.sum()), "sample_bytes": 1e5, "shards": shards}
    found = geometry_of(setup(**data, nodes=nodes, gpus=ranks, global_batch=batch))
    plan = Plan(sizes, seed=seed, lanes=found.lanes, window=found.window)
    assert found.open_shards == pytest.approx(plan.open_shards, rel=0.02)
    read = sum(
        len(plan.shards(batch, first=node, end=node + 1, world=nodes)) for node in range(nodes)
    )
    # One strand may end where a shard does.
    assert found.readers == pytest.approx(read / shards, rel=0.05, abs=5 / shards)


def test_shards_are_of_64_mib_where_nothing_asks_for_less() -> None:
    assert shard_bytes_for(1_281_167, 114_660, nodes=8, global_batch=32_768) == SHARD_BYTES


@pytest.mark.parametrize("nodes", [1, 8, 32, 128, 512])
def test_shards_leave_each_node_its_own(nodes: int) -> None:
    samples, size = 1_281_167, 114_660
    chosen = shard_bytes_for(samples, size, nodes=nodes, global_batch=256 * nodes)
    shards = -(-samples // (chosen // size))
    lanes = default_lanes(256 * nodes, shards)
    assert LEAST_SHARD_BYTES * 0.99 <= chosen <= SHARD_BYTES
    assert shards >= 4 * lanes
    assert lanes >= nodes
    assert readers_of(shards, lanes=lanes, nodes=nodes) <= MOST_READERS


def test_a_small_set_gets_the_shards_with_the_fewest_readers() -> None:
    """10 MB on 64 nodes: shards have at least 4 MiB, even if several nodes read each."""
    assert (
        shard_bytes_for(1000, 10_000, nodes=64, global_batch=64 * 256) >= LEAST_SHARD_BYTES * 0.99
    )


def test_a_sample_larger_than_a_shard_is_one() -> None:
    found = geometry_of(
        setup(samples=7200, sample_bytes=146_600_628, nodes=9, gpus=8, global_batch=504)
    )
    assert found.shards == 7200
    assert found.shard_bytes == pytest.approx(146_600_628)


def test_plans_of_huge_sets_stay_small() -> None:
    found = geometry_of(
        setup(samples=3_325_000, sample_bytes=146_600_628, nodes=660, global_batch=36_960)
    )
    assert found.shards < 1.5 * 2**20
    assert found.readers < 1.01


GIB = 2**30


def few(samples: int, shards: int, total_bytes: int, *, nodes: int, batch: int) -> str | None:
    return readers_warning(
        samples=samples,
        shards=shards,
        total_bytes=total_bytes,
        lanes=default_lanes(batch, shards),
        global_batch=batch,
        nodes=nodes,
        step=1,
    )


def test_few_large_shards_on_many_nodes_are_reported_with_the_remedy() -> None:
    words = few(1_281_167, 140, 147 * 10**9, nodes=64, batch=16_384)
    assert words is not None
    assert "Each of 140 shards" in words
    assert "by 2.91 of the 64 nodes" in words
    assert "penstock pack --for-nodes 64 --for-batch 16384" in words


def test_enough_shards_and_one_node_are_silent_and_a_batch_without_divisors_is_named() -> None:
    assert few(1_281_167, 2_191, 147 * 10**9, nodes=64, batch=16_384) is None
    assert few(1_281_167, 10, 147 * 10**9, nodes=1, batch=256) is None
    words = few(1_281_167, 2_191, 147 * 10**9, nodes=64, batch=64 * 509)
    assert words is not None
    assert "With order=Order(lanes=64) it would be 1.06" in words


@given(
    samples=st.integers(1, 100_000),
    shards=st.integers(1, 50),
    nodes=st.integers(1, 64),
    ranks=st.integers(1, 64),
)
def test_small_sets_need_no_other_shards(samples: int, shards: int, nodes: int, ranks: int) -> None:
    """Repeated fetches of small sets, such as in a demo or a test, cost nothing."""
    total = min(samples * 1000, GIB // 64)
    assert "penstock pack" not in (
        few(samples, shards, total, nodes=nodes, batch=nodes * ranks) or ""
    )
    assert small_cache_warning(total // 3, total) is None


def test_a_cache_that_keeps_little_is_reported_with_the_figures() -> None:
    words = small_cache_warning(10 * GIB, 100 * GIB)
    assert words is not None
    assert "keeps 10% of the 100.0 GiB" in words
    assert "90.0 GiB come from the remote in each epoch" in words
    assert small_cache_warning(95 * GIB, 100 * GIB) is None
    assert small_cache_warning(GIB, int(1.5 * GIB)) is None
    assert small_cache_warning(200 * GIB, 100 * GIB) is None
