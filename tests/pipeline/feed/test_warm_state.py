"""A warm-up for a state uses its lane order, its batches and its position."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from penstock.augment import LongestSide, Pad
from penstock.cache import ConfigError, PlanError, ResumeError
from penstock.pipeline import DataLoader, Order, World
from penstock.pipeline.feed import warm
from penstock.pipeline.plan import LaneOrder
from tests.pipeline.feed.test_warm import dataset_of, run, url, watch

if TYPE_CHECKING:
    from pathlib import Path

RANKS, LANES, BATCH = 2, 4, 8
__all__ = ["url"]


def state_of(pack: Path, cache: Path, *, steps: int = 0, **options: Any) -> dict[str, Any]:
    """A state behind so many steps, whose ranks have their lanes the other way round."""
    usual: dict[str, Any] = {
        "seed": 3,
        "order": Order(lanes=LANES, window=1),
        "global_batch_size": BATCH,
    }
    usual |= {"shuffle": True, "drop_last": True, "world": World(0, RANKS), **options}
    with dataset_of(pack, cache) as dataset, DataLoader(dataset, **usual) as loader:
        loader.skip(steps)
        state = loader.state_dict()
    state["lane_order"] = LaneOrder(tuple(reversed(range(LANES))), LANES).text
    found: dict[str, Any] = json.loads(json.dumps(state))
    return found


def shards_of_rest(dataset: Any, state: dict[str, Any], rank: int) -> list[int]:
    """Return the shards that a resumed rank reads, in the order of first need."""
    starts, found = dataset.index.starts, dict[int, None]()
    world = World(rank, RANKS)
    with DataLoader(
        dataset, shuffle=True, seed=3, global_batch_size=BATCH, drop_last=True, world=world
    ) as loader:
        loader.load_state_dict(state)
        for (ids,) in loader:
            shards = np.searchsorted(starts, ids.numpy(), side="right") - 1
            found |= dict.fromkeys(sorted(shards.tolist()))
    return list(found)


@pytest.mark.parametrize("steps", [0, 2])
def test_each_node_warms_what_it_reads_from_the_state_on(
    pack: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: int
) -> None:
    state = state_of(pack, tmp_path / "first", steps=steps)
    for rank in range(RANKS):
        world = World(rank, RANKS, local_rank=0, local_size=1)
        with dataset_of(pack, tmp_path / f"{steps}-{rank}") as dataset:
            seen = watch(dataset, monkeypatch)
            result = warm(dataset, world=world, state=state, workers=1)
            assert not result.failed
            warmed = list(dict.fromkeys(seen))
            seen.clear()
            wanted = shards_of_rest(dataset, state, rank)
            assert seen == []
            names = [dataset.index.shard_name(shard) for shard in wanted]
            assert set(warmed[: len(names)]) == set(names)  # what the epoch's rest needs, first
            assert warmed[0] in names[:LANES]


def test_another_order_of_lanes_is_another_share(pack: Path, tmp_path: Path) -> None:
    state = state_of(pack, tmp_path / "first")
    as_numbered = {**state, "lane_order": None}
    kept = []
    for number, told in enumerate((state, as_numbered)):
        with dataset_of(pack, tmp_path / str(number)) as dataset:
            warm(dataset, world=World(0, RANKS, local_rank=0, local_size=1), state=told)
            assert dataset.remote is not None
            sources = [dataset.index.source(n) for n in range(len(dataset.index.sizes))]
            kept.append({one.key for one in sources if dataset.remote.is_whole(one)})
    assert kept[0] != kept[1]


def test_other_batches_may_follow_and_nothing_else(pack: Path, tmp_path: Path) -> None:
    state = state_of(pack, tmp_path / "first", steps=1)
    with dataset_of(pack, tmp_path / "cache") as dataset:
        assert warm(dataset, state=state, global_batch_size=4, dry_run=True).objects > 0
        with pytest.raises(ConfigError, match="seed: got 5 together with a state"):
            warm(dataset, state=state, seed=5)
        with pytest.raises(PlanError, match="global_batch_size=8 is smaller than the world of 9"):
            warm(dataset, state=state, world=World(0, 9))
        with pytest.raises(ResumeError, match="is damaged"):
            warm(dataset, state={**state, "step": 7})
        with pytest.raises(ResumeError, match="lane order"):
            warm(dataset, state={**state, "lane_order": "groups:3:AAAA"})
    with (
        dataset_of(pack, tmp_path / "cache") as dataset,
        dataset.subset(range(5)) as part,
        pytest.raises(ResumeError, match="was saved for dataset"),
    ):
        warm(part, state=state)


# -- the command


def test_the_command_takes_a_state_of_json(
    url: str, pack: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with dataset_of(pack, tmp_path / "first") as dataset:
        count = len(dataset.index.sizes)
    file = tmp_path / "state.json"
    options = (url, "--cache", str(tmp_path / "cache"), "--state", str(file), "--json")
    file.write_text("{")
    code, _, err = run(capsys, *options)
    assert (code, "a file that isn't JSON" in " ".join(err.split())) == (1, True)
    file.write_text(json.dumps(state_of(pack, tmp_path / "first", steps=1)))
    code, out, _ = run(capsys, *options)
    assert (code, json.loads(out)["objects"]) == (0, count)
    code, _, err = run(capsys, *options, "--seed", "7")
    assert (code, "together with a state" in " ".join(err.split())) == (2, True)


def test_batches_of_similar_shapes_are_warmed_too(pack: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"batch_size": 8, "shuffle": True, "seed": 3, "bucket_by": "aspect"}
    with dataset_of(pack, tmp_path / "first") as dataset:
        dataset = dataset.select("image", "id")
        recipe = [LongestSide(16), Pad(to_multiple=1)]
        with DataLoader(dataset, augment=recipe, drop_last=True, **options) as loader:
            loader.skip(2)
            state = loader.state_dict()
    with dataset_of(pack, tmp_path / "second") as dataset:
        result = warm(dataset, state=state)
        assert not result.failed
        assert result.objects > 0
