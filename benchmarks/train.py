"""A small training job: a CNN on the CPU, fed by Penstock, that writes checkpoints and resumes
exactly.

`python -m benchmarks.train --train PACK --eval FOLDER --out FOLDER` runs it in a process of its
own, so that the demo can kill it. It prints events as one JSON object per line, and logs the sample
ids and the loss of every step to `steps-<life>.jsonl` in its out folder, one file per process, and
every epoch to `epochs.jsonl`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from penstock.pipeline.bench import send_to_parent

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from torch import nn

    from penstock import DataLoader

    Tell = Callable[[dict[str, Any]], None]

CHECKPOINT = "checkpoint.pt"
STEPS = "steps-{life}.jsonl"
EPOCHS = "epochs.jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A training job, with all settings that determine the weights.

    train, eval: datasets as URLs or paths. out: folder of checkpoints and the log. epochs: of the
    whole schedule. stop_after: number of epochs after which it stops early (None: at the end of the
    schedule). size: height and width in pixels of the crops. save_every: steps between two
    checkpoints.
    """

    train: str
    eval: str
    out: Path
    classes: int
    epochs: int = 5
    stop_after: int | None = None
    batch_size: int = 64
    size: int = 64
    learning_rate: float = 2e-3
    save_every: int = 10
    seed: int = 7


