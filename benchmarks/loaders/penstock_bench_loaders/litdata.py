"""Play LitData: chunks of the files' bytes that `optimize` writes, its dataset and loader."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from penstock.pipeline.bench.adapters import (
    IMAGE_MODULES,
    Adapter,
    RandomCropTransform,
    TorchDataLoader,
    TorchWorkerTransform,
    converted,
    read_bytes,
)
from penstock_bench_loaders.simplejpeg import IMAGE_PACKAGES, fastest_crop, one_core

if TYPE_CHECKING:
    from pathlib import Path

    from penstock.pipeline.bench.adapters import Files, PlayedLoader, Work

NAME = "litdata"
CHUNK_BYTES = "64MB"  # as in its documentation


def sample(pair: tuple[str, int]) -> dict[str, Any]:
    """Return one sample to store; runs in a process of LitData."""
    path, label = pair
    return {"image": read_bytes(path), "label": label}


class LitDataTransform:
    """Turn a stored sample into (tensor, label). Picklable."""

    def __init__(self, crop: RandomCropTransform) -> None:
        self._transform = TorchWorkerTransform(crop)

    def __call__(self, stored: dict[str, Any]) -> tuple[Any, int]:
        return self._transform(stored["image"], stored["label"])


def write(files: Files, folder: Path) -> None:
    from litdata import optimize

    optimize(
        fn=sample,
        inputs=files.pairs(),
        output_dir=str(folder),
        chunk_bytes=CHUNK_BYTES,
        num_workers=1,
        start_method="spawn",
        verbose=False,
    )


def prepare(work: Work) -> None:
    converted(work, NAME, write)


def build(work: Work) -> PlayedLoader:
    from litdata import StreamingDataLoader, StreamingDataset

    dataset = StreamingDataset(
        str(converted(work, NAME, write)),
        shuffle=True,
        drop_last=True,
        seed=work.seed,
        transform=LitDataTransform(fastest_crop(work.size)),
    )
    return TorchDataLoader(
        StreamingDataLoader(
            dataset,
            batch_size=work.batch_size,
            shuffle=True,
            drop_last=True,
            num_workers=work.workers,
            persistent_workers=work.workers > 0,
            worker_init_fn=one_core,
        )
    )


ADAPTERS = (
    Adapter(
        name="litdata",
        title="LitData",
        needs=("litdata",),
        imports=(*IMAGE_MODULES, "litdata.streaming.dataloader", "litdata.processing.functions"),
        install=f"pip install litdata {IMAGE_PACKAGES}",
        reads="its chunks of the same bytes",
        decodes="ours",
        converts=True,
        distribution="litdata",
        build=build,
        prepare=prepare,
    ),
)
