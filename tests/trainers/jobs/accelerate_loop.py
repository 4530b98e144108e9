"""Accelerate: prepare() returns the loader unchanged; save_state() saves its state."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import torch
from accelerate import Accelerator
from torch.nn.functional import cross_entropy

from tests.trainers.common import EPOCHS, Record, make_model

if TYPE_CHECKING:
    from pathlib import Path


def train(loader: Any, record: Record, *, stop: int | None, resume: bool, folder: Path) -> None:
    accelerator = Accelerator(cpu=True)
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    checkpoint = folder / "loader.json"
    if resume:
        loader.load_state_dict(json.loads(checkpoint.read_text()))
    while loader.epoch < EPOCHS:
        for images, labels, ids in loader:
            optimizer.zero_grad()
            accelerator.backward(cross_entropy(model(images), labels))
            optimizer.step()
            if record(ids) == stop:
                folder.mkdir(parents=True, exist_ok=True)
                checkpoint.write_text(json.dumps(loader.state_dict()))
                return
