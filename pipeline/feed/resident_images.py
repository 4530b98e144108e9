"""Keep the decoded images of a small dataset in memory: read, check and decode each once per job.

When a sample is read for the first time, the reading thread decodes the whole image and copies the
pixels into an arena on the device of the batches. From then on the sample needs no read, no CRC and
no decoding: the graph is fed from the arena.

Reading threads decode because they work on later batches while the graph augments and the training
step runs. Images are kept as a whole, although the graph decodes only windows, because later
windows may be anywhere in them, and resampled pixels would change the results. docs/datasets.md
describes the costs and gains.

Images that can't be kept (a damaged one of which only some windows decode, or one for which the
arena has no room) are read and decoded in each epoch, as without an arena. `ResidentGraph`
therefore holds two graphs, because a DALI pipeline takes one kind of input: kept pixels or encoded
bytes. Nearly every batch is of one kind and passes through unchanged. The graph for bytes is built
when a sample first needs it, which is never in most jobs.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.augment import DecodedBatch, FullImageDecoder, Graph, GraphPlan, resident_tensor
from penstock.cache.base import format_size
from penstock.pipeline.report import ResidentFacts
from penstock.readers.fieldtypes import (
    DenseColumn,
    EncodedColumn,
    ListColumn,
    RaggedColumn,
    SampleBatch,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    import torch
    from numpy.typing import NDArray

    from penstock.augment import Draws
    from penstock.readers import EncodedBatch
    from penstock.readers.fieldtypes import Column

    Present = dict[str, NDArray[np.bool_]]
    Read = Callable[[NDArray[np.int64], dict[int, str]], SampleBatch]

NO_BYTES = np.empty(0, np.uint8)
"""The placeholder for the bytes of a resident sample, which aren't read."""
NO_BYTES.flags.writeable = False


class KeptColumns:
    """Columns of samples by id. One thread at a time may add samples; any thread may take them.

    Numbers of one shape are stored in arrays, and all else as copies sample by sample, because a
    view would keep its file or its batch alive.
    """

    def __init__(self, *, samples: int) -> None:
        """samples: larger than each id."""
        self._samples = samples
        self._dense: dict[str, NDArray[Any]] = {}
        self._single: dict[str, list[NDArray[Any] | None]] = {}
        self._dims: dict[str, NDArray[np.int32]] = {}
        self._like: dict[str, RaggedColumn] = {}
        self._present: dict[str, NDArray[np.bool_]] = {}

    def keep(self, content: SampleBatch, rows: Sequence[int], *, without: str) -> None:
        """Store these rows. without: the image field, which is stored elsewhere."""
        ids = content.ids[rows]
        for name, column in content.columns.items():
            if name != without:
                self._keep(name, column, rows, ids)
        for name, present in content.present.items():
            if name not in self._present:
                # Samples stored earlier came from a dataset in which no sample lacks this field.
                self._present[name] = np.ones(self._samples, np.bool_)
            self._present[name][ids] = present[rows]

    def _keep(self, name: str, column: Column, rows: Sequence[int], ids: NDArray[np.int64]) -> None:
        if isinstance(column, DenseColumn):
            values = column.values
            if name not in self._dense:
                self._dense[name] = np.zeros((self._samples, *values.shape[1:]), values.dtype)
            self._dense[name][ids] = values[rows]
            return
        kept = self._single.setdefault(name, [None] * self._samples)
        assert not isinstance(column, ListColumn), name  # decoded: behind what is kept
        if isinstance(column, RaggedColumn):
            self._like.setdefault(name, column.take([]))
            samples = [column.sample(row) for row in rows]
        else:
            samples = [column.samples[row] for row in rows]
            if column.dims is not None:
                if name not in self._dims:
                    self._dims[name] = np.zeros((self._samples, 2), np.int32)
                self._dims[name][ids] = column.dims[rows]
        for sample_id, sample in zip(ids.tolist(), samples, strict=True):
            kept[sample_id] = sample.copy()

    def take(
        self, ids: NDArray[np.int64]
    ) -> tuple[dict[str, Column], dict[str, NDArray[np.bool_]]]:
        """Return the columns of samples, and masks of fields that some samples lack.

        A sample that isn't stored has empty values.
        """
        columns: dict[str, Column] = {
            name: DenseColumn(values[ids]) for name, values in self._dense.items()
        }
        for name, kept in self._single.items():
            found = [kept[sample_id] for sample_id in ids.tolist()]
            like, dims = self._like.get(name), self._dims.get(name)
            if like is None:
                samples = [NO_BYTES if each is None else each for each in found]
                columns[name] = EncodedColumn(samples, None if dims is None else dims[ids])
            else:
                samples = [like.nothing if each is None else each for each in found]
                columns[name] = RaggedColumn.of(samples, like=like)
        return columns, {name: present[ids] for name, present in self._present.items()}


