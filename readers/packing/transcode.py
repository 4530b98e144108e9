"""Rewrite images while they are packed, so that they are smaller or faster to decode.

Masks, boxes and points are resized with their image. Progressive JPEGs take longer to decode than
baseline ones (`penstock bench` measures it). `baseline` rewrites them without loss by jpeglib. A
test on 125 progressive files (RGB, grey, CMYK; 4:4:4 to 4:2:0; EXIF, ICC, comments) kept all pixels
and metadata, and took 8 ms for each image of 480 x 406 on 4 threads; the files grew by 13 %.
PyTurboJPEG brings no library of its own, and imagecodecs has no lossless rewriting.
"""

from __future__ import annotations

import io
import os
import tempfile
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from crc32c import crc32c

from penstock.cache import ConfigError, MissingDependencyError, log
from penstock.cache.base import machine_remedy
from penstock.readers.fieldtypes import image_fields, image_of, is_progressive, untyped_places
from penstock.readers.formats.pack import PackSample
from penstock.readers.types import Encoded, Facts, Rejection

if TYPE_CHECKING:
    from collections.abc import Sequence

    from PIL.Image import Image as Picture

    from penstock.readers.fieldtypes import Schema

    Size = tuple[int, int]


QUALITY = 92
"""The default quality of rewritten images, which is usual for resized copies of ImageNet."""

