"""Verify images by decoding them in full, before they may enter a dataset.

The header is read first: a file that claims 65,535 x 65,535 pixels is turned away before anything
of that size is reserved, and one without a readable header would crash DALI (see `graph`), as
would some damaged JPEG 2000 files, which Pillow therefore decodes first, as it does those whose
damage DALI passes over (see `image_checks`). The rest is decoded whole, in groups that are bounded
in pixels; a group that fails is halved until each bad image stands alone, so good images are never
lost with bad ones. Formats that DALI decodes by other code where a recipe asks for a window are
decoded by halves too.

What no decode can find: damage inside a compressed stream that keeps its structure decodes to wrong
pixels.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.augment.dali_library import disown_pipeline, load_dali
from penstock.augment.decode_failures import failing_rows
from penstock.augment.image_checks import (
    Header,
    capped_header,
    needs_pillow_check,
    pillow_refusal,
    warn_of_values,
)
from penstock.cache import ClosedError, ConfigError, ordered, watch
from penstock.cache.base import usable_cores
from penstock.readers import MAX_PIXELS, ImageFacts, Rejection

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from typing import Self

    from penstock.readers import Encoded

# Larger groups are not faster (64, 128, 256 measured), and a bad sample costs more repeats.
_GROUP_SAMPLES = 64
_HALVED_CODECS = ("bmp", "tiff", "webp")


class ImageVerifier:
    """Decodes images to find out whether they decode. Build once, call often; one thread calls."""

    def __init__(self, *, threads: int | None = None, max_pixels: int = MAX_PIXELS) -> None:
        """threads: that decode, None: all usable cores. max_pixels: a larger image is rejected.

        Raises ConfigError (no DALI).
        """
        cores = usable_cores()
        self._threads = cores if threads is None else threads
        if self._threads < 1 or max_pixels < 1:
            raise ConfigError(
                f"ImageVerifier: got threads={threads} and max_pixels={max_pixels}, wanted at "
                "least 1."
            )
        self._max_pixels = max_pixels
        dali = load_dali()
        self._tensor, self._tensors = dali.tensors.TensorCPU, dali.tensors.TensorListCPU
        self._build = functools.partial(_decoder, dali, self._threads)
        self._pipe: Any = self._build()
        self._windows: Any = None  # built when needed
        watch(self)

    def disown(self) -> None:
        """Close this verifier in a forked child, where DALI's threads aren't."""
        pipe, windows = self._pipe, self._windows
        self.close()
        disown_pipeline(pipe)
        disown_pipeline(windows)

    def __call__(self, samples: Sequence[Encoded]) -> list[ImageFacts | Rejection]:
        """Facts of each sample that decodes, else why not; in the order of `samples`.

        Never raises for a bad sample. Raises ClosedError after close().
        """
        if self._pipe is None:
            raise ClosedError("This verifier is closed; make a new one.")
        verdicts: dict[int, ImageFacts | Rejection] = {}
        good: dict[int, Header] = {}
        for row, sample in enumerate(samples):
            header = capped_header(sample, max_pixels=self._max_pixels)
            if isinstance(header, Header):
                good[row] = header
            else:
                verdicts[row] = header

        def decode(rows: list[int]) -> None:
            shapes = self.decoded_shapes([samples[row] for row in rows])
            halves = [
                (samples[row], shape)
                for row, shape in zip(rows, shapes, strict=True)
                if good[row].codec in _HALVED_CODECS
            ]
            if halves:
                self._decode_halves(*zip(*halves, strict=True))
            verdicts.update((row, _facts(shapes[i], good[row])) for i, row in enumerate(rows))

        for group in self._groups(good):
            verdicts.update(self._refused(group, samples))
            group = [row for row in group if row not in verdicts]
            for row, reason in failing_rows(group, decode).items():
                verdicts[row] = Rejection(f"truncated or damaged: {reason}")
        passed = [row for row in good if isinstance(verdicts[row], ImageFacts)]
        warn_of_values([samples[row] for row in passed], rounded=True)
        return [verdicts[row] for row in range(len(samples))]

    def close(self) -> None:
        """Release DALI's threads. Safe to call twice."""
        self._pipe = self._windows = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _groups(self, headers: dict[int, Header]) -> Iterator[list[int]]:
        """Samples to decode together: max_pixels at most, so memory is bounded by one image's."""
        group: list[int] = []
        pixels = 0
        for i, header in headers.items():
            if group and (
                pixels + header.pixels > self._max_pixels or len(group) == _GROUP_SAMPLES
            ):
                yield group
                group, pixels = [], 0
            group.append(i)
            pixels += header.pixels
        if group:
            yield group

    def _refused(self, rows: list[int], samples: Sequence[Encoded]) -> dict[int, Rejection]:
        """Those that DALI mustn't see, among the samples of these rows."""
        doubtful = [row for row in rows if needs_pillow_check(samples[row])]
        looks = ordered(
            lambda row: pillow_refusal(samples[row]),
            doubtful,
            workers=self._threads,
            ahead=_GROUP_SAMPLES,
        )
        found = zip(doubtful, looks, strict=True) if doubtful else ()
        return {row: why for row, why in found if why is not None}

    def decoded_shapes(self, encoded: list[Encoded]) -> list[tuple[int, int]]:
        """Decode images and return their (height, width). Raises RuntimeError as DALI does."""
        shapes = self._run(self._pipe, encoded).as_array()
        return [(int(height), int(width)) for height, width, _ in shapes]

    def _decode_halves(self, encoded: Sequence[Encoded], shapes: Sequence[tuple[int, int]]) -> None:
        """Decode windows of images, as training does. Raises RuntimeError as DALI does."""
        if self._windows is None:
            self._windows = self._build(windows=True)
        sides = np.array(shapes, np.int32)
        rows = np.arange(len(sides))
        longer = sides.argmax(axis=1)
        half = sides.copy()
        half[rows, longer] = (half[rows, longer] + 1) // 2
        for start in (np.zeros_like(sides), sides - half):
            self._run(self._windows, encoded, start=list(start), shape=list(half))

    def _run(self, pipe: Any, encoded: Sequence[Encoded], **arguments: Any) -> Any:
        views = self._tensors([self._tensor(view) for view in encoded], contiguous=False)
        pipe.feed_input("encoded", views)
        for name, values in arguments.items():
            pipe.feed_input(name, values)
        pipe.schedule_run()
        return pipe.outputs()[0]


