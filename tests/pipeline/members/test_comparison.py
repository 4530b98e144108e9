"""Loaders that ranks made differently: each rank ends with an error that names who, and in what."""

from __future__ import annotations

import re
import textwrap
from dataclasses import asdict, dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from penstock.augment import imagenet_eval, imagenet_train
from penstock.pipeline.members import SharedFacts, recipe_text
from tests.pipeline.ranks import run_ranks

if TYPE_CHECKING:
    from pathlib import Path

FACTS = SharedFacts(
    dataset="d",
    samples=10,
    seed=1,
    plan="p",
    size=2,
    url="s3://a/b",
    lanes=2,
    window=3,
    batch="8",
    ends="drop_last=True, pad=None",
    recipe="r",
    operations=["Crop()", "Normalize()"],
)


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"seed": 2, "plan": "q"}, r"seed 1; .* seed 2.*seed="),
        ({"dataset": "e", "samples": 5, "plan": "q"}, r"\(10 samples.*\(5 samples.*out twice"),
        (
            {"dataset": "e", "shares": "fa 0.3, fb 0.7"},
            r"of s3://a/b with shares fa 0\.3, fb 0\.7\): .*Pass mix the same parts",
        ),
        ({"window": 4, "plan": "q"}, r"window=3; .* window=4.*order="),
        ({"lanes": 4, "plan": "q"}, r"lanes=2; .* lanes=4.*order="),
        ({"reshuffle": 0.5, "plan": "q"}, r"reshuffle=0\.0; .* reshuffle=0\.5"),
        ({"batch": "16"}, r"batches of 8; .* batches of 16.*global_batch_size="),
        ({"ends": "drop_last=False, pad=mask"}, r"drop_last=True.*pad=mask.*drop_last="),
        (
            {"recipe": "s", "operations": ["Crop()"]},
            r"has Normalize\(\) as operation 2; .*no further operation.*augmented diff.*augment=",
        ),
        ({"size": 3}, r"for 2 ranks; .* for 3 ranks.*same size"),
        ({"at": "step 7"}, r"at its beginning; .* at step 7.*rejoin with the same step"),
        ({"plan": "q"}, r"with plan p; .* plan q"),
    ],
)
def test_what_differs_is_named_on_both(other: dict[str, Any], words: str) -> None:
    first = {**asdict(FACTS), "label": "rank 0"}
    text = replace(FACTS, **other).difference(first, label="rank 1 (process 3)")
    assert re.search(rf"(?s)^Rank 0 .*{words}.*World\(0, 1\)", text)
    assert "rank 1 (process 3)" in text


def test_where_the_data_lies_may_differ() -> None:
    first = {**asdict(FACTS), "label": "rank 0"}
    assert not replace(FACTS, url="/mnt/b", operations=["?"]).difference(first, label="rank 1")


# -- recipes


@dataclass(frozen=True)
class Op:
    size: Any


class Side(Enum):
    LEFT = "left"
    RIGHT = "right"


def test_recipes_are_compared_by_what_is_the_same_in_all_processes() -> None:
    assert recipe_text(imagenet_train(32)) == recipe_text(imagenet_train(32))
    texts = {recipe_text(imagenet_train(32)), recipe_text(imagenet_train(33)), recipe_text(None)}
    assert len(texts | {recipe_text(imagenet_eval(32))}) == 4
    assert recipe_text([Op(lambda x: x), Op({"b", "a"})]) == (
        "[Op(size=test_recipes_are_compared_by_what_is_the_same_in_all_processes.<locals>.<lambda>)"
        ", Op(size={'a', 'b'})]"
    )
    assert recipe_text({"image": [Op(object())]}) == "{'image': [Op(size=object)]}"
    assert recipe_text(np.float64(0.5)) == recipe_text(np.float32(0.5)) == "0.5"
    weights = [np.array([1.0, 2.0]), np.array([1.0, 3.0]), np.array([[1.0, 2.0]]), np.arange(2)]
    assert len({recipe_text(Op(one)) for one in weights}) == len(weights)
    assert recipe_text(weights[0][::-1]) == recipe_text(np.array([2.0, 1.0]))
    assert [recipe_text(one) for one in Side] == ["Side.LEFT", "Side.RIGHT"]


