"""Check encoded images: their headers before DALI decodes them, and their pixels by full decodes.

Headers: a sample whose header can't be parsed, or whose window is outside its image, ends the
process instead of failing a batch of DALI (see `graph`), and so do some damaged JPEG 2000 files. A
file that claims 65,535 x 65,535 pixels is rejected before memory of that size is allocated.

Damage: nvImageCodec 0.9 tries another decoder if one rejects a file. OpenCV's decodes damaged TIFF
and WebP files and animated PNGs, and leaves the memory of missing rows unwritten, so that pixels
differ from run to run. nvImageCodec's own bitmap decoder reads run-length codes and palettes as
pixels. Its OpenJPEG ends the process at some damaged JPEG 2000 files: SIGSEGV in
`opj_jp2_read_header`, depending on the earlier contents of its heap. So Pillow decodes these kinds
first. Plain JPEG and PNG don't need it: their decoders reject damaged files, except for JPEG scans.

`verify_images` decodes images in full, in groups with a limit of pixels, before they may enter a
dataset; a failed group is cut into parts until each bad image is alone, so no good image is
rejected with a bad one. Formats whose windows DALI decodes by other code are also decoded by
halves. A decode can't find damage that keeps the structure of a compressed stream, such as other
pixels.
"""

from __future__ import annotations

import functools
import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.augment.dali_nodes import source
from penstock.augment.dali_runs import (
    RUN_SAMPLES,
    EncodedPipeline,
    PipelinePlan,
    decode_runs,
    failing_rows,
    fn,
    types,
)
from penstock.cache import MissingDependencyError, ordered
from penstock.cache.base import machine_remedy, usable_cores
from penstock.readers import MAX_PIXELS, Encoded, EncodedBatch, ImageFacts, Rejection, pixel_refusal
from penstock.readers.fieldtypes import IMAGE_HEAD_BYTES, open_with_plugin, sniff, strict_pillow

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray


_JPEG2000_HEAD_BYTES = 8
_HALVED_CODECS = ("bmp", "tiff", "webp")
_REASON_CHARACTERS = 200
_PNG_CHUNKS_BYTES = 2**16  # a PNG's chunk for animations comes within these, before its pixels
_SAMPLES_PER_PIXEL, _PLANES, _SEPARATE = 277, 284, 2
_BMP_COMPRESSION = slice(30, 34)
# Pillow's messages about missing or broken data; it also rejects good files of unknown kinds.
_DAMAGE = re.compile(r"truncated|broken|decoder error -2|decoder object|next frame")
_SMALLEST_FILE_BYTES = 16  # no image format has a smaller header
# Sample types that DALI 2.4 decodes, by trial; int32 (TIFF) ends a run half-way.
_DECODABLE_DTYPES = ("uint8", "uint16", "float32")


def is_jpeg2000(sample: Encoded) -> bool:
    """Return True if bytes begin approximately as a JP2 file or a raw code stream: decoders check
    different parts of the signature."""
    head = sample[:_JPEG2000_HEAD_BYTES].tobytes()
    return head[4:8] == b"jP  " or head.startswith(b"\xff\x4f")


def _codec_for_pillow(sample: Encoded) -> str | None:
    """Return the codec of a file that Pillow must decode before DALI may, in about 1 us; None for
    others."""
    if is_jpeg2000(sample):
        return "jpeg2000"
    codec = sniff(sample[:IMAGE_HEAD_BYTES].tobytes())
    if codec == "bmp":
        return None if sample[_BMP_COMPRESSION].any() else codec
    if codec == "png":
        is_animated = b"acTL" in sample[:_PNG_CHUNKS_BYTES].tobytes().partition(b"IDAT")[0]
        return codec if is_animated else None
    return codec if codec in ("tiff", "webp") else None


