"""The stages of a batch in order, and a batch that passes through them on one thread."""

from __future__ import annotations

import inspect
import re
import threading
from typing import TYPE_CHECKING, Any

import torch

from penstock.augment import imagenet_train
from penstock.pipeline import DataLoader
from penstock.pipeline.feed import BatchPipeline
from penstock.pipeline.feed import batch_pipeline as pipeline_module
from penstock.pipeline.plan import Cursor
from penstock.readers import Dataset

if TYPE_CHECKING:
    from pathlib import Path

STAGES = ["order", "read", "draw", "begin_decode", "decode", "finish", "augment", "deliver"]


def test_the_table_lists_the_stages_in_order() -> None:
    lines = (pipeline_module.__doc__ or "").split("\n\n")[1].split("\n")
    rows = lines[[line.startswith("    ---") for line in lines].index(True) + 1 :]
    methods = re.findall(r"\w+", "\n".join(row[15:34] for row in rows))
    assert methods == STAGES
    defined = [inspect.getsourcelines(getattr(BatchPipeline, stage))[1] for stage in STAGES]
    assert defined == sorted(defined)


def test_one_thread_makes_the_same_batches_as_many(pack: Path) -> None:
    options: dict[str, Any] = {"batch_size": 16, "shuffle": True, "seed": 3, "drop_last": True}
    with (
        Dataset(str(pack), fields=("image", "label", "id")) as dataset,
        DataLoader(dataset, augment=imagenet_train(32), **options) as walked,
        DataLoader(dataset, augment=imagenet_train(32), **options) as loader,
    ):
        engine: Any = walked._engine
        pipeline: BatchPipeline = engine.assembly.pipeline
        before = threading.active_count()
        by_hand = []
        for step in pipeline.order(Cursor(0, 0)):
            if step.start.epoch:
                break
            (batch,) = pipeline.prepare([step])
            pipeline.begin_decode(batch)
            pipeline.decode(batch)
            pipeline.finish(batch)
            pipeline.augment(batch)
            assert not batch.images  # the user's tensors are the only ones
            begins_epoch = step.start.position == 0
            by_hand.append(pipeline.deliver(batch, wait_s=0.0, begins_epoch=begins_epoch))
        assert threading.active_count() == before
        assert walked.statistics().samples == 16 * len(by_hand)
        by_loader = list(loader)
    assert len(by_hand) == len(by_loader) == len(loader)
    for ours, theirs in zip(by_hand, by_loader, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
