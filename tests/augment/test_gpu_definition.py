"""Graphs for CUDA as far as they go without one: defined and serialised, never built."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch

from penstock.augment import (
    AutoAugment,
    Cast,
    ColorJitter,
    Decode,
    GaussianBlur,
    Graph,
    GraphPlan,
    Normalize,
    RandAugment,
    RandomCrop,
    RandomErasing,
    RandomGrayscale,
    RandomHorizontalFlip,
    RandomResizedCrop,
    RandomRotation,
    RandomVerticalFlip,
    Resize,
    TrivialAugmentWide,
    check_recipe,
    define_outputs,
    draw,
    imagenet_train,
    load_dali,
    resample_operator,
)
from penstock.readers import EncodedBatch, ImageRange
from tests.augment.test_graph import encode
from tests.conftest import photograph

SIZES = ImageRange(min_height=40, max_height=120, min_width=40, max_width=120)

HALF_ERASED = (
    RandomResizedCrop(32),
    RandomHorizontalFlip(),
    Normalize(),
    RandomErasing(p=1.0, value=0.3),
    Cast("float16"),
)
RECIPES = {
    "train": imagenet_train(32),
    "half erased": HALF_ERASED,
    "half erased behind pixels": (
        Resize((32, 32)),
        ColorJitter(0.4),
        RandomErasing(p=1.0),
        Cast("float16"),
    ),
    "half": (RandomResizedCrop(32), Normalize(), Cast("float16")),
    "erased": (RandomResizedCrop(32), Normalize(), RandomErasing(p=1.0)),
    "bytes erased": (RandomResizedCrop(32), RandomErasing(p=1.0), Cast("uint8")),
    "jitter": (RandomResizedCrop(32), ColorJitter(0.4, 0.4, 0.4, 0.1)),
    "gray": (Decode("gray"), RandomResizedCrop(32), ColorJitter(0.4, 0.4)),
    "policies": (
        RandomResizedCrop(32),
        RandAugment(),
        TrivialAugmentWide(),
        AutoAugment("imagenet"),
    ),
    "padded": (
        RandomCrop(32, padding=4),
        RandomVerticalFlip(),
        RandomHorizontalFlip(),
        Normalize(),
    ),
    "others": (RandomResizedCrop(32), RandomGrayscale(0.5), GaussianBlur(5), RandomRotation(20)),
}


def defined(recipe: Any, device: Any, **plan: Any) -> list[Any]:
    """The operators of the graph, in order of definition, as far as DALI checks them here."""
    made = GraphPlan(
        recipe=check_recipe(recipe, images=SIZES),
        batch_size=4,
        threads=1,
        device=device,
        device_id=None,
        **{
            "deterministic": False,
            "check_headers": False,
            "constant": False,
            "compiled": device == "cpu" and resample_operator.is_compiled(),
            **plan,
        },
    )
    pipe = load_dali().Pipeline(
        batch_size=4, num_threads=1, device_id=None, prefetch_queue_depth=1, exec_dynamic=True
    )
    with pipe:
        pipe.set_outputs(*define_outputs(made))
    if device == "cuda":
        assert pipe.serialize()
    else:
        pipe.build()
    return list(pipe._ops)


def kinds(operators: list[Any]) -> list[str]:
    """Such as Erase, of those that DALI named itself."""
    found = (re.fullmatch(r"__(\w+?)_\d+", operator.name) for operator in operators)
    return [name[1] for name in found if name]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("name", ["half erased", "half erased behind pixels"])
def test_what_is_erased_becomes_half_behind_it(name: str, device: str) -> None:
    """DALI's Erase on the GPU: uint8 to int64 and float, no float16."""
    assert kinds(defined(RECIPES[name], device))[-2:] == ["Erase", "Cast"]


@pytest.mark.parametrize("name", ["half", "erased", "bytes erased"])
def test_nothing_is_cast_where_erase_knows_the_type(name: str) -> None:
    assert kinds(defined(RECIPES[name], "cuda"))[-1] in ("CropMirrorNormalize", "Erase")


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_has_a_graph_for_cuda_that_never_asks_the_host(name: str) -> None:
    operators = defined(RECIPES[name], "cuda")
    for operator in operators:
        inputs = [node for node in operator.inputs if not isinstance(node, list)]
        if any(node.device == "gpu" for node in inputs):
            assert all(node.device == "gpu" for node in operator.outputs), operator.name
    assert operators[-1].outputs[0].device == "gpu"


@pytest.mark.parametrize("given", ["pixels", "resident"])
def test_decoded_pixels_have_a_graph_for_cuda(given: str) -> None:
    operators = defined(HALF_ERASED, "cuda", **{"pixels": True, given: True})
    assert not any("decoder" in kind.lower() for kind in kinds(operators))
    assert operators[-1].outputs[0].device == "gpu"


@pytest.fixture(scope="module")
def batch() -> EncodedBatch:
    pictures = [photograph(number) for number in range(16)]
    return EncodedBatch(
        ids=np.arange(16),
        encoded=[encode(picture, quality=90) for picture in pictures],
        dims=np.array([picture.shape[:2] for picture in pictures], np.int32),
    )


def images(recipe: Any, batch: EncodedBatch, device: str = "cpu") -> torch.Tensor:
    checked = check_recipe(recipe, images=SIZES)
    graph = Graph(checked, batch_size=len(batch.ids), threads=2, device=device)
    try:
        graph.feed(batch, draw(checked, ids=batch.ids, dims=batch.dims, seed=3, epoch=0))
        return graph.outputs().cpu()
    finally:
        graph.close()


@pytest.mark.skipif(not resample_operator.is_compiled(), reason="no numba")
@pytest.mark.parametrize("recipe", [HALF_ERASED, HALF_ERASED[:-1]])
def test_what_was_resized_by_the_compiled_pass_is_erased(
    batch: EncodedBatch, recipe: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = images(recipe, batch)
    monkeypatch.setattr(resample_operator, "is_compiled", lambda: False)
    # Resampled pixels differ a little; which of them are erased doesn't.
    assert torch.equal(compiled == compiled.new_tensor(0.3), images(recipe, batch) == 0.3)
    assert (compiled == compiled.new_tensor(0.3)).any()


@pytest.mark.parametrize("name", ["half erased", "half erased behind pixels"])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_half_is_what_was_erased_in_full(batch: EncodedBatch, name: str, device: str) -> None:
    recipe = RECIPES[name]
    half, full = images(recipe, batch, device), images(recipe[:-1], batch, device)
    assert half.dtype == torch.float16
    assert torch.equal(half, full.half())
    untouched = images([op for op in recipe if not isinstance(op, RandomErasing)], batch, device)
    assert (half != untouched).any()
