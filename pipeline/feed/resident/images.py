"""Small datasets whose decoded images stay in memory: read, checked and decoded once a job.

The first time that a sample is read, the reading thread decodes the whole of it and copies the
pixels into one arena, on the device that the batches are for. From then on the sample comes without
bytes: no read, no CRC, no decode, and the graph is fed from the arena (`resident.graph`).

Why in the reading threads: there the batches ahead are decoded while the graph augments and the
training step runs, and nothing of the run changes. Why whole images, when the graph decodes windows
only: any later window must be in there, and resampled pixels would be other pixels. What this costs
and saves: docs/datasets.md.

What can't be kept (a damaged image of which only some windows decode, or one for which the arena
has no more room) is read and decoded in each epoch, as without an arena.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.augment.whole import WholeDecoder, resident_tensor
from penstock.cache.base.sizes import format_size
from penstock.pipeline.feed.resident.columns import NO_BYTES, KeptColumns
from penstock.pipeline.report.facts import ResidentFacts
from penstock.readers.fields.columns import EncodedColumn, SampleBatch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    import torch
    from numpy.typing import NDArray

    from penstock.augment.recipe import CheckedRecipe
    from penstock.readers.types import EncodedBatch

    Read = Callable[[NDArray[np.int64], dict[int, str]], SampleBatch]

_LOG = logging.getLogger("penstock")

_ABSENT, _REFUSED = -1, -2  # in place of where an image begins
# After so many batches that needed no decoding the decoder's threads and buffers are given back.
_IDLE_BATCHES = 64


class ResidentImages:
    """Keeps whole decoded images by sample id: reading threads fill it, one thread feeds from it.

    Nothing is allocated before the first image comes. On the CPU memory is taken as it fills.
    """

    def __init__(
        self,
        recipe: CheckedRecipe,
        *,
        image: str,
        samples: int,
        max_bytes: int,
        threads: int,
        device: torch.device,
        deterministic: bool,
    ) -> None:
        """image: the field. samples: above each id. max_bytes: of pixels; never passed. threads:
        that decode."""
        self._recipe, self._image = recipe, image
        self._samples, self._max_bytes, self._threads = samples, max_bytes, threads
        self._device, self._deterministic = device, deterministic
        self._channels = recipe.decode.channels
        self._filling = threading.Lock()
        self._decoder: WholeDecoder | None = None
        self._arena: Any = None
        self._stream: Any = None
        self._begin = np.full(samples, _ABSENT, np.int64)
        self._dims = np.zeros((samples, 2), np.int32)
        self._others = KeptColumns(samples=samples)
        self._wrapped: dict[int, Any] = {}  # on CUDA: wrapping anew costs more than keeping
        self._kept, self._used, self._fill_s = 0, 0, 0.0
        self._idle = 0
        self._is_full = self._closed = False

    def read(self, ids: NDArray[np.int64], bad: dict[int, str], read: Read) -> SampleBatch:
        """Samples by id; resident ones come without bytes, the others are read and then kept.

        read: gives encoded samples by ids and tells the rows of bad ones, as `bad` is told.
        Raises what read raises, and PenstockError if memory for decoding was short.
        """
        new = np.flatnonzero(self._begin[ids] < 0)
        if len(new) == len(ids):
            batch = read(ids, bad)
            self._fill(batch, bad)
            return batch
        part: SampleBatch | None = None
        if len(new):
            found: dict[int, str] = {}
            part = read(ids[new], found)
            bad.update({int(new[place]): why for place, why in found.items()})
            self._fill(part, found)
        else:
            self._rest()
        return self._joined(ids, new, part)

    def images(self, ids: NDArray[np.int64]) -> list[Any]:
        """What `Graph(resident=True)` takes, by sample id; None for what isn't here."""
        begins = self._begin[ids].tolist()
        if self._device.type == "cuda":
            return [self._wrapped.get(sample_id) for sample_id in ids.tolist()]
        arena, channels, images = self._arena, self._channels, list[Any]()
        for begin, (height, width) in zip(begins, self._dims[ids].tolist(), strict=True):
            if begin < 0:
                images.append(None)
                continue
            end = begin + height * width * channels
            images.append(arena[begin:end].reshape(height, width, channels))
        return images

    def facts(self, *, hits: int, bytes_memory: int) -> ResidentFacts:
        return ResidentFacts(
            samples=self._kept,
            size_bytes=self._used,
            max_bytes=self._max_bytes,
            fill_s=self._fill_s,
            hits=hits,
            bytes_memory=bytes_memory,
        )

    def close(self) -> None:
        """Give the memory back; a fill under way ends first. What feeds from here is closed."""
        with self._filling:
            self._closed = True
            self._begin[:] = _ABSENT
            self._decoder = self._arena = self._stream = None
            self._wrapped.clear()
            self._others = KeptColumns(samples=self._samples)  # a thread may be taking from that

    def _joined(
        self, ids: NDArray[np.int64], new: NDArray[np.int64], part: SampleBatch | None
    ) -> SampleBatch:
        """A batch of samples that are here, with those of part in the rows `new`."""
        columns, present = self._others.take(ids)
        columns[self._image] = EncodedColumn([NO_BYTES] * len(ids), self._dims[ids])
        batch = SampleBatch(ids=ids.copy(), columns=columns, present=present)
        return batch if part is None else batch.patched(new, part)

    def _fill(self, content: SampleBatch, bad: Iterable[int]) -> None:
        """Keep what was read, but for bad rows, what is here by now and what has no room."""
        batch, left_out = content.encoded(self._image), set(bad)
        present = content.present.get(self._image)
        if present is not None:
            left_out.update(np.flatnonzero(~present).tolist())
        with self._filling:
            if self._closed:
                return
            rows = self._admitted(batch, left_out)
            if not rows or not self._has_arena():
                return
            self._idle = 0
            began = time.perf_counter()
            decoder = self._decoder or self._make_decoder()
            self._decoder = None  # whatever interrupts us leaves it out of step
            try:
                self._decode(decoder, content, rows)
            finally:
                self._fill_s += time.perf_counter() - began
            self._decoder = decoder

    def _admitted(self, batch: EncodedBatch, left_out: set[int]) -> list[int]:
        """Rows to decode, each sample once, as far as there is room."""
        room = self._max_bytes - self._used
        begins, sizes = self._begin[batch.ids].tolist(), self.decoded_bytes(batch.dims).tolist()
        rows: dict[int, int] = {}
        for row, sample_id in enumerate(batch.ids.tolist()):
            if begins[row] != _ABSENT or row in left_out or sample_id in rows:
                continue
            if sizes[row] > room:
                self._tell_full()
                continue
            room -= sizes[row]
            rows[sample_id] = row
        return list(rows.values())

    def decoded_bytes(self, dims: NDArray[np.int32]) -> NDArray[np.int64]:
        """Bytes of images of these heights and widths, shape (n, 2); int64, shape (n,)."""
        sizes: NDArray[np.int64] = dims.astype(np.int64).prod(axis=1) * self._channels
        return sizes

    def _decode(self, decoder: WholeDecoder, content: SampleBatch, rows: list[int]) -> None:
        batch = content.encoded(self._image)
        pixels = [int(height) * int(width) for height, width in batch.dims[rows].tolist()]
        kept: set[int] = set()
        with self._on_stream():
            for run in decoder([batch.encoded[row] for row in rows], pixels):
                fitting = [
                    (rows[place], image)
                    for place, image in run
                    if tuple(image.shape) == (*batch.dims[rows[place]].tolist(), self._channels)
                ]
                self._others.keep(content, [row for row, _ in fitting], without=self._image)
                self._keep(batch, fitting)
                kept.update(row for row, _ in fitting)
        for row in rows:
            if row not in kept:
                self._begin[batch.ids[row]] = _REFUSED

    def _keep(self, batch: EncodedBatch, run: list[tuple[int, torch.Tensor]]) -> None:
        """Copy a run's images, by row, into the arena; then they are there for other threads."""
        begins: list[int] = []
        for _, image in run:
            begins.append(self._used)
            self._used += image.numel()
            self._copy(image, begins[-1])
        self._await_copies()
        for (row, image), begin in zip(run, begins, strict=True):
            sample_id = int(batch.ids[row])
            if self._device.type == "cuda":
                place = self._arena[begin : begin + image.numel()].view(image.shape)
                self._wrapped[sample_id] = resident_tensor(place)
            self._dims[sample_id] = batch.dims[row]
            self._begin[sample_id] = begin  # last: from here on other threads take it as there
        self._kept += len(run)

    def _copy(self, image: torch.Tensor, begin: int) -> None:
        end = begin + image.numel()
        if self._device.type == "cuda":
            self._arena[begin:end].view(image.shape).copy_(image, non_blocking=True)
        else:
            self._arena[begin:end] = image.numpy().reshape(-1)

    def _await_copies(self) -> None:
        """Once a run: its images go with the next one, and what feeds from the arena waits for
        nothing."""
        if self._device.type == "cuda":
            self._stream.synchronize()

    def _has_arena(self) -> bool:
        """Whether there is room; where there is no memory by now, the job goes on without."""
        import torch

        try:
            self._allocate()
        except (MemoryError, torch.OutOfMemoryError) as error:
            _LOG.warning(
                "resident: no %s of memory for decoded images (%s): none are kept",
                format_size(self._max_bytes),
                str(error).splitlines()[0] if str(error) else type(error).__name__,
            )
            self._max_bytes, self._is_full = 0, True
            return False
        return True

    def _allocate(self) -> None:
        if self._arena is not None:
            return
        if self._device.type == "cuda":
            import torch

            self._arena = torch.empty(self._max_bytes, dtype=torch.uint8, device=self._device)
            self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        else:
            self._arena = np.empty(self._max_bytes, np.uint8)

    def _make_decoder(self) -> WholeDecoder:
        device = self._device
        return WholeDecoder(
            self._recipe,
            threads=self._threads,
            device=device.type,
            device_id=device.index,
            deterministic=self._deterministic,
        )

    def _on_stream(self) -> Any:
        """What copies run on: a stream of our own, as this thread's may be the training step's."""
        if self._device.type != "cuda":
            return contextlib.nullcontext()
        import torch

        return torch.cuda.stream(self._stream)

    def _rest(self) -> None:
        """Count a batch that needed no decoding."""
        self._idle += 1
        if self._idle == _IDLE_BATCHES:
            with self._filling:
                self._decoder = None

    def _tell_full(self) -> None:
        if not self._is_full:
            self._is_full = True
            _LOG.info(
                "resident: the %s are full; what isn't there is decoded in each epoch",
                format_size(self._max_bytes),
            )