@dataclass(slots=True)
class Progress:
    """The position of the job: the contents of a checkpoint other than the loader's state."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    step: int = 0
    losses: list[float] = field(default_factory=list)


def small_cnn(classes: int, *, width: int = 16) -> nn.Module:
    """Build four strided convolutions and a linear layer, for any image size from 16 pixels on."""
    import torch
    from torch import nn

    layers: list[nn.Module] = []
    inputs = 3
    for outputs in (width, 2 * width, 4 * width, 4 * width):
        layers += [
            nn.Conv2d(inputs, outputs, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(inplace=True),
        ]
        inputs = outputs
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes)]
    # Channels last takes 40 % less CPU here.
    model = nn.Sequential(*layers, *head)
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return model


def weights_hash(model: nn.Module) -> str:
    """Return the SHA-256 of every parameter and buffer, which is equal only if all bits are."""
    digest = hashlib.sha256()
    for name, value in sorted(model.state_dict().items()):
        digest.update(name.encode())
        digest.update(value.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def run(job: Job, *, tell: Tell) -> None:
    """Train; continue from the checkpoint in job.out if there is one. tell: receives each event."""
    import torch

    from penstock import DataLoader, Dataset, imagenet_train
    from penstock.cache.base import usable_cores

    # Half of the cores for the step, the others for DALI's threads: more would wait for another.
    torch.set_num_threads(max(1, usable_cores() // 2))
    torch.manual_seed(job.seed)
    torch.use_deterministic_algorithms(True)
    model = small_cnn(job.classes)
    optimizer = torch.optim.AdamW(model.parameters(), lr=job.learning_rate)
    progress = Progress(model, optimizer)
    job.out.mkdir(parents=True, exist_ok=True)
    with (
        DataLoader(
            Dataset(job.train, fields=("image", "label", "id")),
            batch_size=job.batch_size,
            shuffle=True,
            drop_last=True,
            seed=job.seed,
            augment=imagenet_train(job.size),
        ) as loader,
        _log(job) as log,
    ):
        if (job.out / CHECKPOINT).exists():
            _restore(job, progress, loader)
            tell({"event": "resumed", "step": progress.step, "epoch": loader.epoch})
        last = job.epochs if job.stop_after is None else job.stop_after
        for epoch in range(loader.epoch, last):
            done = _epoch(job, progress, loader, epoch=epoch, log=log, tell=tell)
            with (job.out / EPOCHS).open("a") as epochs:
                epochs.write(json.dumps(done) + "\n")
            tell(done)
        tell({"event": "statistics", "text": str(loader.statistics())})


def _log(job: Job) -> TextIO:
    """Open a new file for each process: the last line of a killed process may be torn."""
    lives = len(list(job.out.glob(STEPS.format(life="*"))))
    return (job.out / STEPS.format(life=lives)).open("x")


def _epoch(
    job: Job, progress: Progress, loader: DataLoader, *, epoch: int, log: TextIO, tell: Tell
) -> dict[str, Any]:
    """Run the rest of an epoch, and then the evaluation."""
    began, before = time.perf_counter(), progress.step
    for images, labels, ids in loader:
        loss = _step(job, progress, images, labels, steps=job.epochs * len(loader))
        line = {"step": progress.step, "epoch": epoch, "loss": loss, "ids": ids.tolist()}
        log.write(json.dumps(line) + "\n")
        log.flush()
        if progress.step % job.save_every == 0:
            _save(job, progress, loader)
        tell({"event": "step", "step": progress.step, "epoch": epoch, "loss": loss})
    images_seen = (progress.step - before) * job.batch_size
    rate = images_seen / (time.perf_counter() - began)
    loss = sum(progress.losses) / max(1, len(progress.losses))
    progress.losses.clear()
    return {
        "event": "epoch",
        "epoch": epoch,
        "step": progress.step,
        "loss": loss,
        "accuracy": accuracy(job, progress.model),
        "images_per_s": rate,
        "weights": weights_hash(progress.model),
    }


def _step(
    job: Job, progress: Progress, images: torch.Tensor, labels: torch.Tensor, *, steps: int
) -> float:
    """Run one step; the learning rate falls linearly to zero over the schedule."""
    from torch.nn import functional

    for group in progress.optimizer.param_groups:
        group["lr"] = job.learning_rate * (1 - progress.step / steps)
    progress.model.train()
    progress.optimizer.zero_grad(set_to_none=True)
    loss = functional.cross_entropy(progress.model(_channels_last(images)), labels)
    loss.backward()  # type: ignore[no-untyped-call]
    progress.optimizer.step()
    progress.step += 1
    progress.losses.append(loss.item())
    return progress.losses[-1]


def _channels_last(images: torch.Tensor) -> torch.Tensor:
    import torch

    return images.contiguous(memory_format=torch.channels_last)


def accuracy(job: Job, model: nn.Module) -> float:
    """Return the share of evaluation images that the model labels correctly; each is used exactly
    once."""
    import torch

    from penstock import DataLoader, Dataset, imagenet_eval

    model.eval()
    right = seen = 0
    recipe = imagenet_eval(job.size, resize=round(job.size * 256 / 224))
    with (
        DataLoader(Dataset(job.eval), batch_size=job.batch_size, augment=recipe) as loader,
        torch.inference_mode(),
    ):
        for images, labels in loader:
            right += int((model(_channels_last(images)).argmax(1) == labels).sum())
            seen += len(labels)
    return right / seen


def _save(job: Job, progress: Progress, loader: DataLoader) -> None:
    """Write a temporary file, then rename it: a kill in between leaves the earlier checkpoint."""
    import torch

    state = {
        "model": progress.model.state_dict(),
        "optimizer": progress.optimizer.state_dict(),
        "step": progress.step,
        "losses": progress.losses,
        "loader": loader.state_dict(),
    }
    partial = job.out / (CHECKPOINT + ".part")
    torch.save(state, partial)
    partial.rename(job.out / CHECKPOINT)


def _restore(job: Job, progress: Progress, loader: DataLoader) -> None:
    import torch

    state = torch.load(job.out / CHECKPOINT, weights_only=True)
    progress.model.load_state_dict(state["model"])
    progress.optimizer.load_state_dict(state["optimizer"])
    progress.step = state["step"]
    progress.losses = list(state["losses"])
    loader.load_state_dict(state["loader"])


def arguments(job: Job) -> list[str]:
    """Return a job's arguments on the command line."""
    words = []
    for name, value in asdict(job).items():
        if value is not None:
            words += [f"--{name.replace('_', '-')}", str(value)]
    return words


def main(argv: list[str] | None = None) -> None:
    """Parse a Job from the command line and run it."""
    parser = argparse.ArgumentParser(prog="benchmarks.train", description=__doc__)
    for name in ("train", "eval"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--classes", type=int, required=True)
    for name in ("epochs", "stop-after", "batch-size", "size", "save-every", "seed"):
        parser.add_argument(f"--{name}", type=int, default=argparse.SUPPRESS)
    parser.add_argument("--learning-rate", type=float, default=argparse.SUPPRESS)
    run(Job(**vars(parser.parse_args(argv))), tell=send_to_parent)


if __name__ == "__main__":
    main()
