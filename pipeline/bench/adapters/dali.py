"""Play DALI's own reader, decoder and crop: its documentation's ImageNet pipeline, on the CPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from penstock.pipeline.bench.adapters import adapter

if TYPE_CHECKING:
    from penstock.pipeline.bench.adapters.adapter import Batches, Work

SMALL_CROP = 112  # pixels; below, most windows of a photograph shrink by more than 2
DALI_AHEAD = 2  # DALI's own default depth


class DaliLoader:
    """DALI's pipeline without an iterator class; torch receives its outputs by DLPack, which is the
    cheapest way."""

    def __init__(self, work: Work) -> None:
        from nvidia.dali import fn, pipeline_def, types

        files = adapter.list_files(work.folder)

        @pipeline_def(  # type: ignore[untyped-decorator]
            batch_size=work.batch_size,
            num_threads=work.workers,
            device_id=None,
            seed=work.seed,
            prefetch_queue_depth=DALI_AHEAD,
        )
        def imagenet() -> Any:
            encoded, labels = fn.readers.file(
                files=files.paths, labels=files.labels, random_shuffle=True, name="reader"
            )
            # Decode only the window.
            images = fn.decoders.image_random_crop(
                encoded,
                output_type=types.RGB,
                random_area=list(adapter.AREA),
                random_aspect_ratio=list(adapter.RATIO),
                num_attempts=10,
            )
            # Penstock filters crops that shrink by more than 2. At 224 pixels these are few, so
            # this loader runs without the filter, a quarter faster; at small sizes they are many.
            images = fn.resize(
                images,
                size=[work.size, work.size],
                interp_type=types.INTERP_LINEAR,
                antialias=work.size < SMALL_CROP,
            )
            images = fn.crop_mirror_normalize(
                images,
                dtype=types.FLOAT,
                output_layout="CHW",
                mean=list(adapter.MEAN),
                std=list(adapter.DEVIATION),
                mirror=fn.random.coin_flip(),
            )
            return images, labels

        self.pipe = imagenet()
        self.pipe.build()

    def batches(self) -> Batches:
        from torch.utils.dlpack import from_dlpack

        while True:
            images, labels = self.pipe.run()
            yield (
                from_dlpack(images.as_tensor()),
                from_dlpack(labels.as_tensor()).squeeze(1).long(),
            )

    def close(self) -> None:
        del self.pipe


ADAPTERS = (
    adapter.Adapter(
        name="dali",
        title="DALI's own file reader",
        needs=("nvidia.dali",),
        imports=("nvidia.dali.fn",),
        install="pip install 'penstock[dali]'",
        reads=adapter.IMAGE_FOLDER,
        build=DaliLoader,
    ),
)
