"""Penstock as its README tells to use it: over what it reads best, or over the folder itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.pipeline.bench.peers.work import endless

if TYPE_CHECKING:
    from pathlib import Path

    from penstock.pipeline.bench.peers.work import Batches, Peer, Work


class PenstockPeer:
    """Penstock's DataLoader over a local dataset."""

    def __init__(self, work: Work, *, url: Path) -> None:
        from penstock.augment import imagenet_train
        from penstock.pipeline import DataLoader
        from penstock.readers import Dataset

        self.loader = DataLoader(
            Dataset(url),
            batch_size=work.batch_size,
            shuffle=True,
            num_workers=work.workers,
            drop_last=True,
            seed=work.seed,
            augment=imagenet_train(work.size),
        )

    def batches(self) -> Batches:
        return endless(self.loader)

    def close(self) -> None:
        self.loader.close()


def build_over_pack(work: Work) -> Peer:
    return PenstockPeer(work, url=work.pack)


def build_over_folder(work: Work) -> Peer:
    return PenstockPeer(work, url=work.folder)