# Pillow's modes that an 8-bit JPEG can store, without alpha, which DALI drops too. Images of other
# modes (CMYK, 16 bits) stay the same, because their colours would differ from those of DALI.
_TARGETS = {"1": "L", "L": "L", "LA": "L", "P": "RGB", "PA": "RGB", "RGB": "RGB", "RGBA": "RGB"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Transcode:
    """The rules for rewriting images while they are packed. Raises ConfigError.

    short_side: images with a longer one are resized to it, in pixels. quality: of rewritten images,
    1 to 100; without short_side, all images are rewritten. baseline: other progressive JPEGs are
    rewritten without loss. images: the fields that this applies to; None means all. Masks, boxes
    and points are resized with their image.
    """

    short_side: int | None = None
    quality: int | None = None
    baseline: bool = False
    images: Sequence[str] | None = None

    def __post_init__(self) -> None:
        if self.short_side is not None and self.short_side < 1:
            raise ConfigError(f"short_side: got {self.short_side}, wanted pixels, 1 or more.")
        if self.quality is not None and not 1 <= self.quality <= 100:
            raise ConfigError(f"quality: got {self.quality}, wanted 1 to 100, such as {QUALITY}.")
        if self.images is not None and not self.is_needed:
            raise ConfigError(
                "image: it names the fields that short_side, quality and baseline apply to. Add "
                "one of these."
            )
        if self.baseline:
            load_jpeglib()

    @property
    def is_needed(self) -> bool:
        return self.baseline or self.short_side is not None or self.quality is not None

    def settings(self) -> dict[str, Any]:
        """Return the settings for the manifest, which identify the pack. An option that isn't used
        is None."""
        is_default = self.quality is None and self.short_side is not None
        return {
            "short_side": self.short_side,
            "quality": QUALITY if is_default else self.quality,
            "baseline": True if self.baseline else None,
            "images": None if self.images is None else list(self.images),
        }

    def apply(self, sample: PackSample, schema: Schema) -> PackSample | Rejection:
        """Rewrite the images of a sample and resize the data that belongs to them. An image stays
        the same if no rule applies to it, or if Pillow can't decode it or store its colours in a
        JPEG."""
        values, facts = dict(sample.values), dict(sample.facts)
        for image in self.image_fields(schema):
            if image not in values:
                continue
            was = facts[image].shape
            values[image], facts[image] = self._image(values[image], facts[image])
            before, after = (was[0], was[1]), (facts[image].shape[0], facts[image].shape[1])
            if before == after:
                continue
            for name, type in schema.items():
                if name not in values or name == image or image_of(name, schema) != image:
                    continue
                try:
                    values[name] = type.resized(values[name], before, after)
                    if name in facts:
                        facts[name] = type.check(values[name], field=name)
                except ValueError as error:
                    text = f"{image}: the data that belongs to it can't be resized: {error}"
                    return Rejection(text)
        return PackSample(values=values, facts=facts)

    def check(self, schema: Schema) -> None:
        """Warn of fields that may belong to resized images but aren't declared so. Raises
        ConfigError as `image_fields` does."""
        self.image_fields(schema)
        for name in untyped_places(schema) if self.short_side is not None else ():
            log.warning(
                "The field \"%s\" isn't resized with the images, because the schema doesn't "
                "declare it as Boxes or Keypoints. If it holds places in an image, pack from "
                'Python: pack(source, destination, schema={"%s": Boxes(of=…, format=…)}, '
                "short_side=…).",
                name,
                name,
            )

    def image_fields(self, schema: Schema) -> tuple[str, ...]:
        """Return the image fields that are rewritten. Raises ConfigError for a name that isn't an
        image field."""
        fields = image_fields(schema, schema)
        wrong = [name for name in self.images or () if name not in fields]
        if wrong:
            raise ConfigError(f"image: got {wrong[0]!r}, wanted some of the images {list(fields)}.")
        return fields if self.images is None else tuple(self.images)

    def _image(self, sample: Encoded, facts: Facts) -> tuple[Encoded, Facts]:
        side, is_any = self.short_side, self.short_side is None and self.quality is not None
        is_due = is_any or (side is not None and min(facts.shape[:2]) > side)
        if is_due and (rewritten := self._rewritten(sample)) is not None:
            return rewritten
        if self.baseline and is_progressive(sample) and (same := baseline_twin(sample)) is not None:
            return same, Facts(crc32c(same), 0, len(same), facts.shape, facts.codec)
        return sample, facts

    def _rewritten(self, sample: Encoded) -> tuple[Encoded, Facts] | None:
        image = _decoded(sample)
        target = _TARGETS.get(image.mode) if image is not None else None
        if image is None or target is None:
            return None
        image = image.convert(target)
        if self.short_side is not None:
            from PIL.Image import Resampling

            short = min(image.size)
            width, height = (max(1, round(side * self.short_side / short)) for side in image.size)
            image = image.resize((width, height), Resampling.LANCZOS)
        buffer = io.BytesIO()
        quality = QUALITY if self.quality is None else self.quality
        image.save(buffer, "JPEG", quality=quality, progressive=False)
        data = np.frombuffer(buffer.getvalue(), np.uint8)
        shape = (image.height, image.width, len(image.getbands()))
        return data, Facts(crc32c(data), 0, len(data), shape, "jpeg")


def _decoded(sample: Encoded) -> Picture | None:
    """Decode an upright image, or return None if Pillow can't decode it; the verifying decoder may
    support more formats."""
    from PIL import Image as pillow
    from PIL import ImageOps

    try:
        with pillow.open(io.BytesIO(sample.data)) as image:
            return ImageOps.exif_transpose(image)
    except Exception as error:  # each of Pillow's decoders raises errors of its own
        if machine_remedy(error) is not None:
            raise
        return None  # the sample stays the same


def load_jpeglib() -> Any:
    """Import jpeglib. Raises MissingDependencyError."""
    try:
        import jpeglib
    except ImportError as error:
        raise MissingDependencyError(
            f"baseline: rewriting JPEGs without loss needs jpeglib, which can't be imported "
            f"({error}). Install it: pip install 'penstock[transcode]'. Or rewrite all images with "
            "quality=, which loses a little quality."
        ) from error
    return jpeglib


# Two threads that were in jpeglib at once have crashed the process.
_JPEGLIB = threading.Lock()


def baseline_twin(sample: Encoded) -> Encoded | None:
    """Rewrite the coefficients as a baseline JPEG. Return None unless every decoded pixel is the
    same.

    Raises MissingDependencyError without jpeglib.
    """
    jpeglib = load_jpeglib()
    with tempfile.TemporaryDirectory(prefix="penstock-") as folder:
        source, target = (os.path.join(folder, name) for name in ("progressive", "baseline"))
        with open(source, "wb") as file:
            file.write(sample.data)
        try:
            with _JPEGLIB:
                image = jpeglib.read_dct(source)
                image.progressive_mode = False
                image.write_dct(target)
        except (OSError, RuntimeError, ValueError) as error:  # jpeglib's, for what it can't rewrite
            if machine_remedy(error) is not None:
                raise
            return None
        data = np.fromfile(target, np.uint8)
    data.flags.writeable = False
    before, after = _decoded(sample), _decoded(data)
    is_same = before is not None and after is not None and before.mode == after.mode
    if not is_same or not np.array_equal(np.asarray(before), np.asarray(after)):
        return None
    return data
