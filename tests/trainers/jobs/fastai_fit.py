"""fastai: DataLoaders(loader, …) and Learner.fit; a callback keeps the loader's state."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import torch
from fastai.basics import Callback, CancelFitException, DataLoaders, Learner

from tests.trainers.common import EPOCHS, Record, make_model

if TYPE_CHECKING:
    from pathlib import Path


class Keep(Callback):
    """Ends the run after so many steps, the position kept."""

    def __init__(self, loader: Any, record: Record, stop: int | None, folder: Path) -> None:
        self.loader, self.noted, self.stop, self.folder = loader, record, stop, folder

    def after_batch(self) -> None:
        if len(self.noted.batches) == self.stop:
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / "loader.json").write_text(json.dumps(self.loader.state_dict()))
            raise CancelFitException


def train(loader: Any, record: Record, *, stop: int | None, resume: bool, folder: Path) -> None:
    if resume:
        loader.load_state_dict(json.loads((folder / "loader.json").read_text()))

    def loss(predicted: torch.Tensor, labels: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        record(ids)
        return torch.nn.functional.cross_entropy(predicted, labels)

    data = DataLoaders(loader, [])  # nothing to validate on
    data.n_inp = 1
    learner = Learner(data, make_model(), loss_func=loss, lr=0.01)
    keep = Keep(loader, record, stop, folder)
    with learner.no_logging():
        learner.fit(EPOCHS - loader.epoch, cbs=[keep])
