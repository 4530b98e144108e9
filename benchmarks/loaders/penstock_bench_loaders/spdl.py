"""Play SPDL: a pipeline of threads over functions that release the GIL."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.pipeline.bench.adapters import (
    IMAGE_FOLDER,
    IMAGE_MODULES,
    Adapter,
    list_files,
    read_bytes,
)
from penstock_bench_loaders.simplejpeg import IMAGE_PACKAGES, fastest_crop, quiet_opencv

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.pipeline.bench.adapters import Batches, Files, PlayedLoader, Work


def order(files: Files, seed: int) -> Iterator[tuple[str, int, int]]:
    """Yield (path, label, number) endlessly, shuffled again each epoch; the number keys the
    draws."""
    pairs = files.pairs()
    numbers = itertools.count()
    for epoch in itertools.count():
        for index in np.random.default_rng((seed, epoch)).permutation(len(pairs)).tolist():
            yield *pairs[index], next(numbers)


class SpdlLoader:
    def __init__(self, work: Work) -> None:
        from spdl.pipeline import PipelineBuilder

        quiet_opencv()
        crop = fastest_crop(work.size)

        def decode(sample: tuple[str, int, int]) -> tuple[Any, int]:
            path, label, number = sample
            return crop(read_bytes(path), np.random.default_rng((work.seed, number))), label

        self.pipeline = (
            PipelineBuilder()
            .add_source(order(list_files(work.folder), work.seed))
            .pipe(decode, concurrency=work.workers)
            .aggregate(work.batch_size, drop_last=True)
            .pipe(collate)
            .add_sink(2)
            .build(num_threads=work.workers)
        )

    def batches(self) -> Batches:
        with self.pipeline.auto_stop():
            yield from self.pipeline.get_iterator()

    def close(self) -> None:
        del self.pipeline


def collate(samples: list[tuple[Any, int]]) -> Any:
    import torch

    images, labels = zip(*samples, strict=True)
    return torch.from_numpy(np.stack(images)), torch.tensor(labels)


def build(work: Work) -> PlayedLoader:
    return SpdlLoader(work)


ADAPTERS = (
    Adapter(
        name="spdl",
        title="SPDL",
        needs=("spdl.pipeline",),
        imports=(*IMAGE_MODULES, "spdl.pipeline"),
        install=f"pip install spdl {IMAGE_PACKAGES}",
        reads=IMAGE_FOLDER,
        decodes="ours",
        distribution="spdl",
        build=build,
    ),
)
