"""Full decodes of images, once, before they may enter a dataset.

The header is read first, so that a file which claims 65,535 x 65,535 pixels is turned away before
anything of that size is reserved. What passes is decoded whole by DALI, in groups that are bounded
in pixels; a group that fails is halved until each culprit stands alone, so good images are never
lost with bad ones.

What no decode can find: damage inside a JPEG's scan that keeps its structure decodes to wrong
pixels. libjpeg and nvImageCodec write what they dislike straight to the process's stderr.
"""

from __future__ import annotations

import os
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from augment.graph import load_dali, reason_of
from cache.errors import ClosedError, ConfigError
from readers.types import ImageFacts, Rejected

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from typing import Self

    from readers.types import Encoded

MAX_PIXELS = 2**27
"""Pixels of the largest image that is decoded: 134 million, 400 MB of RGB."""

# Larger groups are not faster (64, 128, 256 measured), and a bad sample costs more repeats.
_GROUP_SAMPLES = 64
_SMALLEST_FILE_BYTES = 16  # below that no image format has a header


@dataclass(frozen=True, slots=True)
class _Header:
    """What an image says of itself, before orientation. pixels: height times width."""

    pixels: int
    channels: int
    codec: str


class ImageVerifier:
    """Decodes images to find out whether they decode. Build once, call often; one thread calls."""

    def __init__(self, *, threads: int | None = None, max_pixels: int = MAX_PIXELS) -> None:
        """threads: that decode, None: all usable cores. max_pixels: a larger image is rejected.

        Raises ConfigError, MissingDependencyError (no DALI).
        """
        cores = len(os.sched_getaffinity(0))
        self._threads = cores if threads is None else threads
        if self._threads < 1 or max_pixels < 1:
            raise ConfigError(
                f"ImageVerifier: got threads={threads} and max_pixels={max_pixels}, wanted at "
                "least 1."
            )
        self._max_pixels = max_pixels
        dali = load_dali()
        self._tensor, self._tensors = dali.tensors.TensorCPU, dali.tensors.TensorListCPU
        self._pipe: Any = _decoder(dali, self._threads)

    def __call__(self, samples: Sequence[Encoded]) -> list[ImageFacts | Rejected]:
        """Facts of each sample that decodes, else why not; in the order of `samples`.

        Never raises for a bad sample. Raises ClosedError after close().
        """
        if self._pipe is None:
            raise ClosedError("This verifier is closed; make a new one.")
        headers = [_read_header(sample, self._max_pixels) for sample in samples]
        verdicts: list[ImageFacts | Rejected | None] = [
            header if isinstance(header, Rejected) else None for header in headers
        ]
        good = {i: header for i, header in enumerate(headers) if isinstance(header, _Header)}
        for group in self._groups(good):
            for i, shape in self._decode(samples, group):
                verdicts[i] = shape if isinstance(shape, Rejected) else _facts(shape, good[i])
        return [verdict for verdict in verdicts if verdict is not None]

    def close(self) -> None:
        """Release DALI's threads. Safe to call twice."""
        self._pipe = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _groups(self, headers: dict[int, _Header]) -> Iterator[list[int]]:
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

    def _decode(
        self, samples: Sequence[Encoded], group: list[int]
    ) -> Iterator[tuple[int, tuple[int, int] | Rejected]]:
        """Upright height and width of each sample of a group, or why it has none."""
        parts = deque([group])
        while parts:
            part = parts.popleft()
            try:
                shapes = self._shapes([samples[i] for i in part])
            except RuntimeError as error:
                if len(part) == 1:
                    yield part[0], Rejected(f"truncated or damaged: {reason_of(error)}")
                else:
                    parts += [part[: len(part) // 2], part[len(part) // 2 :]]
            else:
                yield from zip(part, shapes, strict=True)

    def _shapes(self, encoded: list[Encoded]) -> list[tuple[int, int]]:
        views = self._tensors([self._tensor(view) for view in encoded], contiguous=False)
        self._pipe.feed_input("encoded", views)
        self._pipe.schedule_run()
        shapes = self._pipe.outputs()[0].as_array()  # height, width, channels
        return [(int(height), int(width)) for height, width, _ in shapes]


def verify_images(
    samples: Sequence[Encoded], *, threads: int | None = None, max_pixels: int = MAX_PIXELS
) -> list[ImageFacts | Rejected]:
    """Facts of each image that decodes fully, else why not; in the order of `samples`.

    samples: uint8 of shape (bytes,) each. `ImageVerifier` saves building the decoder, some
    milliseconds, for each call. Raises ConfigError, MissingDependencyError; never for a bad sample.
    """
    with ImageVerifier(threads=threads, max_pixels=max_pixels) as verifier:
        return verifier(samples)


def _decoder(dali: Any, threads: int) -> Any:
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
        images = fn.decoders.image(encoded, output_type=types.RGB, adjust_orientation=True)
        pipe.set_outputs(images.shape())
    pipe.build()
    return pipe


def _read_header(sample: Encoded, max_pixels: int) -> _Header | Rejected:
    from nvidia import nvimgcodec

    if len(sample) < _SMALLEST_FILE_BYTES:
        return Rejected(f"not an image: {len(sample)} byte(s)" if len(sample) else "empty file")
    try:
        stream = nvimgcodec.CodeStream(sample)
        header = _Header(stream.height * stream.width, stream.num_channels, stream.codec_name)
        size = f"{stream.width} x {stream.height}"
    except (RuntimeError, ValueError):  # what nvImageCodec raises for bytes that it can't parse
        return Rejected("not an image of a format that DALI decodes")
    if not 1 <= header.pixels <= max_pixels:
        return Rejected(f"its header says {size} pixels; wanted 1 to {max_pixels:,} in all")
    return header


def _facts(shape: tuple[int, int], header: _Header) -> ImageFacts:
    height, width = shape
    return ImageFacts(height=height, width=width, channels=header.channels, codec=header.codec)
