"""The loop of timm's training script: its schedule and meters, len(loader), sampler.set_epoch."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from timm.data.loader import MultiEpochsDataLoader  # noqa: F401  (what its script imports)
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2
from timm.utils import AverageMeter
from torch.nn.functional import cross_entropy

from tests.trainers.common import EPOCHS, Record, make_model

if TYPE_CHECKING:
    from pathlib import Path


def train(loader: Any, record: Record, *, stop: int | None, resume: bool, folder: Path) -> None:
    model = make_model()
    optimizer = create_optimizer_v2(model, opt="sgd", lr=0.01)
    schedule, epochs = create_scheduler_v2(
        optimizer, sched="cosine", num_epochs=EPOCHS, updates_per_epoch=len(loader)
    )
    checkpoint = folder / "loader.json"
    if resume:
        loader.load_state_dict(json.loads(checkpoint.read_text()))
    losses = AverageMeter()
    for epoch in range(loader.epoch, epochs):
        if hasattr(loader.sampler, "set_epoch"):
            loader.sampler.set_epoch(epoch)
        for step, (images, labels, ids) in enumerate(loader):
            optimizer.zero_grad()
            loss = cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            losses.update(loss.item(), images.size(0))
            schedule.step_update(num_updates=epoch * len(loader) + step, metric=losses.avg)
            if record(ids) == stop:
                folder.mkdir(parents=True, exist_ok=True)
                checkpoint.write_text(json.dumps(loader.state_dict()))
                return
        schedule.step(epoch + 1, losses.avg)
