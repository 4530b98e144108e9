"""Play WebDataset: tar shards, shuffled by shard and in a buffer, batched in the workers."""

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

NAME = "webdataset"
SHARDS = 16  # at least; each worker needs some to shuffle
SHARD_BYTES = 64e6
BUFFER = 1000  # samples of the shuffle buffer in its documentation


class WebDatasetTransform:
    """Decode a sample of a WebDataset, {"jpg": bytes, "cls": digits, ...}. Picklable."""

    def __init__(self, crop: RandomCropTransform) -> None:
        self._transform = TorchWorkerTransform(crop)

    def __call__(self, sample: dict[str, bytes]) -> tuple[Any, int]:
        return self._transform(sample["jpg"], int(sample["cls"]))


def write(files: Files, folder: Path) -> None:
    """Write the files' bytes as `shard-000000.tar` …"""
    import webdataset

    most = -(-len(files) // SHARDS)
    with webdataset.ShardWriter(
        str(folder / "shard-%06d.tar"), maxcount=most, maxsize=SHARD_BYTES, verbose=0
    ) as sink:
        for number, (path, label) in enumerate(files.pairs()):
            encoded = read_bytes(path)
            sink.write({"__key__": f"{number:09d}", "jpg": encoded, "cls": str(label).encode()})


def prepare(work: Work) -> None:
    converted(work, NAME, write)


def build(work: Work) -> PlayedLoader:
    import webdataset

    shards = sorted(map(str, converted(work, NAME, write).glob("*.tar")))
    dataset = (
        webdataset.WebDataset(shards, shardshuffle=len(shards), repeat=True, seed=work.seed)
        .shuffle(BUFFER)
        .map(WebDatasetTransform(fastest_crop(work.size)))
        .batched(work.batch_size, collation_fn=collate, partial=False)
    )
    return TorchDataLoader(
        webdataset.WebLoader(
            dataset,
            batch_size=None,
            shuffle=False,
            num_workers=work.workers,
            worker_init_fn=one_core,
        )
    )


def collate(samples: list[tuple[Any, int]]) -> Any:
    from torch.utils.data import default_collate

    return default_collate(samples)


ADAPTERS = (
    Adapter(
        name="webdataset",
        title="WebDataset",
        needs=("webdataset",),
        imports=(*IMAGE_MODULES, "webdataset"),
        install=f"pip install webdataset {IMAGE_PACKAGES}",
        reads="tar files of the same bytes",
        decodes="ours",
        converts=True,
        distribution="webdataset",
        build=build,
        prepare=prepare,
    ),
)
