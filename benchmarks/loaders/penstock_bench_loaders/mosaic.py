"""Play MosaicML Streaming: MDS shards of the files' bytes, its dataset and loader."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from penstock.pipeline.bench.adapters import (
    IMAGE_MODULES,
    Adapter,
    TorchDataLoader,
    TorchWorkerTransform,
    converted,
    read_bytes,
)
from penstock_bench_loaders.simplejpeg import fastest_crop, one_core

if TYPE_CHECKING:
    from pathlib import Path

    from penstock.pipeline.bench.adapters import Files, PlayedLoader, Work

NAME = "streaming"
SHARD_BYTES = 2**26  # its default, 64 MiB


def write(files: Files, folder: Path) -> None:
    """Write the files' bytes as MDS shards."""
    from streaming import MDSWriter

    with MDSWriter(
        out=str(folder), columns={"image": "bytes", "label": "int"}, size_limit=SHARD_BYTES
    ) as sink:
        for path, label in files.pairs():
            sink.write({"image": read_bytes(path), "label": label})


def prepare(work: Work) -> None:
    converted(work, NAME, write)


def build(work: Work) -> PlayedLoader:
    from streaming import StreamingDataLoader, StreamingDataset
    from streaming.base.util import clean_stale_shared_memory

    transform = TorchWorkerTransform(fastest_crop(work.size))

    class Images(StreamingDataset):  # type: ignore[misc]
        """A dataset that decodes in __getitem__, as Streaming's documentation recommends."""

        def __getitem__(self, at: Any) -> Any:
            sample = super().__getitem__(at)
            return transform(sample["image"], sample["label"])

    clean_stale_shared_memory()  # left by a killed run; Streaming refuses to start otherwise
    dataset = Images(
        local=str(converted(work, NAME, write)),
        shuffle=True,
        shuffle_seed=work.seed,
        batch_size=work.batch_size,
        num_canonical_nodes=1,
    )
    return TorchDataLoader(
        StreamingDataLoader(
            dataset,
            batch_size=work.batch_size,
            num_workers=work.workers,
            drop_last=True,
            persistent_workers=work.workers > 0,
            worker_init_fn=one_core,
        )
    )


ADAPTERS = (
    Adapter(
        name="streaming",
        title="MosaicML Streaming",
        needs=("streaming",),
        imports=(*IMAGE_MODULES, "streaming"),
        install="pip install mosaicml-streaming",
        reads="MDS shards of the same bytes",
        decodes="ours",
        converts=True,
        distribution="mosaicml-streaming",
        build=build,
        prepare=prepare,
    ),
)
