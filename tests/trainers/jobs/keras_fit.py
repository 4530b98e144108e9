"""Keras on torch: fit(loader). It can't resume within an epoch; the loader's state is saved."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import keras
import torch

from tests.trainers.common import EPOCHS, PIXELS, Record

if TYPE_CHECKING:
    from pathlib import Path


class Model(keras.Sequential):
    record: Record

    def train_step(self, data: Any) -> Any:
        images, labels, ids = data
        self.record(ids)
        return super().train_step((images, labels))


class Stop(keras.callbacks.Callback):
    """Keeps the loader's position and ends the run, as a job that is cut short."""

    def __init__(self, loader: Any, record: Record, stop: int, folder: Path) -> None:
        super().__init__()
        self.loader, self.record, self.stop, self.folder = loader, record, stop, folder

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if len(self.record.batches) == self.stop:
            self.folder.mkdir(parents=True, exist_ok=True)
            kept = {"epoch": self.loader.epoch, "loader": self.loader.state_dict()}
            (self.folder / "loader.json").write_text(json.dumps(kept))
            raise KeyboardInterrupt


def train(loader: Any, record: Record, *, stop: int | None, resume: bool, folder: Path) -> None:
    shape = (3, PIXELS, PIXELS)
    model = Model([keras.layers.Input(shape), keras.layers.Flatten(), keras.layers.Dense(3)])
    model.record = record
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer="sgd", loss=loss, run_eagerly=True)
    callbacks = [] if stop is None else [Stop(loader, record, stop, folder)]
    kept = {"epoch": 0}
    if resume:
        kept = json.loads((folder / "loader.json").read_text())
        # Once training begins: before, fit() takes a batch to learn its shapes.
        begin = keras.callbacks.LambdaCallback(
            on_train_begin=lambda logs: loader.load_state_dict(kept["loader"])
        )
        callbacks.append(begin)
    try:
        model.fit(
            loader, initial_epoch=kept["epoch"], epochs=EPOCHS, callbacks=callbacks, verbose=0
        )
    except KeyboardInterrupt:
        assert stop is not None


def setup() -> None:
    keras.utils.set_random_seed(0)
    keras.config.set_image_data_format("channels_first")
    torch.set_num_threads(1)
