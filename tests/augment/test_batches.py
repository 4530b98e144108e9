"""Test that rows of a batch come with their draws, and that runs are small after a failure."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.augment import (
    DaliPipeline,
    Graph,
    GraphPlan,
    check_recipe,
    draw,
    graph,
    imagenet_eval,
    select_rows,
)
from penstock.readers import EncodedBatch, ImageRange
from tests.augment.test_graph import jpeg_batch

if TYPE_CHECKING:
    import pytest


def batch(samples: int) -> EncodedBatch:
    return EncodedBatch(
        ids=np.arange(samples) + 100,
        encoded=[np.full(4, row, np.uint8) for row in range(samples)],
        dims=np.arange(2 * samples, dtype=np.int32).reshape(samples, 2),
    )


def test_selected_rows_come_with_their_draws() -> None:
    whole, draws = batch(5), {"start": np.arange(10).reshape(5, 2)}
    some, their_draws = select_rows(whole, draws, [4, 1])
    assert [sample[0] for sample in some] == [4, 1]
    assert their_draws["start"].tolist() == [[8, 9], [2, 3]]


def test_all_rows_are_the_batch_itself() -> None:
    whole, draws = batch(3), {"start": np.zeros((3, 2))}
    assert select_rows(whole, draws, [0, 1, 2])[0] is whole.encoded
    assert select_rows(whole, draws, [0, 1, 2])[1] is draws


def test_caution_lasts_for_some_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph, "SMALL_RUN_BATCHES", 2)
    monkeypatch.setattr(graph, "SMALL_RUN_SAMPLES", 3)
    take, sizes = DaliPipeline.take, list[int]()

    def counted(pipe: DaliPipeline, samples: int) -> Any:
        sizes.append(samples)
        return take(pipe, samples)

    good = jpeg_batch(8)
    torn = replace(good, encoded=[good.encoded[0][:99], *good.encoded[1:]])
    images = ImageRange(min_height=40, max_height=120, min_width=40, max_width=120)
    recipe = check_recipe(imagenet_eval(32, resize=40), images=images)
    draws = draw(recipe, ids=good.ids, dims=good.dims, seed=1, epoch=0)
    with contextlib.closing(Graph(GraphPlan(recipe, batch_size=8, threads=1))) as made:
        made.feed(torn, draws)
        assert list(made.outputs_marked().bad) == [0]
        monkeypatch.setattr(DaliPipeline, "take", counted)
        for wanted in ([3, 3, 2], [3, 3, 2], [8]):
            made.feed(good, draws)
            made.outputs()
            assert sizes == wanted
            sizes.clear()