def pillow_refusal(sample: Encoded, *, max_pixels: int = MAX_PIXELS) -> Rejection | None:
    """Decode a file by Pillow if it is of a kind that needs it, and return why DALI mustn't decode
    it.

    None: DALI may decode it, or Pillow doesn't know the format. Raises MemoryError, and
    MissingDependencyError for a JPEG 2000 file if Pillow was built without OpenJPEG.
    """
    codec = _codec_for_pillow(sample)
    if codec is None:
        return None
    is_2000 = codec == "jpeg2000"
    if is_2000:
        from PIL import features

        if not features.check_codec("jpg_2000"):
            raise MissingDependencyError(
                "Checking JPEG 2000 images needs a Pillow with OpenJPEG, and this one has none. "
                "Install Pillow's own wheel (pip install --force-reinstall pillow), or convert "
                "them to PNG."
            )
    try:
        with strict_pillow(), open_with_plugin(sample, codec) as image:
            too_large = pixel_refusal(*image.size, max_pixels=max_pixels)
            if is_2000 and too_large is not None:
                return too_large
            tags: Any = image.tag_v2 if codec == "tiff" else {}
            if tags.get(_PLANES) == _SEPARATE and tags.get(_SAMPLES_PER_PIXEL, 1) > 3:
                return Rejection(
                    "a TIFF of separate planes with an alpha channel, which DALI blends in: "
                    "convert it to PNG, or drop its alpha channel"
                )
            image.load()
    except Exception as error:  # each layer of Pillow raises its own kinds
        if machine_remedy(error) is not None:
            raise
        reason = " ".join(str(error).split())[:_REASON_CHARACTERS]
        if is_2000 or (isinstance(error, OSError) and _DAMAGE.search(reason)):
            return Rejection(
                f"truncated or damaged: a {codec} file that Pillow can't decode "
                f"({type(error).__name__}: {reason})"
            )
    return None


def read_header(sample: Encoded) -> ImageFacts | Rejection:
    """Return the header of an encoded image, before its orientation is applied, without decoding a
    pixel, in about 4 us."""
    from nvidia import nvimgcodec

    if len(sample) < _SMALLEST_FILE_BYTES:
        return Rejection(f"not an image: {len(sample)} byte(s)" if len(sample) else "empty file")
    try:
        stream = nvimgcodec.CodeStream(sample)
        dtype, codec, channels = str(stream.dtype), stream.codec_name, stream.num_channels
        height, width = stream.height, stream.width
    except (RuntimeError, ValueError):  # nvImageCodec can't parse the bytes
        return Rejection("not an image of a format that DALI decodes")
    except Exception as error:  # its binding's errors for partly parsed files
        if machine_remedy(error) is not None:
            raise
        return Rejection(
            f"its header can't be understood ({type(error).__name__}: {error}): convert it to "
            "JPEG, PNG or WebP"
        )
    if dtype not in _DECODABLE_DTYPES:
        return Rejection(f"its samples are {dtype}; DALI decodes {', '.join(_DECODABLE_DTYPES)}")
    if codec == "tiff" and channels == 2:
        return Rejection(
            "a TIFF of 2 channels, which DALI reads as colours: convert it to PNG, or drop its "
            "alpha channel"
        )
    return ImageFacts(height=height, width=width, channels=channels, codec=codec)


def _capped_header(sample: Encoded, *, max_pixels: int) -> ImageFacts | Rejection:
    """Return the header as `read_header` does, of unverified images of at most max_pixels. JPEG
    2000, which may end the process, is first decoded by Pillow. Raises MissingDependencyError."""
    refusal = pillow_refusal(sample, max_pixels=max_pixels) if is_jpeg2000(sample) else None
    header = refusal or read_header(sample)
    if isinstance(header, Rejection):
        return header
    return pixel_refusal(header.width, header.height, max_pixels=max_pixels) or header


