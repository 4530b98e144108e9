"""Transformers' Trainer: get_train_dataloader() gives the loader, a callback keeps its state."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import cross_entropy
from transformers import Trainer, TrainerCallback, TrainingArguments

from tests.trainers.common import EPOCHS, GLOBAL_BATCH, STOP, Record, make_model

if TYPE_CHECKING:
    from pathlib import Path


class Model(torch.nn.Module):
    def __init__(self, record: Record) -> None:
        super().__init__()
        self.model = make_model()
        self.record = record

    def forward(self, batch: Any) -> dict[str, torch.Tensor]:
        images, labels, ids = batch
        self.record(ids)
        return {"loss": cross_entropy(self.model(images), labels)}


class Jobs(Trainer):
    loader: Any

    def get_train_dataloader(self) -> Any:
        return self.loader

    def _prepare_inputs(self, inputs: Any) -> Any:
        return {"batch": inputs}


class Keep(TrainerCallback):
    """Stops after so many steps, with a checkpoint of the trainer and of the loader."""

    def __init__(self, loader: Any, stop: int | None) -> None:
        self.loader = loader
        self.stop = stop

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.stop:
            control.should_save = control.should_training_stop = True

    def on_save(self, args: TrainingArguments, state: Any, control: Any, **_: Any) -> None:
        place = f"{args.output_dir}/checkpoint-{state.global_step}/loader.json"
        with open(place, "w") as file:
            json.dump(self.loader.state_dict(), file)


def train(loader: Any, record: Record, *, stop: int | None, resume: bool, folder: Path) -> None:
    arguments = TrainingArguments(
        output_dir=str(folder),
        num_train_epochs=EPOCHS,
        per_device_train_batch_size=GLOBAL_BATCH,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        save_strategy="steps",
        save_steps=10_000,
        remove_unused_columns=False,
        ignore_data_skip=True,
    )
    trainer = Jobs(Model(record), arguments, callbacks=[Keep(loader, stop)])
    trainer.loader = loader
    checkpoint = folder / f"checkpoint-{STOP}" if resume else None
    if checkpoint is not None:
        loader.load_state_dict(json.loads((checkpoint / "loader.json").read_text()))
    trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
