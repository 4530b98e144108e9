"""skorch: iterator_train gives the loader, for as many epochs as are left."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import skorch
import torch

from tests.trainers.common import EPOCHS, Record, make_model

if TYPE_CHECKING:
    from pathlib import Path


class Net(skorch.NeuralNet):
    record: Record

    def train_step_single(self, batch: Any, **parameters: Any) -> Any:
        images, labels, ids = batch
        self.record(ids)
        return super().train_step_single((images, labels), **parameters)


class Stop(skorch.callbacks.Callback):
    """Keeps the loader's position and ends the run, as a job that is cut short."""

    def __init__(self, loader: Any, record: Record, stop: int, folder: Path) -> None:
        self.loader, self.record, self.stop, self.folder = loader, record, stop, folder

    def on_batch_end(self, net: Any, **_: Any) -> None:
        if len(self.record.batches) == self.stop:
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / "loader.json").write_text(json.dumps(self.loader.state_dict()))
            raise KeyboardInterrupt


def train(loader: Any, record: Record, *, stop: int | None, resume: bool, folder: Path) -> None:
    if resume:
        loader.load_state_dict(json.loads((folder / "loader.json").read_text()))
    net = Net(
        make_model(),
        criterion=torch.nn.CrossEntropyLoss,
        dataset=loader.dataset,
        iterator_train=lambda dataset, **_: loader,
        train_split=None,
        max_epochs=EPOCHS - loader.epoch,
        callbacks=[] if stop is None else [Stop(loader, record, stop, folder)],
        verbose=0,
    )
    net.record = record
    net.fit(None)
