"""Ignite's Engine, with the loader in its Checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from ignite.engine import Engine, Events
from torch.nn.functional import cross_entropy

from tests.trainers.common import EPOCHS, Record, make_model

if TYPE_CHECKING:
    from pathlib import Path


def train(
    loader: Any,
    record: Record,
    *,
    stop: int | None,
    resume: bool,
    folder: Path,
    engine_class: type[Engine] = Engine,
) -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)

    def step(engine: Engine, batch: Any) -> float:
        images, labels, ids = batch
        optimizer.zero_grad()
        loss = cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        record(ids)
        return loss.item()

    engine = engine_class(step)
    checkpoint = folder / "ignite.pt"
    if resume:
        kept = torch.load(checkpoint, weights_only=False)
        engine.load_state_dict(kept["engine"])
        loader.load_state_dict(kept["loader"])
    if stop is not None:

        def keep(engine: Engine) -> None:
            folder.mkdir(parents=True, exist_ok=True)
            states = {"engine": engine.state_dict(), "loader": loader.state_dict()}
            torch.save(states, checkpoint)
            engine.terminate()

        engine.add_event_handler(Events.ITERATION_COMPLETED(once=stop), keep)

    engine.run(loader, max_epochs=EPOCHS)