def bad_headers(batch: EncodedBatch, *, max_pixels: int | None = None) -> dict[int, str]:
    """Return the rows that would crash DALI, with reasons: no header, another size than the stored
    one, or a JPEG 2000 file that Pillow can't decode.

    max_pixels: larger images are bad, too; None: the images were verified when they were indexed or
    packed.
    """
    bad: dict[int, str] = {}
    for row, (sample, dims) in enumerate(zip(batch.encoded, batch.dims.tolist(), strict=True)):
        # Verified images were within the limit at that time.
        most = max_pixels or max(MAX_PIXELS, dims[0] * dims[1])
        header = _capped_header(sample, max_pixels=most)
        if isinstance(header, Rejection):
            bad[row] = header.reason
        # Stored dims are upright, these may not be.
        elif sorted((header.height, header.width)) != sorted(dims):
            stored = " x ".join(map(str, dims))
            bad[row] = f"it is {header.height} x {header.width} pixels, and {stored} was stored"
    return bad


def verify_images(
    samples: Sequence[Encoded], *, threads: int | None = None, max_pixels: int = MAX_PIXELS
) -> list[ImageFacts | Rejection]:
    """Return the facts of each image that decodes in full, or why it doesn't, in the order of
    `samples`.

    samples: uint8 of shape (bytes,) each. threads: that decode; None: all usable cores. max_pixels:
    larger images are rejected. Each call builds a decoder, which takes some milliseconds. Raises
    MissingDependencyError; never raises for a bad sample.
    """
    workers = usable_cores() if threads is None else threads
    plan = PipelinePlan(batch_size=RUN_SAMPLES, threads=workers)
    full = EncodedPipeline(plan, _shapes)
    windows = functools.cache(lambda: EncodedPipeline(plan, _window_shapes))
    verdicts = [_capped_header(sample, max_pixels=max_pixels) for sample in samples]
    doubtful = [
        row
        for row, sample in enumerate(samples)
        if isinstance(verdicts[row], ImageFacts)
        and _codec_for_pillow(sample) not in (None, "jpeg2000")
    ]
    if doubtful:
        found = ordered(
            lambda row: pillow_refusal(samples[row]), doubtful, workers=workers, ahead=RUN_SAMPLES
        )
        for row, refusal in zip(doubtful, found, strict=True):
            verdicts[row] = refusal or verdicts[row]
    good = {row: each for row, each in enumerate(verdicts) if isinstance(each, ImageFacts)}

    def decode(rows: list[int]) -> None:
        encoded = [samples[row] for row in rows]
        sizes = full.run(encoded).as_array()[:, :2].astype(np.int32)
        halved = [at for at, row in enumerate(rows) if good[row].codec in _HALVED_CODECS]
        if halved:
            _decode_halves(windows(), [encoded[at] for at in halved], sizes[halved])
        for row, (height, width) in zip(rows, sizes.tolist(), strict=True):
            verdicts[row] = replace(good[row], height=height, width=width)

    pixels = [each.height * each.width for each in good.values()]
    places = list(good)
    for run in decode_runs(pixels, max_pixels):
        for row, reason in failing_rows([places[at] for at in run], decode).items():
            verdicts[row] = Rejection(f"truncated or damaged: {reason}")
    return verdicts


def _decode_halves(
    pipeline: EncodedPipeline, encoded: Sequence[Encoded], sizes: NDArray[np.int32]
) -> None:
    """Decode two windows of each image, as training does. Raises DALI's RuntimeError."""
    rows, longer = np.arange(len(sizes)), sizes.argmax(axis=1)
    half = sizes.copy()
    half[rows, longer] = (half[rows, longer] + 1) // 2
    for start in (np.zeros_like(sizes), sizes - half):
        pipeline.run(encoded, {"start": start, "shape": half})


def _shapes(encoded: Any) -> list[Any]:
    # RGB even for grey images, as in recipes; ANY_DATA corrupts the heap.
    return [fn.decoders.image(encoded, output_type=types.RGB, adjust_orientation=True).shape()]


def _window_shapes(encoded: Any) -> list[Any]:
    options: dict[str, Any] = {name: source(name, "int32", 1) for name in ("start", "shape")}
    options |= {"axes": [0, 1], "output_type": types.RGB, "adjust_orientation": True}
    return [fn.decoders.image_slice(encoded, **options).shape()]
