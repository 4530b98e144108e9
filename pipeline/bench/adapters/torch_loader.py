"""Play torch's DataLoader over an image folder: worker processes, one a core, that persist."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Any

from penstock.pipeline.bench.adapters.adapter import (
    IMAGE_FOLDER,
    IMAGE_MODULES,
    Adapter,
    list_files,
)
from penstock.pipeline.bench.adapters.images import (
    RandomCropTransform,
    TorchWorkerTransform,
    one_thread,
    read_bytes,
)
from penstock.pipeline.bench.measured_run import endless

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from penstock.pipeline.bench.adapters.adapter import Batches, Files, PlayedLoader, Work


class FolderImages:
    """A map-style torch dataset over an image folder."""

    def __init__(self, files: Files, crop: RandomCropTransform) -> None:
        self._files = files.pairs()
        self._transform = TorchWorkerTransform(crop)

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        path, label = self._files[index]
        return self._transform(read_bytes(path), label)


class TorchDataLoader:
    """A torch DataLoader, plain or of another library; batches of (images, labels)."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def batches(self) -> Batches:
        return endless(self.loader)

    def close(self) -> None:
        # torch stops persistent workers only when the loader and its iterator are freed. They
        # refer to one another, so without a collection they would live into the next round.
        del self.loader
        gc.collect()


def build(
    work: Work, crop: RandomCropTransform, worker_init: Callable[[int], None] = one_thread
) -> PlayedLoader:
    """Build the loader. crop: decodes and crops an image. worker_init: called in each worker."""
    import torch
    from torch.utils.data import DataLoader

    dataset: Any = FolderImages(list_files(work.folder), crop)
    return TorchDataLoader(
        DataLoader(
            dataset,
            batch_size=work.batch_size,
            shuffle=True,
            num_workers=work.workers,
            drop_last=True,
            persistent_workers=work.workers > 0,
            worker_init_fn=worker_init,
            generator=torch.Generator().manual_seed(work.seed),
        )
    )


ADAPTERS = (
    # Pillow decodes and resizes, with its filter, as in torchvision.
    Adapter(
        name="torch",
        title="torch DataLoader + Pillow",
        needs=("PIL",),
        imports=IMAGE_MODULES,
        install="pip install pillow",
        reads=IMAGE_FOLDER,
        distribution="pillow",
        build=lambda work: build(work, RandomCropTransform(work.size)),
    ),
)