_LOG = logging.getLogger("penstock")

_ABSENT, _REFUSED = -1, -2  # instead of an image's offset


class ResidentImages:
    """Whole decoded images by sample id. Reading threads fill it, and one thread feeds from it.

    Nothing is allocated before the first image. On the CPU, memory is used as it is filled.
    idle_batches: after so many batches without decoding, the decoder is released.
    """

    idle_batches = 64

    def __init__(self, plan: GraphPlan, *, image: str, samples: int, max_bytes: int) -> None:
        """plan: of the decoder. image: the field. samples: larger than each id. max_bytes: the
        limit for pixels."""
        self._plan, self._image = plan, image
        self._samples, self._max_bytes = samples, max_bytes
        self._channels = plan.recipe.decode.channels
        self._filling = threading.Lock()
        self._decoder: FullImageDecoder | None = None
        self._arena: Any = None
        self._stream: Any = None
        self._begin = np.full(samples, _ABSENT, np.int64)
        self._dims = np.zeros((samples, 2), np.int32)
        self._others = KeptColumns(samples=samples)
        self._wrapped: dict[int, Any] = {}  # on CUDA, because wrapping again is expensive
        self._kept, self._used, self._fill_s = 0, 0, 0.0
        self._idle = self._hits = self._hit_bytes = 0
        self._is_full = self._closed = False

    def read(self, ids: NDArray[np.int64], bad: dict[int, str], read: Read) -> SampleBatch:
        """Return samples by id; resident ones without bytes, the others are read and stored.

        read: returns encoded samples by ids, and adds the rows of bad ones to its argument. bad:
        gets the rows of bad samples, with reasons. Raises the errors of `read`, and PenstockError
        if memory for decoding is short.
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
            self._count_idle()
        columns, present = self._others.take(ids)
        columns[self._image] = EncodedColumn([NO_BYTES] * len(ids), self._dims[ids])
        batch = SampleBatch(ids=ids.copy(), columns=columns, present=present)
        return batch if part is None else batch.patched(new, part)

    def images(self, ids: NDArray[np.int64]) -> list[Any]:
        """Return images by sample id for a graph with resident=True; None for absent ones."""
        begins = self._begin[ids].tolist()
        if self._plan.is_cuda:
            return [self._wrapped.get(sample_id) for sample_id in ids.tolist()]
        arena, channels, images = self._arena, self._channels, list[Any]()
        for begin, (height, width) in zip(begins, self._dims[ids].tolist(), strict=True):
            if begin < 0:
                images.append(None)
                continue
            end = begin + height * width * channels
            images.append(arena[begin:end].reshape(height, width, channels))
        return images

    def count_hits(self, count: int, size_bytes: int) -> None:
        """Count samples that were fed from memory, and the bytes of their images."""
        self._hits += count
        self._hit_bytes += size_bytes

    def facts(self) -> ResidentFacts:
        """Return what is kept, and what was fed from memory so far."""
        return ResidentFacts(
            samples=self._kept,
            size_bytes=self._used,
            max_bytes=self._max_bytes,
            fill_s=self._fill_s,
            hits=self._hits,
            bytes_memory=self._hit_bytes,
        )

    def close(self) -> None:
        """Release the memory after a running fill has ended. Close the graphs first."""
        with self._filling:
            self._closed = True
            self._begin[:] = _ABSENT
            self._decoder = self._arena = self._stream = None
            self._wrapped.clear()
            self._others = KeptColumns(samples=self._samples)  # a thread may still use the old one

    def _fill(self, content: SampleBatch, bad: Iterable[int]) -> None:
        """Decode and store samples, except bad rows, resident ones and those without room."""
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
            decoder = self._decoder or FullImageDecoder(self._plan)
            self._decoder = None  # an interrupt leaves the decoder in an undefined state
            try:
                self._decode(decoder, content, rows)
            finally:
                self._fill_s += time.perf_counter() - began
            self._decoder = decoder

    def _admitted(self, batch: EncodedBatch, left_out: set[int]) -> list[int]:
        """Return the rows to decode, each sample once, as far as there is room."""
        room = self._max_bytes - self._used
        begins, sizes = self._begin[batch.ids].tolist(), self.decoded_bytes(batch.dims).tolist()
        rows: dict[int, int] = {}
        for row, sample_id in enumerate(batch.ids.tolist()):
            if begins[row] != _ABSENT or row in left_out or sample_id in rows:
                continue
            if sizes[row] > room:
                if not self._is_full:
                    self._is_full = True
                    _LOG.info(
                        "resident: the %s are full; other images are decoded in each epoch",
                        format_size(self._max_bytes),
                    )
                continue
            room -= sizes[row]
            rows[sample_id] = row
        return list(rows.values())

    def decoded_bytes(self, dims: NDArray[np.int32]) -> NDArray[np.int64]:
        """Return the bytes of images, int64, shape (n,). dims: heights and widths, shape (n, 2)."""
        sizes: NDArray[np.int64] = dims.astype(np.int64).prod(axis=1) * self._channels
        return sizes

    def _decode(self, decoder: FullImageDecoder, content: SampleBatch, rows: list[int]) -> None:
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
        """Copy a run's images, by row, into the arena, where other threads then find them."""
        begins: list[int] = []
        for _, image in run:
            begins.append(self._used)
            self._used += image.numel()
            part = self._arena[begins[-1] : self._used]
            if self._plan.is_cuda:
                part.view(image.shape).copy_(image, non_blocking=True)
            else:
                part[:] = image.numpy().reshape(-1)
        if self._plan.is_cuda:
            # The next run reuses the images' memory, and graphs read the arena without waiting.
            self._stream.synchronize()
        for (row, image), begin in zip(run, begins, strict=True):
            sample_id = int(batch.ids[row])
            if self._plan.is_cuda:
                part = self._arena[begin : begin + image.numel()].view(image.shape)
                self._wrapped[sample_id] = resident_tensor(part)
            self._dims[sample_id] = batch.dims[row]
            self._begin[sample_id] = begin  # last, because other threads may read it from now on
        self._kept += len(run)

    def _has_arena(self) -> bool:
        """Allocate the arena if necessary; return False if there isn't enough memory any more."""
        if self._arena is not None:
            return True
        import torch

        try:
            if self._plan.is_cuda:
                device = f"cuda:{self._plan.device_id}"
                self._arena = torch.empty(self._max_bytes, dtype=torch.uint8, device=device)
                self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            else:
                self._arena = np.empty(self._max_bytes, np.uint8)
        except (MemoryError, torch.OutOfMemoryError) as error:
            _LOG.warning(
                "resident: %s of memory for decoded images can't be allocated (%s): none are kept",
                format_size(self._max_bytes),
                str(error).splitlines()[0] if str(error) else type(error).__name__,
            )
            self._max_bytes, self._is_full = 0, True
            return False
        return True

    def _on_stream(self) -> Any:
        """Make a stream of our own current; the thread's may be the training step's."""
        if not self._plan.is_cuda:
            return contextlib.nullcontext()
        import torch

        return torch.cuda.stream(self._stream)

    def _count_idle(self) -> None:
        """Count a batch that needed no decoding."""
        self._idle += 1
        if self._idle == self.idle_batches:
            with self._filling:
                self._decoder = None


