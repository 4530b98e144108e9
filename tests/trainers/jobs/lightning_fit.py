"""Lightning's Trainer saves and restores the loader's state with its own checkpoint."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.nn.functional import cross_entropy

from tests.trainers.common import EPOCHS, Record, make_model

if TYPE_CHECKING:
    from pathlib import Path

CHECKPOINT = "stopped"


class Module(lightning.LightningModule):
    def __init__(self, record: Record) -> None:
        super().__init__()
        self.model = make_model()
        self.record = record

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        images, labels, ids = batch
        self.record(ids)
        return cross_entropy(self.model(images), labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.01)


def train(loader: Any, record: Record, *, stop: int | None, resume: bool, folder: Path) -> None:
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    trainer = make_trainer(ranks=ranks, stop=stop, folder=folder)
    checkpoint = str(folder / f"{CHECKPOINT}.ckpt") if resume else None
    trainer.fit(Module(record), loader, ckpt_path=checkpoint)


def make_trainer(*, ranks: int, stop: int | None, folder: Path) -> lightning.Trainer:
    return lightning.Trainer(
        accelerator="cpu",
        devices=ranks,
        strategy="ddp" if ranks > 1 else "auto",
        max_epochs=EPOCHS,
        max_steps=-1 if stop is None else stop,
        logger=False,
        callbacks=[] if stop is None else [checkpoints(folder, stop)],
        enable_checkpointing=stop is not None,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )


def checkpoints(folder: Path, step: int) -> ModelCheckpoint:
    """In mid-epoch: a checkpoint of one's own after fit() counts the cut epoch as a whole one."""
    return ModelCheckpoint(dirpath=folder, filename=CHECKPOINT, every_n_train_steps=step)
