"""Verify images by decoding them in full, before they may enter a dataset.

The header is read first: a file that claims 65,535 x 65,535 pixels is rejected before memory of
that size is allocated, and a file without a readable header would crash DALI (see `graph`). Pillow
first decodes kinds of files that may crash DALI, or whose damage DALI ignores (see
`image_checks`). The other images are decoded in full, in groups with a limit of pixels; a failed
group is cut into parts until each bad image is alone, so no good image is rejected with a bad one.
Formats whose windows DALI decodes by other code are also decoded by halves.

A decode can't find damage that keeps the structure of a compressed stream, such as other pixels.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.augment.dali_library import RUN_SAMPLES, EncodedPipeline, decode_runs, fn, types
from penstock.augment.dali_nodes import source
from penstock.augment.decode_failures import failing_rows
from penstock.augment.image_checks import Header, capped_header, needs_pillow_check, pillow_refusal
from penstock.cache import ClosedError, ConfigError, ordered, watch
from penstock.cache.base import usable_cores
from penstock.readers import MAX_PIXELS, ImageFacts, Rejection

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Self

    from penstock.readers import Encoded

_HALVED_CODECS = ("bmp", "tiff", "webp")


class ImageVerifier:
    """A verifier that decodes images in full. Create it once and call it often, from one thread.

    threads: threads that decode; None: all usable cores. max_pixels: larger images are rejected.
    Raises ConfigError for invalid arguments or without DALI.
    """

    def __init__(self, *, threads: int | None = None, max_pixels: int = MAX_PIXELS) -> None:
        self._threads = usable_cores() if threads is None else threads
        if self._threads < 1 or max_pixels < 1:
            raise ConfigError(
                f"ImageVerifier: got threads={threads} and max_pixels={max_pixels}, wanted at "
                "least 1."
            )
        self._max_pixels = max_pixels
        self._pipe: EncodedPipeline | None = self._pipeline(windows=False)
        self._windows: EncodedPipeline | None = None  # built when needed
        watch(self)

    def _pipeline(self, *, windows: bool) -> EncodedPipeline:
        define = functools.partial(_shapes, windows=windows)
        return EncodedPipeline(define, batch_size=RUN_SAMPLES, threads=self._threads)

    def disown(self) -> None:
        """Close this verifier in a forked child, which doesn't have DALI's threads."""
        self.close()

    def __call__(self, samples: Sequence[Encoded]) -> list[ImageFacts | Rejection]:
        """Return the facts of each sample that decodes, or why it doesn't, in the order of
        `samples`.

        Never raises for a bad sample. Raises ClosedError after close().
        """
        if self._pipe is None:
            raise ClosedError("This verifier is closed; make a new one.")
        headers = [capped_header(sample, max_pixels=self._max_pixels) for sample in samples]
        good = {row: each for row, each in enumerate(headers) if isinstance(each, Header)}
        verdicts: dict[int, ImageFacts | Rejection] = {
            row: each for row, each in enumerate(headers) if isinstance(each, Rejection)
        }

        def decode(rows: list[int]) -> None:
            shapes = self.decoded_shapes([samples[row] for row in rows])
            halves = [
                (samples[row], shape)
                for row, shape in zip(rows, shapes, strict=True)
                if good[row].codec in _HALVED_CODECS
            ]
            if halves:
                self._decode_halves(*zip(*halves, strict=True))
            for row, (height, width) in zip(rows, shapes, strict=True):
                header = good[row]
                verdicts[row] = ImageFacts(
                    height=height, width=width, channels=header.channels, codec=header.codec
                )

        rows = list(good)
        for run in decode_runs([good[row].pixels for row in rows], self._max_pixels):
            group = [rows[place] for place in run]
            verdicts.update(self._refused(group, samples))
            group = [row for row in group if row not in verdicts]
            for row, reason in failing_rows(group, decode).items():
                verdicts[row] = Rejection(f"truncated or damaged: {reason}")
        return [verdicts[row] for row in range(len(samples))]

    def close(self) -> None:
        """Release DALI's threads. Safe to call twice."""
        self._pipe = self._windows = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _refused(self, rows: list[int], samples: Sequence[Encoded]) -> dict[int, Rejection]:
        """Return the rows whose samples DALI mustn't decode, with reasons."""
        doubtful = [row for row in rows if needs_pillow_check(samples[row])]
        refusals = ordered(
            lambda row: pillow_refusal(samples[row]),
            doubtful,
            workers=self._threads,
            ahead=RUN_SAMPLES,
        )
        found = zip(doubtful, refusals, strict=True) if doubtful else ()
        return {row: why for row, why in found if why is not None}

    def decoded_shapes(self, encoded: list[Encoded]) -> list[tuple[int, int]]:
        """Decode images and return their (height, width). Raises DALI's RuntimeError."""
        assert self._pipe is not None
        shapes = self._pipe.run(encoded).as_array()
        return [(int(height), int(width)) for height, width, _ in shapes]

    def _decode_halves(self, encoded: Sequence[Encoded], shapes: Sequence[tuple[int, int]]) -> None:
        """Decode two windows of each image, as training does. Raises DALI's RuntimeError."""
        if self._windows is None:
            self._windows = self._pipeline(windows=True)
        sides = np.array(shapes, np.int32)
        rows = np.arange(len(sides))
        longer = sides.argmax(axis=1)
        half = sides.copy()
        half[rows, longer] = (half[rows, longer] + 1) // 2
        for start in (np.zeros_like(sides), sides - half):
            self._windows.run(encoded, {"start": start, "shape": half})


def verify_images(
    samples: Sequence[Encoded], *, threads: int | None = None, max_pixels: int = MAX_PIXELS
) -> list[ImageFacts | Rejection]:
    """Return the facts of each image that decodes in full, or why it doesn't, in the order of
    `samples`.

    samples: uint8 of shape (bytes,) each. Each call builds a decoder, which takes some
    milliseconds; an `ImageVerifier` builds it once. Raises ConfigError; never for a bad sample.
    """
    with ImageVerifier(threads=threads, max_pixels=max_pixels) as verifier:
        return verifier(samples)


def _shapes(encoded: Any, *, windows: bool) -> list[Any]:
    """Return the node of the shapes of decoded pixels."""
    # RGB even for grey images, as in recipes; ANY_DATA corrupts the heap.
    options = {"output_type": types.RGB, "adjust_orientation": True}
    if not windows:
        return [fn.decoders.image(encoded, **options).shape()]
    start, shape = (source(name, "int32", 1) for name in ("start", "shape"))
    return [fn.decoders.image_slice(encoded, start, shape, axes=[0, 1], **options).shape()]
