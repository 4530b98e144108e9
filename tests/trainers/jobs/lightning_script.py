"""Lightning starts the other process itself, by running this script again.

`python lightning_script.py KIND FOLDER OUT WAY MADE`. way: whole, stopped or resumed. made:
"script" if the loader is made before fit and its length was read, or "hook": train_dataloader makes
it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import lightning

from tests.trainers.common import GLOBAL_BATCH, STOP, Record, loader_options, make_dataset
from tests.trainers.jobs import lightning_fit

RANKS = 2


def make(kind: str, folder: str) -> Any:
    from penstock.pipeline import DataLoader

    options = loader_options("native" if kind == "native" else "torch")
    if kind == "plain":  # torch's order: Lightning adds its DistributedSampler
        options = {"shuffle": True}
    dataset = make_dataset("native" if kind == "native" else "torch", Path(folder))
    return DataLoader(dataset, batch_size=GLOBAL_BATCH // RANKS, **options)


def main(kind: str, folder: str, out: str, way: str, made: str) -> None:
    lightning.seed_everything(1, workers=True, verbose=False)
    record = Record()
    if made == "hook":

        class Made(lightning_fit.Module):
            def train_dataloader(self) -> Any:
                return make(kind, folder)

        module, loader = Made(record), None
    else:
        module, loader = lightning_fit.Module(record), make(kind, folder)
        len(loader)
    stop = STOP if way == "stopped" else None
    trainer = lightning_fit.make_trainer(ranks=RANKS, stop=stop, folder=Path(out) / "run")
    checkpoint = Path(out) / "run" / f"{lightning_fit.CHECKPOINT}.ckpt"
    trainer.fit(module, loader, ckpt_path=str(checkpoint) if way == "resumed" else None)
    report = {"batches": record.batches, "steps": len(trainer.train_dataloader)}
    (Path(out) / f"{way}-{trainer.global_rank}.json").write_text(json.dumps(report))


if __name__ == "__main__":
    main(*sys.argv[1:])
