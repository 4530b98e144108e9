"""Measure what slows a running loader from outside: a late GIL and costly images.

The reading threads sample the GIL and the images once a batch. A thread that releases the GIL for
a moment and takes it back sees whether another one keeps it: 0.1 ms of hardly any work, at most
every 10 ms. Some image headers of the first batches are parsed, which costs some microseconds
each, and then no more.
"""

from __future__ import annotations

import select
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.pipeline.report.run_facts import ImageFigures
    from penstock.readers import EncodedBatch

# Long enough for a thread that waits for the GIL to wake up and take it: after a shorter nap, or
# none, the GIL is back before it could (half of the tries against a loop of pure Python, measured).
_NAP_S = 50e-6
_EVERY_S = 0.01
# Later than this by the clock isn't the kernel's timer (0.06 ms) but somebody else's turn.
_LATE_S = 1e-3
_TRIES_KEPT = 256
_FEWEST_TRIES = 8
_MOST_IMAGES = 256
_IMAGES_A_BATCH = 8
# ImageNet's packs have a short side of 256 for crops of 224.
_PACK_PER_OUTPUT = 256 / 224


def _gil_s() -> float:
    """Seconds that it took to get the GIL back after a nap, waits for a core not among them."""
    queued_s, began = _queued_s(), time.perf_counter()
    select.select((), (), (), _NAP_S)
    took_s = time.perf_counter() - began - _NAP_S
    return took_s - (_queued_s() - queued_s)


def _queued_s() -> float:
    """How long this thread has waited for a core so far: proc(5), the second number of schedstat,
    in nanoseconds; always 0.0 where the kernel doesn't tell."""
    try:
        with open("/proc/thread-self/schedstat", "rb") as file:
            return int(file.read().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return 0.0


@dataclass(frozen=True, slots=True)
class _SeenImage:
    """What the header of one image says."""

    size_bytes: int
    height: int
    width: int
    progressive: bool


class ReadProbe:
    """What the reading threads of a run notice: several threads call sample(), one asks."""

    def __init__(self) -> None:
        self._late: deque[float] = deque(maxlen=_TRIES_KEPT)
        self._seen: deque[_SeenImage] = deque(maxlen=_MOST_IMAGES)
        self._due_s = 0.0

    def sample(self, batch: EncodedBatch | None = None) -> None:
        """Note a batch that was read; each reading thread calls this for its own."""
        now = time.perf_counter()
        if now >= self._due_s:
            self._due_s = now + _EVERY_S
            self._late.append(_gil_s())
        if batch is not None and len(self._seen) < _MOST_IMAGES:
            self._look_at(batch)

    def _look_at(self, batch: EncodedBatch) -> None:
        from penstock.readers.fields import is_progressive  # of the first batches alone

        for sample, (height, width) in zip(
            batch.encoded[:_IMAGES_A_BATCH], batch.dims[:_IMAGES_A_BATCH].tolist(), strict=True
        ):
            self._seen.append(_SeenImage(len(sample), height, width, is_progressive(sample)))

    def gil(self) -> tuple[float, float]:
        """Share of the latest tries to take the GIL that came late, and the mean seconds of those;
        (0.0, 0.0) before there are enough."""
        tries = list(self._late)
        late = [seconds for seconds in tries if seconds > _LATE_S]
        if len(tries) < _FEWEST_TRIES or not late:
            return 0.0, 0.0
        return len(late) / len(tries), sum(late) / len(late)

    def images(self, out: tuple[int, int]) -> ImageFigures | None:
        """What the images are like, for a recipe that hands out `out` (height, width); None where
        none was seen."""
        seen = [one for one in list(self._seen) if one.size_bytes and one.height]
        if not seen:
            return None
        from penstock.pipeline.report.run_facts import ImageFigures  # for statistics alone

        pack_short = round(min(out) * _PACK_PER_OUTPUT)
        pixels = [one.height * one.width for one in seen]
        shorts = [min(one.height, one.width) for one in seen]
        fewer = [
            n * min(1.0, pack_short / short) ** 2 for n, short in zip(pixels, shorts, strict=True)
        ]
        count = len(seen)
        return ImageFigures(
            seen=count,
            mean_bytes=sum(one.size_bytes for one in seen) / count,
            mean_pixels=sum(pixels) / count,
            progressive=sum(one.progressive for one in seen) / count,
            out_short=min(out),
            pack_short=pack_short,
            mean_short_pixels=sum(fewer) / count,
        )
