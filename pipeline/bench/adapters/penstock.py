"""Play Penstock as its README recommends: over a pack, its fastest format, or over the folder."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from penstock.pipeline.bench.adapters.adapter import IMAGE_FOLDER, Adapter
from penstock.pipeline.bench.measured_run import endless, import_all

if TYPE_CHECKING:
    from pathlib import Path

    from penstock.pipeline.bench.adapters.adapter import Batches, Work


class PenstockLoader:
    """Penstock's DataLoader over a local dataset."""

    def __init__(self, work: Work, *, url: Path) -> None:
        from penstock import DataLoader, Dataset, imagenet_train

        self.loader = DataLoader(
            Dataset(url, allow_left_out=1),
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


_OVER_PACK = Adapter(
    name="penstock",
    title="Penstock (pack)",
    needs=("nvidia.dali",),
    imports=("nvidia.dali.fn",),
    prepare=lambda _: import_all(),
    install="pip install 'penstock[dali]'",
    reads="its pack",
    build=lambda work: PenstockLoader(work, url=work.pack),
)
ADAPTERS = (
    _OVER_PACK,
    replace(
        _OVER_PACK,
        name="penstock-folder",
        title="Penstock (folder)",
        reads=IMAGE_FOLDER,
        build=lambda work: PenstockLoader(work, url=work.folder),
    ),
)