# -- real processes


SCRIPT = textwrap.dedent(
    """
    import json, os, sys, warnings
    import torch.distributed as dist
    from penstock.augment import Normalize, RandomResizedCrop
    from penstock.pipeline import DataLoader, Order, World
    from penstock.readers import Dataset

    warnings.simplefilter("ignore")
    pack, case, rank = sys.argv[1], sys.argv[2], int(os.environ["RANK"])
    dist.init_process_group("gloo")
    odd = rank == dist.get_world_size() - 1
    data = Dataset(pack, fields=("label", "id"))
    options = dict(batch_size=4, shuffle=True, seed=3, drop_last=True, num_workers=1)
    if case == "seed" and odd:
        options["seed"] = 4
    if case == "dataset" and odd:
        data = data.subset(range(100))
    if case in ("twice", "evaluation"):
        data = data.subset(range(rank, 200, dist.get_world_size()))
    if case == "evaluation":
        options.update(shuffle=False, drop_last=False, pad="mask", seed=None)
    if case == "window" and odd:
        options["order"] = Order(window=7)
    if case == "batch" and odd:
        options["batch_size"] = 5
    if case == "recipe":
        data = Dataset(pack, fields=("image",))
        half = (0.5, 0.5, 0.5)
        options["augment"] = [RandomResizedCrop(size=16 + odd), Normalize(mean=half, std=half)]
    if case == "replicas":  # both processes of the second replica, and one of the first
        options["data_parallel"] = (min(1, rank), 2)
    told = {"type": "", "text": ""}
    try:
        with DataLoader(data, **options) as loader:
            while True:  # until somebody says why not
                for batch in loader:
                    pass
    except Exception as error:
        told = {"type": type(error).__name__, "text": str(error)}
    print(json.dumps(told), flush=True)
    # The store stays until all have ended: rank 0's process holds it.
    store = dist.distributed_c10d._get_default_store()
    store.set(f"ended {rank}", "")
    store.wait([f"ended {one}" for one in range(dist.get_world_size())])
    os._exit(0)
    """
)


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("recipe", ("size=[16, 16]", "size=[17, 17]", "augment=")),
        pytest.param("evaluation", ("(100 samples", "shared out twice"), marks=pytest.mark.grid),
        pytest.param("seed", ("seed 3", "seed 4"), marks=pytest.mark.grid),
        pytest.param("twice", ("(100 samples", "shared out twice"), marks=pytest.mark.grid),
        pytest.param("dataset", ("(203 samples", "(100 samples"), marks=pytest.mark.grid),
        pytest.param("window", ("window=7",), marks=pytest.mark.grid),
        pytest.param("batch", ("batches of 8", "batches of 10"), marks=pytest.mark.grid),
    ],
)
def test_each_rank_ends_with_the_reason(pack: Path, case: str, words: tuple[str, ...]) -> None:
    told = run_ranks(SCRIPT, str(pack), case)
    for one in told:
        assert one["type"] in ("PlanError", "RankFailedError"), told
        for word in (*words, "rank 0", "rank 1"):
            assert word in one["text"].replace("Rank", "rank")
    assert [one["type"] for one in told].count("PlanError") == 1


@pytest.mark.grid
def test_replicas_that_miss_a_process_are_refused(pack: Path) -> None:
    told = run_ranks(SCRIPT, str(pack), "replicas", size=4)
    assert any("more than 2 processes with that rank" in one["text"] for one in told)
    assert all(one["type"] in ("PlanError", "RankFailedError") for one in told), told
