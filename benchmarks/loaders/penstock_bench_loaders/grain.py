"""Play Grain: a random-access source of files, its global shuffle, worker processes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from penstock.pipeline.bench.adapters import (
    IMAGE_FOLDER,
    IMAGE_MODULES,
    Adapter,
    RandomCropTransform,
    list_files,
    read_bytes,
)
from penstock_bench_loaders.simplejpeg import IMAGE_PACKAGES, fastest_crop, quiet_opencv

if TYPE_CHECKING:
    import numpy as np

    from penstock.pipeline.bench.adapters import Batches, Files, PlayedLoader, Work


class GrainSource:
    """A random-access source of (encoded bytes, label), by Grain's protocol."""

    def __init__(self, files: Files) -> None:
        self._pairs = files.pairs()

    def __len__(self) -> int:
        return len(self._pairs)

    def __getitem__(self, index: Any) -> tuple[bytes, int]:
        path, label = self._pairs[int(index)]
        return read_bytes(path), label


class GrainTransform:
    """Decode and crop one sample. Picklable, for worker processes."""

    def __init__(self, crop: RandomCropTransform) -> None:
        self._crop = crop

    def __call__(self, sample: tuple[bytes, int], rng: np.random.Generator) -> tuple[Any, int]:
        encoded, label = sample
        return self._crop(encoded, rng), label


class GrainLoader:
    def __init__(self, work: Work) -> None:
        import grain

        self.dataset = (
            grain.MapDataset.source(GrainSource(list_files(work.folder)))
            .seed(work.seed)
            .shuffle()
            .repeat()
            .random_map(GrainTransform(fastest_crop(work.size)))
            .batch(work.batch_size, drop_remainder=True)
            # One thread, as a worker uses one core, and the default of two batches ahead.
            .to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=1))
            .mp_prefetch(
                grain.MultiprocessingOptions(num_workers=work.workers, per_worker_buffer_size=2),
                worker_init_fn=one_thread,
            )
        )
        self.iterator: Any = None

    def batches(self) -> Batches:
        import torch

        self.iterator = iter(self.dataset)
        for images, labels in self.iterator:
            yield torch.from_numpy(images), torch.from_numpy(labels)

    def close(self) -> None:
        if self.iterator is not None:
            self.iterator.close()


def one_thread(worker: int, workers: int) -> None:
    del worker, workers
    quiet_opencv()


def build(work: Work) -> PlayedLoader:
    return GrainLoader(work)


ADAPTERS = (
    Adapter(
        name="grain",
        title="Grain",
        needs=("grain",),
        imports=(*IMAGE_MODULES, "grain"),
        install=f"pip install grain {IMAGE_PACKAGES}",
        reads=IMAGE_FOLDER,
        decodes="ours",
        distribution="grain",
        build=build,
    ),
)
