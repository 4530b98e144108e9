"""Train with torchft: replicas die and come back, and the job goes on without a restart.

    torchft_lighthouse --min_replicas 1 --join_timeout_ms 10000             # on a host that stays
    python examples/torchft/torchft_train.py TRAIN --lighthouse http://host:29510 --replica 0
    …                                                 the same with --replica 1, 2, …, one a GPU

torchft asks before each step who is in it. Where that has changed, or a step wasn't committed, the
loader rejoins at torchft's step: the global batches are those of a job that nothing happens to.
A replica that is started again gets a survivor's model and loader state.
"""

from __future__ import annotations

import argparse
import socket
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo
from torchft.process_group import create_store_client

from penstock import DataLoader, Dataset, DiskCache, Peers, World, imagenet_train

if TYPE_CHECKING:
    from collections.abc import Iterator

PATIENCE = timedelta(seconds=60)


class Members(ProcessGroupGloo):
    """torchft's group, which notes the store of the members that it is told to have."""

    store = ""

    def configure(self, store_addr: str, *args: Any, **kwargs: Any) -> None:
        super().configure(store_addr, *args, **kwargs)
        self.store = store_addr


class Training:
    """Model, optimizer and loader of one replica."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        cache = None
        if options.cache:
            peers = (
                Peers(options.peers, token_file=options.peer_token_file) if options.peers else None
            )
            cache = DiskCache(options.cache, max_bytes=options.cache_bytes, peers=peers)
        train = Dataset(options.train, cache=cache)
        self.loader = DataLoader(
            train,
            global_batch_size=options.global_batch_size,
            shuffle=True,
            drop_last=True,
            seed=options.seed,
            augment=imagenet_train(options.size),
            device=self.device,
            world=World(0, 1),  # until the first quorum
        )
        self.model = make_model(len(train.classes or ())).to(self.device)
        self.members = Members(timeout=PATIENCE)
        # The store of this replica, which others reach by the host's name.
        host = options.host or socket.gethostname()
        self.store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)
        self.manager = Manager(
            pg=self.members,
            load_state_dict=self.load_state_dict,
            state_dict=self.state_dict,
            min_replica_size=options.min_replicas,
            use_async_quorum=False,  # a batch follows from who is in
            timeout=PATIENCE,
            rank=0,
            world_size=1,
            store_addr=host,
            store_port=self.store.port,
            hostname=host,
            lighthouse_addr=options.lighthouse,
            replica_id=f"replica_{options.replica}",
        )
        self.trained = DistributedDataParallel(self.manager, self.model)
        sgd = torch.optim.SGD(self.model.parameters(), lr=options.lr, momentum=0.9)
        self.optimizer = Optimizer(self.manager, sgd)
        self._joined = ""

    def state_dict(self) -> dict[str, Any]:
        parts = {"model": self.model, "optimizer": self.optimizer, "loader": self.loader}
        return {name: part.state_dict() for name, part in parts.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.loader.load_state_dict(state["loader"])

    def join(self) -> None:
        """Go on as one of the members of now, at the first step that isn't committed."""
        manager, store = self.manager, None
        if self.members.store != self._joined:  # other members: they compare what they read
            self._joined = self.members.store
            store = dist.PrefixStore("penstock", create_store_client(self._joined, PATIENCE))
        elif self.loader.step == manager.current_step():
            return
        world = World(manager.participating_rank(), manager.num_participants())
        self.loader.rejoin(world, step=manager.current_step(), store=store)

    def steps(self, until: int) -> None:
        batches = endless(self.loader)
        while self.manager.current_step() < until:
            self.optimizer.zero_grad()  # asks who is in; a new replica gets its state here
            self.join()
            images, labels = next(batches)
            # Slices differ by a sample at most, and torchft takes the mean over replicas.
            loss = nn.functional.cross_entropy(self.trained(images), labels)
            loss.backward()
            self.optimizer.step()  # if all came to here
            step, count = self.manager.current_step(), self.manager.num_participants()
            if self.manager.participating_rank() == 0:
                print(
                    f"{step} steps, {count} replicas, loss {float(loss.detach()):.3f}", flush=True
                )


def endless(loader: DataLoader) -> Iterator[Any]:
    while True:
        yield from loader


def make_model(classes: int) -> nn.Module:
    """Put yours here. All replicas begin with the first one's weights."""
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, stride=2), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(32, classes),
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description="Train with torchft.")
    parser.add_argument("train", help="any URL of a dataset of labelled images")
    parser.add_argument("--lighthouse", required=True, help="http://host:29510")
    parser.add_argument("--replica", type=int, required=True, help="another number on each")
    parser.add_argument("--host", help="by which other nodes reach this one; its name by default")
    parser.add_argument("--min-replicas", type=int, default=1)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--global-batch-size", type=int, default=256, help="over all replicas")
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cache", help="folder on this node's NVMe, for remote data")
    parser.add_argument("--cache-bytes", default="500GB")
    parser.add_argument("--peers", metavar="HOST:PORT", help="this node's own address")
    parser.add_argument("--peer-token-file", help="the nodes' secret")
    options = parser.parse_args()
    training = Training(options)
    try:
        training.steps(options.steps)
        if training.manager.participating_rank() == 0:
            print(training.loader.statistics())
    finally:
        training.loader.close()
        training.manager.shutdown()


if __name__ == "__main__":
    main()
