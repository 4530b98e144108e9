"""Train on a Ray cluster: Ray starts the workers and their process group, the loader finds both.

    python examples/ray/ray_train.py s3://bucket/train --workers 8 --cache /nvme/penstock
    python examples/ray/ray_train.py photos/train --workers 2 --cpu     # without GPUs

A worker that dies ends the attempt; the next one goes on behind the last checkpoint.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from ray import train
from ray.train import Checkpoint, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, get_device, prepare_model
from torch import nn

from penstock import DataLoader, Dataset, DiskCache, imagenet_train


def train_worker(options: dict[str, Any]) -> None:
    """What each of Ray's workers runs."""
    cache = options["cache"]
    dataset = Dataset(
        options["url"], cache=DiskCache(cache, max_bytes=options["cache_bytes"]) if cache else None
    )
    loader = DataLoader(  # no prepare_data_loader: it shares samples out itself
        dataset,
        global_batch_size=options["global_batch_size"],
        shuffle=True,
        drop_last=True,
        seed=0,
        augment=imagenet_train(options["size"]),
        device=get_device(),
    )
    classes = class_count(dataset)
    model = prepare_model(
        nn.Sequential(
            nn.Conv2d(3, 32, 3, stride=2), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
            nn.Linear(32, classes),
        )
    )  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if (last := train.get_checkpoint()) is not None:
        with last.as_directory() as folder:
            saved = torch.load(Path(folder) / "state.pt", weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        loader.load_state_dict(saved["loader"])
    for epoch in range(loader.epoch, options["epochs"]):
        loss = torch.zeros(())
        for images, labels in loader:
            loss = nn.functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        report(epoch, loss, {"model": model, "optimizer": optimizer, "loader": loader})
    loader.close()


def class_count(dataset: Dataset) -> int:
    """Apart: where torch and an attribute called `classes` are named in one function, cloudpickle
    takes torch.classes with it, which can't be pickled."""
    return len(dataset.classes or ())


def report(epoch: int, loss: torch.Tensor, parts: dict[str, Any]) -> None:
    """Tell Ray of an epoch; the first worker hands it a checkpoint."""
    metrics = {"epoch": epoch, "loss": float(loss.detach())}
    state = {name: part.state_dict() for name, part in parts.items()}
    if train.get_context().get_world_rank():
        train.report(metrics)
        return
    with tempfile.TemporaryDirectory() as folder:
        torch.save(state, Path(folder) / "state.pt")
        train.report(metrics, checkpoint=Checkpoint.from_directory(folder))


def main() -> None:
    parser = argparse.ArgumentParser(description="Train on a Ray cluster.")
    parser.add_argument("url")
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--cache", help="folder on each node's NVMe, for remote data")
    parser.add_argument("--cache-bytes", default="500GB")
    parser.add_argument("--global-batch-size", type=int, default=256)
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--epochs", type=int, default=90)
    parser.add_argument(
        "--results", default=os.path.abspath("ray-results"), help="seen by all nodes"
    )
    options = parser.parse_args()
    trainer = TorchTrainer(
        train_worker,
        train_loop_config=vars(options),
        scaling_config=ScalingConfig(num_workers=options.workers, use_gpu=not options.cpu),
        run_config=RunConfig(
            storage_path=options.results, failure_config=FailureConfig(max_failures=3)
        ),
    )
    print(trainer.fit().metrics)


if __name__ == "__main__":
    main()
