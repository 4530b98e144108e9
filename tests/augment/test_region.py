"""Test that windows are decoded as the recipe says, and the settings of the GPU's decoder."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from penstock.augment import (
    Decode,
    Graph,
    GraphPlan,
    Normalize,
    RandomResizedCrop,
    check_recipe,
    decode_options,
    draw,
    imagenet_train,
)
from penstock.cache import RecipeError
from penstock.readers import ImageRange
from tests.augment.test_graph import defined, jpeg_batch, kinds

SIZES = ImageRange(min_height=40, max_height=120, min_width=40, max_width=120)


IN_FULL = ["Image", "Slice"]


@pytest.mark.parametrize(
    ("device", "way", "wanted"),
    [
        *((device, "decoder", ["ImageSlice"]) for device in ("cpu", "cuda")),
        *((device, "slice", IN_FULL) for device in ("cpu", "cuda")),
        ("cpu", "auto", ["ImageSlice"]),
        ("cuda", "auto", IN_FULL),
    ],
)
def test_the_graph_goes_that_way(device: str, way: Any, wanted: list[str]) -> None:
    recipe = (Decode(windows=way), *imagenet_train(32)[1:])
    found = kinds(defined(recipe, device))
    decoding = [kind.removeprefix("decoders__") for kind in found]
    assert [kind for kind in decoding if kind in ("ImageSlice", "Image", "Slice")] == wanted


def test_settings_of_the_gpus_decoder_reach_it_and_nothing_else() -> None:
    def options(decode: Decode, **plan: Any) -> dict[str, Any]:
        made = GraphPlan(
            check_recipe((decode, *imagenet_train(32)[1:]), images=SIZES),
            batch_size=4,
            threads=1,
            **{"device_id": 0, **plan},
        )
        unsaid = {"output_type", "adjust_orientation", "device"}
        return {k: v for k, v in decode_options(made).items() if k not in unsaid}

    asked = Decode(hw_decoder_load=0.8, preallocate=(400, 500))
    hints = {"preallocate_height_hint": 400, "preallocate_width_hint": 500}
    assert options(Decode()) == {}  # DALI's own
    assert options(asked) == {"hw_decoder_load": 0.8, **hints}
    assert options(asked, device_id=None) == {}
    fixed = {"hw_decoder_load": 0.0, "jpeg_fancy_upsampling": True}
    assert options(asked, deterministic=True) == {**fixed, **hints}


@pytest.mark.parametrize(
    "wrong",
    [
        {"windows": "cut"},
        {"hw_decoder_load": 1.5},
        {"hw_decoder_load": True},
        {"preallocate": (0, 5)},
        {"preallocate": "large"},
    ],
)
def test_wrong_settings_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(RecipeError, match=next(iter(wrong))):
        Decode(**wrong)


@pytest.mark.parametrize("color", ["rgb", "gray"])
def test_both_ways_give_the_same_bits_on_the_cpu(color: Any) -> None:
    batch, found = jpeg_batch(24), []
    for windows in ("decoder", "slice"):
        decode = Decode(color, windows=windows)  # type: ignore[arg-type]
        normalize = Normalize((0.5,), (0.5,)) if color == "gray" else Normalize()
        recipe = (decode, RandomResizedCrop(32), normalize)
        checked = check_recipe(recipe, images=SIZES)
        graph = Graph(GraphPlan(checked, batch_size=24, threads=2))
        graph.feed(batch, draw(checked, ids=batch.ids, dims=batch.dims, seed=3, epoch=0))
        found.append(graph.outputs())
        graph.close()
    assert torch.equal(*found)