class ResidentGraph:
    """A Graph for batches whose images may be in memory. One thread may call it."""

    def __init__(self, images: ResidentImages, plan: GraphPlan) -> None:
        """plan: of a graph for encoded samples."""
        self._images, self._plan = images, plan
        self._from_memory = Graph(replace(plan, pixels=True, resident=True))
        self._from_bytes: Graph | None = None
        # The number of samples of each batch that was fed, and the rows that each graph got.
        self._batches: deque[tuple[int, list[tuple[Graph, list[int]]]]] = deque()

    def feed(
        self, batch: EncodedBatch, draws: Draws, *, bad: Mapping[int, str] | None = None
    ) -> None:
        """Feed a batch, as `Graph.feed` does."""
        marks = dict(bad or {})
        shares = self._by_graph(batch, draws, marks)
        for graph, rows, part, few in shares:
            known = {place: marks[row] for place, row in enumerate(rows) if row in marks}
            graph.feed(part, few, bad=known)
        self._batches.append((len(batch.ids), [(graph, rows) for graph, rows, _, _ in shares]))

    def _by_graph(
        self, batch: EncodedBatch, draws: Draws, marks: Mapping[int, str]
    ) -> list[tuple[Graph, list[int], EncodedBatch, Draws]]:
        """Divide a batch among the graphs. Bad rows aren't decoded and go with resident ones."""
        images = self._images.images(batch.ids)
        missing = [row for row, image in enumerate(images) if image is None and row not in marks]
        others = set(missing)
        resident = [row for row in range(len(images)) if row not in others]
        hits = [row for row in resident if row not in marks and not len(batch.encoded[row])]
        size_bytes = int(self._images.decoded_bytes(batch.dims[hits]).sum())
        self._images.count_hits(len(hits), size_bytes)
        shares = []
        if resident or not missing:
            encoded = [NO_BYTES if images[row] is None else images[row] for row in resident]
            shares.append((self._from_memory, resident, *_part(batch, draws, resident, encoded)))
        if missing:
            self._from_bytes = self._from_bytes or Graph(self._plan)
            encoded = [batch.encoded[row] for row in missing]
            shares.append((self._from_bytes, missing, *_part(batch, draws, missing, encoded)))
        return shares

    def outputs_marked(self) -> DecodedBatch:
        """Wait for the oldest batch, as `Graph.outputs_marked` does. If one graph raises, the other
        may be a batch ahead of it; call drain() before the next batch."""
        samples, fed = self._batches.popleft()
        return _joined(samples, [(rows, graph.outputs_marked()) for graph, rows in fed])

    def decode(self, batch: EncodedBatch, draws: Draws) -> DecodedBatch:
        """Decode samples at once, as `Graph.decode` does."""
        shares = self._by_graph(batch, draws, {})
        decoded = [(rows, graph.decode(part, few)) for graph, rows, part, few in shares]
        return _joined(len(batch.ids), decoded)

    @property
    def _graphs(self) -> list[Graph]:
        return [each for each in (self._from_memory, self._from_bytes) if each is not None]

    def drain(self) -> None:
        """Drop the batches in flight."""
        self._batches.clear()
        for graph in self._graphs:
            graph.drain()

    def close(self) -> None:
        """Release the graphs, then the memory that they were fed from."""
        self._batches.clear()
        try:
            for graph in self._graphs:
                graph.close()
        finally:
            self._images.close()


def _part(
    batch: EncodedBatch, draws: Draws, rows: list[int], encoded: list[Any]
) -> tuple[EncodedBatch, Draws]:
    """Return the samples of some rows with these bytes or pixels, and their draws."""
    if len(rows) == len(batch.ids):
        return replace(batch, encoded=encoded), draws
    few = {name: values[rows] for name, values in draws.items()}
    return replace(batch, ids=batch.ids[rows], encoded=encoded, dims=batch.dims[rows]), few


def _joined(samples: int, shares: list[tuple[list[int], DecodedBatch]]) -> DecodedBatch:
    """Join the shares of a batch."""
    if len(shares) == 1:
        return shares[0][1]
    first: torch.Tensor = shares[0][1].images
    images = first.new_empty((samples, *first.shape[1:]))
    bad: dict[int, str] = {}
    for rows, decoded in shares:
        images[rows] = decoded.images
        bad |= {rows[place]: why for place, why in decoded.bad.items()}
    if images.is_cuda:
        import torch

        # The graphs may free the memory that the copies read as soon as this returns.
        torch.cuda.current_stream(images.device).synchronize()
    return DecodedBatch(images, bad)
