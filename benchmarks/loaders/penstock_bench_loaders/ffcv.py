"""Play FFCV: a beton of the files' own bytes, its compiled pipeline, random order."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from penstock.pipeline.bench import endless
from penstock.pipeline.bench.adapters import (
    AREA,
    DEVIATION,
    MEAN,
    RATIO,
    Adapter,
    converted,
    read_bytes,
)

if TYPE_CHECKING:
    from pathlib import Path

    from penstock.pipeline.bench.adapters import Batches, Files, PlayedLoader, Work

NAME = "ffcv"
BETON = "images.beton"


class EncodedFiles:
    """The dataset of (JPEG bytes, label) that FFCV's writer reads."""

    def __init__(self, files: Files) -> None:
        self._pairs = files.pairs()

    def __len__(self) -> int:
        return len(self._pairs)

    def __getitem__(self, index: int) -> tuple[bytes, int]:
        path, label = self._pairs[index]
        return read_bytes(path), label


def write(files: Files, folder: Path) -> None:
    """Write a beton with the unchanged bytes of the JPEG files. FFCV's own field would encode the
    images again, and the other loaders would then decode different images."""
    import io

    import numpy as np
    from ffcv.fields import IntField, RGBImageField
    from ffcv.fields.rgb_image import IMAGE_MODES
    from ffcv.writer import DatasetWriter
    from PIL import Image

    class EncodedField(RGBImageField):  # type: ignore[misc]
        """A field that is written as JPEG bytes and read as its base class reads."""

        def encode(self, destination: Any, encoded: bytes, malloc: Any) -> None:
            with Image.open(io.BytesIO(encoded)) as image:
                width, height = image.size
            destination["mode"] = IMAGE_MODES["jpg"]
            destination["height"], destination["width"] = height, width
            destination["data_ptr"], storage = malloc(len(encoded))
            storage[:] = np.frombuffer(encoded, np.uint8)

    writer = DatasetWriter(
        str(folder / BETON), {"image": EncodedField(), "label": IntField()}, num_workers=1
    )
    writer.from_indexed_dataset(EncodedFiles(files))


def prepare(work: Work) -> None:
    converted(work, NAME, write)


class FfcvLoader:
    def __init__(self, work: Work) -> None:
        import numpy as np
        from ffcv.fields import RGBImageField
        from ffcv.fields.basics import IntDecoder
        from ffcv.fields.rgb_image import RandomResizedCropRGBImageDecoder
        from ffcv.loader import Loader, OrderOption
        from ffcv.transforms import (
            NormalizeImage,
            RandomHorizontalFlip,
            Squeeze,
            ToTensor,
            ToTorchImage,
        )

        self.loader = Loader(
            str(converted(work, NAME, write) / BETON),
            batch_size=work.batch_size,
            num_workers=work.workers,
            order=OrderOption.RANDOM,
            os_cache=True,
            seed=work.seed,
            drop_last=True,
            custom_fields={"image": RGBImageField},
            pipelines={
                "image": [
                    RandomResizedCropRGBImageDecoder(
                        (work.size, work.size), scale=AREA, ratio=RATIO
                    ),
                    RandomHorizontalFlip(),
                    NormalizeImage(np.array(MEAN), np.array(DEVIATION), np.float32),
                    ToTensor(),
                    # FFCV's own layout: CHW by strides, without a copy.
                    ToTorchImage(),
                ],
                "label": [IntDecoder(), ToTensor(), Squeeze()],
            },
        )

    def batches(self) -> Batches:
        return endless(self.loader)

    def close(self) -> None:
        del self.loader


def build(work: Work) -> PlayedLoader:
    return FfcvLoader(work)


ADAPTERS = (
    Adapter(
        name="ffcv",
        title="FFCV",
        needs=("ffcv",),
        imports=("ffcv.loader", "ffcv.transforms", "ffcv.fields"),
        install=(
            "apt install libopencv-dev libturbojpeg0-dev pkg-config g++, then pip install ffcv"
        ),
        reads="a beton of the same bytes",
        converts=True,
        distribution="ffcv",
        build=build,
        prepare=prepare,
    ),
)
