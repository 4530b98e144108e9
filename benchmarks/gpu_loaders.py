"""The loaders that `benchmarks.gpu` compares, each with its best settings for a GPU, on the same
images.

The work is that of `pipeline.bench.adapters.work`, decoded and augmented on the device: batches of
float32 (n, 3, size, size) and int64 labels on it. All run in one process, one after the other: none
of them forks, and they share DALI's memory pool, like the training and validation loaders of a job.
device "cpu" is for tests.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

from penstock.pipeline.bench import endless
from penstock.pipeline.bench.adapters import AREA, DEVIATION, MEAN, RATIO, SMALL_CROP, list_files

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    import torch

    Batches = Iterator[tuple[torch.Tensor, torch.Tensor]]

Name = Literal["synthetic", "penstock", "penstock-resident", "dali"]
TITLES: dict[Name, str] = {
    "synthetic": "tensors that are there",
    "penstock": "Penstock",
    "penstock-resident": "Penstock, resident",
    "dali": "DALI's own mixed pipeline",
}
DALI_AHEAD = 2  # DALI's own default depth
# Shares of the images that DALI gives to the hardware decoder, of which its best is taken; 0.65 is
# its default.
HW_LOADS = (0.65, 0.0, 0.5, 0.8, 0.95)


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuWork:
    """The work of every loader. folder: `<class>/*.jpg`. pack: the same images.

    threads: CPU threads of a loader. hw_load: DALI's share for the hardware decoder. largest:
    height and width for which its decoder preallocates, 0 for none. windows: decoded alone, or cut
    out of whole images if a GPU can't do the first.
    """

    folder: Path
    pack: Path
    device: str
    batch_size: int
    size: int
    threads: int
    seed: int = 7
    hw_load: float = HW_LOADS[0]
    largest: tuple[int, int] = (0, 0)
    windows: Literal["decoder", "slice"] = "decoder"


class GpuLoader(Protocol):
    """A loader with endless batches."""

    def batches(self) -> Batches: ...
    def close(self) -> None: ...


class Synthetic:
    """One batch of noise on the device, repeated: the upper bound of a training step."""

    def __init__(self, work: GpuWork) -> None:
        import torch

        generator = torch.Generator(work.device).manual_seed(work.seed)
        shape = (work.batch_size, 3, work.size, work.size)
        on_device: dict[str, Any] = {"generator": generator, "device": work.device}
        images = torch.randn(shape, **on_device)
        self._batch = images, torch.randint(2, (work.batch_size,), **on_device)

    def batches(self) -> Batches:
        while True:
            yield self._batch

    def close(self) -> None:
        del self._batch


class Penstock:
    """Penstock as its documentation recommends for a GPU."""

    def __init__(self, work: GpuWork, *, resident: bool = False) -> None:
        from penstock import DataLoader, Dataset, Decode, imagenet_train

        self._loader = DataLoader(
            Dataset(work.pack),
            batch_size=work.batch_size,
            shuffle=True,
            num_workers=work.threads,
            drop_last=True,
            seed=work.seed,
            augment=(Decode(windows=work.windows), *imagenet_train(work.size)[1:]),
            device=work.device,
            resident=resident,
        )

    def batches(self) -> Batches:
        return endless(self._loader)

    def close(self) -> None:
        self._loader.close()


class Dali:
    """DALI's reader, decoder ("mixed": the hardware decoder and CUDA) and operators, passed to
    torch on its current stream."""

    def __init__(self, work: GpuWork) -> None:
        self._pipe = dali_pipeline(work)
        self._pipe.build()
        self._on_gpu = work.device.startswith("cuda")

    def batches(self) -> Batches:
        import torch
        from torch.utils.dlpack import from_dlpack

        while True:
            stream = torch.cuda.current_stream() if self._on_gpu else None
            images, labels = self._pipe.run(stream)
            yield (
                from_dlpack(images.as_tensor()),
                from_dlpack(labels.as_tensor()).squeeze(1).long(),
            )

    def close(self) -> None:
        del self._pipe


def dali_pipeline(work: GpuWork) -> Any:
    """Define DALI's pipeline for the work, without building it."""
    import torch
    from nvidia.dali import fn, pipeline_def, types

    files = list_files(work.folder)
    on_gpu = work.device.startswith("cuda")
    device_id = (torch.device(work.device).index or 0) if on_gpu else None
    decoding = dali_decoding(work)

    @pipeline_def(  # type: ignore[untyped-decorator]
        batch_size=work.batch_size,
        num_threads=work.threads,
        device_id=device_id,
        seed=work.seed,
        prefetch_queue_depth=DALI_AHEAD,
    )
    def imagenet() -> Any:
        encoded, labels = fn.readers.file(
            files=files.paths, labels=files.labels, random_shuffle=True, name="reader"
        )
        crops: dict[str, Any] = {
            "random_area": list(AREA),
            "random_aspect_ratio": list(RATIO),
            "num_attempts": 10,
        }
        resized: dict[str, Any] = {  # without the filter where few crops need it: faster
            "size": [work.size, work.size],
            "interp_type": types.INTERP_LINEAR,
            "antialias": work.size < SMALL_CROP,
        }
        if work.windows == "slice":
            images = fn.decoders.image(encoded, output_type=types.RGB, **decoding)
            images = fn.random_resized_crop(images, **crops, **resized)
        else:
            images = fn.decoders.image_random_crop(
                encoded, output_type=types.RGB, **crops, **decoding
            )
            images = fn.resize(images, **resized)
        images = fn.crop_mirror_normalize(
            images,
            dtype=types.FLOAT,
            output_layout="CHW",
            mean=list(MEAN),
            std=list(DEVIATION),
            mirror=fn.random.coin_flip(),
        )
        return images, labels.gpu() if on_gpu else labels

    return imagenet()


def dali_decoding(work: GpuWork) -> dict[str, Any]:
    """Return the decoder's arguments that differ between devices. Memory for the largest image is
    preallocated, because later growth stops the device."""
    if not work.device.startswith("cuda"):
        return {}
    height, width = work.largest
    return {
        "device": "mixed",
        "hw_decoder_load": work.hw_load,
        "preallocate_height_hint": height,
        "preallocate_width_hint": width,
    }


LOADERS: dict[Name, Callable[[GpuWork], GpuLoader]] = {
    "synthetic": Synthetic,
    "penstock": Penstock,
    "penstock-resident": lambda work: Penstock(work, resident=True),
    "dali": Dali,
}


@contextlib.contextmanager
def opened(name: Name, work: GpuWork) -> Iterator[Batches]:
    """Yield the loader's batches; close the loader afterwards."""
    loader = LOADERS[name](work)
    try:
        yield loader.batches()
    finally:
        loader.close()