def verify_images(
    samples: Sequence[Encoded], *, threads: int | None = None, max_pixels: int = MAX_PIXELS
) -> list[ImageFacts | Rejection]:
    """Facts of each image that decodes fully, else why not; in the order of `samples`.

    samples: uint8 of shape (bytes,) each. `ImageVerifier` saves building the decoder, some
    milliseconds, for each call. Raises ConfigError; never for a bad sample.
    """
    with ImageVerifier(threads=threads, max_pixels=max_pixels) as verifier:
        return verifier(samples)


def _decoder(dali: Any, threads: int, *, windows: bool = False) -> Any:
    """A DALI pipeline from encoded bytes to the shapes of decoded pixels."""
    from nvidia.dali import fn, types

    pipe = dali.Pipeline(
        batch_size=_GROUP_SAMPLES,
        num_threads=threads,
        device_id=None,
        prefetch_queue_depth=1,
        exec_dynamic=True,
    )
    with pipe:
        encoded = fn.external_source(name="encoded", no_copy=True, dtype=types.UINT8, ndim=1)
        # RGB for grey ones too: it is what recipes ask for, and ANY_DATA corrupts the heap.
        options = {"output_type": types.RGB, "adjust_orientation": True}
        if windows:
            window = {
                name: fn.external_source(name=name, dtype=types.INT32, ndim=1)
                for name in ("start", "shape")
            }
            images = fn.decoders.image_slice(encoded, axes=[0, 1], **window, **options)
        else:
            images = fn.decoders.image(encoded, **options)
        pipe.set_outputs(images.shape())
    pipe.build()
    return pipe


def _facts(shape: tuple[int, int], header: Header) -> ImageFacts:
    height, width = shape
    return ImageFacts(height=height, width=width, channels=header.channels, codec=header.codec)
