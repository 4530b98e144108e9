"""Train an image classifier on data from anywhere, on any number of GPUs and nodes.

    python examples/classification/train.py photos/train --val photos/val
    python examples/classification/train.py s3://bucket/train --val s3://bucket/val --cache /nvme
    torchrun --nproc-per-node=8 examples/classification/train.py s3://bucket/train --cache /nvme
    … --cache /nvme --peers 10.0.0.7:7077    # on several nodes: each with its own address
    … --metrics-port 9400    # Prometheus: 9400 for a node's first GPU, 9401 for its second, …

Stopped at any moment, the same command goes on behind its last checkpoint with exactly the batches
that come next, also on another number of GPUs. Without a GPU it trains on the CPU. Beside the
checkpoint (checkpoint.pt) lies the loader's state as JSON (checkpoint.json), for
`penstock warm --state`.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from penstock import DataLoader, Dataset, DiskCache, Peers, imagenet_eval, imagenet_train
from penstock.pipeline.report import serve_metrics


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train an image classifier.")
    parser.add_argument("train", help="a folder, tar files, a pack, …: any URL of a dataset")
    parser.add_argument("--val", help="the same for evaluation after each epoch")
    parser.add_argument("--cache", help="folder on this node's NVMe, for remote data")
    parser.add_argument("--cache-bytes", default="500GB", help="how much it may hold")
    parser.add_argument(
        "--peers",
        metavar="HOST:PORT",
        help="this node's own address: its cache serves the other nodes there, and asks theirs",
    )
    parser.add_argument("--peer-token-file", help="the nodes' secret; by default the job draws one")
    parser.add_argument("--checkpoint", type=Path, default=Path("checkpoint.pt"))
    parser.add_argument("--checkpoint-every", type=int, default=500, help="steps")
    parser.add_argument("--epochs", type=int, default=90)
    parser.add_argument("--global-batch-size", type=int, default=256, help="over all ranks")
    parser.add_argument("--size", type=int, default=224, help="of the images, in pixels")
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--metrics-port", type=int, help="statistics for Prometheus; needs the extra 'metrics'"
    )
    parser.add_argument("--stop-after", type=int, help="steps, to try out a restart")
    options = parser.parse_args()
    if options.peers and not options.cache:
        parser.error("--peers: nodes serve one another what their caches hold; pass --cache too.")
    if options.peer_token_file and not options.peers:
        parser.error("--peer-token-file: is for nodes that serve one another; pass --peers too.")
    return options


def opened(url: str, options: argparse.Namespace) -> Dataset:
    if not options.cache:
        return Dataset(url)
    peers = Peers(options.peers, token_file=options.peer_token_file) if options.peers else None
    return Dataset(url, cache=DiskCache(options.cache, max_bytes=options.cache_bytes, peers=peers))


def make_model(classes: int) -> nn.Module:
    """Put yours here."""
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, classes),
    )


class Training:
    """What a checkpoint holds, and how it is saved: whole or not at all, by the first rank."""

    def __init__(self, options: argparse.Namespace, device: torch.device) -> None:
        self.path: Path = options.checkpoint
        self.device = device
        train = opened(options.train, options)
        self.loader = DataLoader(
            train,
            global_batch_size=options.global_batch_size,
            shuffle=True,
            drop_last=True,
            seed=options.seed,
            augment=imagenet_train(options.size),
            device=device,
        )
        self.model = make_model(len(train.classes or ())).to(device)
        self.trained = self.model
        if dist.is_initialized():
            self.trained = nn.parallel.DistributedDataParallel(self.model)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=options.lr, momentum=0.9)

    def parts(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "loader": self.loader}

    def save(self) -> None:
        state = {name: part.state_dict() for name, part in self.parts().items()}
        if not dist.is_initialized() or dist.get_rank() == 0:  # the loader's is the same on all
            written = self.path.with_suffix(".new")
            torch.save(state, written)
            os.replace(written, self.path)
            written.write_text(json.dumps(state["loader"]))
            os.replace(written, self.path.with_suffix(".json"))

    def resume(self) -> None:
        if self.path.exists():
            saved = torch.load(self.path, map_location=self.device, weights_only=True)
            for name, part in self.parts().items():
                part.load_state_dict(saved[name])

    def step(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        loss = nn.functional.cross_entropy(self.trained(images), labels)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.detach()


@torch.no_grad()
def accuracy(model: nn.Module, loader: DataLoader, device: torch.device) -> float:
    """Over all ranks, each sample once: `valid` is False where a batch was filled up."""
    counts = torch.zeros(2, device=device)
    model.eval()
    for images, labels, valid in loader:
        right = model(images).argmax(1) == labels
        counts += torch.stack([(right & valid).sum(), valid.sum()])
    model.train()
    if dist.is_initialized():
        dist.all_reduce(counts)
    return float(counts[0] / counts[1])


def main() -> None:
    options = parsed()
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("penstock").setLevel(logging.INFO)  # who reads what, when nodes have changed
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    if "RANK" in os.environ:  # under torchrun
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    is_first = not dist.is_initialized() or dist.get_rank() == 0
    training = Training(options, device)
    training.resume()
    evaluation = None
    if options.val:
        evaluation = DataLoader(
            opened(options.val, options),
            global_batch_size=options.global_batch_size,
            pad="mask",
            augment=imagenet_eval(options.size),
            device=device,
        )
    loader, steps = training.loader, 0
    if options.metrics_port:
        serve_metrics(loader, port=options.metrics_port + loader.world.local_rank, host="0.0.0.0")
    for epoch in range(loader.epoch, options.epochs):
        loss = torch.zeros(())
        for images, labels in loader:
            loss = training.step(images, labels)
            steps += 1
            if steps % options.checkpoint_every == 0:
                training.save()
            if steps == options.stop_after:
                training.save()
                break
        if steps == options.stop_after:
            break
        training.save()
        found = (
            ""
            if evaluation is None
            else f", accuracy {accuracy(training.model, evaluation, device):.1%}"
        )
        if is_first:
            print(f"epoch {epoch}: {steps} steps, loss {float(loss):.3f}{found}", flush=True)
    if is_first:
        print(loader.statistics())
    loader.close()
    if evaluation is not None:
        evaluation.close()
    if dist.is_initialized():
        dist.barrier()  # the first rank holds the store
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
