"""Test warnings about batches with few divisors, lopsided ranks, and clustered labels."""

from __future__ import annotations

import json
import re
import warnings
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.cache import PenstockWarning
from penstock.pipeline import DataLoader, Order, World
from penstock.pipeline.plan import (
    Plan,
    ShardReaders,
    better_batch,
    clustered_labels_warning,
    default_lanes,
    default_window,
    most_lanes,
    readers_of,
    readers_per_shard,
    usual_spreads,
)
from penstock.pipeline.plan.sizing import readers_warning
from penstock.readers import Dataset, pack
from tests import warm
from tests.images import jpeg
from tests.properties import examples

if TYPE_CHECKING:
    import subprocess
    from pathlib import Path


@pytest.mark.parametrize(
    ("lanes", "nodes", "each"), [(1, 8, 4), (8, 8, 2), (8, 64, 8), (128, 8, 3), (24, 16, 2)]
)
def test_readers_are_what_the_plan_reads(lanes: int, nodes: int, each: int) -> None:
    batch = lanes * nodes * each
    node = np.repeat(np.arange(nodes), batch // nodes)
    lane = np.sort(np.arange(batch) % lanes)
    pairs = set(zip(lane.tolist(), node.tolist(), strict=True))
    assert readers_per_shard(lanes, nodes) == pytest.approx(len(pairs) / lanes)


@given(
    batch=st.integers(1, 10**5),
    shards=st.integers(1, 10**5),
    nodes=st.integers(1, 600),
    ranks_a_node=st.sampled_from([1, 8]),
)
@examples(60)
def test_a_better_batch_is_better_and_as_even(
    batch: int, shards: int, nodes: int, ranks_a_node: int
) -> None:
    ranks = nodes * ranks_a_node
    step = ranks if batch % ranks == 0 else 1
    found = better_batch(batch, shards, nodes=nodes, step=step)
    lanes = default_lanes(batch, shards)
    if found is None:
        return
    more = default_lanes(found, shards)
    assert 2 * lanes < most_lanes(batch, shards)
    assert 2 * more >= most_lanes(found, shards)
    assert readers_per_shard(more, nodes) < readers_per_shard(lanes, nodes)
    assert (found - batch) % step == 0


@pytest.mark.parametrize(
    ("batch", "shards", "nodes", "wanted"),
    [
        (8 * 509, 1000, 64, (8, 8.0, 4064)),
        (4099, 5000, 16, (1, 16.0, 4096)),  # a prime
        (4096, 1000, 64, None),
        (8 * 509, 1000, 8, None),  # a lane a node: nothing is lost
        (4099, 5000, 1, None),
        (7, 5000, 4, None),  # no batch of that size has lanes
    ],
)
def test_a_batch_with_few_divisors_gets_a_better_one_suggested(
    batch: int, shards: int, nodes: int, wanted: tuple[int, float, int] | None
) -> None:
    found = better_batch(batch, shards, nodes=nodes, step=1 if batch % 2 else 8)
    if wanted is None:
        assert found is None
        return
    assert found is not None
    lanes = default_lanes(batch, shards)
    assert (lanes, readers_per_shard(lanes, nodes)) == wanted[:2]
    assert abs(found - batch) <= abs(wanted[2] - batch)


def readers_words(shards: int, *, batch: int, lanes: int, nodes: int, each: int = 0) -> str | None:
    """each: stored bytes of a sample, of 60 a shard; 0 for local data."""
    return readers_warning(
        samples=60 * shards,
        shards=shards,
        total_bytes=60 * shards * each,
        lanes=lanes,
        global_batch=batch,
        nodes=nodes,
        step=nodes,
    )


def words_for(shards: int, *, batch: int, ranks: int, nodes: int, icc: float | None) -> list[str]:
    lanes = default_lanes(batch, shards)
    window = default_window(shards, lanes, global_batch=batch, icc=icc, shuffled=not icc)
    plan = Plan([60] * shards, seed=1, lanes=lanes, window=window)
    found = [readers_words(shards, batch=batch, lanes=lanes, nodes=nodes)] if nodes > 1 else []
    if icc is not None:
        found.append(clustered_labels_warning(plan, icc=icc, global_batch=batch, ranks=ranks))
    return [words for words in found if words]


def test_only_jobs_that_lose_by_it_are_reported() -> None:
    assert not words_for(1000, batch=31, ranks=1, nodes=1, icc=0.0)
    assert not words_for(1000, batch=31 * 8, ranks=8, nodes=1, icc=0.001)
    assert not words_for(1000, batch=8192, ranks=256, nodes=32, icc=None)
    (few,) = words_for(1000, batch=8 * 509, ranks=8 * 64, nodes=64, icc=0.0)
    assert "lanes=8)" in few
    assert "8.13 of the 64 nodes" in few
    assert "has more divisors" in few
    (lopsided,) = words_for(1000, batch=8192, ranks=256, nodes=32, icc=1.0)
    assert "BatchNorm" in lopsided


def test_one_rank_that_mixes_all_is_not_lopsided_and_many_are() -> None:
    spreads = usual_spreads(1000, icc=1.0, shuffled=False)
    assert spreads[1] == pytest.approx(1)
    assert spreads[8] < 2 < spreads[64] <= spreads[256]
    assert max(usual_spreads(1000, icc=0.001, shuffled=True).values()) < 1.1


@pytest.fixture(scope="module")
def sorted_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sorted") / "photographs"
    for number in range(48):
        place = folder / f"class-{number // 8}"
        place.mkdir(parents=True, exist_ok=True)
        (place / f"{number:02d}.jpg").write_bytes(jpeg(number, 32, 32))
    return folder


def test_the_loaders_first_rank_warns(sorted_folder: Path, tmp_path: Path) -> None:
    pack(str(sorted_folder), str(tmp_path / "p"), shuffle=False, shard_bytes=2000)
    dataset = Dataset(str(tmp_path / "p"), fields=("label", "id"))
    assert len(dataset.index.sizes) >= 8
    options: dict[str, Any] = {"shuffle": True, "seed": 1, "order": Order(lanes=1, window=1)}
    options |= {"global_batch_size": 16, "drop_last": True}
    with pytest.warns(PenstockWarning, match=r"Labels cluster inside shards \(ICC"):
        DataLoader(dataset, world=World(0, 2), **options).close()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        DataLoader(dataset, world=World(1, 2), **options).close()
        DataLoader(dataset, batch_size=16, shuffle=True, seed=1, drop_last=True).close()


def test_the_loader_names_a_better_batch(sorted_folder: Path, tmp_path: Path) -> None:
    pack(str(sorted_folder), str(tmp_path / "p"), shard_bytes=1000)
    dataset = Dataset(str(tmp_path / "p"), fields=("label", "id"))
    options: dict[str, Any] = {"shuffle": True, "seed": 1, "drop_last": True}
    assert len(dataset.index.sizes) >= 16
    with pytest.warns(PenstockWarning, match=r"\(a batch of 37, lanes=1\).*more divisors"):
        DataLoader(dataset, global_batch_size=37, world=World(0, 4), **options).close()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        one_node = World(0, 4, local_rank=0, local_size=4)
        DataLoader(dataset, global_batch_size=37, world=one_node, **options).close()
        loader = DataLoader(
            dataset, global_batch_size=37, world=World(0, 4), order=Order(lanes=1), **options
        )
        loader.close()


def test_pack_and_inspect_warn(sorted_folder: Path, tmp_path: Path) -> None:
    def penstock(*arguments: object) -> subprocess.CompletedProcess[str]:
        done = warm.run(["-m", "penstock.pipeline.cli", *arguments])
        assert done.returncode == 0, done.stderr
        return done

    packing = (tmp_path / "p", "--shard-bytes", "1000", "--json")
    packed = penstock("pack", sorted_folder, *packing, "--no-shuffle")
    assert "Labels cluster inside shards" in packed.stderr
    report = penstock("inspect", tmp_path / "p", "--json")
    assert "Labels cluster inside shards" in report.stderr
    spreads = json.loads(report.stdout)["rank_label_spread"]
    assert list(spreads) == ["1", "8", "64", "256", "1024"]
    assert spreads["1"] < 2 < spreads["64"]


@pytest.mark.parametrize("shards", [2_000, 10_000])
@pytest.mark.parametrize("nodes", [8, 64, 512, 660, 4096])
def test_readers_with_those_of_the_ends_are_what_a_plan_has(shards: int, nodes: int) -> None:
    lanes = default_lanes(nodes * 256, shards)
    plan = Plan(np.full(shards, 37), seed=1, lanes=lanes, window=1)
    found = ShardReaders(plan, nodes=[8] * nodes)
    some = range(0, shards, 7)
    mean = sum(len(found.readers(shard, 0)) for shard in some) / len(some)
    assert readers_of(shards, lanes=lanes, nodes=nodes) == pytest.approx(mean, rel=0.03)


@pytest.mark.parametrize(
    ("shards", "nodes", "message"),
    [
        (100_000, 4096, None),
        (10_000, 512, None),
        (300, 32, None),  # few nodes: a small dataset's bytes
        (2_000, 512, r"by 2\.51 of the 512 nodes .*pack --for-nodes 512 --for-batch 131072`"),
        (10_000, 4096, r"by 2\.82 of the 4096 nodes"),
        (
            20_000,
            660,
            r"by 1\.19 of the 660 nodes .*lanes=4224\).*Order\(lanes=2640\) it would be 1\.07",
        ),
    ],
)
def test_many_readers_are_reported_with_the_figure(
    shards: int, nodes: int, message: str | None
) -> None:
    batch = nodes * 256
    lanes = default_lanes(batch, shards)
    words = readers_words(shards, batch=batch, lanes=lanes, nodes=nodes, each=10**6)
    if message is None:
        assert words is None
        return
    assert words is not None
    assert re.search(message, words), words


def test_a_batch_of_few_samples_a_node_is_reported_too() -> None:
    words = readers_words(10_000, batch=1024, lanes=128, nodes=1024)
    assert words is not None
    assert "by 8.20 of the 1024 nodes" in words
    assert "batch needs 8 samples a node or more" in words
