"""The road of a batch: its stages in their order, and a batch that goes it on one thread."""

from __future__ import annotations

import inspect
import re
import threading
from typing import TYPE_CHECKING, Any

import torch

from penstock.augment import imagenet_train
from penstock.pipeline import DataLoader
from penstock.pipeline.feed import BatchPipeline
from penstock.pipeline.feed import batch_pipeline as road_module
from penstock.pipeline.plan import Cursor
from penstock.readers import Dataset

if TYPE_CHECKING:
    from pathlib import Path

STAGES = ["order", "read", "draw", "begin_decode", "decode", "finish", "hand_out"]


def test_the_table_names_the_stages_in_their_order() -> None:
    assert re.findall(r"Road\.(\w+)", road_module.__doc__ or "") == STAGES
    lines = [inspect.getsourcelines(getattr(BatchPipeline, stage))[1] for stage in STAGES]
    assert lines == sorted(lines)


def test_a_batch_goes_the_road_on_one_thread_as_on_many(pack: Path) -> None:
    options: dict[str, Any] = {"batch_size": 16, "shuffle": True, "seed": 3, "drop_last": True}
    with (
        Dataset(str(pack), fields=("image", "label", "id")) as dataset,
        DataLoader(dataset, augment=imagenet_train(32), **options) as walked,
        DataLoader(dataset, augment=imagenet_train(32), **options) as loader,
    ):
        engine: Any = walked._engine
        road: BatchPipeline = engine._setup.ready.road
        before = threading.active_count()
        by_hand = []
        for step in road.order(Cursor(0, 0)):
            if step.start.epoch:
                break
            batch = road.prepare(step)
            road.begin_decode(batch)
            road.decode(batch)
            road.finish(batch)
            assert not batch.images  # the user's tensors are the only ones
            tensors = road.hand_out(batch, wait_s=0.0, begins_epoch=step.start.position == 0)
            by_hand.append(tensors)
        assert threading.active_count() == before
        assert walked.statistics().samples == 16 * len(by_hand)
        by_loader = list(loader)
    assert len(by_hand) == len(by_loader) == len(loader)
    for ours, theirs in zip(by_hand, by_loader, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
